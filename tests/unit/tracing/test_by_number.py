"""Which iteration a span is of, where numbers come more than once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tracing.traces import device, phase, record
from tracing.by_number import IterationsByNumber
from tracing.records import Span

FIRST, OTHER, SECOND = record(4, 0, 20), record(5, 20, 90), record(4, 100, 120)


class TestOf:
    @pytest.mark.parametrize(
        ("span", "expected"),
        [
            (phase("emit", 3, 9, 4), FIRST),
            (phase("emit", 103, 120, 4), SECOND),
            (phase("emit", 50, 60, 4), None),
            (phase("emit", 15, 25, 4), None),
            (device("forward", 40, 130, 4, enqueued=18), FIRST),
            (device("forward", 130, 140, 4, enqueued=118), SECOND),
            (device("forward", 60, 70, 4, enqueued=50), None),
            (device("forward", 130, 140, 6, enqueued=118), None),
            (device("forward", 60, 70, 4), FIRST),
            (device("forward", 130, 140, 4), SECOND),
        ],
        ids=[
            "a phase of the first",
            "a phase of the second",
            "one that was abandoned in between",
            "one that no iteration holds",
            "work that ends long after its iteration",
            "work of the second",
            "work of an abandoned iteration",
            "work whose record is lost",
            "work that does not say, after the first",
            "work that does not say, after the second",
        ],
    )
    def test_is_the_record_of_its_number_in_which_it_lies(self, span: Span, expected: object) -> None:
        assert IterationsByNumber([SECOND, FIRST, OTHER]).of(span) is expected

    def test_work_that_does_not_say_and_lies_before_all_is_of_the_first(self) -> None:
        assert IterationsByNumber([SECOND]).of(device("forward", 95, 99, 4)) is SECOND

    @given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.randoms(use_true_random=False))
    def test_agrees_with_looking_at_each_record(self, numbers: list[int], shuffle: random.Random) -> None:
        records = [record(number, 10 * place, 10 * place + 8) for place, number in enumerate(numbers)]
        shuffled = records.copy()
        shuffle.shuffle(shuffled)
        index = IterationsByNumber(shuffled)
        for number in range(3):
            for at in range(10 * len(numbers)):
                span = device("forward", at + 3, at + 30, number, enqueued=at)
                holding = [one for one in records if one.iteration == number and one.begin_ns <= at <= one.end_ns]
                assert [index.of(span)] == (holding or [None])
