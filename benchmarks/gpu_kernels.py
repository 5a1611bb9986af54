"""Search for the fastest tiles of the one-row product and of decode attention on one GPU; prints the best of each.

    python benchmarks/gpu_kernels.py linear attention elementwise

A case is timed as a graph that runs it over many weights or block tables in turn, so that nothing is in the cache.
Compiling is most of the work: a pool of processes fills Triton's cache first. What wins is written by hand into
``engine/kernels/triton.py`` and ``engine/attention/triton.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.attention import triton as attention
from engine.attention import triton_kernels
from engine.batch import BatchShape
from engine.kernels import triton as fused
from engine.kernels import triton_linear

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
LENGTH, BLOCK_SIZE, KV_HEADS, HEAD_DIM, COLUMNS = 600, 16, 8, 128, 41
ATTENTION = {  # rows, group: splits
    (1, 2): (10, 19, 32),
    (8, 2): (4, 8, 12, 19),
    (32, 2): (2, 3, 4, 5),
    (128, 2): (1,),
    (256, 4): (1,),
}


@dataclass(frozen=True)
class LinearCase:
    """A product of ``rows`` rows; without a tile it is cuBLAS."""

    op: str
    rows: int
    tile: fused.Tile | None


@dataclass(frozen=True)
class AttentionCase:
    """Decode attention of ``rows`` rows."""

    rows: int
    group: int
    splits: int
    tile: attention.DecodeTile


def linear_cases(rows_wanted: list[int], ops: list[str]) -> Iterator[LinearCase]:
    for op, rows in itertools.product(ops, rows_wanted):
        outputs, inputs, _, _, _ = OPS[op]
        yield LinearCase(op, rows, None)
        for tile in one_row_tiles(inputs) if rows == 1 else ():
            if outputs // tile.block_n >= 32:
                yield LinearCase(op, rows, tile)


def one_row_tiles(inputs: int) -> Iterator[fused.Tile]:
    for block_n, block_k, warps in itertools.product((1, 2, 4, 8, 16), (512, 1024, 2048), (4, 8)):
        per_thread = block_n * block_k // (32 * warps)
        if 16 <= per_thread <= 64 and block_k <= inputs:
            yield fused.Tile(block_n, block_k, warps)


def attention_cases() -> Iterator[AttentionCase]:
    tiles = [
        (32, 2, 4),
        (32, 4, 4),
        (32, 4, 6),
        (64, 4, 3),
        (64, 4, 4),
        (64, 4, 5),
        (64, 8, 4),
        (128, 4, 3),
        (128, 8, 3),
    ]
    for ((rows, group), splits_wanted), (tile, warps, stages) in itertools.product(ATTENTION.items(), tiles):
        for splits in splits_wanted:
            programs = splits * rows * KV_HEADS
            yield AttentionCase(rows, group, splits, attention.DecodeTile(tile, warps, stages, programs, 64))


# -- compiling -----------------------------------------------------------------------------------------------------


def compile_case(case: LinearCase | AttentionCase) -> str | None:
    """In a worker process: fill Triton's cache; the error's text if it does not compile."""
    try:
        _compile_linear(case) if isinstance(case, LinearCase) else _compile_attention(case)
    except Exception as error:
        return f"{case}: {str(error)[:200]}"
    return None


def _compile_linear(case: LinearCase) -> None:
    if case.tile is None:
        return
    outputs, inputs, norm, swiglu, residual = OPS[case.op]
    half = torch.bfloat16
    pointers = (half, half, None, half if norm else None, half if residual else None, half, 1e-6 if norm else 0.0)
    options = fused.product_options(
        case.tile, outputs, inputs, norm=norm, bias=False, residual=residual, is_swiglu=swiglu
    )
    triton_linear.one_row_kernel.warmup(*pointers, outputs, grid=(1,), **options)


def _compile_attention(case: AttentionCase) -> None:
    half, ids, wide = torch.bfloat16, torch.int64, torch.float32
    partial = (wide, wide) if case.splits > 1 else (None, None)
    options = attention.decode_options(case.tile, case.group, 1, KV_HEADS, HEAD_DIM, False, case.splits)
    triton_kernels.decode_kernel.warmup(
        half, half, half, ids, ids, ids, half, *partial, 0.1, 0, COLUMNS, grid=(1,),
        BLOCK_SIZE=BLOCK_SIZE, BLOCK_H=16, num_warps=case.tile.num_warps, num_stages=case.tile.num_stages, **options,
    )  # fmt: skip


# -- timing --------------------------------------------------------------------------------------------------------


def time_us(calls: list[Callable[[], Any]]) -> float:
    """Microseconds of one call, as part of a graph that makes all of them twice."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * 2:
            call()
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (2 * len(calls)))
    return statistics.median(times)


