"""Search for the fastest tiles of products of 1 to 32 rows on one GPU.

    python benchmarks/gpu_products.py --rows 8 16
    python benchmarks/gpu_products.py --ops nemotron --rows 1 8

A product is timed with what the decoder has around it, in a graph that runs it over many weights in turn, so that none
is in the cache; ``gpu_forward.py`` times whole forwards. A pool of processes fills Triton's cache first. What wins is
written by hand into ``engine/kernels/triton_products.py``. A tile is printed as outputs n, inputs k, warps w, stages s,
splits x and prefetch p, times are µs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from gpu_kernels import time_us
from torch import Tensor
from triton.runtime.errors import OutOfResources

from engine.kernels import triton as fused
from engine.kernels import triton_few_rows, triton_linear
from engine.kernels import triton_products as products
from engine.kernels.base import Activation
from engine.kernels.triton_products import Tile


class Op(NamedTuple):
    """A product behind a norm, or one that is added to the residual."""

    outputs: int
    """Behind the activation."""
    inputs: int
    is_normed: bool
    activation: Activation | None = None

    @property
    def weight_rows(self) -> int:
        return self.outputs * (2 if self.activation == "swiglu" else 1)


OPS = {
    "qwen3-0.6b qkv": Op(4096, 1024, True),
    "qwen3-0.6b out": Op(1024, 2048, False),
    "qwen3-0.6b gate_up": Op(3072, 1024, True, "swiglu"),
    "qwen3-0.6b down": Op(1024, 3072, False),
    "qwen3-0.6b head": Op(151936, 1024, True),
    "qwen3-8b qkv": Op(6144, 4096, True),
    "qwen3-8b out": Op(4096, 4096, False),
    "qwen3-8b gate_up": Op(12288, 4096, True, "swiglu"),
    "qwen3-8b down": Op(4096, 12288, False),
    "qwen3-8b head": Op(151936, 4096, True),
    "nemotron-h-4b project": Op(16496, 3072, True),
    "nemotron-h-4b out": Op(3072, 7168, False),
    "nemotron-h-4b up": Op(12288, 3072, True, "relu2"),
    "nemotron-h-4b down": Op(3072, 12288, False),
    "nemotron-h-4b qkv": Op(6144, 3072, True),
    "hybrid-2b project": Op(10304, 2048, True),
    "hybrid-2b out": Op(2048, 4096, False),
    "hybrid-2b up": Op(8192, 2048, True, "relu2"),
    "hybrid-2b down": Op(2048, 8192, False),
}
COLD_BYTES = 160 << 20
SHARED_BYTES = (100 << 10, 73 << 10)
"""Of one program, so that two or three fit on a multiprocessor: of this kernel, or of this and the next."""
MOST_SHARED_BYTES = 220 << 10
BANDWIDTH = 4.29e12


@dataclass(frozen=True)
class Case:
    """A product of ``rows`` rows; without a tile it is cuBLAS."""

    op: str
    rows: int
    tile: Tile | None


def cases(rows_wanted: list[int], ops: list[str]) -> Iterator[Case]:
    for op, rows in itertools.product(ops, rows_wanted):
        chosen = OPS[op]
        if rows > 1 and (chosen.activation == "swiglu" or chosen.outputs > 1 << 16):
            continue  # left to cuBLAS
        now = now_tile(op, rows)
        found = one_row_tiles(chosen.outputs, chosen.inputs) if rows == 1 else few_rows_tiles(chosen, rows)
        for tile in dict.fromkeys((None, now, *found)):
            yield Case(op, rows, tile)


def now_tile(op: str, rows: int) -> Tile | None:
    """What the engine takes; None: cuBLAS."""
    outputs, inputs, is_normed, activation = OPS[op]
    if rows == 1:
        return products.one_row_tile(outputs, inputs, is_swiglu=activation == "swiglu")
    return products.few_rows_tile(rows, outputs, inputs, is_normed=is_normed)


def one_row_tiles(outputs: int, inputs: int) -> Iterator[Tile]:
    for block_n, block_k, warps in itertools.product((1, 2, 4, 8, 16), (512, 1024, 2048), (4, 8)):
        per_thread = block_n * block_k // (32 * warps)
        if 16 <= per_thread <= 64 and block_k <= inputs and outputs // block_n >= 32:
            yield Tile(block_n, block_k, warps)


def few_rows_tiles(op: Op, rows: int) -> Iterator[Tile]:
    """Every cut, on 4 and on 8 warps, with as many stages as fit; the first one without reading ahead as well."""
    outputs, inputs, is_normed, _ = op
    block_m = 16 if rows <= 16 else 32
    # Only what starts early reads ahead, and what all programs read ahead has to fit in the cache.
    prefetch = 0 if products.is_large(outputs * inputs) else 4096 if outputs * inputs <= 1 << 23 else 1024
    found = [cut for cut in cuts(outputs) if block_m * cut[0] <= 2048 and (cut[1] == 1 or not is_normed)]
    for (block_n, splits), (block_k, warps) in itertools.product(found, ((128, 4), (256, 4), (512, 8))):
        bytes_of_pass = (block_m + block_n) * block_k * 2
        passes = -(-inputs // (block_k * splits))
        programs = -(-outputs // block_n) * splits
        for shared in SHARED_BYTES if programs > 264 else SHARED_BYTES[:1]:
            buffers = min(5, passes, max(2, shared // bytes_of_pass))
            tile = Tile(block_n, block_k, warps, buffers + 1, splits, prefetch)
            if buffers * bytes_of_pass <= MOST_SHARED_BYTES:
                yield tile
        if (block_n, splits) == found[0]:
            yield replace(tile, prefetch=0)


def cuts(outputs: int) -> Iterator[tuple[int, int]]:
    """Outputs of a program and splits, where there are enough programs and not far too many.

    Of those that share sums there are as many as run at once, 1 to 3 on each of 132 multiprocessors.
    """
    for block_n in (8, 16, 32, 64, 128):
        alone = -(-outputs // block_n)
        if 64 <= alone <= 400 or (block_n == 32 and 400 < alone <= 800):
            yield block_n, 1
        for splits in (2, 4, 8):
            if any(120 * each <= alone * splits <= 132 * each + 8 for each in (1, 2, 3)):
                yield block_n, splits


# -- compiling -----------------------------------------------------------------------------------------------------


def compile_case(case: Case) -> str | None:
    """In a worker process: fill Triton's cache; the error's text if it does not compile."""
    try:
        if case.tile is not None:
            _compile(case, case.tile)
    except Exception as error:
        return f"{case}: {str(error)[:200]}"
    return None


def _compile(case: Case, tile: Tile) -> None:
    outputs, inputs, is_normed, activation = OPS[case.op]
    half = torch.bfloat16
    if case.rows == 1:
        options = products.one_row_options(
            tile, outputs, inputs, norm=is_normed, bias=False, residual=not is_normed, activation=activation
        )
        around = (None, half, None) if is_normed else (None, None, half)
        eps = 1e-6 if is_normed else 0.0
        triton_linear.one_row_kernel.warmup(half, half, *around, half, eps, outputs, grid=(1,), **options)
        return
    is_whole, is_relu2 = tile.splits == 1, activation == "relu2"
    is_added = is_whole and not is_normed
    options = products.few_rows_options(tile, case.rows, outputs, inputs, bias=False, residual=is_added)
    after = (None, half if is_added else None, half if is_whole else torch.float32)
    triton_few_rows.few_rows_kernel.warmup(
        half, half, *after, case.rows, outputs, grid=(1, 1), IS_RELU2=is_relu2, **options
    )


# -- timing --------------------------------------------------------------------------------------------------------


class Bench:
    """Weights of one operation at a time."""

    def __init__(self) -> None:
        self.op = ""
        self.weights: list[Tensor] = []

    def time(self, case: Case) -> float | None:
        """Microseconds; None for a tile that does not fit on a multiprocessor."""
        outputs, inputs, is_normed, activation = op = OPS[case.op]
        if case.op != self.op:
            self.fill(case.op, op.weight_rows, inputs)
        x = torch.randn(case.rows, inputs, device="cuda").bfloat16()
        norm = SimpleNamespace(weight=torch.ones(inputs, device="cuda").bfloat16(), eps=1e-6) if is_normed else None
        stream = None if is_normed else torch.randn(case.rows, outputs, device="cuda").bfloat16()
        kernels = fused.TritonKernels()

        def call(weight: Tensor) -> Tensor:
            if case.tile is not None and case.rows == 1:
                around: Any = {"norm": norm, "activation": activation, "residual": stream, "out": stream}
                return products.one_row(x, weight, case.tile, **around)
            if stream is not None and case.tile is not None:
                return products.few_rows(x, weight, case.tile, residual=stream, out=stream)
            if stream is not None:
                return stream.addmm_(x, weight.t())
            normed = kernels.rms_norm(x, norm)
            if case.tile is not None:
                return products.few_rows(normed, weight, case.tile, is_relu2=activation == "relu2")
            result = torch.nn.functional.linear(normed, weight)
            return kernels.activate(result, activation) if activation else result

        try:
            return time_us([lambda weight=weight: call(weight) for weight in self.weights])
        except OutOfResources:
            return None

    def fill(self, op: str, total: int, inputs: int) -> None:
        self.op = op
        self.weights.clear()
        copies = max(2, min(24, COLD_BYTES // (total * inputs * 2)))
        self.weights += [torch.randn(total, inputs, device="cuda").mul_(0.02).bfloat16() for _ in range(copies)]


def report(results: list[tuple[Case, float]]) -> None:
    for (op, rows), items in itertools.groupby(results, lambda item: (item[0].op, item[0].rows)):
        size = OPS[op].weight_rows * OPS[op].inputs * 2
        times = {case.tile: time for case, time in items}
        cublas = times.pop(None)
        now = times.get(now_tile(op, rows), cublas)
        best = sorted(times.items(), key=lambda item: item[1])[:3]
        print(
            f"{op:21s} {rows:2d} rows: floor {size / BANDWIDTH * 1e6:5.1f}  cublas {cublas:5.1f}  now {now:5.1f}  "
            f"best {best[0][1]:5.1f} µs {size / best[0][1] / 1e3:4.0f} GB/s {short(best[0][0])}  next "
            + ", ".join(f"{time:.1f} {short(tile)}" for tile, time in best[1:])
        )


def short(tile: Tile) -> str:
    names = zip("nkwsxp", asdict(tile).values(), strict=True)
    return " ".join(f"{letter}{value}" for letter, value in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--ops", nargs="+", default=[""], help="what the names of operations begin with")
    options = parser.parse_args()
    with torch.inference_mode():
        tiles(list(cases(options.rows, [op for op in OPS if op.startswith(tuple(options.ops))])))


def tiles(wanted: list[Case]) -> None:
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        faults = [fault for fault in pool.map(compile_case, wanted, chunksize=4) if fault]
    print(f"{len(wanted)} cases, {len(faults)} do not compile", *faults[:3], sep="\n")
    bench = Bench()
    timed = [(case, time) for case in wanted if (time := bench.time(case)) is not None]
    report(timed)
    if os.environ.get("OUT"):
        found = [[asdict(case), time] for case, time in timed]
        Path(os.environ["OUT"], "gpu_products.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
