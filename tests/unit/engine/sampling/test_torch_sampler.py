from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from engine.request import SamplingParams
from engine.sampling import Sampled, SamplingNeeds
from engine.sampling.torch import TorchSampler
from tests import sampling_reference as reference
from tests.sampling_reference import Row, make_rows

VOCAB = 50
SAMPLER = TorchSampler()


def sample(logits: torch.Tensor, rows: list[Row], processed: bool = False) -> Sampled:
    needs = SamplingNeeds.of([row.params for row in rows], processed)
    return SAMPLER.sample(logits, make_rows(rows, logits.shape[1]), needs)


def tokens(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    sampled = sample(logits, rows)
    assert not sampled.bad.any()
    return sampled.token_ids.tolist()


def logits_with_ties(num_rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    """Multiples of 1/4, so that many are equal and float32 holds their differences exactly."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * 8).round() / 4


FILTERS = [
    {},
    {"top_k": -1},
    {"top_k": 2},
    {"top_k": 7},
    {"top_k": VOCAB},
    {"top_k": VOCAB + 5},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 9, "top_p": 0.8},
    {"top_k": 30, "min_p": 0.02},
    {"top_p": 0.7, "min_p": 0.03},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.01},
]
TEMPERATURES = [0.3, 0.7, 1.0, 1.7]
RANDOM_PARAMS = [
    SamplingParams(temperature=t, **f)  # type: ignore[arg-type]
    for t, f in itertools.product(TEMPERATURES, FILTERS)
]
MIXED_PARAMS = [
    *RANDOM_PARAMS[::5],
    SamplingParams(temperature=0.0),
    SamplingParams(top_k=1),
    SamplingParams(temperature=0.0, logit_bias={3: 9.0}),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3, top_k=5),
    SamplingParams(temperature=0.0, frequency_penalty=-2.0, repetition_penalty=0.7),
    SamplingParams(min_tokens=4, max_tokens=8, stop_token_ids=[5, 6]),
    SamplingParams(temperature=1e-4),
    SamplingParams(temperature=100.0),
]


def mixed_rows() -> list[Row]:
    return [
        Row(params=p, seed=1000 + i, position=i % 7, prompt=[1, 2, 3], output=[3, 4, 4], eos=[7])
        for i, p in enumerate(MIXED_PARAMS)
    ]


class TestDistribution:
    @pytest.mark.parametrize("params", RANDOM_PARAMS, ids=lambda p: f"T{p.temperature}k{p.top_k}p{p.top_p}m{p.min_p}")
    def test_follows_the_filtered_distribution(self, params: SamplingParams) -> None:
        num_draws = 4000
        logits = logits_with_ties(1, seed=int(params.temperature * 10))
        rows = make_rows([Row(params=params)], VOCAB)
        rows = rows._replace(seed=torch.arange(num_draws))
        rows = rows._replace(
            **{name: getattr(rows, name).expand(num_draws) for name in ("temperature", "top_k", "top_p", "min_p")}
        )
        needs = SamplingNeeds.of([params])
        drawn = SAMPLER.sample(logits.expand(num_draws, -1), rows, needs).token_ids

        counts = np.bincount(drawn.numpy(), minlength=VOCAB)
        expected = reference.distribution(logits[0].numpy(), Row(params=params)) * num_draws
        assert counts[expected == 0].sum() == 0
        check_counts_fit(counts[expected > 0], expected[expected > 0])

    def test_positions_of_one_seed_follow_it_too(self) -> None:
        # One stream over 4000 positions, as a request draws: neither constant nor periodic (bug kind 6).
        logits = torch.zeros(4000, 16)
        params = SamplingParams(temperature=50.0)
        drawn = tokens(logits, [Row(params=params, seed=3, position=i) for i in range(4000)])

        check_counts_fit(np.bincount(drawn, minlength=16), np.full(16, 250.0))
        for period in range(1, 65):
            assert drawn[:1000] != drawn[period : 1000 + period]


def check_counts_fit(counts: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square, rare cells pooled."""
    order = np.argsort(expected)
    counts, expected = counts[order], expected[order]
    pooled = int(np.searchsorted(np.cumsum(expected), 5.0)) + 1
    counts = np.array([counts[:pooled].sum(), *counts[pooled:]])
    expected = np.array([expected[:pooled].sum(), *expected[pooled:]])
    if len(counts) > 1:
        assert ((counts - expected) ** 2 / expected).sum() < reference.chi_square_limit(len(counts) - 1)


class TestAgainstReference:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_every_row_draws_the_reference_token(self, dtype: torch.dtype) -> None:
        rows = mixed_rows()
        for trial in range(20):
            logits = logits_with_ties(len(rows), seed=trial).to(dtype)
            expected = [reference.token(x.double().numpy(), row) for x, row in zip(logits, rows, strict=True)]
            assert tokens(logits, rows) == expected

    @pytest.mark.parametrize("filters", FILTERS)
    def test_filters_keep_the_reference_set(self, filters: dict[str, float]) -> None:
        # Processed log-probabilities show which ids are left; ties are everywhere.
        params = SamplingParams(temperature=0.7, logprobs=VOCAB, **filters)  # type: ignore[arg-type]
        logits = logits_with_ties(30)
        sampled = sample(logits, [Row(params=params, seed=i) for i in range(30)], processed=True)

        assert sampled.top_ids is not None
        assert sampled.top_logprobs is not None
        for x, ids, values in zip(logits, sampled.top_ids, sampled.top_logprobs, strict=True):
            expected = reference.kept_ids(x.double().numpy(), params)
            assert ids[values > -torch.inf].tolist() == expected

    def test_a_large_k_takes_another_way_to_the_same_set(self) -> None:
        vocab_size = 3000
        logits = logits_with_ties(4, vocab_size)
        for k in (1023, 1024, 1025, 2000, 2999, 3000):
            params = SamplingParams(top_k=k, logprobs=0)
            rows = [Row(params=params, seed=i) for i in range(4)]
            assert tokens(logits, rows) == [
                reference.token(x.double().numpy(), r) for x, r in zip(logits, rows, strict=True)
            ]

    @settings(max_examples=200)
    @given(
        logits=st.lists(st.integers(-8, 8), min_size=2, max_size=12),
        top_k=st.integers(-1, 14).filter(lambda k: k != 1),
        top_p=st.sampled_from([1e-9, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0]),
        min_p=st.sampled_from([0.0, 0.01, 0.3, 0.99, 1.0]),
        temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0]),
        seed=st.integers(-(2**63), 2**64 - 1),
        dtype=st.sampled_from([torch.float32, torch.float64]),
    )
    def test_small_vocabularies_full_of_ties(
        self,
        logits: list[int],
        top_k: int,
        top_p: float,
        min_p: float,
        temperature: float,
        seed: int,
        dtype: torch.dtype,
    ) -> None:
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        row = Row(params=params, seed=seed)
        x = torch.tensor([logits], dtype=dtype) / 2

        assert tokens(x, [row]) == [reference.token(x[0].double().numpy(), row)]


