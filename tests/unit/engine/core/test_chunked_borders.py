"""What may happen while a prompt is half read: aborts, ends, mode switches, failures and resets, at every border."""

from __future__ import annotations

from itertools import product

import pytest

from engine.controller import Border
from engine.invariants import check_idle
from engine.phases import Order, Phase, Reason
from engine.request import SamplingParams
from tests.bug_kind_world import DRAWN, GREEDY, MODES, alone
from tests.chunk_watch import ChunkWatch
from tests.oracle_reference import PIECES
from tests.oracle_world import World, oracle_engine

LONG = [(5 * place) % 61 for place in range(40)]
WATCHED = DRAWN.replace(max_tokens=6, logprobs=1, prompt_logprobs=2)
PLACES = [
    (mode, order, phase, after)
    for mode, order in (("async", Order.NO_OVERLAP), ("async", Order.OVERLAP_ADMIT), ("legacy", Order.LEGACY))
    for phase, after in product(order.phases, (False, True))
]
"""Where an iteration stands while a chunk is in progress."""


def busy_world(mode: str, *, beside: bool = True) -> World:
    """Two rows that decode, and budget for chunks of six beside them."""
    world = World(oracle_engine(mode=mode, max_batch_tokens=8, chunked_prefill=True, overlap_admission=beside))
    world.submit([1, 2], GREEDY.replace(max_tokens=60))
    world.submit([3], DRAWN.replace(max_tokens=60))
    for _ in range(3):
        world.step()
    return world


def half_read(world: World, prompt: list[int] = LONG, params: SamplingParams = WATCHED) -> str:
    """Submit a long prompt and step until two chunks of it are launched."""
    name = world.submit(prompt, params)
    for _ in range(10):
        world.step()
        row = world.engine._live[name].row
        if row is not None and world.engine.table.chunk_done[row] > 0:
            break
    assert world.engine.table.partial_row is not None
    return name


def stand(world: World, order: Order, phase: Phase, *, after: bool) -> None:
    """Go on to the next such border, by hand; behind the last phase of an order it is the one between iterations."""
    if after:
        while True:
            border = world.step_phase()
            assert border is not None
            if border.phase is phase:
                break
        assert border.iteration.order is order
    else:
        world.engine.step(until=lambda border: border.phase is phase)
        assert world.engine.in_hand is not None
        assert world.engine.in_hand.order is order
    assert world.engine.table.partial_row is not None, "its prompt was read before that border came"


class TestAborts:
    @pytest.mark.parametrize(("mode", "order", "phase", "after"), PLACES)
    def test_end_a_half_read_prompt_at_any_border(self, mode: str, order: Order, phase: Phase, after: bool) -> None:
        """I58: rows and blocks are back at the next admit or resolve, the others' tokens stay as they are."""
        world = busy_world(mode, beside=order is Order.OVERLAP_ADMIT)
        name = half_read(world)
        stand(world, order, phase, after=after)

        assert world.abort(name)
        world.step()
        world.step()

        last = world.current[name].last
        assert last is not None
        assert (last.finish_reason, last.token_ids, last.prompt_logprobs) == ("abort", (), ())
        assert world.engine.table.num_live == 2
        assert world.engine.table.partial_row is None
        world.drain()

    def test_of_the_only_request_leave_nothing(self, mode: str) -> None:
        world = World(oracle_engine(mode=mode, max_batch_tokens=6, chunked_prefill=True))
        name = half_read(world)
        world.abort(name)
        world.drain()

        check_idle(world.engine)
        assert world.engine.counters.generated_tokens == 0

    def test_of_the_rows_beside_it_leave_it_the_last_row(self, mode: str) -> None:
        world = busy_world(mode)
        name = half_read(world)
        world.abort(world.all[0].request_id)
        world.step()
        world.step()

        request = world.engine._live[name]
        assert request.row == world.engine.table.num_live - 1 == 1
        world.drain()


