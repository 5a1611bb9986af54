"""Time the state update of Mamba2's decode rows against mamba-ssm's and against a plain copy, on one GPU.

    python benchmarks/ssm_update.py                       # 64 heads of 64 x 128, float32 states
    python benchmarks/ssm_update.py --state-dtype bfloat16 --heads 112
    python benchmarks/ssm_update.py --prefill             # prefill rows: token by token, or in chunks

A case is a graph that goes through slots in turn, so that nothing is in the cache. Bandwidth counts each row's state as
read once and written once; the copy moves as many bytes. What wins is written by hand into ``engine/ssm/triton.py``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from engine.batch import ForwardBatch
from engine.ssm.base import ScanInputs, ScanWeights, StateSpace
from engine.ssm.triton import Tiles, TritonStateSpace
from tests.ssm_batches import Row, Sizes, packed

ROWS = (1, 8, 32, 128, 256)
TILES = [Tiles(block_p=p, num_warps=warps) for p, warps in itertools.product((4, 8, 16, 32, 64), (1, 2, 4, 8))]
LENGTHS = (2, 4, 8, 16, 32, 64, 128, 512)
CHUNKS = [
    Tiles(walk_limit=0, chunk=chunk, chunk_block_p=p, chunk_warps=warps)
    for chunk, p, warps in itertools.product((32, 64, 128), (32, 64), (4, 8))
]
MOST_SLOTS = 768
"""Of a pool: 1.6 GB of float32 states with 64 heads, far beyond the cache."""


def time_us(calls: list[Callable[[], Any]]) -> float:
    """Microseconds of one call, as part of a graph that makes all of them twice."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * 2:
            call()
    times = []
    for _ in range(11):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (2 * len(calls)))
    return statistics.median(times)


class Bench:
    """One layer's pool of slots, with the inputs of any batch."""

    def __init__(self, sizes: Sizes, state_dtype: torch.dtype) -> None:
        self.sizes = sizes
        shape = (sizes.slots + 1, sizes.heads, sizes.head_dim, sizes.state)
        self.state = torch.randn(shape, device="cuda").to(state_dtype)
        self.weights = ScanWeights(
            torch.rand(sizes.heads, device="cuda") * 2,
            torch.ones(sizes.heads, device="cuda"),
            torch.randn(sizes.heads, device="cuda") - 4,
        )

    def inputs(self, tokens: int) -> ScanInputs:
        sizes = self.sizes

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(tokens, *shape, device="cuda", dtype=torch.bfloat16)

        group = (sizes.groups, sizes.state)
        return ScanInputs(random(sizes.heads, sizes.head_dim), random(sizes.heads), random(*group), random(*group))

    def calls(self, backend: StateSpace, batches: list[ForwardBatch]) -> list[Callable[[], Any]]:
        inputs = self.inputs(batches[0].shape.num_tokens)
        return [lambda batch=batch: backend.scan(inputs, self.weights, self.state, batch) for batch in batches]  # type: ignore[misc]

    def batches(self, rows: int, count: int, *, is_decode: bool) -> list[ForwardBatch]:
        """Batches of ``rows`` rows of ``count`` tokens, over all slots in turn."""
        firsts = range(0, self.sizes.slots - rows + 1, rows)
        return [
            packed([Row(count, s, s, is_decode=is_decode) for s in range(f, f + rows)], self.sizes, device="cuda")
            for f in list(firsts)[:48]
        ]

    def copy_us(self, rows: int) -> float:
        """Of reading and writing as many bytes as ``rows`` states have, half of them each way."""
        pairs = [(self.state[f : f + rows], self.state[f + rows : f + 2 * rows]) for f in self.firsts(rows)]
        return time_us([lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs])  # type: ignore[misc]

    def firsts(self, rows: int) -> list[int]:
        return list(range(0, self.sizes.slots - 2 * rows + 1, 2 * rows))[:48]


def mamba_ssm() -> StateSpace | None:
    """Where it is installed."""
    if find_spec("mamba_ssm") is None:
        return None
    from engine.ssm.mamba_ssm import MambaSsmStateSpace

    return MambaSsmStateSpace()


def compare_updates(bench: Bench) -> None:
    gib = bench.state[0].numel() * bench.state.dtype.itemsize * 2 / 1e9
    theirs = mamba_ssm()
    for rows in ROWS:
        batches = bench.batches(rows, 1, is_decode=True)
        floor = bench.copy_us(rows)

        def told(name: str, us: float, rows: int = rows, floor: float = floor) -> None:
            rate = rows * gib / us * 1e3
            print(f"{rows:4d} rows  {name:18s} {us:8.1f} us  {rate:5.2f} TB/s  {floor / us:6.1%} of copy", flush=True)

        told("copy", floor)
        if theirs is not None:
            told("mamba-ssm", time_us(bench.calls(theirs, batches)))
        found = {tile: time_us(bench.calls(TritonStateSpace(tile), batches)) for tile in TILES}
        told("ours, as set", time_us(bench.calls(TritonStateSpace(), batches)))
        for tile in sorted(found, key=lambda tile: found[tile])[:4]:
            told(f"P {tile.block_p}, {tile.num_warps} warps", found[tile])


def compare_prefill(bench: Bench) -> None:
    """Token by token, in chunks, and by mamba-ssm, whose rows are padded to the longest: here all are."""
    theirs = mamba_ssm()
    for rows, length in itertools.product((1, 32, 128), LENGTHS):
        batches = bench.batches(rows, length, is_decode=False)[:4]
        walk = time_us(bench.calls(TritonStateSpace(Tiles(walk_limit=length)), batches))
        other = "" if theirs is None else f"  mamba-ssm {time_us(bench.calls(theirs, batches)):9.1f}"
        found = {tiles: time_us(bench.calls(TritonStateSpace(tiles), batches)) for tiles in CHUNKS}
        best = min(found, key=lambda tiles: found[tiles])
        cut = f"({best.chunk}, {best.chunk_block_p}, {best.chunk_warps})"
        as_set = found[Tiles(walk_limit=0)]
        print(
            f"{rows:4d} x {length:3d}  walk {walk:9.1f}  chunks {as_set:9.1f}, best {found[best]:9.1f} us {cut}{other}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--prefill", action="store_true")
    options = parser.parse_args()
    sizes = Sizes(heads=options.heads, head_dim=64, groups=8, state=128, slots=MOST_SLOTS)
    bench = Bench(sizes, getattr(torch, options.state_dtype))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options}")
    compare_prefill(bench) if options.prefill else compare_updates(bench)


if __name__ == "__main__":
    main()
