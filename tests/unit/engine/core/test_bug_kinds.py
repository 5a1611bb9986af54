"""Kinds of fault that other engines had, provoked here: numbers are those of the reference's bug-kinds list.

``World`` compares every answer with the request alone; so a test only has to bring about the situation.
"""

from __future__ import annotations

import asyncio
import random
from itertools import permutations
from typing import Any

import numpy as np
import pytest

from engine.engine import Engine
from engine.invariants import check_idle
from engine.request import RequestOutput
from tests.bug_kind_world import DRAWN, GREEDY, alone
from tests.oracle_world import (
    EOS,
    PIECES,
    VOCAB,
    World,
    expected_prompt_logprobs,
    oracle_engine,
    random_params,
    random_prompt,
)


class TestBuffersAndBlocks:
    @pytest.mark.parametrize("device", ["inline", "cpu"])
    @pytest.mark.parametrize("ends_by", ["stop id", "stop string", "length", "abort"])
    def test_freed_while_a_forward_runs_may_be_taken_at_once(self, device: str, ends_by: str) -> None:
        """Kinds 3 and 30: the pool has room for one; B takes A's blocks while A's last forward is still at work."""
        engine = oracle_engine(
            device=device, num_blocks=5, max_requests=2, has_text=True, op_sleep_s=0.001 if device == "cpu" else 0.0
        )
        world = World(engine)
        ids = alone([1, 2, 3], GREEDY)
        params = GREEDY.replace(detokenize=True, max_tokens=16)
        end = {
            "stop id": params.replace(stop_token_ids=[ids[5]]),
            "stop string": params.replace(stop=[PIECES[ids[5]]]),
            "length": params.replace(max_tokens=6),
            "abort": params,
        }[ends_by]
        for k in range(12):
            a = world.submit([1, 2, 3], end)
            world.submit([4 + k] * 3, params.replace(seed=k, temperature=1.0))
            for _ in range(7):
                world.step()
            if ends_by == "abort":
                world.abort(a)
            world.step()
        world.drain()
        engine.close()

    def test_feeding_a_slow_device_are_not_rewritten_by_a_host_that_runs_ahead(self) -> None:
        """Kind 5: many small steps of changing batches on a device slower than the host."""
        engine = oracle_engine(device="cpu", op_sleep_s=0.0015, max_requests=6)
        world, rng = World(engine), random.Random(2)
        for k in range(30):
            world.submit(
                random_prompt(rng), random_params(rng).replace(min_tokens=0, max_tokens=3 + k % 9, ignore_eos=True)
            )
            world.step()
        world.drain()
        engine.close()

    def test_of_a_row_that_changed_hands_carry_no_token_over(self) -> None:
        """Kind 9: freed rows hold a canary in debug mode; B, in A's row from the same step on, never reads it."""
        world = World(oracle_engine(max_requests=1))
        for k in range(8):
            world.submit([k + 1], DRAWN.replace(seed=k, max_tokens=1 + k % 3))
        world.drain()
        assert world.engine.counters.finished["length"] == 8

    def test_of_a_padded_batch_write_to_the_dummy_block_only(self) -> None:
        """Kinds 35 and 43: a batch of 8 shrinks to 5 in a bucket of 8 while the blocks of the gone have new owners."""
        engine = oracle_engine(graphs=(8,), graph_non_decode=False, max_requests=8, block_size=16, num_blocks=20)
        world = World(engine)
        for tensors in engine.runner.caches:
            for tensor in tensors:
                tensor[engine.runner.columns.dummy_block] = 1 << 40
        for k in range(8):
            world.submit([k + 1] * (k + 1), DRAWN.replace(seed=k, max_tokens=4 if k < 3 else 20))
        for k in range(8, 16):
            world.submit([k] * 3, DRAWN.replace(seed=k, max_tokens=9))
        world.drain()
        assert engine.counters.graph_hits > 20
        uses = [record.graph for record in engine.recorder.iterations() if record.graph is not None]
        assert any(use.padding_tokens == 3 for use in uses)


