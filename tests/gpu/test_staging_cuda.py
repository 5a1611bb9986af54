"""A step's inputs on their way to the GPU: what is copied, and what stays as it was."""

from __future__ import annotations

import pytest
import torch

from engine.device_cuda import CudaDevice
from engine.staging import Field, Slab
from tests.staged_parts import StagedParts

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> CudaDevice:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return CudaDevice()


class TestStagedParts(StagedParts):
    """On CUDA."""


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