class TestRowsAreAlone:
    def test_permuted_rows_permute_tokens(self) -> None:
        rows = mixed_rows()
        logits = logits_with_ties(len(rows))
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()

        assert tokens(logits[order], [rows[i] for i in order]) == [tokens(logits, rows)[i] for i in order]

    def test_a_row_alone_draws_what_it_draws_in_any_batch(self) -> None:
        rows = mixed_rows()
        logits = torch.randn(len(rows), 4099, generator=torch.Generator().manual_seed(2)) * 4
        together = sample(logits, rows)
        for i, row in enumerate(rows):
            alone = sample(logits[i : i + 1], [row])
            assert alone.token_ids.item() == together.token_ids[i].item(), row.params
        assert [tokens(logits[:k], rows[:k])[0] for k in (1, 2, 5, 9)] == [together.token_ids[0].item()] * 4

    def test_distinct_seeds_draw_apart_and_equal_seeds_alike(self) -> None:
        # Bug kind 14: kernels that read only the first row's seed.
        logits = logits_with_ties(1, 1000).expand(4, -1)
        params = SamplingParams(temperature=2.0)
        streams = {
            seeds: [tuple(tokens(logits, [Row(params=params, seed=s, position=p) for s in seeds])) for p in range(8)]
            for seeds in ((1111, 2222, 3333, 4444), (1111, 1111, 1111, 1111))
        }
        distinct, equal = streams.values()

        assert all(len(set(step)) == 1 for step in equal)
        assert [step[0] for step in distinct] == [step[0] for step in equal]
        assert len({tuple(step[i] for step in distinct) for i in range(4)}) == 4

    def test_a_seeded_row_does_not_see_whether_neighbours_are_greedy(self) -> None:
        # Bug kinds 23 and 39: flags and parameters of other rows must not leak.
        row = Row(params=SamplingParams(temperature=0.8), seed=42)
        logits = logits_with_ties(2)
        alone = tokens(logits[:1], [row])[0]
        for neighbour in MIXED_PARAMS:
            assert tokens(logits, [row, Row(params=neighbour)])[0] == alone

    def test_too_many_flags_change_nothing(self) -> None:
        rows = [Row(params=SamplingParams(temperature=t), seed=i) for i, t in enumerate((0.0, 0.5, 1.0, 1.5))]
        logits = logits_with_ties(4)
        all_flags = SamplingNeeds(
            all_greedy=False,
            bias=True,
            penalties=True,
            min_tokens=True,
            top_k=True,
            max_top_k=3,
            top_p=True,
            min_p=True,
            num_logprobs=None,
            processed_logprobs=False,
        )

        assert SAMPLER.sample(logits, make_rows(rows, VOCAB), all_flags).token_ids.tolist() == tokens(logits, rows)


