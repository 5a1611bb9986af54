"""The timeline of a snapshot: what host and device did during the iteration, and what the device has not ended yet."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracing.intervals import merge
from tracing.records import (
    COMPUTE_LANE,
    DUMMY_WORK,
    HOST_LANE,
    PHASE_COLOURS,
    RANKS_WAIT,
    Category,
    Span,
    UnfinishedWork,
)
from workbench.bars import RANKS_FILL, WAIT_FILL, Bar, Look, Scale, dummy_fill, duration_text, lanes_html, legend_html

if TYPE_CHECKING:
    from workbench.snapshot import Snapshot

_COMING = 44.0
"""Percent of the width for what has not ended; it has no scale."""
_ROOM = {"forward": 4.0, "sample": 4.0}
"""How that is shared out: copies get little, work whose label should be read gets more."""
_NOW_COLOUR = "#d9485f"


def timeline_html(snapshot: Snapshot) -> str:
    """Host phases, device work by time, and unfinished device work open-ended; empty before the first iteration."""
    host = [span for span in snapshot.spans if span.category in (Category.PHASE, Category.WAIT)]
    device = [span for span in snapshot.spans if span.category is Category.DEVICE]
    starts = [span.start_ns for span in host or device] or [work.enqueued_ns for work in snapshot.unfinished]
    if not starts:
        return ""
    scale = _scale(min(starts), [*host, *device], snapshot)
    lanes: dict[str, list[Bar]] = {HOST_LANE: [_host_bar(span, scale) for span in host]}
    names = [COMPUTE_LANE, *(span.lane for span in device), *(work.lane for work in snapshot.unfinished)]
    for lane in dict.fromkeys(names):
        bars = [_device_bar(span, scale) for span in device if span.lane == lane]
        lanes[f"device {lane}"] = bars + _unfinished_bars(lane, scale, snapshot)
    if snapshot.unfinished:
        now = Bar(left=scale.at(snapshot.taken_ns), width=0, colour=_NOW_COLOUR, look=Look.LINE, title="now")
        for bars in lanes.values():
            bars.append(now)
    return lanes_html(lanes) + _footer(scale, snapshot) + _legend(host, device, snapshot)


def _scale(begin: int, spans: list[Span], snapshot: Snapshot) -> Scale:
    busy = [(max(begin, span.start_ns), span.end_ns) for span in spans]
    end = max([begin, *(span.end_ns for span in spans)])
    if not snapshot.unfinished:
        return Scale(begin, end, merge(busy))
    busy += [(max(begin, work.enqueued_ns), snapshot.taken_ns) for work in snapshot.unfinished]
    return Scale(begin, max(end, snapshot.taken_ns), merge(busy), 100 - _COMING)


def _host_bar(span: Span, scale: Scale) -> Bar:
    is_wait = span.category is Category.WAIT
    return scale.bar(
        span.start_ns,
        span.end_ns,
        _wait_fill(span) if is_wait else PHASE_COLOURS.get(span.name, PHASE_COLOURS["other"]),
        label="" if is_wait else span.name,
        title=f"{_waits_for(span) if is_wait else span.name}, {duration_text(span.duration_ns)}",
        look=Look.HATCHED if is_wait else Look.SOLID,
    )


def _wait_fill(wait: Span) -> str:
    return RANKS_FILL if wait.name == RANKS_WAIT else WAIT_FILL


def _waits_for(wait: Span) -> str:
    return "waits for other ranks" if wait.name == RANKS_WAIT else f"waits for {wait.name}"


def _device_bar(span: Span, scale: Scale) -> Bar:
    """Work that began before the iteration is clipped, and says so."""
    earlier = scale.begin - span.start_ns
    label = f"{span.name} {span.iteration}"
    began = f", began {duration_text(earlier)} before the iteration" if earlier > 0 else ""
    return scale.bar(
        max(scale.begin, span.start_ns),
        span.end_ns,
        _device_fill(span.name),
        label=f"◂ {label}" if earlier > 0 else label,
        title=f"{label}, {duration_text(span.duration_ns)}{began}",
        look=Look.HATCHED if span.name in DUMMY_WORK else Look.SOLID,
    )


def _unfinished_bars(lane: str, scale: Scale, snapshot: Snapshot) -> list[Bar]:
    """A stream works in order: the oldest runs, the others stand in line behind it."""
    works = [work for work in snapshot.unfinished if work.lane == lane]
    is_running = [place == 0 and runs(work, snapshot.unfinished) for place, work in enumerate(works)]
    rooms = [1.0 if begun else _ROOM.get(work.name, 0.5) for work, begun in zip(works, is_running, strict=True)]
    left = scale.at(snapshot.taken_ns)
    bars = []
    for work, begun, room in zip(works, is_running, rooms, strict=True):
        width = _COMING * room / sum(rooms)
        if begun:
            start = scale.at(_begun_ns(work, scale.begin, snapshot))
            bars.append(_unfinished_bar(work, start, left - start + width, Look.OPEN, "running"))
        else:
            bars.append(_unfinished_bar(work, left, width, Look.OUTLINE, "in line"))
        left += width
    return bars


def _unfinished_bar(work: UnfinishedWork, left: float, width: float, look: Look, state: str) -> Bar:
    label = f"{work.name} {work.iteration}, {state}"
    return Bar(left=left, width=width, colour=_device_colour(work.name), label=label, title=label, look=look)


def runs(work: UnfinishedWork, unfinished: Sequence[UnfinishedWork]) -> bool:
    """Whether the work has begun, as far as the host can tell: nothing unfinished was enqueued before it.

    Streams wait for one another (a copy for what it copies), so work of any lane counts.
    """
    return all(work.enqueued_ns <= other.enqueued_ns for other in unfinished)


def _begun_ns(work: UnfinishedWork, begin: int, snapshot: Snapshot) -> int:
    ends = [span.end_ns for span in snapshot.spans if span.category is Category.DEVICE and span.lane == work.lane]
    return min(snapshot.taken_ns, max([begin, work.enqueued_ns, *ends]))


def _device_colour(name: str) -> str:
    return PHASE_COLOURS.get(name, PHASE_COLOURS["other"])


def _device_fill(name: str) -> str:
    """Dummy work is hatched."""
    colour = _device_colour(name)
    return dummy_fill(colour) if name in DUMMY_WORK else colour


def _footer(scale: Scale, snapshot: Snapshot) -> str:
    notes = [f"{scale.shown_ns / 1e6:,.3f} ms"]
    if scale.cuts:
        pauses = sum(end - start for start, end in scale.cuts)
        notes.append(f"pauses of {duration_text(pauses)} in which nothing ran are cut out")
    if snapshot.unfinished:
        notes.append("right of the dotted line: not ended yet, not to scale")
    return f"<div style='font-size:11px;opacity:.8;margin-left:104px'>{' · '.join(notes)}</div>"


def _legend(host: list[Span], device: list[Span], snapshot: Snapshot) -> str:
    found: dict[str, list[str]] = defaultdict(list)
    names = [span.name for span in (*host, *device) if span.category is not Category.WAIT]
    for name in dict.fromkeys([*names, *(work.name for work in snapshot.unfinished)]):
        found[_device_fill(name)].append(name)
    entries = [(f"background:{colour}", ", ".join(names)) for colour, names in found.items()]
    waits = [span for span in host if span.category is Category.WAIT]
    fills = {_wait_fill(span) for span in waits}
    if WAIT_FILL in fills:
        entries.append((f"background:{WAIT_FILL}", "host waits for the device"))
    if RANKS_FILL in fills:
        entries.append((f"background:{RANKS_FILL}", "host waits for other ranks"))
    if device or snapshot.unfinished:
        entries.append(("width:0;margin:0", "number: the iteration that launched it"))
    return legend_html(entries)
