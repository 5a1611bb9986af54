"""Time the state update of Mamba2's decode rows against mamba-ssm's and against a plain copy, on one GPU.

    python -m benchmarks.ssm_update --out FILE            # both shapes, float32 states, 1 to 256 rows: half a minute
    python -m benchmarks.ssm_update --state-dtype bfloat16 --shapes nemotron-h-4b
    python -m benchmarks.ssm_update --tiles               # every way of cutting the work, some minutes of compiling
    python -m benchmarks.ssm_update --drafts 2 --tiles    # rows of draft tokens, replayed and with stored states
    python -m benchmarks.ssm_update --prefill             # prefill rows: token by token, or in chunks

A case is a graph that goes through slots in turn, so that nothing is in the cache. Bandwidth counts each row's state as
read once and written once; the copy moves as many bytes between slots of the same pool, and the share of copy is its
time over the update's. mamba-ssm stands there twice: its kernel alone, and as our backend has to call it, with what
makes its arguments of ours. What wins is written by hand into ``engine/ssm/triton.py``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from engine.batch import ForwardBatch
from engine.models.shapes import shape_config
from engine.ssm.base import KeptInputs, ScanInputs, ScanWeights, StateSpace
from tests.ssm_batches import Row, Sizes, packed
from workbench.documents import jsonable
from workbench.environment import environment

ROWS = (1, 8, 32, 128, 256)
TILES = [{"block_p": p, "num_warps": warps} for p, warps in itertools.product((4, 8, 16, 32, 64), (1, 2, 4, 8))]
REPLAY_TILES = [
    {"replay_block_p": p, "replay_warps": warps} for p, warps in itertools.product((8, 16, 32, 64), (1, 2, 4, 8))
]
LENGTHS = (2, 4, 8, 16, 32, 64, 128, 512)
CHUNKS = [
    {"walk_limit": 0, "chunk": chunk, "chunk_block_p": p, "chunk_warps": warps}
    for chunk, p, warps in itertools.product((32, 64, 128), (32, 64), (4, 8))
]
MOST_SLOTS = 768
"""Of a pool: 1.6 GB of float32 states with 64 heads, 2.8 GB with 112."""
COLD_BYTES = 1 << 28
"""States that a graph goes through before it meets one again: several times a cache of 50 MB."""
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One way to move the states of some rows on, or to copy them."""

    shape: str
    state_dtype: str
    rows: int
    name: str
    us: float
    num_bytes: int
    """Read and written, of states alone."""
    share_of_copy: float
    """Time of a copy of as many bytes over this one's."""

    def line(self) -> str:
        """Of the table."""
        rate = self.num_bytes / self.us / 1e6
        took = f"{self.us:8.1f} us  {rate:5.2f} TB/s  {self.share_of_copy:6.1%} of copy"
        return f"{self.rows:4d} rows  {self.name:22s} {took}"


