"""Bars on lanes, drawn to scale as inline-styled HTML; text takes the notebook theme's colour, light or dark."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape

from tracing.intervals import Interval, intersect, length, subtract
from tracing.records import PHASE_COLOURS, RANKS_WAIT

WAIT_FILL = "repeating-linear-gradient(135deg,#8A9097 0 2px,#C9CDD2 2px 6px)"
"""Opaque: it lies over the phase that waits."""
RANKS_FILL = f"repeating-linear-gradient(135deg,#8A7A00 0 2px,{PHASE_COLOURS[RANKS_WAIT]} 2px 6px)"
"""The host waits for other ranks."""
IDLE_FILL = "repeating-linear-gradient(135deg,rgba(217,72,95,.85) 0 2px,rgba(217,72,95,.12) 2px 7px)"

_LABEL_WIDTH_PX = 104
_WIDTH_PX = 860
_CHARACTER_PX = 6.4
_CUT_WIDTH = 1.5
"""What is left of a stretch that was cut, in percent."""


class Look(Enum):
    """How a bar is filled."""

    SOLID = "solid"
    OPEN = "open"  # fades out: it has not ended
    OUTLINE = "outline"  # has not begun
    HATCHED = "hatched"  # its colour is a CSS image
    LINE = "line"  # a moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar of a lane; ``left`` and ``width`` are percent of it."""

    left: float
    width: float
    colour: str
    label: str = ""
    """Shown where it fits."""
    title: str = ""
    """Shows under the pointer."""
    look: Look = Look.SOLID


class Scale:
    """Nanoseconds to percent. Pauses of a person, in which nothing at all happens, are cut out.

    Args:
        begin: At 0 %.
        end: At ``width`` %.
        busy: When something happens; sorted and disjoint.
        width: Percent that the stretch takes.
    """

    def __init__(self, begin: int, end: int, busy: Sequence[Interval], width: float = 100.0) -> None:
        longest = length(busy) / 2
        quiet = subtract([(begin, end)], busy)
        self.begin = begin
        self.cuts = [(low, high) for low, high in quiet if high - low > longest]
        self._kept = subtract([(begin, end)], self.cuts)
        self._unit = (width - _CUT_WIDTH * len(self.cuts)) / max(1, length(self._kept))

    @property
    def shown_ns(self) -> int:
        """Time that is drawn."""
        return length(self._kept)

    def at(self, time_ns: int) -> float:
        """Where a moment lies, in percent."""
        before = length(intersect(self._kept, [(self.begin, time_ns)])) if time_ns > self.begin else 0
        return before * self._unit + _CUT_WIDTH * sum(end <= time_ns for _, end in self.cuts)

    def bar(self, start_ns: int, end_ns: int, colour: str, **kinds: object) -> Bar:
        """A bar over a stretch, never too thin to be seen."""
        left = self.at(start_ns)
        return Bar(left=left, width=max(0.15, self.at(end_ns) - left), colour=colour, **kinds)  # type: ignore[arg-type]


def lanes_html(lanes: Mapping[str, Iterable[Bar]]) -> str:
    """One line a lane, name at the left."""
    return f"<div style='max-width:{_WIDTH_PX}px'>{''.join(_lane(name, bars) for name, bars in lanes.items())}</div>"


def legend_html(entries: Iterable[tuple[str, str]]) -> str:
    """(CSS background or border, what it means), side by side."""
    chips = "".join(
        f"<span style='margin-right:12px;white-space:nowrap'><span style='display:inline-block;width:12px;height:9px;"
        f"margin-right:4px;box-sizing:border-box;{style}'></span>{escape(text)}</span>"
        for style, text in entries
    )
    return f"<div style='font-size:11px;margin:2px 0 6px'>{chips}</div>"


def ink_on(colour: str) -> str:
    """Black or white, whichever is read more easily on ``#RRGGBB``."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#000" if 0.3 * red + 0.6 * green + 0.1 * blue > 110 else "#fff"


def dummy_fill(colour: str) -> str:
    """Of device work without rows of the rank."""
    return f"repeating-linear-gradient(45deg,rgba(0,0,0,.3) 0 1px,{colour} 1px 5px)"


def duration_text(time_ns: int) -> str:
    """``91 µs`` or ``1.25 ms``."""
    return f"{time_ns / 1e3:,.0f} µs" if time_ns < 1_000_000 else f"{time_ns / 1e6:,.2f} ms"


def _lane(name: str, bars: Iterable[Bar]) -> str:
    return (
        f"<div style='display:flex;margin-bottom:2px'><span style='width:{_LABEL_WIDTH_PX}px;font-size:11px;"
        f"line-height:16px'>{escape(name)}</span><div style='position:relative;flex:1;height:16px;overflow:hidden;"
        f"background:rgba(128,128,128,.1)'>{''.join(map(_bar, bars))}</div></div>"
    )


def _bar(bar: Bar) -> str:
    style = (
        f"position:absolute;box-sizing:border-box;top:0;height:16px;left:{bar.left:.2f}%;width:{bar.width:.2f}%;"
        f"overflow:hidden;white-space:nowrap;font-size:10px;line-height:16px;{_fill(bar)}"
    )
    return f"<span title='{escape(bar.title)}' style='{style}'>{_bar_label(bar)}</span>"


def _bar_label(bar: Bar) -> str:
    room = bar.width / 100 * (_WIDTH_PX - _LABEL_WIDTH_PX)
    if not bar.label or len(bar.label) * _CHARACTER_PX + 6 > room:
        return ""
    return f"<span style='padding:0 3px'>{escape(bar.label)}</span>"


def _fill(bar: Bar) -> str:
    match bar.look:
        case Look.SOLID:
            return f"background:{bar.colour};color:{ink_on(bar.colour)}"
        case Look.OPEN:
            return f"background:linear-gradient(90deg,{bar.colour} 70%,transparent);color:{ink_on(bar.colour)}"
        case Look.OUTLINE:
            return f"border:2px dashed {bar.colour};line-height:12px"
        case Look.HATCHED:
            return f"background:{bar.colour};color:#000"
        case Look.LINE:
            return f"width:0;border-left:2px dotted {bar.colour}"
