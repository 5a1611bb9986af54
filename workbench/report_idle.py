"""Why the device was idle, as the report tells it: a table a run, and what a bubble says when the pointer is on it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tracing.blame import Blame
from tracing.blame_totals import BlamedCause, BlameTotals
from tracing.comparison import format_value
from tracing.records import PHASE_COLOURS, RANKS_WAIT
from tracing.summary import Summary


@dataclass(frozen=True, slots=True)
class IdleRow:
    """A part of the idle time."""

    label: str
    each: str
    """Microseconds an iteration."""
    share: str
    """Percent of all idle time."""
    colour: str = ""
    """Of the chip before the label; none where empty."""
    count: str = ""
    """Bubbles."""


@dataclass(frozen=True, slots=True)
class IdleGroup:
    """All idle time, divided in one way."""

    title: str
    rows: tuple[IdleRow, ...]


def idle_groups(summary: Summary) -> list[IdleGroup]:
    """By what the host did, by the work that ended the bubble, by order and reason; none without bubbles."""
    blame = summary.blame
    if blame is None or not blame.idle_ns:
        return []
    count = summary.num_timed
    return [
        IdleGroup("by what the host did while nothing was enqueued", tuple(_cause_rows(blame, count))),
        IdleGroup(
            "by the work that ended the bubble",
            tuple(
                _row(kind.kind, kind.late_ns + kind.launch_ns, blame, count, bubbles=kind.count) for kind in blame.kinds
            ),
        ),
        IdleGroup(
            "by order and reason of the iteration that enqueued that work",
            tuple(
                _row(f"{reason.order}: {reason.reason}", reason.time_ns, blame, count, bubbles=reason.count)
                for reason in blame.reasons
            ),
        ),
    ]


def _cause_rows(blame: BlameTotals, num_timed: int) -> Iterator[IdleRow]:
    """As the comparison's table names them, each with its phase's colour."""
    colours = {cause.label: _colour(cause) for cause in blame.causes}
    for label, time_ns in sorted(blame.parts.items(), key=lambda part: (-part[1], part[0])):
        yield _row(label, time_ns, blame, num_timed, colour=colours.get(label, ""))


def _colour(cause: BlamedCause) -> str:
    is_wait = cause.kind in ("wait", "wake-up") and cause.cause != RANKS_WAIT
    name = "wait" if is_wait else cause.cause
    return PHASE_COLOURS.get(name, PHASE_COLOURS["other"])


def _row(
    label: str, time_ns: int, blame: BlameTotals, num_timed: int, *, colour: str = "", bubbles: int | None = None
) -> IdleRow:
    return IdleRow(
        label=label,
        each=format_value(time_ns / num_timed / 1e3, "µs"),
        share=format_value(100 * time_ns / blame.idle_ns, "%"),
        colour=colour,
        count="" if bubbles is None else f"{bubbles:,}",
    )


def blame_columns(blame: Blame, names: dict[str, int]) -> dict[str, list[Any]]:
    """One entry a bubble: name and iteration of the work that ended it, and [name, time, ...] of its late parts."""
    parts: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in blame.rows:
        if row.is_late:
            parts[row.bubble][row.label] += row.time_ns
    return {
        "before": [names.setdefault(bubble.before, len(names)) for bubble in blame.bubbles],
        "iteration": [bubble.iteration for bubble in blame.bubbles],
        "parts": [
            [
                number
                for label, time_ns in sorted(parts[bubble.index].items(), key=lambda part: (-part[1], part[0]))
                for number in (names.setdefault(label, len(names)), time_ns)
            ]
            for bubble in blame.bubbles
        ],
    }
