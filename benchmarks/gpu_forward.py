"""Time graphed decode forwards on one GPU, with the kernels as they are, and without some or with other cuts.

    python benchmarks/gpu_forward.py
    python benchmarks/gpu_forward.py --models hybrid-2b --rows 1 8 --variants now cublas ahead2048+step0
    python benchmarks/gpu_forward.py --models qwen3-0.6b qwen3-8b --rows 8 16 --variants now cublas

A forward is one token of each row, with CACHED tokens in its cache. Every variant of a batch is a graph of its own;
they are replayed in turns, and the median of a graph's times is printed, in ms. A plus puts variants together. Times of
whole steps, sampling and host work included, are those of ``benchmarks.drafting``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from engine.batch import BatchShape, ForwardBatch
from engine.kernels import triton as fused
from engine.kernels import triton_products as products
from engine.kernels.torch import relu2
from engine.kernels.triton_products import Cut, Tile
from engine.models.base import SlotState
from engine.models.loader import load_model
from engine.ssm.triton_tiles import Tiles

CACHED, BLOCK_SIZE = 576, 16
TURNS, REPLAYS = 7, 4
Patches = list[tuple[Any, str, Callable[[Any], Any]]]
"""Of a variant: object, name of an attribute, and what stands there meanwhile, made of what stands there else."""


def unfused(kernels: Any, x: Tensor, norm: Any, up: Any, activation: str) -> Tensor:
    """Two kernels of torch for a square, and a product of its own before them."""
    found = kernels.norm_linear(x, norm, up.weight, up.bias)
    return fused.swiglu(found) if activation == "swiglu" else relu2(found)


def always(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def ahead(weights: int) -> Patches:
    """One row's tiles, which read so many weights of an output ahead."""

    def made(plain: Callable[..., Tile]) -> Callable[..., Tile]:
        return lambda *sizes, **swiglu: replace(plain(*sizes, **swiglu), prefetch=weights)

    return [(fused, "one_row_tile", made)]


def narrow(block_n: int, block_k: int, num_warps: int) -> Patches:
    """One row's tiles, with this one for products of 2048 to 4095 inputs."""

    def made(plain: Callable[..., Tile]) -> Callable[..., Tile]:
        def tile(outputs: int, inputs: int, *, is_swiglu: bool = False) -> Tile:
            if 2048 <= inputs < 4096 and outputs < 1 << 16:
                return Tile(block_n, block_k, num_warps)
            return plain(outputs, inputs, is_swiglu=is_swiglu)

        return tile

    return [(fused, "one_row_tile", made)]


def normed(*cuts: Cut) -> Patches:
    return [(products, "NORMED", always(cuts))]


def added(*cuts: Cut) -> Patches:
    return [(products, "ADDED", always(cuts))]


def step(limit: int) -> Patches:
    return [(Tiles, "step_limit", always(limit))]


def deep(plain: Callable[..., Tile]) -> Callable[..., Tile]:
    """One row's tiles, with another one for products of more than 8192 inputs."""

    def tile(outputs: int, inputs: int, *, is_swiglu: bool = False) -> Tile:
        if inputs > 8192 and not products.is_large(outputs * inputs):
            return Tile(4, 2048, 4)
        return plain(outputs, inputs, is_swiglu=is_swiglu)

    return tile


