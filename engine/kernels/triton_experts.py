# mypy: ignore-errors
# This is device code in Triton's language, which a Python type checker does not know.
"""Triton kernels that choose experts, and multiply a few tokens with those they chose, reading no others' weights.

A pair is one token with one of its experts: pair t * K + k is token t's k-th. Capital parameters are compile-time
constants. Sums are float32 and made in fixed order, so a token's result is the same in every run and beside any others.
Launched by ``triton_routed.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.triton_elementwise import silu


@triton.jit
def route_kernel(
    score,
    bias,
    ids,
    weights,
    floor,
    scaling,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    KIND: tl.constexpr,
    RENORMALISE: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program a token: TOP_K times the largest that is left. KIND names a ``Routing``.

    What is NaN is worth the least, so that every choice is an expert, and another one each time.
    """
    token = tl.program_id(0).to(tl.int64)
    x = tl.arange(0, BLOCK_X)
    k = tl.arange(0, BLOCK_K)
    is_left = x < EXPERTS
    lowest = float("-inf")
    if KIND == "sigmoid":
        push = tl.load(bias + x, mask=is_left, other=0.0)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(score + token * EXPERTS + x, mask=is_left, other=lowest).to(tl.float32)
    if KIND == "softmax":
        value = tl.exp(value - tl.max(value, 0))
        value = value / tl.sum(value, 0)
    choice = value
    if KIND == "sigmoid":
        value = 1.0 / (1.0 + tl.exp(-value))
        choice = value + push
    choice = tl.where(is_left & (choice == choice), choice, lowest)
    weight = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for number in tl.static_range(TOP_K):
        best = tl.max(choice, 0)
        place = tl.min(tl.where(is_left & (choice == best), x, BLOCK_X), 0)
        tl.store(ids + token * TOP_K + number, place.to(tl.int64))
        weight = tl.where(k == number, tl.sum(tl.where(x == place, value, 0.0), 0), weight)
        is_left = is_left & (x != place)
        choice = tl.where(is_left, choice, lowest)
    has_k = k < TOP_K
    if KIND == "topk-softmax":
        weight = tl.exp(weight - tl.max(tl.where(has_k, weight, lowest), 0))
        weight = weight / tl.sum(tl.where(has_k, weight, 0.0), 0)
    elif RENORMALISE:
        weight = weight / (tl.sum(weight, 0) + floor)
    tl.store(weights + token * TOP_K + k, weight * scaling, mask=has_k)


@triton.jit
def up_kernel(
    x,
    ids,
    up,
    inner,
    num_experts,
    INPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program BLOCK_N of the SIZE inner values of a pair: ``inner`` [pairs, SIZE]; zeros for nobody's."""
    pair = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    has_n = (n < SIZE)[:, None]
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    rows: tl.constexpr = 2 * SIZE if IS_SWIGLU else SIZE
    expert = tl.load(ids + pair)
    has_n = has_n & (expert < num_experts)
    tile = up + (expert * rows + n[:, None].to(tl.int64)) * INPUTS + k[None, :]
    token = x + (pair // TOP_K) * INPUTS
    partial = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    partial_up = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for begin in tl.static_range(0, INPUTS, BLOCK_K):
        has_k = begin + k < INPUTS
        inside = has_n & has_k[None, :]
        value = tl.load(token + begin + k, mask=has_k, other=0.0).to(tl.float32)[None, :]
        partial += tl.load(tile + begin, mask=inside, other=0.0).to(tl.float32) * value
        if IS_SWIGLU:
            partial_up += tl.load(tile + SIZE * INPUTS + begin, mask=inside, other=0.0).to(tl.float32) * value
    total = tl.sum(partial, 1)
    if IS_SWIGLU:
        total = silu(total) * tl.sum(partial_up, 1)
    else:
        total = tl.maximum(total, 0.0)
        total = total * total
    tl.store(inner + pair * SIZE + n, total.to(inner.dtype.element_ty), mask=n < SIZE)


@triton.jit
def down_kernel(
    inner,
    ids,
    weights,
    down,
    out,
    num_experts,
    OUTPUTS: tl.constexpr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program BLOCK_N outputs of a token, all its experts: ``out`` [tokens, OUTPUTS]."""
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    has_n = (n < OUTPUTS)[:, None]
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    partial = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for number in tl.range(0, TOP_K):
        pair = token * TOP_K + number
        expert = tl.load(ids + pair)
        weight = tl.load(weights + pair)
        tile = down + (expert * OUTPUTS + n[:, None].to(tl.int64)) * SIZE + k[None, :]
        for begin in tl.static_range(0, SIZE, BLOCK_K):
            has_k = begin + k < SIZE
            value = tl.load(inner + pair * SIZE + begin + k, mask=has_k, other=0.0).to(tl.float32) * weight
            inside = has_n & has_k[None, :] & (expert < num_experts)
            w = tl.load(tile + begin, mask=inside, other=0.0).to(tl.float32)
            partial += w * value[None, :]
    tl.store(out + token * OUTPUTS + n, tl.sum(partial, 1).to(out.dtype.element_ty), mask=n < OUTPUTS)


@triton.jit
def combine_kernel(
    rows,
    places,
    weights,
    out,
    OUTPUTS: tl.constexpr,
    TOP_K: tl.constexpr,
    USE_PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program BLOCK outputs of a token: the ``rows`` at its pairs' places times their weights."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < OUTPUTS
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for number in tl.range(0, TOP_K):
        pair = token * TOP_K + number
        row = tl.load(places + pair)
        weight = tl.load(weights + pair)
        # What nobody here computed may hold anything.
        total += tl.load(rows + row * OUTPUTS + n, mask=inside & (weight != 0.0), other=0.0).to(tl.float32) * weight
    tl.store(out + token * OUTPUTS + n, total.to(out.dtype.element_ty), mask=inside)
