"""The shipped model on CUDA: the ids of the CPU, with drafts and without."""

from __future__ import annotations

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.models.loader import load_model

PROMPTS = ["def add(a, b):\n", "import os\nimport sys\n\n\nclass ", "for i in range(10):\n    print(", "x = "]


def ids(device: str, drafts: int, graphs: int | None) -> list[tuple[int, ...]]:
    loaded = load_model("shipped", dtype=torch.float64, device=torch.device("cuda" if device == "cuda" else "cpu"))
    config = EngineConfig(
        device=device,  # type: ignore[arg-type]
        max_requests=4,
        max_sequence_length=512,
        speculative_tokens=drafts,
        graphs=graphs,
    )
    with Engine(loaded, config) as engine:
        outputs = engine.generate(PROMPTS, SamplingParams(max_tokens=60, temperature=0.0), progress=False)
        assert not drafts or engine.counters.drafts_accepted[0] > 0.4 * engine.counters.drafts_proposed[0]
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("graphs", [None, -1])
def test_float64_gives_the_ids_of_the_cpu(drafts: int, graphs: int | None) -> None:
    assert ids("cuda", drafts, graphs) == ids("inline", 0, None)
