"""Decode of models with draft heads: time per output token by drafts a step, at acceptance rates that are forced.

    python -m benchmarks.drafting --device cuda --models shape:hybrid-2b --drafts 0 1 2 --rates 0 0.5 0.8 --out FILE

Random weights accept next to nothing, so acceptance is drawn instead: each draft that follows accepted ones is taken
with the given chance, which leaves all work as it is and makes the text meaningless. TPOT as in ``workbench bench
decode``: closed batches, (time of N + 1 outputs - time of 1) / N; the floor counts weights, keys, values and states
once a step, so with drafts it is divided by the tokens a step.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from engine import draft_passes
from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.loader import load_model
from engine.request import SamplingParams
from workbench.bench.breakdown import steady_summary
from workbench.bench.floor import copy_bandwidth, floor_ms

BLOCK = 16


def forced(rate: float) -> Any:
    """In place of :func:`engine.draft_passes.count_accepted`: each draft in turn with this chance."""

    def count_accepted(token_nW: Tensor, foreseen_nS: Tensor, may_nS: Tensor) -> Tensor:
        drawn_nS = torch.rand(foreseen_nS.shape, device=token_nW.device)
        return ((drawn_nS < rate) & may_nS).to(torch.int64).cumprod(1).sum(1)

    return count_accepted


def measure(args: argparse.Namespace, loaded: Any, drafts: int, rate: float | None, bandwidth: float) -> list[dict]:
    own = draft_passes.count_accepted
    if rate is not None:
        draft_passes.count_accepted = forced(rate)
    rows, longest = max(args.batches), args.prompt + args.output + 2 + 2 * drafts
    columns = -(-longest // BLOCK)
    config = EngineConfig(
        device=args.device,
        mode=args.mode,
        block_size=BLOCK,
        speculative_tokens=drafts,
        graphs=sorted({batch * (drafts + 1) for batch in args.batches}) if args.device == "cuda" else None,
        graph_non_decode=False,
        max_requests=rows,
        max_batch_tokens=max(16384 if args.device == "cuda" else 2048, columns * BLOCK),
        max_sequence_length=(columns - 1) * BLOCK,
        num_blocks=rows * (columns + 1),
        chunked_prefill=True,
    )
    found = []
    try:
        with Engine(loaded, config) as engine:
            for batch in args.batches:
                found.append(cell(args, engine, batch, drafts, rate, bandwidth))
                print(line(found[-1]), flush=True)
    finally:
        draft_passes.count_accepted = own
    return found


def cell(
    args: argparse.Namespace, engine: Engine, batch: int, drafts: int, rate: float | None, bandwidth: float
) -> dict:
    rng = random.Random(0)
    vocab = engine.resolved.vocab_size
    prompts = [[rng.randrange(vocab) for _ in range(args.prompt)] for _ in range(batch)]
    times = []
    for number in range(args.repeats + 1):
        engine.counters.reset()
        times.append((seconds(engine, prompts, args.output + 1), seconds(engine, prompts, 1)))
        if number == 0:
            engine.device.synchronize()
            engine.recorder.clear()
    counters = engine.counters
    proposed = counters.drafts_proposed[0]
    tokens = 1 + sum(counters.drafts_accepted.values()) / proposed if proposed else 1.0
    engine.device.synchronize()
    summary = steady_summary(engine.recorder.spans(), engine.recorder.iterations())
    floor = floor_ms(engine.loaded.model, rows=batch, cached=args.prompt + args.output / 2, bandwidth=bandwidth)
    return {
        "model": engine.loaded.name,
        "mode": args.mode,
        "batch": batch,
        "drafts": drafts,
        "rate": rate,
        "tokens_a_step": tokens,
        "tpot_ms": median(long - short for long, short in times[1:]) / args.output * 1e3,
        "floor_ms": floor / tokens,
        "hidden_share": getattr(summary, "hidden_share", None),
        "busy_share": getattr(summary, "busy_share", None),
    }


def seconds(engine: Engine, prompts: list[list[int]], outputs: int) -> float:
    begin = time.perf_counter()
    engine.generate(prompts, SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True), progress=False)
    return time.perf_counter() - begin


def line(one: dict) -> str:
    rate = "own" if one["rate"] is None else f"{one['rate']:.1f}"
    return (
        f"{one['model']:<22} S={one['drafts']} rate {rate:>4}  batch {one['batch']:>4}  TPOT {one['tpot_ms']:8.3f} ms  "
        f"floor {one['floor_ms']:7.3f}  step {one['tpot_ms'] * one['tokens_a_step']:8.3f}  "
        f"{one['tokens_a_step']:.2f} tok/step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mode", default="async")
    parser.add_argument("--models", nargs="+", default=["shape:tiny-hybrid"])
    parser.add_argument("--drafts", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rates", nargs="+", type=float, default=[0.8])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    bandwidth = copy_bandwidth(device)
    cells: list[dict] = []
    for name in args.models:
        loaded = load_model(name, device=device)
        for drafts in args.drafts:
            for rate in args.rates if drafts else [None]:
                cells += measure(args, loaded, drafts, rate, bandwidth)
                if args.out is not None:
                    args.out.write_text(json.dumps({"bandwidth": bandwidth, "cells": cells}, indent=1) + "\n")
        del loaded
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
