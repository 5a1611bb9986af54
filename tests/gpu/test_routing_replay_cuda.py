"""Routing replay on CUDA, in graphs and without, in legacy mode: what is recorded, and that told choices are obeyed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.request import RequestOutput
from tests.routing_reference import Choices, other_choices

TEXTS = ["def add(a, b):\n", "import os\n\n\ndef read(path):\n", "x"]
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
LIMITS: dict[str, Any] = {
    "mode": "legacy",
    "max_requests": 4,
    "max_batch_tokens": 256,
    "max_sequence_length": 128,
    "num_blocks": 40,
}


def serve(routing: list[Choices] | None = None, **options: Any) -> list[RequestOutput]:
    config = EngineConfig(**{**LIMITS, "device": "cuda", "routing_replay": "replay", **options})
    with Engine.from_pretrained("shipped", config, progress=False) as engine:
        told: list[Choices | None] = [None] * len(TEXTS) if routing is None else [*routing]
        names = [engine.add_request(text, GREEDY, routing=one) for text, one in zip(TEXTS, told, strict=True)]
        ended = {}
        while engine.has_unfinished():
            ended |= {output.request_id: output for output in engine.step() if output.finished}
    return [ended[name] for name in names]


def routing_of(output: RequestOutput) -> Choices:
    assert output.routing is not None
    assert output.routing.shape == (len(output.prompt_token_ids) + len(output.token_ids) - 1, 3, 2)
    return output.routing


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("graphs", [None, -1])
def test_a_float64_model_records_and_obeys_as_on_the_cpu(graphs: int | None, drafts: int) -> None:
    options: dict[str, Any] = {"dtype": "float64", "speculative_tokens": drafts}
    plain = serve(device="inline", **options)
    told = [other_choices(routing_of(one), 8) for one in plain]
    forced = serve(told, device="inline", **options)

    for outputs, expected in (
        (serve(graphs=graphs, **options), plain),
        (serve(told, graphs=graphs, **options), forced),
    ):
        assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
        for one, other in zip(outputs, expected, strict=True):
            assert np.array_equal(routing_of(one), routing_of(other))


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("graphs", [None, -1])
def test_kernels_in_bfloat16_obey_every_choice(graphs: int | None, drafts: int) -> None:
    options: dict[str, Any] = {"graphs": graphs, "speculative_tokens": drafts, "prefix_caching": True}
    told = [other_choices(routing_of(one), 8) for one in serve(**options)]

    for output, given in zip(serve(told, **options), told, strict=True):
        assert np.array_equal(routing_of(output), given)
