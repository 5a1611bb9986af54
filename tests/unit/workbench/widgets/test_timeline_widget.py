"""The widget without a browser: what it sends and when, and what it does with what it hears."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("anywidget")

from tests.unit.tracing.rank_traces import two_ranks
from tests.unit.workbench.widgets.timeline_worlds import Reader
from tests.unit.workbench.worlds import make_session
from tracing.ranks import RankTrace
from tracing.records import PHASE_COLOURS, Category
from workbench.report import RunView
from workbench.session import Session
from workbench.widgets.timeline import TimelineWidget, affordable_spans, learned_pace
from workbench.widgets.timeline_data import KINDS


class HeardWidget(TimelineWidget):
    """Keeps what it sends."""

    def __init__(self, session: Session | None = None, **traits: Any) -> None:
        self.heard: list[Any] = []
        super().__init__(session, **traits)

    def send(self, content: Any, buffers: Any = None) -> None:
        self.heard.append((content, buffers))

    @property
    def kinds(self) -> list[str]:
        return [content["kind"] for content, _ in self.heard]


class TestUpdate:
    def test_sends_what_is_new(self) -> None:
        with make_session() as session:
            widget = HeardWidget(session)
            widget.load()
            session.submit([1, 2, 3], max_tokens=6, ignore_eos=True)
            for _ in range(3):
                session.step()
                widget.update()
            reader = Reader().read(widget.heard)

        assert reader.column("iterations", "number") == [0, 1, 2]
        assert widget.kinds == ["reset", "append", "append", "append", "append"]

    def test_sends_no_more_than_it_is_told(self) -> None:
        with make_session() as session:
            session.submit([[1, 2, 3]] * 3, max_tokens=60, ignore_eos=True)
            widget = HeardWidget(session)
            widget.load()
            session.run(1)
            widget.update()
            session.run(40)
            widget.update(most=50)
            reader = Reader().read(widget.heard)

        assert len(reader.tables["skipped"]) == 1
        assert reader.column("iterations", "number") == list(range(41))

    def test_sends_in_a_run_the_newest_few_and_behind_it_every_iteration(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a quick engine's run each update told a hundred iterations, and their bubbles; the page shows five."""
        with make_session() as session:
            session.submit([[1, 2, 3]] * 3, max_tokens=200, ignore_eos=True)
            widget = HeardWidget(session)
            widget.load()
            session.step()
            widget.update()
            with monkeypatch.context() as patch:
                patch.setattr(Session, "state", "running")
                for _ in range(3):
                    session.run(30)
                    widget._pace = 0.0  # however long these took here
                    widget.update()
            assert widget.is_behind
            assert len(Reader().read(widget.heard).tables["iterations"]) < 40
            widget.update()
            reader = Reader().read(widget.heard)

        assert sorted(reader.column("iterations", "number")) == list(range(91))
        assert not widget.is_behind
        assert widget.left_out

    def test_may_send_as_much_as_takes_a_hundredth_of_the_time_since_the_last(self) -> None:
        assert affordable_spans(0.2, most=100_000) == 120
        assert affordable_spans(1.0, most=100_000) == 600
        assert affordable_spans(3_600.0, most=100_000) == 100_000
        assert affordable_spans(float("inf"), most=100_000) == 100_000

    def test_that_come_one_upon_the_other_still_send_a_few_iterations(self) -> None:
        assert affordable_spans(0.0, most=100_000) == 60

    def test_follow_what_a_span_costs_here(self) -> None:
        """On a busy machine one took twice as long as thought, and the timeline twice its share of a run."""
        pace, elapsed_s, spent_s = 600.0, 0.0, 0.0
        for _ in range(40):
            allowed = affordable_spans(0.4, 100_000, pace)
            cost_s = 30e-6 * allowed
            pace = learned_pace(pace, allowed, cost_s)
            elapsed_s, spent_s = elapsed_s + 0.4, spent_s + cost_s
        assert spent_s < 0.011 * elapsed_s
        for _ in range(20):
            pace = learned_pace(pace, 100, 100 * 5e-6)
        assert 599 < pace <= 600
        assert learned_pace(600.0, 100, 0.0) == 600.0

    def test_are_fewer_behind_an_update_that_was_dear(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=30, ignore_eos=True)
            session.run(3)
            widget = TimelineWidget(session)
            widget.update()
            monkeypatch.setattr("time.thread_time", iter(range(100)).__next__)
            widget.update()
            assert 300 < widget._pace < 301

    @pytest.mark.parametrize("steps", [0, 1])
    def test_takes_what_is_new_to_the_bar_along_in_one_message(self, steps: int) -> None:
        with make_session() as session:
            session.submit([1, 2, 3], max_tokens=6, ignore_eos=True)
            widget = HeardWidget(session)
            session.step()
            widget.update()
            widget.heard.clear()
            session.run(steps)
            widget.update(carried={"pace": 3.0})

        ((content, _),) = widget.heard
        assert content["carried"] == {"pace": 3.0}
        assert content["kind"] == ("append" if steps else "carried")

    def test_without_a_session_does_nothing(self) -> None:
        widget = HeardWidget()
        widget.update()
        widget.load()

        assert widget.heard == []


