"""What is done to the rows of a trace before they are requests: excerpt, lengths, arrivals."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from workbench.workloads.columns import Record
from workbench.workloads.workload import WorkloadError

_LOWEST = {"first": 0, "requests": 1, "max_input": 1, "max_output": 1, "max_length": 2, "shrink": 1, "concurrency": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shaping:
    """Nothing is changed by default.

    Raises:
        WorkloadError: a value is out of its range, or two exclude each other.
    """

    first: int = 0
    """Rows passed over at the start."""
    requests: int | None = None
    """The most requests made of the rows behind them; rows that are left out do not count. None: of all."""
    shrink: int = 1
    """Divides prompt and output lengths, rounded up, and the tokens of a prefix id, which must come out whole: a small
    engine then sees the same sharing."""
    max_input: int | None = None
    """Longer prompts lose their end, tokens."""
    max_output: int | None = None
    """Longer outputs end there, tokens."""
    max_length: int | None = None
    """Prompt and output together: of what exceeds it, the part above half of it gives way, or both parts."""
    spread: float = 0.0
    """Each arrival comes later by up to so much, drawn evenly, in the workload's unit: takes traces off their grid."""
    scale: float = 1.0
    """Multiplies arrivals: 0.1 is ten times the load."""
    rate: float | None = None
    """Poisson arrivals of so many requests a second, instead of the trace's."""
    concurrency: int | None = None
    """Closed loop of so many, instead of the trace's arrivals."""
    seed: int = 0
    """Of prompts, drawn arrivals and spread."""

    def __post_init__(self) -> None:
        for name, low in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise WorkloadError(f"{name} must be at least {low}, got {value}")
        for name in ("scale", "rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise WorkloadError(f"{name} must be above 0 and finite, got {value}")
        if not 0 <= self.spread < math.inf:
            raise WorkloadError(f"spread must be at least 0 and finite, got {self.spread}")
        if self.rate is not None and self.concurrency is not None:
            raise WorkloadError("rate= is an open loop and concurrency= a closed one: leave one out")
        if self.replaces_arrivals and self.changes_arrivals:
            raise WorkloadError("scale= and spread= change a trace's arrivals, which rate= and concurrency= replace")

    @property
    def changes_arrivals(self) -> bool:
        """Whether it needs arrivals."""
        return self.scale != 1 or self.spread != 0

    @property
    def replaces_arrivals(self) -> bool:
        """Whether it does without the trace's."""
        return self.rate is not None or self.concurrency is not None

    def arrivals(self, records: Sequence[Record]) -> list[float]:
        """When each arrives, the first at 0; drawn ones come in the records' order."""
        if self.concurrency is not None:
            return [0.0] * len(records)
        if self.rate is not None:
            return poisson_arrivals(len(records), self.rate, self.seed)
        times = [record.arrival + self._delay(record) for record in records]
        start = min(times, default=0.0)
        return [(time - start) * self.scale for time in times]

    def _delay(self, record: Record) -> float:
        return self.spread * random.Random(f"spread {self.seed} {record.number}").random() if self.spread else 0.0


SHAPING_KEYS = tuple(one.name for one in fields(Shaping))


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Rising moments, seconds, with exponential gaps of ``1 / rate`` on average."""
    draws, now, arrivals = random.Random(f"arrivals {seed}"), 0.0, []
    for _ in range(count):
        now += draws.expovariate(rate)
        arrivals.append(now)
    return arrivals


class Lengths(NamedTuple):
    """Of one request, tokens."""

    input: int
    output: int


class LengthCutter:
    """Makes lengths fit, and counts what it cut."""

    def __init__(self, shaping: Shaping) -> None:
        self._shaping = shaping
        self._total = 0
        self._cut: dict[str, tuple[int, int]] = {}
        """Requests and tokens by what was cut and why."""

    def fit(self, input: int, output: int) -> Lengths:
        """The lengths that a request gets."""
        shaping = self._shaping
        input, output = -(-input // shaping.shrink), -(-output // shaping.shrink)
        self._total += 1
        if shaping.max_input is not None:
            input = self._at_most(input, shaping.max_input, f"prompts were cut to max_input={shaping.max_input}")
        if shaping.max_output is not None:
            output = self._at_most(output, shaping.max_output, f"outputs were cut to max_output={shaping.max_output}")
        limit = shaping.max_length
        if limit is not None and input + output > limit:
            why, half = f"were cut to max_length={limit}", limit // 2
            kept = min(output, max(half, limit - input))
            input = self._at_most(input, limit - kept, f"prompts {why}")
            output = self._at_most(output, kept, f"outputs {why}")
        return Lengths(input, output)

    def _at_most(self, length: int, limit: int, why: str) -> int:
        if length <= limit:
            return length
        count, tokens = self._cut.get(why, (0, 0))
        self._cut[why] = (count + 1, tokens + length - limit)
        return limit

    @property
    def notes(self) -> list[str]:
        """One line a cut."""
        return [f"{count} of {self._total} {why}: {tokens:,} tokens less" for why, (count, tokens) in self._cut.items()]
