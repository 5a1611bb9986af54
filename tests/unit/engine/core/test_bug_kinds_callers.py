"""Kinds of fault that other engines had where callers come and go: aborts, ids, admission, streams, reset.

Numbers are those of the reference's bug-kinds list; what this project itself got wrong is marked "found here".
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Sequence

import pytest

from engine.controller import Border
from engine.errors import IterationFailedError, RequestError
from engine.invariants import check_idle
from engine.phases import Order, Phase
from engine.request import RequestOutput
from tests.bug_kind_world import DRAWN, GREEDY, alone
from tests.oracle_world import (
    PIECES,
    PieceTokenizer,
    PlantedError,
    World,
    oracle_engine,
    play,
    random_params,
    random_prompt,
)


class TestAborts:
    def test_between_launch_and_collect_give_no_token_and_give_everything_back(self) -> None:
        """Kinds 13 and 30: the victim's blocks go to a newcomer at once."""
        for order in (Order.NO_OVERLAP, Order.OVERLAP):
            world = World(oracle_engine(num_blocks=10, max_requests=2, overlap_admission=order is Order.OVERLAP))
            victim = world.submit([1] * 9, DRAWN)
            world.submit([2] * 9, DRAWN.replace(seed=5))

            def strike(border: Border, *, world: World = world, order: Order = order, victim: str = victim) -> None:
                if (border.iteration.order, border.phase, border.side) == (order, Phase.FORWARD, "after"):
                    world.abort(victim)
                    world.submit([3] * 9, DRAWN)
                    world.on_border = None

            world.on_border = strike
            world.drain()
            assert world.engine.counters.finished["abort"] == 1

    @pytest.mark.parametrize("after_chunks", [0, 1, 2])
    def test_of_a_stream_with_logprobs_end_cleanly(self, mode: str, after_chunks: int) -> None:
        """Kind 76."""
        world = World(oracle_engine(mode=mode))
        request_id = world.submit([1, 2], DRAWN.replace(logprobs=2, prompt_logprobs=1), stream=True)
        while len(world.all[0].new_ids) < after_chunks:
            world.step()
        world.abort(request_id)
        world.drain()
        last = world.all[0].last
        assert last is not None
        assert last.finish_reason == "abort"
        assert len(last.logprobs or ()) == len(last.token_ids)

    def test_of_a_request_that_ended_meanwhile_do_not_end_it_twice(self) -> None:
        """Found here: an abort between resolve and emit made the next resolve end the request once more."""
        world = World(oracle_engine())
        short = world.submit([1], GREEDY.replace(max_tokens=2))
        world.submit([2], GREEDY)

        def strike(border: Border) -> None:
            if (border.phase, border.side) == (Phase.RESOLVE, "after") and border.iteration.ended:
                assert not world.abort(short)

        world.on_border = strike
        world.drain()
        assert dict(world.engine.counters.finished) == {"length": 2}

    def test_of_a_request_whose_stop_string_emit_finds_do_not_end_it_twice(self) -> None:
        """Found here, the same with the end found in emit."""
        world = World(oracle_engine(has_text=True))
        ids = alone([1, 2, 3], GREEDY)
        stopped = world.submit([1, 2, 3], GREEDY.replace(detokenize=True, stop=[PIECES[ids[3]]]))
        world.submit([2], GREEDY)

        def strike(border: Border) -> None:
            request = world.engine._live.get(stopped)
            if border.phase is Phase.EMIT and border.side == "before" and request and len(request.output_ids) == 4:
                assert world.abort(stopped)

        world.on_border = strike
        world.drain()
        assert dict(world.engine.counters.finished) == {"stop": 1, "length": 1}

    def test_for_hours_keep_the_number_of_promised_outputs_within_one_a_row(self) -> None:
        """Kind 27: random aborts, mixed lengths, a small pool; every row owes one token, and no other does."""
        world = World(oracle_engine(max_requests=6, num_blocks=30, debug_invariants=False))
        rng = random.Random(27)
        for _ in range(700):
            if len(world.live_ids) < 12:
                world.submit(random_prompt(rng, 20), random_params(rng, max_tokens=20))
            if rng.random() < 0.2:
                world.abort(rng.choice(world.live_ids))
            world.step()
            pending = world.engine.pending
            owed = [] if pending is None else pending.table_rows[pending.table_rows >= 0].tolist()
            assert len(set(owed)) == len(owed) == world.engine.table.num_active
        world.on_border = None
        world.drain()


