"""A step's inputs on their way to the GPU: what is copied, and what stays as it was."""

from __future__ import annotations

import pytest
import torch

from engine.device_cuda import CudaDevice
from engine.staging import Field, Slab
from tests.staged_parts import COUNTS, check_everything_arrives, check_parts_arrive

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> CudaDevice:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return CudaDevice()


@pytest.mark.parametrize(("rows", "has_seldom", "tokens"), COUNTS)
@pytest.mark.parametrize("decode_width", [1, 3])
def test_what_is_counted_arrives_and_nothing_else(
    device: CudaDevice, rows: int, has_seldom: bool, tokens: int, decode_width: int
) -> None:
    check_parts_arrive(device, rows, has_seldom, tokens, decode_width)


@pytest.mark.parametrize("decode_width", [1, 3])
def test_fields_of_odd_sizes_arrive_too(device: CudaDevice, decode_width: int) -> None:
    check_parts_arrive(device, 7, True, 101, decode_width, limits=(7, 101))
    check_parts_arrive(device, 3, False, 9, decode_width, limits=(7, 101))


def test_without_counts_everything_arrives(device: CudaDevice) -> None:
    check_everything_arrives(device)


def test_what_the_host_wrote_last_is_what_arrives(device: CudaDevice) -> None:
    """The kernel reads host memory: no cache may give it what was there a step ago."""
    slab = Slab(device, [Field("row", (1000,), torch.int64)])
    found: list[torch.Tensor] = []

    for step in range(200):
        half = slab.acquire()
        half.fields["row"][:] = step
        device.compute.launch(half.upload)
        half.copied = device.compute.record()
        device.compute.launch(lambda: found.append(slab.device_fields["row"].clone()))
    device.synchronize()

    assert [each.unique().tolist() for each in found] == [[step] for step in range(200)]
