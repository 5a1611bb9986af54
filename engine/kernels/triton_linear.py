# mypy: ignore-errors
# This is device code in Triton's language, which a Python type checker does not know.
"""Triton products of a few rows with a weight matrix, which read the matrix once at memory speed.

Norm before, bias, SwiGLU and residual after are part of them. Capital parameters are compile-time constants.
The norm costs no pass of its own: sum(x * g * w) and sum(x * x) go along together, and the root divides the result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from engine.kernels.triton_elementwise import silu


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
    IS_SWIGLU: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program BLOCK_N outputs of the only row; plain multiplications, all of a tile's loads in flight at once."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_n = (n < outputs)[:, None]
    k = tl.arange(0, BLOCK_K)
    rows = weight + n[:, None].to(tl.int64) * INPUTS
    partial = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    partial_up = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    squares = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for begin in tl.static_range(0, INPUTS, BLOCK_K):
        has_k = begin + k < INPUTS
        inside = has_n & has_k[None, :]
        w = tl.load(rows + (begin + k)[None, :], mask=inside, other=0.0)
        if IS_SWIGLU:
            w_up = tl.load(rows + outputs.to(tl.int64) * INPUTS + (begin + k)[None, :], mask=inside, other=0.0)
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
    if HAS_RESIDUAL:
        total += tl.load(residual + n, mask=n < outputs, other=0.0).to(tl.float32)
    tl.store(out + n, total.to(out.dtype.element_ty), mask=n < outputs)


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    x,
    weight,
    bias,
    norm_weight,
    residual,
    out,
    eps,
    num_rows,
    outputs,
    INPUTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program BLOCK_M rows and BLOCK_N outputs, on the tensor cores."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_m, has_n = (m < num_rows)[:, None], (n < outputs)[:, None]
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    squares = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    x_tile = x + m[:, None] * INPUTS + k[None, :]
    w_tile = weight + n[:, None].to(tl.int64) * INPUTS + k[None, :]
    to_up = outputs.to(tl.int64) * INPUTS
    for begin in range(0, INPUTS, BLOCK_K):
        has_k = (begin + k < INPUTS)[None, :]
        value = tl.load(x_tile + begin, mask=has_m & has_k, other=0.0)
        w = tl.load(w_tile + begin, mask=has_n & has_k, other=0.0)
        if HAS_NORM:
            wide = value.to(tl.float32)
            squares += wide * wide
            gain = tl.load(norm_weight + begin + k, mask=begin + k < INPUTS, other=0.0).to(tl.float32)
            value = (wide * gain[None, :]).to(w.dtype)
        total = tl.dot(value, tl.trans(w), total)
        if IS_SWIGLU:
            w_up = tl.load(w_tile + to_up + begin, mask=has_n & has_k, other=0.0)
            up = tl.dot(value, tl.trans(w_up), up)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares, 1) / INPUTS + eps)[:, None]
        total, up = total * factor, up * factor
    column = n[None, :]
    inside = has_m & (column < outputs)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)
        if IS_SWIGLU:
            up += tl.load(bias + outputs + column, mask=column < outputs, other=0.0).to(tl.float32)
    if IS_SWIGLU:
        total = silu(total) * up
    place = m[:, None].to(tl.int64) * outputs + column
    if HAS_RESIDUAL:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
