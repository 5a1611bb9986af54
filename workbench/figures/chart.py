"""What a figure draws, as values: no library of plots is needed to make one, and each can draw it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tracing.records import PHASE_COLOURS

RUN_COLOURS = tuple(PHASE_COLOURS[phase] for phase in ("resolve", "forward", "sample", "admit", "prepare", "emit"))
"""One a run, of Okabe and Ito's; dashes and symbols change with them, so that none is told by its colour alone."""
HIDDEN_COLOUR, EXPOSED_COLOUR = PHASE_COLOURS["sample"], PHASE_COLOURS["resolve"]


class Mark(Enum):
    """How a series is drawn."""

    STEPS = "steps"  # a line that keeps its value until the next point
    POINTS = "points"
    BARS = "bars"  # of several series on top of each other


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One thing that the legend names."""

    name: str
    mark: Mark
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]
    """None: a gap."""
    colour: str
    kind: int = 0
    """Chooses dash and symbol."""
    hatch: str = ""
    """Of bars: one of the patterns ``/ \\ x - | + .``, which plotly and matplotlib name alike."""
    widths: tuple[float, ...] = ()
    """Of bars on an axis of numbers."""
    notes: tuple[str, ...] = ()
    """What shows under the pointer, a point each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """One pair of axes; titles name the unit."""

    title: str
    """May have several lines."""
    x_title: str
    y_title: str
    series: tuple[Series, ...]
    y_top: float | None = None
    """Where the axis ends, which begins at 0; None: where the numbers do. All axes of a chart have the same."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not any(value is not None for series in self.series for value in series.y)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Axes side by side."""

    title: str
    axes: tuple[Axes, ...]
    hint: str = ""
    """Why there is nothing to see and what to do; shown where no axes have anything to draw."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return all(axes.is_empty for axes in self.axes)


def run_colour(place: int) -> str:
    """Of the run at ``place``; after six runs they come again, with other dashes."""
    return RUN_COLOURS[place % len(RUN_COLOURS)]
