"""The schedule exactly: which order, which phases, how many forwards, and in which place survivors stand."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from engine.errors import ConfigError
from engine.phases import Order, Phase, Reason
from engine.policy import OrderState, choose_order, never_overlap, prefer_overlap
from engine.request import SamplingParams
from engine.table import fill_holes
from tests.oracle_world import World, oracle_engine

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, seed=0, ignore_eos=True)


def phases_of(world: World) -> list[tuple[Order, tuple[Phase, ...]]]:
    """Each iteration's order with the phases it took; every phase has a border before and one after it."""
    found: list[tuple[Order, tuple[Phase, ...]]] = []
    borders = world.borders
    at = 0
    while at < len(borders):
        order = borders[at][0]
        here = borders[at : at + 2 * len(order.phases)]
        assert [side for _, _, side in here] == ["before", "after"] * len(order.phases)
        assert all(phase is here[i ^ 1][1] for i, (_, phase, _) in enumerate(here))
        found.append((order, tuple(phase for _, phase, side in here if side == "before")))
        at += len(here)
    return found


class TestPhaseSequence:
    def test_of_every_order_is_the_documented_one(self) -> None:
        admit, prepare, forward = Phase.ADMIT, Phase.PREPARE, Phase.FORWARD
        sample, resolve, emit = Phase.SAMPLE, Phase.RESOLVE, Phase.EMIT

        assert Order.LEGACY.phases == (admit, prepare, forward, sample, resolve, emit)
        assert Order.NO_OVERLAP.phases == (sample, resolve, admit, prepare, forward, emit)
        assert Order.OVERLAP.phases == (prepare, sample, forward, resolve, emit)
        assert Order.OVERLAP_ADMIT.phases == (admit, prepare, sample, forward, resolve, emit)
        assert Order.PRIMER.phases == (admit, prepare, forward)
        assert Order.DRAIN.phases == (sample, resolve, emit)

    @pytest.mark.parametrize(("beside", "behind_the_prompt"), [(False, Order.NO_OVERLAP), (True, Order.OVERLAP)])
    def test_is_what_a_run_yields_with_a_border_before_and_behind_each_phase(
        self, beside: bool, behind_the_prompt: Order
    ) -> None:
        world = World(oracle_engine(overlap_admission=beside))
        world.submit([1, 2], GREEDY)
        for _ in range(4):
            world.step()
        world.engine.set_mode("legacy")
        world.drain()

        assert phases_of(world) == [
            (order, order.phases)
            for order in (
                Order.PRIMER,
                behind_the_prompt,
                Order.OVERLAP,
                Order.OVERLAP,
                Order.DRAIN,
                Order.LEGACY,
                Order.LEGACY,
            )
        ]

    def test_of_six_tokens_in_async_is_primer_five_with_overlap_and_one_for_the_end(self) -> None:
        world = World(oracle_engine())
        world.submit([1, 2], GREEDY)
        world.drain()

        orders = [order for order, _ in phases_of(world)]
        assert orders == [Order.PRIMER, *[Order.OVERLAP] * 5, Order.NO_OVERLAP]

    def test_of_six_tokens_as_upstream_has_one_more_without_overlap_behind_the_prompt(self) -> None:
        world = World(oracle_engine(overlap_admission=False))
        world.submit([1, 2], GREEDY)
        world.drain()

        orders = [order for order, _ in phases_of(world)]
        assert orders == [Order.PRIMER, Order.NO_OVERLAP, *[Order.OVERLAP] * 4, Order.NO_OVERLAP]

    def test_stepped_by_phase_is_the_same_as_run(self) -> None:
        def records(by_phase: bool) -> list[tuple[object, ...]]:
            world = World(oracle_engine())
            for seed in range(6):
                world.submit([seed + 1] * (seed + 1), GREEDY.replace(max_tokens=seed + 2, temperature=1.0, seed=seed))
            while world.engine.has_unfinished():
                _ = world.step_phase() if by_phase else world.step()
            world.drain()
            return [
                (
                    record.iteration,
                    record.mode,
                    record.order,
                    record.reason,
                    record.consumed,
                    record.launched,
                    record.outputs,
                    record.new_tokens,
                    record.wasted_rows,
                    record.rows_released,
                    record.rows_moved,
                    record.free_blocks,
                    record.num_waiting,
                    record.num_active,
                )
                for record in world.engine.recorder.iterations()
            ]

        assert len(records(False)) > 10
        assert records(True) == records(False)


