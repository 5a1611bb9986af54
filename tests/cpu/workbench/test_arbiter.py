"""Choices computed again are the ones that were made, and real rounding stays within what is said to explain it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.loader import LoadedModel, load_model
from engine.request import RequestOutput, SamplingParams
from tests.oracle_reference import reference_uniform
from workbench.arbiter import Arbiter
from workbench.rounding import LOGIT_NOISE
from workbench.verdicts import Judge, RequestVerdict, Verdict

CONFIG = EngineConfig(max_requests=2, max_batch_tokens=64, max_sequence_length=64, num_blocks=16, device="inline")
PROMPT = [5, 6, 7]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8},
    "filtered": {"temperature": 1.2, "top_k": 60, "top_p": 0.9, "min_p": 0.05},
    "penalised": {"repetition_penalty": 1.6, "presence_penalty": 0.7, "frequency_penalty": 1.5},
    "greedy and penalised": {"temperature": 0.0, "repetition_penalty": 3.0, "frequency_penalty": 2.0},
    "biased": {"logit_bias": {3: 4.0, 9: 5.0}, "stop_token_ids": [3], "min_tokens": 20},
}


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("shape:tiny", dtype=torch.float32, device=torch.device("cpu"))


def serve(loaded: LoadedModel, params: SamplingParams) -> RequestOutput:
    with Engine(loaded, CONFIG) as engine:
        return engine.generate([PROMPT], params, progress=False)[0]


class TestChoice:
    @pytest.mark.parametrize("name", PARAMS)
    def test_is_of_the_token_that_was_chosen_at_every_position(self, tiny: LoadedModel, name: str) -> None:
        params = SamplingParams(max_tokens=20, seed=11, ignore_eos=True, **PARAMS[name])
        output = serve(tiny, params)
        arbiter = Arbiter(tiny, CONFIG, LOGIT_NOISE["float32"])
        misses = []
        for position, token in enumerate(output.token_ids):
            choice = arbiter.choice_after(PROMPT, output.token_ids[:position], params)
            assert choice.uniform == reference_uniform(11, position)
            others = [choice.miss(other) for other in range(512) if other != token]
            misses.append((choice.miss(token), sum(other.distance <= other.tolerance for other in others)))
        arbiter.close()

        assert len(misses) == 20
        assert all(miss.distance <= miss.tolerance for miss, _ in misses)
        assert sum(num_excused for _, num_excused in misses) == 0

    def test_scores_are_what_log_probabilities_are_made_of(self, tiny: LoadedModel) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=256, ignore_eos=True)
        output = serve(tiny, params)
        assert output.logprobs is not None
        arbiter = Arbiter(tiny, CONFIG, LOGIT_NOISE["float32"])
        choice = arbiter.choice_after(PROMPT, output.token_ids[:3], params)
        arbiter.close()

        log_softmax = choice.scores_V - np.log(np.exp(choice.scores_V).sum())
        row = output.logprobs[3]
        assert np.allclose(log_softmax[list(row)], list(row.values()), atol=1e-5)
        assert choice.noise == pytest.approx(LOGIT_NOISE["float32"] * abs(choice.scores_V).max(), rel=1e-5)


class TestRealRounding:
    @pytest.mark.parametrize("filters", [{}, {"top_k": 40, "top_p": 0.9}], ids=["plain", "filtered"])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_of_half_precision_is_explained_in_that_and_not_in_float32(
        self, tiny: LoadedModel, dtype: str, filters: dict[str, Any]
    ) -> None:
        half = load_model("shape:tiny", dtype=getattr(torch, dtype), device=torch.device("cpu"))
        full = load_model("shape:tiny", dtype=torch.float32, device=torch.device("cpu"))
        weights = dict(half.model.named_parameters())  # type: ignore[attr-defined]
        for name, parameter in full.model.named_parameters():  # type: ignore[attr-defined]
            parameter.copy_(weights[name])
        params = [
            SamplingParams(temperature=(0.0, 0.6, 1.0)[seed % 3], seed=seed, max_tokens=30, ignore_eos=True, **filters)
            for seed in range(30)
        ]
        pairs = [(serve(half, one), serve(full, one)) for one in params]

        in_half, in_float32 = verdicts(half, dtype, params, pairs), verdicts(full, "float32", params, pairs)

        parted = [index for index, verdict in enumerate(in_half) if verdict.verdict is not Verdict.EQUAL]
        assert len(parted) > 5
        assert all(in_half[index].verdict is Verdict.NUMERIC for index in parted), list(map(str, in_half))
        assert sum(in_float32[index].verdict is Verdict.DIFFERENT for index in parted) > len(parted) / 2


def verdicts(
    loaded: LoadedModel, dtype: Any, params: list[SamplingParams], pairs: list[tuple[RequestOutput, RequestOutput]]
) -> list[RequestVerdict]:
    with Judge(loaded, CONFIG.replace(dtype=dtype), params) as judge:
        return [judge.judge(index, left, [("other", right)]) for index, (left, right) in enumerate(pairs)]
