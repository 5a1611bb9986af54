"""How products of 1 to 32 rows with a weight matrix are cut into programs and launched. For CUDA.

Letters: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.kernels import triton_few_rows, triton_linear
from engine.kernels.base import Activation, Norm


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut into programs. Stages and splits are for products of a few rows only."""

    block_n: int
    """Outputs of one program."""
    block_k: int
    """Inputs of one pass of its loop."""
    num_warps: int
    num_stages: int = 1
    """Passes whose loads are in flight, and one more."""
    splits: int = 1
    """Programs that share the inputs of an output; a second kernel adds their sums."""
    prefetch: int = 0
    """Weights of an output that a program has read into the L2 cache while the kernel before still runs. Of a product
    of one row: behind those of the first pass, which it then holds in registers."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Products of a few rows that are cut alike; limits belong to the range."""

    tile: Tile
    most_rows: int = 16
    least_outputs: int = 1
    most_outputs: int = 4096
    least_inputs: int = 1

    def fits(self, rows: int, outputs: int, inputs: int) -> bool:
        """Whether a product is one of them."""
        is_wide = self.least_outputs <= outputs <= self.most_outputs
        return rows <= self.most_rows and is_wide and inputs >= self.least_inputs


MOST_ROWS = 32
"""That the kernel for a few rows is written for."""
WHOLE = Tile(block_n=16, block_k=256, num_warps=4, num_stages=6, prefetch=1024)
HALVED = Tile(block_n=16, block_k=256, num_warps=4, num_stages=6, splits=2, prefetch=4096)
WIDE = Tile(block_n=32, block_k=256, num_warps=4, num_stages=4, prefetch=1024)
ADDED = (Cut(HALVED, most_outputs=1536, least_inputs=2049), Cut(WHOLE))
"""Of products that are added to the residual; the first that fits counts. All others are left to cuBLAS, whose cuts
leave most multiprocessors without work where there are few outputs."""
NORMED = (Cut(WIDE, least_outputs=8192, most_outputs=12288, least_inputs=3072),)
"""The same of those behind a norm. A program a multiprocessor, 128 outputs each, is what cuBLAS has for more."""


def one_row_tile(outputs: int, inputs: int, *, is_swiglu: bool = False) -> Tile:
    """The tile that was fastest on an H200 (``benchmarks/gpu_products.py``) for a product of one row.

    Args:
        outputs: Of the product; F for SwiGLU, whose matrix has 2 F rows.
        inputs: Columns of the weight matrix.
        is_swiglu: Whether a program reads two rows of the matrix for each output.
    """
    if is_large(outputs * (2 if is_swiglu else 1) * inputs):
        return Tile(block_n=2 if is_swiglu else 4, block_k=2048 if inputs >= 4096 else 1024, num_warps=8)
    if inputs <= 1024:
        return Tile(block_n=4, block_k=512, num_warps=4)
    if inputs < 2048:
        return Tile(block_n=8, block_k=2048, num_warps=8)
    if inputs < 4096:
        return Tile(16, 1024, 8) if inputs < 3072 else Tile(2, 1024, 4)
    if inputs > 8192 and outputs < 4096:
        return Tile(block_n=4, block_k=2048, num_warps=4)
    return Tile(block_n=8, block_k=1024, num_warps=4)


def few_rows_tile(rows: int, outputs: int, inputs: int, *, is_normed: bool = False) -> Tile | None:
    """The same for 2 rows and more; None: cuBLAS was faster. SwiGLU is always left to it.

    Args:
        rows: Of the product.
        outputs: Of the product.
        inputs: Columns of the weight matrix.
        is_normed: Whether a norm comes before it, else it is added to the residual.
    """
    cuts = NORMED if is_normed else ADDED
    return next((cut.tile for cut in cuts if cut.fits(rows, outputs, inputs)), None)


def is_large(num_weights: int) -> bool:
    """Whether a product takes so long that starting it early only costs."""
    return num_weights >= 1 << 26


