"""Parts that models are put together from: parameters without values, and where a checkpoint's tensors go.

Letters: T tokens, E hidden size, F feed-forward size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from engine.kernels import Kernels


class Placement(TypedDict):
    """Of every parameter of a model."""

    dtype: torch.dtype
    device: torch.device


def empty(*shape: int, **placement: Unpack[Placement]) -> nn.Parameter:
    """A parameter without values, which takes no gradient."""
    return nn.Parameter(torch.empty(shape, **placement), requires_grad=False)


class Linear(nn.Module):
    """x W^T + b. Unlike ``nn.Linear`` it starts uninitialised: every value comes from a checkpoint or a generator."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.weight = empty(outputs, inputs, **placement)
        self.bias = empty(outputs, **placement) if bias else None


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.weight = empty(size, **placement)
        self.eps = eps


class FeedForward(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(
        self, hidden_size: int, inner_size: int, kernels: Kernels, *, bias: bool, **placement: Unpack[Placement]
    ) -> None:
        super().__init__()
        self.kernels = kernels
        self.gate_up = Linear(hidden_size, 2 * inner_size, bias=bias, **placement)
        self.down = Linear(inner_size, hidden_size, bias=bias, **placement)

    def forward(self, x_TE: Tensor, norm: RMSNorm) -> Tensor:
        """``x`` plus the feed-forward of ``norm`` of x."""
        inner_TF = self.kernels.norm_activate(x_TE, norm, self.gate_up, "swiglu")
        return self.kernels.linear_add(inner_TF, self.down, x_TE)

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Where each checkpoint tensor goes."""
        hidden, inner = self.down.weight.shape
        return {
            **split_targets(self.gate_up, [inner, inner], [f"{prefix}.gate_proj", f"{prefix}.up_proj"]),
            **split_targets(self.down, [hidden], [f"{prefix}.down_proj"]),
        }


def split_targets(linear: Linear, rows: Sequence[int], names: Sequence[str]) -> dict[str, Tensor]:
    """Where the tensors of several projections go that are rows of ``linear``: ``rows[i]`` of them are ``names[i]``."""
    found = dict(zip((f"{name}.weight" for name in names), linear.weight.data.split(list(rows)), strict=True))
    if linear.bias is not None:
        found.update(zip((f"{name}.bias" for name in names), linear.bias.data.split(list(rows)), strict=True))
    return found
