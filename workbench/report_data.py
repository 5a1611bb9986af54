"""What the report's timeline draws: columns of integers, relative to the run's first moment.

Names are sent once, and times are small numbers; :mod:`workbench.report_pack` makes it smaller still.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tracing.blame import blame_bubbles
from tracing.intervals import Interval, intersect, subtract
from tracing.records import BatchInfo, Category, GraphUse, IterationRecord, Span
from tracing.void_words import void_words
from tracing.windows import device_union, host_work
from workbench.report_border import Border
from workbench.report_idle import blame_columns

ORDER_COLOURS: dict[str, str] = {
    "legacy": "#C6BEB4",
    "no_overlap": "#DDB892",
    "overlap": "#85664A",
    "overlap_admit": "#6F5B2E",
    "mtp_legacy": "#B4AB9F",
    "mtp_no_overlap": "#CBA377",
    "mtp_overlap": "#5A4433",
    "mtp_overlap_late": "#3E2A1C",
    "mtp_overlap_admit": "#4A3D1F",
    "primer": "#F0E2C6",
    "drain": "#B39A84",
    "mtp_drain": "#A08770",
    "mtp_primer": "#E2D1AE",
    "shared_drain": "#A68C75",
    "mtp_shared_drain": "#937B64",
    "dummy": "#E6E6E6",
    "mtp_dummy": "#D8D8D8",
    "mtp_legacy_dummy": "#CACACA",
}
"""One colour an order: shades of earth, so that none is mistaken for a phase's or for a mark. Greys: dummy ones."""

_VIEW_ITERATIONS = 4
_LANE_OF = {
    Category.PHASE: "phase",
    Category.DETAIL: "detail",
    Category.WAIT: "wait",
    Category.INSTANT: "instant",
    Category.COUNTER: "counter",
}


@dataclass(frozen=True, slots=True)
class View:
    """The stretch a run's timeline first shows: its times are aligned at ``start_ns``."""

    start_ns: int
    end_ns: int
    is_steady: bool
    """Whether these are decode iterations of one order and one batch size."""
    stretch: Interval | None = None
    """The whole stretch of such iterations that it is cut from."""


def initial_views(runs: Sequence[Sequence[IterationRecord]]) -> list[View]:
    """A few steady decode iterations of each run; of the same batch size in all runs where there is one.

    Without a steady stretch a view starts at the run's first iteration.
    """
    stretches = [_steady_stretches(sorted(run, key=lambda record: (record.begin_ns, record.iteration))) for run in runs]
    common = set.intersection(*(set(by_rows) for by_rows in stretches)) if stretches else set()
    rows = max(common, key=lambda rows: (min(len(by_rows[rows]) for by_rows in stretches), rows), default=None)
    return [_view(run, by_rows, rows) for run, by_rows in zip(runs, stretches, strict=True)]


def run_data(
    spans: Sequence[Span], iterations: Sequence[IterationRecord], view: View, border: Border | None = None
) -> dict[str, Any]:
    """Everything the page draws of one run; every span is in exactly one lane."""
    records = sorted(iterations, key=lambda record: (record.begin_ns, record.iteration))
    starts = [span.start_ns for span in spans] + [record.begin_ns for record in records]
    origin = min(starts, default=0)
    work, compute, blame = host_work(spans), device_union(spans), blame_bubbles(spans, records)
    names: dict[str, int] = {}
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns, span.depth)):
        lanes[_lane(span)].append(span)
    return {
        "align": view.start_ns - origin,
        "viewLength": view.end_ns - view.start_ns,
        "isSteady": view.is_steady,
        "border": _border_entry(border, origin),
        "iterations": [_iteration_entry(record, origin) for record in records],
        "lanes": {lane: _columns(members, origin, names) for lane, members in lanes.items()},
        "hidden": _flat(intersect(work, compute), origin),
        "exposed": _flat(subtract(work, compute), origin) if compute else [],
        "bubbles": _flat(((bubble.start_ns, bubble.end_ns) for bubble in blame.bubbles), origin),
        "blame": blame_columns(blame, names),
        "names": list(names),
    }


def _steady_stretches(records: Sequence[IterationRecord]) -> dict[int, list[IterationRecord]]:
    """The longest run of like decode iterations, by rows."""
    longest: dict[int, list[IterationRecord]] = {}
    stretch: list[IterationRecord] = []
    for record in records:
        if not _is_decode(record):
            stretch = []
            continue
        stretch = [*stretch, record] if stretch and _are_alike(stretch[-1], record) else [record]
        rows = _rows(record)
        if len(stretch) >= len(longest.get(rows, [])):
            longest[rows] = stretch
    return longest