def one_row(
    x_TI: Tensor,
    weight_OI: Tensor,
    tile: Tile,
    *,
    norm: Norm | None = None,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A product that reads the weights once, with what goes before and after it; see ``triton_linear.py``."""
    inputs = x_TI.shape[1]
    outputs = weight_OI.shape[0] // 2 if activation == "swiglu" else weight_OI.shape[0]
    assert not tile.prefetch or weight_OI.data_ptr() % 16 == 0, "prefetching takes pieces of 16 bytes"
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
        **one_row_options(tile, outputs, inputs, activation=activation, **parts),
    )
    return out


def few_rows(
    x_TI: Tensor,
    weight_OI: Tensor,
    tile: Tile,
    *,
    bias: Tensor | None = None,
    is_relu2: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``x W^T + b``, activated, + residual of 2 to 32 rows; see ``triton_few_rows.py``. ``out`` may be the residual."""
    (rows, inputs), outputs = x_TI.shape, weight_OI.shape[0]
    assert 1 < rows <= MOST_ROWS, f"2 to {MOST_ROWS} rows, got {rows}"
    assert x_TI.is_contiguous(), "elements are addressed by their place in a contiguous tensor"
    assert weight_OI.data_ptr() % 16 == 0, "prefetching takes pieces of 16 bytes"
    if out is None:
        out = torch.empty((rows, outputs), dtype=x_TI.dtype, device=x_TI.device)
    is_split = tile.splits > 1
    assert not (is_split and is_relu2), "only whole sums can be activated"
    after = (None, None) if is_split else (bias, residual)
    sums = torch.empty((tile.splits, rows, outputs), dtype=torch.float32, device=x_TI.device) if is_split else out
    triton_few_rows.few_rows_kernel[(-(-outputs // tile.block_n), tile.splits)](
        x_TI,
        weight_OI,
        *after,
        sums,
        rows,
        outputs,
        IS_RELU2=is_relu2,
        **few_rows_options(tile, rows, outputs, inputs, bias=after[0] is not None, residual=after[1] is not None),
    )
    return combined(sums, bias, residual, out) if is_split else out


def combined(sums_STO: Tensor, bias: Tensor | None, residual: Tensor | None, out: Tensor) -> Tensor:
    """The sums of S splits, bias and residual together, in ``out``."""
    splits, rows, outputs = sums_STO.shape
    block = 256
    triton_few_rows.combine_kernel[(rows, -(-outputs // block))](
        sums_STO,
        bias,
        residual,
        out,
        rows,
        outputs,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        SPLITS=splits,
        BLOCK=block,
        num_warps=2,
        **overlapped(),
    )
    return out


def one_row_options(
    tile: Tile, outputs: int, inputs: int, *, norm: bool, bias: bool, residual: bool, activation: Activation | None
) -> dict[str, Any]:
    """Compile-time constants of a product of one row."""
    is_swiglu = activation == "swiglu"
    piece = 8 * (32 * tile.num_warps // tile.block_n)
    ahead = min(tile.prefetch, inputs - tile.block_k) // piece * piece
    return {
        "INPUTS": inputs,
        "HAS_NORM": norm,
        "HAS_BIAS": bias,
        "HAS_RESIDUAL": residual,
        "ACTIVATION": activation,
        "PREFETCH": max(0, ahead) if inputs % 8 == 0 else 0,
        "WARPS": tile.num_warps,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "num_warps": tile.num_warps,
        "num_stages": 1,
        **(NOT_OVERLAPPED if is_large(outputs * (2 if is_swiglu else 1) * inputs) else overlapped()),
    }


def few_rows_options(tile: Tile, rows: int, outputs: int, inputs: int, *, bias: bool, residual: bool) -> dict[str, Any]:
    """Compile-time constants of a product of a few rows."""
    share = -(-inputs // (tile.splits * tile.block_k)) * tile.block_k
    is_even = share * tile.splits == inputs
    return {
        "INPUTS": inputs,
        "HAS_BIAS": bias,
        "HAS_RESIDUAL": residual,
        "PREFETCH": min(share, tile.prefetch) if is_even else 0,
        "SHARE": share,
        "GROUPS": tile.num_warps,
        "BLOCK_M": max(16, power_of_two(rows)),
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k // tile.num_warps,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **(NOT_OVERLAPPED if is_large(outputs * inputs) else overlapped()),
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
