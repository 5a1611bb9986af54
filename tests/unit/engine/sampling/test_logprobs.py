from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from engine.request import SamplingParams
from engine.sampling import SamplingNeeds
from engine.sampling.logprobs import finite_or_none, logprob_row, prompt_logprobs, token_logprobs
from engine.sampling.torch import TorchSampler
from tests import sampling_reference as reference
from tests.sampling_reference import Row, make_rows

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def logits_with_ties(num_rows: int, vocab_size: int = 40) -> torch.Tensor:
    return (torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 4).round() / 2


def expected_rows(logits: torch.Tensor, num: int) -> tuple[list[list[int]], np.ndarray]:
    x = logits.double().numpy()
    logprobs = x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
    ids = [sorted(range(x.shape[1]), key=lambda i: (-row[i], i))[:num] for row in x]
    return ids, logprobs


class TestTokenLogprobs:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("num", [0, 1, 5, 39, 40, 60])
    def test_top_ids_fall_in_value_and_rise_in_id_among_equals(self, dtype: torch.dtype, num: int) -> None:
        # Bug kind 62.
        logits = logits_with_ties(25).to(dtype)
        chosen, top_ids, top_values = token_logprobs(logits, torch.arange(25), num)
        ids, logprobs = expected_rows(logits, num)

        assert top_ids.tolist() == ids
        assert (chosen.dtype, top_ids.dtype, top_values.dtype) == (torch.float32, torch.int64, torch.float32)
        np.testing.assert_allclose(chosen, logprobs[range(25), range(25)], rtol=1e-5)
        if num:
            np.testing.assert_allclose(top_values, np.take_along_axis(logprobs, np.array(ids), 1), rtol=1e-5)

    def test_impossible_ids_are_minus_infinity_in_id_order(self) -> None:
        logits = torch.tensor([[-math.inf, 0.0, -math.inf, -math.inf]])
        chosen, top_ids, top_values = token_logprobs(logits, torch.tensor([0]), 3)

        assert chosen.tolist() == [-math.inf]
        assert top_ids.tolist() == [[1, 0, 2]]
        assert top_values.tolist() == [[0.0, -math.inf, -math.inf]]

    def test_a_row_with_nan_leaves_the_others_alone(self) -> None:
        logits = logits_with_ties(3)
        clean = token_logprobs(logits, torch.tensor([0, 1, 2]), 4)
        logits[1, 7] = math.nan
        spoiled = token_logprobs(logits, torch.tensor([0, 1, 2]), 4)

        for a, b in zip(clean, spoiled, strict=True):
            assert torch.equal(a[[0, 2]], b[[0, 2]])
        assert ((spoiled[1] >= 0) & (spoiled[1] < 40)).all()

    def test_a_row_alone_has_the_same_bits_as_in_a_batch(self) -> None:
        logits = torch.randn(20, 5003, generator=torch.Generator().manual_seed(0))
        ids = torch.arange(20)
        together = token_logprobs(logits, ids, 5)
        for i in range(20):
            alone = token_logprobs(logits[i : i + 1], ids[i : i + 1], 5)
            assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, together, strict=True))