class TestGreedy:
    @pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_k=1)])
    @pytest.mark.parametrize("neighbour", [SamplingParams(temperature=0.0), SamplingParams(top_p=0.5)])
    def test_takes_the_lowest_id_among_equals(self, params: SamplingParams, neighbour: SamplingParams) -> None:
        # Bug kinds 24 and 44: a tie at the top must not be drawn from.
        logits = torch.zeros(2, 1000)
        logits[0, [17, 400, 999]] = 3.0
        drawn = {tokens(logits, [Row(params=params, seed=s), Row(params=neighbour)])[0] for s in range(200)}

        assert drawn == {17}

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
    @pytest.mark.parametrize("size", [1.0, 30.0, 1e4])
    def test_tiny_temperatures_are_greedy_without_nan(self, dtype: torch.dtype, size: float) -> None:
        # Bug kind 17: dividing half-precision logits by 1e-5 overflows.
        temperatures = [1e-3, 1e-4, 1e-5, 9.99999999e-6, 1e-6, 1e-7, 1e-12, 0.0]
        ids = torch.stack([torch.randperm(40, generator=torch.Generator().manual_seed(i)) for i in range(8)])
        logits = ((ids - 20) / 20 * size).to(dtype)
        params = [SamplingParams(temperature=t, logprobs=3) for t in temperatures]
        sampled = sample(logits, [Row(params=p, seed=i) for i, p in enumerate(params)], processed=True)

        assert sampled.token_ids.tolist() == logits.argmax(-1).tolist()
        assert not sampled.bad.any()
        assert sampled.top_logprobs is not None
        assert not sampled.top_logprobs.isnan().any()

    def test_the_threshold_is_one_for_batches_of_any_kind(self) -> None:
        # Host says greedy, and float32 rounds the value up onto the threshold: the token may not depend on neighbours.
        row = Row(params=SamplingParams(temperature=9.99999999e-6), seed=4)
        assert row.params.is_greedy
        logits = torch.zeros(2, 64)

        assert tokens(logits, [row, Row(params=SamplingParams())])[0] == tokens(logits[:1], [row])[0] == 0

    @pytest.mark.parametrize("temperature", [1e30, 1e300])
    def test_huge_temperatures_are_uniform_over_what_is_allowed(self, temperature: float) -> None:
        params = SamplingParams(temperature=temperature, min_tokens=1)
        rows = [Row(params=params, seed=i, eos=[0, 3]) for i in range(400)]
        drawn = tokens(torch.randn(400, 4) * 5, rows)

        assert set(drawn) == {1, 2}
        assert 140 < drawn.count(1) < 260


