# mypy: ignore-errors
# This is device code in Triton's language, which a Python type checker does not know.
"""Triton kernels of a few decode rows' mixer: convolution, state update and gate in one, then norm and histories.

Letters and rules as in ``triton_kernels.py``; I = H P. The first kernel reads histories that several of its programs
share, so none of them may write any: the second one does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.triton_elementwise import silu
from engine.ssm.triton_kernels import softplus


# fmt: off
@triton.jit
def past_inputs(
    weight, bias, history, channel, has_channel, is_held, K: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """What a row's history adds to the convolution of some channels, the bias with it; and the token's own factor."""
    column = tl.arange(0, BLOCK_K)
    past = has_channel[:, None] & (column < K - 1)[None, :]
    gain = tl.load(weight + channel[:, None] * K + column[None, :], mask=past, other=0.0).to(tl.float32)
    own_gain = tl.load(weight + channel * K + K - 1, mask=has_channel, other=0.0).to(tl.float32)
    held = tl.load(history + channel[:, None] * (K - 1) + column[None, :], mask=past & is_held, other=0.0)
    total = tl.sum(held.to(tl.float32) * gain, 1)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=has_channel, other=0.0).to(tl.float32)
    return total, own_gain


@triton.jit
def convolved(x, channel, has_channel, past, own_gain):
    """The convolution of some channels, rounded as if it were stored."""
    own = tl.load(x + channel, mask=has_channel, other=0.0).to(tl.float32)
    return silu(past + own * own_gain).to(x.dtype.element_ty).to(tl.float32)
# fmt: on


@triton.jit(do_not_specialize=["dummy_slot"])
def step_kernel(
    x,
    dt,
    gate,
    weight,
    bias,
    a_log,
    d,
    dt_bias,
    conv_state,
    state,
    state_from,
    state_to,
    query_len,
    kv_len,
    out,
    x_stride,
    dt_stride,
    gate_stride,
    least_dt,
    most_dt,
    dummy_slot,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a decode row, head and BLOCK_P of its channels: ``y * silu(gate)``, float32, into ``out`` [rows, I].

    B and C of its group it convolves for itself. States and histories are read while the kernel before still runs.
    Padding rows, which name the dummy slot, move no state and give zeros.
    """
    PARTS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    INNER: tl.constexpr = H * P
    CHANNELS: tl.constexpr = INNER + 2 * G * S
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) // PARTS
    channel = (tl.program_id(0) % PARTS) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.arange(0, BLOCK_S)
    has_channel, has_column = channel < P, column < S
    inner = head * P + channel
    enter_channel = INNER + head // (H // G) * S + column
    leave_channel = enter_channel + G * S

    if USE_PDL:
        gdc_launch_dependents()
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    step_bias = tl.load(dt_bias + head).to(tl.float32)
    skip = tl.load(d + head).to(tl.float32)
    source_slot, target_slot = tl.load(state_from + row), tl.load(state_to + row)
    is_held = (tl.load(query_len + row) != tl.load(kv_len + row)) & (target_slot != dummy_slot)
    inside = has_channel[:, None] & has_column[None, :]
    place = inner[:, None] * S + column[None, :]
    before = tl.load(state + source_slot * (INNER * S) + place, mask=inside & is_held, other=0.0)
    history = conv_state + source_slot * (CHANNELS * (K - 1))
    x_past, x_gain = past_inputs(weight, bias, history, inner, has_channel, is_held, K, HAS_BIAS, BLOCK_K)
    b_past, b_gain = past_inputs(weight, bias, history, enter_channel, has_column, is_held, K, HAS_BIAS, BLOCK_K)
    c_past, c_gain = past_inputs(weight, bias, history, leave_channel, has_column, is_held, K, HAS_BIAS, BLOCK_K)
    if USE_PDL:
        gdc_wait()
    target = out + row * INNER + inner
    if target_slot == dummy_slot:
        tl.store(target, tl.zeros((BLOCK_P,), dtype=tl.float32), mask=has_channel)
        return
    own = x + row * x_stride
    step = tl.load(dt + row * dt_stride + head).to(tl.float32) + step_bias
    step = tl.minimum(tl.maximum(softplus(step), least_dt), most_dt)
    opened = tl.load(gate + row * gate_stride + inner, mask=has_channel, other=0.0).to(tl.float32)
    value = convolved(own, inner, has_channel, x_past, x_gain)
    enter = convolved(own, enter_channel, has_column, b_past, b_gain)
    leave = convolved(own, leave_channel, has_column, c_past, c_gain)
    after = before.to(tl.float32) * tl.exp(-step * rate) + (value * step)[:, None] * enter[None, :]
    tl.store(state + target_slot * (INNER * S) + place, after.to(state.dtype.element_ty), mask=inside)
    seen = tl.sum(after * leave[None, :], 1) + value * skip
    tl.store(target, seen * silu(opened), mask=has_channel)


@triton.jit
def norm_and_history_kernel(
    gated,
    norm_weight,
    out,
    eps,
    x,
    conv_state,
    state_from,
    state_to,
    query_len,
    kv_len,
    x_stride,
    C: tl.constexpr,
    K: tl.constexpr,
    NORMS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """The first NORMS programs of a row normalise SIZE channels each, the others move BLOCK_C histories on by a token.

    ``gated`` [rows, NORMS * SIZE] is what :func:`step_kernel` gives.
    """
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    if USE_PDL:
        gdc_launch_dependents()
    if part < NORMS:
        column = tl.arange(0, BLOCK)
        inside = column < SIZE
        gain = tl.load(norm_weight + part * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        if USE_PDL:
            gdc_wait()
        place = (row * NORMS + part) * SIZE + column
        value = tl.load(gated + place, mask=inside, other=0.0)
        factor = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
        tl.store(out + place, (value * factor * gain).to(out.dtype.element_ty), mask=inside)
    else:
        channel = (part - NORMS) * BLOCK_C + tl.arange(0, BLOCK_C)
        history_column = tl.arange(0, BLOCK_K)
        has_channel = channel < C
        past = has_channel[:, None] & (history_column < K - 1)[None, :]
        is_held = tl.load(query_len + row) != tl.load(kv_len + row)
        entry = channel[:, None] * (K - 1) + history_column[None, :]
        source = conv_state + tl.load(state_from + row) * (C * (K - 1)) + entry
        target = conv_state + tl.load(state_to + row) * (C * (K - 1))
        history = tl.load(source, mask=past & is_held, other=0.0)
        if USE_PDL:
            gdc_wait()
        own = tl.load(x + row * x_stride + channel, mask=has_channel, other=0.0)
        tl.debug_barrier()  # a column is written where another thread may still have to read
        tl.store(target + entry - 1, history, mask=past & (history_column > 0)[None, :])
        tl.store(target + channel * (K - 1) + K - 2, own.to(conv_state.dtype.element_ty), mask=has_channel)
