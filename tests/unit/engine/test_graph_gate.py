"""What graph-aware admission lets into the next forward, against a search that tries every chunk."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import BatchDimensions
from engine.config import EngineConfig, GraphDistribution
from engine.graph_gate import (
    CONTINUING_CHUNK,
    NO_ROWS,
    Chunk,
    Deferral,
    GraphGate,
    graph_gate,
    is_gated,
    joined,
)
from engine.graphs import fits, graph_list, match_graph


def dims(num_tokens: int, num_prefill: int, num_decode: int) -> BatchDimensions:
    return BatchDimensions(num_tokens=num_tokens, num_prefill=num_prefill, num_decode=num_decode)


def gate(*graphs: BatchDimensions, strict: bool = False, chunked: bool = True) -> GraphGate:
    return GraphGate(graphs=tuple(sorted(graphs)), strict=strict, chunked=chunked)


def decoding(num_rows: int) -> BatchDimensions:
    return dims(num_rows, 0, num_rows)


def config_with(*, all_prefills: bool, non_decode: bool) -> EngineConfig:
    return EngineConfig(graphs=4, graph_non_decode=non_decode, graph_all_prefills=all_prefills)


@st.composite
def forwards(draw: st.DrawFn, *, max_prefill: int, max_decode: int, is_graph: bool) -> BatchDimensions:
    num_prefill = draw(st.integers(0, max_prefill))
    num_decode = draw(st.integers(1 if is_graph and not num_prefill else 0, max_decode))
    num_tokens = num_prefill + num_decode
    if num_prefill:
        num_tokens += draw(st.integers(0, 14))
    return dims(num_tokens, num_prefill, num_decode)


GRAPHS = st.lists(forwards(max_prefill=3, max_decode=5, is_graph=True), min_size=1, max_size=8, unique=True)
GATES = st.builds(
    lambda graphs, strict, chunked: gate(*graphs, strict=strict, chunked=chunked), GRAPHS, st.booleans(), st.booleans()
)
HELD = forwards(max_prefill=2, max_decode=6, is_graph=False)
REMAINING = st.integers(1, 24)
BUDGETS = st.integers(-2, 26)
DISTRIBUTIONS: st.SearchStrategy[GraphDistribution] = st.sampled_from(get_args(GraphDistribution))


def runs(one: GraphGate, held: BatchDimensions, tokens: int) -> bool:
    return match_graph(joined(held, tokens), one.graphs, strict=one.strict) is not None


def is_legal(tokens: int, remaining: int, *, chunked: bool) -> bool:
    if tokens == remaining:
        return True
    return chunked and tokens >= 2 and remaining - tokens >= 2


def largest(sizes: Sequence[int]) -> int:
    return max(sizes, default=0)


def search(one: GraphGate, held: BatchDimensions, remaining: int, budget: int, *, chunked: bool) -> int:
    """Every chunk from large to small; the first that is legal and captured."""
    for tokens in range(min(remaining, budget), 0, -1):
        if is_legal(tokens, remaining, chunked=chunked) and runs(one, held, tokens):
            return tokens
    return 0


def reason(one: GraphGate, held: BatchDimensions, remaining: int, budget: int) -> Deferral:
    """Why :func:`search` found nothing."""
    if not search(one, NO_ROWS, remaining, remaining, chunked=one.chunked):
        return Deferral.NO_GRAPH
    affordable = range(1, min(remaining, budget) + 1)
    if not any(is_legal(tokens, remaining, chunked=one.chunked) for tokens in affordable):
        return Deferral.ONE_TOKEN if one.chunked and budget > 0 else Deferral.BATCH_FULL
    if one.chunked and any(runs(one, held, tokens) for tokens in affordable):
        return Deferral.ONE_TOKEN
    return Deferral.GRAPH_WAIT


class TestIsGated:
    @pytest.mark.parametrize(
        ("all_prefills", "non_decode", "captured"), list(itertools.product([False, True], repeat=3))
    )
    def test_is_on_only_with_both_options_and_something_captured(
        self, all_prefills: bool, non_decode: bool, captured: bool
    ) -> None:
        config = config_with(all_prefills=all_prefills, non_decode=non_decode)
        graphs = [dims(8, 1, 0)] if captured else []

        expected = (all_prefills, non_decode, captured) == (True, True, True)

        assert is_gated(config, graphs) is expected
        assert (graph_gate(config, graphs, strict=False) is not None) is expected

    def test_is_off_by_default(self) -> None:
        assert not is_gated(EngineConfig(graphs=4), [dims(8, 1, 0)])

    def test_a_gate_has_the_ways_of_its_engine(self) -> None:
        config = config_with(all_prefills=True, non_decode=True)
        graphs = graph_list(config, max_sequence_length=64)

        made = graph_gate(config, graphs, strict=True)

        assert made == GraphGate(graphs=tuple(graphs), strict=True, chunked=False)


class TestChunk:
    @given(GATES, HELD, REMAINING, BUDGETS)
    def test_is_what_trying_every_size_finds(
        self, one: GraphGate, held: BatchDimensions, remaining: int, budget: int
    ) -> None:
        found = one.chunk(held, remaining, budget)

        tokens = search(one, held, remaining, budget, chunked=one.chunked)
        if tokens:
            graph = match_graph(joined(held, tokens), one.graphs, strict=one.strict)
            assert found == Chunk(tokens=tokens, graph=graph)
        else:
            assert found == Chunk(deferral=reason(one, held, remaining, budget))

    @given(GATES, HELD, REMAINING, BUDGETS)
    def test_is_captured_whole_where_possible_and_neither_is_nor_leaves_a_lone_token(
        self, one: GraphGate, held: BatchDimensions, remaining: int, budget: int
    ) -> None:
        found = one.chunk(held, remaining, budget)

        assert found.tokens <= max(0, min(remaining, budget))
        assert found.miss_reason is None
        assert (found.graph is None) is (found.tokens == 0) is (found.deferral is not None)
        if found.tokens:
            assert runs(one, held, found.tokens)
            assert found.tokens != 1 or remaining == 1
            assert remaining - found.tokens != 1
        if remaining <= budget and runs(one, held, remaining):
            assert found.tokens == remaining
        if not one.chunked:
            assert found.tokens in (0, remaining)

    @given(GATES, HELD, REMAINING, BUDGETS)
    def test_more_budget_fewer_rows_or_more_graphs_never_shrink_it(
        self, one: GraphGate, held: BatchDimensions, remaining: int, budget: int
    ) -> None:
        tokens = one.chunk(held, remaining, budget).tokens

        assert one.chunk(held, remaining, budget + 1).tokens >= tokens
        if held.num_decode:
            fewer = dims(held.num_tokens - 1, held.num_prefill, held.num_decode - 1)
            assert one.chunk(fewer, remaining, budget + 1).tokens >= tokens
        more = dataclasses.replace(one, graphs=tuple(sorted({*one.graphs, dims(12, 2, 3)})))
        assert more.chunk(held, remaining, budget).tokens >= tokens

    @given(GATES, HELD, REMAINING, BUDGETS)
    def test_decode_rows_that_end_meanwhile_leave_the_forward_its_graph(
        self, one: GraphGate, held: BatchDimensions, remaining: int, budget: int
    ) -> None:
        """Overlap assumes rows alive; one that has ended becomes padding in its place."""
        found = one.chunk(held, remaining, budget)
        for ended in range(held.num_decode + 1):
            left = dims(held.num_tokens - ended, held.num_prefill, held.num_decode - ended)
            assert found.graph is None or fits(joined(left, found.tokens), found.graph, strict=one.strict)

    @given(GATES, REMAINING, st.integers(3, 26))
    def test_an_empty_forward_takes_whatever_fits_alone(self, one: GraphGate, remaining: int, budget: int) -> None:
        """So a wait ends at the latest when nothing runs; three tokens hold a chunk whatever remains."""
        budget = budget if one.chunked else max(budget, remaining)

        assert (one.chunk(NO_ROWS, remaining, budget).tokens > 0) is one.fits_alone(remaining)

    def test_a_prompt_between_two_sizes_is_padded_and_not_split(self) -> None:
        found = gate(dims(8, 1, 0), dims(16, 1, 0)).chunk(NO_ROWS, 11, 100)

        assert found == Chunk(tokens=11, graph=dims(16, 1, 0))

    def test_a_long_prompt_is_snapped_down_to_the_largest_graph(self) -> None:
        found = gate(dims(8, 1, 0), dims(16, 1, 0)).chunk(NO_ROWS, 40, 100)

        assert found == Chunk(tokens=16, graph=dims(16, 1, 0))

    def test_a_budget_between_two_sizes_is_used_up_and_padded(self) -> None:
        found = gate(dims(8, 1, 0), dims(16, 1, 0)).chunk(NO_ROWS, 40, 11)

        assert found == Chunk(tokens=11, graph=dims(16, 1, 0))

    def test_rows_of_the_forward_and_its_unused_decode_rows_leave_fewer_tokens(self) -> None:
        one = gate(dims(16, 2, 6))

        assert one.chunk(decoding(6), 40, 100).tokens == 10
        assert one.chunk(decoding(4), 40, 100).tokens == 10, "two rows are padding, a token each"
        assert one.chunk(dims(7, 1, 4), 40, 100).tokens == 7, "three tokens of the other prefill row"

    def test_the_graph_of_most_tokens_need_not_be_the_one_of_most_room(self) -> None:
        found = gate(dims(20, 1, 12), dims(16, 1, 0)).chunk(NO_ROWS, 40, 100)

        assert found == Chunk(tokens=16, graph=dims(16, 1, 0))

    def test_a_spare_prefill_row_holds_a_decode_row_unless_matching_is_strict(self) -> None:
        graph = dims(16, 4, 0)

        assert gate(graph).chunk(decoding(3), 40, 100).tokens == 13
        assert gate(graph, strict=True).chunk(decoding(3), 40, 100).deferral is Deferral.GRAPH_WAIT

    def test_what_a_prefix_hit_leaves_of_a_whole_prompt_is_what_must_fit(self) -> None:
        one = gate(dims(16, 1, 0), chunked=False)

        assert one.chunk(NO_ROWS, 40, 100).deferral is Deferral.NO_GRAPH
        assert one.chunk(NO_ROWS, 40 - 32, 100) == Chunk(tokens=8, graph=dims(16, 1, 0))


class TestOneTokenGuard:
    def test_comes_after_the_snap_and_keeps_the_graph(self) -> None:
        one = gate(dims(8, 1, 0), dims(16, 1, 0))
        snapped = match_graph(joined(NO_ROWS, 16), one.graphs)

        found = one.chunk(NO_ROWS, 17, 100)

        assert found.tokens == 15
        assert found.graph == snapped == dims(16, 1, 0)

    @pytest.mark.parametrize("num_decode", range(8))
    def test_keeps_the_size_in_every_list_as_captured(self, num_decode: int) -> None:
        """Of graphs of one size one with fewer prefill rows may run the shorter chunk; it comes first then."""
        config = EngineConfig(graphs=8, max_requests=8, max_batch_tokens=128)
        graphs, held = graph_list(config, max_sequence_length=64), decoding(num_decode)
        for count in range(1, len(graphs) + 1):
            one = gate(*graphs[:count])
            room = one.room(held)
            if room >= 3:
                found, snapped = one.chunk(held, room + 1, 1000), match_graph(joined(held, room), one.graphs)

                assert found.graph is not None
                assert snapped is not None
                assert found.tokens == room - 1
                assert found.graph.num_tokens == snapped.num_tokens
                assert fits(joined(held, room - 1), snapped, strict=False)

    @given(GATES, HELD, st.integers(2, 24))
    def test_what_holds_a_chunk_holds_it_with_one_token_less(
        self, one: GraphGate, held: BatchDimensions, tokens: int
    ) -> None:
        for graph in one.graphs:
            if fits(joined(held, tokens), graph, strict=one.strict):
                assert fits(joined(held, tokens - 1), graph, strict=one.strict)

    @pytest.mark.parametrize(("room", "remaining"), [(1, 2), (1, 40), (2, 3)])
    def test_defers_for_its_own_reason_where_a_graph_has_no_room_for_two_and_two(
        self, room: int, remaining: int
    ) -> None:
        one = gate(dims(6 + room, 1, 6), dims(40, 1, 0))

        assert one.room(decoding(6)) == room
        assert one.chunk(decoding(6), remaining, 100) == Chunk(deferral=Deferral.ONE_TOKEN)

    @pytest.mark.parametrize(("budget", "remaining"), [(1, 2), (1, 40), (2, 3)])
    def test_defers_for_the_same_reason_at_the_budget(self, budget: int, remaining: int) -> None:
        assert gate(dims(40, 1, 0)).chunk(NO_ROWS, remaining, budget) == Chunk(deferral=Deferral.ONE_TOKEN)

    @pytest.mark.parametrize("chunked", [False, True])
    def test_lets_a_prompt_of_one_token_in(self, chunked: bool) -> None:
        found = gate(dims(4, 1, 3), chunked=chunked).chunk(decoding(3), 1, 1)

        assert found == Chunk(tokens=1, graph=dims(4, 1, 3))


class TestDeferral:
    @pytest.mark.parametrize("chunked", [False, True])
    def test_a_prompt_that_fewer_decode_rows_let_in_waits_for_a_graph(self, chunked: bool) -> None:
        one = gate(dims(16, 1, 2), chunked=chunked)

        assert one.chunk(decoding(3), 10, 100) == Chunk(deferral=Deferral.GRAPH_WAIT)
        assert one.chunk(decoding(2), 10, 100) == one.alone(10) == Chunk(tokens=10, graph=dims(16, 1, 2))

    def test_a_second_prompt_of_a_forward_waits_where_graphs_hold_one(self) -> None:
        assert gate(dims(16, 1, 2)).chunk(dims(4, 1, 0), 4, 100).deferral is Deferral.GRAPH_WAIT

    @pytest.mark.parametrize("budget", [-1, 0])
    @pytest.mark.parametrize("chunked", [False, True])
    def test_a_full_forward_is_no_graph_wait_even_if_no_graph_has_room(self, chunked: bool, budget: int) -> None:
        one = gate(dims(16, 1, 2), chunked=chunked)

        assert one.chunk(decoding(3), 10, budget) == Chunk(deferral=Deferral.BATCH_FULL)

    def test_a_whole_prompt_beyond_the_budget_finds_the_forward_full(self) -> None:
        assert gate(dims(16, 1, 2), chunked=False).chunk(decoding(2), 10, 9).deferral is Deferral.BATCH_FULL

    @pytest.mark.parametrize("budget", [-1, 0, 100])
    def test_a_prompt_that_no_graph_holds_alone_is_told_at_once(self, budget: int) -> None:
        one = gate(dims(16, 1, 2), dims(40, 0, 40), chunked=False)

        assert [one.fits_alone(remaining) for remaining in (14, 15)] == [True, False], "two padding tokens"
        assert one.chunk(decoding(2), 15, budget) == Chunk(deferral=Deferral.NO_GRAPH)

    def test_decode_graphs_hold_no_prompt(self) -> None:
        assert gate(dims(8, 0, 8)).chunk(NO_ROWS, 4, 100).deferral is Deferral.NO_GRAPH

    def test_a_prompt_of_three_tokens_would_wait_for_ever_where_the_largest_chunk_is_two(self) -> None:
        one = gate(dims(2, 1, 0))

        assert [one.fits_alone(remaining) for remaining in (1, 2, 3, 4, 40)] == [True, True, False, True, True]

    @given(GATES, HELD, REMAINING, BUDGETS)
    def test_no_graph_means_that_it_fits_none_alone(
        self, one: GraphGate, held: BatchDimensions, remaining: int, budget: int
    ) -> None:
        is_hopeless = one.chunk(held, remaining, budget).deferral is Deferral.NO_GRAPH

        assert is_hopeless is not one.fits_alone(remaining)
        assert one.fits_alone(remaining) is (one.alone(remaining).tokens > 0)

    @pytest.mark.parametrize("chunked", [False, True])
    def test_the_error_names_what_is_short_and_every_remedy(self, chunked: bool) -> None:
        message = gate(dims(2, 1, 0), chunked=chunked).no_graph_message(3)

        assert "3 prompt tokens" in message
        assert "the largest takes 2" in message
        for name in ("graph_all_prefills=False", "graphs,", "max_batch_tokens", "chunked_prefill"):
            assert name in message
        assert ("chunked_prefill=True" in message) is not chunked


class TestContinuing:
    @given(GATES, HELD, REMAINING, st.integers(3, 26))
    def test_takes_what_a_graph_runs_else_the_plain_chunk_eagerly(
        self, one: GraphGate, held: BatchDimensions, remaining: int, budget: int
    ) -> None:
        found = one.continuing(held, remaining, budget)

        tokens = search(one, held, remaining, budget, chunked=True)
        if tokens:
            graph = match_graph(joined(held, tokens), one.graphs, strict=one.strict)
            assert found == Chunk(tokens=tokens, graph=graph)
        else:
            plain = largest([n for n in range(1, min(remaining, budget) + 1) if is_legal(n, remaining, chunked=True)])
            assert found == Chunk(tokens=plain, miss_reason=CONTINUING_CHUNK)
            assert plain

    @given(GATES, HELD, REMAINING, st.integers(3, 26), REMAINING)
    def test_runs_alone_where_it_runs_eagerly(
        self, one: GraphGate, held: BatchDimensions, remaining: int, budget: int, next_remaining: int
    ) -> None:
        found = one.continuing(held, remaining, budget)
        behind = one.chunk(joined(held, found.tokens), next_remaining, budget - found.tokens)

        assert found.graph is not None or behind.tokens == 0

    def test_goes_on_beside_more_decode_rows_than_any_graph_holds(self) -> None:
        one = gate(dims(16, 1, 2))

        assert one.continuing(decoding(3), 40, 20) == Chunk(tokens=20, miss_reason=CONTINUING_CHUNK)
        assert one.continuing(decoding(2), 40, 20) == Chunk(tokens=14, graph=dims(16, 1, 2))
        assert one.continuing(decoding(2), 5, 20) == Chunk(tokens=5, graph=dims(16, 1, 2))

    def test_a_forward_that_leaves_no_chunk_is_a_fault_of_ours(self) -> None:
        with pytest.raises(AssertionError, match="leaves no chunk"):
            gate(dims(16, 1, 2)).continuing(decoding(3), 40, 1)


class TestGraphGate:
    @given(GATES, HELD)
    def test_room_is_the_largest_chunk_that_match_graph_accepts(self, one: GraphGate, held: BatchDimensions) -> None:
        assert one.room(held) == largest([tokens for tokens in range(1, 40) if runs(one, held, tokens)])

    @given(st.integers(1, 64), st.integers(0, 64), st.integers(1, 48), DISTRIBUTIONS)
    def test_agrees_with_the_search_over_a_list_as_captured(
        self, rows: int, num_decode: int, remaining: int, distribution: GraphDistribution
    ) -> None:
        config = EngineConfig(graphs=6, graph_distribution=distribution, max_requests=rows, max_batch_tokens=96)
        graphs = graph_list(config, max_sequence_length=48)
        held = decoding(min(num_decode, rows))
        for chunked in (False, True):
            one = gate(*graphs, chunked=chunked)

            found = one.chunk(held, remaining, 96 - held.num_tokens)

            assert found.tokens == search(one, held, remaining, 96 - held.num_tokens, chunked=chunked)

    def test_is_a_value(self) -> None:
        one, same = gate(dims(8, 1, 0), dims(16, 2, 4)), gate(dims(16, 2, 4), dims(8, 1, 0))
        before = repr(one)

        one.chunk(decoding(2), 9, 9)
        one.continuing(decoding(9), 9, 9)

        assert one == same
        assert hash(one) == hash(same)
        assert repr(one) == before
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.strict = True  # type: ignore[misc]

    def test_wants_its_graphs_ascending(self) -> None:
        with pytest.raises(AssertionError, match="ascending"):
            GraphGate(graphs=(dims(16, 1, 0), dims(8, 1, 0)), strict=False, chunked=True)