def _is_decode(record: IterationRecord) -> bool:
    batch = record.launched
    return batch is not None and batch.kind == "decode" and not record.is_void


def _are_alike(left: IterationRecord, right: IterationRecord) -> bool:
    return left.order == right.order and _rows(left) == _rows(right)


def _rows(record: IterationRecord) -> int:
    return 0 if record.launched is None else record.launched.num_decode


def _view(run: Sequence[IterationRecord], stretches: dict[int, list[IterationRecord]], rows: int | None) -> View:
    if stretches:
        stretch = stretches[rows] if rows is not None else max(stretches.values(), key=len)
        first = max(0, (len(stretch) - _VIEW_ITERATIONS) // 2)
        shown = stretch[first : first + _VIEW_ITERATIONS]
        whole = (stretch[0].begin_ns, stretch[-1].end_ns)
        return View(shown[0].begin_ns, shown[-1].end_ns, is_steady=True, stretch=whole)
    shown = sorted(run, key=lambda record: (record.begin_ns, record.iteration))[:_VIEW_ITERATIONS]
    return View(shown[0].begin_ns, shown[-1].end_ns, is_steady=False) if shown else View(0, 1, is_steady=False)


def _lane(span: Span) -> str:
    return f"device {span.lane}" if span.category is Category.DEVICE else _LANE_OF[span.category]


def _columns(spans: Sequence[Span], origin: int, names: dict[str, int]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {
        "start": [span.start_ns - origin for span in spans],
        "length": [span.duration_ns for span in spans],
        "name": [names.setdefault(span.name, len(names)) for span in spans],
        "phase": [-1 if span.phase is None else names.setdefault(span.phase, len(names)) for span in spans],
        "iteration": [span.iteration for span in spans],
        "depth": [span.depth for span in spans],
    }
    if any(span.enqueued_ns is not None for span in spans):
        columns["enqueued"] = [None if s.enqueued_ns is None else s.enqueued_ns - origin for s in spans]
    if any(span.value is not None for span in spans):
        columns["value"] = [span.value for span in spans]
    if any(span.args for span in spans):
        columns["args"] = [", ".join(f"{key}={value}" for key, value in span.args.items()) for span in spans]
    return columns


def _iteration_entry(record: IterationRecord, origin: int) -> dict[str, Any]:
    return {
        "n": record.iteration,
        "start": record.begin_ns - origin,
        "length": record.duration_ns,
        "order": record.order,
        "reason": record.reason,
        "consumed": _batch_text(record.consumed),
        "consumedFrom": None if record.consumed is None else record.consumed.iteration,
        "launched": _batch_text(record.launched),
        "launchedFrom": None if record.launched is None else record.launched.iteration,
        "graph": _graph_text(record.graph),
        "tokens": record.new_tokens,
        "wasted": ", ".join(f"{cause} {count}" for cause, count in record.wasted_rows.items()),
        "void": void_words(record.void_reasons),
    }


def _border_entry(border: Border | None, origin: int) -> dict[str, Any] | None:
    if border is None:
        return None
    return {
        "at": border.at_ns - origin,
        "finished": border.finished,
        "next": border.next_forward,
        "nextStart": border.next_start_ns - origin,
        "workStart": border.work[0][0] - origin,
        "workEnd": border.work[-1][1] - origin,
        "extent": border.extent_ns,
        "isHidden": border.is_hidden,
        "isSteady": border.is_steady,
        "text": border.text,
        "choice": "" if border.choice is None else border.choice.text,
    }


def _batch_text(batch: BatchInfo | None) -> str:
    if batch is None:
        return "none"
    return f"{batch.num_tokens} tokens, {batch.num_prefill} prefill and {batch.num_decode} decode rows"


def _graph_text(use: GraphUse | None) -> str:
    if use is None:
        return "no forward"
    if not use.hit:
        return f"{use.label}: {use.miss_reason or 'unknown'}"
    return f"{use.label} {use.dims}, {use.padding_tokens} padding tokens"


def _flat(stretches: Iterable[Interval], origin: int) -> list[int]:
    """[start, length, start, length, ...]."""
    return [number for start, end in stretches for number in (start - origin, end - start)]
