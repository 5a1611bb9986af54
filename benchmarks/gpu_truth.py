"""How far our device lanes are from torch.profiler's kernels, in each order, on one GPU.

    python benchmarks/gpu_truth.py --batches 8 128 --iterations 200

Steady decode of random prompts, prompts and sizes as in ``workbench bench decode``: legacy, async without overlap, and
overlap, each recorded by us and by the profiler at once; docs/metrics.md says how the two are compared. The profiler
makes launching a graph cost the host several times as much from its first use on, so bubbles and hidden shares here
are not those of an engine that runs alone: what counts is how far the two instruments are apart. Where OUT is set,
everything goes to $OUT/gpu_truth.json as well, and one leg to $OUT/gpu_truth.json.gz for Perfetto.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from engine import SamplingParams
from engine.engine import Engine
from engine.models.loader import LoadedModel
from engine.policy import OrderPolicy, never_overlap, prefer_overlap
from tracing.agreement import Agreement, agreement
from tracing.agreement_table import agreement_lines
from tracing.chrome import write_chrome_trace
from tracing.importing import ImportedTrace
from tracing.torch_clock import noting_clock
from tracing.torch_profile import read_torch_trace
from tracing.trace import Records, Trace
from workbench.bench.decode import DecodePlan, decode_config, random_prompts
from workbench.bench.options import BenchOptions
from workbench.bench.workplace import Workplace
from workbench.environment import environment

ORDERS: dict[str, tuple[str, OrderPolicy]] = {
    "legacy": ("legacy", prefer_overlap),
    "no_overlap": ("async", never_overlap),
    "overlap": ("async", prefer_overlap),
}
"""Mode and policy that make each order the steady one."""
SPARE_STEPS = 48
"""Steps that prompts and settling take, at most."""
TOOL = "torch.profiler"
LENGTH_NS, LENGTH_SHARE, BUBBLES, HIDDEN = 5_000, 0.01, 0.02, 0.01
"""Limits: a length by 5 µs or 1 %, whichever is more; bubbles by 2 % of wall time; hidden share by one point."""


@dataclass(frozen=True, slots=True)
class Check:
    """One number that has a limit, as it stands in the table."""

    name: str
    found: float
    limit: float
    text: str

    @property
    def holds(self) -> bool:
        """Whether the two instruments are close enough."""
        return abs(self.found) <= self.limit


def checks_of(found: Agreement) -> list[Check]:
    """Length of every name of work, bubbles, hidden share."""
    checks = []
    for row in found.work:
        limit_ns = max(LENGTH_NS, LENGTH_SHARE * row.tool_length_p50_ns)
        relative = f"{100 * row.length.p50_ns / row.tool_length_p50_ns:.1f} %" if row.tool_length_p50_ns else "-"
        text = f"{row.length.p50_ns / 1e3:.1f} ({relative})"
        checks.append(Check(f"{row.lane} {row.name}", row.length.p50_ns, limit_ns, text))
    for name, share, limit in (("bubbles", found.bubbles, BUBBLES), ("hidden", found.hidden, HIDDEN)):
        if share is not None:
            checks.append(Check(name, share.apart, limit, f"{100 * share.tool:.1f} ({100 * share.apart:+.2f})"))
    return checks


def decode_until_steady(engine: Engine, plan: DecodePlan, batch: int) -> None:
    """Hand in ``batch`` requests and run until an iteration consumed and launched all of them as decode rows."""
    params = SamplingParams(max_tokens=plan.output_len, temperature=0.0, ignore_eos=True)
    for prompt in random_prompts(engine, plan, batch):
        engine.add_request(prompt, params)
    for _ in range(SPARE_STEPS // 2):
        engine.step()
        if _is_steady(engine, batch):
            break
    else:
        raise RuntimeError(f"{batch} rows were not decoding after {SPARE_STEPS // 2} steps")
    for _ in range(4):
        engine.step()
    engine.device.synchronize()


def _is_steady(engine: Engine, batch: int) -> bool:
    record = engine.recorder.iterations()[-1]
    return all(
        side is not None and side.kind == "decode" and side.num_rows == batch
        for side in (record.consumed, record.launched)
    )


def profiled(engine: Engine, iterations: int, folder: Path) -> tuple[Records, ImportedTrace]:
    """Some steps of a decoding engine under the profiler: what we recorded, and what it did."""
    engine.recorder.clear()
    path = folder / "torch.json"
    with profile(activities=[ProfilerActivity.CUDA]) as profiler, noting_clock(profiler):
        for _ in range(iterations):
            engine.step()
        engine.device.synchronize()
    profiler.export_chrome_trace(str(path))
    records = Records(spans=engine.recorder.spans(), iterations=engine.recorder.iterations())
    imported = read_torch_trace(path)
    path.unlink()
    return records, imported


def legs(
    loaded: LoadedModel, workplace: Workplace, plan: DecodePlan, iterations: int, folder: Path
) -> Iterator[tuple[str, int, Trace, ImportedTrace]]:
    """Order, rows, our trace and the profiler's. One engine an order, on one model."""
    for order, (mode, policy) in ORDERS.items():
        with Engine(loaded, decode_config(workplace, plan, mode, graphs=True), policy=policy) as engine:
            for batch in plan.batches:
                decode_until_steady(engine, plan, batch)  # kernels load, memory is found
                engine.reset()
                decode_until_steady(engine, plan, batch)
                records, imported = profiled(engine, iterations, folder)
                engine.reset()
                trace = Trace(
                    name=f"{order}, {batch} rows",
                    records=records,
                    config=engine.resolved.to_dict(),
                    environment=environment(),
                    device_clock_error_ns=engine.device.clock_error_ns,
                )
                yield order, batch, trace, imported


