# mypy: ignore-errors
# This is device code in Triton's language, which a Python type checker does not know.
"""Triton kernels of replayed rows: decode rows of W tokens whose slots hold the state before their last forward.

Letters and rules as in ``triton_kernels.py``. Row i has the tokens from i * W on. ``replayed`` says how many tokens of
its last forward a row has to read once more, 0: its slot's state and history are exact.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.triton_elementwise import silu
from engine.ssm.triton_kernels import entering_step, token_step


@triton.jit
def conv_replay_kernel(
    x,
    weight,
    bias,
    conv_state,
    state_from,
    state_to,
    replayed,
    query_len,
    kv_len,
    out,
    x_stride,
    C: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a row and BLOCK_C channels: outputs of its W tokens, and the history moved on by them.

    A history is LENGTH inputs. It ends with the W of the last forward, of which the rejected ones are passed over: so
    the input k before the row's first token lies in column ``shift + K - 1 - k``.
    """
    LENGTH: tl.constexpr = K - 2 + W
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    column = tl.arange(0, BLOCK_K)
    inside = channel < C
    start = tl.zeros((BLOCK_C,), dtype=tl.float32)
    if HAS_BIAS:
        start = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    is_known = inside & (tl.load(query_len + row) != tl.load(kv_len + row))
    count = tl.load(replayed + row)
    shift = tl.where(count > 0, count, W) - 1
    history = conv_state + tl.load(state_from + row) * (C * LENGTH) + channel * LENGTH
    target = conv_state + tl.load(state_to + row) * (C * LENGTH) + channel * LENGTH
    own = x + row * W * x_stride + channel
    # The newest K - 2 inputs before the row's tokens stay, and become the oldest.
    stays = is_known[:, None] & (column < K - 2)[None, :]
    older = tl.load(history[:, None] + (shift + 1) + column[None, :], mask=stays, other=0.0)
    for place in tl.static_range(W):
        total = start
        for k in tl.static_range(K):
            gain = tl.load(weight + channel * K + k, mask=inside, other=0.0).to(tl.float32)
            if place + k >= K - 1:
                value = tl.load(own + (place + k - (K - 1)) * x_stride, mask=inside, other=0.0)
            else:
                value = tl.load(history + shift + place + k, mask=is_known, other=0.0)
            total += value.to(tl.float32) * gain
        tl.store(out + (row * W + place) * C + channel, silu(total).to(out.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # a column is written where another thread may still have to read
    tl.store(target[:, None] + column[None, :], older, mask=inside[:, None] & (column < K - 2)[None, :])
    for place in tl.static_range(W):
        value = tl.load(own + place * x_stride, mask=inside, other=0.0)
        tl.store(target + (K - 2 + place), value.to(conv_state.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["dummy_slot"])
def state_replay_kernel(
    x,
    dt,
    b,
    c,
    a_log,
    d,
    dt_bias,
    state,
    kept_x,
    kept_dt,
    kept_b,
    state_from,
    state_to,
    replayed,
    query_len,
    kv_len,
    y,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    least_dt,
    most_dt,
    dummy_slot,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    W: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a row, head and BLOCK_P of its channels, with the state in registers from beginning to end.

    It is read once, lets the replayed tokens enter, is written once, and goes through the row's own tokens. What slots
    keep is only read here, as other programs read the same (:func:`keep_inputs_kernel` follows). All W kept tokens are
    loaded, whatever the count, so that those loads wait for nothing.
    """
    PARTS: tl.constexpr = (P + BLOCK_P - 1) // BLOCK_P
    row = tl.program_id(1).to(tl.int64)
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
    out = y + (row * W * H + head) * P + channel
    if target_slot == dummy_slot:
        for place in tl.static_range(W):
            tl.store(out + place * (H * P), tl.zeros((BLOCK_P,), dtype=y.dtype.element_ty), mask=has_channel)
        return
    is_fresh = tl.load(query_len + row) == tl.load(kv_len + row)
    count = tl.load(replayed + row)
    inside = has_channel[:, None] & has_column[None, :]
    element = (head * P + channel)[:, None] * S + column[None, :]
    held = tl.load(state + source_slot * (H * P * S) + element, mask=inside & (is_fresh == 0), other=0.0).to(tl.float32)
    for place in tl.static_range(W):
        token = source_slot * W + place
        step, value, enter = entering_step(
            kept_x, kept_dt, kept_b, token, H * P, H, G * S, step_bias, least_dt, most_dt, head, channel, column,
            has_channel, has_column, H, P, G, S)  # fmt: skip
        stands = place < count
        step, value, enter = tl.where(stands, step, 0.0), tl.where(stands, value, 0.0), tl.where(stands, enter, 0.0)
        held = held * tl.exp(-step * rate) + (value * step)[:, None] * enter[None, :]
    tl.store(state + target_slot * (H * P * S) + element, held.to(state.dtype.element_ty), mask=inside)
    for place in tl.static_range(W):
        step, value, enter, leave = token_step(
            x, dt, b, c, row * W + place, x_stride, dt_stride, b_stride, c_stride, step_bias, least_dt, most_dt, head,
            channel, column, has_channel, has_column, H, P, G, S)  # fmt: skip
        held = held * tl.exp(-step * rate) + (value * step)[:, None] * enter[None, :]
        seen = tl.sum(held * leave[None, :], 1) + value * skip
        tl.store(out + place * (H * P), seen.to(y.dtype.element_ty), mask=has_channel)


@triton.jit(do_not_specialize=["dummy_slot"])
def keep_inputs_kernel(
    x,
    dt,
    b,
    kept_x,
    kept_dt,
    kept_b,
    state_to,
    x_stride,
    dt_stride,
    b_stride,
    dummy_slot,
    XS: tl.constexpr,
    DTS: tl.constexpr,
    BS: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program a token of a row and BLOCK elements: what it brings to the state into its row's slot.

    XS, DTS and BS are the elements of a token's x, dt and B.
    """
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if USE_PDL:
        gdc_launch_dependents()
        gdc_wait()
    slot = tl.load(state_to + token // W)
    if slot == dummy_slot:
        return
    place = slot * W + token % W
    own = tl.load(x + token * x_stride + element, mask=element < XS, other=0.0)
    tl.store(kept_x + place * XS + element, own.to(kept_x.dtype.element_ty), mask=element < XS)
    own = tl.load(dt + token * dt_stride + element, mask=element < DTS, other=0.0)
    tl.store(kept_dt + place * DTS + element, own.to(kept_dt.dtype.element_ty), mask=element < DTS)
    own = tl.load(b + token * b_stride + element, mask=element < BS, other=0.0)
    tl.store(kept_b + place * BS + element, own.to(kept_b.dtype.element_ty), mask=element < BS)
