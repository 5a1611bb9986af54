# mypy: ignore-errors
# This is device code in Triton's language, which a Python type checker does not know.
"""Kernels that sample whole rows: greedy or by temperature, with the same stream and weights as the reference.

A row of logits is read in parts, a program each, up to three times: its highest score, its total weight, and of one
part the token. The last kernel draws the one uniform of (seed, position), writes the results and advances the row's
newest token and position. Filters, penalties, bias and log-probabilities are not in it; rows that need them take the
other path. Launched by ``triton.py``.

Weights are integers, so their sums do not depend on the parts. Capital parameters are compile-time constants. Pointers
are named after the tensors they point to.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
def row_of(logits, sources, out, stride, HAS_SOURCES: tl.constexpr):
    """Where the logits of a table row begin."""
    row = tl.load(sources + out).to(tl.int64) if HAS_SOURCES else out.to(tl.int64)
    return logits + row * stride


@triton.jit
def packed(highest, at):
    """A score and its token as one int64; the larger is higher or, of equals, further in front."""
    bits = tl.where(highest == 0.0, 0.0, highest).to(tl.int32, bitcast=True)  # the zeros are one
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - at).to(tl.int64)


@triton.jit
def highest_of(tops, out, parts, MOST_PARTS: tl.constexpr):
    """Of a row: its highest score, infinite where one is no number, and the first token that has it."""
    part = tl.arange(0, MOST_PARTS)
    top = tl.max(tl.load(tops + out * MOST_PARTS + part, mask=part < parts, other=-(1 << 63)), 0)
    ordered = (top >> 32).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.to(tl.float32, bitcast=True), 0x7FFFFFFF - (top & 0x7FFFFFFF)


@triton.jit
def is_drawn(ints, floats, out, highest, greedy_below, NUM_INTS: tl.constexpr, NUM_FLOATS: tl.constexpr):
    """Whether a row draws a random number: it is not greedy, and its scores are numbers."""
    temperature = tl.load(floats + out * NUM_FLOATS)
    top_k = tl.load(ints + out * NUM_INTS + 3)
    is_random = (temperature > greedy_below) & (top_k != 1)
    return is_random & (highest < float("inf")) & (highest > float("-inf")), temperature


@triton.jit
def weights_of(row, column, end, highest, temperature):
    """Fixed-point weights of a row's columns, int64; 0 from ``end`` on."""
    value = tl.load(row + column, mask=column < end, other=float("-inf")).to(tl.float32)
    score = libdevice.div_rn(value - highest, temperature)
    return (libdevice.exp(score) * 4398046511104.0).to(tl.int64)


@triton.jit
def highest_kernel(
    logits, sources, tops, V, stride, share,
    HAS_SOURCES: tl.constexpr, USE_PDL: tl.constexpr, MOST_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row and part of ``share`` columns: see :func:`packed`."""
    out, part = tl.program_id(0), tl.program_id(1)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = row_of(logits, sources, out, stride, HAS_SOURCES)
    end = tl.minimum((part + 1) * share, V)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    best_at = tl.full((BLOCK,), 2147483647, tl.int32)
    nan = tl.zeros((BLOCK,), tl.int32)
    for start in range(part * share, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(row + column, mask=column < end, other=float("-inf")).to(tl.float32)
        nan |= (value != value).to(tl.int32)
        higher = value > best
        best_at = tl.where(higher, column, best_at)
        best = tl.where(higher, value, best)
    highest = tl.max(best, 0)
    at = tl.min(tl.where(best == highest, best_at, 2147483647), 0)
    highest = tl.where(tl.max(nan, 0) > 0, float("inf"), highest)
    tl.store(tops + out * MOST_PARTS + part, packed(highest, at))


@triton.jit
def weigh_kernel(
    logits, sources, ints, floats, tops, sums, V, stride, share, greedy_below,
    HAS_SOURCES: tl.constexpr, USE_PDL: tl.constexpr, NUM_INTS: tl.constexpr, NUM_FLOATS: tl.constexpr,
    MOST_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row and part: its weight, of rows that are drawn at random."""
    out, part = tl.program_id(0), tl.program_id(1)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    highest, _ = highest_of(tops, out, tl.cdiv(V, share), MOST_PARTS)
    drawn, temperature = is_drawn(ints, floats, out, highest, greedy_below, NUM_INTS, NUM_FLOATS)
    if drawn:
        row = row_of(logits, sources, out, stride, HAS_SOURCES)
        end = tl.minimum((part + 1) * share, V)
        total = tl.zeros((BLOCK,), tl.int64)
        for start in range(part * share, end, BLOCK):
            total += weights_of(row, start + tl.arange(0, BLOCK), end, highest, temperature)
        tl.store(sums + out * MOST_PARTS + part, tl.sum(total, 0))


@triton.jit
def settle_kernel(
    logits, sources, ints, floats, results, tops, sums, V, stride, share, max_rows, tolerance, greedy_below,
    HAS_SOURCES: tl.constexpr, USE_PDL: tl.constexpr, ANY_RANDOM: tl.constexpr, NUM_INTS: tl.constexpr,
    NUM_FLOATS: tl.constexpr, MOST_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a table row; the columns are those of ``engine/columns.py``."""
    out = tl.program_id(0)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    parts = tl.cdiv(V, share)
    highest, token = highest_of(tops, out, parts, MOST_PARTS)
    bad = (highest == float("inf")) | (highest == float("-inf"))
    near = tl.full((), 0, tl.int1)
    position = tl.load(ints + out * NUM_INTS + 1)
    if ANY_RANDOM:
        drawn, temperature = is_drawn(ints, floats, out, highest, greedy_below, NUM_INTS, NUM_FLOATS)
        if drawn:
            part = tl.arange(0, MOST_PARTS)
            weight_of_part = tl.load(sums + out * MOST_PARTS + part, mask=part < parts, other=0)
            behind = tl.cumsum(weight_of_part, 0)
            total = tl.sum(weight_of_part, 0)
            seed = tl.load(ints + out * NUM_INTS + 2)
            target = (uniform(seed, position) * total.to(tl.float64)).to(tl.int64)
            target = tl.minimum(target, total - 1)
            chosen = tl.sum((behind <= target).to(tl.int32), 0)
            reached = tl.sum(tl.where(part < chosen, weight_of_part, 0), 0)
            row = row_of(logits, sources, out, stride, HAS_SOURCES)
            end = tl.minimum((chosen + 1) * share, V)
            for start in range(chosen * share, end, BLOCK):
                column = start + tl.arange(0, BLOCK)
                weight = weights_of(row, column, end, highest, temperature)
                here = tl.sum(weight, 0)
                if (reached <= target) & (target < reached + here):
                    upper = reached + tl.cumsum(weight, 0)
                    token = tl.min(tl.where(upper > target, column, 2147483647), 0).to(tl.int64)
                    high = tl.min(tl.where(upper > target, upper, total), 0)
                    low = high - tl.sum(tl.where(column == token, weight, 0), 0)
                    margin = tolerance * total.to(tl.float64)
                    near = (((target - low).to(tl.float64) <= margin) & (low > 0)) | (
                        ((high - target).to(tl.float64) <= margin) & (high < total)
                    )
                reached += here

    token = tl.where(bad, 0, token)
    tl.store(results + out, token)
    tl.store(results + max_rows + out, bad.to(tl.int64))
    tl.store(results + 2 * max_rows + out, near.to(tl.int64))
    tl.store(ints + out * NUM_INTS, token)
    tl.store(ints + out * NUM_INTS + 1, position + 1)
