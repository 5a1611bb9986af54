"""Time graphed decode forwards on one GPU, with the kernels as they are, and without some or with other cuts.

    python benchmarks/gpu_forward.py
    python benchmarks/gpu_forward.py --models hybrid-2b --rows 1 8 --variants now cublas ahead1024+step0
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
from engine.kernels.triton_products import Tile, few_rows, few_rows_tile
from engine.models.base import SlotState
from engine.models.loader import load_model
from engine.ssm.triton_tiles import Tiles

CACHED, BLOCK_SIZE = 576, 16
TURNS, REPLAYS = 7, 4
Patches = list[tuple[Any, str, Callable[[Any], Any]]]
"""Of a variant: object, name of an attribute, and what stands there meanwhile, made of what stands there else."""


def always(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def ahead(weights: int) -> Patches:
    """One row's tiles, which read so many weights of an output ahead."""

    def made(plain: Callable[..., Tile]) -> Callable[..., Tile]:
        return lambda *sizes, **swiglu: replace(plain(*sizes, **swiglu), prefetch=weights)

    return [(fused, "one_row_tile", made)]


def only(**wanted: bool) -> Patches:
    """Of products of a few rows only these take the kernel of our own; the others cuBLAS."""

    def made(plain: Callable[..., Tile | None]) -> Callable[..., Tile | None]:
        def tile(*sizes: int, is_normed: bool = False, is_swiglu: bool = False) -> Tile | None:
            taken = wanted.get("normed" if is_normed else "added", False)
            return plain(*sizes, is_normed=is_normed, is_swiglu=is_swiglu) if taken else None

        return tile

    return [(fused, "few_rows_tile", made)]


def every(**changes: int) -> Patches:
    """Tiles of a few rows, with these changes."""

    def made(plain: Callable[..., Tile | None]) -> Callable[..., Tile | None]:
        def tile(*sizes: int, **kinds: bool) -> Tile | None:
            found = plain(*sizes, **kinds)
            return None if found is None else replace(found, **changes)

        return tile

    return [(fused, "few_rows_tile", made)]


def alone(*, normed_only: bool = True) -> Patches:
    """One row takes the kernel for a few."""

    def made(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, weight: Tensor, tile: Tile, **around: Any) -> Tensor:
            is_normed, is_swiglu = around.get("norm") is not None, around.get("activation") == "swiglu"
            outputs = weight.shape[0] // (2 if is_swiglu else 1)
            few = few_rows_tile(2, outputs, weight.shape[1], is_normed=is_normed, is_swiglu=is_swiglu)
            if few is None or (normed_only and not is_normed):
                return plain(x, weight, tile, **around)
            return few_rows(x, weight, few, **around)

        return call

    return [(fused, "one_row", made)]


def cut(name: str) -> Patches:
    """Tiles named by the product: ``16496x3072:32-512-4-512`` in outputs, inputs, and a tile's numbers.

    ``one`` before it: of one row; ``parts``: behind norms of parts.
    """
    size, numbers = name.split(":")
    tile = Tile(*map(int, numbers.split("-")))
    prefix = size.rstrip("0123456789x")
    wanted = tuple(map(int, size.removeprefix(prefix).split("x")))
    table, first = {"one": ("one_row_tile", 0), "parts": ("parts_normed_tile", 1), "": ("few_rows_tile", 1)}[prefix]

    def made(plain: Callable[..., Tile | None]) -> Callable[..., Tile | None]:
        def found(*sizes: int, **kinds: bool) -> Tile | None:
            return tile if sizes[first : first + 2] == wanted else plain(*sizes, **kinds)

        return found

    return [(fused, table, made)]


def step(limit: int) -> Patches:
    return [(Tiles, "step_limit", always(limit))]


VARIANTS: dict[str, Patches] = {
    "now": [],
    "cublas": only(),
    "added": only(added=True),
    "normed": only(normed=True),
    "whole": [(fused.TritonKernels, "norms_parts", always(lambda *_: False))],
    "alone": alone(),
    "alone_all": alone(normed_only=False),
    "early": [(products, "is_large", always(lambda *_: False))],
    "step0": step(0),
    "step8": step(8),
    "ahead0": ahead(0),
    "ahead512": ahead(512),
    "ahead1024": ahead(1024),
    "few0": every(prefetch=0),
    "few1024": every(prefetch=1024),
    "few2048": every(prefetch=2048),
}
ONE_ROW = ("ahead0", "ahead512", "ahead1024", "alone", "alone_all")
FEW_ROWS = ("cublas", "added", "normed", "few0", "few1024", "few2048", "whole")


def variant(name: str) -> Patches:
    return [each for part in name.split("+") for each in (cut(part) if ":" in part else VARIANTS[part])]


def differs(name: str, rows: int) -> bool:
    """Whether a variant can differ from the others with so many rows."""
    parts = set(name.split("+"))
    if any(":" in part for part in parts):
        return any(part.startswith("one") for part in parts) == (rows == 1)
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
