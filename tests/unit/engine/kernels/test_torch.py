"""The reference operations against arithmetic written out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.kernels import Activation, TorchKernels


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_a_projection_is_activated_behind_its_norm(activation: Activation, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, gain = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((5, 6), (8, 6), (6,))
    )
    shift = torch.randn(8, generator=generator, dtype=torch.float64) if bias else None
    norm, up = SimpleNamespace(weight=gain, eps=1e-3), SimpleNamespace(weight=weight, bias=shift)

    found = TorchKernels().norm_activate(x, norm, up, activation)

    for row in range(5):
        normed = x[row] / (x[row].square().mean() + 1e-3).sqrt() * gain
        inner = weight @ normed + (0.0 if shift is None else shift)
        if activation == "swiglu":
            expected = inner[:4] / (1.0 + torch.exp(-inner[:4])) * inner[4:]
        else:
            expected = torch.where(inner > 0.0, inner * inner, torch.zeros_like(inner))
        torch.testing.assert_close(found[row], expected)


def test_a_square_keeps_what_is_not_a_number() -> None:
    odd = torch.tensor([[float("nan"), -1.0, 2.0]])

    found = TorchKernels().activate(odd, "relu2")

    assert found[0, 0].isnan()
    assert found[0, 1:].tolist() == [0.0, 4.0]
