"""Which hidden states become logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.batch import BatchShape, ForwardBatch


def batch_of(logits_idx: list[int], **sizes: int) -> ForwardBatch:
    """A batch of which only this much is there."""
    shape = BatchShape(**{"num_prefill": 0, "max_query_len": 0, "num_kv_blocks": 1, **sizes})
    nothing: Any = None
    return ForwardBatch(*[nothing] * 8, torch.tensor(logits_idx), shape)


HIDDEN_TE = torch.randn(6, 5)


def test_rows_of_one_token_are_taken_as_they_are() -> None:
    found = batch_of([0, 1, 2, 3, 0, 0], num_tokens=6, num_decode=6).logits_rows(HIDDEN_TE)

    assert found is HIDDEN_TE, "padding rows' logits are nobody's"


@pytest.mark.parametrize(
    ("logits_idx", "sizes"),
    [
        ([0, 1, 5], {"num_tokens": 6, "num_decode": 2, "num_prefill": 1}),
        ([5], {"num_tokens": 6, "num_decode": 0, "num_prefill": 1}),
        ([3, 4, 5, 0, 1, 2], {"num_tokens": 6, "num_decode": 2, "decode_width": 3}),
        ([2, 5], {"num_tokens": 6, "num_decode": 0, "num_prefill": 2}),
    ],
    ids=["mixed", "a prompt", "rows of drafts", "a draft pass"],
)
def test_of_all_others_those_that_are_named(logits_idx: list[int], sizes: dict[str, int]) -> None:
    found = batch_of(logits_idx, **sizes).logits_rows(HIDDEN_TE)

    assert torch.equal(found, HIDDEN_TE[logits_idx])
