# mypy: ignore-errors
# This is device code in Triton's language, which a Python type checker does not know.
"""A Triton product of 2 to 32 rows with a weight matrix, which reads the matrix once. See ``triton_products.py``.

Bias, activation and residual are part of it. Capital parameters are compile-time constants.
Each of the GROUPS warps multiplies inputs of its own, so no fragment is read twice and chains of dependent
multiplications stay short. Their sums, and those of the SPLITS programs that share an output, are added in fixed order:
a row's result is the same in every run and beside any other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.triton_elementwise import relu2


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    rows,
    outputs,
    INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_RELU2: tl.constexpr,
    USE_PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
    SHARE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program BLOCK_N outputs of all rows over SHARE inputs; ``out`` has a [rows, outputs] for each share."""
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_m, has_n = m < rows, n < outputs
    first = tl.program_id(1) * SHARE
    if USE_PDL:
        if PREFETCH > 0:
            prefetch(weight + first, tl.minimum(n, outputs - 1), INPUTS, PREFETCH, BLOCK_N, GROUPS)
        gdc_launch_dependents()
        gdc_wait()
    k = first + tl.arange(0, GROUPS)[:, None, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, None, :]
    x_tile = x + m[None, :, None] * INPUTS + k
    tile = weight + n[None, :, None].to(tl.int64) * INPUTS + k
    total = tl.zeros((GROUPS, BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in tl.range(0, SHARE, GROUPS * BLOCK_K):
        has_k = begin + k < INPUTS
        w = tl.load(tile + begin, mask=has_n[None, :, None] & has_k, other=0.0)
        value = tl.load(x_tile + begin, mask=has_m[None, :, None] & has_k, other=0.0)
        total = tl.dot(value, tl.permute(w, (0, 2, 1)), total)
    total = tl.sum(total, 0)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=has_n, other=0.0).to(tl.float32)[None, :]
    if IS_RELU2:
        total = relu2(total)
    place = (tl.program_id(1) * rows + m)[:, None] * outputs + n[None, :]
    inside = has_m[:, None] & has_n[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def prefetch(weight, n, INPUTS: tl.constexpr, PREFETCH: tl.constexpr, BLOCK_N: tl.constexpr, GROUPS: tl.constexpr):
    """Have the first PREFETCH weights of each output read into the L2 cache, a piece a thread."""
    PIECES: tl.constexpr = 32 * GROUPS // BLOCK_N
    tl.static_assert(PREFETCH % (8 * PIECES) == 0, "the instruction takes multiples of 16 bytes")
    begin = tl.arange(0, PIECES) * (PREFETCH // PIECES)
    piece = weight + n[:, None].to(tl.int64) * INPUTS + begin[None, :]
    num_bytes = tl.full((BLOCK_N, PIECES), PREFETCH // PIECES * 2, dtype=tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [piece, num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(
    partial,
    bias,
    residual,
    out,
    rows,
    outputs,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    USE_PDL: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program BLOCK outputs of a row: the sums of all splits, [SPLITS, rows, outputs], bias and residual."""
    row = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < outputs
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partial + (split * rows + row) * outputs + n, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual + row * outputs + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + n, total.to(out.dtype.element_ty), mask=inside)
