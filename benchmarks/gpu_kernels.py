"""Search for the fastest tiles of decode attention on one GPU, and time the kernels between the products.

    python benchmarks/gpu_kernels.py attention elementwise

A case is timed as a graph that runs it over many block tables in turn, so that nothing is in the cache. Compiling is
most of the work: a pool of processes fills Triton's cache first. What wins is written by hand into
``engine/attention/triton.py``. Products have ``gpu_products.py``.
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

from engine.attention import triton as attention
from engine.attention import triton_kernels
from engine.batch import BatchShape
from engine.kernels import triton as fused

LENGTH, BLOCK_SIZE, KV_HEADS, HEAD_DIM, COLUMNS = 600, 16, 8, 128, 41
ATTENTION = {  # rows, group: splits
    (1, 2): (10, 19, 32),
    (8, 2): (4, 8, 12, 19),
    (32, 2): (2, 3, 4, 5),
    (128, 2): (1,),
    (256, 4): (1,),
}


@dataclass(frozen=True)
class AttentionCase:
    """Decode attention of ``rows`` rows."""

    rows: int
    group: int
    splits: int
    tile: attention.DecodeTile


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


def compile_case(case: AttentionCase) -> str | None:
    """In a worker process: fill Triton's cache; the error's text if it does not compile."""
    try:
        _compile(case)
    except Exception as error:
        return f"{case}: {str(error)[:200]}"
    return None


def _compile(case: AttentionCase) -> None:
    half, ids, wide = torch.bfloat16, torch.int64, torch.float32
    partial = (wide, wide) if case.splits > 1 else (None, None)
    options = attention.decode_options(case.tile, case.group, 1, KV_HEADS, HEAD_DIM, False, case.splits)
    triton_kernels.decode_kernel.warmup(
        half, half, half, ids, ids, ids, half, *partial, 0.1, 0, COLUMNS, grid=(1,),
        BLOCK_SIZE=BLOCK_SIZE, FIRST_KEY=0, BLOCK_H=16, num_warps=case.tile.num_warps,
        num_stages=case.tile.num_stages, **options,
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


def report(results: list[tuple[AttentionCase, float]]) -> None:
    for (rows, group), items in itertools.groupby(results, lambda item: (item[0].rows, item[0].group)):
        size = rows * LENGTH * 2 * KV_HEADS * HEAD_DIM * 2
        print(f"{rows} rows, {group} query heads a key head: floor {size / 4.29e6:.1f} µs")
        for case, time in sorted(items, key=lambda item: item[1])[:5]:
            print(f"   {time:7.2f} µs  {list(asdict(case.tile).values())} {case.splits}")


def time_attention() -> None:
    cases = list(attention_cases())
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        faults = [fault for fault in pool.map(compile_case, cases, chunksize=4) if fault]
    print(f"{len(cases)} cases, {len(faults)} do not compile", *faults[:3], sep="\n")
    bench = AttentionBench()
    results = [(case, bench.time(case)) for case in cases]
    report(results)
    if os.environ.get("OUT"):
        found = [[asdict(case), time] for case, time in results]
        Path(os.environ["OUT"], "gpu_kernels.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", choices=["attention", "elementwise"])
    options = parser.parse_args()
    with torch.inference_mode():
        if "elementwise" in options.what:
            elementwise()
        if "attention" in options.what:
            time_attention()


if __name__ == "__main__":
    main()
