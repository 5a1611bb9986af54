# mypy: ignore-errors
# This is device code in Triton's language, which a Python type checker does not know.
"""A Gluon product of up to 32 rows with a weight matrix, which reads the matrix once. See ``triton_products.py``.

Gluon is Triton's language of explicit layouts. Norm before, bias, activation and residual after are part of it, as in
``triton_linear.py``. Capital parameters are compile-time constants.
It computes ``W x^T``: the weights are the left operand of ``mma``, whose 16 rows they fill however few rows ``x`` has.
The instruction's inputs may stand for any, as long as they are the same in both operands, so each thread takes 8
neighbours (``k_width``): both come from memory into the registers that multiply them, in loads of 16 bytes, without
shared memory between, and the weights of a pass are in flight while those before are multiplied.
Each warp has inputs of its own, and a norm of its own where they are parts. Their sums, and those of SPLITS programs
that share an output, are added in fixed order, so a row's result is the same in every run and beside any other rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""Of a program's threads; Triton 3.7 has given it another name."""


@gluon.jit
def along(size: gl.constexpr, dim: gl.constexpr, layout: gl.constexpr):
    """0 to ``size`` along one of three dimensions."""
    if dim == 0:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, size, gl.SliceLayout(1, gl.SliceLayout(2, layout))), 1), 2)
    elif dim == 1:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, size, gl.SliceLayout(0, gl.SliceLayout(2, layout))), 0), 2)
    else:
        return gl.expand_dims(gl.expand_dims(gl.arange(0, size, gl.SliceLayout(0, gl.SliceLayout(1, layout))), 0), 1)


@gluon.jit
def stream(pointers):
    """Weights, which nobody reads twice: they are the first to leave the caches."""
    return gl.load(pointers, eviction_policy="evict_first")


