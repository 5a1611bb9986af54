# mypy: ignore-errors
# This is device code in Triton's language, which a Python type checker does not know.
"""Triton kernels of Mamba2: convolution, state update of decode rows, gated norm. Slots are read on the device.

Capital parameters are compile-time constants; C convolution channels, K convolution width, H heads, P head size,
G groups, S state size. Sums are float32. USE_PDL is explained in ``engine/kernels/triton_elementwise.py``.
A row starts from zeros where ``kv_len == query_len``: its slot is not read then.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.triton_elementwise import silu


@triton.jit
def softplus(x):
    """``log(1 + exp(x))``; small results keep their digits, which the plain form loses in 1 + exp(x)."""
    e = tl.exp(tl.minimum(x, 20.0))
    whole = 1.0 + e
    exact = tl.where(whole == 1.0, e, tl.log(whole) * (e / tl.where(whole == 1.0, 1.0, whole - 1.0)))
    return tl.where(x > 20.0, x, exact)


@triton.jit
def conv_decode_kernel(
    x,
    weight,
    bias,
    conv_state,
    state_from,
    state_to,
    query_len,
    kv_len,
    out,
    x_stride,
    C: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a decode row and BLOCK_C channels: its output, and the history moved on by one.

    The history, which nothing else in a forward writes, is read while the kernel before still runs.
    """
    row = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    column = tl.arange(0, BLOCK_K)
    inside = channel < C
    past = inside[:, None] & (column < K - 1)[None, :]
    if USE_PDL:
        gdc_launch_dependents()
    gain = tl.load(weight + channel[:, None] * K + column[None, :], mask=past, other=0.0).to(tl.float32)
    own_gain = tl.load(weight + channel * K + K - 1, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    if HAS_BIAS:
        total = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    is_fresh = tl.load(query_len + row) == tl.load(kv_len + row)
    place = channel[:, None] * (K - 1) + column[None, :]
    source = conv_state + tl.load(state_from + row) * (C * (K - 1)) + place
    target = conv_state + tl.load(state_to + row) * (C * (K - 1))
    history = tl.load(source, mask=past & (is_fresh == 0), other=0.0)
    if USE_PDL:
        gdc_wait()
    own = tl.load(x + row.to(tl.int64) * x_stride + channel, mask=inside, other=0.0)
    total += tl.sum(history.to(tl.float32) * gain, 1) + own.to(tl.float32) * own_gain
    tl.store(out + row.to(tl.int64) * C + channel, silu(total).to(out.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # a column is written where another thread may still have to read
    tl.store(target + place - 1, history, mask=past & (column > 0)[None, :])
    tl.store(target + channel * (K - 1) + K - 2, own.to(conv_state.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first"])
def conv_prefill_kernel(
    x,
    weight,
    bias,
    conv_state,
    state_from,
    row_of,
    query_start,
    query_len,
    kv_len,
    out,
    x_stride,
    first,
    C: tl.constexpr,
    K: tl.constexpr,
    LENGTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """One program a token behind the ``first`` and BLOCK_C channels; only reads the histories, of LENGTH inputs."""
    token = tl.program_id(0) + first
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channel < C
    row = tl.load(row_of + token)
    offset = token - tl.load(query_start + row)
    length = tl.load(query_len + row)
    is_known = (length != tl.load(kv_len + row)) & (length > 0)
    history = conv_state + tl.load(state_from + row) * (C * LENGTH) + LENGTH - (K - 1)
    total = tl.zeros((BLOCK_C,), dtype=tl.float32)
    if HAS_BIAS:
        total = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        back = K - 1 - k
        is_own = offset >= back
        own = tl.load(x + (token - back).to(tl.int64) * x_stride + channel, mask=inside & is_own, other=0.0)
        before = tl.load(history + channel * LENGTH + offset + k, mask=inside & (is_own == 0) & is_known, other=0.0)
        gain = tl.load(weight + channel * K + k, mask=inside, other=0.0).to(tl.float32)
        total += (own.to(tl.float32) + before.to(tl.float32)) * gain
    tl.store(out + token.to(tl.int64) * C + channel, silu(total).to(out.dtype.element_ty), mask=inside)


@triton.jit
def conv_history_kernel(
    x,
    conv_state,
    state_from,
    query_start,
    query_len,
    kv_len,
    row_of,
    after_of,
    out,
    x_stride,
    C: tl.constexpr,
    LENGTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program a state taken and BLOCK_C channels: the inputs before its next token into ``out`` [Z, C, LENGTH].

    Not into their slots, where other programs may still have to read what a row started with.
    """
    taken = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    column = tl.arange(0, BLOCK_K)
    inside = (channel < C)[:, None] & (column < LENGTH)[None, :]
    row = tl.load(row_of + taken)
    offset = tl.load(after_of + taken) - LENGTH + column
    length = tl.load(query_len + row)
    is_known = (length != tl.load(kv_len + row)) & (length > 0)
    is_own = (offset >= 0) & (length > 0)
    token = (tl.load(query_start + row) + offset).to(tl.int64)
    own = tl.load(x + token[None, :] * x_stride + channel[:, None], mask=inside & is_own[None, :], other=0.0)
    history = conv_state + tl.load(state_from + row) * (C * LENGTH)
    past = channel[:, None] * LENGTH + (offset + LENGTH)[None, :]
    before = tl.load(history + past, mask=inside & (offset < 0)[None, :] & is_known, other=0.0)
    new = tl.where(is_own[None, :], own.to(tl.float32), before.to(tl.float32))
    place = taken.to(tl.int64) * (C * LENGTH) + channel[:, None] * LENGTH + column[None, :]
    tl.store(out + place, new.to(out.dtype.element_ty), mask=inside)


# fmt: off
@triton.jit
def entering_step(
    x, dt, b, token, x_stride, dt_stride, b_stride, step_bias, least_dt, most_dt, head, channel, column, has_channel,
    has_column, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
):
    """What one token brings to a head's state: its time step, x and B."""
    group = head // (H // G)
    step = tl.load(dt + token * dt_stride + head).to(tl.float32) + step_bias
    step = tl.minimum(tl.maximum(softplus(step), least_dt), most_dt)
    value = tl.load(x + token * x_stride + head * P + channel, mask=has_channel, other=0.0).to(tl.float32)
    enter = tl.load(b + token * b_stride + group * S + column, mask=has_column, other=0.0).to(tl.float32)
    return step, value, enter


@triton.jit
def token_step(
    x, dt, b, c, token, x_stride, dt_stride, b_stride, c_stride, step_bias, least_dt, most_dt, head, channel, column,
    has_channel, has_column, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
):
    """The same, and its C."""
    step, value, enter = entering_step(
        x, dt, b, token, x_stride, dt_stride, b_stride, step_bias, least_dt, most_dt, head, channel, column,
        has_channel, has_column, H, P, G, S)
    leave = tl.load(c + token * c_stride + head // (H // G) * S + column, mask=has_column, other=0.0).to(tl.float32)
    return step, value, enter, leave
# fmt: on


@triton.jit(do_not_specialize=["dummy_slot"])
def state_update_kernel(
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
    query_len,
    kv_len,
    gate,
    y,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    gate_stride,
    least_dt,
    most_dt,
    dummy_slot,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    HAS_GATE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a decode row, head and BLOCK_P of its channels, in one pass over the state.

    Channels and heads lie on the fastest axis, so that programs that run together touch neighbouring memory.
    Padding rows, which name the dummy slot, move no state. The first programs to run read their states, which nothing
    else in a forward writes, while the kernel before still runs.
    """
    PARTS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    row = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) // PARTS
    channel = (tl.program_id(0) % PARTS) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.arange(0, BLOCK_S)
    has_channel, has_column = channel < P, column < S
    if USE_PDL:
        gdc_launch_dependents()
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    step_bias = tl.load(dt_bias + head).to(tl.float32)
    skip = tl.load(d + head).to(tl.float32)
    source_slot, target_slot = tl.load(state_from + row), tl.load(state_to + row)
    is_held = (tl.load(query_len + row) != tl.load(kv_len + row)) & (target_slot != dummy_slot)
    inside = has_channel[:, None] & has_column[None, :]
    place = (head * P + channel)[:, None] * S + column[None, :]
    before = tl.load(state + source_slot * (H * P * S) + place, mask=inside & is_held, other=0.0)
    if USE_PDL:
        gdc_wait()
    out = y + (row * H + head) * P + channel
    if target_slot == dummy_slot:
        tl.store(out, tl.zeros((BLOCK_P,), dtype=y.dtype.element_ty), mask=has_channel)
        return
    step, value, enter, leave = token_step(
        x, dt, b, c, row, x_stride, dt_stride, b_stride, c_stride, step_bias, least_dt, most_dt, head, channel,
        column, has_channel, has_column, H, P, G, S)  # fmt: skip
    after = before.to(tl.float32) * tl.exp(-step * rate) + (value * step)[:, None] * enter[None, :]
    tl.store(state + target_slot * (H * P * S) + place, after.to(state.dtype.element_ty), mask=inside)
    seen = tl.sum(after * leave[None, :], 1) + value * skip
    if HAS_GATE:
        seen *= silu(tl.load(gate + row * gate_stride + head * P + channel, mask=has_channel, other=0.0).to(tl.float32))
    tl.store(out, seen.to(y.dtype.element_ty), mask=has_channel)


@triton.jit(do_not_specialize=["dummy_slot", "first", "kept_stride"])
def state_walk_kernel(
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
    USE_PDL: tl.constexpr,
):
    """The same for prefill rows of few tokens, one after the other with the state in registers.

    ``kept`` [P, kept_stride] names the slot that takes the state behind so many tokens, -1: none.
    """
    PARTS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    row = tl.program_id(1).to(tl.int64) + first
    head = tl.program_id(0) // PARTS
    channel = (tl.program_id(0) % PARTS) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.arange(0, BLOCK_S)
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
    length = tl.load(query_len + row)
    begin = tl.load(query_start + row)
    is_fresh = length == tl.load(kv_len + row)
    inside = has_channel[:, None] & has_column[None, :]
    place = (head * P + channel)[:, None] * S + column[None, :]
    held = tl.load(state + source_slot * (H * P * S) + place, mask=inside & (is_fresh == 0), other=0.0).to(tl.float32)
    for done in range(0, length.to(tl.int32)):
        token = begin + done
        step, value, enter, leave = token_step(
            x, dt, b, c, token, x_stride, dt_stride, b_stride, c_stride, step_bias, least_dt, most_dt, head, channel,
            column, has_channel, has_column, H, P, G, S)  # fmt: skip
        held = held * tl.exp(-step * rate) + (value * step)[:, None] * enter[None, :]
        seen = tl.sum(held * leave[None, :], 1) + value * skip
        tl.store(y + (token * H + head) * P + channel, seen.to(y.dtype.element_ty), mask=has_channel)
        if HAS_KEPT:
            slot = tl.load(kept + (row - first) * kept_stride + done + 1)
            if slot >= 0:
                tl.store(state + slot * (H * P * S) + place, held.to(state.dtype.element_ty), mask=inside)
    tl.store(state + target_slot * (H * P * S) + place, held.to(state.dtype.element_ty), mask=inside)


@triton.jit
def zero_fresh_kernel(state, state_from, query_len, kv_len, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row and BLOCK elements of its slot: zeros where the row starts anew, else nothing."""
    row = tl.program_id(0)
    if tl.load(query_len + row) == tl.load(kv_len + row):
        place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), dtype=state.dtype.element_ty)
        tl.store(state + tl.load(state_from + row) * SIZE + place, zeros, mask=place < SIZE)


@triton.jit
def gated_norm_kernel(
    y, gate, weight, out, y_stride, gate_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr
):
    """One program a token and group of SIZE channels."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    gain = tl.load(weight + group * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(y + token * y_stride + group * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + token * gate_stride + group * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    value = value * silu(opened)
    factor = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    place = (token * tl.num_programs(1) + group) * SIZE + column
    tl.store(out + place, (value * factor * gain).to(out.dtype.element_ty), mask=inside)