class TestStateOfARequest:
    def test_follows_it_when_rows_shift(self, mode: str) -> None:
        """Kinds 33 and 39: greedy, hot, top-k, biased, banned and penalised rows, in forty orders; the first ends."""
        params = [
            GREEDY.replace(max_tokens=2),
            DRAWN.replace(temperature=2.0, max_tokens=9),
            DRAWN.replace(top_k=5, max_tokens=9),
            DRAWN.replace(logit_bias={7: 8.0, 8: 8.0}, max_tokens=9),
            DRAWN.replace(stop_token_ids=list(range(40)), min_tokens=5, max_tokens=9, frequency_penalty=2.0),
        ]
        engine = oracle_engine(mode=mode, max_requests=5, debug_invariants=False)
        for order in random.Random(33).sample(list(permutations(range(5))), 40):
            world = World(engine)
            for row in order:
                world.submit([row + 1, 50], params[row])
            world.drain()

    def test_of_penalties_holds_the_token_of_the_pending_step(self, mode: str) -> None:
        """Kind 34: what reads the output's history sees every token, the newest too, and nothing else."""
        world = World(oracle_engine(mode=mode))
        strong = GREEDY.replace(presence_penalty=2.0, frequency_penalty=2.0, logit_bias={5: 6.0, 6: 6.0}, max_tokens=20)
        world.submit([1, 2], strong)
        world.submit([3], strong.replace(repetition_penalty=2.0, temperature=1.0))
        world.submit([4], GREEDY)
        world.drain()
        assert mode == "legacy" or world.engine.counters.overlap_steps > 10

    def test_is_read_by_rows_of_its_own_step(self) -> None:
        """Kind 40: the batch is another one at every step, and log probabilities still belong to their tokens."""
        world = World(oracle_engine(max_requests=6, max_batch_tokens=200))
        for k in range(40):
            world.submit([k % VOCAB, 1], DRAWN.replace(seed=k, max_tokens=1 + k * 7 % 5, logprobs=k % 4))
            world.step()
        world.drain()

    def test_is_the_same_however_the_engine_is_driven(self) -> None:
        """Kind 75: one loop stands behind step, step_phase, generate, stream and astream."""
        params = DRAWN.replace(frequency_penalty=1.5, logprobs=2, min_tokens=3, stop_token_ids=[1, 2, 3])
        prompt = [5, 6, 7]
        wanted = alone(prompt, params)

        def by_step(engine: Engine, advance: Any) -> tuple[int, ...]:
            world = World(engine)
            world.submit(prompt, params)
            while engine.has_unfinished():
                advance(world)
            assert world.all[0].last is not None
            return world.all[0].last.token_ids

        async def by_astream(engine: Engine) -> tuple[int, ...]:
            return [output async for output in engine.astream(prompt, params)][-1].token_ids

        found = [
            by_step(oracle_engine(), World.step),
            by_step(oracle_engine(), World.step_phase),
            oracle_engine().generate([prompt], params, progress=False)[0].token_ids,
            list(oracle_engine().stream(prompt, params))[-1].token_ids,
            asyncio.run(by_astream(oracle_engine())),
        ]
        assert found == [wanted] * 5


class TestEnds:
    @pytest.mark.parametrize("min_tokens", [0, 1, 2, 4])
    def test_eos_is_allowed_at_output_index_min_tokens(self, mode: str, min_tokens: int) -> None:
        """Kind 26."""
        world = World(oracle_engine(mode=mode))
        params = GREEDY.replace(ignore_eos=False, logit_bias={EOS: 100.0}, min_tokens=min_tokens, max_tokens=32)
        for seed in range(5):
            world.submit([seed + 1] * (seed + 1), params.replace(temperature=float(seed % 2), seed=seed))
        world.drain()
        assert {len(one.last.token_ids) for one in world.all if one.last is not None} == {min_tokens + 1}
        assert world.engine.counters.finished["stop"] == 5

    def test_min_tokens_bans_every_id_that_would_end_the_request(self, mode: str) -> None:
        """Kind 47: the set that is banned is the set that ends: EOS and the request's own ids."""
        world = World(oracle_engine(mode=mode))
        bias = {EOS: 100.0, 3: 100.0, 4: 100.0}
        params = GREEDY.replace(logit_bias=bias, stop_token_ids=[3, 4], min_tokens=8, max_tokens=20)
        world.submit([1], params.replace(ignore_eos=False))
        world.submit([2], params)
        world.drain()
        eos_kept, eos_ignored = (one.last.token_ids for one in world.all if one.last is not None)
        assert len(eos_kept) == 9
        assert not {EOS, 3, 4} & set(eos_kept[:8])
        assert EOS in eos_ignored[:8]

    def test_a_stop_at_the_last_token_allowed_is_a_stop(self, mode: str) -> None:
        """Kind 16."""
        world = World(oracle_engine(mode=mode))
        ids = alone([1, 2], GREEDY)
        assert ids[4] not in ids[:4]
        world.submit([1, 2], GREEDY.replace(max_tokens=5, stop_token_ids=[ids[4]]))
        world.submit([1, 2], GREEDY.replace(max_tokens=4, stop_token_ids=[ids[4]]))
        world.drain()
        assert [one.last.finish_reason for one in world.all if one.last is not None] == ["stop", "length"]

    @pytest.mark.parametrize("stop_ids", [None, [], [9], [9, 10]])
    def test_stop_ids_of_any_number_are_taken(self, mode: str, stop_ids: list[int] | None) -> None:
        """Kind 73."""
        world = World(oracle_engine(mode=mode))
        world.submit([1], GREEDY.replace(logit_bias={9: 100.0}, stop_token_ids=stop_ids))
        world.drain()
        assert world.engine.counters.finished["stop"] == bool(stop_ids)

    def test_text_ids_logprobs_and_reason_end_together_at_a_stop_string(self, mode: str) -> None:
        """Kinds 12, 18, 46: streamed chunks add up to the final answer, whatever is held back."""
        for seed in range(16):
            world = World(oracle_engine(mode=mode, has_text=True, debug_invariants=False))
            rng = random.Random(seed)
            for _ in range(4):
                params = random_params(rng, text=True).replace(logprobs=1, ignore_eos=True, max_tokens=40)
                world.submit(random_prompt(rng, 8), params, stream=True)
            world.drain()

    def test_a_stop_string_that_waits_for_a_longer_one_ends_where_it_was_complete(self, mode: str) -> None:
        """Kinds 21 and 74: the longer of two that begin alike may yet come; tokens behind the shorter are not shown."""
        ids = alone([1, 2, 3], GREEDY)
        a, b, c = (PIECES[i] for i in ids[2:5])
        params = GREEDY.replace(detokenize=True, logprobs=0)
        for stop, kept, max_tokens in (
            ([a, a + b + "?"], 3, 12),  # settled by the token after the next
            ([a, a + b + c + "?"], 3, 4),  # settled by the end, with the longer one still open
            ([a, a + b], 4, 12),  # the longer one came
        ):
            world = World(oracle_engine(mode=mode, has_text=True))
            chunks: list[RequestOutput] = []
            world.engine.add_request([1, 2, 3], params.replace(stop=stop, max_tokens=max_tokens), stream=True)
            while world.engine.has_unfinished():
                chunks += world.engine.step()
            last = chunks[-1]
            assert last.token_ids == ids[:kept]
            assert last.text == PIECES[ids[0]] + PIECES[ids[1]]
            assert (last.finish_reason, len(last.logprobs or ())) == ("stop", kept)
            assert sum((chunk.new_token_ids for chunk in chunks), ()) == last.token_ids
            assert "".join(chunk.new_text for chunk in chunks) == last.text
            check_idle(world.engine)


