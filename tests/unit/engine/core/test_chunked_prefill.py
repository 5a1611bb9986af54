"""Prompts read in chunks: the same answers as in one go, in exactly the chunks the rules say, beside decode rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chunks import chunk_size
from engine.errors import ConfigError
from engine.phases import Order, Reason
from engine.request import RequestOutput, SamplingParams
from tests.bug_kind_world import GREEDY, MODES
from tests.chunk_watch import ChunkWatch
from tests.oracle_reference import VOCAB
from tests.oracle_world import World, oracle_engine
from tests.same_outputs import check_same_logprobs

BUDGETS = range(3, 34)
"""Tokens of a lone prompt's forward: chunks of 2 to 33, 2 being what the guard leaves of 3."""
LONG = {"max_sequence_length": 120, "num_blocks": 120, "max_batch_tokens": 120}


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * place * place + 3 * length + salt) % VOCAB for place in range(length)]


def params_of(length: int) -> SamplingParams:
    """Greedy or drawn, with penalties, stops, least lengths and log probabilities here and there."""
    return SamplingParams(
        max_tokens=1 + length % 3,
        seed=1000 + length,
        temperature=float(length % 2),
        logprobs=length % 4,
        prompt_logprobs=length % 3 if length % 5 else None,
        presence_penalty=0.5 * (length % 3 == 0),
        repetition_penalty=2.0 if length % 7 == 0 else 1.0,
        min_tokens=length % 3,
        stop_token_ids=[5, 6, 7, 8] if length % 4 == 0 else None,
        stop=["a", "b", "c", "<", "é"] if length % 6 == 1 else None,
        ignore_eos=length % 2 == 1,
    )


def lengths_for(budget: int) -> list[int]:
    """A tenth of all lengths up to 100, another one for each budget, and those at the budget's own seams."""
    seams = {n * budget + rest for n in (1, 2) for rest in (-1, 0, 1, 2)}
    return sorted({*range(1 + budget % 10, 101, 10), *seams})


def answers(lengths: list[int], **options: Any) -> tuple[list[RequestOutput], ChunkWatch, World]:
    world = World(oracle_engine(has_text=True, **{**LONG, **options}))
    watch = ChunkWatch(world)
    for length in lengths:
        world.submit(prompt_of(length), params_of(length))
    world.drain(5000)
    world.engine.close()
    return [one.last for one in world.all if one.last is not None], watch, world


@cache
def whole_answers() -> dict[int, RequestOutput]:
    """Of every length, read in one go."""
    found, _, _ = answers(list(range(1, 101)), mode="legacy", debug_invariants=False)
    return {len(one.prompt_token_ids): one for one in found}


def check_same(found: list[RequestOutput]) -> None:
    """As read in one go: tokens, text, ends and log probabilities."""
    for one in found:
        whole = whole_answers()[len(one.prompt_token_ids)]
        assert told(one) == told(whole)
        check_same_logprobs(one, whole)


def told(output: RequestOutput) -> tuple[Any, ...]:
    return output.token_ids, output.text, output.finish_reason, output.stop_reason


class TestAnswers:
    def test_every_length_up_to_100_is_read_in_chunks_somewhere(self) -> None:
        lengths = {length for budget in BUDGETS for length in lengths_for(budget) if length > budget}
        assert lengths == set(range(4, 101))

    @pytest.mark.parametrize("budget", BUDGETS)
    def test_of_chunked_prompts_are_those_of_whole_ones_at_every_budget(self, budget: int) -> None:
        """Also checked against the reference, by the world, as they come."""
        lengths = lengths_for(budget)
        for mode in MODES if budget % 3 == 0 else ["async"]:
            chunked, watch, world = answers(
                lengths, mode=mode, max_requests=1, max_batch_tokens=budget, chunked_prefill=True
            )

            check_same(chunked)
            assert len(chunked) == len(lengths)
            for submitted in world.all:
                check_chunks(watch.chunks[submitted.request_id], len(submitted.prompt), budget)
            assert max(map(max, watch.chunks.values())) == budget

    @pytest.mark.parametrize("budget", [6, 7, 13, 40])
    def test_are_the_same_beside_rows_that_decode(self, mode: str, budget: int) -> None:
        lengths = [(37 * i) % 97 + 1 for i in range(24)]

        chunked, watch, world = answers(lengths, mode=mode, max_batch_tokens=budget, chunked_prefill=True)

        check_same(chunked)
        assert watch.num_beside_decode > 10
        assert world.engine.counters.prefill_tokens == sum(lengths)

    def test_are_the_same_on_a_device_that_runs_beside_the_host(self, mode: str) -> None:
        lengths = [40, 3, 77, 1, 18, 100, 9, 33]

        chunked, _, _ = answers(
            lengths, mode=mode, device="cpu", op_sleep_s=0.001, max_batch_tokens=9, chunked_prefill=True
        )

        check_same(chunked)

    def test_are_the_same_where_chunks_run_in_captured_sizes(self, mode: str) -> None:
        """Padded forwards with parts of prompts, and decode rows beside them."""
        lengths = [40, 3, 77, 1, 18, 100, 9, 33]
        buckets = {"graphs": (2, 4, 16), "block_size": 16, "num_blocks": 32}

        chunked, _, world = answers(lengths, mode=mode, max_batch_tokens=16, chunked_prefill=True, **buckets)

        check_same(chunked)
        records = world.engine.recorder.iterations()
        mixed = [one.graph for one in records if one.launched is not None and one.launched.num_prefill]
        assert sum(graph is not None and graph.hit for graph in mixed) >= 8


