# mypy: ignore-errors
# This is device code in Triton's language, which a Python type checker does not know.
"""A Triton product of one row with a weight matrix, which reads the matrix once at memory speed.

Norm before, bias, activation and residual after are part of them. Capital parameters are compile-time constants.
The norm costs no pass of its own: sum(x * g * w) and sum(x * x) go along together, and the root divides the result.
Weights may be read before ``gdc_wait``, that is while the kernel before still runs; nothing else may.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.triton_elementwise import relu2, silu


@triton.jit
def prefetch(weight, n, INPUTS: tl.constexpr, PREFETCH: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """Have the first PREFETCH weights of each output read into the L2 cache, a piece a thread."""
    PIECES: tl.constexpr = 32 * WARPS // BLOCK_N
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


@triton.jit
def one_row_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    eps,
    outputs,
    INPUTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    USE_PDL: tl.constexpr,
    PREFETCH: tl.constexpr,
    WARPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program BLOCK_N outputs of the only row; plain multiplications, all of a tile's loads in flight at once."""
    IS_SWIGLU: tl.constexpr = ACTIVATION == "swiglu"
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_n = (n < outputs)[:, None]
    k = tl.arange(0, BLOCK_K)
    tile = weight + n[:, None].to(tl.int64) * INPUTS + k[None, :]
    if IS_SWIGLU:
        to_up = outputs.to(tl.int64) * INPUTS
    inside = has_n & (k < INPUTS)[None, :]
    w = tl.load(tile, mask=inside, other=0.0)
    if IS_SWIGLU:
        w_up = tl.load(tile + to_up, mask=inside, other=0.0)
    if USE_PDL:
        if PREFETCH > 0:
            known = tl.minimum(n, outputs - 1)
            prefetch(weight + BLOCK_K, known, INPUTS, PREFETCH, BLOCK_N, WARPS)
            if IS_SWIGLU:
                prefetch(weight + to_up + BLOCK_K, known, INPUTS, PREFETCH, BLOCK_N, WARPS)
        gdc_launch_dependents()
        gdc_wait()
    partial = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    partial_up = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    squares = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for begin in tl.static_range(0, INPUTS, BLOCK_K):
        has_k = begin + k < INPUTS
        if begin > 0:
            inside = has_n & has_k[None, :]
            w = tl.load(tile + begin, mask=inside, other=0.0)
            if IS_SWIGLU:
                w_up = tl.load(tile + to_up + begin, mask=inside, other=0.0)
        value = tl.load(x + begin + k, mask=has_k, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += value * value
            value *= tl.load(norm_weight + begin + k, mask=has_k, other=0.0).to(tl.float32)
        partial += w.to(tl.float32) * value[None, :]
        if IS_SWIGLU:
            partial_up += w_up.to(tl.float32) * value[None, :]
    total, up = tl.sum(partial, 1), tl.sum(partial_up, 1)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares, 0) / INPUTS + eps)
        total, up = total * factor, up * factor
    if HAS_BIAS:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
        if IS_SWIGLU:
            up += tl.load(bias + outputs + n, mask=n < outputs, other=0.0).to(tl.float32)
    if IS_SWIGLU:
        total = silu(total) * up
    if ACTIVATION == "relu2":
        total = relu2(total)
    if HAS_RESIDUAL:
        total += tl.load(residual + n, mask=n < outputs, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < outputs)
