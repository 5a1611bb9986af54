"""What may be called between phases, and what it does: every call in every standing of every order."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

from engine import runner as runner_module
from engine.engine import Engine
from engine.errors import ConfigError, IterationFailedError, MidIterationError
from engine.invariants import check_idle
from engine.phases import Order, Phase
from engine.policy import never_overlap, prefer_overlap
from engine.request import Request, RequestState, SamplingParams
from engine.staging import Slab
from engine.table import RequestTable
from tests.oracle_world import PlantedError, World, oracle_engine, random_params, random_prompt
from tests.random_schedules import ORDERS, PHASES

Standing = tuple[Order, int]
STANDINGS: list[Standing] = [(order, done) for order in ORDERS for done in range(1, len(order.phases))]
"""An order and how many of its phases are done: every place where ``step_phase`` can leave an iteration."""
FAILURES = [(order, phase, after) for order in ORDERS for phase in order.phases for after in (False, True)]


def _raise(*args: Any) -> None:
    raise PlantedError("planted in mid staging")


def name_of(value: Any) -> str:
    return getattr(value, "label", None) or str(getattr(value, "value", value))


def busy_world(order: Order) -> World:
    """Three running requests of different kinds and one that waits, whose next iteration takes ``order``."""
    world = World(
        oracle_engine(
            mode="legacy" if order is Order.LEGACY else "async",
            policy=never_overlap if order is Order.NO_OVERLAP else prefer_overlap,
            max_requests=4 if order is Order.OVERLAP_ADMIT else 3,
            overlap_admission=order is Order.OVERLAP_ADMIT,
        )
    )

    def submit(seed: int) -> None:
        params = SamplingParams(max_tokens=8 + seed, temperature=1.0, seed=seed, logprobs=seed, ignore_eos=True)
        world.submit([seed + 1] * (3 * seed + 1), params, stream=seed == 1)

    for seed in range(3 if order is Order.OVERLAP_ADMIT else 4):
        submit(seed)
    if order is Order.PRIMER:
        return world
    for _ in range(2):
        world.step()
    if order is Order.OVERLAP_ADMIT:
        submit(3)
    if order is Order.DRAIN:
        world.engine.set_mode("legacy")
    return world


def stand(order: Order, done: int) -> World:
    """A world in mid iteration: ``done`` phases of ``order`` are done."""
    world = busy_world(order)
    for i in range(done):
        border = world.step_phase()
        assert border is not None
        assert (border.iteration.order, border.phase, border.side) == (order, order.phases[i], "after")
    assert world.engine.in_hand is not None
    assert world.engine.next_phase is order.phases[done]
    return world


def running_and_waiting(engine: Engine) -> tuple[str, str | None]:
    """A request with a row where there is one, and one without."""
    rows = [request.request_id for request in engine.table.live_requests()]
    waiting = [request.request_id for request in engine.queue.waiting]
    return (rows or waiting)[0], waiting[-1] if waiting else None


@pytest.fixture(params=STANDINGS, ids=lambda standing: f"{standing[0].label}-{standing[1]}")
def standing(request: pytest.FixtureRequest) -> Standing:
    found: Standing = request.param
    return found


@pytest.fixture
def world(standing: Standing) -> World:
    return stand(*standing)


class TestInMidIteration:
    def test_everything_may_be_read_and_nothing_changes(self, standing: Standing, world: World) -> None:
        engine = world.engine
        before = self._state(engine)

        engine.controller.order_state()
        engine.queue.head_refusal()
        engine.counters.to_dict()
        engine.recorder.spans()
        engine.recorder.iterations()
        for _, column in engine.table.columns():
            column.tolist()
        assert engine.has_unfinished()
        assert engine.mode in ("async", "legacy")
        assert engine.next_phase is standing[0].phases[standing[1]]

        assert self._state(engine) == before
        world.drain()

    @staticmethod
    def _state(engine: Engine) -> tuple[Any, ...]:
        return (
            [column.tobytes() for _, column in engine.table.columns()],
            engine.table.version,
            engine.pool.free_ids.tolist(),
            [request.key for request in engine.queue.waiting],
            engine.pending,
            engine.in_hand,
            engine.mode,
            engine.counters.to_dict(),
        )

    def test_a_submission_waits_for_the_next_admit(self, world: World) -> None:
        rows = world.engine.table.num_live
        request_id = world.submit([5, 6, 7], SamplingParams(max_tokens=4, seed=9))

        assert world.engine.table.num_live == rows
        assert world.engine.queue.waiting[-1].request_id == request_id
        assert world.engine._live[request_id].state is RequestState.WAITING
        world.drain()

    def test_an_abort_waits_for_the_next_admit_or_resolve_and_no_token_follows(self, world: World) -> None:
        running, waiting = running_and_waiting(world.engine)
        rows = world.engine.table.num_live
        for request_id in {running, waiting} - {None}:
            assert world.abort(request_id)  # type: ignore[arg-type]
            assert not world.abort(request_id), "a second abort of the same request is refused"  # type: ignore[arg-type]
        assert world.engine.table.num_live == rows, "the row is held until then"

        world.drain()

        finished = world.engine.counters.finished
        assert finished["abort"] == len({running, waiting} - {None})

    def test_an_abort_of_a_request_that_has_just_ended_is_refused(self, world: World) -> None:
        ended = [request.request_id for request in world.engine.in_hand.ended]  # type: ignore[union-attr]
        assert not any(world.abort(request_id) for request_id in ended)
        world.drain()

    def test_a_mode_change_takes_effect_at_the_border(self, standing: Standing, world: World) -> None:
        engine = world.engine
        before = engine.mode
        other = "legacy" if before == "async" else "async"
        engine.set_mode(other)

        assert engine.mode == before
        world.step()
        if engine.pending is not None:
            world.step()
            assert engine.recorder.iterations()[-1].order == "drain"
        world.step()
        assert engine.mode == other
        world.drain()

    def test_a_mode_changed_to_and_fro_changes_nothing(self, world: World) -> None:
        wanted = world.engine.controller.wanted_mode
        for mode in ("legacy", "async", wanted):
            world.engine.set_mode(mode)
        world.drain()

    def test_step_finishes_the_iteration_in_hand_and_begins_no_other(self, world: World) -> None:
        engine = world.engine
        iteration, steps = engine.in_hand, engine.counters.steps
        assert iteration is not None

        outputs = world.step()

        assert outputs is iteration.outputs
        assert engine.in_hand is None
        assert engine.next_phase is None
        assert engine.counters.steps == steps + 1
        assert engine.recorder.iterations()[-1].iteration == iteration.index
        world.drain()

    def test_what_needs_a_border_is_refused_by_the_name_of_the_phase(self, standing: Standing, world: World) -> None:
        phase = standing[0].phases[standing[1]]
        with pytest.raises(MidIterationError, match=f"suspend needs an iteration border.*before {phase.value}"):
            world.engine.require_border("suspend")
        world.step()
        world.engine.require_border("suspend")
        world.drain()

    def test_reset_discards_it_and_leaves_no_pending_forward(self, world: World) -> None:
        world.reset()

        assert world.engine.in_hand is None
        assert world.engine.pending is None
        assert world.engine.counters.steps == 0
        world.submit([3, 2, 1], SamplingParams(max_tokens=5, temperature=1.0, seed=3))
        world.drain()

    def test_recover_without_a_failure_drops_it_and_changes_no_token(self, world: World) -> None:
        world.engine.recover()

        assert world.engine.in_hand is None
        assert world.engine.pending is None
        world.drain()


class TestAbort:
    def test_at_every_border_releases_everything_within_one_resolve(self) -> None:
        for order in ORDERS:
            for at, side in ((phase, side) for phase in order.phases for side in ("before", "after")):
                world = busy_world(order)
                victim = running_and_waiting(world.engine)[0]

                def abort(border: Any, *, here: Any = (order, at, side), world: World = world, v: str = victim) -> None:
                    if (border.iteration.order, border.phase, border.side) == here:
                        world.on_border = None
                        world.abort(v)

                world.on_border = abort
                world.step()
                assert world.on_border is None, (order, at, side)
                world.step()
                one = world.current[victim]
                if one.last is None:  # a primer has no emit, and leaves its last outputs to the next iteration
                    world.step()
                assert one.last is not None
                assert victim not in {request.request_id for request in world.engine.table.live_requests()}
                world.drain()


class TestModeSwitch:
    @pytest.mark.parametrize("start", ["async", "legacy"])
    def test_before_every_iteration_changes_no_token(self, start: str) -> None:
        world = World(oracle_engine(mode=start))
        rng = random.Random(start)
        for _ in range(12):
            world.submit(random_prompt(rng), random_params(rng))
        modes = ["legacy", "async"]
        for i in range(400):
            if not world.engine.has_unfinished():
                break
            world.engine.set_mode(modes[i % 2])
            world.step()
        world.drain()
        assert world.engine.counters.orders["drain"] > 5

    def test_drains_in_an_iteration_of_its_own_whose_outputs_the_next_step_returns(self) -> None:
        world = busy_world(Order.DRAIN)
        assert world.engine.mode == "async"
        tokens = sum(len(request.output_ids) for request in world.engine._live.values())

        outputs = world.step()

        record = world.engine.recorder.iterations()[-1]
        assert (record.order, record.launched) == ("drain", None)
        assert sum(len(request.output_ids) for request in world.engine._live.values()) == tokens + 3
        assert [output.request_id for output in outputs] == [world.all[1].request_id], "the one that streams"
        world.step()
        assert world.engine.mode == "legacy"
        world.drain()

    @pytest.mark.parametrize("mode", ["", "ASYNC", "no-overlap", None])
    def test_to_anything_but_the_two_is_refused_naming_both(self, mode: Any) -> None:
        world = World(oracle_engine())
        with pytest.raises(ConfigError, match="'async' or 'legacy'"):
            world.engine.set_mode(mode)
        assert world.engine.mode == "async"


class TestFailure:
    @pytest.mark.parametrize(("order", "phase", "after"), FAILURES, ids=name_of)
    def test_in_a_phase_is_kept_refuses_stepping_and_recover_changes_no_token(
        self, order: Order, phase: Phase, after: bool
    ) -> None:
        world = busy_world(order)
        index = world.engine.controller.next_index

        assert world.fail_in(phase, after=after)

        failure = world.engine.failure
        assert failure is not None
        assert failure.iteration is not None
        assert (failure.phase, failure.iteration.index, failure.iteration.order) == (phase, index, order)
        with pytest.raises(IterationFailedError, match=r"recover\(\).*reset\(\)"):
            world.engine.step()
        world.engine.recover()
        assert world.engine.failure is None
        world.drain()
        assert world.engine.counters.finished["length"] == 4

    @pytest.mark.parametrize(("order", "phase", "after"), FAILURES, ids=name_of)
    def test_in_a_phase_may_be_left_by_reset(self, order: Order, phase: Phase, after: bool) -> None:
        world = busy_world(order)
        assert world.fail_in(phase, after=after)

        world.reset()

        world.submit([1, 2, 3], SamplingParams(max_tokens=6, temperature=1.0, seed=5))
        world.drain()

    def test_in_every_iteration_still_loses_nothing(self) -> None:
        world = World(oracle_engine())
        rng = random.Random(4)
        for _ in range(6):
            world.submit(random_prompt(rng), random_params(rng), stream=rng.random() < 0.5)
        for i in range(60):
            if world.fail_in(PHASES[i % 6], after=i % 4 < 2):
                world.engine.recover()
        world.drain()

    def test_again_right_after_recovery_loses_nothing(self) -> None:
        world = busy_world(Order.OVERLAP)
        for phase in (Phase.RESOLVE, Phase.FORWARD, Phase.ADMIT, Phase.PREPARE):
            assert world.fail_in(phase, after=True)
            world.engine.recover()
            world.engine.recover()
        world.drain()

    def test_keeps_aborts_and_submissions_made_while_it_stands(self) -> None:
        world = busy_world(Order.OVERLAP)
        assert world.fail_in(Phase.RESOLVE, after=False)
        victim = world.all[0].request_id
        assert world.abort(victim)
        world.submit([4], SamplingParams(max_tokens=3, seed=8))

        world.engine.recover()

        world.drain()
        assert world.current[victim].last is not None
        assert world.current[victim].last.finish_reason == "abort"  # type: ignore[union-attr]

    def test_of_an_invariant_is_a_failure_as_any_other(self) -> None:
        world = busy_world(Order.OVERLAP)

        def complain(border: Any) -> None:
            world.on_border = None
            raise AssertionError("planted")

        world.on_border = complain
        with pytest.raises(AssertionError, match="planted"):
            world.step()
        world.engine.recover()
        world.drain()

    def test_by_an_interrupted_kernel_is_a_failure_as_any_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = busy_world(Order.OVERLAP)

        def interrupt(iteration: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setitem(world.engine.controller._phases, Phase.RESOLVE, interrupt)
            with pytest.raises(KeyboardInterrupt):
                world.step()
        with pytest.raises(IterationFailedError):
            world.step()
        world.engine.recover()
        world.drain()

    def test_in_mid_entry_leaves_no_row_half_filled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A row is entered column by column, and counted as live behind that; free rows keep nothing (I3)."""
        world = busy_world(Order.OVERLAP)
        world.submit([7, 8, 9], SamplingParams(max_tokens=4, seed=9, ignore_eos=True))
        get: Callable[[Request], list[int]] = Request.output_ids.fget  # type: ignore[attr-defined]

        def interrupted(request: Request) -> list[int]:
            if sys._getframe(1).f_code is RequestTable.add.__code__:
                raise KeyboardInterrupt
            return get(request)

        with monkeypatch.context() as patch:
            patch.setattr(Request, "output_ids", property(interrupted))
            with pytest.raises(KeyboardInterrupt):
                world.drain()
        world.engine.recover()
        world.drain()

    def test_in_mid_staging_leaves_no_half_that_lies(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A half remembers the decode batch it holds; one whose staging was interrupted must not claim the old one.

        Both halves hold rows 0 and 1. Row 0 is aborted, and staging row 1 alone is interrupted. After recovery the
        same half is next used for rows 0 and 1 again.
        """
        monkeypatch.setattr(Slab, "fill_idle", lambda self, value: None)  # poison would hide it
        world = World(oracle_engine(max_requests=2, block_size=32, num_blocks=8))
        for seed in range(3):
            world.submit([seed + 1], SamplingParams(max_tokens=25, seed=seed, ignore_eos=True))
        for _ in range(6):
            world.step()
        world.abort(world.all[0].request_id)
        with monkeypatch.context() as patch:
            patch.setattr(runner_module, "stage_tokens", _raise)
            with pytest.raises(PlantedError):
                world.step()
        world.engine.recover()
        world.drain()

    def test_at_the_last_border_does_not_lose_the_outputs_already_made(self) -> None:
        """Found here: outputs made by an iteration that fails behind emit were never returned."""
        world = World(oracle_engine(mode="legacy"))
        world.submit([1], SamplingParams(max_tokens=1, seed=0), request_id="short")
        world.submit([2], SamplingParams(max_tokens=3, seed=0))
        assert world.fail_in(Phase.EMIT, after=True)
        assert "short" not in world.engine._live

        world.engine.recover()

        assert [output.request_id for output in world.step()] == ["short"]
        world.drain()


class TestReset:
    @pytest.mark.parametrize("twice", [False, True])
    def test_of_an_idle_engine_returns_nothing(self, twice: bool) -> None:
        engine = oracle_engine()
        for _ in range(1 + twice):
            assert engine.reset() == []
        check_idle(engine)

    def test_returns_the_last_output_of_each_live_request_and_counts_from_zero(self) -> None:
        world = busy_world(Order.OVERLAP)
        live = set(world.live_ids)

        outputs = world.engine.reset()

        assert {output.request_id for output in outputs} == live
        assert {output.finish_reason for output in outputs} == {"abort"}
        assert world.engine.counters.to_dict() == oracle_engine().counters.to_dict()

    @pytest.mark.parametrize("asked", ["async", "legacy"])
    def test_takes_over_a_mode_that_was_asked_for(self, asked: str) -> None:
        world = busy_world(Order.OVERLAP)
        world.engine.set_mode(asked)
        world.reset()
        assert world.engine.mode == asked


class TestProbe:
    def test_leaves_no_trace_of_an_admission_that_fails(self) -> None:
        world = World(oracle_engine(num_blocks=25, max_requests=3))
        world.submit([1] * 50, SamplingParams(max_tokens=40, seed=1, ignore_eos=True))
        world.step()
        world.submit([2] * 50, SamplingParams(max_tokens=40, seed=1))
        engine = world.engine
        state: Callable[[], tuple[Any, ...]] = lambda: (  # noqa: E731
            engine.pool.free_ids.tolist(),
            engine.pool.ref_counts.tolist(),
            engine.table.num_live,
            engine.table.version,
            [request.key for request in engine.queue.waiting],
        )
        before = state()
        for _ in range(100):
            assert engine.queue.head_refusal() is not None
            assert engine.queue.admit() == []
        assert state() == before
        world.drain()