def check_chunks(chunks: list[int], length: int, budget: int) -> None:
    """I48: they sum to the prompt, none is a lone token, and none could have been larger."""
    assert sum(chunks) == length
    assert length == 1 or min(chunks) >= 2
    left = length
    for chunk in chunks:
        assert chunk == (left if left <= budget else budget - (left == budget + 1))
        left -= chunk


class TestChunkSize:
    @pytest.mark.parametrize(
        ("remaining", "budget", "chunk"),
        [
            (513, 256, 256),
            (257, 256, 255),
            (2, 256, 2),
            (256, 256, 256),
            (1, 1, 1),
            (2, 1, 0),  # one token of two: neither a chunk of one nor one left over
            (3, 2, 0),  # two would leave one, one is too few
            (4, 2, 2),
            (4, 3, 2),
            (5, 1, 0),
            (5, 0, 0),
            (1, 0, 0),
        ],
    )
    def test_leaves_no_lone_token(self, remaining: int, budget: int, chunk: int) -> None:
        assert chunk_size(remaining, budget) == chunk

    @pytest.mark.parametrize(("budget", "chunk"), [(10, 10), (9, 0), (0, 0)])
    def test_is_all_or_nothing_without_chunking(self, budget: int, chunk: int) -> None:
        assert chunk_size(10, budget, chunked=False) == chunk

    @given(length=st.integers(1, 3000), budgets=st.lists(st.integers(0, 300), min_size=1, max_size=30))
    def test_sums_to_the_prompt_whatever_each_forward_has_room_for(self, length: int, budgets: list[int]) -> None:
        """The budget differs from forward to forward with the rows that decode; 3 or more always gets on."""
        left = length
        chunks: list[int] = []
        while left:
            budget = budgets[len(chunks) % len(budgets)] if len(chunks) < 100 else 300
            chunk = chunk_size(left, budget)
            assert 0 <= chunk <= min(left, budget)
            assert chunk or budget < 3
            assert left - chunk != 1 or (chunk == 0 and left == 1)
            assert chunk != 1 or left == 1
            left -= chunk
            chunks.append(chunk)
        assert sum(chunks) == length