@gluon.jit
def read_ahead(
    weight, outputs, INPUTS: gl.constexpr, FIRST: gl.constexpr, PREFETCH: gl.constexpr, BLOCK_N: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Have PREFETCH weights of each output, behind its FIRST, read into the L2 cache, a piece a thread."""
    PIECES: gl.constexpr = 32 * WARPS // BLOCK_N
    gl.static_assert(PREFETCH % (8 * PIECES) == 0, "the instruction takes multiples of 16 bytes")
    threads: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    thread = gl.arange(0, 32 * WARPS, threads)
    n = gl.minimum(gl.program_id(0) * BLOCK_N + thread % BLOCK_N, outputs - 1)
    piece = weight + n.to(gl.int64) * INPUTS + FIRST + thread // BLOCK_N * (PREFETCH // PIECES)
    num_bytes = gl.full([32 * WARPS], PREFETCH // PIECES * 2, gl.int32, threads)
    gl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [piece, num_bytes],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def combined(total, sums, arrivals, place, SPLITS: gl.constexpr):
    """What the programs that share outputs have summed up, for the last of them to arrive; and whether this is it.

    Programs leave their sums in memory and count themselves in; the last one adds all up, and leaves the counter at 0.
    """
    size: gl.constexpr = total.shape[0] * total.shape[1]
    tile = gl.program_id(0)
    own = sums + tile * SPLITS * size + place
    gl.store(own + gl.program_id(1) * size, total)
    barrier()
    is_last = gl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
    if is_last:
        total = gl.load(own, cache_modifier=".cg")
        for split in gl.static_range(1, SPLITS):
            total += gl.load(own + split * size, cache_modifier=".cg")
        gl.store(arrivals + tile, 0)
    return total, is_last


@gluon.jit
def squared(wide):
    """Squares, those of a thread's 8 neighbours added."""
    shape: gl.constexpr = [wide.shape[0], wide.shape[1] // 8, 8, wide.shape[2]]
    return gl.sum(gl.reshape(wide * wide, shape), 2)


@gluon.jit
def entering(x_tile, gain_tile, squares, begin, has_m, HAS_NORM: gl.constexpr):
    """Inputs of one pass, times the norm's weights, and the sums of their squares so far."""
    value = gl.load(x_tile + begin, mask=has_m, other=0.0, eviction_policy="evict_last")
    if HAS_NORM:
        wide = value.to(gl.float32)
        squares += squared(wide)
        value = (wide * gl.load(gain_tile + begin).to(gl.float32)).to(value.dtype)
    return value, squares


@gluon.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    x,
    weight,
    norm_weight,
    bias,
    residual,
    out,
    sums,
    arrivals,
    eps,
    rows,
    outputs,
    INPUTS: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_PARTS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    USE_PDL: gl.constexpr,
    PREFETCH: gl.constexpr,
    AHEAD: gl.constexpr,
    SPLITS: gl.constexpr,
    WARPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
):
    """One program BLOCK_N outputs of all rows over its share of the inputs, one of SPLITS.

    A pass is BLOCK_K inputs of each warp; shares are a multiple of it. With HAS_PARTS each warp's inputs are neighbours
    and have a norm of their own; else a pass's inputs are neighbours.
    Weights may be read before ``gdc_wait``, that is while the kernel before still runs; nothing else may.
    """
    IS_SWIGLU: gl.constexpr = ACTIVATION == "swiglu"
    PASS: gl.constexpr = WARPS * BLOCK_K
    SHARE: gl.constexpr = INPUTS // SPLITS
    SIZE: gl.constexpr = SHARE // WARPS if HAS_PARTS else INPUTS
    SPAN: gl.constexpr = SIZE if HAS_PARTS else BLOCK_K
    STEP: gl.constexpr = BLOCK_K if HAS_PARTS else PASS
    LAST: gl.constexpr = (SHARE // PASS - 1) * STEP
    gl.static_assert(INPUTS % (SPLITS * PASS) == 0, "passes divide the inputs")
    gl.static_assert(AHEAD == 1 or (LAST > 0 and not IS_SWIGLU), "two passes under way need two, of one matrix")
    gl.static_assert(SPLITS == 1 or HAS_PARTS or not HAS_NORM, "a norm is of all that a program reads")
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=8)
    right: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=mma, k_width=8)
    flat: gl.constexpr = gl.SliceLayout(0, mma)

    begin = gl.program_id(1) * SHARE
    n = gl.minimum(gl.program_id(0) * BLOCK_N + along(BLOCK_N, 1, left), outputs - 1)
    tile = weight + begin + n.to(gl.int64) * INPUTS + along(WARPS, 0, left) * SPAN + along(BLOCK_K, 2, left)
    if IS_SWIGLU:
        to_up = outputs.to(gl.int64) * INPUTS
    k = begin + along(WARPS, 0, right) * SPAN + along(BLOCK_K, 1, right)
    m = along(BLOCK_M, 2, right)
    has_m = m < rows
    x_tile, gain_tile = x + m * INPUTS + k, norm_weight + k if HAS_NORM else None
    w = stream(tile)
    if IS_SWIGLU:
        w_up = stream(tile + to_up)
    if AHEAD == 2:
        second = stream(tile + STEP)
    if USE_PDL:
        if PREFETCH > 0:
            read_ahead(weight + begin, outputs, INPUTS, AHEAD * PASS, PREFETCH, BLOCK_N, WARPS)
            if IS_SWIGLU:
                read_ahead(weight + begin + to_up, outputs, INPUTS, PASS, PREFETCH, BLOCK_N, WARPS)
        gdc_launch_dependents()
        gdc_wait()

    total = gl.zeros((WARPS, BLOCK_N, BLOCK_M), gl.float32, mma)
    up = gl.zeros((WARPS, BLOCK_N, BLOCK_M), gl.float32, mma)
    squares = squared(gl.zeros((WARPS, BLOCK_K, BLOCK_M), gl.float32, right))
    for at in range(0, LAST - (AHEAD - 1) * STEP, STEP):
        following = stream(tile + at + AHEAD * STEP)
        if IS_SWIGLU:
            following_up = stream(tile + to_up + at + STEP)
        value, squares = entering(x_tile, gain_tile, squares, at, has_m, HAS_NORM)
        total = mma_v2(w, value, total)
        if AHEAD == 2:
            w = second
            second = following
        else:
            w = following
        if IS_SWIGLU:
            up = mma_v2(w_up, value, up)
            w_up = following_up
    if AHEAD == 2:
        value, squares = entering(x_tile, gain_tile, squares, LAST - STEP, has_m, HAS_NORM)
        total = mma_v2(w, value, total)
        w = second
    value, squares = entering(x_tile, gain_tile, squares, LAST, has_m, HAS_NORM)
    total = mma_v2(w, value, total)
    if HAS_PARTS:
        mean = gl.convert_layout(gl.sum(squares, 1), gl.SliceLayout(1, mma)) / SIZE
        total = total * gl.expand_dims(gl.rsqrt(mean + eps), 1)
    total = gl.sum(total, 0)
    if IS_SWIGLU:
        up = gl.sum(mma_v2(w_up, value, up), 0)

    own_n = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(1, flat)), 1)
    out_m = gl.expand_dims(gl.arange(0, BLOCK_M, gl.SliceLayout(0, flat)), 0)
    out_n = gl.program_id(0) * BLOCK_N + own_n
    is_own = out_n < outputs
    if SPLITS > 1:
        total, is_last = combined(total, sums, arrivals, own_n * BLOCK_M + out_m, SPLITS)
        if not is_last:
            return
    if HAS_NORM and not HAS_PARTS:
        mean = gl.convert_layout(gl.sum(gl.sum(squares, 1), 0), gl.SliceLayout(0, flat)) / INPUTS
        factor = gl.expand_dims(gl.rsqrt(mean + eps), 0)
        total = total * factor
        if IS_SWIGLU:
            up = up * factor
    if HAS_BIAS:
        total += gl.load(bias + out_n, mask=is_own, other=0.0).to(gl.float32)
        if IS_SWIGLU:
            up += gl.load(bias + outputs + out_n, mask=is_own, other=0.0).to(gl.float32)
    if IS_SWIGLU:
        total = total / (1.0 + gl.exp(-total)) * up
    if ACTIVATION == "relu2":
        total = gl.where(total <= 0.0, 0.0, total * total)
    place = out_m * outputs + out_n
    inside = (out_m < rows) & is_own
    if HAS_RESIDUAL:
        total += gl.load(residual + place, mask=inside, other=0.0).to(gl.float32)
    gl.store(out + place, total.to(out.dtype.element_ty), mask=inside)
