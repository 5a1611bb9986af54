# mypy: ignore-errors
# This is device code in Triton's language, which a Python type checker does not know.
"""One kernel that samples whole rows: greedy or by temperature, with the same stream and weights as the reference.

It reads a row of logits up to three times (maximum, total weight, the token), draws the one uniform of (seed,
position), writes the results and advances the row's newest token and position. Filters, penalties, bias and
log-probabilities are not in it; rows that need them take the other path. Launched by ``flashinfer.py``.

Capital parameters are compile-time constants. Pointers are named after the tensors they point to.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def mix(value):
    """The finaliser of splitmix64; ``engine/sampling/rng.py`` has it in torch and in Python."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def uniform(seed, position):
    """Of a target token (kind 1): float64 in [0, 1)."""
    golden = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    start = mix(seed.to(tl.uint64) + golden)
    bits = mix(start + (position + 1).to(tl.uint64) * golden)
    return (bits >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def weights_of(logits, row, start, highest, temperature, V, stride, BLOCK: tl.constexpr):
    """Fixed-point weights of one block of a row, [BLOCK] int64; 0 past the end."""
    column = start + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + column, mask=column < V, other=float("-inf")).to(tl.float32)
    score = libdevice.div_rn(value - highest, temperature)
    return (libdevice.exp(score) * 4398046511104.0).to(tl.int64)


@triton.jit
def draw_rows_kernel(
    logits,
    sources,
    ints,
    floats,
    results,
    V,
    stride,
    max_rows,
    tolerance,
    greedy_below,
    HAS_SOURCES: tl.constexpr,
    ANY_RANDOM: tl.constexpr,
    NUM_INTS: tl.constexpr,
    NUM_FLOATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a table row; the columns are those of ``engine/columns.py``."""
    out = tl.program_id(0)
    row = tl.load(sources + out).to(tl.int64) if HAS_SOURCES else out.to(tl.int64)

    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_at = tl.full((BLOCK,), 2147483647, tl.int32)
    nan = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, V, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * stride + column, mask=column < V, other=float("-inf")).to(tl.float32)
        nan |= (value != value).to(tl.int32)
        higher = value > best
        best_at = tl.where(higher, column, best_at)
        best = tl.where(higher, value, best)
    highest = tl.max(best, 0)
    token = tl.min(tl.where(best == highest, best_at, 2147483647), 0).to(tl.int64)
    bad = (tl.max(nan, 0) > 0) | (highest == float("inf")) | (highest == float("-inf"))

    near = tl.full((), 0, tl.int1)
    position = tl.load(ints + out * NUM_INTS + 1)
    if ANY_RANDOM:
        temperature = tl.load(floats + out * NUM_FLOATS)
        top_k = tl.load(ints + out * NUM_INTS + 3)
        if (temperature > greedy_below) & (top_k != 1) & (bad == 0):
            total = tl.full((), 0, tl.int64)
            for start in range(0, V, BLOCK):
                total += tl.sum(weights_of(logits, row, start, highest, temperature, V, stride, BLOCK), 0)
            seed = tl.load(ints + out * NUM_INTS + 2)
            target = (uniform(seed, position) * total.to(tl.float64)).to(tl.int64)
            target = tl.minimum(target, total - 1)
            reached = tl.full((), 0, tl.int64)
            for start in range(0, V, BLOCK):
                weight = weights_of(logits, row, start, highest, temperature, V, stride, BLOCK)
                part = tl.sum(weight, 0)
                if (reached <= target) & (target < reached + part):
                    upper = reached + tl.cumsum(weight, 0)
                    column = start + tl.arange(0, BLOCK)
                    token = tl.min(tl.where(upper > target, column, 2147483647), 0).to(tl.int64)
                    high = tl.min(tl.where(upper > target, upper, total), 0)
                    low = high - tl.sum(tl.where(column == token, weight, 0), 0)
                    margin = tolerance * total.to(tl.float64)
                    near = (((target - low).to(tl.float64) <= margin) & (low > 0)) | (
                        ((high - target).to(tl.float64) <= margin) & (high < total)
                    )
                reached += part

    token = tl.where(bad, 0, token)
    tl.store(results + out, token)
    tl.store(results + max_rows + out, bad.to(tl.int64))
    tl.store(results + 2 * max_rows + out, near.to(tl.int64))
    tl.store(ints + out * NUM_INTS, token)
    tl.store(ints + out * NUM_INTS + 1, position + 1)