class LinearBench:
    """Weights of one operation at a time."""

    def __init__(self) -> None:
        self.op = ""
        self.weights: list[Tensor] = []

    def time(self, case: LinearCase) -> float:
        outputs, inputs, norm, swiglu, residual = OPS[case.op]
        total = outputs * (2 if swiglu else 1)
        if case.op != self.op:
            self.weights.clear()
            copies = max(2, min(24, COLD_BYTES // (total * inputs * 2)))
            self.weights += [torch.randn(total, inputs, device="cuda").mul_(0.02).bfloat16() for _ in range(copies)]
            self.op = case.op
        x = torch.randn(case.rows, inputs, device="cuda").bfloat16()
        parameters = SimpleNamespace(weight=torch.ones(inputs, device="cuda").bfloat16(), eps=1e-6) if norm else None
        stream = torch.randn(case.rows, outputs, device="cuda").bfloat16() if residual else None

        def call(weight: Tensor) -> Tensor:
            if case.tile is not None:
                return fused.one_row(
                    x, weight, case.tile, norm=parameters, is_swiglu=swiglu, residual=stream, out=stream
                )
            if stream is not None:
                return stream.addmm_(x, weight.t())
            normed = kernels.rms_norm(x, parameters) if parameters else x
            product = torch.nn.functional.linear(normed, weight)
            return fused.swiglu(product) if swiglu else product

        kernels = fused.TritonKernels()
        return time_us([lambda weight=weight: call(weight) for weight in self.weights])


class AttentionBench:
    """A pool of blocks for 256 rows, and block tables that share it out."""

    def __init__(self) -> None:
        blocks = 256 * COLUMNS
        shape = (blocks + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.caches = [tuple(torch.randn(shape, device="cuda").bfloat16() for _ in range(2)) for _ in range(2)]
        self.tables = torch.randperm(blocks, device="cuda").view(256, COLUMNS)

    def time(self, case: AttentionCase) -> float:
        q = torch.randn(case.rows, KV_HEADS * case.group, HEAD_DIM, device="cuda").bfloat16()
        out = torch.empty_like(q)
        shape = BatchShape(
            num_tokens=case.rows, num_decode=case.rows, num_prefill=0, max_query_len=0, num_kv_blocks=COLUMNS
        )
        lengths = torch.full((case.rows,), LENGTH, device="cuda")
        calls = []
        for number in range(min(64, 256 // case.rows) * 2):
            first = number // 2 * case.rows
            table = self.tables[first : first + case.rows].contiguous()
            slots = table[:, (LENGTH - 1) // BLOCK_SIZE] * BLOCK_SIZE + (LENGTH - 1) % BLOCK_SIZE
            batch: Any = SimpleNamespace(block_table_NK=table, slots_T=slots, kv_len_N=lengths, shape=shape)
            calls.append(
                lambda batch=batch, cache=self.caches[number % 2]: attention.decode(
                    q, cache, batch, out, scale=0.1, window=None, tile=case.tile
                )
            )
        return time_us(calls)


def elementwise() -> None:
    """Cost of the kernels between the products, at one size each."""
    kernels = fused.TritonKernels()
    for rows in (1, 32, 256):
        x = torch.randn(rows, 1024, device="cuda").bfloat16()
        norm = SimpleNamespace(weight=torch.ones(1024, device="cuda").bfloat16(), eps=1e-6)
        head = SimpleNamespace(weight=torch.ones(128, device="cuda").bfloat16(), eps=1e-6)
        gate_up = torch.randn(rows, 6144, device="cuda").bfloat16()
        qkv = torch.randn(rows, 32, 128, device="cuda").bfloat16()
        cache = tuple(torch.zeros(64, 16, 8, 128, device="cuda").bfloat16() for _ in range(2))
        slots = torch.randperm(1024, device="cuda")[:rows].contiguous()
        positions, frequencies = torch.arange(rows, device="cuda"), torch.rand(64, device="cuda")
        tables = kernels.rotation_tables(positions, frequencies, 1.0)
        cases = {
            "rms_norm": lambda: kernels.rms_norm(x, norm),  # noqa: B023
            "swiglu": lambda: fused.swiglu(gate_up),  # noqa: B023
            "rotate_and_append": lambda: kernels.rotate_and_append(qkv, (head, head), tables, cache, slots),  # noqa: B023
            "rotation_tables": lambda: kernels.rotation_tables(positions, frequencies, 1.0),  # noqa: B023
        }
        print(rows, "rows:", {name: round(time_us([call] * 20), 2) for name, call in cases.items()})


def report(results: list[tuple[Any, float]], key: Callable[[Any], Any], bytes_of: Callable[[Any], float]) -> None:
    for group, items in itertools.groupby(results, lambda item: key(item[0])):
        ordered = sorted(items, key=lambda item: item[1])
        plain = [time for case, time in ordered if case.tile is None]
        print(group, f"cublas {plain[0]:.1f}" if plain else "", f"floor {bytes_of(ordered[0][0]) / 4.29e6:.1f} µs")
        for case, time in ordered[:5]:
            if case.tile is not None:
                print(f"   {time:7.2f} µs  {list(asdict(case.tile).values())} {getattr(case, 'splits', '')}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", choices=["linear", "attention", "elementwise"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32], help="more than one: cuBLAS only")
    parser.add_argument("--ops", nargs="+", default=list(OPS))
    options = parser.parse_args()
    linear = list(linear_cases(options.rows, options.ops)) if "linear" in options.what else []
    paged = list(attention_cases()) if "attention" in options.what else []
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        faults = [fault for fault in pool.map(compile_case, [*paged, *linear], chunksize=4) if fault]
    print(f"{len(linear) + len(paged)} cases compiled", *faults[:3], sep="\n")
    found: dict[str, list[Any]] = {}
    with torch.inference_mode():
        if "elementwise" in options.what:
            elementwise()
        if paged:
            bench = AttentionBench()
            results = [(case, bench.time(case)) for case in paged]
            results.sort(key=lambda item: (item[0].rows, item[0].group))
            report(results, lambda c: ("attention", c.rows, c.group), lambda c: c.rows * LENGTH * 2 * 8 * 128 * 2)
            found["attention"] = [[asdict(case), time] for case, time in results]
            del bench
        if linear:
            products = LinearBench()
            timed = [(case, products.time(case)) for case in linear]
            report(timed, lambda c: (c.op, c.rows), lambda c: OPS[c.op][0] * (1 + OPS[c.op][3]) * OPS[c.op][1] * 2)
            found["linear"] = [[asdict(case), time] for case, time in timed]
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "gpu_kernels.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
