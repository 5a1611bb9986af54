"""Where the time of an iteration went, as decode and mix tell it: a few numbers out of a summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tracing.analysis import summarise
from tracing.records import COMPUTE_LANE, IterationRecord, Span
from tracing.summary import Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """docs/metrics.md defines each; None without samples."""

    num_iterations: int
    """Timed ones, that the rest is of."""
    step_ms: float | None
    """Median."""
    device_ms: Mapping[str, float]
    """Compute work of decode batches by name, medians."""
    host_us: Mapping[str, float]
    """Host work by phase, waits taken out; medians over the iterations that had the phase."""
    exposed_us: float | None
    """Host work while the device computed nothing, mean."""
    hidden_share: float | None
    busy_share: float | None
    """1 − bubble share."""
    graph_hit_rate: float | None

    @classmethod
    def of(cls, summary: Summary) -> Breakdown:
        """Out of a summary."""
        host, bubbles = summary.host, summary.device.bubble_share
        exposed_ns = host.exposed_ns if summary.num_timed else None
        return cls(
            num_iterations=summary.num_timed,
            step_ms=None if summary.step is None else summary.step.p50_ns / 1e6,
            device_ms={
                phase.name: phase.time.p50_ns / 1e6
                for phase in summary.device.phases
                if phase.lane == COMPUTE_LANE and phase.batch == "decode"
            },
            host_us={phase.name: phase.host.p50_ns / 1e3 for phase in host.phases},
            exposed_us=None if exposed_ns is None else exposed_ns / summary.num_timed / 1e3,
            hidden_share=host.hidden_share,
            busy_share=None if bubbles is None else 1 - bubbles,
            graph_hit_rate=summary.graphs.hit_rate,
        )

    @property
    def host_sum_us(self) -> float | None:
        """All phases of a step."""
        return sum(self.host_us.values()) if self.host_us else None

    @property
    def device_sum_ms(self) -> float | None:
        """All compute work of a step."""
        return sum(self.device_ms.values()) if self.device_ms else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, sums included."""
        return {**asdict(self), "host_sum_us": self.host_sum_us, "device_sum_ms": self.device_sum_ms}


def steady_summary(spans: Sequence[Span], iterations: Sequence[IterationRecord]) -> Summary:
    """Of the steady iterations alone: decode rows consumed and decode rows launched. Wait for the device before."""
    return summarise(spans, [record for record in iterations if _is_steady(record)])


def _is_steady(record: IterationRecord) -> bool:
    launched, consumed = record.launched, record.consumed
    return launched is not None and consumed is not None and launched.kind == consumed.kind == "decode"
