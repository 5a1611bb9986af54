"""Ranks driven together, as threads of this process: whatever they have to do, none waits for one that nobody moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from workbench.cluster import Cluster, ClusterError
from workbench.cluster_place import Place
from workbench.cluster_stepper import next_ranks
from workbench.session import Session
from workbench.stops import StopCause

pytestmark = pytest.mark.timeout(60)
SMALL = {
    "device": "inline",
    "clock": "iterations",
    "max_requests": 4,
    "max_batch_tokens": 64,
    "max_sequence_length": 64,
    "num_blocks": 40,
    "block_size": 4,
}
NO_EOS = {"ignore_eos": True}


@contextmanager
def cluster(**options: Any) -> Iterator[Cluster]:
    with Cluster(
        "oracle-moe", ranks=2, in_process=True, progress=False, **{**SMALL, "rank_timeout_s": 20.0, **options}
    ) as it:
        yield it


Act = Callable[[Cluster], None]


def both(c: Cluster) -> None:
    c.submit([1, 2, 3], rank=0, max_tokens=5, request_id="a", seed=1, **NO_EOS)
    c.submit([4, 5], rank=1, max_tokens=9, request_id="b", seed=2, **NO_EOS)


def one_alone(c: Cluster) -> None:
    c.submit([1, 2, 3], rank=0, max_tokens=6, request_id="a", seed=1, **NO_EOS)
    c.submit([6], rank=0, max_tokens=4, request_id="c", temperature=0.0, **NO_EOS)


def late_on_the_other(c: Cluster) -> None:
    one_alone(c)
    c.submit([4, 5], rank=1, max_tokens=4, request_id="b", arrival=3, seed=2, **NO_EOS)


def after_a_nap(c: Cluster) -> None:
    one_alone(c)
    c.submit([4, 5], rank=1, max_tokens=4, request_id="b", arrival=40, seed=2, **NO_EOS)


MIXES: dict[str, Act] = {one.__name__: one for one in (both, one_alone, late_on_the_other, after_a_nap)}


def tokens(c: Cluster) -> dict[str, tuple[int, ...]]:
    return {name: output.token_ids for name, output in sorted(c.outputs.items())}


def by_phases(c: Cluster) -> None:
    while not c.finished:
        c.step_phase()


def by_steps(c: Cluster) -> None:
    while not c.finished:
        c.step()


def mixed(c: Cluster) -> None:
    for _ in range(3):
        c.step_phase()
    c.step()
    c.step_phase()
    c.run(2)
    c.run()


def alone(mix: Act, **options: Any) -> dict[str, tuple[int, ...]]:
    """What one rank with all experts answers to the same requests."""
    with Session("oracle-moe", progress=False, **{**SMALL, **options}) as session:

        class Everything:
            def submit(self, prompt: Any, *, rank: int, **params: Any) -> None:
                session.submit(prompt, **params)

        mix(Everything())  # type: ignore[arg-type]
        session.run()
        return {name: output.token_ids for name, output in sorted(session.outputs.items())}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("mode", ["async", "legacy"])
@pytest.mark.parametrize("drafts", [0, 2])
class TestEveryMix:
    def test_says_the_same_however_it_is_driven_and_as_one_rank_does(self, mix: str, mode: str, drafts: int) -> None:
        options = {"mode": mode, "speculative_tokens": drafts}
        expected = alone(MIXES[mix], **options)

        for drive in (by_phases, mixed):
            with cluster(**options) as c:
                MIXES[mix](c)
                drive(c)
                c.check_collectives()

                assert tokens(c) == expected, drive.__name__
                assert c.finished


class TestThreadDevice:
    @pytest.mark.parametrize("mode", ["async", "legacy"])
    def test_where_devices_wait_for_one_another_by_themselves_no_phase_hangs(self, mode: str) -> None:
        options = {"mode": mode, "speculative_tokens": 2}
        expected = alone(late_on_the_other, **options)
        with cluster(device="cpu", graphs=None, **options) as c:
            late_on_the_other(c)
            mixed(c)
            c.check_collectives()

            assert tokens(c) == expected


class TestModeSwitch:
    @pytest.mark.parametrize("drive", [by_phases, by_steps])
    def test_in_mid_flight_changes_no_token(self, drive: Act) -> None:
        expected = alone(both)
        with cluster() as c:
            both(c)
            for mode in ("legacy", "async", "legacy"):
                for _ in range(4):
                    c.step_phase()
                c.mode = mode
            drive(c)
            c.check_collectives()

            assert tokens(c) == expected
            assert c.mode == "legacy"


class TestPhases:
    def test_a_rank_without_work_runs_dummy_work_beside_the_other(self) -> None:
        with cluster() as c:
            one_alone(c)
            seen = []
            while not c.finished:
                seen += [(place.order, place.ran) for place in c.step_phase() if place.rank == 1]

            assert ("dummy", "prepare") in seen
            assert c.sessions[1].engine.counters.dummy_steps > 0
            assert c.sessions[0].engine.counters.dummy_steps == 0

    def test_no_rank_blocks_while_nobody_steps(self) -> None:
        with cluster(rank_timeout_s=0.5) as c:
            both(c)
            for _ in range(5):
                c.step_phase()
                time.sleep(0.15)
            c.step_phase()
            time.sleep(0.7)  # longer than ranks wait for one another
            c.run()

            assert all(one.state == "length" for one in c.requests())

    def test_who_stands_at_no_meeting_goes_first(self) -> None:
        places = [Place(rank=0, iteration=3, next_phase="sample"), Place(rank=1, iteration=3, next_phase="prepare")]
        assert next_ranks(places) == [0]

    def test_at_a_meeting_all_go_at_once(self) -> None:
        places = [Place(rank=rank, iteration=3, next_phase="forward") for rank in range(3)]
        assert next_ranks(places) == [0, 1, 2]

    def test_a_rank_that_has_ended_its_iteration_waits_for_the_others(self) -> None:
        places = [Place(rank=0), Place(rank=1, iteration=3, next_phase="emit")]
        assert next_ranks(places) == [1]

    @pytest.mark.parametrize("other", [Place(rank=1), Place(rank=1, iteration=3, next_phase="draft")])
    def test_different_meetings_are_an_error_that_names_them(self, other: Place) -> None:
        with pytest.raises(ClusterError, match="rank 0 before prepare of iteration 3, rank 1 "):
            next_ranks([Place(rank=0, iteration=3, next_phase="prepare"), other])


class TestBreakpoints:
    def test_at_one_rank_holds_all_and_nobody_hangs(self) -> None:
        with cluster() as c:
            both(c)
            point = c.sessions[0].break_on("resolve")
            outcome = c.run()

            assert outcome.stopped is not None
            assert outcome.stopped.cause is StopCause.BREAKPOINT
            assert c.places[0].next_phase == "resolve"
            assert "rank 0" in outcome.stopped.text

            point.disable()
            c.run()
            assert tokens(c) == alone(both)


class TestStandingStill:
    @pytest.mark.parametrize("how", ["pause", "persist", "offload", "recompute"])
    def test_changes_no_token(self, how: str) -> None:
        with cluster() as c:
            both(c)
            c.run(3)
            c.pause() if how == "pause" else c.suspend(how)
            assert {place.state for place in c.places} == {"paused" if how == "pause" else "suspended"}
            with pytest.raises(ClusterError, match=r"rank 0 .*EnginePausedError"):
                c.step()
            c.resume()
            c.run()
            c.check_collectives()

            assert tokens(c) == alone(both)

    def test_while_nobody_is_busy_forgets_no_arrival(self) -> None:
        with cluster() as c:
            c.submit([4, 5], rank=1, max_tokens=9, request_id="b", arrival=20, seed=2, **NO_EOS)
            c.pause()
            c.resume()
            c.run()
            c.check_collectives()

            assert tokens(c)["b"] == alone(both)["b"]

    def test_in_mid_iteration_is_refused_before_any_rank_waits(self) -> None:
        with cluster() as c:
            both(c)
            c.step_phase()
            with pytest.raises(ClusterError, match=r"pause needs an iteration border on all ranks.*step\(\)"):
                c.pause()
            c.run()
            assert c.finished

    def test_reset_in_mid_iteration_starts_all_ranks_over(self) -> None:
        with cluster() as c:
            both(c)
            c.run(2)
            c.step_phase()
            assert {output.finish_reason for output in c.reset()} == {"abort"}
            assert c.requests() == ()
            both(c)
            c.run()
            c.check_collectives()

            assert tokens(c) == alone(both)


class TestRequests:
    def test_handed_in_once_all_sleep_wake_all(self) -> None:
        with cluster() as c:
            one_alone(c)
            c.run()
            c.submit([4, 5], rank=1, max_tokens=4, request_id="b", seed=2, **NO_EOS)
            assert not c.finished
            c.run()
            c.check_collectives()

            assert tokens(c)["b"] == alone(both)["b"][:4]

    def test_that_arrive_later_once_all_sleep_let_all_jump(self) -> None:
        with cluster() as c:
            c.run()
            c.submit([4, 5], rank=1, max_tokens=4, request_id="b", arrival=25, seed=2, **NO_EOS)
            by_phases(c)

            assert len(tokens(c)["b"]) == 4
            assert [session.clock.now() >= 25 for session in c.sessions] == [True, True]

    def test_an_abort_ends_one_and_the_others_go_on(self) -> None:
        with cluster() as c:
            both(c)
            c.run(3)
            assert c.abort("a", rank=0)
            c.run()
            c.check_collectives()

            assert {one.request_id: one.state for one in c.requests()} == {"a": "abort", "b": "length"}
            assert tokens(c)["b"] == alone(both)["b"]

    def test_a_refusal_names_the_rank_and_harms_nothing(self) -> None:
        with cluster() as c:
            both(c)
            with pytest.raises(ClusterError, match=r"^rank 1 \(thread rank-1\), submit: RequestError: .*leave no room"):
                c.submit([1] * 200, rank=1)
            c.run()
            assert tokens(c) == alone(both)


class TestFailures:
    def test_a_rank_that_leaves_out_its_dummy_work_is_named_by_the_check(self) -> None:
        with cluster(rank_timeout_s=0.5) as c:
            one_alone(c)
            c.run(2)
            c.sessions[1].engine.runner.launch_dummy = lambda plan: None  # type: ignore[method-assign]
            with pytest.raises(ClusterError, match=r"rank 0 .*gather of a forward.*rank 1 did not come"):
                by_phases(c)
            with pytest.raises(
                ClusterError, match=r"device collective \d+ differs; rank 0: .*forward.*rank 1: nothing"
            ):
                c.check_collectives()
            with pytest.raises(ClusterError, match=r"rank 0 has failed.*make a new Cluster"):
                c.step()

    def test_the_rank_that_failed_by_itself_is_named_and_not_who_waited_for_it(self) -> None:
        with cluster() as c:
            both(c)
            c.run(2)

            def broken(*args: Any) -> None:
                raise ZeroDivisionError("planted")

            c.sessions[1].engine.runner.launch_sample = broken  # type: ignore[method-assign]
            with pytest.raises(ClusterError, match=r"rank 1 \(thread rank-1\), run: ZeroDivisionError: planted"):
                c.run()

    def test_a_rank_that_does_not_answer_is_named(self) -> None:
        with cluster(rank_timeout_s=0.2, limit_s=0.2) as c:
            hold = threading.Event()
            c.sessions[1].engine.abort = lambda name: hold.wait(20)  # type: ignore[method-assign, assignment]
            try:
                with pytest.raises(ClusterError, match=r"rank 1 \(thread rank-1\) did not answer abort within 0.4 s"):
                    c.abort("nobody", rank=1)
            finally:
                hold.set()

    def test_one_rank_is_refused(self) -> None:
        with pytest.raises(ClusterError, match="at least 2"):
            Cluster(ranks=1, in_process=True)

    def test_a_model_without_experts_is_refused_in_one_line(self) -> None:
        with pytest.raises(ClusterError, match="the model has no experts") as caught:
            Cluster("oracle", ranks=2, in_process=True, progress=False, **SMALL)
        assert "\n" not in str(caught.value)


class TestViews:
    def test_all_that_is_shown_can_be_shown(self) -> None:
        with cluster() as c:
            both(c)
            for _ in range(3):
                c.step_phase()
            assert "all meet" in repr(c.places)
            c.run()
            shown = (c, c.places, c.requests(), c.collectives(), c.summary(), c.sessions[1])
            assert all(repr(one) and one._repr_html_() for one in shown)
            traces = c.traces()
            assert [(one.rank, one.offset_ns, one.error_ns) for one in traces] == [(0, 0, 0), (1, 0, 0)]
            assert [len(one.trace.records.iterations) for one in traces] == [len(c.sessions[0].iterations())] * 2


class TestInterrupts:
    def test_leave_ranks_where_the_next_call_finds_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from workbench import cluster_asking

        honest, calls = cluster_asking.collect, 0

        def interrupted(*args: Any) -> list[Any]:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise KeyboardInterrupt
            return honest(*args)

        with cluster() as c:
            both(c)
            monkeypatch.setattr(cluster_asking, "collect", interrupted)
            with pytest.raises(KeyboardInterrupt):
                c.run(2)
            begun = c.places[0].begun
            assert (c.run(1).iterations, c.places[0].begun) == (1, begun + 1)
            c.run()
            c.check_collectives()

            assert tokens(c) == alone(both)
