"""What :func:`tracing.analysis.summarise` finds. ``docs/metrics.md`` defines every number.

A number that has no samples is None, never 0: JSON ``null``, printed as ``no samples``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tracing.blame_totals import BlameTotals


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A set of durations in nanoseconds. Percentiles interpolate linearly between neighbours."""

    count: int
    total_ns: float
    mean_ns: float
    p50_ns: float
    p90_ns: float
    p99_ns: float
    max_ns: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread | None:
        """The spread of ``samples``; None without any."""
        values = np.sort(np.fromiter(samples, dtype=np.float64))  # sorted: any order sums to the same last bit
        if not values.size:
            return None
        p50, p90, p99 = (float(p) for p in np.percentile(values, (50, 90, 99)))
        return cls(
            count=int(values.size),
            total_ns=float(values.sum()),
            mean_ns=float(values.mean()),
            p50_ns=p50,
            p90_ns=p90,
            p99_ns=p99,
            max_ns=float(values.max()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationTimes:
    """Where one iteration's wall time went; nanoseconds. ``host_ns + wait_ns + other_ns == duration_ns``."""

    iteration: int
    order: str
    duration_ns: int
    host_ns: int
    """Work in phases, waits taken out."""
    wait_ns: int
    """Blocked on the device, inside phases."""
    other_ns: int
    """Outside every phase."""
    hidden_ns: int
    """The part of ``host_ns`` during which the device computed."""
    exposed_ns: int
    """The part during which it did not."""
    busy_ns: int
    """Device compute inside this iteration's wall time."""
    phases: Mapping[str, PhaseSlice]
    """Each phase's share; sums to ``host_ns`` and ``wait_ns``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseSlice:
    """One phase in one iteration; nanoseconds."""

    host_ns: int
    wait_ns: int
    hidden_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPhase:
    """One phase over all timed iterations that had it."""

    name: str
    host: Spread
    """Work an iteration, waits taken out."""
    wait_ns: int
    hidden_ns: int | None
    exposed_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """The host over all timed iterations; nanoseconds in total."""

    work_ns: int
    wait_ns: int
    other_ns: int
    between_ns: int
    """Between iterations of one stretch: the caller's code, waits for other ranks left out."""
    ranks_ns: int
    """Waits for other ranks: those between iterations, and those in ``wait_ns``."""
    hidden_ns: int | None
    """None where the trace has no device work."""
    exposed_ns: int | None
    hidden_share: float | None
    phases: tuple[HostPhase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePhase:
    """Device work of one name for one kind of batch."""

    name: str
    lane: str
    batch: str
    """``decode``, ``prefill`` or ``mixed``: of the batch the work belongs to; ``-`` if it belongs to none."""
    time: Spread
    """Device time an iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTimes:
    """The device over the timed stretches; nanoseconds in total."""

    busy_ns: int | None
    busy_share: float | None
    dummy_ns: int | None
    """The part of ``busy_ns`` without rows of this rank: other ranks need its experts."""
    dummy_share: float | None
    """Of measured time."""
    bubble_ns: int | None
    bubble_share: float | None
    bubbles: Spread | None
    """Lengths of the single bubbles, the small gaps inside one iteration's device work among them."""
    copy_ns: int | None
    phases: tuple[DevicePhase, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRow:
    """One order: how often, why, how long."""

    order: str
    count: int
    share: float
    reasons: Mapping[str, int]
    step: Spread | None
    """Step time of its timed iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphTable:
    """How forwards ran."""

    hits: int
    misses: Mapping[str, int]
    """By reason."""
    labels: Mapping[str, int]
    """Forwards by label: ``CUDA graph``, ``bucket``, ``eager``."""
    hit_rate: float | None
    padding_tokens: int
    padding_share: float | None
    """Padding tokens of all tokens computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WastedRows:
    """Rows of launched forwards that nobody sampled, because their request ended first."""

    by_cause: Mapping[str, int]
    total: int
    consumed_rows: int
    share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLatency:
    """What callers felt."""

    count: int
    """Requests with timings that count."""
    num_void: int
    """Requests that lived through a void iteration."""
    finish_reasons: Mapping[str, int]
    """Of all requests; ``unfinished`` for those still running."""
    queue_delay: Spread | None
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTable:
    """Drafts of all requests, void ones too: counts are no times."""

    proposed: tuple[int, ...]
    """Draft tokens verified, by their place behind the newest token."""
    accepted: tuple[int, ...]
    """Of those, the ones that the model's own draws bore out."""
    acceptance: tuple[float, ...]
    """Accepted over proposed, by place."""
    acceptance_rate: float
    """Of all places together."""
    verified_rows: int
    """Rows that had drafts, each counted at every verification."""
    tokens_per_row: float
    """Mean accepted length: tokens that one such row gave, the model's own draw included."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Summary:
    """All numbers of one run; at a prompt it shows itself as the table."""

    num_iterations: int
    num_void: int
    void_reasons: Mapping[str, int]
    measured_ns: int
    """Wall time of the timed stretches."""
    new_tokens: int
    """Tokens given to requests in timed iterations."""
    tokens_per_s: float | None
    step: Spread | None
    step_by_batch: Mapping[str, Spread | None]
    """By kind of the launched batch; ``decode``, ``prefill``, ``mixed`` always, None without samples."""
    orders: tuple[OrderRow, ...]
    host: HostTimes
    device: DeviceTimes
    blame: BlameTotals | None
    """None where the trace has no device work."""
    graphs: GraphTable
    wasted_rows: WastedRows
    requests: RequestLatency
    drafts: DraftTable | None = None
    """None where nothing was drafted."""

    @property
    def num_timed(self) -> int:
        """Iterations whose times count."""
        return self.num_iterations - self.num_void

    def __str__(self) -> str:
        from tracing.comparison import format_comparison

        return format_comparison({"": self})

    def __repr__(self) -> str:
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Nested dicts, lists, strings, numbers and None: what ``json.dumps`` takes as it is."""
        plain = _plain(asdict(self))
        assert isinstance(plain, dict)
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
