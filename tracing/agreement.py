"""How far our device lanes are from what a tool saw: pure functions, defined in ``docs/metrics.md``.

The tool is taken as the truth of when kernels ran. Our pieces of device work run from an event before to an event
behind what was enqueued, so they hold what passes between the first event and the first kernel as well.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tracing.canonical import sorted_iterations, sorted_spans
from tracing.importing import ImportedTrace
from tracing.intervals import Interval, intersect, length, merge, subtract
from tracing.records import COMPUTE_LANE, IterationRecord, Span
from tracing.tool_groups import ToolGroup, group_work
from tracing.windows import bubbles_in, device_union, host_work, measured_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """How far ours is from the tool's, over many pieces; ours less the tool's, nanoseconds."""

    median_ns: float
    """With its sign: positive is later, or longer."""
    p50_ns: float
    """Median of the absolute values,"""
    p99_ns: float
    """and their 99th percentile."""

    @classmethod
    def of(cls, differences_ns: Iterable[float]) -> Distance:
        """Of at least one difference."""
        values = np.fromiter(differences_ns, dtype=np.float64)
        p50, p99 = np.percentile(np.abs(values), (50, 99))
        return cls(median_ns=float(np.median(values)), p50_ns=float(p50), p99_ns=float(p99))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkAgreement:
    """One name of device work on one lane."""

    lane: str
    name: str
    count: int
    """Pieces found on both sides."""
    start: Distance
    end: Distance
    length: Distance
    length_share_p50: float | None
    """Absolute difference of a length / the tool's length, median,"""
    length_share_p99: float | None
    """and 99th percentile. None where the tool's lengths are 0."""
    total_share: float | None
    """All our lengths / all the tool's − 1."""
    after_launch_p50_ns: float | None
    """By the tool alone, from the return of the last call that launched it to its first kernel's start, median: about 0
    where the device is idle, when ours is too long by what the call took. None where the tool shows no launches."""
    tool_length_p50_ns: float
    pieces_p50: float
    """Kernels, copies and fills of one piece of ours, median."""
    inner_gap_share: float | None
    """Time inside the tool's pieces in which nothing ran / their length. None where the tool shows graphs whole."""
    inner_gap_p50_ns: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One number from our lanes and from the tool's."""

    ours: float
    tool: float

    @property
    def apart(self) -> float:
        """Ours less the tool's."""
        return self.ours - self.tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How well the two agree over the measured time that both cover."""

    work: tuple[WorkAgreement, ...]
    """Compute lane first."""
    missing: Mapping[str, int]
    """Pieces of ours of which the tool shows nothing, by lane and name, such as ``compute publish``."""
    wall_ns: int
    """Measured time between the first and the last piece found on both sides."""
    bubbles: Share | None
    """Share of ``wall_ns`` between pieces of the compute lane. None without measured time."""
    hidden: Share | None
    """Hidden share of the host's work. None where the host did not work in ``wall_ns``."""
    inner_gaps: float | None
    """Share of ``wall_ns`` inside the tool's pieces of the compute lane in which nothing ran."""
    strange_ns: int
    """Work in ``wall_ns`` that the tool shows and that belongs to nothing we noted."""
    note_delay_p50_ns: float | None
    """From the return of a launch, by the tool, to our note of it: a few µs, or the two clocks disagree."""
    is_by_launches: bool
    """Whether pieces were matched by launches and correlation; by time alone otherwise."""


def agreement(spans: Sequence[Span], iterations: Iterable[IterationRecord], imported: ImportedTrace) -> Agreement:
    """Compare.

    Args:
        spans: Ours, of host and device. Wait for the device before they are read.
        iterations: Their records; void ones count for pieces of work, and for no share.
        imported: The tool's, on our clock.
    """
    ordered = sorted_spans(spans)
    found = group_work(ordered, imported)
    windows = _common_windows(iterations, found.groups)
    wall_ns = length(windows)
    ours = device_union(ordered)
    compute = [group for group in found.groups if group.span.lane == COMPUTE_LANE]
    tools = merge((group.start_ns, group.end_ns) for group in compute)
    delays = [_enqueued(group) - group.launched_ns for group in found.groups if group.launched_ns is not None]
    return Agreement(
        work=_rows(found.groups),
        missing=Counter(f"{span.lane} {span.name}" for span in found.missing),
        wall_ns=wall_ns,
        bubbles=_bubbles(windows, ours, tools),
        hidden=_hidden(ordered, windows, ours, tools),
        inner_gaps=_inner_gaps(compute, windows),
        strange_ns=length(intersect(windows, merge((piece.start_ns, piece.end_ns) for piece in found.strange))),
        note_delay_p50_ns=float(np.median(delays)) if delays else None,
        is_by_launches=found.is_by_launches,
    )


