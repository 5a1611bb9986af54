# mypy: ignore-errors
# This is device code in Triton's language, which a Python type checker does not know.
"""The Triton kernel of Mamba2's scan for prefill rows of many tokens: a chunk at a time, the state in registers.

Capital parameters are compile-time constants; H heads, P head size, G groups, S state size, Q tokens of a chunk.
USE_PDL is explained in ``engine/kernels/triton_elementwise.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.ssm.triton_kernels import softplus


@triton.jit(do_not_specialize=["dummy_slot", "first", "kept_stride"])
def chunk_scan_kernel(
    x,
    dt,
    b,
    c,
    a_log,
    d,
    dt_bias,
    state,
    state_from,
    state_to,
    query_start,
    query_len,
    kv_len,
    kept,
    y,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    least_dt,
    most_dt,
    dummy_slot,
    first,
    kept_stride,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    Q: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a prefill row, head and BLOCK_P of its channels.

    Within a chunk every token attends to those before it, as a product of [Q, Q] scores; the state goes from chunk to
    chunk. A chunk ends early where ``kept`` [P, kept_stride] names a slot for the state behind a token, so that no
    state inside a chunk is ever wanted. Sums of steps are float64, kept as two float32: in one alone their differences
    would lose the small steps behind the large.
    """
    PARTS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    row = tl.program_id(1).to(tl.int64) + first
    head = tl.program_id(0) // PARTS
    channel = (tl.program_id(0) % PARTS) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.arange(0, BLOCK_S)
    place = tl.arange(0, Q)
    has_channel, has_column = channel < P, column < S
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    step_bias = tl.load(dt_bias + head).to(tl.float32)
    skip = tl.load(d + head).to(tl.float32)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    source_slot, target_slot = tl.load(state_from + row), tl.load(state_to + row)
    if target_slot == dummy_slot:
        return
    length = tl.load(query_len + row).to(tl.int32)
    begin = tl.load(query_start + row)
    is_fresh = tl.load(query_len + row) == tl.load(kv_len + row)
    inside = has_channel[:, None] & has_column[None, :]
    element = (head * P + channel)[:, None] * S + column[None, :]
    held = tl.load(state + source_slot * (H * P * S) + element, mask=inside & (is_fresh == 0), other=0.0).to(tl.float32)
    group = head // (H // G)
    done = 0
    while done < length:
        count = tl.minimum(length - done, Q)
        if HAS_KEPT:
            slots = tl.load(kept + (row - first) * kept_stride + done + 1 + place, mask=place < count, other=-1)
            count = tl.min(tl.where(slots >= 0, place + 1, count), 0)
            slot = tl.max(tl.where(place + 1 == count, slots, -1), 0)
        is_token = place < count
        token = begin + done + place
        step = tl.load(dt + token * dt_stride + head, mask=is_token, other=0.0).to(tl.float32) + step_bias
        step = tl.where(is_token, tl.minimum(tl.maximum(softplus(step), least_dt), most_dt), 0.0)
        sums = tl.cumsum((step * -rate).to(tl.float64), 0)
        total = tl.sum((step * -rate).to(tl.float64), 0)
        wide = is_token[:, None] & has_column[None, :]
        enter = tl.load(b + token[:, None] * b_stride + group * S + column[None, :], mask=wide, other=0.0)
        leave = tl.load(c + token[:, None] * c_stride + group * S + column[None, :], mask=wide, other=0.0)
        own = is_token[:, None] & has_channel[None, :]
        value = tl.load(x + token[:, None] * x_stride + head * P + channel[None, :], mask=own, other=0.0).to(tl.float32)
        brought = value * step[:, None]
        upper = sums.to(tl.float32)
        lower = (sums - upper.to(tl.float64)).to(tl.float32)
        between = (upper[:, None] - upper[None, :]) + (lower[:, None] - lower[None, :])
        decay = tl.where(place[:, None] >= place[None, :], tl.exp(tl.minimum(between, 0.0)), 0.0)
        score = tl.dot(leave, tl.trans(enter), input_precision=PRECISION) * decay
        enter, leave = enter.to(tl.float32), leave.to(tl.float32)
        seen = tl.dot(score, brought, input_precision=PRECISION) + value * skip
        carried = tl.dot(leave, tl.trans(held), input_precision=PRECISION)
        seen += carried * tl.exp(upper)[:, None]
        tl.store(y + (token[:, None] * H + head) * P + channel[None, :], seen.to(y.dtype.element_ty), mask=own)
        left = brought * tl.exp((total - sums).to(tl.float32))[:, None]
        held = held * tl.exp(total.to(tl.float32)) + tl.dot(tl.trans(left), enter, input_precision=PRECISION)
        if HAS_KEPT:  # noqa: SIM102 (settled while compiling, the other while running)
            if slot >= 0:
                tl.store(state + slot * (H * P * S) + element, held.to(state.dtype.element_ty), mask=inside)
        done += count
    tl.store(state + target_slot * (H * P * S) + element, held.to(state.dtype.element_ty), mask=inside)