class TestSchedule:
    def test_of_513_tokens_at_256_is_256_and_255_and_2(self, mode: str) -> None:
        world = World(
            oracle_engine(
                mode=mode, max_sequence_length=600, num_blocks=160, max_batch_tokens=256, chunked_prefill=True
            )
        )
        watch = ChunkWatch(world)
        name = world.submit(prompt_of(513), GREEDY.replace(max_tokens=4))
        world.drain()

        assert watch.chunks[name] == [256, 255, 2]

    def test_gives_chunks_what_decoding_rows_leave(self) -> None:
        world = World(oracle_engine(mode="legacy", max_batch_tokens=10, chunked_prefill=True))
        watch = ChunkWatch(world)
        world.submit([1, 2], GREEDY.replace(max_tokens=3))
        world.submit([3], GREEDY.replace(max_tokens=30))
        world.step()
        name = world.submit(prompt_of(31), GREEDY)
        world.drain()

        # Two decode rows beside the first chunk and the second; then one, the other having ended.
        assert watch.chunks[name] == [8, 8, 9, 6]

    def test_lets_nobody_in_behind_a_partial_chunk(self, mode: str) -> None:
        """First in, first out: a short prompt would fit, and waits for the last chunk of the one before it."""
        world = World(oracle_engine(mode=mode, max_batch_tokens=8, chunked_prefill=True))
        watch = ChunkWatch(world)
        long = world.submit(prompt_of(20), GREEDY)
        short = world.submit([1], GREEDY)
        world.drain()

        assert watch.chunks[long] == [8, 8, 4]
        assert watch.forwards[:3] == [[long], [long], [long, short]]

    def test_reads_one_prompt_in_part_at_a_time(self) -> None:
        world = World(oracle_engine(mode="legacy", max_batch_tokens=8, chunked_prefill=True))
        watch = ChunkWatch(world)
        first, second = (world.submit(prompt_of(13, salt), GREEDY) for salt in (1, 2))
        world.drain()

        assert watch.forwards[:3] == [[first], [first, second], [second]]
        assert (watch.chunks[first], watch.chunks[second]) == ([8, 5], [3, 7, 3])

    @staticmethod
    def _orders_of_a_late_prompt(**options: bool) -> list[tuple[str, str]]:
        """Of the six iterations behind its arrival beside a row that decodes; it takes three chunks."""
        world = World(oracle_engine(max_batch_tokens=8, chunked_prefill=True, **options))
        world.submit([1, 2, 3], GREEDY.replace(max_tokens=40))
        for _ in range(4):
            world.step()
        assert world.engine.recorder.iterations()[-1].order == Order.OVERLAP.label
        world.submit(prompt_of(20), GREEDY.replace(max_tokens=20))
        for _ in range(6):
            world.step()
        found = [(one.order, one.reason) for one in world.engine.recorder.iterations()[4:]]
        world.drain()
        return found

    def test_overlaps_all_the_while(self) -> None:
        assert self._orders_of_a_late_prompt() == [
            *[(Order.OVERLAP_ADMIT.label, Reason.ADMITS_BESIDE.value)] * 3,
            *[(Order.OVERLAP.label, Reason.STEADY_DECODE.value)] * 3,
        ]

    def test_as_upstream_overlaps_again_one_iteration_behind_the_last_chunk(self) -> None:
        no_overlap = Order.NO_OVERLAP.label
        assert self._orders_of_a_late_prompt(overlap_admission=False) == [
            (no_overlap, Reason.HEAD_ADMISSIBLE.value),  # launches the first chunk, 7 of 20
            (no_overlap, Reason.CHUNK_IN_PROGRESS.value),
            (no_overlap, Reason.CHUNK_IN_PROGRESS.value),  # launches the last one
            (no_overlap, Reason.PREFILL_PENDING.value),
            (Order.OVERLAP.label, Reason.STEADY_DECODE.value),
            (Order.OVERLAP.label, Reason.STEADY_DECODE.value),
        ]

    def test_does_not_take_a_partial_row_for_one_that_ends(self) -> None:
        """One token is all it may have, and the pending forward does not give it."""
        world = World(oracle_engine(max_batch_tokens=8, chunked_prefill=True))
        world.submit(prompt_of(20), GREEDY.replace(max_tokens=1))
        world.step()

        state = world.engine.controller.order_state()
        assert (state.chunk_in_progress, state.num_active, state.num_continuing) == (True, 1, 1)
        world.drain()


class TestLimits:
    def test_the_smallest_budget_has_room_for_a_chunk_beside_all_other_rows(self, mode: str) -> None:
        with pytest.raises(ConfigError, match=r"max_batch_tokens \(5\) must be at least max_requests \+ 2 \(6\)"):
            oracle_engine(max_requests=4, max_batch_tokens=5, chunked_prefill=True)

        lengths = [50, 1, 49, 2, 51, 3, 100]
        _, watch, world = answers(lengths, mode=mode, max_batch_tokens=6, chunked_prefill=True)

        assert [sum(watch.chunks[one.request_id]) for one in world.all] == lengths

    def test_a_sequence_may_be_longer_than_a_forward(self) -> None:
        with pytest.raises(ConfigError, match="set chunked_prefill, raise max_batch_tokens or lower"):
            oracle_engine(max_batch_tokens=16, max_sequence_length=100)

        engine = oracle_engine(max_batch_tokens=16, max_sequence_length=100, chunked_prefill=True)
        assert engine.resolved.max_sequence_length == 100

    @pytest.mark.parametrize("value", ["yes", 1, None])
    def test_the_option_is_true_or_false(self, value: object) -> None:
        with pytest.raises(ConfigError, match="chunked_prefill must be true or false"):
            oracle_engine(chunked_prefill=value)
