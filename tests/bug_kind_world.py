"""What the tests of bug kinds share: parameters, and the answer of a request alone."""

from __future__ import annotations

from engine.request import SamplingParams
from tests.oracle_world import expected_output

__all__ = ["DRAWN", "GREEDY", "MODES", "alone"]

MODES = ["async", "legacy"]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, seed=0, ignore_eos=True, detokenize=False)
DRAWN = GREEDY.replace(temperature=1.0, seed=11)


def alone(prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    assert params.seed is not None
    return expected_output(prompt, params, params.seed, max_length=100).token_ids
