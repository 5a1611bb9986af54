"""The operations by FlashInfer's kernels, and cuBLAS for the products. For bfloat16 and float16 on CUDA.

Letters as in ``base.py``. Where FlashInfer has no kernel of a size, plain torch computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from flashinfer.activation import silu_and_mul
from flashinfer.norm import rmsnorm
from flashinfer.page import append_paged_kv_cache
from flashinfer.rope import apply_rope_with_cos_sin_cache, apply_rope_with_cos_sin_cache_inplace
from torch import Tensor

from engine.kernels import triton_routed as routed
from engine.kernels.base import Activation, Norm, Projection
from engine.kernels.routing import RoutingRule
from engine.kernels.torch import TorchKernels
from engine.models.base import LayerCache

HEAD_DIMS = (64, 128, 256, 512)
"""That rotation and append are written for."""
_VECTOR = 8
"""Elements that SiLU-mul reads at once; rows must begin at a multiple."""


@dataclass(frozen=True, slots=True, eq=False)
class _Tokens:
    """Index tensors that the layers of one forward share."""

    tables: tuple[Tensor, Tensor]
    slots_T: Tensor
    cos_sin_TD: Tensor
    """Cosines, then sines of each token; float32."""
    token_T: Tensor
    """0 to T - 1, int32: a token's row in ``cos_sin_TD``."""
    slot_T: Tensor
    """``slots_T`` in int32."""
    zeros: Tensor
    """[max(T, 2)] int32."""
    met: set[int] = field(default_factory=set)
    """Addresses of the caches of the layers that have run."""

    @classmethod
    def of(cls, tables: tuple[Tensor, Tensor], slots_T: Tensor) -> _Tokens:
        count, device = slots_T.shape[0], slots_T.device
        return cls(
            tables=tables,
            slots_T=slots_T,
            cos_sin_TD=torch.cat(tables, dim=-1).flatten(1),
            token_T=torch.arange(count, dtype=torch.int32, device=device),
            slot_T=slots_T.to(torch.int32),
            zeros=torch.zeros(max(count, 2), dtype=torch.int32, device=device),
        )


class FlashInferKernels(TorchKernels):
    """Implements :class:`engine.kernels.base.Kernels`."""

    name = "flashinfer"

    def __init__(self) -> None:
        self._tokens: _Tokens | None = None

    def rms_norm(self, x_TI: Tensor, norm: Norm) -> Tensor:
        normed_TI: Tensor = rmsnorm(x_TI, norm.weight, norm.eps)
        return normed_TI

    def linear_add(self, x_TI: Tensor, projection: Projection, residual_TO: Tensor) -> Tensor:
        if projection.bias is not None:
            residual_TO.add_(projection.bias)
        return residual_TO.addmm_(x_TI, projection.weight.t())  # one rounding where a product and a sum have two

    def rotate_and_append(
        self,
        qkv_TYD: Tensor,
        head_norms: tuple[Norm, Norm] | None,
        tables: tuple[Tensor, Tensor],
        cache: LayerCache,
        slots_T: Tensor,
    ) -> Tensor:
        head_dim, kv_heads = qkv_TYD.shape[2], cache[0].shape[2]
        if head_dim not in HEAD_DIMS or 2 * tables[0].shape[-1] != head_dim:
            return super().rotate_and_append(qkv_TYD, head_norms, tables, cache, slots_T)
        q_THD: Tensor
        tokens = self._tokens_of(tables, slots_T, cache)
        heads = qkv_TYD.shape[1] - 2 * kv_heads
        q_THD, k_TGD, v_TGD = qkv_TYD.split((heads, kv_heads, kv_heads), dim=1)
        rotation = (head_dim, tokens.cos_sin_TD)
        if head_norms is None:
            q_THD, k_TGD = apply_rope_with_cos_sin_cache(tokens.token_T, q_THD, k_TGD, *rotation)
        else:
            q_THD, k_TGD = self.rms_norm(q_THD, head_norms[0]), self.rms_norm(k_TGD, head_norms[1])
            apply_rope_with_cos_sin_cache_inplace(tokens.token_T, q_THD, k_TGD, *rotation)
        _append(cache, k_TGD, v_TGD, tokens)
        return q_THD

    def activate(self, x_TU: Tensor, activation: Activation) -> Tensor:
        if activation == "relu2":
            return routed.relu2(x_TU)
        if x_TU.shape[-1] // 2 % _VECTOR:
            return super().activate(x_TU, activation)
        out_TF: Tensor = silu_and_mul(x_TU)
        return out_TF

    def route(self, score_TX: Tensor, bias_X: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
        return routed.route(score_TX, bias_X, rule)

    def experts(
        self,
        x_TI: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        up_XUI: Tensor,
        down_XIF: Tensor,
        activation: Activation,
    ) -> Tensor:
        """By the Triton kernels and torch's grouped product: FlashInfer's need their weights in other orders."""
        return routed.experts(x_TI, ids_TK, weights_TK, up_XUI, down_XIF, activation)

    def _tokens_of(self, tables: tuple[Tensor, Tensor], slots_T: Tensor, cache: LayerCache) -> _Tokens:
        """The index tensors of this forward, made by its first layer.

        The same tensors may hold new contents in the next forward. A forward uses each layer's cache once, so a cache
        that was met before marks the next one.
        """
        tokens, key = self._tokens, cache[0].data_ptr()
        if tokens is None or tokens.tables is not tables or tokens.slots_T is not slots_T or key in tokens.met:
            tokens = self._tokens = _Tokens.of(tables, slots_T)
        tokens.met.add(key)
        return tokens


def _append(cache: LayerCache, k_TGD: Tensor, v_TGD: Tensor, tokens: _Tokens) -> None:
    """Write keys and values to their slots.

    FlashInfer's append finds a slot by row, position and lists of blocks, which only the host could make. So it is
    told of one row in one block that holds the whole cache: there a position is a slot, and every list is zeros.
    """
    assert all(tensor.is_contiguous() for tensor in cache), "a slot is a place in a contiguous cache"
    keys, values = (torch.flatten(tensor, 0, 1)[None] for tensor in cache)
    zeros = tokens.zeros
    append_paged_kv_cache(
        k_TGD,
        v_TGD,
        batch_indices=zeros[: k_TGD.shape[0]],
        positions=tokens.slot_T,
        paged_kv_cache=(keys, values),
        kv_indices=zeros[:1],
        kv_indptr=zeros[:2],
        kv_last_page_len=zeros[:1],
    )
