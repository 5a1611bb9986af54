"""Made prompts: the same from the same seed, alike where their blocks are, and light until asked."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import SamplingParams
from workbench.workloads import RequestSpec, SyntheticPrompt, Workload, WorkloadError, parse_workload
from workbench.workloads.prompts import FIRST_ORDINARY_ID


def prompt(length: int, own: int = 0, *, blocks: tuple[int | str, ...] = (), **changes: int) -> SyntheticPrompt:
    fields = {"vocab_size": 64, "block_tokens": 8, **changes}
    return SyntheticPrompt(length=length, own=own, blocks=blocks, **fields)


def of_prompts(*prompts: str | tuple[int, ...] | SyntheticPrompt) -> Workload:
    specs = tuple(RequestSpec(prompt=one, params=SamplingParams(max_tokens=1)) for one in prompts)
    return Workload(name="some", requests=specs)


class TestIds:
    def test_are_these_on_every_machine_and_with_every_numpy(self) -> None:
        assert tuple(prompt(6, 3, seed=5)) == PINNED_OWN
        assert tuple(prompt(6, 3, seed=5, blocks=("a",))) == PINNED_BLOCK

    def test_differ_by_request_by_seed_and_from_those_of_a_block_of_the_same_name(self) -> None:
        kinds = [prompt(16), prompt(16, 1), prompt(16, seed=1), prompt(16, blocks=(0,)), prompt(16, blocks=(1,))]

        assert len({tuple(one) for one in kinds}) == len(kinds)

    def test_agree_over_equal_blocks_and_part_where_blocks_differ(self) -> None:
        left, right = prompt(20, 1, blocks=(7, 8)), prompt(30, 2, blocks=(7, 8, 9))

        assert tuple(left)[:16] == tuple(right)[:16]
        assert tuple(left)[16:] != tuple(right)[16:20]

    def test_end_inside_a_block_as_the_whole_block_begins(self) -> None:
        assert tuple(prompt(5, blocks=(7,))) == tuple(prompt(8, blocks=(7,)))[:5]

    @given(
        length=st.integers(1, 60),
        cut=st.integers(1, 70),
        blocks=st.lists(st.integers(0, 3), max_size=6),
        vocab_size=st.integers(1, 300),
        seed=st.integers(0, 3),
    )
    def test_are_a_sequence_within_the_vocabulary_and_a_cut_is_a_prefix(
        self, length: int, cut: int, blocks: list[int], vocab_size: int, seed: int
    ) -> None:
        one = prompt(length, blocks=tuple(blocks), vocab_size=vocab_size, seed=seed)
        ids = tuple(one)

        assert len(one) == len(ids) == length
        assert ids == tuple(one[place] for place in range(length)) == one[:]
        assert tuple(one.cut(cut)) == ids[:cut]
        assert all(type(token) is int and 0 <= token < vocab_size for token in ids)
        assert vocab_size <= FIRST_ORDINARY_ID or min(ids) >= FIRST_ORDINARY_ID

    @given(
        left=st.lists(st.integers(0, 2), max_size=5),
        right=st.lists(st.integers(0, 2), max_size=5),
    )
    def test_share_exactly_the_leading_blocks_that_are_equal(self, left: list[int], right: list[int]) -> None:
        first, second = (prompt(8 * 5 + 9, own, blocks=tuple(ids)) for own, ids in enumerate((left, right)))
        equal = 0
        while equal < min(len(left), len(right)) and left[equal] == right[equal]:
            equal += 1

        assert first[: 8 * equal] == second[: 8 * equal]
        assert first[8 * equal : 8 * equal + 8] != second[8 * equal : 8 * equal + 8]


PINNED_OWN = (4, 17, 63, 34, 27, 58)
PINNED_BLOCK = (34, 57, 49, 30, 29, 14)


class TestMemory:
    def test_twenty_thousand_long_prompts_are_megabytes_before_they_are_asked_for(self) -> None:
        tracemalloc.start()
        try:
            workload = parse_workload("poisson:rate=5,requests=20000,input=4000,output=10", vocab_size=50_000)
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

        assert workload.num_prompt_tokens == 80_000_000
        assert held < 30e6  # as ids: 640 MB of references alone

    def test_ids_of_all_prompts_are_the_same_objects(self) -> None:
        """An int of its own for each token made a long prompt five times as heavy."""
        ids = tuple(prompt(4000, vocab_size=2000)) + tuple(prompt(4000, 1, vocab_size=2000))

        assert len({id(token) for token in ids}) == len(set(ids))


class TestPrefixShare:
    def test_counts_full_leading_blocks_that_came_before(self) -> None:
        work = of_prompts(prompt(20, 1, blocks=(1, 2)), prompt(24, 2, blocks=(1, 3)), prompt(20, 3, blocks=(1, 2)))

        # The second shares a block of 8, the third two.
        assert work.prefix_share(8) == (0 + 8 + 16) / 64
        assert work.prefix_share(16) == (0 + 0 + 16) / 64

    def test_leaves_the_last_token_to_be_computed(self) -> None:
        assert of_prompts((1, 2, 3, 4), (1, 2, 3, 4)).prefix_share(2) == 2 / 8

    def test_a_block_that_is_known_behind_others_is_no_hit(self) -> None:
        assert of_prompts((1, 1, 2, 2, 0), (3, 3, 2, 2, 0)).prefix_share(2) == 0

    def test_goes_by_arrival_and_not_by_the_order_of_the_list(self) -> None:
        params = SamplingParams(max_tokens=1)
        long, short = tuple(range(9)), tuple(range(5))
        late = RequestSpec(prompt=long, params=params, arrival=9)
        early = RequestSpec(prompt=short, params=params, arrival=1)

        assert Workload(name="two", requests=(late, early)).prefix_share(4) == 4 / 14

    def test_a_made_shared_prefix_is_all_that_is_shared(self) -> None:
        work = parse_workload("fixed:requests=10,input=40,output=1,prefix=32", vocab_size=64)

        assert work.prefix_share(16) == 9 * 32 / 400

    def test_refuses_text_and_blocks_of_nothing(self) -> None:
        with pytest.raises(WorkloadError, match="needs prompts of token ids"):
            of_prompts("hello").prefix_share(16)
        with pytest.raises(WorkloadError, match="block_size must be at least 1, got 0"):
            of_prompts((1, 2)).prefix_share(0)
