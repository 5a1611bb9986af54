"""Runs side by side at the border between two forwards: a small picture of what each mode hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain

from tracing.intervals import Interval, intersect, subtract
from tracing.records import COMPUTE_LANE, COPY_LANE, HOST_LANE, PHASE_COLOURS, Category, Span
from workbench.bars import IDLE_FILL, WAIT_FILL, Bar, Look, Scale, duration_text, lanes_html, legend_html
from workbench.report import RunView
from workbench.report_border import Border, border_input, find_borders, why_no_border
from workbench.report_data import initial_views

_HIDDEN, _EXPOSED = "#0F9D6B", "#D9485F"
_HIDDEN_FILL = "#8BC34A"
"""Not the green of sampling."""
_BEFORE, _AFTER = 0.35, 1.5
"""Shown before the border and behind it, as shares of the longest border."""
_DRAWN = (Category.PHASE, Category.WAIT, Category.DEVICE)


@dataclass(frozen=True, slots=True)
class StepBorders:
    """A typical border of each run. A notebook shows the picture, a prompt its sentences."""

    runs: tuple[RunView, ...]
    borders: tuple[Border | None, ...]
    """One a run; None where it has no two forwards with host work between them, or only in void iterations."""

    def __str__(self) -> str:
        lines = zip(self.runs, self.borders, strict=True)
        return "\n".join(f"{run.name}: {_sentence(run, border)}" for run, border in lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        extent = max((_extent(border) for border in self.borders if border is not None), default=1)
        parts = [_panel(run, border, extent) for run, border in zip(self.runs, self.borders, strict=True)]
        return f"<div style='font-family:sans-serif;line-height:1.5'>{''.join(parts)}{_legend(self.runs)}</div>"


def step_borders(runs: Sequence[RunView]) -> StepBorders:
    """Find a typical border in each run's steady decode; ``session.run_view(name)`` makes a run.

    Raises:
        ValueError: there is no run.
    """
    if not runs:
        raise ValueError("runs must be at least one run, got none; session.run_view(name) makes one")
    views = initial_views([run.iterations for run in runs])
    traces = [border_input(run.spans, run.iterations, view.stretch) for run, view in zip(runs, views, strict=True)]
    found = find_borders(traces)
    return StepBorders(tuple(runs), tuple(found))


def _sentence(run: RunView, border: Border | None) -> str:
    return why_no_border(border_input(run.spans, run.iterations, None)) if border is None else border.text


def _extent(border: Border) -> int:
    return max(border.extent_ns, border.next_start_ns - border.at_ns)


def _panel(run: RunView, border: Border | None, extent: int) -> str:
    """All panels have one scale and stand with their borders one below the other."""
    colour = _HIDDEN if border is not None and border.is_hidden else _EXPOSED
    head = (
        f"<div style='margin-top:8px'><b>{escape(run.name)}</b> "
        f"<b style='color:{colour};margin-left:12px'>{escape(_sentence(run, border))}</b></div>"
    )
    if border is None:
        return head
    window = (border.at_ns - round(_BEFORE * extent), border.at_ns + round(_AFTER * extent))
    scale = Scale(*window, [window])
    sampled = Bar(left=scale.at(border.at_ns), width=0, colour="#808080", look=Look.LINE, title="sampled")
    lanes = {
        HOST_LANE: _host(run, window, scale),
        "hidden or not": _work(border, window, scale),
        f"device {COMPUTE_LANE}": [*_idle(border, window, scale), *_device(run, COMPUTE_LANE, window, scale)],
        f"device {COPY_LANE}": _device(run, COPY_LANE, window, scale),
    }
    note = f"dotted line: forward {border.finished} is done and sampled · {duration_text(window[1] - window[0])} shown"
    foot = f"<div style='font-size:11px;opacity:.8;margin-left:104px'>{note}</div>"
    return head + lanes_html({name: [*bars, sampled] for name, bars in lanes.items()}) + foot


def _host(run: RunView, window: Interval, scale: Scale) -> list[Bar]:
    bars = [_bar(s, window, scale, s.name) for s in _seen(run, window) if s.category is Category.PHASE]
    for span in _seen(run, window):
        if span.category is Category.WAIT:
            low, high = _clipped(span, window)
            title = f"waits for {span.name}, {duration_text(span.duration_ns)}"
            bars.append(scale.bar(low, high, WAIT_FILL, look=Look.HATCHED, title=title))
    return bars


def _device(run: RunView, lane: str, window: Interval, scale: Scale) -> list[Bar]:
    seen = (span for span in _seen(run, window) if span.category is Category.DEVICE and span.lane == lane)
    return [_bar(span, window, scale, f"{span.name} {span.iteration}") for span in seen]


def _work(border: Border, window: Interval, scale: Scale) -> list[Bar]:
    """The host's work of this border, by whether the device was busy beside it."""
    exposed = intersect(border.work, border.idle)
    kinds = ((subtract(border.work, exposed), _HIDDEN_FILL, "hidden"), (exposed, _EXPOSED, "exposed"))
    return [
        scale.bar(low, high, colour, title=f"{kind} {duration_text(high - low)}")
        for stretches, colour, kind in kinds
        for low, high in intersect([window], stretches)
    ]


def _idle(border: Border, window: Interval, scale: Scale) -> list[Bar]:
    return [
        scale.bar(low, high, IDLE_FILL, look=Look.HATCHED, title=f"device idle {duration_text(high - low)}")
        for low, high in intersect([window], border.idle)
    ]


def _seen(run: RunView, window: Interval) -> list[Span]:
    return [s for s in run.spans if s.category in _DRAWN and s.end_ns > window[0] and s.start_ns < window[1]]


def _clipped(span: Span, window: Interval) -> Interval:
    return max(span.start_ns, window[0]), min(span.end_ns, window[1])


def _bar(span: Span, window: Interval, scale: Scale, label: str) -> Bar:
    low, high = _clipped(span, window)
    colour = PHASE_COLOURS.get(span.name, PHASE_COLOURS["other"])
    return scale.bar(low, high, colour, label=label, title=f"{label}, {duration_text(span.duration_ns)}")


def _legend(runs: Sequence[RunView]) -> str:
    present = {span.name for span in chain.from_iterable(run.spans for run in runs) if span.category in _DRAWN}
    colours: dict[str, list[str]] = {}
    for name, colour in PHASE_COLOURS.items():
        if name in present:
            colours.setdefault(colour, []).append(name)
    entries = [(f"background:{colour}", ", ".join(names)) for colour, names in colours.items()]
    entries += [
        (f"background:{WAIT_FILL}", "host waits"),
        (f"background:{IDLE_FILL}", "device idle"),
        (f"background:{_HIDDEN_FILL}", "hidden host work"),
        (f"background:{_EXPOSED}", "exposed host work"),
    ]
    return legend_html(entries)