class TestTopK:
    @pytest.mark.parametrize("top_k", [-1, 0, VOCAB, VOCAB + 5, 10**9])
    def test_off_and_whole_vocabulary_draw_alike(self, top_k: int) -> None:
        logits = logits_with_ties(30)
        plain = [Row(params=SamplingParams(), seed=i) for i in range(30)]
        rows = [Row(params=SamplingParams(top_k=top_k), seed=i) for i in range(30)]

        assert tokens(logits, rows) == tokens(logits, plain)

    def test_all_meanings_of_off_share_one_batch(self) -> None:
        # Bug kind 41.
        params = [SamplingParams(top_k=k, top_p=p) for k in (0, 1, VOCAB, VOCAB + 5, -1, 3) for p in (1e-9, 0.5, 1.0)]
        rows = [Row(params=p, seed=i) for i, p in enumerate(params)]
        logits = logits_with_ties(len(rows))

        assert tokens(logits, rows) == [
            reference.token(x.double().numpy(), row) for x, row in zip(logits, rows, strict=True)
        ]

    def test_equal_scores_keep_exactly_k_of_the_lowest_ids(self) -> None:
        rows = [Row(params=SamplingParams(top_k=3), seed=i) for i in range(300)]

        assert set(tokens(torch.zeros(300, 9), rows)) == {0, 1, 2}


class TestTopP:
    @pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4), (1e-40, 1)])
    def test_keeps_the_smallest_set_that_reaches_p(self, top_p: float, kept: int) -> None:
        rows = [Row(params=SamplingParams(top_p=top_p), seed=i) for i in range(300)]

        assert set(tokens(torch.zeros(300, 4), rows)) == set(range(kept))

    def test_even_a_p_that_is_0_in_float32_keeps_one(self) -> None:
        rows = [Row(params=SamplingParams(top_p=1e-60), seed=i) for i in range(50)]
        logits = torch.tensor([[0.0, 1.0, 2.0, 2.0]]).expand(50, -1)

        assert set(tokens(logits, rows)) == {2}

    def test_renormalises_over_what_top_k_left(self) -> None:
        # Of four equals top_k leaves two; half of those is one.
        rows = [Row(params=SamplingParams(top_k=2, top_p=0.5), seed=i) for i in range(300)]

        assert set(tokens(torch.zeros(300, 4), rows)) == {0}


class TestDrawEdges:
    @pytest.mark.parametrize("u", [0.0, 0.5, 1.0 - 2.0**-53])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_never_an_id_of_no_probability(self, u: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        def fixed(seed: torch.Tensor, position: torch.Tensor, kind: object) -> torch.Tensor:
            return torch.full_like(seed, u, dtype=torch.float64)

        monkeypatch.setattr("engine.sampling.torch.uniform", fixed)
        logits = torch.full((3, 100_000), -torch.inf, dtype=dtype)
        logits[0, [3, 70, 99_990]] = 0.0
        logits[1, 500:99_000] = 0.0
        logits[2, 0:2] = 0.0
        expected = {0.0: [3, 500, 0], 0.5: [70, 49_750, 1], 1.0 - 2.0**-53: [99_990, 98_999, 1]}

        assert tokens(logits, [Row(params=SamplingParams())] * 3) == expected[u]


class TestMinTokens:
    @pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0}, {"top_p": 0.5}])
    @pytest.mark.parametrize("min_tokens", [0, 1, 2, 4])
    def test_eos_comes_at_exactly_that_index(self, params: dict[str, float], min_tokens: int) -> None:
        # Bug kind 26: EOS favoured by +100 ends the request at output index min_tokens, not one later.
        eos = 11
        full = SamplingParams(min_tokens=min_tokens, max_tokens=32, logit_bias={eos: 100.0}, **params)  # type: ignore[arg-type]
        logits = logits_with_ties(8)
        drawn = tokens(logits, [Row(params=full, position=i, eos=[eos], seed=5) for i in range(8)])

        assert [token == eos for token in drawn] == [i >= min_tokens for i in range(8)]

    def test_forbids_every_id_that_ends_and_no_other(self) -> None:
        # Bug kind 47: several EOS ids and stop_token_ids.
        logits = torch.zeros(1, 8)
        logits[0, [2, 5, 7]] = 50.0
        params = SamplingParams(min_tokens=1, stop_token_ids=[7], temperature=0.0)

        assert tokens(logits, [Row(params=params, eos=[2, 5])]) == [0]
        assert tokens(logits, [Row(params=params.replace(ignore_eos=True), eos=[2, 5])]) == [2]
        assert tokens(logits, [Row(params=params, eos=[2, 5], position=1)]) == [2]

    def test_a_row_without_ending_ids_is_untouched(self) -> None:
        # Its ids are all padding; padding may not touch the last id.
        logits = torch.zeros(2, 8)
        logits[:, 7] = 5.0
        params = SamplingParams(min_tokens=3, temperature=0.0)

        assert tokens(logits, [Row(params=params), Row(params=params, eos=[1, 2, 3])]) == [7, 7]


