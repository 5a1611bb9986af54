"""The shipped model on CUDA: the ids of the CPU, with drafts and without, by every backend that can compute it."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.request import RequestOutput
from tests.same_outputs import check_parted_by_near_ties

PROMPTS = ["def add(a, b):\n", "import os\nimport sys\n\n\nclass ", "for i in range(10):\n    print(", "x = "]
SHARED = '"""Reading and writing of tables of numbers, as text."""\n\nfrom __future__ import annotations\n\nimport '
"""Longer than a block, so that later requests find it cached."""
GREEDY = SamplingParams(max_tokens=60, temperature=0.0, logprobs=2)
NEAR_TIES = {"float32": 0.02, "bfloat16": 0.4}
"""Difference of exact log-probabilities up to which rounding may prefer another token; products of mamba-ssm's scan
take float32 as tf32."""


def generate(device: str, drafts: int, dtype: str = "float64", **options: Any) -> list[RequestOutput]:
    """Outputs of two rounds of the same requests, the second behind cached prefixes where they are on."""
    config = EngineConfig(
        device=device,  # type: ignore[arg-type]
        dtype=dtype,  # type: ignore[arg-type]
        max_requests=4,
        max_sequence_length=512,
        speculative_tokens=drafts,
        **options,
    )
    prompts = [*PROMPTS, SHARED + "csv\n", SHARED + "json\n"]
    with Engine.from_pretrained("shipped", config, progress=False) as engine:
        outputs = [one for _ in range(2) for one in engine.generate(prompts, GREEDY, progress=False)]
        assert not drafts or engine.counters.drafts_accepted[0] > 0.4 * engine.counters.drafts_proposed[0]
        assert (engine.counters.prefix_hit_tokens > 0) is engine.config.prefix_caching
    return outputs


@cache
def exact() -> list[RequestOutput]:
    """By plain torch in float64."""
    return generate("inline", 0)


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("graphs", [None, -1])
def test_float64_gives_the_ids_of_the_cpu(drafts: int, graphs: int | None) -> None:
    found = generate("cuda", drafts, graphs=graphs)

    assert [one.token_ids for one in found] == [one.token_ids for one in exact()]


MAMBA_SSM: dict[str, Any] = {"ssm_backend": "mamba_ssm", "state_rewind": "stored"}
FLASHINFER: dict[str, Any] = {"attention_backend": "flashinfer"}


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("graphs", [None, -1])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {}),
        ("float32", MAMBA_SSM),
        ("bfloat16", {}),
        ("bfloat16", MAMBA_SSM),
        ("bfloat16", FLASHINFER),
        ("bfloat16", MAMBA_SSM | FLASHINFER),
    ],
)
def test_every_backend_gives_them_up_to_near_ties(
    dtype: str, options: dict[str, Any], prefix_caching: bool, graphs: int | None, drafts: int
) -> None:
    for package in {"mamba_ssm", "flashinfer"} & set(options.values()):
        if find_spec(package) is None:  # importing mamba_ssm asks for a CUDA extension that no test needs
            pytest.skip(f"{package} is not installed")

    found = generate("cuda", drafts, dtype, graphs=graphs, prefix_caching=prefix_caching, **options)

    check_parted_by_near_ties(exact(), found, near_tie=NEAR_TIES[dtype])
    same = [one.token_ids == other.token_ids for one, other in zip(found, exact(), strict=True)]
    assert sum(same) >= len(same) / 2, f"{sum(same)} of {len(same)} as they are in float64"