class TestIds:
    def test_may_be_used_again_as_soon_as_the_end_was_seen(self) -> None:
        """Kind 36: resubmitted from the output's hands, while the forward of the old request still runs."""
        world = World(oracle_engine(device="cpu", op_sleep_s=0.001))
        ids = alone([1, 2], GREEDY)
        world.submit([9], GREEDY.replace(max_tokens=80))
        params = GREEDY.replace(stop_token_ids=[ids[3]])
        world.submit([1, 2], params, request_id="again")
        rounds = 0
        while world.engine.has_unfinished():
            for output in world.step():
                if output.request_id == "again" and output.finished and rounds < 8:
                    rounds += 1
                    world.submit([1, 2] if rounds % 2 else [3], params, request_id="again")
        world.drain()
        world.engine.close()
        assert rounds == 8

    def test_of_an_aborted_request_do_not_carry_the_abort_over(self, mode: str) -> None:
        """Kind 56: abort(X), then add(X) as soon as it is free: the new one lives."""
        world = World(oracle_engine(mode=mode))
        world.submit([8], GREEDY)
        for k in range(5):
            world.submit([k + 1], GREEDY, request_id="X")
            for _ in range(k):
                world.step()
            world.abort("X")
            with pytest.raises(RequestError, match="in use by a live request"):
                world.engine.add_request([1], GREEDY, request_id="X")
            while "X" in world.engine._live:
                world.step()
        world.submit([9], GREEDY, request_id="X")
        world.drain()
        assert world.current["X"].last is not None
        assert world.current["X"].last.finish_reason == "length"

    def test_made_by_the_engine_avoid_those_given_by_the_caller(self) -> None:
        """Found here: a caller's own "request-1" made the next request without a name be refused."""
        engine = oracle_engine()
        names = [engine.add_request([1], GREEDY, request_id="request-1"), *(engine.add_request([1]) for _ in range(3))]
        assert len(set(names)) == 4


class TestAdmission:
    @pytest.mark.parametrize("length", [97, 98, 99, 100, 101, 1000])
    def test_takes_prompts_up_to_the_limit_and_refuses_longer_ones(self, mode: str, length: int) -> None:
        """Kind 46: room for one token at least; what fits runs to its clamped end."""
        world = World(oracle_engine(mode=mode))
        world.submit([1], GREEDY)
        if length >= 100:
            with pytest.raises(RequestError, match="no room for output") as error:
                world.engine.add_request([3] * length, GREEDY)
            assert error.value.field == "prompt"
        else:
            world.submit([3] * length, GREEDY)
        world.drain()
        if length < 100:
            assert world.all[1].last is not None
            assert len(world.all[1].last.token_ids) == 100 - length
            assert world.all[1].last.finish_reason == "length"

    def test_refills_all_rows_when_all_end_in_the_same_step(self, mode: str) -> None:
        """Kind 59: four rows, four end together while four wait, three times over."""
        world = World(oracle_engine(mode=mode, num_blocks=16))
        for k in range(16):
            world.submit([k + 1] * 3, GREEDY.replace(max_tokens=10))
        world.drain()
        launched = [record.launched for record in world.engine.recorder.iterations() if record.launched is not None]
        assert [batch.num_prefill for batch in launched if batch.num_prefill] == [4, 4, 4, 4]

    def test_never_exceeds_the_token_budget(self, mode: str) -> None:
        """Kind 66, first half."""
        world = World(oracle_engine(mode=mode, max_requests=6, max_batch_tokens=100, num_blocks=150))
        rng = random.Random(66)
        for _ in range(25):
            world.submit(random_prompt(rng, 90), GREEDY.replace(max_tokens=rng.randint(1, 9)))
        world.drain()
        launched = [record.launched for record in world.engine.recorder.iterations() if record.launched is not None]
        assert 60 < max(batch.num_tokens for batch in launched) <= 100

    def test_lets_every_caller_know_of_an_internal_error(self, mode: str) -> None:
        """Kind 66, second half: whoever waits in generate or stream gets the exception, and so does the next."""
        world = World(oracle_engine(mode=mode))
        stream = world.engine.stream([1], GREEDY)
        next(stream)
        with world.fault_in(Phase.RESOLVE, after=False):
            with pytest.raises(PlantedError):
                world.engine.generate([[2]], GREEDY, progress=False)
            with pytest.raises(IterationFailedError):
                next(stream)
        world.engine.recover()
        while world.engine.has_unfinished():
            world.engine.step()
        check_idle(world.engine)

    def test_that_may_never_happen_is_refused_at_once(self) -> None:
        """Kind 72, first half: more blocks than the pool has."""
        engine = oracle_engine(num_blocks=5)
        with pytest.raises(RequestError, match=r"needs 6 KV blocks and the whole pool has 5"):
            engine.add_request([1] * 10, GREEDY)
        assert not engine.has_unfinished()
        check_idle(engine)

    def test_with_ending_rows_launched_falls_back_where_the_wasted_row_lacks_a_block(self) -> None:
        """The one way in which blocks can be short today: a row launched past its end may need one more."""
        world = World(oracle_engine(num_blocks=2, launch_ending_rows=True))
        world.submit([1, 2, 3, 4], GREEDY.replace(max_tokens=5))
        world.drain()
        assert world.engine.counters.reasons["not_enough_blocks"] == 1


