"""Saved runs side by side: the table of a comparison, if what they ran on was the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any

from tracing.summary import Summary
from tracing.trace import Trace
from workbench.saved_runs import load_run
from workbench.side_by_side import SideBySide

_HARDWARE = ("system", "cpu", "cores", "gpu")
"""Facts of an environment; the device that was used is hardware as well."""
_SETTLED_BY_THE_MODEL = ("model", "dtype", "attention_backend")
"""Options without which a model is another one, or computes something else."""


class ComparisonError(ValueError):
    """Runs cannot be compared; one line that says what differs."""


@dataclass(frozen=True, repr=False)
class SavedComparison(SideBySide):
    """Runs that were saved, by leg and repeat."""

    legs: tuple[tuple[Trace, ...], ...]
    """Of each leg its repeats, in order; all have its name."""

    @cached_property
    def summaries(self) -> tuple[tuple[Summary, ...], ...]:
        """One a leg and repeat."""
        return tuple(tuple(trace.summary for trace in leg) for leg in self.legs)

    @cached_property
    def traces(self) -> tuple[Trace, ...]:
        """One a leg: of several repeats the one of median throughput."""
        return tuple(map(_median_trace, self.legs))

    @property
    def conditions(self) -> list[str]:
        """Sentences on what was the same for all legs."""
        first = self.legs[0][0]
        clock = first.workload.get("clock")
        same = [f"model {first.config.get('model')}", f"clock {clock}" if clock else "", *_hardware_texts(first)]
        return [f"The same for all runs: {'; '.join(part for part in same if part)}."]

    @cached_property
    def differing(self) -> list[str]:
        """Requests whose ids or ends are not the same in all runs that kept their outputs."""
        runs = [{output["request_id"]: output for output in trace.outputs} for leg in self.legs for trace in leg]
        kept = [run for run in runs if run]
        names = dict.fromkeys(name for run in kept for name in run)
        return [name for name in names if len({_ending(run.get(name)) for run in kept}) > 1]

    @property
    def verdict_text(self) -> str:
        """One line on the outputs."""
        count = len({output["request_id"] for leg in self.legs for trace in leg for output in trace.outputs})
        if not count:
            return "these runs kept no outputs"
        silent = sum(1 for leg in self.legs for trace in leg if not trace.outputs)
        if not self.differing:
            kept = f", of which {silent} kept no outputs" if silent else ""
            return f"ids and ends of {count} requests are equal in all runs{kept}"
        return (
            f"ids or ends of {len(self.differing)} of {count} requests differ; whether rounding explains it takes the "
            "model: workbench compare"
        )

    @property
    def verdict_lines(self) -> list[str]:
        """One a request whose outputs are not equal."""
        return [f"{name} differs" for name in self.differing]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; each metric with every repeat's number."""
        return {
            "command": "compare_saved",
            "repeats": self.repeats,
            "legs": [{"name": leg[0].name, "config": dict(leg[0].config)} for leg in self.legs],
            "metrics": [row.to_dict(self.names) for row in self.rows],
            "notes": self.notes,
            "differing": self.differing,
        }


def compare_saved(runs: Sequence[str | Path | Trace]) -> SavedComparison:
    """Put saved runs side by side; the first one's leg is the baseline.

    Args:
        runs: Folders of :func:`workbench.saved_runs.save_runs` or ``session.save``, or traces. Runs of one name are
            repeats of a leg; the first repeat of each leg is a pair with the first of the others, and so on.

    Raises:
        ComparisonError: there are none, legs have different numbers of repeats, or model, workload, clock or hardware
            are not the same.
        RunFolderError: a folder cannot be read.
    """
    traces = [run if isinstance(run, Trace) else load_run(run) for run in runs]
    legs: dict[str, list[Trace]] = {}
    for trace in traces:
        legs.setdefault(trace.name, []).append(trace)
    if not legs:
        raise ComparisonError("a comparison takes at least one run, got none")
    if len({len(leg) for leg in legs.values()}) > 1:
        counts = ", ".join(f"{name} {len(leg)}" for name, leg in legs.items())
        raise ComparisonError(f"every leg needs as many runs as the others, to be paired; there are {counts}")
    reasons = why_not_comparable(traces)
    if reasons:
        raise ComparisonError(
            f"{'; '.join(reasons)}: their times do not compare. workbench report shows them all the same"
        )
    return SavedComparison(tuple(tuple(leg) for leg in legs.values()))


def why_not_comparable(traces: Sequence[Trace]) -> list[str]:
    """What differs among the runs that must not, in words; empty: they compare."""
    reasons = []
    for what, of in _MUST_AGREE.items():
        texts = dict.fromkeys(of(trace) for trace in traces)
        if len(texts) > 1:
            reasons.append(f"runs of different {what}: {' and '.join(texts)}")
    if len({_asked(trace) for trace in traces if trace.outputs}) > 1:
        reasons.append("runs of different requests, sampling parameters or arrivals")
    reasons += [
        f"{trace.name} lacks its first {trace.lost_iterations} iterations" for trace in traces if trace.lost_iterations
    ]
    reasons += [f"{trace.name} has requests that had not ended" for trace in traces if _is_unfinished(trace)]
    if len({id(trace) for trace in traces}) < len(traces):
        reasons.append("one run given twice")
    return reasons


def _model_text(trace: Trace) -> str:
    return " ".join(str(trace.config.get(name)) for name in _SETTLED_BY_THE_MODEL)


def _clock_text(trace: Trace) -> str:
    return str(trace.workload.get("clock", "unknown"))


def _hardware_text(trace: Trace) -> str:
    return ", ".join(_hardware_texts(trace)) or "unknown"


def _hardware_texts(trace: Trace) -> list[str]:
    facts: Mapping[str, Any] = {**trace.environment, "device": trace.config.get("device")}
    return [f"{name} {facts[name]}" for name in ("device", *_HARDWARE) if facts.get(name) is not None]


def _delays_text(trace: Trace) -> str:
    delays = {**trace.environment.get("delays_s", {}), "each forward": trace.config.get("op_sleep_s") or 0.0}
    return ", ".join(f"{name} {seconds:g} s" for name, seconds in delays.items() if seconds) or "none"


_MUST_AGREE: dict[str, Callable[[Trace], str]] = {
    "models": _model_text,
    "clocks": _clock_text,
    "hardware": _hardware_text,
    "injected delays": _delays_text,
}


def _is_unfinished(trace: Trace) -> bool:
    return any(output.get("finish_reason") is None for output in trace.outputs)


def _asked(trace: Trace) -> frozenset[tuple[str, tuple[int, ...], str]]:
    return frozenset(
        (output["request_id"], tuple(output["prompt_token_ids"]), json.dumps(output.get("asked"), sort_keys=True))
        for output in trace.outputs
    )


def _ending(output: Mapping[str, Any] | None) -> tuple[tuple[int, ...], object, object] | None:
    if output is None:
        return None
    return tuple(output["output_token_ids"]), output.get("finish_reason"), output.get("stop_reason")


def _median_trace(leg: Sequence[Trace]) -> Trace:
    speeds = [trace.summary.tokens_per_s or 0.0 for trace in leg]
    return leg[speeds.index(median_low(speeds))]
