"""The dependencies of a recorded stretch as an event graph, and its replay with other lengths.

The host does its pieces one after the other; device work begins when it is enqueued, its lane is free and, for a copy,
its source is there; a wait ends when what it waits for has. ``docs/metrics.md`` (What if) has the rules and limits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from tracing.blame import LAUNCH_LATENCY
from tracing.device_line import DeviceLine, Limit, last_hold
from tracing.host_line import WAKE_UP, HostKind, HostLine, HostPiece
from tracing.intervals import Interval


@dataclass(frozen=True, slots=True)
class Change:
    """A time of d nanoseconds becomes ``scale`` · d + ``add_ns``, never below 0."""

    scale: float = 1.0
    add_ns: int = 0

    def of(self, time_ns: int) -> int:
        """The changed time; negative ones, which clock errors make, change as they are."""
        if self.scale == 1.0 and not self.add_ns:
            return time_ns
        return max(min(0, time_ns), round(self.scale * time_ns) + self.add_ns)


_SAME = Change()


@dataclass(frozen=True, slots=True)
class Changes:
    """What is to take another time, by name; of host work the time an iteration."""

    host: Mapping[str, Change] = field(default_factory=dict)
    device: Mapping[str, Change] = field(default_factory=dict)


class _Enqueued(NamedTuple):
    """Work enqueued in a stretch."""

    place: int
    """Among all works."""
    piece: int
    """Of the host, in which it was enqueued: the one in which that was noted, or the device has begun before."""


class Delays:
    """Medians of what cannot be read off one piece of work once another thing holds it up."""

    def __init__(self, device: DeviceLine, lines: Sequence[HostLine]) -> None:
        starts: dict[tuple[str, str, Limit], list[int]] = defaultdict(list)
        for work, hold in zip(device.works, device.holds, strict=True):
            starts[work.span.lane, work.span.name, hold.limit].append(work.span.start_ns - hold.until_ns)
        wakes, calls = [], []
        for piece in (piece for line in lines for piece in line.pieces if piece.release is not None):
            assert piece.release is not None
            if piece.release.end_ns > piece.start_ns:
                wakes.append(piece.end_ns - piece.release.end_ns)
            else:
                calls.append(piece.end_ns - piece.start_ns)
        self.launch = {key: median_low(values) for key, values in starts.items()}
        self.wake_ns = median_low(wakes) if wakes else 0
        self.call_ns = median_low(calls) if calls else 0


class Stretch:
    """One measured stretch, ready to be replayed."""

    def __init__(self, line: HostLine, device: DeviceLine, delays: Delays) -> None:
        self.pieces = line.pieces
        self.records = line.records
        self.device = device
        self.delays = delays
        self.enqueued: dict[int, list[_Enqueued]] = defaultdict(list)
        """By the host's piece in which it was noted."""
        self._starts = [piece.start_ns for piece in line.pieces]
        begin_ns = line.records[0].begin_ns
        for place in device.noted_in(begin_ns, line.records[-1].end_ns):
            work = device.works[place]
            begun_in = self._piece_at(max(work.enqueued_ns, begin_ns))
            self.enqueued[self._piece_at(work.noted_ns)].append(_Enqueued(place, begun_in))

    def _piece_at(self, time_ns: int) -> int:
        return bisect_right(self._starts, time_ns) - 1

    def replay(self, changes: Changes) -> list[Interval]:
        """Begin and end of each iteration; the stretch begins when it did."""
        return _Replay(self, changes).run()