class TestBaseForwards:
    @pytest.mark.parametrize("mode", ["async", "legacy"])
    def test_are_one_an_iteration_and_none_in_a_drain(self, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        world = World(oracle_engine(mode=mode))
        counts = {"forward": 0}
        run = world.engine.runner.recorder.device
        monkeypatch.setattr(
            world.engine.runner.recorder,
            "device",
            lambda name, *rest: (counts.update(forward=counts["forward"] + (name == "forward")), run(name, *rest)),
        )
        expected = []
        for seed in range(7):
            world.submit([seed] * 5, GREEDY.replace(max_tokens=3 + seed))
        while world.engine.has_unfinished():
            if len(expected) == 6:
                world.engine.set_mode("legacy" if mode == "async" else "async")
            counts["forward"] = 0
            world.step()
            record = world.engine.recorder.iterations()[-1]
            assert counts["forward"] == (record.launched is not None)
            expected.append((record.order, counts["forward"]))
        assert all(count == 1 for order, count in expected if order == "primer")
        assert all(count == 0 for order, count in expected if order == "drain")
        # Every iteration with rows that go on has its forward: only one whose rows all end launches nothing.
        assert sum(count == 0 for order, count in expected if order != "drain") <= 2

    def test_follow_one_primer_a_busy_period_which_emits_nothing(self) -> None:
        world = World(oracle_engine())
        for period in range(1, 4):
            world.submit([1], GREEDY)
            world.submit([2, 3], GREEDY.replace(max_tokens=2))
            assert world.step() == []
            assert world.engine.recorder.iterations()[-1].order == "primer"
            world.drain()
            counters = world.engine.counters
            assert counters.primer_steps == counters.orders["primer"] == period
            assert counters.steps == counters.async_steps + counters.primer_steps

    def test_have_another_primer_after_a_switch_to_async(self) -> None:
        world = World(oracle_engine(mode="legacy"))
        world.submit([1], GREEDY)
        world.step()
        world.engine.set_mode("async")
        world.drain()
        assert world.engine.counters.primer_steps == 1


OTHERS = [(False, False, True), (True, False, False), (True, True, True), (True, True, False), (True, False, True)]
"""Whether there are other ranks, whether one has a forward pending, and whether this one owes outputs."""


def independent_choice(state: OrderState, refuses: bool) -> tuple[Order, Reason]:
    """The rules once more, as the design states them, from the last to the first that can speak."""
    beside = state.overlap_admission
    brings = beside and (state.head_admissible or state.chunk_in_progress)
    answer = (Order.OVERLAP, Reason.STEADY_DECODE)
    if state.late_rewind and state.num_lasting:
        answer = (Order.MTP_OVERLAP_LATE, Reason.COUNTS_LATER)
    answer = (Order.OVERLAP_ADMIT, Reason.ADMITS_BESIDE) if brings else answer
    answer = (Order.NO_OVERLAP, Reason.POLICY) if refuses else answer
    for holds, reason in (
        (state.blocks_needed > state.blocks_available, Reason.NOT_ENOUGH_BLOCKS),
        (state.num_continuing == 0 and not brings, Reason.ALL_ROWS_ENDING),
        (state.head_admissible and not beside, Reason.HEAD_ADMISSIBLE),
        (state.num_paused > 0, Reason.PAUSED_ROWS),
        (state.pending_has_prefill and not beside, Reason.PREFILL_PENDING),
        (state.chunk_in_progress and not beside, Reason.CHUNK_IN_PROGRESS),
    ):
        if holds:
            answer = (Order.NO_OVERLAP, reason)
    if not state.has_pending:
        answer = (Order.PRIMER, Reason.NO_PENDING_FORWARD)
    if state.mode == "legacy":
        answer = (Order.LEGACY, Reason.LEGACY_MODE)
    if not (state.has_pending or state.num_active or state.num_paused or state.has_waiting):
        answer = (Order.DRAIN, Reason.NOTHING_TO_RUN)
        if state.has_others and state.mode == "legacy":
            answer = (Order.LEGACY, Reason.NOTHING_TO_RUN)
        if state.has_others and not state.owes_outputs:
            answer = (Order.DUMMY, Reason.OTHERS_WORK)
    if state.others_pending and state.wanted_mode != state.mode:
        answer = (Order.DUMMY, Reason.MODE_SWITCH)
    if state.has_pending and state.wanted_mode != state.mode:
        answer = (Order.DRAIN, Reason.MODE_SWITCH)
    return answer


class TestChooseOrder:
    def test_agrees_with_the_rules_for_every_combination_of_facts(self) -> None:
        seen = set()
        flags = [False, True]
        for mode, wanted, refuses in product(("async", "legacy"), ("async", "legacy"), flags):
            for bits in product(flags, repeat=12):
                # Of the facts on other ranks each has its turn; all of them with all others would be too many.
                others = OTHERS[sum(bits) % len(OTHERS)]
                pending, prefill, chunk, paused, active, continuing, short, waiting, admissible, beside = bits[:10]
                state = OrderState(
                    mode=mode,  # type: ignore[arg-type]
                    wanted_mode=wanted,  # type: ignore[arg-type]
                    has_pending=pending,
                    pending_has_prefill=prefill,
                    chunk_in_progress=chunk,
                    num_paused=int(paused),
                    num_active=int(active),
                    num_continuing=int(continuing),
                    blocks_needed=2,
                    blocks_available=1 if short else 2,
                    has_waiting=waiting,
                    head_admissible=admissible,
                    overlap_admission=beside,
                    late_rewind=bits[10],
                    num_lasting=int(bits[11]),
                    has_others=others != (False, False, True),
                    others_pending=others[1],
                    owes_outputs=others[2],
                )
                found = choose_order(state, never_overlap if refuses else prefer_overlap)
                assert found == independent_choice(state, refuses), state
                seen.add(found)
        assert {reason for _, reason in seen} == set(Reason)
        plain = {order for order in Order if order.without_drafting is order} - {Order.SHARED_DRAIN}
        assert {order for order, _ in seen} == plain | {Order.MTP_OVERLAP_LATE}

    @pytest.mark.parametrize(
        "answer",
        [(Order.LEGACY, Reason.POLICY), (Order.OVERLAP, "because"), (None, Reason.POLICY), Order.OVERLAP, None],
    )
    def test_refuses_a_policy_that_answers_anything_else(self, answer: tuple[Order, Reason]) -> None:
        class Odd:
            def choose(self, state: OrderState) -> tuple[Order, Reason]:
                return answer

        world = World(oracle_engine(policy=Odd()))
        world.submit([1], GREEDY)
        world.step()

        with pytest.raises(ConfigError, match=r"an order policy answers \(Order\.OVERLAP, Reason"):
            world.step()
        world.engine.controller.policy = prefer_overlap
        world.engine.recover()
        world.drain()

    @pytest.mark.parametrize("beside", [False, True])
    def test_never_asks_a_policy_where_overlap_is_illegal(self, beside: bool) -> None:
        asked: list[OrderState] = []

        class Asked:
            def choose(self, state: OrderState) -> tuple[Order, Reason]:
                asked.append(state)
                return prefer_overlap.choose(state)

        world = World(oracle_engine(policy=Asked(), overlap_admission=beside))
        for seed in range(9):
            world.submit([seed], GREEDY.replace(max_tokens=seed + 1))
        world.drain()
        assert asked
        assert all(state.has_pending and (state.num_continuing or state.admits_beside) for state in asked)
        assert any(state.pending_has_prefill for state in asked) == beside
        assert any(state.head_admissible for state in asked) == beside

    def test_with_the_never_overlap_policy_gives_the_same_tokens_without_overlap(self) -> None:
        outputs = []
        for policy in (prefer_overlap, never_overlap):
            world = World(oracle_engine(policy=policy))
            for seed in range(6):
                world.submit([seed, seed + 1], GREEDY.replace(max_tokens=9, temperature=1.0, seed=seed))
            world.drain()
            outputs.append([one.last.token_ids for one in world.all if one.last is not None])
            assert (world.engine.counters.overlap_steps == 0) == (policy is never_overlap)
        assert outputs[0] == outputs[1]


class TestFillHoles:
    @pytest.mark.parametrize("num_rows", range(11))
    def test_equals_its_reference_for_every_mask(self, num_rows: int) -> None:
        for mask in product([False, True], repeat=num_rows):
            survivors = [row for row in range(num_rows) if mask[row]]
            kept = len(survivors)
            late = [row for row in survivors if row >= kept]
            wanted = [row if mask[row] else late.pop(0) for row in range(kept)]

            assert fill_holes(np.array(mask, dtype=np.bool_)).tolist() == wanted

    def test_gives_the_documented_examples(self) -> None:
        for alive, wanted in (([0, 1, 1], [2, 1]), ([1, 0, 1], [0, 2]), ([0, 0, 1, 1], [2, 3])):
            assert fill_holes(np.array(alive, dtype=np.bool_)).tolist() == wanted
