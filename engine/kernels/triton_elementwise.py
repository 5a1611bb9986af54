# mypy: ignore-errors
# This is device code in Triton's language, which a Python type checker does not know.
"""Triton kernels that stream activations: norms, activations, rotation and cache append. Launched by ``triton.py``.

Capital parameters are compile-time constants. Sums are float32. Pointers are named after the tensors they point to.
With USE_PDL a kernel may start while the one before it ends: it lets the next one do so, too, and reads and writes
nothing but weights until ``gdc_wait`` returns, when all earlier kernels have ended. Every program must call it.
A batch's lengths and slots, and states that only the kernel itself writes, may be read before, too: a forward begins
with an ordinary kernel, the lookup of its tokens, so whatever came before that has ended when any later one starts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def embed_kernel(ids, table, out, ids_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program a token and BLOCK of its channels. Launched as an ordinary kernel, for what may then run early."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token * ids_stride).to(tl.int64)
    value = tl.load(table + row * SIZE + column, mask=column < SIZE, other=0.0)
    tl.store(out + token * SIZE + column, value, mask=column < SIZE)


@triton.jit
def rms_norm_kernel(x, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    scaled = value * factor * gain
    tl.store(out + row * SIZE + column, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu(x):
    """``x * sigmoid(x)``, float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def relu2(x):
    """The square of what is positive, 0 for the rest; NaN stays."""
    return tl.where(x <= 0.0, 0.0, x * x)


@triton.jit
def relu2_kernel(x, out, total, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """One program BLOCK of all elements."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + place, mask=place < total, other=0.0).to(tl.float32)
    tl.store(out + place, relu2(value).to(out.dtype.element_ty), mask=place < total)


@triton.jit
def swiglu_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr):
    """One program a row and BLOCK columns: silu of the row's first SIZE entries times the other SIZE."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    gate = tl.load(gate_up + row * (2 * SIZE) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (silu(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def rotation_tables_kernel(
    positions, frequencies, cos, sin, factor, HALF: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr
):
    """One program a token."""
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + column, mask=inside, other=0.0)
    tl.store(cos + token * HALF + column, tl.cos(angle) * factor, mask=inside)
    tl.store(sin + token * HALF + column, tl.sin(angle) * factor, mask=inside)


@triton.jit
def rotate_and_append_kernel(
    qkv,
    q_weight,
    k_weight,
    q_eps,
    k_eps,
    cos,
    sin,
    slots,
    q_out,
    keys,
    values,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TURNED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_Y: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a token and BLOCK_Y of its heads; a head is two halves, which rotate against each other.

    Where only the first 2 TURNED dimensions rotate, the halves are two pieces each, turned before kept: dimensions
    [turned 1 | turned 2 | kept 1 | kept 2].
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    column = tl.arange(0, BLOCK_HALF)
    is_query = head < HEADS
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    wide = (column < HALF)[None, :]
    if TURNED == HALF:
        one, other = column, column + HALF
    else:
        one = tl.where(column < TURNED, column, column + TURNED)
        other = tl.where(column < TURNED, column + TURNED, column + HALF)
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head[:, None]) * HEAD_DIM
    inside = (head < HEADS + 2 * KV_HEADS)[:, None] & wide
    if HAS_NORM:
        pick = is_query[:, None]
        first_gain = _weights(q_weight, k_weight, one, pick, column < HALF)
        second_gain = _weights(q_weight, k_weight, other, pick, column < HALF)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    first_raw = tl.load(source + one[None, :], mask=inside, other=0.0)
    second_raw = tl.load(source + other[None, :], mask=inside, other=0.0)
    first, second = first_raw.to(tl.float32), second_raw.to(tl.float32)
    if HAS_NORM:
        eps = tl.where(is_query, q_eps, k_eps)
        factor = tl.rsqrt(tl.sum(first * first + second * second, 1) / HEAD_DIM + eps)[:, None]
        first *= factor * first_gain
        second *= factor * second_gain
    c = tl.load(cos + token * TURNED + column, mask=column < TURNED, other=1.0)[None, :]
    s = tl.load(sin + token * TURNED + column, mask=column < TURNED, other=0.0)[None, :]
    first_out = (first * c - second * s).to(q_out.dtype.element_ty)
    second_out = (second * c + first * s).to(q_out.dtype.element_ty)
    target = q_out + (token * HEADS + head[:, None]) * HEAD_DIM
    tl.store(target + one[None, :], first_out, mask=is_query[:, None] & wide)
    tl.store(target + other[None, :], second_out, mask=is_query[:, None] & wide)
    entry = tl.load(slots + token) * (KV_HEADS * HEAD_DIM)
    key = keys + entry + (head[:, None] - HEADS) * HEAD_DIM
    tl.store(key + one[None, :], first_out, mask=is_key[:, None] & wide)
    tl.store(key + other[None, :], second_out, mask=is_key[:, None] & wide)
    value = values + entry + (head[:, None] - HEADS - KV_HEADS) * HEAD_DIM
    tl.store(value + one[None, :], first_raw, mask=is_value[:, None] & wide)
    tl.store(value + other[None, :], second_raw, mask=is_value[:, None] & wide)


@triton.jit
def _weights(q_weight, k_weight, column, pick, inside):
    """[1 or BLOCK_Y, BLOCK_HALF] norm weights: the query's where ``pick``, else the key's."""
    of_query = tl.load(q_weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    of_key = tl.load(k_weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    return tl.where(pick, of_query, of_key)
