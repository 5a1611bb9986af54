"""How products of 1 to 32 rows with a weight matrix are cut into programs and launched. For CUDA.

Letters: T rows, I inputs, O outputs.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engine.kernels import triton_few_rows, triton_linear
from engine.kernels.base import Activation, Norm


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut into programs."""

    block_n: int
    """Outputs of one program."""
    block_k: int
    """Inputs of one pass of its loop."""
    num_warps: int
    prefetch: int = 0
    """Weights of an output, behind those of the first pass, that a program has read into the L2 cache while the kernel
    before still runs; those of the first pass it then holds in registers."""
    splits: int = 1
    """Programs that share the inputs of an output, where a few rows are added."""
    ahead: int = 1
    """Passes of a few rows, 1 or 2, whose weights are on their way while those of one are multiplied: two take more
    registers, so they pay where as many programs run beside each other all the same."""


MOST_ROWS = 32
"""That the kernel for a few rows is written for."""
FEW_ROWS = 16
"""Up to which it is taken: programs read all of x, so the more rows, the more they read beside the weights."""
MANY, MANY_ADDED = 1 << 25, 1 << 24
"""Weights up to which more than 8 rows of a product behind a norm, or one that is added, are faster than cuBLAS."""
LEAST_K = 32
"""Inputs that a warp takes in a pass of a few rows, at least."""


def one_row_tile(outputs: int, inputs: int, *, is_swiglu: bool = False) -> Tile:
    """The tile that was fastest on an H200 (``benchmarks/gpu_products.py``) for a product of one row.

    Args:
        outputs: Of the product; F for SwiGLU, whose matrix has 2 F rows.
        inputs: Columns of the weight matrix.
        is_swiglu: Whether a program reads two rows of the matrix for each output.
    """
    if is_large(num_weights(outputs, inputs, is_swiglu)):
        if inputs >= 4096 or is_swiglu:
            return Tile(block_n=2 if is_swiglu else 4, block_k=2048 if inputs >= 4096 else 1024, num_warps=8)
        return Tile(block_n=2 if inputs >= 2048 else 4, block_k=1024, num_warps=4)
    if outputs <= 2048 <= inputs and not is_swiglu:
        return Tile(block_n=8, block_k=2048, num_warps=8, prefetch=512)
    if inputs <= 1024:
        return Tile(block_n=4, block_k=512, num_warps=4)
    if inputs < 2048:
        return Tile(block_n=8, block_k=2048, num_warps=8)
    if inputs < 4096:
        return Tile(16, 1024, 8) if inputs < 3072 else Tile(2, 1024, 4)
    if inputs > 8192 and outputs < 4096:
        return Tile(block_n=4, block_k=2048, num_warps=4)
    return Tile(block_n=8, block_k=1024, num_warps=4)


def few_rows_tile(
    rows: int, outputs: int, inputs: int, *, is_normed: bool = False, is_swiglu: bool = False
) -> Tile | None:
    """The same for 2 rows and more; None: cuBLAS was faster.

    Args:
        rows: Of the product.
        outputs: Of the product; F for SwiGLU, whose matrix has 2 F rows.
        inputs: Columns of the weight matrix.
        is_normed: Whether a norm comes before it, else it is added to the residual.
        is_swiglu: Whether a program reads two rows of the matrix for each output.
    """
    weights = num_weights(outputs, inputs, is_swiglu)
    if rows > FEW_ROWS or (rows > 8 and weights > (MANY if is_normed else MANY_ADDED)):
        return None
    tile = _normed_tile(outputs, weights, is_swiglu) if is_normed else _added_tile(rows, outputs, inputs)
    return divided(tile, inputs)


def parts_normed_tile(rows: int, outputs: int, inputs: int, num_parts: int) -> Tile | None:
    """The same for a product that is added behind norms of ``num_parts`` equal parts of its inputs."""
    if not 1 < rows <= 8 or num_parts not in (4, 8, 16) or inputs % num_parts:
        return None
    return divided(Tile(16 if outputs < 4096 else 32, 128 * num_parts, num_parts), inputs, least_warps=num_parts)


