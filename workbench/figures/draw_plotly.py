"""A chart by plotly: for notebooks and HTML files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from workbench.figures.chart import Axes, Chart, Mark, Series
from workbench.figures.errors import imported

_DASHES = ("solid", "dash", "dot", "dashdot")
_SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up")
_TEMPLATES = {"light": "plotly_white", "dark": "plotly_dark"}
_OUTLINE = "#808080"
"""Seen on both grounds; the lightest and the darkest colours need it."""


def draw(chart: Chart, footer: Sequence[str], template: str) -> Any:
    """A ``plotly.graph_objects.Figure``.

    Args:
        chart: What to draw.
        footer: Lines below it.
        template: ``light`` or ``dark``.

    Raises:
        FigureImportError: plotly is not installed.
    """
    subplots = imported("plotly.subplots", "showing a figure")
    titles = [_text(axes.title) for axes in chart.axes]
    figure = subplots.make_subplots(rows=1, cols=len(chart.axes), subplot_titles=titles, shared_yaxes="all")
    named: set[str] = set()
    for column, axes in enumerate(chart.axes, start=1):
        for series in axes.series:
            if any(value is not None for value in series.y):
                figure.add_trace(_trace(series, is_named=series.name in named), row=1, col=column)
                named.add(series.name)
        _set_axes(figure, axes, column, is_shown=not chart.is_empty)
    figure.update_annotations(font_size=13)  # so far these are the axes' titles
    above, below = 60 + 17 * max(axes.title.count("\n") + 1 for axes in chart.axes), 68 + 13 * len(footer)
    figure.update_layout(
        title={"text": _text(chart.title), "x": 0.01, "y": 1, "yanchor": "top", "pad": {"t": 12}},
        template=_TEMPLATES[template],
        barmode="stack",
        height=320 + above + below,
        margin={"l": 70, "r": 20, "t": above, "b": below},
        showlegend=len(named) > 1,
        hovermode="closest",
        font={"size": 12},
    )
    if chart.is_empty:
        _explain(figure, chart.hint)
    _add_footer(figure, footer)
    return figure


def _set_axes(figure: Any, axes: Axes, column: int, *, is_shown: bool) -> None:
    figure.update_xaxes(title_text=_text(axes.x_title), visible=is_shown, row=1, col=column)
    # The ends of an axis of shares are hit by points, which would be cut in half.
    scale = {"rangemode": "tozero"} if axes.y_top is None else {"range": [-0.02 * axes.y_top, 1.04 * axes.y_top]}
    title = _text(axes.y_title) if column == 1 else None
    figure.update_yaxes(title_text=title, visible=is_shown, row=1, col=column, **scale)


def _trace(series: Series, *, is_named: bool) -> dict[str, Any]:
    common = {
        "name": _text(series.name),
        "legendgroup": series.name,
        "showlegend": not is_named,
        "x": tuple(_text(at) if isinstance(at, str) else at for at in series.x),
        "y": series.y,
        "hovertext": [_text(note) for note in series.notes] or None,
    }
    if series.mark is Mark.BARS:
        # Without its own background a hatch is drawn on the page's.
        pattern: dict[str, Any] = {"shape": series.hatch, "fillmode": "overlay", "fgcolor": "rgba(0,0,0,.55)"}
        marker: dict[str, Any] = {"color": series.colour, "pattern": {**pattern, "size": 6}}
        return {"type": "bar", **common, "width": series.widths or None, "marker": marker}
    if series.mark is Mark.STEPS:
        line = {"color": series.colour, "dash": _DASHES[series.kind % len(_DASHES)], "shape": "hv", "width": 2}
        return {"type": "scatter", **common, "mode": "lines", "line": line, "connectgaps": False}
    symbol = _SYMBOLS[series.kind % len(_SYMBOLS)]
    marker = {"color": series.colour, "symbol": symbol, "size": 8, "line": {"color": _OUTLINE, "width": 1}}
    return {"type": "scatter", **common, "mode": "markers", "marker": marker}


def _explain(figure: Any, hint: str) -> None:
    figure.add_annotation(
        text=_text(hint), xref="paper", yref="paper", x=0.5, y=0.5, showarrow=False, font={"size": 14}, width=620
    )


def _add_footer(figure: Any, footer: Sequence[str]) -> None:
    figure.add_annotation(
        text="<br>".join(map(_text, footer)),
        xref="paper",
        yref="paper",
        x=0,
        y=0,
        yshift=-52,
        xanchor="left",
        yanchor="top",
        align="left",
        showarrow=False,
        font={"size": 10},
        opacity=0.75,
    )


def _text(text: str) -> str:
    """Plotly reads tags in its texts."""
    return escape(text, quote=False).replace("\n", "<br>")
