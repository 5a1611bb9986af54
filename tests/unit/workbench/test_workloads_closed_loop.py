"""Closed loops: a request enters as another ends, on every clock and in both modes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import SamplingParams
from tests.unit.workbench.worlds import make_session, tokens
from workbench.session import Session
from workbench.workloads import RequestSpec, Workload, WorkloadError, parse_workload

LOOP = "fixed:requests=14,input=3..20,output=1..9,temperature=0.8,concurrency=3"


def loop(concurrency: int | None = 3) -> Workload:
    return replace(parse_workload(LOOP, vocab_size=64), concurrency=concurrency)


def most_live(session: Session) -> int:
    """Steps to the end; the most requests that were live at once."""
    most = len(session.engine.live_ids)
    while not session.finished:
        session.step()
        most = max(most, len(session.engine.live_ids))
    return most


class TestClosedLoop:
    @pytest.mark.parametrize("clock", ["iterations", "virtual", "wall"])
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_keeps_so_many_live_and_serves_all_with_the_tokens_of_an_open_loop(self, clock: str, mode: str) -> None:
        with make_session(mode, clock=clock) as closed, make_session(mode) as opened:
            closed.submit_workload(loop())
            opened.submit_workload(loop(None))

            assert len(closed.engine.live_ids) == 3
            assert most_live(closed) == 3
            opened.run()
            assert tokens(closed) == tokens(opened)
            assert len(tokens(closed)) == 14

    def test_lets_the_next_in_right_after_the_iteration_that_gave_an_end_out(self) -> None:
        with make_session("legacy") as session:
            session.submit_workload(loop())
            session.run()
            timings = [output.timings for output in session.outputs.values()]

        ends = sorted(one.finished_iteration for one in timings if one.finished_iteration is not None)
        # The k-th to enter behind the first three comes as the k-th ends.
        assert [one.arrival_iteration for one in timings[3:]] == [end + 1 for end in ends[:11]]

    def test_lets_several_in_where_several_end_together(self) -> None:
        """Counting those just taken as gone, for they were not live yet, let the whole queue in at once."""
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        work = Workload(name="twins", requests=(RequestSpec(prompt=(5, 6), params=params),) * 9, concurrency=2)
        with make_session("legacy", max_requests=8) as session:
            session.submit_workload(work)
            live = []
            while not session.finished:
                session.step()
                live.append(len(session.engine.live_ids))

        assert max(live) <= 2
        assert len(live) == 5 * 2

    def test_two_runs_have_the_same_schedule_and_so_has_a_restart(self) -> None:
        def schedule(session: Session) -> list[Any]:
            session.run()
            return [(name, one.timings.arrival_iteration) for name, one in session.outputs.items()]

        with make_session() as first, make_session() as second:
            first.submit_workload(loop())
            second.submit_workload(loop())
            once = schedule(first)

            assert schedule(second) == once
            first.restart()
            assert len(first.engine.live_ids) == 3
            assert schedule(first) == once

    def test_an_abort_makes_room_and_one_outside_can_be_aborted(self) -> None:
        with make_session("legacy") as session:
            ids = session.submit_workload(loop())
            session.step()

            assert session.abort(ids[9])
            assert session.abort(ids[0])
            session.step()
            session.step()

            assert ids[3] in session.engine.live_ids
            assert most_live(session) <= 3
            assert session.outputs[ids[9]].finish_reason == "abort"
            ended = [output.finish_reason for output in session.outputs.values()]
            assert ended.count("length") == 12

    def test_loops_do_not_share_their_room_and_single_requests_need_none(self) -> None:
        with make_session(max_requests=8) as session:
            session.submit_workload(loop())
            session.submit_workload(loop(2))
            session.submit([5, 6, 7], max_tokens=3)

            assert len(session.engine.live_ids) == 3 + 2 + 1
            assert most_live(session) == 6
            assert len(session.outputs) == 29

    def test_mid_iteration_the_first_ones_enter_at_once(self) -> None:
        with make_session() as session:
            session.submit([5, 6, 7], max_tokens=4)
            session.step_phase()
            session.submit_workload(loop())

            assert len(session.engine.live_ids) == 4
            session.run()
            assert len(session.outputs) == 15

    def test_views_say_what_a_request_outside_waits_for(self) -> None:
        with make_session("legacy") as session:
            ids = session.submit_workload(loop())
            session.step()

            assert "lets it in when fewer than 3 of the loop's requests are live" in session.explain(ids[-1])
            (why,) = {one.why for one in session.snapshot().queue if one.request_id == ids[-1]}
            assert why == "enters when fewer than 3 of its closed loop are live"

    def test_a_replay_of_its_record_lets_them_in_where_the_record_did(self) -> None:
        with make_session() as session:
            session.submit_workload(loop())
            session.run()
            entered = {name: one.timings.arrival_iteration for name, one in session.outputs.items()}
            trace = session.trace
            session.replay(trace)
            session.run()

            assert {name: one.timings.arrival_iteration for name, one in session.outputs.items()} == entered

    @settings(max_examples=25, deadline=None)
    @given(
        lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 8)), min_size=1, max_size=12),
        concurrency=st.integers(1, 6),
        mode=st.sampled_from(["legacy", "async"]),
    )
    def test_never_exceeds_its_limit_nor_leaves_room_unused(
        self, lengths: list[tuple[int, int]], concurrency: int, mode: str
    ) -> None:
        work = Workload.from_records(
            [{"i": read, "o": write} for read, write in lengths], input="i", output="o", vocab_size=64
        )
        with make_session(mode) as session:
            session.submit_workload(replace(work, concurrency=concurrency))
            while not session.finished:
                waiting = len(session._desk.arrivals)
                live = len(session.engine.live_ids)
                assert live <= concurrency
                session.step()
                left = len(session._desk.arrivals)
                assert waiting - left == min(waiting, concurrency - live)
            done = {name: len(ids) for name, ids in tokens(session).items()}

        assert list(done.values()) == [write for _, write in lengths]


class TestBadLoops:
    def test_no_room_at_all_and_arrivals_of_their_own_are_refused(self) -> None:
        with pytest.raises(WorkloadError, match="concurrency must be at least 1, got 0"):
            loop(0)
        spec = RequestSpec(prompt=(1,), params=SamplingParams(), arrival=3)
        with pytest.raises(WorkloadError, match="requests enter as others end, so none has an arrival"):
            Workload(name="late", requests=(spec,), concurrency=2)
        with pytest.raises(WorkloadError, match="arrive= and concurrency= exclude each other"):
            parse_workload("fixed:requests=4,input=1,output=1,arrive=2,concurrency=2", vocab_size=9)


class TestLongPrompts:
    def test_a_workload_too_long_for_the_engine_is_refused_whole_with_its_remedies(self) -> None:
        with make_session() as session:
            work = parse_workload("fixed:requests=5,input=90..110,output=4", vocab_size=64)
            with pytest.raises(WorkloadError, match=r"max_sequence_length=96, the longest .*; cut them with"):
                session.submit_workload(work)

            assert not session.submissions

    def test_made_prompts_stay_descriptions_until_they_arrive(self) -> None:
        with make_session(clock="iterations") as session:
            session.submit_workload(parse_workload("fixed:requests=6,input=9,output=4,arrive=1", vocab_size=64))

            assert not any(isinstance(one.prompt_ids, tuple) for one in session.submissions)
            session.run()
            given = {one.request_id: tuple(one.prompt_ids) for one in session.submissions}
            assert {name: output.prompt_token_ids for name, output in session.outputs.items()} == given
