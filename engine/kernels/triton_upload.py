# mypy: ignore-errors
# This is device code in Triton's language, which a Python type checker does not know.
"""A step's inputs, read from pinned host memory by a kernel: beside the copy engine kernels wait ten microseconds.

Counted in words of 8 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256
_SIZES = [f"{name}_{part}" for part in range(3) for name in ("count", "first", "stride", "fields")]


@triton.jit(do_not_specialize=_SIZES)
def upload_kernel(
    source,
    target,
    count_0,
    first_0,
    stride_0,
    fields_0,
    count_1,
    first_1,
    stride_1,
    fields_1,
    count_2,
    first_2,
    stride_2,
    fields_2,
    BLOCK: tl.constexpr,
):
    """Of each part's fields, which lie ``stride`` words apart, the first ``count`` words, one program a BLOCK.

    The host rewrites what is read, so no cache may answer.
    """
    part = tl.program_id(0)
    parts_0, parts_1 = fields_0 * tl.cdiv(count_0, BLOCK), fields_1 * tl.cdiv(count_1, BLOCK)
    if part < parts_0:
        count, first, stride = count_0, first_0, stride_0
    elif part < parts_0 + parts_1:
        count, first, stride = count_1, first_1, stride_1
        part -= parts_0
    else:
        count, first, stride = count_2, first_2, stride_2
        part -= parts_0 + parts_1
    blocks = tl.cdiv(count, BLOCK)
    within = part % blocks * BLOCK + tl.arange(0, BLOCK)
    place = first + part // blocks * stride + within
    tl.store(target + place, tl.load(source + place, mask=within < count, volatile=True), mask=within < count)


def bind_upload(source: Tensor, target: Tensor) -> Callable[[Sequence[Sequence[int]], Sequence[int]], None]:
    """What enqueues the kernel on the current stream.

    It is compiled now, and so launched as it is, without Triton's look at each argument.

    Args:
        source: [words] int64, pinned host memory.
        target: [words] int64, on the device.

    Returns:
        A function of three parts, each (first word, words from a field to the next, fields), and of as many counts, the
        words that a part's fields are taken by; 0: the part is left out.
    """
    no_sizes = [0] * len(_SIZES)
    kernel = upload_kernel.warmup(source, target, *no_sizes, BLOCK, grid=(1,), num_warps=2)

    def upload(parts, counts):
        programs = sum(fields * triton.cdiv(count, BLOCK) for (_, _, fields), count in zip(parts, counts, strict=True))
        if programs:
            sizes = [size for part, count in zip(parts, counts, strict=True) for size in (count, *part)]
            kernel[programs, 1, 1](source, target, *sizes, BLOCK)

    return upload
