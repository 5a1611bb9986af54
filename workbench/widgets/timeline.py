"""The timeline as a notebook widget: a canvas that follows a running session, or shows finished runs side by side.

view = TimelineWidget(session)
session.step_phase()
view.update()               # sends what is new; waits for nothing
view.selected_iteration     # set by a click; setting it scrolls there
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import traitlets

from tracing.ranks import RanksTrace, RankTrace, on_one_clock
from tracing.records import BATCH_OF, DUMMY_WORK, PHASE_COLOURS, RANKS_WAIT
from workbench.report_data import ORDER_COLOURS
from workbench.widgets.front_end import joined_module, style_sheet
from workbench.widgets.own_thread import OwnThreadWidget
from workbench.widgets.timeline_stream import InHand, Outgoing, TimelineStream, rank_messages, run_messages

if TYPE_CHECKING:
    from workbench.report import RunView
    from workbench.session import Session

MODULES = (
    "timeline_carried.js",
    "timeline_table.js",
    "timeline_store.js",
    "timeline_text.js",
    "timeline_look.js",
    "timeline_dust.js",
    "timeline_brush.js",
    "timeline_marks.js",
    "timeline_paint.js",
    "timeline_hit.js",
    "timeline_legend.js",
    "timeline_keys.js",
    "timeline_view.js",
    "timeline.js",
)
"""In the order in which they need each other."""

_LOOK = {
    "phases": PHASE_COLOURS,
    "orders": ORDER_COLOURS,
    "batchOf": BATCH_OF,
    "dummies": sorted(DUMMY_WORK),
    "ranksWait": RANKS_WAIT,
}
_PACE = 600
"""Spans a second at most: reading, blaming and packing one takes 15 µs beside a busy device thread, on a busy machine
twice that, and updates may take 1 % of a run's time."""
_COST = 0.01
"""That share of a run's time."""
_FEWEST = 60
"""Spans of an update at least: a few iterations. And of one that cannot send all there is, at most: a page that follows
shows no more of it, and what comes later is a stretch that was not sent either way."""


