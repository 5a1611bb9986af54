"""What follows from what ranks say: pure functions."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import BatchDimensions
from engine.graphs import spare_tokens
from engine.parallel.fleet import NO_LOAD, Intent, Load, Outlook, Vote, agreed_batch


def dims(tokens: int, prefill: int, decode: int) -> BatchDimensions:
    return BatchDimensions(num_tokens=tokens, num_prefill=prefill, num_decode=decode)


def load(tokens: int, prefill: int, decode: int, **more: bool | int) -> Load:
    return Load(dims=dims(tokens, prefill, decode), **more)  # type: ignore[arg-type]


GRAPHS = sorted([dims(1, 0, 1), dims(4, 0, 4), dims(8, 0, 8), dims(32, 1, 7), dims(32, 2, 6), dims(64, 2, 6)])


class TestAgreedBatch:
    def test_is_nothing_where_nobody_has_a_forward(self) -> None:
        agreed = agreed_batch([NO_LOAD, NO_LOAD], GRAPHS, strict=False, decode_width=1)

        assert (agreed.num_tokens, agreed.graph) == (0, None)

    def test_is_the_smallest_graph_that_holds_the_most_rows_of_any_rank(self) -> None:
        loads = [load(3, 0, 3), load(6, 0, 6), NO_LOAD]

        agreed = agreed_batch(loads, GRAPHS, strict=False, decode_width=1)

        assert (agreed.graph, agreed.num_tokens) == (dims(8, 0, 8), 8)

    def test_takes_ranks_that_only_decode_into_a_graph_with_prefill_rows(self) -> None:
        """Six rows decode here, one prompt of ten is read there: neither alone says what holds both."""
        agreed = agreed_batch([load(6, 0, 6), load(10, 1, 0)], GRAPHS, strict=True, decode_width=1)

        assert agreed.graph == dims(32, 1, 7)

    def test_is_eager_and_padded_to_the_largest_where_no_graph_holds_all(self) -> None:
        agreed = agreed_batch([load(6, 0, 6), load(100, 1, 0)], GRAPHS, strict=False, decode_width=1)

        assert (agreed.graph, agreed.num_tokens) == (None, 100)
        assert agreed.miss_reason == "no graph holds what all ranks have"

    def test_is_eager_on_all_ranks_where_one_must_be(self) -> None:
        agreed = agreed_batch([load(3, 0, 3), load(3, 1, 0, must_be_eager=True)], GRAPHS, strict=False, decode_width=1)

        assert (agreed.graph, agreed.num_tokens, agreed.miss_reason) == (None, 3, "prompt log probabilities")

    def test_leaves_room_for_a_dummy_row_with_drafts(self) -> None:
        """A prompt of two tokens here, and a dummy row of three there."""
        assert agreed_batch([load(2, 1, 0), NO_LOAD], (), strict=True, decode_width=3).num_tokens == 3

    def test_drafts_for_as_many_rows_as_the_captured_forward_has(self) -> None:
        loads = [load(3, 0, 3, draft_rows=3), load(2, 0, 2, draft_rows=2)]

        assert agreed_batch(loads, GRAPHS, strict=True, decode_width=1).draft_rows == 4
        assert agreed_batch(loads, (), strict=True, decode_width=1).draft_rows == 3

    @settings(max_examples=300, deadline=None)
    @given(
        st.lists(
            st.tuples(st.integers(0, 6), st.integers(0, 2), st.integers(2, 20)).filter(lambda one: any(one[:2])),
            min_size=1,
            max_size=4,
        ),
        st.sampled_from([1, 3]),
        st.booleans(),
    )
    def test_holds_the_forward_of_every_rank(self, rows: list[tuple[int, int, int]], width: int, strict: bool) -> None:
        loads = [load(d * width + p * each, p, d) for d, p, each in rows]
        graphs = sorted({dims(p * 24 + d * width, p, d) for p, d in product((0, 1, 2), (1, 4, 6)) if p or d})

        agreed = agreed_batch(loads, graphs, strict=strict, decode_width=width)

        for one in loads:
            assert one.dims.num_tokens <= agreed.num_tokens
            if agreed.graph is not None:
                assert spare_tokens(agreed.graph, one.dims, width) >= 0
                assert one.dims.num_prefill <= agreed.graph.num_prefill
                assert one.dims.num_rows <= agreed.graph.num_rows
                assert not strict or one.dims.num_decode <= agreed.graph.num_decode


class TestVote:
    def test_goes_through_numbers(self) -> None:
        for intent in Intent:
            vote = Vote(
                intent=intent, has_work=True, has_pending=True, mode="legacy", wanted="async", switches=3, draft_rows=5
            )
            assert Vote.from_values(vote.to_values()) == vote


class TestOutlook:
    @pytest.mark.parametrize("field", ["has_work", "has_pending"])
    def test_holds_what_any_rank_has(self, field: str) -> None:
        assert getattr(Outlook((Vote(), Vote(**{field: True}))), field)  # type: ignore[arg-type]
        assert not getattr(Outlook((Vote(), Vote())), field)

    def test_takes_the_mode_of_who_has_heard_of_most_switches(self) -> None:
        assert Outlook((Vote(wanted="async", switches=1), Vote(wanted="legacy", switches=2))).newest.wanted == "legacy"
