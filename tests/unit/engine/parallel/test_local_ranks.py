"""Ranks that are threads: what they exchange, and that nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from engine.errors import RankError
from engine.parallel.local import LocalRanks

T = TypeVar("T")


def together(ranks: list[LocalRanks], do: Callable[[LocalRanks], T]) -> list[T | Exception]:
    def guarded(one: LocalRanks) -> T | Exception:
        try:
            return do(one)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(guarded, ranks))


class TestAgree:
    def test_gives_everybody_all_numbers_in_order_of_ranks(self) -> None:
        found = together(LocalRanks.make(3), lambda one: one.agree("batch", 4, [one.rank, 7]).tolist())

        assert found == [[[0, 7], [1, 7], [2, 7]]] * 3

    def test_refuses_ranks_that_are_at_different_agreements(self) -> None:
        found = together(LocalRanks.make(2), lambda one: one.agree(("batch", "iteration")[one.rank], 4, []))

        assert all(isinstance(one, RankError) for one in found)
        assert "rank 0 agrees on batch in iteration 4, rank 1 on iteration" in str(found[0])

    def test_refuses_ranks_that_are_at_different_iterations(self) -> None:
        found = together(LocalRanks.make(2), lambda one: one.agree("batch", one.rank, []))

        assert all("must be driven alike" in str(one) for one in found)

    def test_waits_no_longer_than_it_was_told_to(self) -> None:
        first, _ = LocalRanks.make(2, timeout_s=0.05)

        with pytest.raises(RankError, match=r"waited 0\.05 s for the agreement on batch .* rank 1 did not come"):
            first.agree("batch", 0, [])

    def test_hears_at_once_of_a_rank_that_fails_while_it_waits(self) -> None:
        first, second = LocalRanks.make(2, timeout_s=30)
        threading.Timer(0.02, lambda: second.fail(7)).start()

        begin_s = time.monotonic()
        with pytest.raises(RankError, match="rank 1 has failed in iteration 7"):
            first.agree("batch", 7, [])
        assert time.monotonic() - begin_s < 10

    def test_hears_of_a_rank_that_left_before(self) -> None:
        first, second = LocalRanks.make(2, timeout_s=30)
        second.close()

        with pytest.raises(RankError, match="rank 1 has left"):
            first.agree("batch", 0, [])


class TestDeviceCollectives:
    def test_gather_stands_ranks_behind_each_other(self) -> None:
        found = together(LocalRanks.make(2), lambda one: one.gather(torch.full((2, 1), one.rank)))

        assert [one.flatten().tolist() for one in found] == [[0, 0, 1, 1]] * 2  # type: ignore[union-attr]

    def test_sum_gives_each_rank_its_part(self) -> None:
        found = together(LocalRanks.make(2), lambda one: one.sum(torch.arange(4)[:, None] * (10**one.rank)))

        assert [one.flatten().tolist() for one in found] == [[0, 11], [22, 33]]  # type: ignore[union-attr]

    def test_exchange_takes_rows_where_they_are_to_go(self) -> None:
        rows = [torch.tensor([[1], [2], [3]]), torch.tensor([[4]])]
        counts = [[1, 2], [1, 0]]

        found = together(LocalRanks.make(2), lambda one: one.exchange(rows[one.rank], counts[one.rank]))

        assert [(one[0].flatten().tolist(), one[1]) for one in found] == [  # type: ignore[index]
            ([1, 4], [1, 1]),
            ([2, 3], [2, 0]),
        ]

    def test_of_another_kind_or_size_are_refused(self) -> None:
        kinds = together(LocalRanks.make(2), lambda one: (one.gather if one.rank else one.sum)(torch.zeros(2, 1)))
        sizes = together(LocalRanks.make(2), lambda one: one.gather(torch.zeros(1 + one.rank, 1)))

        assert all(isinstance(one, RankError) for one in (*kinds, *sizes))


class TestSleep:
    def test_ends_with_a_call_from_any_rank(self) -> None:
        ranks = LocalRanks.make(3)
        threading.Timer(0.02, lambda: ranks[2].wake(0)).start()

        assert together(ranks[:2], lambda one: one.sleep(0, 30)) == [True, True]

    def test_of_the_next_round_needs_another_call(self) -> None:
        first, second = LocalRanks.make(2)
        second.wake(0)

        assert first.sleep(0, 0.01)
        assert not first.sleep(1, 0.01)
