"""Why the device stood idle: its bubbles, divided over what the host did meanwhile."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tracing.blame import LAUNCH_LATENCY, Blame, blame_bubbles
from tracing.host_line import BETWEEN_PHASES, OUTSIDE_ITERATIONS, WAKE_UP
from tracing.records import PHASE_COLOURS, RANKS_WAIT
from tracing.trace import Trace
from workbench.figures.chart import Axes, Chart, Mark, Series
from workbench.figures.errors import FigureError
from workbench.figures.sources import why_empty
from workbench.figures.windows import Window, windows_of

if TYPE_CHECKING:
    import pyarrow as pa

_LOOKS = {
    LAUNCH_LATENCY: (PHASE_COLOURS["iteration"], ""),
    WAKE_UP: (PHASE_COLOURS["wait"], "x"),
    BETWEEN_PHASES: (PHASE_COLOURS["other"], "."),
    OUTSIDE_ITERATIONS: (PHASE_COLOURS["other"], "|"),
    f"wait for {RANKS_WAIT}": (PHASE_COLOURS[RANKS_WAIT], "/"),
}
"""Colour and hatch of what is no phase; another wait is grey and striped."""


def bubbles_table(traces: Sequence[Trace], window: int | None = None) -> pa.Table:
    """One row a window of timed iterations and cause.

    Columns ``run``, ``first_iteration``, ``last_iteration``, ``num_iterations``, ``cause`` as
    :class:`tracing.blame.BlameRow` names it or ``launch latency``, ``idle_ns``.

    A bubble counts where it begins. The rows of a run sum to all its idle time; a window without any has one row of 0
    without a cause, so that iterations sum, too.
    """
    import pyarrow as pa

    whole = ("first_iteration", "last_iteration", "num_iterations")
    schema = pa.schema(
        [
            ("run", pa.string()),
            *((name, pa.int64()) for name in whole),
            ("cause", pa.string()),
            ("idle_ns", pa.int64()),
        ]
    )
    rows = [row for trace in traces for row in _rows(trace, window)]
    return pa.Table.from_pylist(rows, schema=schema)


def _rows(trace: Trace, length: int | None) -> list[dict[str, Any]]:
    blame = blame_bubbles(trace.records.spans, trace.records.iterations)
    windows = windows_of(trace.records.iterations, length)
    if not any(span.is_device for span in trace.records.spans):
        return []
    rows = []
    for window, causes in zip(windows, _idle_by_window(blame, windows), strict=True):
        parts: list[tuple[str | None, int]] = [*sorted(causes.items())] or [(None, 0)]
        for cause, idle_ns in parts:
            rows.append(
                {
                    "run": trace.name,
                    "first_iteration": window.records[0].iteration,
                    "last_iteration": window.records[-1].iteration,
                    "num_iterations": len(window.records),
                    "cause": cause,
                    "idle_ns": idle_ns,
                }
            )
    return rows


def _idle_by_window(blame: Blame, windows: Sequence[Window]) -> list[dict[str, int]]:
    starts = [window.start_ns for window in windows]
    place = {bubble.index: bisect_right(starts, bubble.start_ns) - 1 for bubble in blame.bubbles}
    found: list[dict[str, int]] = [defaultdict(int) for _ in windows]
    for row in blame.rows:
        found[place[row.bubble]][row.label if row.is_late else LAUNCH_LATENCY] += row.time_ns
    return found


def bubbles(traces: Sequence[Trace], *, by: str | None = None, window: int | None = None) -> tuple[pa.Table, Chart]:
    """Idle time of a mean iteration, stacked by cause.

    Args:
        traces: The runs.
        by: ``run``: a bar a run. ``iteration``: a bar a window, a pair of axes a run. None: the first for several runs.
        window: Iterations of a window; None: about sixty windows.

    Raises:
        FigureError: ``by`` is something else.
    """
    by = by or ("run" if len(traces) > 1 else "iteration")
    table = bubbles_table(traces, window)
    if by == "run":
        return table, bubbles_by_run(table, traces)
    if by == "iteration":
        return table, bubbles_by_iteration(table, traces)
    raise FigureError(f"by must be 'run' or 'iteration', got {by!r}")


def bubbles_by_run(table: pa.Table, traces: Sequence[Trace]) -> Chart:
    """A bar a run: what its ``bubble / iteration`` is made of."""
    rows, runs = table.to_pylist(), tuple(trace.name for trace in traces)
    timed = {trace.name: trace.summary.num_timed for trace in traces}
    series = []
    for cause in _causes(rows):
        idle = {run: sum(row["idle_ns"] for row in rows if (row["run"], row["cause"]) == (run, cause)) for run in runs}
        y = tuple(idle[run] / timed[run] / 1e3 if timed[run] else None for run in runs)
        series.append(_bars(cause, runs, y))
    axes = Axes(title="", x_title="run", y_title=_IDLE_TITLE, series=tuple(series))
    return Chart(title="Bubbles by cause", axes=(axes,), hint=_hint(traces))


def bubbles_by_iteration(table: pa.Table, traces: Sequence[Trace]) -> Chart:
    """A bar a window of iterations, a pair of axes a run."""
    rows = table.to_pylist()
    causes = _causes(rows)
    axes = [
        Axes(
            title=trace.name,
            x_title="iteration",
            y_title=_IDLE_TITLE,
            series=tuple(_window_bars(cause, [row for row in rows if row["run"] == trace.name]) for cause in causes),
        )
        for trace in traces
    ]
    return Chart(title="Bubbles by cause", axes=tuple(axes), hint=_hint(traces))


_IDLE_TITLE = "device idle of a mean iteration (µs)"


def _window_bars(cause: str, rows: Sequence[dict[str, Any]]) -> Series:
    members = [row for row in rows if row["cause"] == cause]
    widths = [row["last_iteration"] - row["first_iteration"] + 1 for row in members]
    x = tuple(row["first_iteration"] + (width - 1) / 2 for row, width in zip(members, widths, strict=True))
    y = tuple(row["idle_ns"] / row["num_iterations"] / 1e3 for row in members)
    notes = tuple(f"iterations {row['first_iteration']} to {row['last_iteration']}" for row in members)
    return _bars(cause, x, y, widths=tuple(map(float, widths)), notes=notes)


def _bars(cause: str, x: tuple[float | str, ...], y: tuple[float | None, ...], **more: Any) -> Series:
    colour, hatch = _look(cause)
    return Series(name=cause, mark=Mark.BARS, x=x, y=y, colour=colour, hatch=hatch, **more)


def _look(cause: str) -> tuple[str, str]:
    if cause.startswith("wait for ") and cause not in _LOOKS:
        return PHASE_COLOURS["wait"], "/"
    return _LOOKS.get(cause, (PHASE_COLOURS.get(cause, PHASE_COLOURS["other"]), ""))


def _causes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Largest first, so that it stands at the bottom of every bar."""
    totals: dict[str, int] = defaultdict(int)
    for row in rows:
        if row["cause"] is not None:
            totals[row["cause"]] += row["idle_ns"]
    return sorted(totals, key=lambda cause: (-totals[cause], cause))


def _hint(traces: Sequence[Trace]) -> str:
    if any(span.is_device for trace in traces for span in trace.records.spans):
        return why_empty(traces, "The device was never idle between two pieces of its work.")
    return why_empty(traces, "No device work was recorded, so nothing is known of bubbles: use device='cpu' or 'cuda'.")
