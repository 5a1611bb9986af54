"""A decode cell, and what async made of its legacy twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from workbench.bench.breakdown import Breakdown
from workbench.bench.results import Leg


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCell:
    """One batch in one leg."""

    batch: int
    tpot_ms: float
    """By difference."""
    prefill_ms: float
    """From the call to the first token of every row."""
    tokens_per_s: float
    """Of output, prefill included."""
    floor_ms: float
    breakdown: Breakdown
    """Of the steady iterations."""
    lost_iterations: int
    """Without a record, because the recorder's ring was full."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the breakdown's beside the others."""
        own = ("tpot_ms", "prefill_ms", "tokens_per_s", "floor_ms", "lost_iterations")
        return {**{name: getattr(self, name) for name in own}, **self.breakdown.to_dict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Async beside legacy, same batch and graphs; docs/metrics.md defines each. None where a time is missing."""

    batch: int
    gain: float | None
    predicted_gain: float | None
    step_over_longer: float | None
    hidden_of_legacy: float | None

    @classmethod
    def of(cls, legacy: DecodeCell, overlapped: DecodeCell) -> Pair:
        """The four numbers."""
        before, after = legacy.breakdown, overlapped.breakdown
        longer = total = None
        if before.host_sum_us is not None and before.device_sum_ms is not None:
            parts = (before.host_sum_us / 1e3, before.device_sum_ms)
            longer, total = max(parts), sum(parts)
        exposed = _ratio(after.exposed_us, before.exposed_us)
        return cls(
            batch=legacy.batch,
            gain=_ratio(before.step_ms, after.step_ms),
            predicted_gain=_ratio(total, longer),
            step_over_longer=_ratio(after.step_ms, longer),
            hidden_of_legacy=None if exposed is None else 1 - exposed,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def pairs_of(cells: Sequence[tuple[Leg, DecodeCell]]) -> list[tuple[Leg, Pair]]:
    """Each async cell that has a legacy twin, with its leg."""
    legacy = {(leg.graphs, one.batch): one for leg, one in cells if leg.mode == "legacy"}
    return [
        (leg, Pair.of(legacy[leg.graphs, one.batch], one))
        for leg, one in cells
        if leg.mode == "async" and (leg.graphs, one.batch) in legacy
    ]


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None
