"""Outputs of one run against those of another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.request import RequestOutput

NEAR_TIE = 0.1
"""Difference of log-probabilities up to which two ways of rounding in bfloat16 may prefer different tokens."""


def check_same(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    """Ids, ends, and log-probabilities, in float64 to what another cut of a batch moves them."""
    ends = [[(one.token_ids, one.finish_reason) for one in each] for each in (outputs, expected)]
    assert ends[0] == ends[1]
    for one, other in zip(outputs, expected, strict=True):
        check_same_logprobs(one, other, atol=1e-9)


def check_same_logprobs(one: RequestOutput, other: RequestOutput, *, atol: float = 1e-6) -> None:
    """Of prompt and output: for the same ids in the same order."""
    for found, wanted in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
        assert (found is None) == (wanted is None)
        for row, expected in zip(found or (), wanted or (), strict=True):
            assert (row is None) == (expected is None)
            if row is not None and expected is not None:
                assert list(row) == list(expected)
                assert np.allclose(list(row.values()), list(expected.values()), atol=atol, rtol=0)


def check_parted_by_near_ties(
    left: Sequence[RequestOutput], right: Sequence[RequestOutput], *, near_tie: float = NEAR_TIE
) -> None:
    """The same tokens, up to a place where two are as good as equal to ``left``, which has log-probabilities.

    A wrong row or block parts them anywhere.
    """
    for one, other in zip(left, right, strict=True):
        pairs = zip(one.token_ids, other.token_ids, strict=True)
        parted = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
        if parted is not None:
            assert one.logprobs is not None
            first, second, *_ = sorted(one.logprobs[parted].values(), reverse=True)
            assert first - second < near_tie, f"parted at {parted} with a margin of {first - second:.3f}"
