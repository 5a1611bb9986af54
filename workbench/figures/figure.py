"""A figure: shown by plotly, saved as a file, its numbers a table, its footer saying what they depend on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.figures.chart import Chart
from workbench.figures.errors import FigureError, imported
from workbench.figures.provenance import Provenance

if TYPE_CHECKING:
    import pyarrow as pa

TEMPLATES = ("light", "dark")
SUFFIXES = (".svg", ".png", ".pdf", ".html")
_FOOTER_CHARACTERS = 150
"""Of a line; as wide as a figure with one pair of axes."""


class Figure:
    """Shows itself at the end of a notebook cell.

    Args:
        chart: What is drawn.
        data: The table behind it.
        provenance: Of its runs.
        template: ``light`` or ``dark``.

    Raises:
        FigureError: there is no such template.
    """

    def __init__(self, chart: Chart, data: pa.Table, provenance: Provenance, template: str = "light") -> None:
        self.chart = chart
        self.data = data
        self.provenance = provenance
        self.template = _checked(template)

    @cached_property
    def figure(self) -> Any:
        """As a ``plotly.graph_objects.Figure``, to look at or to change; :meth:`save` draws anew.

        Raises:
            FigureImportError: plotly is not installed.
        """
        from workbench.figures.draw_plotly import draw

        return draw(self.chart, self.footer, self.template)

    @property
    def footer(self) -> list[str]:
        """What the numbers depend on, in lines."""
        return footer_lines(self.provenance.parts, _FOOTER_CHARACTERS)

    def widget(self) -> Any:
        """As a ``plotly.graph_objects.FigureWidget``, to be put beside other widgets.

        Raises:
            FigureImportError: plotly or anywidget is not installed.
        """
        imported("anywidget", "a figure among widgets")
        return imported("plotly.graph_objects", "showing a figure").FigureWidget(self.figure)

    def save(self, path: str | Path, *, template: str | None = None) -> Path:
        """Write it with its footer; folders on the way are made.

        SVG, PNG and PDF are drawn by matplotlib from the same chart, HTML by plotly; it opens offline (5 MB).
        The footer's text is in an image's metadata as well.

        Args:
            path: The file; its suffix, one of :data:`SUFFIXES`, says which kind. An existing one is replaced.
            template: ``light`` or ``dark``; None: the figure's own.

        Returns:
            The path written.

        Raises:
            FigureError: the suffix or the template is unknown.
            FigureImportError: the library that draws it is not installed.
            OSError: the disk refuses.
        """
        target, template = Path(path), _checked(template or self.template)
        if target.suffix.lower() not in SUFFIXES:
            raise FigureError(f"{target} must end in one of {', '.join(SUFFIXES)}: its suffix says what to write")
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.suffix.lower() == ".html":
            from workbench.figures.draw_plotly import draw

            draw(self.chart, self.footer, template).write_html(target, include_plotlyjs=True)
        else:
            from workbench.figures.draw_static import save

            save(self.chart, self.footer, template, target, self.provenance.text)
        return target

    def __repr__(self) -> str:
        runs = ", ".join(run.name for run in self.provenance.runs)
        empty = f"; {self.chart.hint}" if self.chart.is_empty else ""
        return f"<Figure {self.chart.title} of {runs}: {self.data.num_rows:,} rows{empty}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        shown: dict[str, Any] = self.figure._repr_mimebundle_(include, exclude)
        return {**shown, "text/plain": repr(self)}


def footer_lines(parts: Sequence[str], width: int) -> list[str]:
    """As many parts in a line as fit; none is broken."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return lines


def _checked(template: str) -> str:
    if template not in TEMPLATES:
        raise FigureError(f"template must be one of {', '.join(TEMPLATES)}; got {template!r}")
    return template
