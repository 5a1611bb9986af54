"""Prefixes are found again, held ones stay, and what nobody holds is forgotten leaf by leaf."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cache.prefix import EvictionPolicy, block_digests
from engine.cache.prefix_pool import PrefixPool

B = 4


def digests(*tokens: int, salt: str = "") -> list[bytes]:
    return block_digests(tokens, B, salt=salt)


def filled(pool: PrefixPool, names: list[bytes]) -> np.ndarray:
    """Blocks that a row took and filled with a sequence of these digests."""
    blocks = pool.allocate(len(names))
    assert blocks is not None
    pool.name(names, blocks)
    return blocks


class TestDigests:
    def test_one_for_each_full_block(self) -> None:
        assert [len(digests(*range(n))) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]

    def test_equal_prefixes_and_nothing_else_are_equal(self) -> None:
        a, b = digests(*range(12)), digests(*range(8), 9, 9, 9, 9)
        assert a[:2] == b[:2]
        assert a[2] != b[2]

    def test_a_block_is_another_one_elsewhere(self) -> None:
        """The same four tokens at another place, or behind other tokens, are no hit."""
        assert digests(1, 2, 3, 4, 1, 2, 3, 4)[1] != digests(1, 2, 3, 4)[0]

    def test_a_salt_keeps_tenants_apart(self) -> None:
        assert not set(digests(*range(8), salt="a")) & set(digests(*range(8), salt="b"))
        assert digests(*range(8), salt="a") == digests(*range(8), salt="a")

    def test_known_ones_are_gone_on_from(self) -> None:
        whole = digests(*range(20))
        assert block_digests(range(20), B, known=whole[:3]) == whole
        assert block_digests(range(9), B, known=whole) == whole[:2]

    def test_large_ids_do_not_run_together(self) -> None:
        assert digests(1, 0, 0, 0) != digests(256, 0, 0, 0)
        assert digests(2**40, 0, 0, 0) != digests(0, 0, 0, 0)


class TestPool:
    def test_a_sequence_is_found_again_when_nobody_holds_it(self) -> None:
        pool, names = PrefixPool(8), digests(*range(12))
        blocks = filled(pool, names)
        pool.release(blocks)
        assert (pool.num_free, pool.num_cached) == (8, 3)
        assert pool.match(names).tolist() == blocks.tolist()
        assert pool.match(digests(*range(8), 0, 0, 0, 0)).tolist() == blocks[:2].tolist()

    def test_a_pinned_prefix_is_not_evicted(self) -> None:
        pool, names = PrefixPool(4), digests(*range(8))
        pool.release(filled(pool, names))
        hit = pool.match(names)
        pool.pin(hit)
        assert pool.allocate(3) is None
        assert pool.num_free == 2
        taken = pool.allocate(2)
        assert taken is not None
        assert not set(taken.tolist()) & set(hit.tolist())
        assert pool.match(names).tolist() == hit.tolist()

    def test_the_least_recently_used_leaf_goes_first_and_never_a_parent_before_its_child(self) -> None:
        pool = PrefixPool(6)
        old, new = digests(*range(8)), digests(*range(50, 62))
        pool.release(filled(pool, old))
        pool.release(filled(pool, new))
        pool.allocate(2)  # one is free; one has to give way: the last block of the older sequence
        assert [pool.match(old).size, pool.match(new).size] == [1, 3]
        pool.allocate(1)
        assert [pool.match(old).size, pool.match(new).size] == [0, 3]
        pool.allocate(1)
        assert pool.match(new).size == 2
        assert pool.num_evicted == 3

    def test_use_makes_a_sequence_young_again(self) -> None:
        pool = PrefixPool(4)
        first, second = digests(*range(8)), digests(*range(50, 58))
        pool.release(filled(pool, first))
        pool.release(filled(pool, second))
        hit = pool.match(first)
        pool.pin(hit)
        pool.release(hit)
        pool.allocate(2)
        assert [pool.match(first).size, pool.match(second).size] == [2, 0]

    def test_one_block_too_many_changes_nothing(self) -> None:
        pool, names = PrefixPool(4), digests(*range(8))
        pool.release(filled(pool, names))
        held = pool.allocate(1)
        assert held is not None
        assert pool.allocate(4) is None
        assert pool.match(names).size == 2
        assert pool.num_evicted == 0

    def test_ref_zero_forgets_at_once(self) -> None:
        pool, names = PrefixPool(8, EvictionPolicy.REF_ZERO), digests(*range(8))
        blocks = filled(pool, names)
        pool.pin(blocks[:1])
        pool.release(blocks)
        assert pool.match(names).tolist() == blocks[:1].tolist()
        assert (pool.num_free, pool.num_cached, len(pool.free_ids)) == (7, 0, 7)
        pool.release(blocks[:1])
        assert pool.match(names).size == 0

    def test_forgetting_everything_frees_cached_blocks_and_leaves_held_ones_to_their_holders(self) -> None:
        pool = PrefixPool(8)
        kept, gone = digests(*range(8)), digests(*range(50, 58))
        filled(pool, kept)
        pool.release(filled(pool, gone))
        assert pool.forget_all() == 2
        assert [pool.match(kept).size, pool.match(gone).size] == [0, 0]
        assert len(pool.free_ids) == 6
        pool.index.check()

    def test_a_prefix_that_is_used_again_and_again_takes_no_more_memory(self) -> None:
        pool, names = PrefixPool(1000), digests(*range(16))
        pool.release(filled(pool, names))
        for _ in range(1000):
            hit = pool.match(names)
            pool.pin(hit)
            pool.release(hit)
        assert len(pool.index._leaves) < 100
        pool.index.check()
        assert pool.forget_all() == len(names)

    def test_a_second_copy_gets_no_name_and_goes_back_to_the_stack(self) -> None:
        pool, names = PrefixPool(8), digests(*range(8))
        first, second = filled(pool, names), filled(pool, names)
        assert pool.match(names).tolist() == first.tolist()
        pool.release(second)
        assert len(pool.free_ids) == 6
        pool.index.check()

    def test_behind_another_copys_block_nothing_is_named(self) -> None:
        """A longer second copy once hung its last block under a block that nobody held, which then could not go."""
        pool = PrefixPool(5)
        pool.release(filled(pool, digests(*range(4))))
        filled(pool, digests(*range(8)))
        pool.index.check()
        assert pool.allocate(3) is not None

    def test_a_block_cannot_hold_two_prefixes(self) -> None:
        pool = PrefixPool(4)
        blocks = filled(pool, digests(*range(4)))
        with pytest.raises(ValueError, match="holds another prefix"):
            pool.name(digests(9, 9, 9, 9), blocks)

    def test_reset_forgets_all(self) -> None:
        pool = PrefixPool(4)
        filled(pool, digests(*range(8)))
        pool.reset()
        assert (len(pool.index), pool.num_free, len(pool.free_ids)) == (0, 4, 4)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**9), policy=st.sampled_from(EvictionPolicy), num_blocks=st.integers(5, 24))
def test_random_lives_keep_the_books(seed: int, policy: EvictionPolicy, num_blocks: int) -> None:
    """Rows come with prompts of a small alphabet, hit, take, fill, name and go; contents are kept beside the pool."""
    draws, pool = random.Random(seed), PrefixPool(num_blocks, policy)
    content: dict[int, bytes] = {}
    rows: list[np.ndarray] = []
    for _ in range(120):
        if rows and draws.random() < 0.45:
            pool.release(rows.pop(draws.randrange(len(rows))))
        else:
            names = digests(*(draws.randrange(2) for _ in range(B * draws.randrange(1, 6))))
            hit = pool.match(names)
            assert [content[block] for block in hit.tolist()] == names[: hit.size], "a hit holds something else"
            before = (pool.ref_counts.copy(), pool.num_free, pool.free_ids.tolist())
            pool.pin(hit)
            fresh = pool.allocate(len(names) - hit.size)
            if fresh is None:
                pool.release(hit)
                assert pool.num_free == before[1]
                assert (pool.ref_counts == before[0]).all()
            else:
                content |= dict(zip(fresh.tolist(), names[hit.size :], strict=True))
                row = np.concatenate([hit, fresh])
                pool.name(names, row)
                rows.append(row)
        held = {block for row in rows for block in row.tolist()}
        free, cached = set(pool.free_ids.tolist()), set(pool.index.idle)
        assert not held & (free | cached)
        assert not (free & cached)
        assert len(held) + len(free) + len(cached) == num_blocks
        assert pool.num_free == len(free) + len(cached)
        assert not cached or policy is EvictionPolicy.LRU
        pool.index.check()
    for row in rows:
        pool.release(row)
    assert pool.allocate(num_blocks) is not None