class TestPenaltiesAndBias:
    @settings(max_examples=100)
    @given(
        presence=st.floats(-2, 2),
        frequency=st.floats(-2, 2),
        repetition=st.floats(0.1, 3),
        prompt=st.lists(st.integers(0, 9)),
        output=st.lists(st.integers(0, 9)),
        bias=st.dictionaries(st.integers(0, 9), st.floats(-100, 100), max_size=4),
        seed=st.integers(0, 99),
    )
    def test_raw_scores_equal_the_reference(
        self,
        presence: float,
        frequency: float,
        repetition: float,
        prompt: list[int],
        output: list[int],
        bias: dict[int, float],
        seed: int,
    ) -> None:
        params = SamplingParams(
            temperature=0.0,
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
            logit_bias=bias,
            logprobs=10,
        )
        row = Row(params=params, prompt=prompt, output=output)
        logits = logits_with_ties(1, 10, seed).double()
        sampled = sample(logits, [row], processed=True)

        x = reference.adjusted(logits[0].numpy(), row)
        expected = x - np.log(np.exp(x - x.max()).sum()) - x.max()
        assert sampled.top_ids is not None
        assert sampled.top_logprobs is not None
        np.testing.assert_allclose(sampled.top_logprobs[0].numpy(), expected[sampled.top_ids[0].numpy()], 1e-5, 1e-9)
        assert sampled.token_ids.item() == int(np.argmax(x))

    def test_leaves_the_model_s_logits_as_they_were(self) -> None:
        for dtype in (torch.float32, torch.float64):
            logits = logits_with_ties(len(MIXED_PARAMS)).to(dtype)
            before = logits.clone()
            sample(logits, mixed_rows())
            assert torch.equal(logits, before)

    @pytest.mark.parametrize("repetition", [1e-300, 1e300])
    def test_a_penalty_outside_float32_keeps_scores_defined(self, repetition: float) -> None:
        params = SamplingParams(temperature=0.0, repetition_penalty=repetition)
        logits = torch.tensor([[0.0, -1.0, -2.0]])

        assert not sample(logits, [Row(params=params, output=[0, 1])]).bad.any()

    def test_a_prompt_mask_is_not_needed_without_repetition(self) -> None:
        params = SamplingParams(temperature=0.0, presence_penalty=2.0)
        rows = make_rows([Row(params=params, output=[1])], 3)._replace(prompt_mask=None)
        logits = torch.tensor([[0.0, 1.0, 0.5]])

        assert SAMPLER.sample(logits, rows, SamplingNeeds.of([params])).token_ids.tolist() == [2]


class TestAccept:
    def test_counts_go_into_the_column_behind_the_view(self) -> None:
        column = torch.zeros(5, VOCAB, dtype=torch.int32)
        rows = make_rows([Row(params=SamplingParams(), seed=i) for i in range(3)], VOCAB)
        rows = rows._replace(output_counts=column[1:4])
        sampled = SAMPLER.sample(logits_with_ties(3), rows, SamplingNeeds.of([SamplingParams()]))
        for _ in range(2):
            SAMPLER.accept(rows, sampled)

        assert column.sum(-1).tolist() == [0, 2, 2, 2, 0]
        assert column[1:4].gather(1, sampled.token_ids[:, None]).tolist() == [[2], [2], [2]]

    def test_bad_rows_and_absent_counts_add_nothing(self) -> None:
        rows = make_rows([Row(params=SamplingParams())] * 2, VOCAB)
        logits = logits_with_ties(2)
        logits[1, 4] = torch.nan
        sampled = SAMPLER.sample(logits, rows, SamplingNeeds.of([SamplingParams()]))
        SAMPLER.accept(rows, sampled)
        SAMPLER.accept(rows._replace(output_counts=None), sampled)

        assert rows.output_counts is not None
        assert rows.output_counts.sum(-1).tolist() == [1, 0]

    def test_a_stream_with_penalties_sees_the_token_just_drawn(self) -> None:
        # Presence 2 on flat logits: a greedy stream walks through the vocabulary instead of repeating id 0.
        params = SamplingParams(temperature=0.0, presence_penalty=2.0, max_tokens=6)
        rows, needs = make_rows([Row(params=params)], 6), SamplingNeeds.of([params])
        stream = []
        for _ in range(6):
            sampled = SAMPLER.sample(torch.zeros(1, 6), rows, needs)
            SAMPLER.accept(rows, sampled)
            stream.append(sampled.token_ids.item())

        assert stream == [0, 1, 2, 3, 4, 5]


