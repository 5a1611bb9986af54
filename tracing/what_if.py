"""What the step time would be if a phase or a piece of device work took another time, by replaying the records.

Nothing is run and nothing is rescheduled: the same iterations, batches and orders, with other lengths.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from itertools import chain
from typing import Any

from tracing.blame import LAUNCH_LATENCY
from tracing.device_line import DeviceLine
from tracing.edges import judged
from tracing.host_line import WAKE_UP, HostKind, HostLine, host_lines
from tracing.intervals import Interval
from tracing.records import IterationRecord, Span
from tracing.replay import Change, Changes, Delays, Stretch
from tracing.summary import Spread
from tracing.text_table import aligned

_SIDES = ("host", "device")


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderWhatIf:
    """Step time of one order."""

    order: str
    count: int
    before: Spread
    after: Spread


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WhatIf:
    """Recorded and predicted times over the measured stretches; step times and lengths in nanoseconds."""

    scale: Mapping[str, float]
    add_ns: Mapping[str, int]
    """What was asked for."""
    num_iterations: int
    """Timed ones."""
    num_void: int
    """Void ones, which are left out."""
    before: Spread | None
    """Step time as it was recorded; None without timed iterations."""
    after: Spread | None
    """Step time as predicted."""
    makespan_before_ns: int
    """Measured time: from the begin of each stretch to its end, added up."""
    makespan_after_ns: int
    orders: tuple[OrderWhatIf, ...]
    """Most frequent first."""
    residual_ns: int
    """How far the replay with nothing changed is off the records: the largest error of any begin or end."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "makespan_ratio": self.makespan_ratio}

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    @property
    def makespan_ratio(self) -> float | None:
        """After over before."""
        return self.makespan_after_ns / self.makespan_before_ns if self.makespan_before_ns else None

    def __str__(self) -> str:
        """Ends with an empty line, so that several can be printed below each other."""
        asked = [*(f"{name} × {k:g}" for name, k in self.scale.items())]
        asked += [f"{name} {ns / 1e3:+,.1f} µs" for name, ns in self.add_ns.items()]
        left_out = f" ({self.num_void} void ones left out)" if self.num_void else ""
        head = f"if {', '.join(asked) or 'nothing changed'}: mean step over {self.num_iterations} iterations{left_out}"
        rows = [["", "iterations", "recorded ms", "predicted ms", "difference ms", "%"]]
        for name, count, before, after in (
            ("all", self.num_iterations, self.before, self.after),
            *((order.order, order.count, order.before, order.after) for order in self.orders),
        ):
            if before is not None and after is not None:
                rows.append([name, str(count), *_difference(before.mean_ns, after.mean_ns)])
        rows.append(["makespan", "", *_difference(self.makespan_before_ns, self.makespan_after_ns)])
        return "\n".join([head, *(f"  {line}" for line in aligned(rows, words=1)), ""])


def _difference(before_ns: float, after_ns: float) -> list[str]:
    """Both in milliseconds, and by how much the second is longer."""
    longer_ns = after_ns - before_ns
    percent = f"{100 * longer_ns / before_ns:+.1f}" if before_ns else ""
    return [f"{before_ns / 1e6:,.3f}", f"{after_ns / 1e6:,.3f}", f"{longer_ns / 1e6:+,.3f}", percent]


