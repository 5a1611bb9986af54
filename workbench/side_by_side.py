"""Legs side by side, whether they just ran or were saved: a table, figures, timelines, and a panel with all of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from tracing.comparison import ShownNumbers, comparison_notes, reason_lines
from tracing.summary import Summary
from tracing.trace import Trace
from workbench.display import html_table
from workbench.repeats import (
    RepeatRow,
    dropped_notes,
    find_row,
    format_few,
    format_repeats,
    repeat_notes,
    repeat_rows,
    table_cells,
    table_head,
)
from workbench.report import RunView

if TYPE_CHECKING:
    from workbench.figures import Figure
    from workbench.widgets.timeline import TimelineWidget

_FIRST_METRICS = ("tokens/s", "step time p50")
"""Drawn of every comparison, repeat by repeat, beside the figures of single runs."""
_SHORT = (
    "tokens/s",
    "TTFT p50",
    "TPOT p50",
    "step time p50",
    "host work / iteration",
    "hidden share",
    "bubbles",
    "graph hit rate",
)
_SHORT_OF_DRAFTS = ("drafts accepted", "tokens / verified row")
"""The same where a leg has drafted."""
"""What ``print`` shows; :meth:`SideBySide.table` has the rest."""


class SideBySide(ABC):
    """What a comparison shows; the first leg is the baseline."""

    @property
    def repeats(self) -> int:
        """Measured runs a leg."""
        return len(self.summaries[0])

    @property
    @abstractmethod
    def summaries(self) -> Sequence[Sequence[Summary]]:
        """One a leg and repeat."""

    @property
    @abstractmethod
    def traces(self) -> Sequence[Trace]:
        """One a leg: of several repeats the one of median throughput."""

    @property
    @abstractmethod
    def conditions(self) -> Sequence[str]:
        """Sentences on what was the same for all legs."""

    @property
    @abstractmethod
    def verdict_text(self) -> str:
        """One line on the outputs."""

    @property
    def verdict_lines(self) -> Sequence[str]:
        """One a request whose outputs are not equal."""
        return ()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the legs."""
        return tuple(trace.name for trace in self.traces)

    @cached_property
    def rows(self) -> list[RepeatRow]:
        """Every metric, over legs and repeats."""
        return repeat_rows(self.summaries)

    @property
    def notes(self) -> list[str]:
        """What must be known to read the table."""
        told = comparison_notes(self._shown_summaries(), repeats=self.repeats, shown=self._shown_numbers())
        paired = [*repeat_notes(self.names, self.repeats), *dropped_notes(self.names, self.rows)]
        return [*self.conditions, *paired, *told]

    def table(self) -> str:
        """The legs side by side, one row a metric: median, spread over repeats, paired ratio with its interval."""
        reasons = reason_lines(self._shown_summaries())
        return "\n".join([format_repeats(self.names, self.rows, self.repeats), "", "orders and reasons", *reasons])

    def short_table(self) -> str:
        """The rows that matter most, of those for which a leg has numbers: medians and ratios."""
        return format_few(self.names, self._short_rows())

    def _short_rows(self) -> list[RepeatRow]:
        labels = (*_SHORT, *_SHORT_OF_DRAFTS) if self._has_drafts else _SHORT
        rows = [find_row(label, self.rows) for label in labels]
        return [row for row in rows if any(leg.known for leg in row.legs)]

    def text(self, *, is_whole: bool = False) -> str:
        """A table, whole or short, what became of the outputs, and what must be known to read it."""
        table = self.table() if is_whole else self.short_table()
        verdict = [self.verdict_text, *(f"  {line}" for line in self.verdict_lines)]
        return "\n".join([table, "", *verdict, "", *self.notes])

    def figure(self, name: str, **options: Any) -> Figure:
        """One figure.

        Args:
            name: Of a figure of single runs (``latency``, ``throughput``, ``hidden``, ``bubbles``, ``drafts``), drawn
                of one run a leg; or of a metric in :meth:`table`, drawn repeat by repeat.
            **options: As for :func:`workbench.figures.make_figure`.

        Raises:
            FigureError: there is no such figure and no such metric.
        """
        from workbench.figures import FIGURES, FigureError, make_figure, metric_figure

        if name in FIGURES:
            return make_figure(name, self.traces, **options)
        try:
            row = find_row(name, self.rows)
        except ValueError as error:
            raise FigureError(f"{error}; or one of the figures {', '.join(FIGURES)}") from error
        return metric_figure(row, self.names, self.traces, **options)

    def figures(self, **options: Any) -> list[Figure]:
        """The metrics that matter most, repeat by repeat, and every figure of single runs."""
        from workbench.figures import FIGURES

        names = [name for name in FIGURES if name != "drafts" or self._has_drafts]
        return [self.figure(name, **options) for name in (*_FIRST_METRICS, *names)]

    @property
    def _has_drafts(self) -> bool:
        return any(summary.drafts is not None for repeats in self.summaries for summary in repeats)

    def timelines(self) -> TimelineWidget:
        """The legs' timelines one below the other on one axis, each from its first moment on."""
        from workbench.widgets.timeline import TimelineWidget

        widget = TimelineWidget()
        widget.show([RunView.of(trace) for trace in self.traces])
        return widget

    def panel(self, **options: Any) -> Any:
        """Table, timelines and figures below each other, as an ``ipywidgets.VBox``."""
        from ipywidgets import HTML, VBox

        figures = [figure.widget() for figure in self.figures(**options)]
        return VBox([HTML(self._repr_html_()), self.timelines(), *figures])

    def _shown_numbers(self) -> ShownNumbers:
        speeds, *medians = (find_row(label, self.rows) for label in ("tokens/s", "TTFT p50", "queue delay p50"))
        speedup = [None if ratio is None else ratio.median for ratio in speeds.ratios]
        return ShownNumbers(speedup, *([leg.median for leg in row.legs] for row in medians))

    def _shown_summaries(self) -> dict[str, Summary]:
        return {trace.name: trace.summary for trace in self.traces}

    def __str__(self) -> str:
        return f"{self.text()}\nAll {len(self.rows)} rows are in table()."

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {', '.join(self.names)}: {self.verdict_text}>"

    def _repr_html_(self) -> str:
        lines = "".join(f"<div>{escape(line)}</div>" for line in (*self.notes, *self.verdict_lines))
        return (
            f"<div style='font-family:sans-serif;line-height:1.5'><div><b>{escape(self.verdict_text)}</b></div>"
            f"<div style='overflow-x:auto'>{self._html_rows(self._short_rows(), has_sections=False)}</div>"
            f"<details><summary>All {len(self.rows)} rows</summary>"
            f"<div style='overflow-x:auto'>{self._html_rows(self.rows)}</div></details>"
            f"<div style='font-size:12px'>{lines}</div></div>"
        )

    def _html_rows(self, rows: Sequence[RepeatRow], *, has_sections: bool = True) -> str:
        head, cells, section = table_head(self.names, self.repeats), [], None
        for row in rows:
            if has_sections and row.section != section:
                section = row.section
                cells.append([f"<b>{escape(section)}</b>", *[""] * (len(head) - 1)])
            cells.append([escape(cell) for cell in table_cells(row, self.repeats)])
        return html_table([escape(cell) for cell in head], cells, is_html=True)
