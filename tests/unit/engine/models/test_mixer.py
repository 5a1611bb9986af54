"""A Mamba2 mixer that is added to the stream: in two steps, and with the norm of its groups in the last projection."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.kernels import TorchKernels
from engine.kernels.base import Norm, Projection
from engine.models.mamba2 import Mamba2Mixer, MixerConfig
from engine.models.parts import RMSNorm
from engine.ssm import TorchStateSpace
from tests.ssm_batches import Row, Sizes, packed

CONFIG = MixerConfig(hidden_size=24, num_heads=4, head_dim=6, num_groups=2, state_size=8)
SIZES = Sizes(heads=4, head_dim=6, groups=2, state=8)


class NormsGroups(TorchKernels):
    """Kernels that say of ``groups`` that they norm them, and count how often they are made to."""

    def __init__(self, groups: int) -> None:
        self.groups, self.num_calls = groups, 0

    def norms_parts(self, rows: int, projection: Projection, num_parts: int) -> bool:
        return num_parts == self.groups

    def parts_norm_linear_add(
        self, x_TI: Tensor, norm: Norm, num_parts: int, projection: Projection, residual_TO: Tensor
    ) -> Tensor:
        self.num_calls += 1
        return super().parts_norm_linear_add(x_TI, norm, num_parts, projection, residual_TO)


def mixer_with(kernels: TorchKernels) -> tuple[Mamba2Mixer, RMSNorm]:
    """Random weights, the same ones each time."""
    torch.manual_seed(0)
    placement = {"dtype": torch.float64, "device": torch.device("cpu")}
    mixer, norm = Mamba2Mixer(CONFIG, TorchStateSpace(), kernels, **placement), RMSNorm(24, 1e-5, **placement)
    for parameter in (*mixer.parameters(), *norm.parameters()):
        parameter.data.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.3)
    return mixer, norm


@pytest.mark.parametrize(
    ("rows", "is_fused"),
    [
        ([Row(1, 0, 0, is_decode=True), Row(1, 2, 2, is_decode=True)], True),
        ([Row(1, 0, 0, is_decode=True), Row(5, 2, 3)], False),
    ],
    ids=["decode", "mixed"],
)
def test_decode_rows_leave_the_norm_to_kernels_that_take_it(rows: list[Row], is_fused: bool) -> None:
    batch, kernels = packed(rows, SIZES), NormsGroups(2)
    x_TE = torch.randn(batch.shape.num_tokens, 24, dtype=torch.float64)
    found = []
    for each in (TorchKernels(), kernels):
        torch.manual_seed(1)
        cache = tuple(
            torch.randn(SIZES.slots + 1, *shape, dtype=torch.float64)
            for shape in CONFIG.slot_state(torch.float64).shapes
        )
        mixer, norm = mixer_with(each)
        with torch.inference_mode():
            found.append((mixer.add_to(x_TE.clone(), norm, batch, cache), *cache))

    assert kernels.num_calls == is_fused
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-13, rtol=0.0)


def test_kernels_without_that_norm_are_not_asked_for_it() -> None:
    batch, kernels = packed([Row(1, 0, 0, is_decode=True)], SIZES), NormsGroups(3)
    mixer, norm = mixer_with(kernels)
    cache = tuple(
        torch.zeros(SIZES.slots + 1, *shape, dtype=torch.float64) for shape in CONFIG.slot_state(torch.float64).shapes
    )

    with torch.inference_mode():
        mixer.add_to(torch.randn(1, 24, dtype=torch.float64), norm, batch, cache)

    assert kernels.num_calls == 0