def what_if(
    spans: Sequence[Span],
    iterations: Iterable[IterationRecord],
    *,
    scale: Mapping[str, float] | None = None,
    add_ns: Mapping[str, int] | None = None,
) -> WhatIf:
    """Predict step times and makespan if some work took k times as long, or so many nanoseconds longer.

    Args:
        spans: Of the run, device work with its enqueue times; in any order.
        iterations: Of the run.
        scale: By name, k of 0 or more. Names are phases (``resolve``), device work (``publish``), and what blame calls
            ``between phases``, ``outside iterations``, ``wake-up`` and ``launch latency``. What is both, as forward
            and sample are, is said with its side: ``host forward``, ``device forward``.
        add_ns: By name, added to the work of each iteration that has it (of device work: to each piece). May be
            negative; no work becomes shorter than 0.

    Raises:
        ValueError: a name is unknown or ambiguous, or is a wait, which follows from the rest; a factor is negative;
            or there is device work without an enqueue time, as imported traces have.
    """
    scale, add_ns = dict(scale or {}), dict(add_ns or {})
    device = DeviceLine(spans)
    if any(work.span.enqueued_ns is None for work in device.works):
        raise ValueError(
            "spans must say when device work was enqueued; some of these do not, so nothing can be replayed"
        )
    known = judged(spans, iterations)
    lines = host_lines(spans, known)
    changes = _changes(scale, add_ns, device, lines)
    delays = Delays(device, lines)
    stretches = [Stretch(line, device, delays) for line in lines]
    same = list(chain.from_iterable(stretch.replay(Changes()) for stretch in stretches))
    other = [stretch.replay(changes) for stretch in stretches]
    records = [record for line in lines for record in line.records]
    return WhatIf(
        scale=scale,
        add_ns=add_ns,
        num_iterations=len(records),
        num_void=sum(record.is_void for record in known),
        before=Spread.of(record.duration_ns for record in records),
        after=Spread.of(end - begin for times in other for begin, end in times),
        makespan_before_ns=sum(line.records[-1].end_ns - line.records[0].begin_ns for line in lines),
        makespan_after_ns=sum(times[-1][1] - times[0][0] for times in other),
        orders=_orders(records, list(chain.from_iterable(other))),
        residual_ns=max((_error(record, times) for record, times in zip(records, same, strict=True)), default=0),
    )


def _error(record: IterationRecord, times: Interval) -> int:
    return max(abs(times[0] - record.begin_ns), abs(times[1] - record.end_ns))


def _orders(records: Sequence[IterationRecord], times: Sequence[Interval]) -> tuple[OrderWhatIf, ...]:
    by_order: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for record, (begin_ns, end_ns) in zip(records, times, strict=True):
        by_order[record.order].append((record.duration_ns, end_ns - begin_ns))
    found = []
    for order, pairs in by_order.items():
        before, after = (Spread.of(side) for side in zip(*pairs, strict=True))
        assert before is not None
        assert after is not None
        found.append(OrderWhatIf(order=order, count=len(pairs), before=before, after=after))
    return tuple(sorted(found, key=lambda one: (-one.count, one.order)))


@dataclass(frozen=True, slots=True)
class _Names:
    """What can be changed."""

    host: frozenset[str]
    device: frozenset[str]
    waits: frozenset[str] = field(default_factory=frozenset)

    def side_and_name(self, asked: str) -> tuple[str, str]:
        """Which side a name means.

        Raises:
            ValueError: see :func:`what_if`.
        """
        side, _, name = asked.partition(" ")
        if side in _SIDES and name in (self.host if side == "host" else self.device):
            return side, name
        found = [side for side, names in zip(_SIDES, (self.host, self.device), strict=True) if asked in names]
        if len(found) == 1:
            return found[0], asked
        if found:
            raise ValueError(f"{asked!r} is a host phase and device work: say 'host {asked}' or 'device {asked}'")
        if asked in self.waits:
            raise ValueError(f"{asked!r} is a wait: its length follows from what it waits for")
        known = [*(f"host {name}" for name in sorted(self.host)), *(f"device {name}" for name in sorted(self.device))]
        raise ValueError(f"{asked!r} is not in the trace; known are {', '.join(known)}")


def _changes(
    scale: Mapping[str, float], add_ns: Mapping[str, int], device: DeviceLine, lines: Sequence[HostLine]
) -> Changes:
    names = _names(device, lines)
    sides: dict[str, dict[str, Change]] = {side: {} for side in _SIDES}
    for asked in dict.fromkeys([*scale, *add_ns]):
        factor = scale.get(asked, 1.0)
        if not 0 <= factor < float("inf"):
            raise ValueError(f"scale[{asked!r}] must be a number of 0 or more, got {factor}")
        side, name = names.side_and_name(asked)
        if name in sides[side]:
            raise ValueError(f"{asked!r} is named twice, once with its side and once without")
        sides[side][name] = Change(factor, add_ns.get(asked, 0))
    return Changes(sides["host"], sides["device"])


def _names(device: DeviceLine, lines: Sequence[HostLine]) -> _Names:
    pieces = [piece for line in lines for piece in line.pieces]
    waits = {piece.cause for piece in pieces if piece.kind is HostKind.WAIT}
    host = {piece.cause for piece in pieces if piece.kind is not HostKind.WAIT}
    names = {work.span.name for work in device.works}
    if any(piece.release is not None for piece in pieces):
        host.add(WAKE_UP)
    if names:
        names.add(LAUNCH_LATENCY)
    return _Names(frozenset(host), frozenset(names), frozenset(waits))