def _common_windows(iterations: Iterable[IterationRecord], groups: Sequence[ToolGroup]) -> list[Interval]:
    """Measured time that both sides cover."""
    if not groups:
        return []
    first_ns = min(min(group.start_ns, group.span.start_ns) for group in groups)
    last_ns = max(max(group.end_ns, group.span.end_ns) for group in groups)
    return intersect(measured_windows(sorted_iterations(iterations)), [(first_ns, last_ns)])


def _bubbles(windows: Sequence[Interval], ours: Sequence[Interval], tools: Sequence[Interval]) -> Share | None:
    wall_ns = length(windows)
    if not wall_ns:
        return None
    left, right = (length(bubbles_in(windows, compute)) / wall_ns for compute in (ours, tools))
    return Share(ours=left, tool=right)


def _hidden(
    spans: Iterable[Span], windows: Sequence[Interval], ours: Sequence[Interval], tools: Sequence[Interval]
) -> Share | None:
    work = intersect(windows, host_work(spans))
    work_ns = length(work)
    if not work_ns:
        return None
    return Share(ours=length(intersect(work, ours)) / work_ns, tool=length(intersect(work, tools)) / work_ns)


def _inner_gaps(compute: Sequence[ToolGroup], windows: Sequence[Interval]) -> float | None:
    wall_ns = length(windows)
    if not wall_ns or any(group.inner_gap_ns is None for group in compute):
        return None
    whole = merge((group.start_ns, group.end_ns) for group in compute)
    pieces = merge((piece.start_ns, piece.end_ns) for group in compute for piece in group.work)
    return length(intersect(windows, subtract(whole, pieces))) / wall_ns


def _rows(groups: Iterable[ToolGroup]) -> tuple[WorkAgreement, ...]:
    by_name: dict[tuple[str, str], list[ToolGroup]] = defaultdict(list)
    for group in groups:
        by_name[group.span.lane, group.span.name].append(group)
    names = sorted(by_name, key=lambda key: (key[0] != COMPUTE_LANE, key))
    return tuple(_row(name, by_name[name]) for name in names)


def _row(key: tuple[str, str], groups: Sequence[ToolGroup]) -> WorkAgreement:
    ours = [group.span.duration_ns for group in groups]
    tools = [group.end_ns - group.start_ns for group in groups]
    shares = [abs(left - right) / right for left, right in zip(ours, tools, strict=True) if right]
    waits = [group.start_ns - group.launched_ns for group in groups if group.launched_ns is not None]
    gaps = [gap for group in groups if (gap := group.inner_gap_ns) is not None]
    is_whole = len(gaps) == len(groups)
    return WorkAgreement(
        lane=key[0],
        name=key[1],
        count=len(groups),
        start=Distance.of(group.span.start_ns - group.start_ns for group in groups),
        end=Distance.of(group.span.end_ns - group.end_ns for group in groups),
        length=Distance.of(left - right for left, right in zip(ours, tools, strict=True)),
        length_share_p50=float(np.percentile(shares, 50)) if shares else None,
        length_share_p99=float(np.percentile(shares, 99)) if shares else None,
        total_share=sum(ours) / sum(tools) - 1 if sum(tools) else None,
        after_launch_p50_ns=float(np.median(waits)) if waits else None,
        tool_length_p50_ns=float(np.median(tools)),
        pieces_p50=float(np.median([len(group.work) for group in groups])),
        inner_gap_share=sum(gaps) / sum(tools) if is_whole and any(tools) else None,
        inner_gap_p50_ns=float(np.median(gaps)) if is_whole else None,
    )


def _enqueued(group: ToolGroup) -> int:
    assert group.span.enqueued_ns is not None
    return group.span.enqueued_ns
