"""A step's inputs on their way to the device: what is copied, and what stays as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.device import Device
from engine.device_host import InlineDevice, ThreadDevice
from engine.staging import Field, Slab
from tests.staged_parts import COUNTS, check_everything_arrives, check_parts_arrive


@pytest.fixture(params=["inline", "cpu"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    made = InlineDevice() if request.param == "inline" else ThreadDevice()
    yield made
    made.close()


@pytest.mark.parametrize(("rows", "has_seldom", "tokens"), COUNTS)
@pytest.mark.parametrize("decode_width", [1, 3])
def test_what_is_counted_arrives_and_nothing_else(
    device: Device, rows: int, has_seldom: bool, tokens: int, decode_width: int
) -> None:
    check_parts_arrive(device, rows, has_seldom, tokens, decode_width)


def test_without_counts_everything_arrives(device: Device) -> None:
    check_everything_arrives(device)


def test_counts_are_of_all_parts(device: Device) -> None:
    slab = Slab(InlineDevice(), [Field(name, (4,), torch.int64) for name in "abc"], (1, 1, 1))

    with pytest.raises(ValueError, match="zip"):
        slab.acquire().upload(1, 2)


def test_parts_hold_all_fields() -> None:
    with pytest.raises(AssertionError, match="all fields"):
        Slab(InlineDevice(), [Field(name, (4,), torch.int64) for name in "abc"], (1, 1))