class _Replay:
    """One pass along the host's pieces: whatever a moment depends on has been placed before it."""

    def __init__(self, stretch: Stretch, changes: Changes) -> None:
        self._of = stretch
        self._changes = changes
        self._lengths = _host_lengths(stretch.pieces, changes.host)
        self._starts: list[int] = []
        self._ends: dict[int, int] = {}

    def run(self) -> list[Interval]:
        pieces = self._of.pieces
        at_ns = pieces[0].start_ns
        begins: dict[int, int] = {}
        ends: dict[int, int] = {}
        for index, piece in enumerate(pieces):
            self._starts.append(at_ns)
            for enqueued in self._of.enqueued.get(index, ()):
                self._ends[enqueued.place] = self._device_end(enqueued)
            if piece.is_inside:
                begins.setdefault(id(piece.record), at_ns)
            at_ns = self._wait_end(piece, at_ns) if piece.kind is HostKind.WAIT else at_ns + self._lengths[index]
            ends[id(piece.record)] = at_ns
        return [(begins[id(record)], ends[id(record)]) for record in self._of.records]

    def _moved(self, index: int, time_ns: int) -> int:
        """When the host gets to what it did at ``time_ns``, in a piece whose start is placed."""
        piece = self._of.pieces[index]
        offset_ns, length_ns = time_ns - piece.start_ns, piece.end_ns - piece.start_ns
        if length_ns and piece.kind is not HostKind.WAIT:
            offset_ns = offset_ns * self._lengths[index] // length_ns
        return self._starts[index] + offset_ns

    def _end(self, place: int) -> int:
        """Of work that is placed, or was enqueued before the stretch."""
        return self._ends.get(place, self._of.device.works[place].span.end_ns)

    def _device_end(self, enqueued: _Enqueued) -> int:
        work = self._of.device.works[enqueued.place]
        hold = last_hold(
            self._moved(enqueued.piece, work.enqueued_ns),
            None if work.after is None else self._end(work.after),
            None if work.behind is None else self._end(work.behind),
        )
        launch_ns = self._device(LAUNCH_LATENCY).of(self._launch_ns(enqueued.place, hold.limit))
        return hold.until_ns + launch_ns + self._device(work.span.name).of(work.span.duration_ns)

    def _launch_ns(self, place: int, limit: Limit) -> int:
        span, recorded = self._of.device.works[place].span, self._of.device.holds[place]
        latency_ns = span.start_ns - recorded.until_ns
        if limit is recorded.limit:
            return latency_ns
        return self._of.delays.launch.get((span.lane, span.name, limit), latency_ns)

    def _wait_end(self, piece: HostPiece, at_ns: int) -> int:
        if piece.release is None:
            return at_ns + piece.end_ns - piece.start_ns
        delays, was_blocked = self._of.delays, piece.release.end_ns > piece.start_ns
        released_ns = self._end(self._of.device.place(piece.release))
        wake_up = self._changes.host.get(WAKE_UP, _SAME)
        if released_ns > at_ns:
            wake_ns = piece.end_ns - piece.release.end_ns if was_blocked else delays.wake_ns
            return max(at_ns, released_ns + wake_up.of(wake_ns))
        return at_ns + wake_up.of(delays.call_ns if was_blocked else piece.end_ns - piece.start_ns)

    def _device(self, name: str) -> Change:
        return self._changes.device.get(name, _SAME)


def _host_lengths(pieces: Sequence[HostPiece], changes: Mapping[str, Change]) -> list[int]:
    """What each piece takes now; of waits what they took, since those follow from the replay.

    The work of one name in one iteration changes as a whole; its pieces, before and behind a wait, share in proportion.
    """
    lengths = [piece.end_ns - piece.start_ns for piece in pieces]
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for index, piece in enumerate(pieces):
        if piece.kind is not HostKind.WAIT and piece.cause in changes:
            groups[id(piece.record), piece.cause].append(index)
    for (_, cause), members in groups.items():
        whole_ns = sum(lengths[index] for index in members)
        for index, length_ns in zip(
            members, _shared([lengths[i] for i in members], changes[cause].of(whole_ns)), strict=True
        ):
            lengths[index] = length_ns
    return lengths


def _shared(parts: Sequence[int], whole_ns: int) -> list[int]:
    """``whole_ns`` in the proportions of ``parts``, to the last nanosecond; to the last of them where all are 0."""
    before_ns = sum(parts)
    if not before_ns:
        return [*([0] * (len(parts) - 1)), whole_ns]
    shares, done_ns, passed_ns = [], 0, 0
    for part in parts:
        passed_ns += part
        until_ns = whole_ns * passed_ns // before_ns
        shares.append(until_ns - done_ns)
        done_ns = until_ns
    return shares
