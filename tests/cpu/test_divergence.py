"""How far two outputs are apart, as tests/gpu judges it, on a model that can be asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.loader import LoadedModel, load_model
from engine.request import RequestOutput, SamplingParams
from tests.divergence import Arbiter
from tests.oracle_reference import reference_uniform

CONFIG = EngineConfig(max_requests=2, max_batch_tokens=64, max_sequence_length=64, num_blocks=16, device="inline")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, seed=11, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("shape:tiny", dtype=torch.float32, device=torch.device("cpu"))


@pytest.fixture
def arbiter(tiny: LoadedModel) -> Iterator[Arbiter]:
    with Arbiter(tiny, CONFIG) as found:
        yield found


def serve(loaded: LoadedModel, params: SamplingParams) -> RequestOutput:
    with Engine(loaded, CONFIG) as engine:
        return engine.generate([[5, 6, 7]], params, progress=False)[0]


def with_token(output: RequestOutput, position: int, token: int) -> RequestOutput:
    ids = list(output.token_ids)
    ids[position] = token
    return replace(output, token_ids=tuple(ids))


class TestDivergence:
    @pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
    def test_of_equal_outputs_is_none(self, tiny: LoadedModel, arbiter: Arbiter, params: SamplingParams) -> None:
        output = serve(tiny, params)

        assert arbiter.first_divergence(0, params, output, output) is None

    def test_of_a_greedy_token_is_its_gap_to_the_best(self, tiny: LoadedModel, arbiter: Arbiter) -> None:
        output = serve(tiny, GREEDY)
        assert output.logprobs is not None
        best, second = output.logprobs[3]

        found = arbiter.first_divergence(0, GREEDY, output, with_token(output, 3, second))

        assert found is not None
        assert (found.position, found.tokens) == (3, (best, second))
        assert found.distance == pytest.approx(output.logprobs[3][best] - output.logprobs[3][second], abs=1e-4)

    def test_of_a_drawn_token_is_what_the_draw_misses_it_by(self, tiny: LoadedModel, arbiter: Arbiter) -> None:
        output = serve(tiny, DRAWN)
        weights = arbiter.logits_after([5, 6, 7, *output.token_ids[:2]])
        reached = torch.tensor(weights).div(0.8).softmax(-1).cumsum(-1)
        number, token = reference_uniform(11, 2), output.token_ids[2]
        assert (reached[token - 1] if token else 0.0) <= number < reached[token]

        found = arbiter.first_divergence(0, DRAWN, output, with_token(output, 2, token + 1))

        assert found is not None
        assert found.distance == pytest.approx(float(reached[token]) - number, abs=1e-9)

    def test_of_an_output_that_ended_earlier_is_infinite(self, tiny: LoadedModel, arbiter: Arbiter) -> None:
        output = serve(tiny, GREEDY)

        found = arbiter.first_divergence(0, GREEDY, output, replace(output, token_ids=output.token_ids[:4]))

        assert found is not None
        assert found.tokens == (output.token_ids[4], None)
        assert found.distance == float("inf")

    def test_of_the_same_weights_in_half_precision_is_small(self, tiny: LoadedModel, arbiter: Arbiter) -> None:
        half = load_model("shape:tiny", dtype=torch.bfloat16, device=torch.device("cpu"))
        parameters = dict(half.model.named_parameters())  # type: ignore[attr-defined]
        for name, parameter in tiny.model.named_parameters():  # type: ignore[attr-defined]
            parameters[name].copy_(parameter)
        found = []
        for seed in range(12):
            params = DRAWN.replace(seed=seed, temperature=seed % 2 * 0.8, max_tokens=30)
            divergence = arbiter.first_divergence(seed, params, serve(tiny, params), serve(half, params))
            found += [divergence] if divergence is not None else []

        assert len(found) > 3
        assert max(one.distance for one in found if one.is_greedy) < 0.1
        assert max(one.distance for one in found if not one.is_greedy) < 0.02
