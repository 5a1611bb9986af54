"""The border between two forwards: the moment at which a schedule shows what it hides.

At a border the device has sampled the tokens of forward N and the host learns them. In legacy the device then stands
idle while the host works on forward N+1; in async it has gone on to that forward, and the host works beside it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median_low

from tracing.comparison import AROUND_WORK
from tracing.intervals import Interval, intersect, length, merge, subtract
from tracing.records import COMPUTE_LANE, Category, IterationRecord, Span
from tracing.windows import host_work

_TELLS_TOKENS = ("sample", "verify")
"""Compute work behind which the tokens of its forward are known; what draft heads do behind that is the next one's."""
_SAID_FROM = 0.1
"""Share of the host's work from which a piece of device work beside it, or a rest of either kind, is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a shown border was chosen from: the run's borders of steady decode or, without any, all of them."""

    count: int
    median_idle_ns: int
    """Device idle at one of them."""
    worst: int
    """Iteration that launched the forward before the border at which the device idled longest;"""
    worst_idle_ns: int
    """so long."""

    @property
    def text(self) -> str:
        """What a caption says of it."""
        if self.count == 1:
            return "the only border there is"
        typical = f"a typical one of {self.count:,} borders"
        if not self.worst_idle_ns:
            return f"{typical}, at none of which the device idles"
        return (
            f"{typical}: the device idles {_short(self.median_idle_ns)} at the median one, "
            f"{_short(self.worst_idle_ns)} at the worst, behind forward {self.worst}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """One border of a run; all its lengths are in nanoseconds."""

    at_ns: int
    """When the device had sampled forward N (or, without sampling, when that forward ended)."""
    until_ns: int
    """When forward N+1 ended: what the host did between ``at_ns`` and here belongs to this border."""
    finished: int
    """Iteration that launched forward N."""
    next_forward: int
    """Iteration that launched forward N+1."""
    next_start_ns: int
    """When forward N+1 began on the device."""
    work: tuple[Interval, ...]
    """Host work in between; not empty."""
    hidden_ns: int
    """Of that work, while the device's compute lane was busy."""
    idle: tuple[Interval, ...]
    """When the compute lane stood idle."""
    beside: tuple[tuple[str, int], ...]
    """What the compute lane did beside the hidden work: name with iteration, and how long; longest first."""
    is_steady: bool
    """Whether both forwards belong to steady decode."""
    choice: Choice | None = None
    """What it was chosen from; None before it is."""

    @property
    def work_ns(self) -> int:
        """Host work, waits left out."""
        return length(self.work)

    @property
    def is_hidden(self) -> bool:
        """Whether at least half of the work is hidden."""
        return 2 * self.hidden_ns >= self.work_ns

    @property
    def idle_ns(self) -> int:
        """How long the compute lane stood idle."""
        return length(self.idle)

    @property
    def extent_ns(self) -> int:
        """From the border to the end of the host's work."""
        return self.work[-1][1] - self.at_ns

    @property
    def text(self) -> str:
        """What the picture says beside the host's work."""
        said = self._hidden_text() if self.is_hidden else self._exposed_text()
        after_ns = self.next_start_ns - self.at_ns
        if not self.is_hidden and abs(after_ns - self.idle_ns) < _SAID_FROM * after_ns:
            return said  # the idle time has said it
        return f"{said}; forward {self.next_forward} begins after {_short(after_ns)}"

    def _exposed_text(self) -> str:
        rest = f", {_short(self.hidden_ns)} hidden" if self.hidden_ns >= _SAID_FROM * self.work_ns else ""
        alone_ns = self.work_ns - self.hidden_ns
        why = f" (the rest: {AROUND_WORK})" if self.idle_ns - alone_ns >= _SAID_FROM * self.idle_ns else ""
        return f"device idle {_short(self.idle_ns)}: the host works alone for {_short(alone_ns)}{why}{rest}"

    def _hidden_text(self) -> str:
        exposed = self.work_ns - self.hidden_ns
        rest = f", {_short(exposed)} exposed" if exposed >= _SAID_FROM * self.work_ns else ""
        return f"{_short(self.work_ns)} of host work, hidden behind {self._beside_text()}{rest}"

    def _beside_text(self) -> str:
        said = [(name, time) for name, time in self.beside if time >= _SAID_FROM * self.work_ns] or self.beside[:1]
        if len(said) == 1:
            return said[0][0]
        return " and ".join(f"{name} ({_short(time)})" for name, time in said)


@dataclass(frozen=True, slots=True, kw_only=True)
class BorderInput:
    """What borders are found in."""

    spans: Sequence[Span]
    """The whole run."""
    work: Sequence[Interval]
    """When the host worked; sorted and disjoint."""
    steady: Interval | None
    """The stretch of steady decode. None, or no border inside it: any border of the run is taken."""
    void: Sequence[Interval] = ()
    """Iterations whose times mean nothing: a border that touches one is none."""


def border_input(spans: Sequence[Span], iterations: Iterable[IterationRecord], steady: Interval | None) -> BorderInput:
    """Of a run as it was recorded, and its stretch of steady decode."""
    void = [(record.begin_ns, record.end_ns) for record in iterations if record.is_void]
    return BorderInput(spans=spans, work=host_work(spans), steady=steady, void=void)


def why_no_border(trace: BorderInput) -> str:
    """Why :func:`find_borders` finds none in it."""
    if _candidates(replace(trace, void=())):
        return "every border touches an iteration whose times do not count"
    return "no two forwards with host work between them"


def find_borders(traces: Sequence[BorderInput]) -> list[Border | None]:
    """One typical border a run: host work reaches about as far, and the device idles about as long, as at the median.

    It is the border behind the same iteration's forward in all runs, where they have one in common. None where a trace
    has no two forwards with host work between them, or only in void iterations.
    """
    found = [_candidates(trace) for trace in traces]
    some = [_oddities(borders) for borders in found if borders]
    common = set.intersection(*(set(each) for each in some)) if some else set()
    oddities = {number: max(each[number] for each in some) for number in sorted(common)}
    lowest = min(oddities.values(), default=0.0)
    least = [number for number, oddity in oddities.items() if oddity == lowest]
    number = least[len(least) // 2] if least else None
    return [_chosen(borders, number) for borders in found]


def _candidates(trace: BorderInput) -> list[Border]:
    compute = sorted(
        (span for span in trace.spans if span.category is Category.DEVICE and span.lane == COMPUTE_LANE),
        key=lambda span: (span.start_ns, span.end_ns),
    )
    borders = [border for border in _borders(compute, trace) if border.work]
    return [border for border in borders if border.is_steady] or borders


def _oddities(borders: Sequence[Border]) -> dict[int, float]:
    """How odd the border behind each forward is; by the forward's iteration."""
    found: dict[int, float] = {}
    for border, oddity in zip(borders, _oddity_of_each(borders), strict=True):
        found[border.finished] = min(found.get(border.finished, oddity), oddity)
    return found


def _oddity_of_each(borders: Sequence[Border]) -> list[float]:
    """How far extent and idle time are from their medians, as a share of the median extent."""
    extent_ns = median_low(border.extent_ns for border in borders)
    idle_ns = median_low(border.idle_ns for border in borders)
    return [
        (abs(border.extent_ns - extent_ns) + abs(border.idle_ns - idle_ns)) / max(1, extent_ns) for border in borders
    ]


def _chosen(borders: Sequence[Border], number: int | None) -> Border | None:
    if not borders:
        return None
    oddities = _oddity_of_each(borders)
    found = [
        (oddity, border)
        for oddity, border in zip(oddities, borders, strict=True)
        if number is None or border.finished == number
    ]
    least = min(oddity for oddity, _ in found)
    alike = [border for oddity, border in found if oddity == least]
    return replace(alike[len(alike) // 2], choice=_choice_of(borders))


def _choice_of(borders: Sequence[Border]) -> Choice:
    worst = max(borders, key=lambda border: border.idle_ns)
    return Choice(
        count=len(borders),
        median_idle_ns=median_low(border.idle_ns for border in borders),
        worst=worst.finished,
        worst_idle_ns=worst.idle_ns,
    )


def _borders(compute: Sequence[Span], trace: BorderInput) -> Iterable[Border]:
    work, steady, void = trace.work, trace.steady, merge(trace.void)
    busy = merge((span.start_ns, span.end_ns) for span in compute)
    forwards = [at for at, span in enumerate(compute) if span.name == "forward"]
    starts = [start for start, _ in work]
    for first, second in pairwise(forwards):
        done, coming = compute[first], compute[second]
        at_ns = max(span.end_ns for span in compute[first:second] if span is done or span.name in _TELLS_TOKENS)
        whole = (at_ns, coming.end_ns)
        if intersect([(done.start_ns, coming.end_ns)], void):
            continue
        near = work[max(0, bisect_left(starts, at_ns) - 1) : bisect_left(starts, coming.end_ns)]
        here = intersect([whole], near)
        hidden = intersect(here, busy)
        yield Border(
            at_ns=at_ns,
            until_ns=coming.end_ns,
            finished=done.iteration,
            next_forward=coming.iteration,
            next_start_ns=coming.start_ns,
            work=tuple(here),
            hidden_ns=length(hidden),
            idle=tuple(subtract([whole], busy)),
            beside=_beside(hidden, compute[first : second + 1]),
            is_steady=steady is not None and steady[0] <= done.start_ns and coming.end_ns <= steady[1],
        )


def _beside(hidden: Sequence[Interval], compute: Sequence[Span]) -> tuple[tuple[str, int], ...]:
    shares = [
        (f"{span.name} {span.iteration}", length(intersect([(span.start_ns, span.end_ns)], hidden))) for span in compute
    ]
    return tuple(sorted(((name, time) for name, time in shares if time), key=lambda share: -share[1]))


def _short(time_ns: int) -> str:
    if time_ns < 100_000:
        return f"{time_ns / 1e3:.0f} µs"
    return f"{time_ns / 1e6:.2f} ms" if time_ns < 10_000_000 else f"{time_ns / 1e6:.1f} ms"
