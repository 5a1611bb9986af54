"""Sums of blame over a run: why the device was idle, by cause, by kind of bubble and by reason."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from tracing.blame import LAUNCH_LATENCY, Blame, BlameRow, Bubble, label_of
from tracing.host_line import HostKind


@dataclass(frozen=True, slots=True, kw_only=True)
class BlamedCause:
    """One thing the host did, over all bubbles; nanoseconds in total."""

    cause: str
    """A phase's name, a wait's name, ``wake-up``, ``between phases`` or ``outside iterations``."""
    kind: str
    """``phase``, ``wait``, ``wake-up``, ``between`` or ``outside``."""
    late_ns: int
    """While the device had nothing to do."""
    launch_ns: int
    """During launch latency: it only happened to run then."""
    share: float
    """Of all idle time."""
    per_step_ns: float
    """Over the timed iterations."""

    @property
    def label(self) -> str:
        """As tables name it."""
        return label_of(HostKind(self.kind), self.cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class BubbleKind:
    """Bubbles that came before the same work of the same order; nanoseconds in total."""

    kind: str
    """``launch latency``, or ``before WORK, ORDER``."""
    count: int
    late_ns: int
    launch_ns: int
    share: float
    """Of all idle time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlamedReason:
    """Bubbles by the iteration that enqueued what ended them: its order, and why it took that."""

    order: str
    reason: str
    count: int
    time_ns: int
    share: float
    """Of all idle time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlameTotals:
    """Why the device was idle between its work; each part sums to ``idle_ns``, largest first."""

    idle_ns: int
    """All bubbles."""
    late_ns: int
    """Of them while the device had nothing to do: the host was late."""
    launch_ns: int
    """Of them while it had work and had not begun it: the device's own."""
    causes: tuple[BlamedCause, ...]
    kinds: tuple[BubbleKind, ...]
    reasons: tuple[BlamedReason, ...]

    @property
    def parts(self) -> dict[str, int]:
        """``idle_ns`` as tables divide it: launch latency, and by what the host did the rest; no part is 0."""
        late = {cause.label: cause.late_ns for cause in self.causes if cause.late_ns}
        return {**late, LAUNCH_LATENCY: self.launch_ns} if self.launch_ns else late


def blame_totals(blame: Blame, num_timed: int) -> BlameTotals:
    """Sums by cause, by kind of bubble and by reason; largest first.

    Args:
        blame: Of a run.
        num_timed: Its timed iterations.
    """
    idle_ns = sum(bubble.time_ns for bubble in blame.bubbles)
    late_ns = sum(bubble.late_ns for bubble in blame.bubbles)
    return BlameTotals(
        idle_ns=idle_ns,
        late_ns=late_ns,
        launch_ns=idle_ns - late_ns,
        causes=_causes(blame.rows, idle_ns, num_timed),
        kinds=_kinds(blame.bubbles, idle_ns),
        reasons=_reasons(blame.bubbles, idle_ns),
    )


def _causes(rows: Iterable[BlameRow], idle_ns: int, num_timed: int) -> tuple[BlamedCause, ...]:
    late: dict[tuple[HostKind, str], int] = defaultdict(int)
    launch: dict[tuple[HostKind, str], int] = defaultdict(int)
    for row in rows:
        (late if row.is_late else launch)[row.kind, row.cause] += row.time_ns
    found = [
        BlamedCause(
            cause=cause,
            kind=kind.value,
            late_ns=late.get((kind, cause), 0),
            launch_ns=launch.get((kind, cause), 0),
            share=(late.get((kind, cause), 0) + launch.get((kind, cause), 0)) / idle_ns,
            per_step_ns=(late.get((kind, cause), 0) + launch.get((kind, cause), 0)) / num_timed,
        )
        for kind, cause in {*late, *launch}
    ]
    return tuple(sorted(found, key=lambda one: (-one.late_ns - one.launch_ns, one.kind, one.cause)))


def _kinds(bubbles: Iterable[Bubble], idle_ns: int) -> tuple[BubbleKind, ...]:
    by_kind: dict[str, list[Bubble]] = defaultdict(list)
    for bubble in bubbles:
        by_kind[bubble.kind].append(bubble)
    found = [
        BubbleKind(
            kind=kind,
            count=len(members),
            late_ns=sum(bubble.late_ns for bubble in members),
            launch_ns=sum(bubble.launch_ns for bubble in members),
            share=sum(bubble.time_ns for bubble in members) / idle_ns,
        )
        for kind, members in by_kind.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.late_ns - one.launch_ns, one.kind)))


def _reasons(bubbles: Iterable[Bubble], idle_ns: int) -> tuple[BlamedReason, ...]:
    by_reason: dict[tuple[str, str], list[Bubble]] = defaultdict(list)
    for bubble in bubbles:
        by_reason[bubble.order, bubble.reason].append(bubble)
    found = [
        BlamedReason(
            order=order,
            reason=reason,
            count=len(members),
            time_ns=sum(bubble.time_ns for bubble in members),
            share=sum(bubble.time_ns for bubble in members) / idle_ns,
        )
        for (order, reason), members in by_reason.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.time_ns, one.order, one.reason)))