class TestFrontEnd:
    @pytest.mark.parametrize("kind", ["ready", "lost", "load"])
    def test_that_asks_gets_everything_anew(self, kind: str) -> None:
        with make_session() as session:
            session.submit([1, 2, 3], max_tokens=6)
            session.run()
            widget = HeardWidget(session)
            widget._handle_custom_msg({"kind": kind}, [])

            assert widget.kinds == ["reset", "append"]
            assert len(Reader().read(widget.heard).tables["iterations"]) == len(session.iterations())

    def test_that_talks_of_something_else_is_not_answered(self) -> None:
        with make_session() as session:
            widget = HeardWidget(session)
            for content in ({"kind": "?"}, "ready", None):
                widget._handle_custom_msg(content, [])

        assert widget.heard == []

    def test_gets_the_one_set_of_phase_colours(self) -> None:
        assert TimelineWidget().look["phases"] == PHASE_COLOURS


class TestHint:
    def test_tells_the_next_step(self) -> None:
        with make_session() as session:
            widget = HeardWidget(session)
            assert "session.submit" in widget.hint
            session.submit([1, 2, 3], max_tokens=6)
            widget.update()
            assert "session.step_phase()" in widget.hint
            assert "session.submit" not in widget.hint
        assert "TimelineWidget(session)" in TimelineWidget().hint


class TestShow:
    def test_puts_finished_runs_in_the_sessions_place(self) -> None:
        with make_session() as session:
            session.submit([1, 2, 3], max_tokens=6)
            session.run()
            widget = HeardWidget(session)
            view = session.run_view("async")
            widget.show([view, RunView("again", view.spans, view.iterations)])
            session.submit([1, 2, 3], max_tokens=6)
            session.run()
            widget.update()
            widget._handle_custom_msg({"kind": "ready"}, [])

        assert widget.kinds == 2 * ["reset", "append", "append"]
        assert widget.heard[0][0]["groups"] == ["async", "again"]


class TestTwoSessions:
    def test_of_one_kernel_have_pictures_of_their_own(self) -> None:
        with make_session() as one, make_session() as other:
            widgets = [HeardWidget(one), HeardWidget(other)]
            one.submit([1, 2, 3], max_tokens=6)
            one.run()
            for widget in widgets:
                widget.load()

        assert Reader().read(widgets[0].heard).tables["spans"]
        assert Reader().read(widgets[1].heard).tables == {}


class TestRanks:
    def test_are_groups_whose_times_keep_their_distance(self) -> None:
        widget = HeardWidget()
        widget.show_ranks(two_ranks(offset_ns=-500, error_ns=2_000))
        reader = Reader().read(widget.heard)

        assert widget.heard[0][0]["groups"] == ["rank 0 ± 2.0 µs", "rank 1 ± 2.0 µs"]
        assert reader.column("iterations", "start") == [10, 50, 5]
        assert widget.follow is False

    def test_collectives_of_a_traces_time_are_sent_as_waits_of_the_device_and_blamed_for_nothing(self) -> None:
        def read(collectives: list[tuple[int, int, str, str, int]]) -> Reader:
            busy, idle = two_ranks()
            spans = [
                replace(span, start_ns=70, enqueued_ns=68) if span.start_ns == 60 else span  # idle from 60 on
                for span in busy.trace.records.spans
            ]
            trace = replace(busy.trace, records=replace(busy.trace.records, spans=spans))
            return Reader().read(HeardWidget.of_ranks([RankTrace(0, trace, collectives=collectives), idle]).heard)

        before, inside = (-90, -80, "sum", "forward", 7), (61, 69, "gather", "forward", 1)
        with_them, without = read([before, inside]), read([])
        waits = [row for row in with_them.tables["spans"] if KINDS[row["kind"]] is Category.WAIT]
        (sent,) = [row for row in waits if row["lane"] == "compute"]

        assert (sent["name"], sent["phase"]) == ("gather", "forward")
        assert (sent["start"], sent["end"], sent["iteration"]) == (61, 69, 1)
        assert with_them.tables["bubbles"] == without.tables["bubbles"]
        assert with_them.tables["blame"] == without.tables["blame"]

    def test_are_sent_anew_when_a_page_is_loaded(self) -> None:
        widget = HeardWidget.of_ranks(two_ranks())
        widget.heard.clear()
        widget.load()
        assert widget.kinds == ["reset", "append", "append"]

    def test_give_way_to_runs(self) -> None:
        widget = HeardWidget.of_ranks(two_ranks())
        trace = two_ranks()[0].trace
        widget.show([RunView.of(trace)])
        assert widget.heard[-2][0]["groups"] == ["async"]