UNFUSED: Patches = [(fused.TritonKernels, "norm_activate", always(unfused))]
WIDE, WHOLE, HALVED = products.WIDE, products.WHOLE, products.HALVED
WIDER = Tile(block_n=64, block_k=128, num_warps=4, num_stages=6, prefetch=512)
VARIANTS: dict[str, Patches] = {
    "now": [],
    "before": [*UNFUSED, *normed(), *step(0)],
    "unfused": UNFUSED,
    "cublas": [*added(), *normed()],
    "added": normed(),
    "step0": step(0),
    "step8": step(8),
    "n8k1024": narrow(8, 1024, 4),
    "n4k1024": narrow(4, 1024, 4),
    "n16k512": narrow(16, 512, 4),
    "n2k1024": narrow(2, 1024, 4),
    "n16k1024": narrow(16, 1024, 8),
    "deep": [(fused, "one_row_tile", deep)],
    "ahead2048": ahead(2048),
    "ahead4096": ahead(4096),
    "ahead8192": ahead(8192),
    "wide": normed(
        Cut(WIDE, least_outputs=4097, most_outputs=16383), Cut(WIDER, least_outputs=16384, most_outputs=1 << 15)
    ),
    "halved": added(Cut(HALVED, least_inputs=4097), Cut(WHOLE)),
    "wide32": [*normed(Cut(WIDE, most_rows=32, most_outputs=1 << 14)), *added(Cut(WHOLE, most_rows=32))],
}
ONE_ROW = ("n8k1024", "n4k1024", "n16k512", "n2k1024", "n16k1024", "deep", "ahead2048", "ahead4096", "ahead8192")
FEW_ROWS = ("cublas", "added", "wide", "halved", "wide32")


def variant(name: str) -> Patches:
    return [each for part in name.split("+") for each in VARIANTS[part]]


def differs(name: str, rows: int) -> bool:
    """Whether a variant can differ from the others with so many rows."""
    parts = set(name.split("+"))
    return not parts & set(ONE_ROW if rows > 1 else FEW_ROWS) and not (rows > 8 and "step8" in parts)


def decode_batch(model: Any, rows: int) -> tuple[ForwardBatch, list[tuple[Tensor, ...]]]:
    """A batch of decode rows, each with a slot of its own, and what the layers remember."""
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
        state_from_N=ids,
        state_to_N=ids,
        is_real_T=torch.ones(rows, dtype=torch.bool, device="cuda"),
    )
    caches = []
    for state in model.cache_layout():
        lead = (rows + 1,) if isinstance(state, SlotState) else (rows * columns + 1, BLOCK_SIZE)
        pairs = zip(state.shapes, state.dtypes, strict=True)
        caches.append(tuple(torch.randn(*lead, *shape, dtype=dtype, device="cuda") for shape, dtype in pairs))
    return batch, caches


@contextmanager
def patched(model: Any, patches: Patches) -> Iterator[None]:
    """The model's kernels as a variant has them."""
    with ExitStack() as stack:
        for place, name, made in patches:
            if place is not Tiles:
                stack.enter_context(patch.object(place, name, made(getattr(place, name))))
            elif hasattr(model, "ssm"):
                tiles = replace(model.ssm._tiles, **{name: made(None)})
                stack.enter_context(patch.object(model.ssm, "_tiles", tiles))
        yield


def captured(model: Any, batch: ForwardBatch, caches: Any, patches: Patches) -> torch.cuda.CUDAGraph:
    """A graph of one forward, compiled and run once before."""
    with patched(model, patches):
        model(batch, caches)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model(batch, caches)
    return graph


def times_ms(graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
    """Of one replay of each, in turns."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(TURNS):
        for name, graph in graphs.items():
            graph.replay()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) / REPLAYS)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["nemotron-h-4b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    options = parser.parse_args()
    document = []
    for name in options.models:
        model: Any = load_model(
            f"shape:{name}", attention="triton", device=torch.device("cuda"), dtype=torch.bfloat16
        ).model
        for rows in options.rows:
            with torch.inference_mode():
                batch, caches = decode_batch(model, rows)
                chosen = [each for each in options.variants if differs(each, rows)]
                graphs = {each: captured(model, batch, caches, variant(each)) for each in chosen}
                times = times_ms(graphs)
            del graphs, batch, caches
            torch.cuda.empty_cache()
            document.append({"model": name, "rows": rows, "ms": times})
            print(f"{name} {rows:3d} rows:", "  ".join(f"{each} {ms:.3f}" for each, ms in times.items()), flush=True)
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "gpu_forward.json").write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
