"""Which kernels a graphed decode step consists of on one GPU, by torch.profiler: the heaviest first.

    python -m benchmarks.gpu_profile --model shape:qwen3-8b --batches 1 256
    python -m benchmarks.gpu_profile --model shape:hybrid-2b --batches 1 32 --leg async+speculative_tokens=2

Prompts, sizes and engine are those of ``workbench bench decode``, which is where times of steps come from: once the
profiler has run in a process, launching a graph costs the host several times as much. Where OUT is set, everything goes
to $OUT/gpu_profile.json as well.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from benchmarks.traffic import parse_leg
from engine import SamplingParams
from engine.config import EngineConfig
from engine.engine import Engine
from workbench.bench.decode import DecodePlan, decode_config, random_prompts
from workbench.bench.options import BenchOptions
from workbench.bench.workplace import Workplace
from workbench.legs import Leg
from workbench.loading import session_config

STEPS = 12
Kernel = tuple[str, float, float]
"""Name, launches a step, µs a step."""


def kernels_of_a_step(engine: Engine, plan: DecodePlan, batch: int) -> list[Kernel]:
    """Of ``batch`` decode rows; leaves the engine without requests."""
    params = SamplingParams(max_tokens=plan.output_len + 1, temperature=0.0, ignore_eos=True)
    for prompt in random_prompts(engine, plan, batch):
        engine.add_request(prompt, params)
    while not is_decoding(engine):
        engine.step()
    engine.step()
    engine.device.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(STEPS):
            engine.step()
        engine.device.synchronize()
    engine.reset()
    times_us: dict[str, list[float]] = defaultdict(list)
    for event in trace.events():
        times_us[event.name].append(event.device_time)
    found = [(name, len(times) / STEPS, sum(times) / STEPS) for name, times in times_us.items()]
    return sorted(found, key=lambda kernel: -kernel[2])


def profile_config(workplace: Workplace, plan: DecodePlan, leg: Leg) -> EngineConfig:
    """As ``workbench bench decode`` has it, with the leg's options; a graph of each batch, drafts included."""
    base = decode_config(workplace, plan, leg.mode, graphs=True)
    drafts = int(leg.changes.get("speculative_tokens", 0))
    columns = -(-(plan.prompt_len + plan.output_len + 1 + STEPS * (drafts + 1)) // base.block_size)
    made = {
        "graphs": sorted({batch * (drafts + 1) for batch in plan.batches}),
        "max_batch_tokens": max(base.max_batch_tokens, max(plan.batches) * (drafts + 1)),
        "max_sequence_length": columns * base.block_size,
        "num_blocks": max(plan.batches) * (columns + 1),
    }
    return session_config(base, leg.mode, {**made, **leg.changes})


def is_decoding(engine: Engine) -> bool:
    """Whether all requests are past their prompts and the next iteration overlaps."""
    pending = engine.pending
    return pending is not None and not pending.has_prefill and not engine.queue.num_waiting


def show(batch: int, kernels: list[Kernel], lines: int) -> None:
    print(f"{batch} rows: {sum(time_us for _, _, time_us in kernels):.0f} µs of kernels a step")
    for name, count, time_us in kernels[:lines]:
        print(f"  {time_us:8.1f} µs {count:6.1f} x {time_us / count:7.2f}  {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 128, 256])
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--leg", default="async", help="mode and options, as in benchmarks.drafting")
    parser.add_argument("--lines", type=int, default=14, help="kernels to print a batch")
    args = parser.parse_args()
    options = BenchOptions(
        device="cuda", model=args.model, batches=tuple(args.batches), attention=args.attention, graphs="on"
    )
    workplace, plan = Workplace(options), DecodePlan.of(options)
    loaded = workplace.load(options.model_name)
    found = {}
    with Engine(loaded, profile_config(workplace, plan, parse_leg(args.leg))) as engine:
        print(f"{loaded.name}, {args.leg}, attention {engine.resolved.attention_backend}")
        for batch in plan.batches:
            found[batch] = kernels_of_a_step(engine, plan, batch)
            show(batch, found[batch], args.lines)
        resolved = engine.resolved.to_dict()
    if os.environ.get("OUT"):
        document = {"model": loaded.name, "resolved": resolved, "kernels": found}
        Path(os.environ["OUT"], "gpu_profile.json").write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
