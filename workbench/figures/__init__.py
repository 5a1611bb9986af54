"""Figures of runs: each a function from traces to a table, another from the table to a chart, and what draws charts.

figure = make_figure("latency", session)      # or a trace, a run, several of them, or {name: one}
figure.data                                   # the table behind it
figure.save("latency.svg")                    # or .png, .pdf, .html; with what its numbers depend on below
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from tracing.trace import Trace
from workbench.figures.bubbles import bubbles
from workbench.figures.drafts import drafts
from workbench.figures.errors import FigureError as FigureError
from workbench.figures.errors import FigureImportError as FigureImportError
from workbench.figures.figure import Figure as Figure
from workbench.figures.hidden import hidden
from workbench.figures.latency import latency
from workbench.figures.metric import metric_chart, metric_table
from workbench.figures.provenance import Provenance
from workbench.figures.sources import Sources, traces_of
from workbench.figures.throughput import throughput
from workbench.repeats import RepeatRow

if TYPE_CHECKING:
    import pyarrow as pa

    from workbench.figures.chart import Chart

FIGURES: dict[str, Callable[..., tuple[pa.Table, Chart]]] = {
    "latency": latency,
    "throughput": throughput,
    "hidden": hidden,
    "bubbles": bubbles,
    "drafts": drafts,
}
"""What :func:`make_figure` can draw."""


def make_figure(name: str, sources: Sources, *, template: str = "light", **options: Any) -> Figure:
    """Draw one of :data:`FIGURES`. Void iterations, and requests that met one, are left out and counted in the footer.

    Args:
        name: Which.
        sources: A session, a trace, a finished run, several of them, or a mapping that names them.
        template: ``light`` or ``dark``.
        **options: Of the figure: ``by`` of ``latency`` and ``hidden``; ``window`` of ``throughput``; ``by`` and
            ``window`` of ``bubbles``.

    Raises:
        FigureError: the name, an option or a source is unknown.
    """
    if name not in FIGURES:
        raise FigureError(f"there is no figure {name!r}; there are {', '.join(FIGURES)}")
    make = FIGURES[name]
    known = list(signature(make).parameters)[1:]
    if unknown := [option for option in options if option not in known]:
        raise FigureError(f"the figure {name!r} has no option {unknown[0]!r}; it takes {', '.join(known) or 'none'}")
    traces = traces_of(sources)
    data, chart = make(traces, **options)
    return Figure(chart, data, Provenance.of(traces), template)


def metric_figure(row: RepeatRow, names: Sequence[str], traces: Sequence[Trace], *, template: str = "light") -> Figure:
    """One metric of a comparison, a point a leg and repeat.

    Args:
        row: The metric.
        names: Of the legs.
        traces: One a leg, for the footer.
        template: ``light`` or ``dark``.
    """
    return Figure(metric_chart(row, names), metric_table(row, names), Provenance.of(traces), template)