class TestStopStrings:
    def test_found_in_emit_move_the_partial_row_up_and_keep_it_last(self, mode: str) -> None:
        """Behind a launched forward, so its pending row follows; the row that stood there fills the hole."""
        tokens = alone([9, 9], GREEDY)
        stop = PIECES[tokens[3]]
        assert stop not in "".join(PIECES[token] for token in tokens[:3])
        world = World(oracle_engine(mode=mode, max_batch_tokens=9, chunked_prefill=True, has_text=True))
        first = world.submit([9, 9], GREEDY.replace(stop=[stop], detokenize=True))
        world.submit([1, 2], GREEDY.replace(max_tokens=40))
        world.submit([3], DRAWN.replace(max_tokens=40))
        name = world.submit(LONG, WATCHED)
        moved: list[tuple[int | None, int | None]] = []
        rows: dict[str, int | None] = {}

        def look(border: Border) -> None:
            request = world.engine._live.get(name)
            if border.phase is not Phase.EMIT or request is None:
                return
            if border.side == "before":
                rows["before"] = request.row
            elif border.iteration.rows_released and any(r.request_id == first for r in border.iteration.ended):
                moved.append((rows["before"], request.row))
                assert world.engine.table.partial_row == request.row

        world.on_border = look
        world.drain()

        assert moved == [(3, 2)]


class TestModeSwitches:
    @pytest.mark.parametrize(("mode", "order", "phase", "after"), PLACES)
    def test_at_any_border_change_no_answer(self, mode: str, order: Order, phase: Phase, after: bool) -> None:
        world = busy_world(mode, beside=order is Order.OVERLAP_ADMIT)
        watch = ChunkWatch(world)
        name = half_read(world)
        stand(world, order, phase, after=after)
        other = MODES[1 - MODES.index(mode)]

        world.engine.set_mode(other)
        while world.engine.mode != other:
            world.step()

        assert world.engine.table.partial_row is not None
        world.drain()
        assert sum(watch.chunks[name]) == len(LONG)

    def test_back_and_forth_at_every_border_change_no_answer(self) -> None:
        world = busy_world("async")
        name = world.submit(LONG, WATCHED)
        watch = ChunkWatch(world)
        while world.engine.has_unfinished():
            world.engine.set_mode("legacy" if world.engine.controller.wanted_mode == "async" else "async")
            world.step_phase()
        world.drain()

        assert sum(watch.chunks[name]) == len(LONG)
        assert world.engine.counters.reasons[Reason.MODE_SWITCH.name.lower()] > 3

    def test_while_nothing_else_runs_drain_a_forward_that_gives_no_token(self) -> None:
        """A drain of a partial chunk alone samples nobody."""
        world = World(oracle_engine(max_batch_tokens=6, chunked_prefill=True))
        half_read(world)
        world.engine.set_mode("legacy")
        assert world.step() == []

        record = world.engine.recorder.iterations()[-1]
        assert (record.order, record.new_tokens, world.engine.counters.sampled_rows) == (Order.DRAIN.label, 0, 0)
        world.drain()


class TestFailures:
    @pytest.mark.parametrize(("phase", "after"), list(product(Order.LEGACY.phases, (False, True))))
    def test_in_any_phase_cost_no_token_and_no_log_probability(self, mode: str, phase: Phase, after: bool) -> None:
        """Log probabilities of the chunks read so far were kept, and those of all chunks then came on top."""
        world = busy_world(mode)
        name = half_read(world)
        assert world.engine._live[name].prompt_logprobs

        assert world.fail_in(phase, after=after)
        world.engine.recover()
        world.drain()

        last = world.current[name].last
        assert last is not None
        assert last.token_ids == alone(LONG, WATCHED)
        assert last.prompt_logprobs is not None
        assert len(last.prompt_logprobs) == len(LONG)

    def test_in_mid_decode_read_prompt_and_output_again_in_chunks(self, mode: str) -> None:
        """What recovery reads is longer than the prompt; its log probabilities are there, and are not made twice."""
        world = World(oracle_engine(mode=mode, max_batch_tokens=8, chunked_prefill=True))
        params = WATCHED.replace(max_tokens=30)
        name = world.submit(LONG, params)
        while len(world.engine._live[name].output_ids) < 20:
            world.step()
        known = list(world.engine._live[name].prompt_logprobs)
        watch = ChunkWatch(world)

        assert world.fail_in(Phase.FORWARD, after=True)
        world.engine.recover()
        world.drain()

        assert watch.chunks[name][:2] == [8, 8]
        assert sum(watch.chunks[name]) in (len(LONG) + 20, len(LONG) + 21)
        last = world.current[name].last
        assert last is not None
        assert last.prompt_logprobs == tuple(known)
        assert last.token_ids == alone(LONG, params)


class TestReset:
    def test_in_mid_prompt_leaves_an_engine_that_answers_alike(self, mode: str) -> None:
        world = busy_world(mode)
        half_read(world)
        world.reset()
        assert world.engine.table.partial_row is None

        name = world.submit(LONG, WATCHED)
        world.drain()

        last = world.current[name].last
        assert last is not None
        assert last.token_ids == alone(LONG, WATCHED)