class TestSampledLogprobs:
    def sample(self, params: SamplingParams, processed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = logits_with_ties(30)
        rows = [Row(params=params, seed=i, output=[1, 2], eos=[3]) for i in range(30)]
        needs = SamplingNeeds.of([params], processed)
        sampled = TorchSampler().sample(logits, make_rows(rows, 40), needs)
        assert sampled.chosen_logprob is not None
        assert sampled.top_logprobs is not None
        return logits, sampled.token_ids, torch.cat([sampled.chosen_logprob[:, None], sampled.top_logprobs], -1)

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(logprobs=4, temperature=0.0),
            SamplingParams(logprobs=4, temperature=0.5, top_p=0.1),
            SamplingParams(logprobs=4, temperature=2.0, top_k=3, presence_penalty=2.0, min_tokens=1),
            SamplingParams(logprobs=4, logit_bias={9: 50.0}),
        ],
    )
    def test_raw_ones_are_the_model_s_whatever_the_parameters(self, params: SamplingParams) -> None:
        # Bug kind 67.
        logits, tokens, values = self.sample(params, processed=False)
        ids, logprobs = expected_rows(logits, 4)
        expected = np.take_along_axis(logprobs, np.concatenate([tokens[:, None].numpy(), np.array(ids)], 1), 1)

        np.testing.assert_allclose(values, expected, rtol=1e-5)

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(logprobs=40, temperature=0.5, top_p=0.6),
            SamplingParams(logprobs=40, temperature=2.0, top_k=3, presence_penalty=2.0, min_tokens=1),
            SamplingParams(logprobs=40, min_p=0.2, logit_bias={9: 3.0}),
        ],
    )
    def test_processed_ones_are_of_the_distribution_drawn_from(self, params: SamplingParams) -> None:
        logits, tokens, values = self.sample(params, processed=True)
        row = Row(params=params, output=[1, 2], eos=[3])
        for x, token, given in zip(logits, tokens.tolist(), values.numpy(), strict=True):
            probabilities = reference.distribution(x.double().numpy(), row)
            np.testing.assert_allclose(np.exp(given[0]), probabilities[token], rtol=1e-4)
            np.testing.assert_allclose(np.exp(given[1:]), np.sort(probabilities)[::-1], rtol=1e-4)

    def test_processed_ones_of_greedy_rows_are_neither_heated_nor_filtered(self) -> None:
        params = SamplingParams(logprobs=40, temperature=0.0, top_k=3, top_p=0.2, logit_bias={9: 3.0})
        logits = logits_with_ties(2)
        rows = [Row(params=params), Row(params=SamplingParams(top_p=0.3, temperature=3.0))]
        expected = logits[:1].clone()
        expected[0, 9] += 3.0
        for batch in (rows, rows[:1]):  # with and without a random neighbour
            needs = SamplingNeeds.of([row.params for row in batch], processed=True)
            sampled = TorchSampler().sample(logits[: len(batch)], make_rows(batch, 40), needs)
            assert sampled.top_logprobs is not None
            np.testing.assert_allclose(
                sampled.top_logprobs[0], token_logprobs(expected, torch.tensor([0]), 40)[2][0], rtol=1e-5
            )

    @pytest.mark.parametrize(("wish", "chosen", "top"), [(None, False, False), (0, True, False), (2, True, True)])
    def test_makes_only_what_is_wanted(self, wish: int | None, chosen: bool, top: bool) -> None:
        params = SamplingParams(logprobs=wish)
        sampled = TorchSampler().sample(
            logits_with_ties(1), make_rows([Row(params=params)], 40), SamplingNeeds.of([params])
        )

        assert (sampled.chosen_logprob is not None, sampled.top_ids is not None) == (chosen, top)
        assert (sampled.top_logprobs is not None) == top


class TestPromptLogprobs:
    def test_pairs_each_row_with_the_token_that_followed(self) -> None:
        logits = logits_with_ties(6)
        targets = torch.tensor([3, 1, 4, 1, 5, 9])
        chosen, top_ids, top_values = prompt_logprobs(logits, targets, 2)
        ids, logprobs = expected_rows(logits, 2)

        np.testing.assert_allclose(chosen, logprobs[range(6), targets.tolist()], rtol=1e-5)
        assert top_ids.tolist() == ids
        assert top_values.shape == (6, 2)

    def test_cut_into_chunks_gives_the_same_bits(self) -> None:
        # Bug kind 65: chunk sizes 1, 2, 7, len - 1.
        logits, targets = torch.randn(9, 1001, generator=torch.Generator().manual_seed(3)), torch.arange(9)
        whole = prompt_logprobs(logits, targets, 3)
        for size in (1, 2, 7, 8):
            chunks = [prompt_logprobs(x, t, 3) for x, t in zip(logits.split(size), targets.split(size), strict=True)]
            for part, expected in zip(zip(*chunks, strict=True), whole, strict=True):
                assert torch.equal(torch.cat(part), expected)

    def test_no_tokens_and_no_tops_have_empty_shapes(self) -> None:
        chosen, top_ids, top_values = prompt_logprobs(torch.zeros(0, 40), torch.zeros(0, dtype=torch.int64), 3)
        assert (chosen.shape, top_ids.shape, top_values.shape) == ((0,), (0, 3), (0, 3))
        assert prompt_logprobs(torch.zeros(2, 40), torch.zeros(2, dtype=torch.int64), 0)[1].shape == (2, 0)


class TestLogprobRow:
    def test_chosen_stands_first_then_the_best(self) -> None:
        row = logprob_row(7, -3.0, [2, 5, 1], [-0.5, -1.0, -1.5], 2)
        assert list(row.items()) == [(7, -3.0), (2, -0.5), (5, -1.0)]

    def test_a_chosen_id_among_the_best_is_named_once(self) -> None:
        row = logprob_row(5, -1.0, [2, 5, 1], [-0.5, -1.0, -1.5], 3)
        assert list(row.items()) == [(5, -1.0), (2, -0.5), (1, -1.5)]

    def test_none_wanted_beside_the_chosen(self) -> None:
        assert logprob_row(5, -1.0, [2], [-0.5], 0) == logprob_row(5, -1.0, [], [], 0) == {5: -1.0}

    def test_fewer_columns_than_wished_for_are_all(self) -> None:
        assert len(logprob_row(0, -1.0, [0, 1], [-1.0, -2.0], 256)) == 2

    def test_what_json_cannot_hold_becomes_null(self) -> None:
        # Bug kind 38.
        values = [finite_or_none(v) for v in (-1.5, -math.inf, math.inf, math.nan)]
        assert json.dumps(values, allow_nan=False) == "[-1.5, null, null, null]"
