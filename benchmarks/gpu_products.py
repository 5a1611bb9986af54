"""Search for the fastest tiles of products of 1 to 16 rows on one GPU, and time decode forwards that use them.

    python benchmarks/gpu_products.py tiles --rows 8 16
    python benchmarks/gpu_products.py decode --models qwen3-0.6b qwen3-8b

A product is timed with what the decoder has around it, in a graph that runs it over many weights in turn, so that none
is in the cache. A pool of processes fills Triton's cache first. What wins is written by hand into
``engine/kernels/triton_products.py``. A tile is printed as outputs n, inputs k, warps w, stages s, splits x and
prefetch p, times are µs.
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
from typing import Any
from unittest.mock import patch

import torch
from gpu_kernels import time_us
from torch import Tensor
from triton.runtime.errors import OutOfResources

from engine.batch import BatchShape, ForwardBatch
from engine.kernels import triton as fused
from engine.kernels import triton_few_rows, triton_linear
from engine.kernels import triton_products as products
from engine.kernels.triton_products import Tile
from engine.models.loader import load_model

OPS = {  # outputs, inputs, norm, swiglu, residual
    "0.6b qkv": (4096, 1024, True, False, False),
    "0.6b out": (1024, 2048, False, False, True),
    "0.6b gate_up": (3072, 1024, True, True, False),
    "0.6b down": (1024, 3072, False, False, True),
    "0.6b head": (151936, 1024, True, False, False),
    "8b qkv": (6144, 4096, True, False, False),
    "8b out": (4096, 4096, False, False, True),
    "8b gate_up": (12288, 4096, True, True, False),
    "8b down": (4096, 12288, False, False, True),
    "8b head": (151936, 4096, True, False, False),
}
COLD_BYTES = 160 << 20
SHARED_BYTES = 100 << 10
"""Of one program, so that two fit on a multiprocessor: of this kernel, or of this and the next."""
MOST_SHARED_BYTES = 220 << 10
BANDWIDTH = 4.29e12
CACHED, BLOCK_SIZE = 576, 16


@dataclass(frozen=True)
class Case:
    """A product of ``rows`` rows; without a tile it is cuBLAS."""

    op: str
    rows: int
    tile: Tile | None


def cases(rows_wanted: list[int], ops: list[str]) -> Iterator[Case]:
    for op, rows in itertools.product(ops, rows_wanted):
        outputs, inputs, _, _, residual = OPS[op]
        if rows > 1 and not residual:
            continue  # left to cuBLAS
        now = now_tile(op, rows)
        found = one_row_tiles(outputs, inputs) if rows == 1 else few_rows_tiles(outputs, inputs)
        for tile in dict.fromkeys((None, now, *found)):
            yield Case(op, rows, tile)


def now_tile(op: str, rows: int) -> Tile | None:
    """What the engine takes; None: cuBLAS."""
    outputs, inputs, _, swiglu, _ = OPS[op]
    if rows == 1:
        return products.one_row_tile(outputs, inputs, is_swiglu=swiglu)
    return products.few_rows_tile(rows, outputs, inputs)


def one_row_tiles(outputs: int, inputs: int) -> Iterator[Tile]:
    for block_n, block_k, warps in itertools.product((1, 2, 4, 8, 16), (512, 1024, 2048), (4, 8)):
        per_thread = block_n * block_k // (32 * warps)
        if 16 <= per_thread <= 64 and block_k <= inputs and outputs // block_n >= 32:
            yield Tile(block_n, block_k, warps)


def few_rows_tiles(outputs: int, inputs: int) -> Iterator[Tile]:
    """Every cut, on 4 and on 8 warps, with as many stages as fit; the first one without reading ahead as well."""
    block_m = products.MOST_ROWS
    # Only what starts early reads ahead, and what all programs read ahead has to fit in the cache.
    prefetch = 0 if products.is_large(outputs * inputs) else 4096 if outputs * inputs <= 1 << 23 else 1024
    found = [cut for cut in cuts(outputs) if block_m * cut[0] <= 2048]
    for (block_n, splits), (block_k, warps) in itertools.product(found, ((256, 4), (512, 8))):
        bytes_of_pass = (block_m + block_n) * block_k * 2
        passes = -(-inputs // (block_k * splits))
        buffers = min(5, passes, max(2, SHARED_BYTES // bytes_of_pass))
        tile = Tile(block_n, block_k, warps, buffers + 1, splits, prefetch)
        if buffers * bytes_of_pass <= MOST_SHARED_BYTES:
            yield tile
        if (block_n, splits) == found[0]:
            yield replace(tile, prefetch=0)


def cuts(outputs: int) -> Iterator[tuple[int, int]]:
    """Outputs of a program and splits, where there are enough programs and not far too many."""
    for block_n in (8, 16, 32, 64):
        alone = -(-outputs // block_n)
        if 64 <= alone <= 400:
            yield block_n, 1
        for splits in (2, 4, 8):
            if 120 <= alone * splits <= 140:
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
    outputs, inputs, norm, swiglu, residual = OPS[case.op]
    half = torch.bfloat16
    if case.rows == 1:
        options = products.one_row_options(
            tile, outputs, inputs, norm=norm, bias=False, residual=residual, is_swiglu=swiglu
        )
        around = (None, half if norm else None, half if residual else None)
        eps = 1e-6 if norm else 0.0
        triton_linear.one_row_kernel.warmup(half, half, *around, half, eps, outputs, grid=(1,), **options)
        return
    is_whole = tile.splits == 1
    options = products.few_rows_options(tile, case.rows, outputs, inputs, bias=False, residual=is_whole)
    after = (None, half if is_whole else None, half if is_whole else torch.float32)
    triton_few_rows.few_rows_kernel.warmup(half, half, *after, case.rows, outputs, grid=(1, 1), **options)


# -- timing --------------------------------------------------------------------------------------------------------


class Bench:
    """Weights of one operation at a time."""

    def __init__(self) -> None:
        self.op = ""
        self.weights: list[Tensor] = []

    def time(self, case: Case) -> float | None:
        """Microseconds; None for a tile that does not fit on a multiprocessor."""
        outputs, inputs, norm, swiglu, residual = OPS[case.op]
        if case.op != self.op:
            self.fill(case.op, outputs * (2 if swiglu else 1), inputs)
        x = torch.randn(case.rows, inputs, device="cuda").bfloat16()
        parameters = SimpleNamespace(weight=torch.ones(inputs, device="cuda").bfloat16(), eps=1e-6) if norm else None
        stream = torch.randn(case.rows, outputs, device="cuda").bfloat16() if residual else None
        kernels = fused.TritonKernels()

        def call(weight: Tensor) -> Tensor:
            if case.tile is not None and case.rows == 1:
                around: Any = {"norm": parameters, "is_swiglu": swiglu, "residual": stream, "out": stream}
                return products.one_row(x, weight, case.tile, **around)
            if case.tile is not None:
                return products.few_rows(x, weight, case.tile, residual=stream, out=stream)
            if stream is not None:
                return stream.addmm_(x, weight.t())
            result = torch.nn.functional.linear(kernels.rms_norm(x, parameters) if parameters else x, weight)
            return fused.swiglu(result) if swiglu else result

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
        outputs, inputs, _, swiglu, _ = OPS[op]
        size = outputs * (2 if swiglu else 1) * inputs * 2
        times = {case.tile: time for case, time in items}
        cublas = times.pop(None)
        now = times.get(now_tile(op, rows), cublas)
        best = sorted(times.items(), key=lambda item: item[1])[:3]
        print(
            f"{op:12s} {rows:2d} rows: floor {size / BANDWIDTH * 1e6:5.1f}  cublas {cublas:5.1f}  now {now:5.1f}  "
            f"best {best[0][1]:5.1f} µs {size / best[0][1] / 1e3:4.0f} GB/s {short(best[0][0])}  next "
            + ", ".join(f"{time:.1f} {short(tile)}" for tile, time in best[1:])
        )


def short(tile: Tile) -> str:
    names = zip("nkwsxp", asdict(tile).values(), strict=True)
    return " ".join(f"{letter}{value}" for letter, value in names)


# -- decode --------------------------------------------------------------------------------------------------------


def decode_ms(model: Any, rows: int) -> float:
    """Milliseconds of a graphed decode forward of ``rows`` rows, each with ``CACHED`` tokens in the cache."""
    columns = -(-CACHED // BLOCK_SIZE)
    ids = torch.arange(rows, device="cuda")
    table = torch.randperm(rows * columns, device="cuda").view(rows, columns)
    last = CACHED - 1
    batch = ForwardBatch(
        token_ids_T=torch.randint(0, model.vocab_size, (rows,), device="cuda"),
        positions_T=torch.full((rows,), last, device="cuda"),
        row_T=ids,
        slots_T=table[:, last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE,
        block_table_NK=table,
        query_start_N=ids,
        query_len_N=torch.ones_like(ids),
        kv_len_N=torch.full((rows,), CACHED, device="cuda"),
        logits_idx_L=ids,
        shape=BatchShape(num_tokens=rows, num_decode=rows, num_prefill=0, max_query_len=0, num_kv_blocks=columns),
    )
    caches = [
        tuple(
            torch.randn(rows * columns + 1, BLOCK_SIZE, *shape, dtype=dtype, device="cuda")
            for shape, dtype in zip(state.shapes, state.dtypes, strict=True)
        )
        for state in model.cache_layout()
    ]
    return time_us([lambda: model(batch, caches)]) / 1e3


def decode(names: list[str], rows_wanted: list[int]) -> None:
    for name in names:
        model = load_model(f"shape:{name}", attention="triton", device=torch.device("cuda"), dtype=torch.bfloat16).model
        for rows in rows_wanted:
            with patch.object(fused, "few_rows_tile", lambda *_: None):
                before = decode_ms(model, rows)
            print(
                f"{name} {rows:2d} rows: forward {before:.3f} ms with cuBLAS, {decode_ms(model, rows):.3f} ms with ours"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", choices=["tiles", "decode"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 16])
    parser.add_argument("--ops", nargs="+", default=list(OPS))
    parser.add_argument("--models", nargs="+", default=["qwen3-0.6b", "qwen3-8b"])
    options = parser.parse_args()
    with torch.inference_mode():
        if "tiles" in options.what:
            tiles(list(cases(options.rows, options.ops)))
        if "decode" in options.what:
            decode(options.models, options.rows)


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