class TestStreams:
    def test_left_early_abort_their_request(self, mode: str) -> None:
        """Kind 72, second half."""
        engine = oracle_engine(mode=mode)
        for _, _ in zip(range(3), engine.stream([1, 2], GREEDY), strict=False):
            pass
        gc.collect()
        while engine.has_unfinished():
            engine.step()
        assert dict(engine.counters.finished) == {"abort": 1}
        check_idle(engine)

    def test_never_looked_at_abort_their_request(self) -> None:
        engine = oracle_engine()
        engine.stream([1], GREEDY)
        gc.collect()
        while engine.has_unfinished():
            engine.step()
        assert dict(engine.counters.finished) == {"abort": 1}

    def test_served_by_someone_else_still_end(self) -> None:
        """Found here: a stream first read after its request had ended waited for ever."""
        engine = oracle_engine()
        first, second = engine.stream([1], GREEDY), engine.stream([2], GREEDY.replace(max_tokens=2))
        assert len(list(first)) == 12
        assert [output.token_ids for output in second][-1] == alone([2], GREEDY.replace(max_tokens=2))
        assert engine._boxes == {}

    def test_may_run_side_by_side(self) -> None:
        engine = oracle_engine()

        async def read(seed: int) -> tuple[int, ...]:
            found: tuple[int, ...] = ()
            async for output in engine.astream([seed + 1], DRAWN.replace(seed=seed)):
                found += output.new_token_ids
                assert engine.in_hand is None, "others get a turn at iteration borders only (I37)"
            return found

        async def read_all() -> list[tuple[int, ...]]:
            return await asyncio.gather(*(read(seed) for seed in range(6)))

        found = asyncio.run(read_all())
        assert found == [alone([seed + 1], DRAWN.replace(seed=seed)) for seed in range(6)]


class TestGenerate:
    def test_hands_in_nothing_if_one_prompt_cannot_be_served(self, mode: str) -> None:
        engine = oracle_engine(mode=mode)
        with pytest.raises(RequestError, match="prompt 1"):
            engine.generate([[1], [], [2]], GREEDY, progress=False)
        with pytest.raises(RequestError, match="no tokenizer"):
            engine.generate([[1], "text"], GREEDY, progress=False)
        assert not engine.has_unfinished()
        assert engine.counters.submitted == 0
        assert engine.generate([], GREEDY, progress=False) == []

    def test_serves_beside_what_is_live_already(self, mode: str) -> None:
        engine = oracle_engine(mode=mode)
        stream = engine.stream([9], GREEDY)
        next(stream)
        outputs = engine.generate([[1], [2, 3]] * 4, GREEDY, progress=False)
        assert [output.token_ids for output in outputs] == [alone([1], GREEDY), alone([2, 3], GREEDY)] * 4
        assert list(stream)[-1].token_ids == alone([9], GREEDY)
        check_idle(engine)


class TestTextFaults:
    @pytest.mark.parametrize("streams", [False, True])
    def test_of_one_request_fail_it_alone(self, mode: str, streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        decode = PieceTokenizer.decode

        def faulty(self: PieceTokenizer, ids: Sequence[int]) -> str:
            if 40 in ids:
                raise ValueError("planted in the tokenizer")
            return decode(self, ids)

        monkeypatch.setattr(PieceTokenizer, "decode", faulty)
        engine = oracle_engine(mode=mode, has_text=True)
        spoken = GREEDY.replace(detokenize=True, logit_bias={40: -100.0})
        bad = engine.add_request([1], spoken.replace(logit_bias={40: 100.0}), stream=streams)
        good = [engine.add_request([k], spoken, stream=streams) for k in (2, 3)]
        last: dict[str, RequestOutput] = {}
        while engine.has_unfinished():
            last.update((output.request_id, output) for output in engine.step())
        assert last[bad].finish_reason == "error"
        assert "planted in the tokenizer" in str(last[bad].stop_reason)
        assert [last[name].finish_reason for name in good] == ["length", "length"]
        check_idle(engine)


class TestEnginesSideBySide:
    @pytest.mark.parametrize("device", ["inline", "cpu"])
    def test_on_one_model_and_its_buckets_do_not_meet(self, device: str) -> None:
        """Two engines share traced forwards; caches, tables and inputs are their own."""
        options = {"device": device, "graphs": (2, 4), "block_size": 16, "num_blocks": 12}
        worlds = [World(oracle_engine(**options)) for _ in range(2)]
        for k in range(12):
            worlds[k % 2].submit([k + 1] * (k + 1), DRAWN.replace(seed=k))
            for world in worlds:
                world.step()
        for world in worlds:
            world.drain()
            assert world.engine.counters.graph_hits > 5
            world.engine.close()


class TestReset:
    def test_with_a_pending_forward_leaves_nothing_of_it_to_the_next(self, mode: str) -> None:
        """Kind 2: logits of a dropped forward are never sampled."""
        world = World(oracle_engine(mode=mode))
        for k in range(10):
            for row in range(3):
                world.submit([row + k, k], DRAWN.replace(seed=k, max_tokens=20))
            for _ in range(k):
                world.step()
            world.reset()
        world.submit([1], DRAWN)
        world.drain()
        play(World(world.engine), random.Random(3))
