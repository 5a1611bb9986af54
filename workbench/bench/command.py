"""The command line of ``workbench bench``. Imports no torch before it runs."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from workbench.bench.options import BenchError, BenchOptions

EXAMPLES = """\
benchmarks (default: all):
  host      host time of prepare and resolve by rows (oracle model)
  hidden    hidden share in both modes (SmolLM2)
  recorder  steps with the recorder on and off, in pairs
  steady    thousands of iterations: blocks come back, memory stays
  decode    closed batches: time per output token, its floor, device and host time, what async gains
  mix       many requests of different lengths at once: output tokens a second
  whatif    step times that a trace predicts, beside runs that have the delay
examples:
  workbench bench host recorder
  workbench bench decode mix --device cuda --model shape:qwen3-8b
  workbench bench decode --batches 1,8 --modes async --graphs on --repeats 5
  workbench bench decode --against runs/bench/bench-20260101-120000.json --tolerance 0.1
exit status: 0, or 3 if a ratio to --against lies outside the tolerance, 2 for a wrong call
"""


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Everything after ``workbench bench``."""
    parser.add_argument("names", nargs="*", metavar="NAME", help="which benchmarks, see below")
    parser.add_argument("--only", metavar="NAMES", help="the same with commas: host,recorder")
    parser.add_argument("--device", default="cpu", help="cpu, inline or cuda (default: %(default)s)")
    model = "model of decode, mix, recorder and whatif (default: shape:qwen3-0.6b on cuda, else shape:tiny)"
    parser.add_argument("--model", metavar="MODEL", help=model)
    rows = "rows of decode, recorder and whatif (default of decode: 1,8,32,128,256 on cuda, else 1,8)"
    parser.add_argument("--batches", metavar="N,N,...", help=rows)
    parser.add_argument("--modes", default="legacy,async", help="of decode, mix and whatif (default: %(default)s)")
    parser.add_argument("--graphs", default="both", help="of decode and mix: on, off or both (default: %(default)s)")
    repeats = "measured runs of a cell after its warm-up (default: decode 3, mix 1); pairs of recorder (21), whatif (5)"
    parser.add_argument("--repeats", metavar="N", type=int, help=repeats)
    parser.add_argument("--attention", default="auto", metavar="NAME", help="attention backend (default: auto)")
    prompt = "tokens of a prompt in decode (default: 512 on cuda, else 64)"
    parser.add_argument("--prompt-len", metavar="N", type=int, help=prompt)
    output = "decode steps that its time per token counts (default: 128 on cuda, else 64)"
    parser.add_argument("--output-len", metavar="N", type=int, help=output)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller samples, to see whether it works")
    parser.add_argument("--out", default="runs/bench", help="folder for the JSON file (default: %(default)s)")
    parser.add_argument("--against", metavar="FILE", help="an earlier JSON file: print the ratio of each cell to it")
    tolerance = "how far from 1 a ratio may lie (default: %(default)s)"
    parser.add_argument("--tolerance", metavar="X", type=float, default=0.1, help=tolerance)


def bench(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Measure, and compare if asked to; returns the exit status.

    Raises:
        BenchError: a flag's value cannot be, or the earlier file is missing or foreign: both before measuring.
        EngineError: see :func:`~workbench.bench.runner.run_benchmarks`.
    """
    options = _options(args)
    if not (math.isfinite(args.tolerance) and args.tolerance >= 0):
        raise BenchError(f"tolerance must be a number of at least 0, got {args.tolerance}")
    from workbench.bench.against import compare_files, read_bench_file
    from workbench.bench.runner import run_benchmarks

    before = None if args.against is None else read_bench_file(Path(args.against))
    names = [*args.names, *_words(args.only or "")] or None
    path = run_benchmarks(names, options, out=Path(args.out), say=say)
    if before is None:
        return 0
    found = compare_files(before, read_bench_file(path), args.tolerance)
    for line in found.lines():
        say(line)
    return 3 if found.num_outside else 0


def _options(args: argparse.Namespace) -> BenchOptions:
    return BenchOptions(
        device=args.device,
        model=args.model,
        batches=None if args.batches is None else _numbers(args.batches),
        modes=tuple(_words(args.modes)),
        graphs=args.graphs,
        repeats=args.repeats,
        attention=args.attention,
        prompt_len=args.prompt_len,
        output_len=args.output_len,
        quick=args.quick,
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(word) for word in _words(text)))
    except ValueError:
        raise BenchError(f"batches must be whole numbers with commas between, got {text!r}") from None


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
