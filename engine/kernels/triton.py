"""The operations as Triton kernels, and cuBLAS for products of many rows. For bfloat16 and float16 on CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels import triton_elementwise as elementwise
from engine.kernels import triton_routed as routed
from engine.kernels.base import Activation, Norm, Projection
from engine.kernels.routing import RoutingRule
from engine.kernels.triton_products import (
    ARRIVALS,
    Tile,
    few_rows,
    few_rows_tile,
    one_row,
    one_row_tile,
    overlapped,
    parts_normed_tile,
    power_of_two,
)
from engine.kernels.triton_routed import relu2, swiglu
from engine.models.base import LayerCache

__all__ = ["TritonKernels", "overlapped", "power_of_two", "swiglu"]


class TritonKernels:
    """Implements :class:`engine.kernels.base.Kernels`."""

    name = "triton"

    def __init__(self) -> None:
        if torch.cuda.is_available():
            ARRIVALS.prepare(torch.device("cuda", torch.cuda.current_device()))

    def embed(self, ids_T: Tensor, table_VI: Tensor) -> Tensor:
        tokens, size = ids_T.shape[0], table_VI.shape[1]
        assert table_VI.is_contiguous(), "rows are addressed by their number"
        out_TI = torch.empty((tokens, size), dtype=table_VI.dtype, device=table_VI.device)
        block = min(1024, power_of_two(size))
        elementwise.embed_kernel[(tokens, -(-size // block))](
            ids_T, table_VI, out_TI, ids_T.stride(0), SIZE=size, BLOCK=block, num_warps=4
        )
        return out_TI

    def rms_norm(self, x_TI: Tensor, norm: Norm) -> Tensor:
        size = x_TI.shape[-1]
        out_TI = torch.empty_like(x_TI)
        block = power_of_two(size)
        warps = min(8, max(1, block // 512))
        elementwise.rms_norm_kernel[(x_TI.numel() // size,)](
            x_TI, norm.weight, out_TI, norm.eps, SIZE=size, BLOCK=block, num_warps=warps, **overlapped()
        )
        return out_TI

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        if x_TI.shape[0] > 1:
            return functional.linear(x_TI, weight_OI, bias_O)
        return one_row(x_TI, weight_OI, one_row_tile(*weight_OI.shape), bias=bias_O)

    def norm_linear(self, x_TI: Tensor, norm: Norm, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        if x_TI.shape[0] == 1:
            return one_row(x_TI, weight_OI, one_row_tile(*weight_OI.shape), norm=norm, bias=bias_O)
        few = self._normed_tile(x_TI, *weight_OI.shape)
        if few is not None:
            return few_rows(x_TI, weight_OI, few, norm=norm, bias=bias_O)
        return functional.linear(self.rms_norm(x_TI, norm), weight_OI, bias_O)

    def norm_activate(self, x_TI: Tensor, norm: Norm, up: Projection, activation: Activation) -> Tensor:
        weight_UI, is_swiglu = up.weight, activation == "swiglu"
        outputs, inputs = weight_UI.shape[0] // (2 if is_swiglu else 1), weight_UI.shape[1]
        if x_TI.shape[0] == 1:
            tile = one_row_tile(outputs, inputs, is_swiglu=is_swiglu)
            return one_row(x_TI, weight_UI, tile, norm=norm, bias=up.bias, activation=activation)
        few = self._normed_tile(x_TI, outputs, inputs, is_swiglu=is_swiglu)
        if few is not None:
            return few_rows(x_TI, weight_UI, few, norm=norm, bias=up.bias, activation=activation)
        return self.activate(functional.linear(self.rms_norm(x_TI, norm), weight_UI, up.bias), activation)

    @staticmethod
    def _normed_tile(x_TI: Tensor, outputs: int, inputs: int, *, is_swiglu: bool = False) -> Tile | None:
        """Of few rows behind a norm, which divides their product; before that float16 has no range for it."""
        if x_TI.dtype != torch.bfloat16:
            return None
        return few_rows_tile(x_TI.shape[0], outputs, inputs, is_normed=True, is_swiglu=is_swiglu)

    def linear_add(self, x_TI: Tensor, projection: Projection, residual_TO: Tensor) -> Tensor:
        weight_OI, bias_O = projection.weight, projection.bias
        rows, (outputs, inputs) = x_TI.shape[0], weight_OI.shape
        if rows == 1:
            tile = one_row_tile(outputs, inputs)
            return one_row(x_TI, weight_OI, tile, bias=bias_O, residual=residual_TO, out=residual_TO)
        few = few_rows_tile(rows, outputs, inputs)
        if few is not None:
            return few_rows(x_TI, weight_OI, few, bias=bias_O, residual=residual_TO, out=residual_TO)
        if bias_O is not None:
            residual_TO.add_(bias_O)
        return residual_TO.addmm_(x_TI, weight_OI.t())  # the product's own accumulator adds it: one rounding, one pass

    def norms_parts(self, rows: int, projection: Projection, num_parts: int) -> bool:
        outputs, inputs = projection.weight.shape
        is_bfloat16 = projection.weight.dtype == torch.bfloat16
        return is_bfloat16 and parts_normed_tile(rows, outputs, inputs, num_parts) is not None

    def parts_norm_linear_add(
        self, x_TI: Tensor, norm: Norm, num_parts: int, projection: Projection, residual_TO: Tensor
    ) -> Tensor:
        outputs, inputs = projection.weight.shape
        tile = parts_normed_tile(x_TI.shape[0], outputs, inputs, num_parts)
        assert tile is not None, "norms_parts has not been asked"
        around: Any = {"norm": norm, "num_parts": num_parts, "bias": projection.bias}
        return few_rows(x_TI, projection.weight, tile, residual=residual_TO, out=residual_TO, **around)

    def rotation_tables(
        self, positions_T: Tensor, frequencies: Tensor, attention_factor: float
    ) -> tuple[Tensor, Tensor]:
        half = frequencies.shape[0]
        tables = torch.empty((2, positions_T.shape[0], 1, half), dtype=torch.float32, device=positions_T.device)
        cos, sin = tables[0], tables[1]
        elementwise.rotation_tables_kernel[(positions_T.shape[0],)](
            positions_T,
            frequencies,
            cos,
            sin,
            attention_factor,
            HALF=half,
            BLOCK=power_of_two(half),
            num_warps=1,
            **overlapped(),
        )
        return cos, sin

    def rotate_and_append(
        self,
        qkv_TYD: Tensor,
        head_norms: tuple[Norm, Norm] | None,
        tables: tuple[Tensor, Tensor],
        cache: LayerCache,
        slots_T: Tensor,
    ) -> Tensor:
        tokens, all_heads, head_dim = qkv_TYD.shape
        kv_heads = cache[0].shape[2]
        heads = all_heads - 2 * kv_heads
        assert qkv_TYD.is_contiguous(), "heads are addressed by their place in a contiguous tensor"
        q_THD = torch.empty((tokens, heads, head_dim), dtype=qkv_TYD.dtype, device=qkv_TYD.device)
        q_norm, k_norm = head_norms or (None, None)
        block = 8
        elementwise.rotate_and_append_kernel[(tokens, -(-all_heads // block))](
            qkv_TYD,
            q_norm.weight if q_norm else None,
            k_norm.weight if k_norm else None,
            q_norm.eps if q_norm else 0.0,
            k_norm.eps if k_norm else 0.0,
            *tables,
            slots_T,
            q_THD,
            *cache,
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            TURNED=tables[0].shape[-1],
            HAS_NORM=head_norms is not None,
            BLOCK_Y=block,
            BLOCK_HALF=power_of_two(head_dim // 2),
            num_warps=4,
            **overlapped(),
        )
        return q_THD

    def activate(self, x_TU: Tensor, activation: Activation) -> Tensor:
        return swiglu(x_TU) if activation == "swiglu" else relu2(x_TU)

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
        return routed.experts(x_TI, ids_TK, weights_TK, up_XUI, down_XIF, activation)
