"""How much of the host's work the device hid, iteration by iteration or order by order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tracing.trace import Trace
from workbench.figures.chart import EXPOSED_COLOUR, HIDDEN_COLOUR, Axes, Chart, Mark, Series
from workbench.figures.errors import FigureError
from workbench.figures.sources import why_empty
from workbench.report_data import ORDER_COLOURS

if TYPE_CHECKING:
    import pyarrow as pa

_COLUMNS = ("iteration", "order", "host_ns", "hidden_ns", "exposed_ns")
_MOST_POINTS = 2_000
"""Of a run; with more iterations a point is the mean of several."""
_OTHER_ORDER = "#BDBDBD"


def hidden_table(traces: Sequence[Trace]) -> pa.Table:
    """One row a timed iteration of a run with device times.

    Columns ``run``, ``iteration``, ``order``, ``host_ns``, ``hidden_ns``, ``exposed_ns``, and ``hidden_share`` from 0
    to 1, null where the host did no work.
    """
    import pyarrow as pa

    schema = pa.schema(
        [
            ("run", pa.string()),
            ("iteration", pa.int64()),
            ("order", pa.string()),
            *((name, pa.int64()) for name in ("host_ns", "hidden_ns", "exposed_ns")),
            ("hidden_share", pa.float64()),
        ]
    )
    rows = [
        {**row, "run": trace.name, "hidden_share": row["hidden_ns"] / row["host_ns"] if row["host_ns"] else None}
        for trace in traces
        for row in trace.iterations.select([*_COLUMNS, "is_void"]).to_pylist()
        if not row["is_void"] and row["hidden_ns"] is not None
    ]
    return pa.Table.from_pylist(rows, schema=schema)


def hidden(traces: Sequence[Trace], *, by: str = "iteration") -> tuple[pa.Table, Chart]:
    """The hidden share of each iteration, or with ``by="order"`` the mean hidden and exposed time of each order.

    Raises:
        FigureError: ``by`` is something else.
    """
    table = hidden_table(traces)
    if by == "iteration":
        return table, hidden_by_iteration(table, traces)
    if by == "order":
        return table, hidden_by_order(table, traces)
    raise FigureError(f"by must be 'iteration' or 'order', got {by!r}")


def hidden_by_iteration(table: pa.Table, traces: Sequence[Trace]) -> Chart:
    """A point an iteration, its colour the order; a pair of axes a run."""
    by_run = {trace.name: [row for row in table.to_pylist() if row["run"] == trace.name] for trace in traces}
    orders = list(dict.fromkeys(row["order"] for rows in by_run.values() for row in rows))
    stride = max(1, -(-max(map(len, by_run.values()), default=0) // _MOST_POINTS))
    each = f", a point the mean of {stride}" if stride > 1 else ""
    axes = [
        Axes(
            title=run,
            x_title=f"iteration{each}",
            y_title="host work hidden (%)",
            y_top=100,
            series=tuple(_points(rows, order, kind, stride) for kind, order in enumerate(orders)),
        )
        for run, rows in by_run.items()
    ]
    return Chart(title="Hidden share of host work", axes=tuple(axes), hint=_hint(traces))


def _points(rows: Sequence[dict[str, Any]], order: str, kind: int, stride: int) -> Series:
    members = [row for row in rows if row["order"] == order and row["host_ns"]]
    groups = [members[first : first + stride] for first in range(0, len(members), stride)]
    shares = [100 * sum(row["hidden_ns"] for row in group) / sum(row["host_ns"] for row in group) for group in groups]
    works = [sum(row["host_ns"] for row in group) / len(group) / 1e3 for group in groups]
    return Series(
        name=order,
        mark=Mark.POINTS,
        x=tuple(group[0]["iteration"] for group in groups),
        y=tuple(shares),
        colour=ORDER_COLOURS.get(order, _OTHER_ORDER),
        kind=kind,
        notes=tuple(f"host work {work:,.0f} µs" for work in works),
    )


def hidden_by_order(table: pa.Table, traces: Sequence[Trace]) -> Chart:
    """A bar a run and order: what of a mean iteration's host work was hidden, and what was not."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in table.to_pylist():
        groups[row["order"] if len(traces) == 1 else f"{row['run']}\n{row['order']}"].append(row)
    series = tuple(_part(groups, *part) for part in _PARTS)
    axes = Axes(title="", x_title="order", y_title="host work of a mean iteration (µs)", series=series)
    return Chart(title="Host work by order", axes=(axes,), hint=_hint(traces))


_PARTS = (("hidden", "hidden_ns", HIDDEN_COLOUR, ""), ("exposed", "exposed_ns", EXPOSED_COLOUR, "/"))


def _part(groups: dict[str, list[dict[str, Any]]], name: str, column: str, colour: str, hatch: str) -> Series:
    means = [sum(row[column] for row in rows) / len(rows) / 1e3 for rows in groups.values()]
    return Series(
        name=name,
        mark=Mark.BARS,
        x=tuple(groups),
        y=tuple(means),
        colour=colour,
        hatch=hatch,
        notes=tuple(f"{len(rows):,} iterations" for rows in groups.values()),
    )


def _hint(traces: Sequence[Trace]) -> str:
    return why_empty(
        traces, "No device work was recorded, so nothing is known to be hidden: use device='cpu' or 'cuda'."
    )
