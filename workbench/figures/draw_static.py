"""A chart by matplotlib: for SVG, PNG and PDF files.

Plotly's own export runs a Chrome for each image, which a machine with a GPU seldom has.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.figures.chart import Axes, Chart, Mark, Series
from workbench.figures.errors import imported

_DASHES = ("-", "--", ":", "-.")
_SYMBOLS = ("o", "s", "D", "P", "X", "^")
_SETTINGS = {
    "svg.fonttype": "none",  # text stays text: it can be searched, and edited
    "svg.hashsalt": "workbench",  # the same figure gives the same file
    "pdf.fonttype": 42,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that a file looks the same everywhere
    "text.parse_math": False,  # a run may be called $x$
    "hatch.linewidth": 0.6,
}


@dataclass(frozen=True, slots=True)
class _Look:
    ground: str
    ink: str
    grid: str


LOOKS = {"light": _Look("#FFFFFF", "#1C2330", "#D9DCE1"), "dark": _Look("#14181F", "#E4E8EE", "#39414D")}


def save(chart: Chart, footer: Sequence[str], template: str, path: Path, provenance: str) -> None:
    """Write an image; its kind is the path's suffix.

    Args:
        chart: What to draw.
        footer: Lines below it.
        template: ``light`` or ``dark``.
        path: ``.svg``, ``.png`` or ``.pdf``; an existing file is replaced.
        provenance: Stands in the file's metadata.

    Raises:
        FigureImportError: matplotlib is not installed.
        OSError: the disk refuses.
    """
    matplotlib = imported("matplotlib", f"saving a figure as {path.suffix}")
    look = LOOKS[template]
    with matplotlib.rc_context(_SETTINGS):
        canvas = draw(chart, footer, look)
        metadata = _metadata(path.suffix, chart.title, provenance)
        canvas.savefig(path, format=path.suffix[1:], facecolor=look.ground, dpi=150, metadata=metadata)


def _metadata(suffix: str, title: str, provenance: str) -> dict[str, str | None]:
    """By the names that each kind of file has for them; without dates, so that files can be compared."""
    if suffix == ".svg":
        return {"Title": title, "Description": provenance, "Date": None}
    if suffix == ".pdf":
        return {"Title": title, "Subject": provenance, "CreationDate": None}
    return {"Title": title, "Description": provenance}


def draw(chart: Chart, footer: Sequence[str], look: _Look) -> Any:
    """A ``matplotlib.figure.Figure``: a strip on top for title and legend, axes, a strip for the footer; in inches."""
    figures = imported("matplotlib.figure", "saving a figure")
    title_lines = max(axes.title.count("\n") for axes in chart.axes)
    width, top, below = max(9.0, 4.6 * len(chart.axes)), 1.1 + 0.2 * title_lines, 0.9 + 0.15 * len(footer)
    height = 3.6 + top + below
    canvas = figures.Figure(figsize=(width, height), facecolor=look.ground)
    sides = canvas.subplots(1, len(chart.axes), squeeze=False, sharey=True)[0]
    canvas.subplots_adjust(
        left=0.75 / width, right=1 - 0.2 / width, top=1 - top / height, bottom=below / height, wspace=0.08
    )
    handles: dict[str, Any] = {}
    for side, axes in zip(sides, chart.axes, strict=True):
        for name, handle in _draw_axes(side, axes, look).items():
            handles.setdefault(name, handle)
        if chart.is_empty:
            side.set_axis_off()
    first = chart.axes[0]
    sides[0].set_ylabel(first.y_title, color=look.ink)
    # After all are drawn, for it ends the growing of the scale. Shares reach its ends: no mark is to be cut in half.
    sides[0].set_ylim(*((0, None) if first.y_top is None else (-0.02 * first.y_top, 1.04 * first.y_top)))
    canvas.text(0.15 / width, 1 - 0.12 / height, chart.title, fontsize=13, va="top", color=look.ink)
    canvas.text(0.15 / width, 0.08 / height, "\n".join(footer), fontsize=7, va="bottom", alpha=0.8, color=look.ink)
    if handles:
        _draw_legend(canvas, handles, look, 1 - 0.38 / height)
    if chart.is_empty:
        hint = "\n".join(textwrap.wrap(chart.hint, 70))
        canvas.text(0.5, 0.5, hint, fontsize=12, ha="center", va="center", color=look.ink)
    return canvas


def _draw_axes(side: Any, axes: Axes, look: _Look) -> dict[str, Any]:
    """What the legend shows, by name."""
    side.set_facecolor(look.ground)
    side.set_title(axes.title, fontsize=10, color=look.ink)
    side.set_xlabel(axes.x_title, color=look.ink)
    side.tick_params(colors=look.ink)
    side.grid(axis="y", color=look.grid, linewidth=0.7)
    side.set_axisbelow(True)
    for name, spine in side.spines.items():
        spine.set_visible(name in ("left", "bottom"))
        spine.set_color(look.ink)
    heights: dict[float | str, float] = {}
    shown = [series for series in axes.series if any(value is not None for value in series.y)]
    return {series.name: _draw_series(side, series, heights, look) for series in shown}


def _draw_series(side: Any, series: Series, heights: dict[float | str, float], look: _Look) -> Any:
    x = _places(series)
    y = [float("nan") if value is None else value for value in series.y]
    if series.mark is Mark.BARS:
        return _draw_bars(side, series, heights)
    if series.mark is Mark.STEPS:
        dash = _DASHES[series.kind % len(_DASHES)]
        return side.plot(x, y, drawstyle="steps-post", color=series.colour, linestyle=dash)[0]
    symbol = _SYMBOLS[series.kind % len(_SYMBOLS)]
    return side.scatter(x, y, marker=symbol, s=32, color=series.colour, edgecolors=look.ink, linewidths=0.5)


def _draw_bars(side: Any, series: Series, heights: dict[float | str, float]) -> Any:
    """On top of what stands there."""
    x, y = _places(series), [value or 0.0 for value in series.y]
    bottoms = [heights.get(at, 0.0) for at in x]
    bars = side.bar(
        x,
        y,
        series.widths or 0.6,
        bottom=bottoms,
        color=series.colour,
        hatch=series.hatch * 2 or None,
        edgecolor="#00000080" if series.hatch else "none",
        linewidth=0,
    )
    heights.update({at: low + high for at, low, high in zip(x, bottoms, y, strict=True)})
    return bars


def _places(series: Series) -> list[float | str]:
    """Names in short lines, so that neighbours do not run into each other."""
    return [
        "\n".join(part for line in at.splitlines() for part in textwrap.wrap(line, 14)) if isinstance(at, str) else at
        for at in series.x
    ]


def _draw_legend(canvas: Any, handles: Mapping[str, Any], look: _Look, top: float) -> None:
    """Each name once, whatever the axes that show it."""
    canvas.legend(
        list(handles.values()),
        list(handles),
        loc="upper left",
        bbox_to_anchor=(0.0, top),
        ncols=min(len(handles), 6),
        frameon=False,
        fontsize=8,
        labelcolor=look.ink,
    )