class TestSeeds:
    def test_give_the_same_tokens_whatever_the_neighbours_and_the_order(self, mode: str) -> None:
        """Kinds 14, 23 and 70."""
        prompts = [[k + 1] * (k + 1) for k in range(8)]
        params = [DRAWN.replace(seed=None if k % 3 == 2 else k % 2) for k in range(8)]
        found = []
        for order in (range(8), range(7, -1, -1), [3, 1, 4, 0, 5, 2, 6, 7]):
            engine = oracle_engine(mode=mode)
            outputs = engine.generate([prompts[k] for k in order], [params[k] for k in order], progress=False)
            by_prompt = {k: output.token_ids for k, output in zip(order, outputs, strict=True)}
            found.append([by_prompt[k] for k in range(8) if params[k].seed is not None])
        assert found[0] == found[1] == found[2]
        assert found[0] == [alone(prompts[k], params[k]) for k in range(8) if params[k].seed is not None]
        assert alone([1], DRAWN.replace(seed=1)) != alone([1], DRAWN.replace(seed=2))


class TestLogprobs:
    def test_rows_are_sorted_and_hold_the_chosen_id_wherever_it_ranks(self, mode: str) -> None:
        """Kind 62: the world compares ids and values; here, that ids outside the top came up at all."""
        world = World(oracle_engine(mode=mode))
        for seed in range(8):
            world.submit([seed], DRAWN.replace(seed=seed, logprobs=5, temperature=2.0))
        world.drain()
        lengths = {len(row) for one in world.all if one.last is not None for row in one.last.logprobs or ()}
        assert lengths == {5, 6}

    def test_mean_the_models_own_distribution_whatever_the_filters(self, mode: str) -> None:
        """Kind 67: raw log probabilities do not move with temperature or top_p."""
        world = World(oracle_engine(mode=mode))
        forced = GREEDY.replace(logprobs=3, logit_bias={17: 100.0}, max_tokens=6)
        for temperature, top_p in ((0.0, 1.0), (0.5, 0.1), (1.0, 1.0), (2.0, 0.1)):
            world.submit([1, 2, 3], forced.replace(temperature=temperature, top_p=top_p))
        world.drain()
        rows = [one.last.logprobs for one in world.all if one.last is not None]
        assert all(row == rows[0] for row in rows)

    def test_of_prompts_do_not_depend_on_who_came_before(self, mode: str) -> None:
        """Kinds 52 and 65: exactly one leading None, and the same numbers in any order."""
        prompts = [[5, 6, 7, 8], [5, 6], [5, 6, 7, 9, 10], [5]]
        for order in permutations(range(4)):
            engine = oracle_engine(mode=mode, debug_invariants=False)
            params = GREEDY.replace(prompt_logprobs=2, max_tokens=2)
            outputs = engine.generate([prompts[k] for k in order], params, progress=False)
            for k, output in zip(order, outputs, strict=True):
                wanted = expected_prompt_logprobs(prompts[k], 2)
                assert output.prompt_logprobs is not None
                assert [row is None for row in output.prompt_logprobs] == [row is None for row in wanted]
                for row, right in zip(output.prompt_logprobs[1:], wanted[1:], strict=True):
                    assert list(row or {}) == list(right or {})
                    assert np.allclose(list((row or {}).values()), list((right or {}).values()), atol=1e-5)