class TimelineWidget(OwnThreadWidget):
    """Host phases, device work, iterations and bubbles by time.

    Args:
        session: What to follow; None: nothing until :meth:`show`.
        max_spans: The most that the browser keeps; the newest win.
    """

    _esm = joined_module(*MODULES)
    _css = style_sheet("timeline.css")

    selected_iteration = traitlets.Int(None, allow_none=True).tag(sync=True)
    """By a click, the arrow keys, or from Python: the view then moves there."""
    follow = traitlets.Bool(True).tag(sync=True)
    """Keep the newest at the right."""
    cut_pauses = traitlets.Bool(True).tag(sync=True)
    """Take out of the axis what lies between two actions of a person."""
    max_spans = traitlets.Int(100_000, min=1_000).tag(sync=True)
    hint = traitlets.Unicode("").tag(sync=True)
    """What to do when there is nothing to see."""
    theme = traitlets.Enum(("light", "dark"), "light").tag(sync=True)
    """The page's, as the browser found it."""
    width = traitlets.Int(0, min=0).tag(sync=True)
    """Pixels on the page; 0: it is not on one."""
    look = traitlets.Dict(_LOOK).tag(sync=True)
    """Colours of phases and orders, and which batch a piece of work belongs to."""

    def __init__(self, session: Session | None = None, *, max_spans: int = 100_000, **traits: Any) -> None:
        super().__init__(max_spans=max_spans, **traits)
        self._session = session
        self._runs: list[RunView] = []
        self._ranks: RanksTrace | None = None
        self._stream = None if session is None else TimelineStream(session.recorder, lambda: in_hand(session))
        self._updated_s = float("-inf")
        self._num_recorded = 0
        """Spans that the session had recorded at the last update."""
        self._pace = float(_PACE)
        """Spans a second that updates can pay for, as far as is known."""
        self.hint = empty_hint(session)
        self.on_msg(self._heard)

    def update(self, most: int | None = None, *, carried: Mapping[str, Any] | None = None) -> None:
        """Send what the session has recorded since the last update. Waits neither for the device nor for the browser.

        Between iterations or phases only, from the thread that runs them.

        Args:
            most: The most spans to send, the newest. None: as many as take 1 % of the time since the last update, or
                where those are not all of them the newest few. What is left out is drawn as a stretch that was not
                sent; :meth:`load` brings it. In a run its iterations are left out too, until one of the updates behind
                it.
            carried: Traits of the panel's bar by name, to go with it: a message of their own takes the kernel as long
                as making them, and the page one more frame.
        """
        if self._stream is None:
            self._send_all([], carried)
            return
        now_s, begin_s = time.perf_counter(), time.thread_time()
        assert self._session is not None
        known, self._num_recorded = self._num_recorded, self._session.recorder.num_recorded
        num_new = self._num_recorded - known if known <= self._num_recorded else self._num_recorded  # cleared: all are
        is_running = self._session.state == "running"
        allowed = affordable_spans(now_s - self._updated_s, self.max_spans, self._pace) if most is None else most
        self._updated_s = now_s
        self.hint = empty_hint(self._session)
        if is_running and allowed < min(num_new, self.max_spans):
            allowed = min(allowed, _FEWEST)
            messages = self._stream.glimpse(allowed)
        else:
            messages = self._stream.follow(allowed, is_running=is_running)
        self._send_all(messages, carried)
        if allowed < self.max_spans:  # not the first one, which sends what there is
            self._pace = learned_pace(self._pace, allowed, time.thread_time() - begin_s)

    def load(self) -> None:
        """Send everything anew: the newest ``max_spans`` spans. Takes about a second for 100,000."""
        if self._stream is not None:
            self._send_all(self._stream.restart(self.max_spans))
        elif self._ranks is not None:
            self._send_all(rank_messages(self._ranks, self.max_spans))
        elif self._runs:
            self._send_all(run_messages(self._runs, self.max_spans))

    @property
    def is_behind(self) -> bool:
        """Whether there is more to send of a run that has ended: the next updates bring it, a part each."""
        return self._stream is not None and self._stream.is_behind

    @property
    def left_out(self) -> bool:
        """Whether an update has left anything out since all was sent; :meth:`load` brings it."""
        return self._stream is not None and self._stream.left_out

    def show(self, runs: Sequence[RunView]) -> None:
        """Show finished runs one below the other, each from its first moment on, instead of a session."""
        self._session = self._stream = self._ranks = None
        self._runs = list(runs)
        self.follow = False  # nothing comes any more: all is in view
        self.load()

    def show_ranks(self, ranks: RanksTrace | Iterable[RankTrace]) -> None:
        """Show what several ranks did one below the other, on one clock, instead of a session.

        Raises:
            ValueError: there is no rank, or one comes twice.
        """
        self._ranks = ranks if isinstance(ranks, RanksTrace) else on_one_clock(ranks)
        self._session = self._stream = None
        self._runs, self.follow = [], False
        self.load()

    @classmethod
    def of_ranks(cls, ranks: RanksTrace | Iterable[RankTrace], **traits: Any) -> Self:
        """A widget that shows several ranks; errors as :meth:`show_ranks`."""
        widget = cls(**traits)
        widget.show_ranks(ranks)
        return widget

    def _heard(self, widget: Any, content: Any, buffers: Any) -> None:
        """A front-end began, missed a message, or wants what was left out."""
        if isinstance(content, dict) and content.get("kind") in ("ready", "lost", "load"):
            self.load()

    def _send_all(self, messages: Sequence[Outgoing], carried: Mapping[str, Any] | None = None) -> None:
        for place, (content, buffers) in enumerate(messages, start=1):
            is_last = place == len(messages)
            self.send({**content, "carried": carried} if carried and is_last else content, buffers)
        if carried and not messages:
            self.send({"kind": "carried", "carried": carried})


def affordable_spans(elapsed_s: float, most: int, pace: float = _PACE) -> int:
    """How many spans an update may read, so that updates take 1 % of the time; a few iterations' in any case."""
    return max(_FEWEST, int(min(pace * elapsed_s, most)))


def learned_pace(pace: float, num_spans: int, cost_s: float) -> float:
    """Spans a second behind an update that was allowed so many of them and took this thread so long.

    One update may be an exception: each is believed by half.
    """
    found = _COST * num_spans / cost_s if cost_s > 0 else float(_PACE)
    return (pace + min(found, _PACE)) / 2


def in_hand(session: Session) -> InHand | None:
    """The iteration that a session has begun and not ended."""
    iteration = session.engine.in_hand
    if iteration is None:
        return None
    return InHand(iteration.index, iteration.order.label, iteration.reason.value)


def empty_hint(session: Session | None) -> str:
    """What to do to see something, in a line."""
    if session is None:
        return "Nothing to show yet. Make the widget with a session, TimelineWidget(session), or call show([run, ...])."
    if not session.submissions:
        return 'Nothing has run yet. Hand in a request, session.submit("Once upon a time"), then session.step_phase().'
    return "Nothing has run yet. session.step_phase() runs one phase, session.step() one iteration, session.run() all."
