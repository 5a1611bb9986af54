"""The operations in plain torch: the reference, on every device and in every float type."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels.base import Norm, Projection
from engine.models.base import LayerCache
from engine.models.rope import rotate, rotation_tables


class TorchKernels:
    """Implements :class:`engine.kernels.base.Kernels`."""

    name = "torch"

    def rms_norm(self, x_TI: Tensor, norm: Norm) -> Tensor:
        """In bfloat16 transformers rounds once more, before the weight; the difference is one rounding step."""
        return functional.rms_norm(x_TI, norm.weight.shape, norm.weight, norm.eps)

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return functional.linear(x_TI, weight_OI, bias_O)

    def norm_linear(self, x_TI: Tensor, norm: Norm, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return functional.linear(self.rms_norm(x_TI, norm), weight_OI, bias_O)

    def norm_swiglu(self, x_TI: Tensor, norm: Norm, gate_up: Projection) -> Tensor:
        gate_TF, up_TF = self.norm_linear(x_TI, norm, gate_up.weight, gate_up.bias).chunk(2, dim=-1)
        return functional.silu(gate_TF) * up_TF

    def linear_add(self, x_TI: Tensor, projection: Projection, residual_TO: Tensor) -> Tensor:
        return residual_TO + functional.linear(x_TI, projection.weight, projection.bias)

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


def append(cache: LayerCache, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> None:
    """Write this step's keys and values, each [T, G, D], to their cache entries."""
    for tensor, new in zip(cache, (k_TGD, v_TGD), strict=True):
        assert tensor.is_contiguous(), "a cache tensor must be contiguous, or writes would go to a copy"
        torch.flatten(tensor, 0, 1).index_copy_(0, slots_T, new)
