"""The operations as Triton kernels, and cuBLAS for products of many rows. For bfloat16 and float16 on CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.kernels import triton_elementwise as elementwise
from engine.kernels import triton_linear
from engine.kernels.base import Norm, Projection
from engine.models.base import LayerCache


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product of one row is cut into programs."""

    block_n: int
    """Outputs of one program."""
    block_k: int
    """Inputs of one pass of its loop."""
    num_warps: int


def tile_for(rows: int, outputs: int, inputs: int, *, is_swiglu: bool = False) -> Tile | None:
    """The tile that was fastest on an H200 (``benchmarks/gpu_kernels.py``); None: cuBLAS was.

    Args:
        rows: Of the activations.
        outputs: Of the product; F for SwiGLU, whose matrix has 2 F rows.
        inputs: Columns of the weight matrix.
        is_swiglu: Whether a program reads two rows of the matrix for each output.
    """
    if rows > 1:
        return None
    if is_large(outputs * (2 if is_swiglu else 1) * inputs):
        return Tile(block_n=2 if is_swiglu else 4, block_k=2048 if inputs >= 4096 else 1024, num_warps=8)
    if inputs <= 1024:
        return Tile(block_n=4, block_k=512, num_warps=4)
    if inputs < 4096:
        return Tile(block_n=8, block_k=2048, num_warps=8)
    return Tile(block_n=8, block_k=1024, num_warps=4)


def is_large(num_weights: int) -> bool:
    """Whether a product takes so long that starting it early only costs."""
    return num_weights >= 1 << 26


class TritonKernels:
    """Implements :class:`engine.kernels.base.Kernels`."""

    name = "triton"

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
        tile = tile_for(x_TI.shape[0], *weight_OI.shape)
        if tile is None:
            return functional.linear(x_TI, weight_OI, bias_O)
        return one_row(x_TI, weight_OI, tile, bias=bias_O)

    def norm_linear(self, x_TI: Tensor, norm: Norm, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        tile = tile_for(x_TI.shape[0], *weight_OI.shape)
        if tile is None:
            return functional.linear(self.rms_norm(x_TI, norm), weight_OI, bias_O)
        return one_row(x_TI, weight_OI, tile, norm=norm, bias=bias_O)

    def norm_swiglu(self, x_TI: Tensor, norm: Norm, gate_up: Projection) -> Tensor:
        size = gate_up.weight.shape[0] // 2
        tile = tile_for(x_TI.shape[0], size, gate_up.weight.shape[1], is_swiglu=True)
        if tile is not None:
            return one_row(x_TI, gate_up.weight, tile, norm=norm, bias=gate_up.bias, is_swiglu=True)
        return swiglu(functional.linear(self.rms_norm(x_TI, norm), gate_up.weight, gate_up.bias))

    def linear_add(self, x_TI: Tensor, projection: Projection, residual_TO: Tensor) -> Tensor:
        weight_OI, bias_O = projection.weight, projection.bias
        tile = tile_for(x_TI.shape[0], *weight_OI.shape)
        if tile is not None:
            return one_row(x_TI, weight_OI, tile, bias=bias_O, residual=residual_TO, out=residual_TO)
        if bias_O is not None:
            residual_TO.add_(bias_O)
        return residual_TO.addmm_(x_TI, weight_OI.t())  # the product's own accumulator adds it: one rounding, one pass

    def rotation_tables(
        self, positions_T: Tensor, frequencies: Tensor, attention_factor: float
    ) -> tuple[Tensor, Tensor]:
        half = frequencies.shape[0]
        tables = torch.empty((2, positions_T.shape[0], 1, half), dtype=torch.float32, device=positions_T.device)
        cos, sin = tables[0], tables[1]
        elementwise.rotation_tables_kernel[(positions_T.shape[0],)](
            positions_T, frequencies, cos, sin, attention_factor, HALF=half, BLOCK=power_of_two(half), num_warps=1
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
            HAS_NORM=head_norms is not None,
            BLOCK_Y=block,
            BLOCK_HALF=power_of_two(head_dim // 2),
            num_warps=4,
            **overlapped(),
        )
        return q_THD


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of the columns times the second half; [T, 2 F] to [T, F]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out_TF = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    elementwise.swiglu_kernel[(rows, -(-size // block))](
        gate_up, out_TF, SIZE=size, BLOCK=block, num_warps=4, **overlapped()
    )
    return out_TF


def one_row(
    x_TI: Tensor,
    weight_OI: Tensor,
    tile: Tile,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    is_swiglu: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A product that reads the weights once, with what goes before and after it; see ``triton_linear.py``."""
    inputs = x_TI.shape[1]
    outputs = weight_OI.shape[0] // 2 if is_swiglu else weight_OI.shape[0]
    assert x_TI.shape[0] == 1, f"one row, got {x_TI.shape[0]}"
    if out is None:
        out = torch.empty((1, outputs), dtype=x_TI.dtype, device=x_TI.device)
    parts = {"norm": norm is not None, "bias": bias is not None, "residual": residual is not None}
    triton_linear.one_row_kernel[(-(-outputs // tile.block_n),)](
        x_TI,
        weight_OI,
        bias,
        norm.weight if norm else None,
        residual,
        out,
        norm.eps if norm else 0.0,
        outputs,
        **product_options(tile, outputs, inputs, is_swiglu=is_swiglu, **parts),
    )
    return out


def product_options(
    tile: Tile, outputs: int, inputs: int, *, norm: bool, bias: bool, residual: bool, is_swiglu: bool
) -> dict[str, Any]:
    """Compile-time constants of a product of one row."""
    return {
        "INPUTS": inputs,
        "HAS_NORM": norm,
        "HAS_BIAS": bias,
        "HAS_RESIDUAL": residual,
        "IS_SWIGLU": is_swiglu,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": 1,
        **(NOT_OVERLAPPED if is_large(outputs * (2 if is_swiglu else 1) * inputs) else overlapped()),
    }


NOT_OVERLAPPED = {"USE_PDL": False, "launch_pdl": False}


@cache
def overlapped() -> dict[str, bool]:
    """Options that let a kernel start while the one before it ends (programmatic dependent launch, from Hopper on)."""
    can = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"USE_PDL": can, "launch_pdl": can}


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below ``size``."""
    return 1 << (size - 1).bit_length()
