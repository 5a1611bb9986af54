"""Watch expressions and the event log."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from tests.unit.workbench.worlds import make_session
from tracing.recorder import Recorder
from workbench.events import KINDS, Event


class TestWatch:
    @pytest.mark.parametrize("by_hand", [False, True])
    def test_notes_a_value_at_the_end_of_every_iteration(self, by_hand: bool) -> None:
        with make_session() as session:
            tokens = session.watch("tokens", lambda s: s.row(0).output_tokens)
            session.submit([1], max_tokens=9, ignore_eos=True)
            for _ in range(3):
                session.step()
            if by_hand:
                for _ in range(5):
                    session.step_phase()
            else:
                session.run(1)

            assert tokens.values == [(0, 0), (1, 1), (2, 2), (3, 3)]
            assert tokens.last == 3
            assert tokens.at(2) == 2
            assert tokens.at(9) is None

    def test_one_that_raises_stops_nothing(self) -> None:
        with make_session() as session:
            failing = session.watch("fails", lambda s: {}["x"])
            session.submit([1], max_tokens=3, ignore_eos=True)

            assert len(session.run()) == 1
            assert {repr(value) for _, value in failing.values} == {"<KeyError: 'x'>"}

    def test_works_with_the_recorder_off(self) -> None:
        with make_session(recorder=Recorder(enabled=False)) as session:
            tokens = session.watch("tokens", lambda s: s.row(0).output_tokens)
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(3)

            assert tokens.last == 2

    def test_one_of_the_same_name_takes_its_place_and_a_removed_one_notes_no_more(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            first = session.watch("x", lambda s: 1)
            second = session.watch("x", lambda s: 2)
            session.run(1)
            second.remove()
            first.remove()
            session.run(1)

            assert (first.values, second.values) == ([], [(0, 2)])
            assert list(session.watches) == []

    def test_values_go_with_a_reset_and_the_watch_stays(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            watch = session.watch("x", lambda s: 1)
            session.run(2)
            session.restart()
            assert watch.values == []
            session.run(1)

            assert watch.values == [(0, 1)]

    def test_what_cannot_be_watched_is_refused(self) -> None:
        with make_session() as session:
            with pytest.raises(ConfigError, match="expected a function of the session, got 3"):
                session.watch("x", 3)  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="name must be a string"):
                session.watch("", lambda s: 1)

    def test_reads_well(self) -> None:
        with make_session() as session:
            watch = session.watch("<x>", lambda s: s.row(0).output_tokens)
            assert repr(watch) == "<watch <x>: no value yet>"
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(2)

            assert repr(watch) == "<watch <x>: 0: 0, 1: 1>"
            assert "&lt;x&gt;" in watch._repr_html_()


class TestEvents:
    def test_tell_what_happened_in_order(self) -> None:
        with make_session() as session:
            session.submit([[1], [2]], max_tokens=3, ignore_eos=True)
            session.abort("request-1")
            session.mode = "legacy"
            session.run()
            session.reset()

        kinds = [event.kind for event in session.events]
        assert kinds == ["submitted", "aborted", "mode", "ended", "ended", "stopped", "reset", "closed"]
        assert set(kinds) <= set(KINDS)
        assert session.events[0].text == "request-0, request-1"
        assert [event.text for event in session.events if event.kind == "ended"] == [
            "request-1: abort, 0 tokens",
            "request-0: length, 3 tokens",
        ]

    def test_reach_listeners_until_they_stop_and_one_that_fails_harms_nobody(self) -> None:
        heard: list[Event] = []

        def fail(event: Event) -> None:
            raise RuntimeError(event.kind)

        with make_session() as session:
            session.events.listen(fail)
            stop = session.events.listen(heard.append)
            session.submit([1], max_tokens=2)
            stop()
            session.run()

        assert [event.kind for event in heard] == ["submitted"]

    def test_carry_a_time_on_the_clock_of_the_spans_and_the_iterations_begun(self) -> None:
        with make_session(device="cpu") as session:
            session.submit([1], max_tokens=3, ignore_eos=True)
            session.run()
            ended = next(event for event in session.events if event.kind == "ended")

            assert ended.time_ns >= session.iterations()[-1].begin_ns
            assert ended.iterations_begun == 4
            assert "ended" in repr(session.events)
