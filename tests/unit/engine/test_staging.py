"""A step's inputs on their way to the device: what is copied, and what stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import BatchShape
from engine.device import Device
from engine.device_host import InlineDevice, ThreadDevice
from engine.plan import NO_NEW_BLOCKS, NewBlocks, step_fields
from engine.runner import Runner
from engine.staging import Field, Slab
from tests.staged_parts import StagedParts


@pytest.fixture(params=["inline", "cpu"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = InlineDevice() if request.param == "inline" else ThreadDevice()
    yield made
    made.close()


class TestStagedParts(StagedParts):
    """On the CPU devices."""


def test_counts_are_of_all_parts(device: Device) -> None:
    slab = Slab(InlineDevice(), [Field(name, (4,), torch.int64) for name in "abc"], (1, 1, 1))

    with pytest.raises(ValueError, match="zip"):
        slab.acquire().upload(1, 2)


def test_parts_hold_all_fields() -> None:
    with pytest.raises(AssertionError, match="all fields"):
        Slab(InlineDevice(), [Field(name, (4,), torch.int64) for name in "abc"], (1, 1))


SELDOM = "seldom"
ONE_BLOCK = NewBlocks(np.array([0]), np.array([1]), np.array([2], dtype=np.int32))


@pytest.mark.parametrize(
    ("shape", "new_rows", "new_blocks", "expected"),
    [
        ({"num_tokens": 4, "num_decode": 4}, 0, NO_NEW_BLOCKS, (4, 0, 4)),
        ({"num_tokens": 4, "num_decode": 4}, 0, ONE_BLOCK, (4, SELDOM, 4)),
        ({"num_tokens": 4, "num_decode": 4}, 6, NO_NEW_BLOCKS, (6, SELDOM, 4)),
        ({"num_tokens": 9, "num_decode": 4, "num_prefill": 1, "max_query_len": 5}, 0, NO_NEW_BLOCKS, (5, SELDOM, 9)),
        ({"num_tokens": 4, "num_decode": 4, "num_snapshots": 1}, 0, NO_NEW_BLOCKS, (4, SELDOM, 4)),
        ({"num_tokens": 12, "num_decode": 4, "decode_width": 3}, 0, NO_NEW_BLOCKS, (4, SELDOM, 12)),
    ],
    ids=["decode", "new blocks", "new rows", "prefill", "snapshots", "drafts"],
)
def test_a_step_takes_what_it_reads(
    shape: dict[str, int], new_rows: int, new_blocks: NewBlocks, expected: tuple[Any, ...]
) -> None:
    slab = Slab(InlineDevice(), *step_fields(8, 64, 16))
    made = BatchShape(**{"num_prefill": 0, "max_query_len": 0, "num_kv_blocks": 1, **shape})

    rows, seldom, tokens = Runner._counts(SimpleNamespace(step_slab=slab), made, new_rows, new_blocks)  # type: ignore[arg-type]

    assert (rows, seldom and SELDOM, tokens) == expected
    assert seldom in (0, slab.parts[1].stride // 8)
