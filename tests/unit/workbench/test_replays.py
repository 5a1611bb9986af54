"""A recorded run, stepped again: the same orders and tokens, whatever happened in it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.policy import never_overlap
from tests.unit.workbench.test_snapshot import Tags
from tests.unit.workbench.worlds import make_session, spread_workload, tokens, what_happened
from tracing.trace import Trace
from workbench import load_run
from workbench.replays import ReplayError
from workbench.runs import serve
from workbench.session import Session

REPLAYED_AWAY = ("arrival_ns", "admitted_ns", "first_token_ns", "finished_ns")


def record_run(act: Callable[[Session], None], **options: Any) -> Trace:
    """What ``act`` did to a session, as a trace."""
    with make_session(**{"clock": "iterations", "device": "cpu", **options}) as session:
        act(session)
        return session.trace


def run_spread(session: Session) -> None:
    session.submit_workload(spread_workload())
    session.run()


def step_all(session: Session) -> None:
    while session.step_phase() is not None:
        pass


def recorded_tokens(run: Trace) -> dict[str, tuple[int, ...]]:
    return {output["request_id"]: tuple(output["output_token_ids"]) for output in run.outputs}


def check_same_run(session: Session, run: Trace) -> None:
    """Every record but its times, and every token and end."""
    assert list(map(what_happened, session.iterations())) == list(map(what_happened, run.records.iterations))
    assert tokens(session) == recorded_tokens(run)
    ends = {name: output.finish_reason for name, output in session.outputs.items()}
    assert ends == {output["request_id"]: output["finish_reason"] for output in run.outputs}


class TestTheSameAgain:
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_stepped_phase_by_phase_on_the_inline_device(self, mode: str) -> None:
        run = record_run(run_spread, mode=mode)
        with make_session(device="inline") as session:
            replay = session.replay(run)
            step_all(session)

            check_same_run(session, run)
            assert replay.differing_orders == []
            assert replay.notes == ()

    def test_from_a_folder(self, tmp_path: Path) -> None:
        with make_session(clock="iterations", device="cpu") as session:
            run_spread(session)
            session.save(tmp_path / "run")
        with make_session() as session:
            session.replay(tmp_path / "run")
            session.run()

            check_same_run(session, load_run(tmp_path / "run"))

    def test_of_a_workload_served_by_the_command_line(self) -> None:
        with make_session(clock="iterations", device="cpu") as session:
            run = serve(session, spread_workload(), name="mine").trace
        with make_session() as session:
            session.replay(run)
            session.run()

            check_same_run(session, run)

    def test_arrivals_that_were_measured_in_seconds(self) -> None:
        def act(session: Session) -> None:
            for index in range(5):
                session.submit([index + 1], max_tokens=6, ignore_eos=True, arrival=0.002 * (5 - index))
            session.run()

        run = record_run(act, clock="virtual")
        with make_session() as session:
            replay = session.replay(run)
            step_all(session)

            check_same_run(session, run)
            assert replay.differing_orders == []

    def test_aborts_at_any_phase(self) -> None:
        def act(session: Session) -> None:
            draws = random.Random(3)
            names = session.submit_workload(spread_workload())
            session.submit([1], max_tokens=3, arrival=90, request_id="never came")
            session.abort("never came")
            while session.step_phase() is not None:
                if draws.random() < 0.05:
                    session.abort(draws.choice(names))

        run = record_run(act)
        ends = [output["finish_reason"] for output in run.outputs]
        assert ends.count("abort") > 2
        with make_session() as session:
            session.replay(run)
            session.run()

            assert tokens(session) == recorded_tokens(run)
            assert [output.finish_reason for output in session.outputs.values()] == ends

    def test_mode_switches(self) -> None:
        def act(session: Session) -> None:
            session.submit_workload(spread_workload())
            for mode in ("legacy", "async", "legacy", "async"):
                session.run(4)
                session.step_phase()
                session.mode = mode
            session.run()

        run = record_run(act)
        with make_session("legacy") as session:
            replay = session.replay(run)
            session.run()

            check_same_run(session, run)
            assert replay.differing_orders == []

    def test_begun_again_by_a_restart(self) -> None:
        def act(session: Session) -> None:
            session.submit([1], max_tokens=3, arrival=90, request_id="never came")
            session.abort("never came")
            session.submit_workload(spread_workload())
            session.run(4)
            session.mode = "legacy"
            session.run()

        run = record_run(act)
        with make_session() as session:
            replay = session.replay(run)
            session.run(7)
            session.restart()
            session.run()

            check_same_run(session, run)
            assert replay.differing_orders == []

    def test_orders_that_a_policy_chose(self) -> None:
        run = record_run(run_spread, policy=never_overlap)
        with make_session() as session:
            session.replay(run)
            session.run()

            check_same_run(session, run)
            assert {record.order for record in session.iterations()} == {"primer", "no_overlap"}

    def test_a_run_that_was_not_at_its_end_goes_on_behind_it(self) -> None:
        def act(session: Session) -> None:
            session.submit([1, 2], max_tokens=12, ignore_eos=True)
            session.run(5)

        run = record_run(act)
        with make_session() as session:
            session.replay(run)
            session.run()

            assert tokens(session)["request-0"][:4] == recorded_tokens(run)["request-0"]
            assert len(tokens(session)["request-0"]) == 12

    def test_parameters_and_seeds_of_every_kind(self, tmp_path: Path) -> None:
        def act(session: Session) -> None:
            session.submit([1, 2], max_tokens=9, logit_bias={3: 2.5, 7: -1}, top_p=0.9)
            session.submit([1, 2], max_tokens=9, stop_token_ids=[5, 6], min_tokens=2, temperature=0.7)
            session.submit([4], max_tokens=9, repetition_penalty=1.2, logprobs=2, stream=True)
            session.run()

        with make_session(clock="iterations", device="cpu") as session:
            act(session)
            session.save(tmp_path / "run")
        with make_session() as session:
            session.replay(tmp_path / "run")
            session.run()

            check_same_run(session, load_run(tmp_path / "run"))


class TestAsserting:
    def test_a_token_that_differs_is_told_once_with_its_place(self) -> None:
        run = record_run(run_spread)
        outputs = [dict(output) for output in run.outputs]
        outputs[2]["output_token_ids"] = [*outputs[2]["output_token_ids"][:3], 63, *outputs[2]["output_token_ids"][4:]]
        with make_session() as session:
            session.replay(replace(run, outputs=outputs))
            with pytest.raises(ReplayError, match=r"request-2 got token \d+ at place 3, the record has 63"):
                session.run()

            assert session.engine.in_hand is None
            session.run()  # whoever wants to see more goes on
            assert session.finished

    def test_an_end_that_differs_is_told(self) -> None:
        run = record_run(run_spread)
        outputs = [dict(output) for output in run.outputs]
        outputs[0]["output_token_ids"] = outputs[0]["output_token_ids"][:-1]
        with make_session() as session:
            session.replay(replace(run, outputs=outputs))
            with pytest.raises(ReplayError, match="request-0 ended by length with 5 tokens, in the record"):
                session.run()

    def test_orders_that_differ_are_noted(self) -> None:
        run = record_run(run_spread)
        with make_session(max_requests=1) as session:
            replay = session.replay(run)
            session.run()

            assert tokens(session) == recorded_tokens(run)
            assert replay.differing_orders
            assert replay.notes == ("The schedule may differ from the record, for these options do: max_requests.",)


class TestRefusals:
    def test_a_run_on_another_model(self) -> None:
        run = record_run(run_spread)
        other = replace(run, config={**run.config, "model": "smollm2"})
        with make_session() as session:
            session.submit([1], max_tokens=3)
            with pytest.raises(ReplayError, match="recorded with model='smollm2', this session has 'oracle'"):
                session.replay(other)

            assert len(session.run()) == 1  # nothing was dropped

    def test_a_run_without_parameters_or_beginning(self) -> None:
        run = record_run(run_spread)
        bare = [{name: value for name, value in output.items() if name != "asked"} for output in run.outputs]
        with make_session() as session:
            with pytest.raises(ReplayError, match="saved without its sampling parameters"):
                session.replay(replace(run, outputs=bare))
            with pytest.raises(ReplayError, match="saved without its requests"):
                session.replay(replace(run, outputs=()))
            with pytest.raises(ReplayError, match="lacks its first 7 iterations"):
                session.replay(replace(run, lost_iterations=7))


class TestBeside:
    def test_the_records_true_times_stand_beside_what_is_stepped(self) -> None:
        run = record_run(run_spread)
        with make_session() as session:
            replay = session.replay(run)
            assert replay.headline.endswith("none of them stepped yet")
            session.run(4)
            session.run_to("resolve")

            record = replay.record
            assert record is not None
            assert record.iteration == 4
            spans = [span for span in run.records.spans if span.iteration == 4 and span.depth == 0]
            phases = {span.name: span.duration_ns for span in spans if span.category.value == "phase"}
            assert {one.phase: one.work_ns + one.wait_ns for one in replay.times()} == phases
            assert all(one.wait_ns >= 0 and one.work_ns > 0 for one in replay.times())
            assert f"took {record.duration_ns / 1e6:.3f} ms in the record" in str(replay)
            assert [line.split()[-1] for line in str(replay).splitlines() if line.startswith("resolve")] == ["next"]
            assert Tags(replay._repr_html_()).open == []

    def test_reset_ends_it_and_gives_back_clock_and_policy(self) -> None:
        run = record_run(run_spread)
        with make_session(policy=never_overlap, clock="virtual") as session:
            session.replay(run)
            session.run(5)
            session.reset()
            session.submit([1], max_tokens=5, ignore_eos=True)
            session.run()

            assert session.clock.name == "virtual"
            assert {record.order for record in session.iterations()} == {"primer", "no_overlap"}

    def test_breakpoints_history_and_explanations_work_in_it(self) -> None:
        run = record_run(run_spread)
        with make_session() as session:
            session.replay(run)
            session.record_changes = True
            session.break_on("emit", request="request-0")
            session.run()

            assert session.stopped is not None
            assert session.stopped.phase == "emit"
            assert session.history[-1].has_changes
            assert session.explain("request-0").startswith("request-0 ")
