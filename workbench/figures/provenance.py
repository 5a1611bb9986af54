"""What a figure's numbers depend on, for its footer and for the files it is saved as."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tracing.trace import Trace
from tracing.void_words import void_word
from workbench.documents import jsonable
from workbench.repeats import shared

UNKNOWN = "unknown"


def config_hash(config: Mapping[str, Any]) -> str:
    """The first 12 digits of the SHA-256 of a configuration as canonical JSON: sorted keys, no spaces."""
    text = json.dumps(jsonable(config), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSource:
    """Where one run's numbers are from."""

    name: str
    model: str
    config_hash: str
    commit: str
    hardware: str
    seed: str
    clock: str
    delays: str
    """Work made longer on purpose; empty: none."""
    num_iterations: int
    num_void: int
    void_reasons: Mapping[str, int]
    """Void iterations by reason."""

    @classmethod
    def of(cls, trace: Trace) -> RunSource:
        """What a trace says of itself; ``unknown`` where it says nothing."""
        records = trace.records.iterations
        void = [record for record in records if record.is_void]
        return cls(
            name=trace.name,
            model=_told(trace.config.get("model")),
            config_hash=config_hash(trace.config) if trace.config else UNKNOWN,
            commit=_told(trace.environment.get("commit")),
            hardware=hardware_of(trace),
            seed=_told(trace.config.get("seed")),
            clock=_told(trace.workload.get("clock")),
            delays=_delays_text(trace.environment.get("delays_s") or {}),
            num_iterations=len(records),
            num_void=len(void),
            void_reasons=dict(Counter(reason for record in void for reason in record.void_reasons).most_common()),
        )

    @property
    def void_text(self) -> str:
        """``12 of 300 (12 × slowed down by pace_s)``."""
        reasons = ", ".join(f"{count} × {void_word(reason)}" for reason, count in self.void_reasons.items())
        return f"{self.num_void:,} of {self.num_iterations:,}" + (f" ({reasons})" if reasons else "")


def hardware_of(trace: Trace) -> str:
    """The GPU, where the run used one, and the processor with its cores."""
    facts = trace.environment
    cores = facts.get("cores")
    gpu = facts.get("gpu") if trace.config.get("device") == "cuda" else None
    cpu = facts.get("cpu")
    processor = f"{cpu}, {cores} cores" if cpu and cores else cpu
    return " + ".join(str(part) for part in (gpu, processor) if part) or UNKNOWN


@dataclass(frozen=True, slots=True)
class Provenance:
    """Of all runs of a figure."""

    runs: tuple[RunSource, ...]

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> Provenance:
        """One entry a trace."""
        return cls(tuple(map(RunSource.of, traces)))

    @property
    def parts(self) -> list[str]:
        """What the footer says, each with its name; said once where all runs agree."""
        has_clock = any(run.clock != UNKNOWN for run in self.runs)
        has_delays = any(run.delays for run in self.runs)
        return [
            f"model {self._shared(lambda run: run.model)}",
            f"config {self._shared(lambda run: run.config_hash)}",
            f"commit {self._shared(lambda run: run.commit)}",
            f"hardware {self._shared(lambda run: run.hardware)}",
            f"seed {self._shared(lambda run: run.seed)}",
            *([f"clock {self._shared(lambda run: run.clock)}"] if has_clock else []),
            *([f"injected delays {self._shared(lambda run: run.delays or 'none')}"] if has_delays else []),
            f"void iterations left out: {self._shared(lambda run: run.void_text)}",
        ]

    @property
    def text(self) -> str:
        """The footer in one line."""
        return " · ".join(self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, by run."""
        return {run.name: asdict(run) for run in self.runs}

    def _shared(self, get: Callable[[RunSource], str]) -> str:
        return shared({run.name: get(run) for run in self.runs})


def _delays_text(delays_s: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * delay_s:g} ms" for name, delay_s in delays_s.items())


def _told(value: object) -> str:
    return UNKNOWN if value is None else str(value)
