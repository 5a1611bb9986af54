"""The operations in plain torch: the reference, on every device and in every float type."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.base import Activation, Norm, Projection
from engine.kernels.experts import experts_in_blocks
from engine.kernels.routing import RoutingRule, route
from engine.models.base import LayerCache
from engine.models.rope import rotate, rotation_tables


class TorchKernels:
    """Implements :class:`engine.kernels.base.Kernels`."""

    name = "torch"

    def embed(self, ids_T: Tensor, table_VI: Tensor) -> Tensor:
        return functional.embedding(ids_T, table_VI)

    def rms_norm(self, x_TI: Tensor, norm: Norm) -> Tensor:
        """In bfloat16 transformers rounds once more, before the weight; the difference is one rounding step."""
        return functional.rms_norm(x_TI, norm.weight.shape, norm.weight, norm.eps)

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return functional.linear(x_TI, weight_OI, bias_O)

    def norm_linear(self, x_TI: Tensor, norm: Norm, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return functional.linear(self.rms_norm(x_TI, norm), weight_OI, bias_O)

    def norm_activate(self, x_TI: Tensor, norm: Norm, up: Projection, activation: Activation) -> Tensor:
        return self.activate(self.norm_linear(x_TI, norm, up.weight, up.bias), activation)

    def linear_add(self, x_TI: Tensor, projection: Projection, residual_TO: Tensor) -> Tensor:
        return residual_TO + functional.linear(x_TI, projection.weight, projection.bias)

    def norms_parts(self, rows: int, projection: Projection, num_parts: int) -> bool:
        return False

    def parts_norm_linear_add(
        self, x_TI: Tensor, norm: Norm, num_parts: int, projection: Projection, residual_TO: Tensor
    ) -> Tensor:
        normed_TI = functional.rms_norm(parts := x_TI.unflatten(1, (num_parts, -1)), parts.shape[2:], eps=norm.eps)
        return self.linear_add(normed_TI.flatten(1) * norm.weight, projection, residual_TO)

    def rotation_tables(
        self, positions_T: Tensor, frequencies: Tensor, attention_factor: float
    ) -> tuple[Tensor, Tensor]:
        return rotation_tables(positions_T, frequencies, attention_factor)

    def rotate_and_append(
        self,
        qkv_TYD: Tensor,
        head_norms: tuple[Norm, Norm] | None,
        tables: tuple[Tensor, Tensor],
        cache: LayerCache,
        slots_T: Tensor,
    ) -> Tensor:
        kv_heads = cache[0].shape[2]
        heads = qkv_TYD.shape[1] - 2 * kv_heads
        q_THD: Tensor
        qk_TYD, v_TGD = qkv_TYD.split((heads + kv_heads, kv_heads), dim=1)
        if head_norms is None:
            q_THD, k_TGD = rotate(qk_TYD, *tables).split((heads, kv_heads), dim=1)
        else:
            q_THD, k_TGD = qk_TYD.split((heads, kv_heads), dim=1)
            q_THD = rotate(self.rms_norm(q_THD, head_norms[0]), *tables)
            k_TGD = rotate(self.rms_norm(k_TGD, head_norms[1]), *tables)
        append(cache, k_TGD, v_TGD, slots_T)
        return q_THD

    def activate(self, x_TU: Tensor, activation: Activation) -> Tensor:
        return swiglu(x_TU) if activation == "swiglu" else relu2(x_TU)

    def route(self, score_TX: Tensor, bias_X: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
        return route(score_TX, bias_X, rule)

    def experts(
        self,
        x_TI: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        up_XUI: Tensor,
        down_XIF: Tensor,
        activation: Activation,
    ) -> Tensor:
        activate = swiglu if activation == "swiglu" else relu2
        return experts_in_blocks(x_TI, ids_TK, weights_TK, up_XUI, down_XIF, activate)


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension times the second half."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def relu2(x: Tensor) -> Tensor:
    """The square of what is positive."""
    return functional.relu(x).square()


def append(cache: LayerCache, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> None:
    """Write this step's keys and values, each [T, G, D], to their cache entries."""
    for tensor, new in zip(cache, (k_TGD, v_TGD), strict=True):
        assert tensor.is_contiguous(), "a cache tensor must be contiguous, or writes would go to a copy"
        torch.flatten(tensor, 0, 1).index_copy_(0, slots_T, new)
