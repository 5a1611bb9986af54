from __future__ import annotations

import pytest

from engine.errors import ConfigError
from engine.request import SamplingParams
from engine.sampling import SamplingNeeds, make_sampler, sampler_name

NOTHING = {
    "all_greedy": True,
    "bias": False,
    "penalties": False,
    "min_tokens": False,
    "top_k": False,
    "max_top_k": 0,
    "top_p": False,
    "min_p": False,
    "num_logprobs": None,
    "processed_logprobs": False,
}
RANDOM = {"all_greedy": False}


class TestNeeds:
    @pytest.mark.parametrize(
        ("params", "changed"),
        [
            ({"temperature": 0.0}, {}),
            ({"temperature": 9e-6}, {}),
            ({"top_k": 1}, {}),
            (
                {"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.5},
                {},
            ),  # filters of greedy rows count for nothing
            ({}, RANDOM),
            ({"top_k": -1}, RANDOM),
            ({"top_k": 7}, {**RANDOM, "top_k": True, "max_top_k": 7}),
            ({"top_p": 0.9}, {**RANDOM, "top_p": True}),
            ({"min_p": 0.1}, {**RANDOM, "min_p": True}),
            ({"temperature": 0.0, "logit_bias": {3: 1.0}}, {"bias": True}),
            ({"temperature": 0.0, "presence_penalty": 1.0}, {"penalties": True}),
            ({"temperature": 0.0, "frequency_penalty": 1.0}, {"penalties": True}),
            ({"temperature": 0.0, "repetition_penalty": 1.1}, {"penalties": True}),
            ({"temperature": 0.0, "min_tokens": 1}, {"min_tokens": True}),
            ({"temperature": 0.0, "logprobs": 0}, {"num_logprobs": 0}),
            ({"temperature": 0.0, "logprobs": 3}, {"num_logprobs": 3}),
        ],
    )
    def test_one_row_sets_exactly_its_flags(self, params: dict[str, object], changed: dict[str, object]) -> None:
        needs = SamplingNeeds.of([SamplingParams(**params)])  # type: ignore[arg-type]

        assert needs == SamplingNeeds(**{**NOTHING, **changed})  # type: ignore[arg-type]

    def test_a_batch_takes_the_union_and_the_largest_wish(self) -> None:
        rows = [
            SamplingParams(temperature=0, logprobs=2),
            SamplingParams(top_k=3),
            SamplingParams(top_k=40, logprobs=5),
        ]
        needs = SamplingNeeds.of(rows, processed=True)

        assert not needs.all_greedy
        assert (needs.max_top_k, needs.num_logprobs, needs.processed_logprobs) == (40, 5, True)

    def test_an_empty_batch_needs_nothing(self) -> None:
        assert SamplingNeeds.of([]) == SamplingNeeds(**NOTHING)  # type: ignore[arg-type]


class TestMakeSampler:
    @pytest.mark.parametrize("name", ["auto", "torch"])
    def test_gives_the_torch_sampler(self, name: str) -> None:
        assert make_sampler(sampler_name(name, "cpu")).name == "torch"

    def test_refuses_an_unknown_backend_by_name(self) -> None:
        with pytest.raises(ConfigError, match=r"sampling_backend.*'dice'"):
            sampler_name("dice", "cpu")