class TestBadRows:
    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_is_flagged_alone_and_disturbs_nobody(self, value: float, dtype: torch.dtype) -> None:
        rows = mixed_rows()
        logits = logits_with_ties(len(rows)).to(dtype)
        expected = tokens(logits, rows)
        for i in range(len(rows)):
            spoiled = logits.clone()
            spoiled[i, 20] = value
            sampled = sample(spoiled, rows)
            assert sampled.bad.tolist() == [j == i for j in range(len(rows))]
            assert sampled.token_ids.tolist() == [*expected[:i], 0, *expected[i + 1 :]]
            assert not sampled.near_boundary[i]

    @pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(top_p=0.5, top_k=3, min_p=0.1)])
    @pytest.mark.parametrize("values", [[torch.nan] * 6, [-torch.inf] * 6, [torch.inf, -torch.inf] * 3])
    def test_rows_bad_throughout_stay_within_the_vocabulary(self, params: SamplingParams, values: list[float]) -> None:
        sampled = sample(torch.tensor([values, [0.0] * 6]), [Row(params=params.replace(logprobs=3))] * 2)

        assert sampled.bad.tolist() == [True, False]
        assert sampled.token_ids[0] == 0
        assert sampled.top_ids is not None
        assert ((sampled.top_ids >= 0) & (sampled.top_ids < 6)).all()

    def test_nothing_left_after_the_ban_is_bad(self) -> None:
        params = SamplingParams(min_tokens=1)

        assert sample(torch.zeros(1, 2), [Row(params=params, eos=[0, 1])]).bad.tolist() == [True]

    def test_impossible_ids_alone_are_no_fault(self) -> None:
        # Models pad their vocabulary with -inf.
        logits = torch.full((2, 6), -torch.inf)
        logits[:, 4] = 0.0

        assert tokens(logits, [Row(params=SamplingParams(temperature=0.0)), Row(params=SamplingParams(top_k=3))]) == [
            4,
            4,
        ]


