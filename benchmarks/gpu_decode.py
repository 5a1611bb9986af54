"""Decode on one GPU, shape by shape and batch by batch: the graph's device time, the iteration in both modes, the host.

    python benchmarks/gpu_decode.py --shapes qwen3-0.6b qwen3-8b --profile

Each cell generates from prompts of 512 random ids, greedy, ignoring EOS. TPOT is (time of 129 outputs - time of 1
output) / 128, as the peer's was measured; the other columns are medians over the decode iterations of those runs.
Where OUT is set, everything goes to $OUT/gpu_decode.json as well. Seeds are fixed; the first run of a batch is warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from tracing.analysis import summarise
from tracing.summary import Spread, Summary

BATCHES = (1, 8, 32, 128, 256)
PROMPT, OUTPUTS, COLUMNS = 512, 129, 41
PEER_MS = {"qwen3-0.6b": (2.56, 1.97, 3.13, 4.65, 8.72), "qwen3-8b": (5.23, 5.65, 6.17, 9.19, 14.73)}
REACH_MS = {"qwen3-0.6b": (1.55, 1.75, 2.2, 4.0, 6.4), "qwen3-8b": (5.2, 5.6, 6.1, 9.1, 14.5)}
AIM_MS = {"qwen3-0.6b": (1.0, 1.1, 1.6, 3.2, 5.8), "qwen3-8b": (4.4, 4.7, 5.2, 7.8, 12.3)}


def make_engine(shape: str, batches: Sequence[int], attention: str) -> Engine:
    largest = max(batches)
    config = EngineConfig(
        device="cuda",
        attention_backend=attention,  # type: ignore[arg-type]
        graphs=sorted(batches),
        graph_non_decode=False,
        max_requests=largest,
        max_batch_tokens=16384,
        max_sequence_length=COLUMNS * 16,
        num_blocks=largest * COLUMNS,
    )
    return Engine.from_pretrained(f"shape:{shape}", config, progress=False)


def prompts_of(engine: Engine, batch: int) -> list[list[int]]:
    rng = random.Random(batch)
    return [[rng.randrange(engine.resolved.vocab_size) for _ in range(PROMPT)] for _ in range(batch)]


def timed(engine: Engine, prompts: list[list[int]], outputs: int) -> float:
    """Seconds for ``outputs`` tokens of every prompt."""
    params = SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)
    begin = time.perf_counter()
    engine.generate(prompts, params, progress=False)
    return time.perf_counter() - begin


def measure(engine: Engine, batch: int, mode: str, repeats: int) -> dict[str, Any]:
    """One cell."""
    engine.set_mode(mode)
    prompts = prompts_of(engine, batch)
    timed(engine, prompts, 4)
    engine.device.synchronize()
    engine.recorder.clear()
    pairs = [(timed(engine, prompts, OUTPUTS), timed(engine, prompts, 1)) for _ in range(repeats)]
    engine.device.synchronize()
    summary = summarise(engine.recorder.spans(), engine.recorder.iterations(), [])
    long_s, short_s = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
    return {
        "tpot_ms": (long_s - short_s) / (OUTPUTS - 1) * 1e3,
        "prefill_ms": short_s * 1e3,
        "tokens_per_s": batch * OUTPUTS / long_s,
        **columns_of(summary),
    }


def columns_of(summary: Summary) -> dict[str, Any]:
    """Medians over decode iterations, ms; host phases in µs."""
    device = {phase.name: phase.time for phase in summary.device.phases if phase.batch == "decode"}
    host = {phase.name: phase.host.p50_ns / 1e3 for phase in summary.host.phases}
    return {
        "step_ms": milliseconds(summary.step_by_batch["decode"]),
        "device_ms": {name: milliseconds(spread) for name, spread in device.items()},
        "host_us": host,
        "host_sum_us": sum(value for name, value in host.items() if name != "admit"),
        "hidden_share": summary.host.hidden_share,
        "bubble_share": summary.device.bubble_share,
        "graph_hit_rate": summary.graphs.hit_rate,
    }


def milliseconds(spread: Spread | None) -> float | None:
    return None if spread is None else spread.p50_ns / 1e6


def profile(engine: Engine, batch: int) -> list[tuple[str, float, float]]:
    """(kernel, launches a step, µs a step) of graphed decode, the heaviest first. Voids later timings here."""
    from torch.profiler import ProfilerActivity, profile

    steps = 12
    params = SamplingParams(max_tokens=steps + 8, temperature=0.0, ignore_eos=True)
    for prompt in prompts_of(engine, batch):
        engine.add_request(prompt, params)
    while engine.step() or any(engine.table.is_prefill[: engine.table.num_live]) or engine.pending is None:
        pass
    engine.step()
    engine.device.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(steps):
            engine.step()
        engine.device.synchronize()
    while engine.has_unfinished():
        engine.step()
    found: dict[str, list[float]] = defaultdict(list)
    for event in trace.events():
        found[event.name].append(event.device_time)
    rows = [(name, len(times) / steps, sum(times) / steps) for name, times in found.items()]
    return sorted(rows, key=lambda row: -row[2])


def show(shape: str, batches: Sequence[int], cells: dict[tuple[int, str], dict[str, Any]]) -> None:
    print(f"{shape}: ms")
    print("batch mode     tpot   step  fwd   sample  host µs  idle%  hidden%  prefill   tok/s |  peer  reach   aim")
    for (batch, mode), cell in cells.items():
        at = BATCHES.index(batch) if batch in BATCHES else None
        known = at is not None and shape in PEER_MS
        targets = [table[shape][at] if known else 0.0 for table in (PEER_MS, REACH_MS, AIM_MS)]
        device = cell["device_ms"]
        print(
            f"{batch:5d} {mode:6s} {cell['tpot_ms']:7.3f} {cell['step_ms']:6.3f} {device.get('forward', 0):6.3f} "
            f"{device.get('sample', 0):6.3f} {cell['host_sum_us']:7.0f} {100 * cell['bubble_share']:6.1f} "
            f"{100 * cell['hidden_share']:7.1f} {cell['prefill_ms']:9.1f} {cell['tokens_per_s']:8.0f} | "
            f"{targets[0]:6.2f} {targets[1]:6.2f} {targets[2]:6.2f}"
        )
    for batch in batches:
        legacy, overlap = cells.get((batch, "legacy")), cells.get((batch, "async"))
        if legacy and overlap:
            device = sum(value for value in legacy["device_ms"].values() if value)
            host = legacy["host_sum_us"] / 1e3
            print(
                f"{batch:5d} gain {legacy['step_ms'] / overlap['step_ms']:.2f}, predicted "
                f"{(host + device) / max(host, device):.2f}; host µs "
                + " ".join(f"{name} {value:.0f}" for name, value in overlap["host_us"].items())
            )


def run_shape(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    begin = time.perf_counter()
    engine = make_engine(shape, options.batches, options.attention)
    built_s = time.perf_counter() - begin
    with engine:
        cells = {}
        for batch in options.batches:
            for mode in options.modes:
                cells[batch, mode] = measure(engine, batch, mode, options.repeats)
        print(f"built in {built_s:.1f} s, attention {engine.resolved.attention_backend}")
        show(shape, options.batches, cells)
        profiles = {}
        if options.profile:
            engine.set_mode("async")
            for batch in options.profile_batches or options.batches:
                profiles[batch] = profile(engine, batch)
                print(f"{shape} batch {batch}: {sum(row[2] for row in profiles[batch]):.0f} µs of kernels a step")
                for name, count, time_us in profiles[batch][: options.lines]:
                    print(f"  {time_us:8.1f} µs {count:6.1f} x {time_us / count:7.2f}  {name[:90]}")
        resolved = engine.resolved.to_dict()
    return {
        "shape": shape,
        "built_s": built_s,
        "cells": [{"batch": batch, "mode": mode, **cell} for (batch, mode), cell in cells.items()],
        "profiles": profiles,
        "resolved": resolved,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def run_mix(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """Output tokens a second of 256 requests at once, input and output lengths uniform in 100-1024, temperature 0.6."""
    rng = random.Random(0)
    lengths = [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256)]
    config = EngineConfig(
        device="cuda",
        attention_backend=options.attention,
        graphs=-1,
        graph_distribution="linear",
        graph_non_decode=False,
        max_requests=256,
        max_batch_tokens=16384,
        max_sequence_length=2048,
        num_blocks=256 * 80,
    )
    rates = {}
    with Engine.from_pretrained(f"shape:{shape}", config, progress=False) as engine:
        vocab_size = engine.resolved.vocab_size
        prompts = [[rng.randrange(vocab_size) for _ in range(inputs)] for inputs, _ in lengths]
        params = [
            SamplingParams(max_tokens=outputs, temperature=0.6, ignore_eos=True, seed=number)
            for number, (_, outputs) in enumerate(lengths)
        ]
        engine.generate(prompts[:32], params[:32], progress=False)
        for mode in options.modes:
            engine.set_mode(mode)
            begin = time.perf_counter()
            engine.generate(prompts, params, progress=False)
            rates[mode] = sum(outputs for _, outputs in lengths) / (time.perf_counter() - begin)
    print(f"{shape} mix of 256: " + ", ".join(f"{mode} {rate:.0f} tok/s" for mode, rate in rates.items()))
    return {"shape": shape, "mix": rates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--modes", nargs="+", default=["legacy", "async"])
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mix", action="store_true", help="only the mix of 256 requests")
    parser.add_argument("--profile", action="store_true", help="kernel times with torch.profiler, after all timing")
    parser.add_argument("--profile-batches", nargs="+", type=int)
    parser.add_argument("--lines", type=int, default=14, help="kernels to print a batch")
    options = parser.parse_args()
    found = [(run_mix if options.mix else run_shape)(shape, options) for shape in options.shapes]
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], "gpu_decode.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