def _normed_tile(outputs: int, weights: int, is_swiglu: bool) -> Tile:
    if is_large(weights):
        return Tile(32 if is_swiglu else 64, 128, 2)
    if is_swiglu or outputs <= 4096:
        return Tile(16, 512, 4, prefetch=512)
    if outputs <= 8192:
        return Tile(32, 512, 4, prefetch=512)
    return Tile(32, 256, 4 if outputs < 1 << 14 else 2)


def _added_tile(rows: int, outputs: int, inputs: int) -> Tile:
    if outputs <= 2560 and inputs >= 4096:
        return Tile(16, 2048, 8, prefetch=512)
    if rows <= 8 and outputs < 4096 and inputs >= 8192:
        return Tile(32, 256, 4, splits=4, ahead=2)
    if rows > 8 or inputs <= 2048:
        return Tile(16, 1024, 4, prefetch=512)
    return Tile(16 if outputs < 4096 else 32, 1024, 8, prefetch=512)


def divided(tile: Tile, inputs: int, least_warps: int = 1) -> Tile | None:
    """The tile with passes that leave no input over: half of it, and so on; None where there is none.

    Multiples of 64 have one, and some smaller ones.
    """
    while inputs % (tile.splits * tile.block_k):
        warps = tile.num_warps if tile.block_k > LEAST_K * tile.num_warps else tile.num_warps // 2
        if warps < least_warps:
            return None
        tile = replace(tile, block_k=tile.block_k // 2, num_warps=warps)
    return tile


def num_weights(outputs: int, inputs: int, is_swiglu: bool) -> int:
    """Of a product's matrix, which with SwiGLU has two rows for each output."""
    return outputs * (2 if is_swiglu else 1) * inputs


def is_large(weights: int) -> bool:
    """Whether a product takes so long that starting it early only costs."""
    return weights >= 1 << 26


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
    norm: Norm | None = None,
    num_parts: int = 1,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The same of up to 32 rows; see ``triton_few_rows.py``. ``out`` may be the residual.

    The norm may be of as many equal parts as there are warps for an output. Its root divides the result, so inputs
    times its weights must be within the range of their type, as those of bfloat16 are.
    """
    (rows, inputs), outputs = x_TI.shape, weight_OI.shape[0] // 2 if activation == "swiglu" else weight_OI.shape[0]
    assert 0 < rows <= MOST_ROWS, f"1 to {MOST_ROWS} rows, got {rows}"
    assert x_TI.is_contiguous(), "elements are addressed by their place in a contiguous tensor"
    assert weight_OI.data_ptr() % 16 == 0, "prefetching takes pieces of 16 bytes"
    assert norm is None or x_TI.dtype == torch.bfloat16, f"norms of bfloat16, got {x_TI.dtype}"
    if out is None:
        out = torch.empty((rows, outputs), dtype=x_TI.dtype, device=x_TI.device)
    splits, has_parts = tile.splits, num_parts > 1
    assert num_parts in (1, splits * tile.num_warps), f"a warp's inputs are one part, got {num_parts} parts"
    assert splits == 1 or activation is None, "only whole sums can be activated"
    tiles = -(-outputs // tile.block_n)
    assert splits == 1 or tiles <= MOST_TILES, f"{MOST_TILES} tiles of a split product at most, got {tiles}"
    parts = {"norm": norm is not None, "bias": bias is not None, "residual": residual is not None}
    options = few_rows_options(tile, rows, outputs, inputs, activation=activation, has_parts=has_parts, **parts)
    sums = None
    if splits > 1:
        sums = x_TI.new_empty(tiles * splits * tile.block_n * options["BLOCK_M"], dtype=torch.float32)
    triton_few_rows.few_rows_kernel[(tiles, splits)](
        x_TI,
        weight_OI,
        norm.weight if norm else None,
        bias,
        residual,
        out,
        sums,
        ARRIVALS.of_stream(x_TI.device) if splits > 1 else None,
        norm.eps if norm else 0.0,
        rows,
        outputs,
        **options,
    )
    return out


def one_row_options(
    tile: Tile, outputs: int, inputs: int, *, norm: bool, bias: bool, residual: bool, activation: Activation | None
) -> dict[str, Any]:
    """Compile-time constants of a product of one row."""
    parts = {"norm": norm, "bias": bias, "residual": residual}
    shared = _options(tile, inputs, activation=activation, **parts)
    start = NOT_OVERLAPPED if is_large(num_weights(outputs, inputs, activation == "swiglu")) else overlapped()
    return {**shared, **start, "BLOCK_K": tile.block_k, "num_stages": 1}


def few_rows_options(
    tile: Tile,
    rows: int,
    outputs: int,
    inputs: int,
    *,
    norm: bool,
    bias: bool,
    residual: bool,
    activation: Activation | None,
    has_parts: bool = False,
) -> dict[str, Any]:
    """Compile-time constants of a product of a few rows."""
    parts = {"norm": norm, "bias": bias, "residual": residual}
    shared = _options(tile, inputs, activation=activation, **parts)
    is_swiglu = activation == "swiglu"  # else what is large is a head, the last to run, and may start early
    starts_late = is_swiglu and is_large(num_weights(outputs, inputs, is_swiglu))
    own = {
        "AHEAD": passes_ahead(tile, inputs, activation),
        "HAS_PARTS": has_parts,
        "BLOCK_M": max(8, power_of_two(rows)),
        "BLOCK_K": tile.block_k // tile.num_warps,
    }
    return {**shared, **own, **(NOT_OVERLAPPED if starts_late else overlapped()), "SPLITS": tile.splits}


def passes_ahead(tile: Tile, inputs: int, activation: Activation | None) -> int:
    """A tile's passes under way, as far as there are so many; a gate and its values are two matrices already."""
    return 1 if activation == "swiglu" or inputs <= tile.splits * tile.block_k else tile.ahead


def _options(
    tile: Tile, inputs: int, *, norm: bool, bias: bool, residual: bool, activation: Activation | None
) -> dict[str, Any]:
    ahead = 0
    if tile.prefetch:
        piece = 8 * (32 * tile.num_warps // tile.block_n)
        held = passes_ahead(tile, inputs, activation) * tile.block_k
        ahead = min(tile.prefetch, inputs // tile.splits - held) // piece * piece
    return {
        "INPUTS": inputs,
        "HAS_NORM": norm,
        "HAS_BIAS": bias,
        "HAS_RESIDUAL": residual,
        "ACTIVATION": activation,
        "PREFETCH": max(0, ahead) if inputs % 8 == 0 else 0,
        "WARPS": tile.num_warps,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
    }


MOST_TILES, MOST_STREAMS = 1024, 256
"""Of a product that is split; and on which such products run in one process."""


class Arrivals:
    """Counters of the programs that share outputs, all 0 as every product leaves them; a row for each stream.

    Kernels of one stream take turns, those of two may not: so a graph has to be replayed on the stream it was captured
    on, as the engine does, or alone.
    """

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}
        self._places: dict[tuple[int, int], int] = {}
        self._lock = threading.Lock()

    def prepare(self, device: torch.device) -> Tensor:
        """[MOST_STREAMS, MOST_TILES] int32 of a device; made once, and not while a graph is captured."""
        index = torch.cuda.current_device() if device.index is None else device.index
        with self._lock:
            if index not in self._rows:
                self._rows[index] = torch.zeros((MOST_STREAMS, MOST_TILES), dtype=torch.int32, device=device)
                torch.cuda.synchronize(device)
            return self._rows[index]

    def of_stream(self, device: torch.device) -> Tensor:
        """[MOST_TILES] of the device's current stream."""
        rows = self.prepare(device)
        key = rows.device.index, torch.cuda.current_stream(device).cuda_stream
        with self._lock:
            place = self._places.setdefault(key, len(self._places))
        assert place < MOST_STREAMS, f"split products run on {MOST_STREAMS} streams of a process at most"
        return rows[place]


ARRIVALS = Arrivals()


NOT_OVERLAPPED = {"USE_PDL": False, "launch_pdl": False}


@cache
def overlapped() -> dict[str, bool]:
    """Options that let a kernel start while the one before it ends (programmatic dependent launch, from Hopper on)."""
    can = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
    return {"USE_PDL": can, "launch_pdl": can}


def power_of_two(size: int) -> int:
    """The smallest power of two that is not below ``size``."""
    return 1 << (size - 1).bit_length()