class TestNearBoundary:
    def near(self, logits: torch.Tensor, params: SamplingParams, num: int = 2000) -> torch.Tensor:
        rows = [Row(params=params, seed=i) for i in range(num)]
        return sample(logits.expand(num, -1), rows).near_boundary

    def test_greedy_rows_are_never_near(self) -> None:
        assert not self.near(torch.zeros(1, 8), SamplingParams(temperature=0.0), 10).any()
        rows = [Row(params=SamplingParams(temperature=t), seed=i) for i, t in enumerate((0.0, 1.0) * 200)]
        assert not sample(torch.zeros(400, 50_000), rows).near_boundary[::2].any()

    def test_draws_far_from_every_border_are_not_near(self) -> None:
        assert self.near(torch.zeros(1, 4), SamplingParams()).sum() <= 1  # chance 3 * 2e-5 a draw

    def test_is_as_frequent_as_borders_are_dense(self) -> None:
        # 10,000 equal tokens: a border every 1e-4, and 1e-5 on both sides of it counts.
        share = self.near(torch.zeros(1, 10_000), SamplingParams()).float().mean().item()
        assert 0.15 < share < 0.25

    @settings(max_examples=150)
    @given(
        logits=st.lists(st.integers(-6, 2), min_size=3, max_size=12),
        filters=st.sampled_from([*FILTERS, {"min_p": math.exp(-1), "top_p": 0.75}, {"min_p": math.exp(-0.5)}]),
        seed=st.integers(0, 10**6),
    )
    def test_whatever_a_tiny_change_of_scores_alters_was_near(
        self, logits: list[int], filters: dict[str, float], seed: int
    ) -> None:
        # Halves of whole numbers: ties at every cut, and sums that meet p exactly.
        params, num = SamplingParams(**filters), 40  # type: ignore[arg-type]
        x = torch.tensor([logits]).expand(num, -1) * 0.5
        rows = [Row(params=params, seed=seed + i) for i in range(num)]
        noise = torch.rand(2, *x.shape, generator=torch.Generator().manual_seed(seed)) * 4e-6 - 2e-6
        before = sample(x + noise[0], rows)

        changed = sample(x + noise[1], rows).token_ids != before.token_ids
        assert not (changed & ~before.near_boundary).any()

    @pytest.mark.parametrize(
        ("weights", "params"),
        [
            ([0.3, 1.0, 0.3], SamplingParams(top_k=2)),  # another id may come in before the first
            ([1, 1, 1, 1, 20, 1, 1, 1, 1], SamplingParams(top_k=5)),  # four ids may change sides
            ([1.0, 0.6, 0.25], SamplingParams(min_p=0.25, top_p=0.6)),  # what min_p drops moves top_p's cut
        ],
    )
    def test_every_consequence_of_a_filter_on_the_edge_counts(
        self, weights: list[float], params: SamplingParams
    ) -> None:
        num = 3000
        x = torch.tensor([weights]).log().expand(num, -1)
        rows = [Row(params=params, seed=i) for i in range(num)]
        noise = torch.rand(2, *x.shape, generator=torch.Generator().manual_seed(0)) * 4e-6 - 2e-6
        before, after = sample(x + noise[0], rows), sample(x + noise[1], rows)

        changed = before.token_ids != after.token_ids
        assert changed.sum() > 20
        assert not (changed & ~before.near_boundary).any()

    @pytest.mark.parametrize(
        ("weights", "params"),
        [
            ([0.4, 0.3, 0.3], SamplingParams(top_k=2)),
            ([0.5, 0.25, 0.25], SamplingParams(top_p=0.5)),
            ([0.4, 0.2, 0.2], SamplingParams(min_p=0.5)),
        ],
    )
    def test_a_filter_on_the_edge_counts(self, weights: list[float], params: SamplingParams) -> None:
        assert self.near(torch.tensor([weights]).log(), params, 200).float().mean() > 0.4

    def test_a_filter_off_the_edge_does_not_count(self) -> None:
        logits = torch.tensor([[0.6, 0.3, 0.09, 0.01]]).log()
        for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.7), SamplingParams(min_p=0.3)):
            assert self.near(logits, params, 500).sum() <= 1


class TestNoHostSync:
    @pytest.mark.parametrize("processed", [False, True])
    def test_every_path_runs_on_tensors_without_values(self, processed: bool) -> None:
        # Fake tensors have shapes only: .item(), a branch on a value or a boolean index raises.
        wishes = [p.replace(logprobs=2) for p in MIXED_PARAMS]
        for params in (wishes, MIXED_PARAMS, [SamplingParams(temperature=0.0)] * 3, [SamplingParams(top_k=2000)] * 3):
            with FakeTensorMode() as mode:
                rows = make_rows([Row(params=p) for p in params], 4000, with_lists=True)
                logits = torch.empty(len(params), 4000)
                needs = SamplingNeeds.of(params, processed)
                sampled = SAMPLER.sample(logits, rows, needs)
                SAMPLER.accept(rows, sampled)
                assert mode.is_our_fake(sampled.token_ids)
            assert sampled.token_ids.shape == sampled.bad.shape == sampled.near_boundary.shape == (len(params),)

    def test_the_check_itself_catches_a_sync(self) -> None:
        def branch(x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

        def pick(x: torch.Tensor) -> torch.Tensor:
            return x[x > 0]

        faults: list[Callable[[torch.Tensor], object]] = [branch, pick, torch.Tensor.tolist]
        for fault in faults:
            with (
                FakeTensorMode(),
                pytest.raises(Exception, match=r"(?i)data.?dependent|dynamic|local_scalar|nonzero|not supported"),
            ):
                fault(torch.ones(3))
