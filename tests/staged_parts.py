"""What arrives on a device of a slab that is copied in parts, on any device."""

from __future__ import annotations

import numpy as np
import pytest

from engine.device import Device
from engine.plan import step_fields
from engine.staging import Slab

COUNTS = [(0, 0, 0), (1, 0, 1), (8, 0, 8), (64, 1, 4096), (63, 1, 513), (0, 1, 512), (5, 0, 511)]
"""Rows, whether the seldom used part is wanted, and tokens; a block of the CUDA kernel is a power of two."""


def check_parts_arrive(
    device: Device,
    rows: int,
    has_seldom: bool,
    tokens: int,
    decode_width: int = 1,
    limits: tuple[int, int] = (64, 4096),
) -> None:
    """What is counted arrives, and nothing else of the device's fields changes; ``limits`` are of rows and tokens."""
    fields, sizes = step_fields(*limits, 16, decode_width)
    slab = Slab(device, fields, sizes)
    device.compute.launch(lambda: slab.device_tensor.fill_(0xEE))
    half = slab.acquire()
    generator = np.random.default_rng(0)
    for column in half.fields.values():
        column[...] = generator.integers(0, 1 << 30, column.shape)
    seldom = slab.parts[1].stride // 8 if has_seldom else 0

    device.compute.launch(lambda: half.upload(rows, seldom, tokens))
    half.copied = device.compute.record()
    half.copied.wait()

    counts = [rows] * sizes[0] + [None if has_seldom else 0] * sizes[1] + [tokens] * sizes[2]
    for field, count in zip(fields, counts, strict=True):
        arrived, staged = slab.device_fields[field.name].cpu().numpy(), half.fields[field.name]
        assert np.array_equal(arrived[:count], staged[:count]), field.name
        assert count is None or (arrived[count:].view(np.uint8) == 0xEE).all(), field.name


def check_everything_arrives(device: Device) -> None:
    """Of a copy that counts nothing."""
    fields, sizes = step_fields(7, 100, 16, 3)
    slab = Slab(device, fields, sizes)
    half = slab.acquire()
    for number, column in enumerate(half.fields.values()):
        column[...] = number + 1

    device.compute.launch(half.upload)
    half.copied = device.compute.record()
    half.copied.wait()

    for name, staged in half.fields.items():
        assert np.array_equal(slab.device_fields[name].cpu().numpy(), staged), name


class StagedParts:
    """Tests for files that have a fixture ``device``."""

    @pytest.mark.parametrize(("rows", "has_seldom", "tokens"), COUNTS)
    @pytest.mark.parametrize("decode_width", [1, 3])
    def test_what_is_counted_arrives_and_nothing_else(
        self, device: Device, rows: int, has_seldom: bool, tokens: int, decode_width: int
    ) -> None:
        check_parts_arrive(device, rows, has_seldom, tokens, decode_width)

    @pytest.mark.parametrize("decode_width", [1, 3])
    def test_fields_of_odd_sizes_arrive_too(self, device: Device, decode_width: int) -> None:
        check_parts_arrive(device, 7, True, 101, decode_width, limits=(7, 101))
        check_parts_arrive(device, 3, False, 9, decode_width, limits=(7, 101))

    def test_without_counts_everything_arrives(self, device: Device) -> None:
        check_everything_arrives(device)