def time_us(calls: Sequence[Call]) -> float:
    """Microseconds of one call, as part of a graph that makes all of them twice."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in (*calls, *calls):
            call()
    times = []
    for _ in range(11):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (2 * len(calls)))
    return float(statistics.median(times))


def sizes_of(shape: str, num_slots: int = MOST_SLOTS) -> Sizes:
    """Of a Mamba2 layer of ``shape``."""
    config = shape_config(shape)
    return Sizes(
        heads=config["mamba_num_heads"],
        head_dim=config["mamba_head_dim"],
        groups=config["n_groups"],
        state=config["ssm_state_size"],
        slots=num_slots,
    )


class Bench:
    """One layer's pool of slots, with the inputs of any batch."""

    def __init__(self, sizes: Sizes, state_dtype: torch.dtype, device: str = "cuda") -> None:
        self.sizes, self.device = sizes, device
        shape = (sizes.slots + 1, sizes.heads, sizes.head_dim, sizes.state)
        self.state = torch.randn(shape, device=device).to(state_dtype)
        self.weights = ScanWeights(
            torch.rand(sizes.heads, device=device) * 2,
            torch.ones(sizes.heads, device=device),
            torch.randn(sizes.heads, device=device) - 4,
        )

    @property
    def state_bytes(self) -> int:
        """Of one row."""
        return self.state[0].numel() * self.state.dtype.itemsize

    def firsts(self, rows: int, step: int) -> list[int]:
        """First slots of runs of ``rows`` that lie ``step`` apart: enough of them that none is found in the cache."""
        count = max(2, -(-COLD_BYTES // (rows * self.state_bytes)))
        return list(range(0, self.sizes.slots - step + 1, step))[:count]

    def inputs(self, tokens: int) -> ScanInputs:
        sizes = self.sizes

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(tokens, *shape, device=self.device, dtype=torch.bfloat16)

        group = (sizes.groups, sizes.state)
        return ScanInputs(random(sizes.heads, sizes.head_dim), random(sizes.heads), random(*group), random(*group))

    def calls(self, backend: StateSpace, batches: list[ForwardBatch]) -> list[Call]:
        inputs = self.inputs(batches[0].shape.num_tokens)
        return [lambda batch=batch: backend.scan(inputs, self.weights, self.state, batch) for batch in batches]  # type: ignore[misc]

    def batches(self, rows: int, count: int, *, is_decode: bool) -> list[ForwardBatch]:
        """Batches of ``rows`` rows of ``count`` tokens, over slots in turn."""
        return [
            packed([Row(count, s, s, is_decode=is_decode) for s in range(f, f + rows)], self.sizes, device=self.device)
            for f in self.firsts(rows, rows)
        ]

    def replays(self, backend: StateSpace, rows: int, drafts: int) -> list[Call]:
        """Rows of drafts over slots in turn, each of which reads half of its last forward's tokens once more."""
        width, sizes = drafts + 1, self.sizes
        inputs = self.inputs(rows * width)
        kept = KeptInputs(
            *(
                torch.randn((sizes.slots + 1, width, *each.shape[1:]), device=self.device, dtype=each.dtype)
                for each in (inputs.x_THP, inputs.dt_TH, inputs.B_TGS)
            )
        )
        batches = [
            packed([Row(width, s, s, replay=1 + s % width) for s in range(f, f + rows)], sizes, device=self.device)
            for f in self.firsts(rows, rows)
        ]
        return [lambda batch=batch: backend.scan(inputs, self.weights, self.state, batch, kept) for batch in batches]  # type: ignore[misc]

    def storing(self, backend: StateSpace, rows: int, drafts: int) -> list[Call]:
        """The same, with the state behind every token in a slot of its own."""
        width = drafts + 1
        if rows * width > self.sizes.slots:
            return []
        batches = []
        for first in self.firsts(rows * width, rows * width):
            groups = range(first, first + rows * width, width)
            made = [Row(width, s, s + drafts, snapshots={i + 1: s + i for i in range(drafts)}) for s in groups]
            batches.append(packed(made, self.sizes, device=self.device))
        return self.calls(backend, batches)

    def copies(self, rows: int) -> list[Call]:
        """Reading and writing as many bytes as updates of ``rows`` states."""
        pairs = [(self.state[f : f + rows], self.state[f + rows : f + 2 * rows]) for f in self.firsts(rows, 2 * rows)]
        return [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs]  # type: ignore[misc]

    def bare_calls(self, kernel: Callable[..., Any], rows: int) -> list[Call]:
        """mamba-ssm's own operation over slots in turn, with arguments that lie ready."""
        inputs, weights, (heads, size, states) = self.inputs(rows), self.weights, self.state.shape[1:]
        made = (
            inputs.x_THP,
            inputs.dt_TH[:, :, None].expand(-1, -1, size),
            -torch.exp(weights.a_log_H)[:, None, None].expand(heads, size, states),
            inputs.B_TGS,
            inputs.C_TGS,
            weights.d_H[:, None].expand(heads, size),
        )
        bias = weights.dt_bias_H[:, None].expand(heads, size)
        slots = [torch.arange(f, f + rows, device=self.device) for f in self.firsts(rows, rows)]
        return [
            lambda slot_D=slot_D: kernel(  # type: ignore[misc]
                self.state, *made, dt_bias=bias, dt_softplus=True, state_batch_indices=slot_D
            )
            for slot_D in slots
        ]


def triton(**tiles: int) -> StateSpace:
    """Our kernels, cut as they are or otherwise."""
    from engine.ssm.triton import Tiles, TritonStateSpace  # there is no Triton without a GPU

    return TritonStateSpace(Tiles(**tiles))


def mamba_ssm() -> tuple[StateSpace, Callable[..., Any]] | None:
    """Our backend on it, and its decode step alone; None where it is not installed."""
    if find_spec("mamba_ssm") is None:
        return None
    from engine.ssm.mamba_ssm import MambaSsmStateSpace

    backend = MambaSsmStateSpace()
    return backend, backend._step


def ways(bench: Bench, rows: int, tiles: Sequence[dict[str, int]]) -> Iterator[tuple[str, list[Call]]]:
    """By name, the calls of each way to move ``rows`` states on."""
    batches = bench.batches(rows, 1, is_decode=True)
    yield "ours", bench.calls(triton(), batches)
    theirs = mamba_ssm()
    if theirs is not None:
        backend, kernel = theirs
        yield "mamba-ssm, its kernel", bench.bare_calls(kernel, rows)
        yield "mamba-ssm, our backend", bench.calls(backend, batches)
    for tile in tiles:
        yield f"P {tile['block_p']}, {tile['num_warps']} warps", bench.calls(triton(**tile), batches)


def drafted_ways(
    bench: Bench, rows: int, drafts: int, tiles: Sequence[dict[str, int]]
) -> Iterator[tuple[str, list[Call]]]:
    """By name, the calls of each way to move ``rows`` states on behind accepted drafts, by verification's tokens."""
    yield f"{drafts} drafts, replayed", bench.replays(triton(), rows, drafts)
    stored = bench.storing(triton(), rows, drafts)
    if stored:
        yield f"{drafts} drafts, stored", stored
    for tile in tiles:
        name = f"P {tile['replay_block_p']}, {tile['replay_warps']} warps"
        yield name, bench.replays(triton(**tile), rows, drafts)


def compare_updates(
    bench: Bench, shape: str, rows: Sequence[int], ways_of: Callable[[int], Iterator[tuple[str, list[Call]]]]
) -> Iterator[Timed]:
    """A copy, then every way to update, at each number of rows; of other tiles the four fastest."""
    time_us(bench.copies(max(rows)))  # the first thing a GPU does, it does slowly
    for count in rows:
        copy_us = time_us(bench.copies(count))

        def timed(name: str, us: float, count: int = count, copy_us: float = copy_us) -> Timed:
            return Timed(
                shape=shape,
                state_dtype=str(bench.state.dtype).removeprefix("torch."),
                rows=count,
                name=name,
                us=us,
                num_bytes=2 * count * bench.state_bytes,
                share_of_copy=copy_us / us,
            )

        found = [timed(name, time_us(calls)) for name, calls in ways_of(count)]
        yield timed("copy", copy_us)
        named = [one for one in found if not one.name.startswith("P ")]
        yield from named
        yield from sorted((one for one in found if one not in named), key=lambda one: one.us)[:4]


def ways_asked(bench: Bench, options: argparse.Namespace) -> Callable[[int], Iterator[tuple[str, list[Call]]]]:
    """Ways to compare at a number of rows, as the command line says."""
    if options.drafts:
        return lambda rows: drafted_ways(bench, rows, options.drafts, REPLAY_TILES if options.tiles else ())
    return lambda rows: ways(bench, rows, TILES if options.tiles else ())


def compare_prefill(bench: Bench) -> None:
    """Token by token, in chunks, and by mamba-ssm, whose rows are padded to the longest: here all are."""
    theirs = mamba_ssm()
    for rows, length in itertools.product((1, 32, 128), LENGTHS):
        batches = bench.batches(rows, length, is_decode=False)[:4]
        walk = time_us(bench.calls(triton(walk_limit=length), batches))
        other = "" if theirs is None else f"  mamba-ssm {time_us(bench.calls(theirs[0], batches)):9.1f}"
        as_set = time_us(bench.calls(triton(walk_limit=0), batches))
        found = [(time_us(bench.calls(triton(**tiles), batches)), tiles) for tiles in CHUNKS]
        best, tiles = min(found, key=lambda one: one[0])
        cut = f"({tiles['chunk']}, {tiles['chunk_block_p']}, {tiles['chunk_warps']})"
        print(
            f"{rows:4d} x {length:3d}  walk {walk:9.1f}  chunks {as_set:9.1f}, best {best:9.1f} us {cut}{other}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["nemotron-h-4b", "hybrid-2b"], help="whose Mamba2 layer")
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--state-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--tiles", action="store_true", help="also look for faster tiles")
    parser.add_argument("--drafts", type=int, default=0, help="rows of so many drafts instead")
    parser.add_argument("--prefill", action="store_true", help="prefill rows instead")
    parser.add_argument("--out", type=Path, help="a JSON file, of updates")
    options = parser.parse_args()
    if find_spec("mamba_ssm") is None:
        print("mamba-ssm is not installed, and is left out", file=sys.stderr)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.state_dtype} states")
    results: list[Timed] = []
    for shape in options.shapes:
        bench = Bench(sizes_of(shape), getattr(torch, options.state_dtype))
        print(f"{shape}: {bench.sizes.heads} heads, {bench.state_bytes / 1e6:.2f} MB a row and layer", flush=True)
        if options.prefill:
            compare_prefill(bench)
            continue
        for one in compare_updates(bench, shape, options.rows, ways_asked(bench, options)):
            results.append(one)
            print(one.line(), flush=True)
    if options.out is not None:
        document = {"command": "ssm_update", "environment": environment(), "results": [asdict(one) for one in results]}
        options.out.write_text(json.dumps(jsonable(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