@dataclass(frozen=True, slots=True)
class Leg:
    """One order and batch, compared."""

    trace: Trace
    imported: ImportedTrace
    found: Agreement
    checks: list[Check]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "leg": self.trace.name,
            "iterations": len(self.trace.records.iterations),
            "orders": sorted({record.order for record in self.trace.records.iterations}),
            "device_clock_error_ns": self.trace.device_clock_error_ns,
            "notes": self.imported.notes,
            "agreement": asdict(self.found),
            "checks": [{**asdict(check), "holds": check.holds} for check in self.checks],
        }


def compared(trace: Trace, imported: ImportedTrace) -> Leg:
    found = agreement(trace.records.spans, trace.records.iterations, imported)
    return Leg(trace, imported, found, checks_of(found))


def table(found: list[Leg]) -> list[str]:
    """A line a leg: lengths in µs, shares in %; what is over its limit has a mark."""
    names = list(dict.fromkeys(check.name for leg in found for check in leg.checks))
    rows = [["leg", *names, "inside", "clock"]]
    for leg in found:
        cells = {check.name: check.text + (" " if check.holds else "!") for check in leg.checks}
        inside = "-" if leg.found.inner_gaps is None else f"{100 * leg.found.inner_gaps:.2f}"
        error_ns = leg.trace.device_clock_error_ns
        clock = "-" if error_ns is None else f"± {error_ns / 1e3:.1f}"
        rows.append([leg.trace.name, *(cells.get(name, "none ") for name in names), inside, clock])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [
        *lines,
        f"work: how far our length is from {TOOL}'s, median, µs; bubbles, hidden: {TOOL}'s, % (ours less that);",
        "inside: gaps inside pieces, % of wall time; clock: error bound of our device times, µs; !: over its limit",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 128])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--details", action="store_true", help="also print starts, ends and percentiles of every leg")
    args = parser.parse_args()
    options = BenchOptions(
        device="cuda",
        model=args.model,
        batches=tuple(args.batches),
        prompt_len=args.prompt_len,
        output_len=args.iterations + SPARE_STEPS,
        attention=args.attention,
        graphs="on",
    )
    workplace, plan = Workplace(options), DecodePlan.of(options)
    begin = time.perf_counter()
    loaded = workplace.load(options.model_name)
    with profile(activities=[ProfilerActivity.CUDA]):  # starting it takes seconds the first time
        torch.zeros(8, device="cuda")
        torch.cuda.synchronize()
    found: list[Leg] = []
    out = os.environ.get("OUT")
    with tempfile.TemporaryDirectory() as folder:
        for order, batch, trace, imported in legs(loaded, workplace, plan, args.iterations, Path(folder)):
            leg = compared(trace, imported)
            if args.details:
                print("\n".join([f"{trace.name}:", *agreement_lines(leg.found, TOOL), *imported.notes, ""]))
            if out and order == "overlap" and batch == plan.batches[0]:
                write_chrome_trace(trace, Path(out, "gpu_truth.json.gz"), imported=[imported])
            found.append(leg)
    took_s = time.perf_counter() - begin
    print(
        f"{loaded.name}, {args.iterations} steady iterations a leg, {took_s:.0f} s. The profiler has run here before,"
    )
    print("so launching a graph costs the host several times what it does alone: compare instruments, not orders.")
    print("\n".join(table(found)))
    if out:
        document = {"environment": environment(), "model": loaded.name, "legs": [leg.to_dict() for leg in found]}
        Path(out, "gpu_truth.json").write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
