"""Search for the fastest tiles of products of 1 to 32 rows on one GPU.

    python benchmarks/gpu_products.py --rows 8 16
    python benchmarks/gpu_products.py --ops nemotron --rows 1 8

A product is timed with what the decoder has around it, in a graph that runs it over many weights in turn, so that none
is in the cache; ``gpu_forward.py`` times whole forwards. A pool of processes fills Triton's cache first. What wins is
written by hand into ``engine/kernels/triton_products.py``. A tile is printed as outputs n, inputs k, warps w,
prefetch p and splits x, times are µs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
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
    "nemotron-h-4b head": Op(131072, 3072, True),
    "hybrid-2b project": Op(10304, 2048, True),
    "hybrid-2b out": Op(2048, 4096, False),
    "hybrid-2b up": Op(8192, 2048, True, "relu2"),
    "hybrid-2b down": Op(2048, 8192, False),
}
COLD_BYTES = 160 << 20
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
        now = now_tile(op, rows)
        found = one_row_tiles(chosen.outputs, chosen.inputs) if rows == 1 else few_rows_tiles(chosen, rows)
        for tile in dict.fromkeys((None, now, *found)):
            yield Case(op, rows, tile)


def now_tile(op: str, rows: int) -> Tile | None:
    """What the engine takes; None: cuBLAS."""
    outputs, inputs, is_normed, activation = OPS[op]
    if rows == 1:
        return products.one_row_tile(outputs, inputs, is_swiglu=activation == "swiglu")
    return products.few_rows_tile(rows, outputs, inputs, is_normed=is_normed, is_swiglu=activation == "swiglu")


def one_row_tiles(outputs: int, inputs: int) -> Iterator[Tile]:
    for block_n, block_k, warps in itertools.product((1, 2, 4, 8, 16), (512, 1024, 2048), (4, 8)):
        per_thread = block_n * block_k // (32 * warps)
        if 16 <= per_thread <= 64 and block_k <= inputs and outputs // block_n >= 32:
            yield Tile(block_n, block_k, warps, 0 if products.is_large(outputs * inputs) else 512)


def few_rows_tiles(op: Op, rows: int) -> Iterator[Tile]:
    """Cuts with enough programs whose operands fit into registers, and how much they read ahead."""
    rows_up = max(8, products.power_of_two(rows))
    for block_n, per_warp, warps in itertools.product((16, 32, 64), (32, 64, 128, 256), (2, 4, 8, 16)):
        pieces = block_n * per_warp * (2 if op.activation == "swiglu" else 1)
        held = pieces + rows_up * per_warp * (2 if op.is_normed else 1)
        programs = -(-op.outputs // block_n)
        passes, left = divmod(op.inputs, per_warp * warps)
        is_spread = programs >= min(90, op.outputs // 16) and programs * warps in range(256, 20000)
        if left or passes < 2 or not is_spread or pieces < 1024 or held > (8192 if rows <= 16 else 6144):
            continue
        for prefetch in (0,) if products.is_large(op.weight_rows * op.inputs) else (512,):
            yield Tile(block_n, per_warp * warps, warps, prefetch)


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
    parts: Any = {"norm": is_normed, "bias": False, "residual": not is_normed, "activation": activation}
    around = (half if is_normed else None, None if is_normed else half)
    eps = 1e-6 if is_normed else 0.0
    if case.rows == 1:
        options = products.one_row_options(tile, outputs, inputs, **parts)
        sizes: tuple[int, ...] = (outputs,)
        triton_linear.one_row_kernel.warmup(half, half, None, *around, half, eps, *sizes, grid=(1,), **options)
    else:
        options = products.few_rows_options(tile, case.rows, outputs, inputs, **parts)
        normed, residual = around
        counted = (None, None) if tile.splits == 1 else (torch.float32, torch.int32)
        triton_few_rows.few_rows_kernel.warmup(
            half, half, normed, None, residual, half, *counted, eps, case.rows, outputs, grid=(1, 1), **options
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
            around: Any = {"norm": norm, "activation": activation, "residual": stream, "out": stream}
            if case.tile is not None:
                make = products.one_row if case.rows == 1 else products.few_rows
                return make(x, weight, case.tile, **around)
            if stream is not None:
                return stream.addmm_(x, weight.t())
            result = torch.nn.functional.linear(kernels.rms_norm(x, norm), weight)
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
        best = sorted(times.items(), key=lambda item: item[1])[:6]
        print(
            f"{op:21s} {rows:2d} rows: floor {size / BANDWIDTH * 1e6:5.1f}  cublas {cublas:5.1f}  now {now:5.1f}  "
            f"best {best[0][1]:5.1f} µs {size / best[0][1] / 1e3:4.0f} GB/s {short(best[0][0])}  next "
            + ", ".join(f"{time:.1f} {short(tile)}" for tile, time in best[1:])
        )


def short(tile: Tile) -> str:
    names = zip("nkwpx", asdict(tile).values(), strict=True)
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
