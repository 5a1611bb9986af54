"""``workbench run`` and ``workbench compare``: a workload served once, or in several modes."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tracing.run_folder import check_target, write_run
from workbench.options import add_config_flags, config_from
from workbench.writable import check_file, check_folder

DEFAULT_WORKLOAD = "fixed:requests=16,input=64,output=32"
WAYS = ("round-robin", "all-on-0")
"""Of dealing requests out to ranks."""
_ENDINGS = 10
"""Outputs that ``run`` prints in full; ``--json`` has all."""
MODELS = "a folder, a GGUF file, shipped, smollm2, shape:NAME or oracle (default: shipped)"
RUN_EXAMPLES = """\
examples:
  workbench run --model smollm2 --workload fixed:requests=4,input=32,output=16,temperature=0.8,seed=1
  workbench run --model shape:tiny --workload poisson:rate=20,requests=32,input=64,output=32 --mode legacy
  workbench run --model shape:tiny --workload "azure:azure_conv.csv?requests=50&max_length=256&scale=0.1"
  workbench run --model oracle --workload "mooncake:trace.jsonl?requests=50&shrink=64&concurrency=8"
  workbench run --config engine.yaml --graphs 1,2,4,8 --max-requests 8 --workload file:prompts.jsonl --json
  workbench run --model smollm2 --mode legacy --save runs/legacy
  torchrun --nproc-per-node 2 -m workbench run --expert-parallel 2 --workload fixed:requests=8,input=32,output=16
"""
COMPARE_EXAMPLES = """\
examples:
  workbench compare --model smollm2 --workload fixed:requests=16,input=64,output=32 --device cpu
  workbench compare --model oracle --workload fixed:requests=8,input=20,output=16,arrive=2 --legs legacy,async
  workbench compare --model shape:tiny --repeats 3 --report runs/tiny.html
  workbench compare --model shape:tiny --legs legacy,async --save runs/tiny
exit status: 0 if outputs agree (equal, or apart by rounding alone), 1 if they are DIFFERENT or a request failed,
2 for a wrong call
"""


def _add_serving_flags(parser: argparse.ArgumentParser, save_help: str) -> None:
    from workbench.workloads import known_workloads

    parser.add_argument("--model", metavar="MODEL", help=MODELS)
    kinds = f"one of {known_workloads()}; docs/workloads.md tells all options (default: %(default)s)"
    parser.add_argument("--workload", metavar="WORKLOAD", default=DEFAULT_WORKLOAD, help=kinds)
    parser.add_argument("--clock", help="virtual, iterations or wall (default: what the workload counts)")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else on stdout")
    parser.add_argument("--report", metavar="FILE.html", help="also write the report with its timeline")
    parser.add_argument("--save", metavar="DIR", help=save_help)
    parser.add_argument("--overwrite", action="store_true", help="let --save replace runs that stand there")


def add_run_flags(parser: argparse.ArgumentParser) -> None:
    """What ``workbench run`` takes."""
    _add_serving_flags(
        parser,
        "also save the run in this folder: config, spans, iterations, requests, outputs; of several ranks each in one "
        "of its own, DIR-rank0 and so on",
    )
    parser.add_argument(
        "--rank-requests",
        choices=WAYS,
        help=f"with --expert-parallel, whose the requests are: all ranks' by turns, or rank 0's (default: {WAYS[0]})",
    )
    add_config_flags(parser)


def add_compare_flags(parser: argparse.ArgumentParser) -> None:
    """What ``workbench compare`` takes."""
    _add_serving_flags(parser, "also save the runs, each in a folder in this one named by its leg")
    parser.add_argument(
        "--legs",
        default="legacy,no-overlap,async",
        help="what to compare, the first is the baseline: legacy, no-overlap, async (default: all three)",
    )
    parser.add_argument("--repeats", type=int, default=1, help="measured runs a leg (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="runs before them that do not count (default: 1)")
    parser.add_argument("--all", action="store_true", help="print every metric and not only the main ones")
    add_config_flags(parser, without=("mode",))


def run(args: argparse.Namespace) -> int:
    """Serve once; returns the exit status: 1 if a request failed."""
    from workbench.loading import load_for
    from workbench.rank_commands import check_ranks, rank_folder, run_on_ranks
    from workbench.runs import document, serve
    from workbench.session import Session
    from workbench.workloads import parse_workload

    config = config_from(args)
    if args.report:
        check_file("--report", args.report)
    check_ranks(config, args.rank_requests)
    if args.save:
        check_target(rank_folder(args.save, config), overwrite=args.overwrite)
        check_folder("--save", Path(args.save).resolve().parent)
    if config.has_ranks:
        return run_on_ranks(args, config)
    with _only_json(args.json) as out:
        loaded = load_for(config, args.model, progress=True)
        workload = parse_workload(args.workload, vocab_size=loaded.vocab_size)
        clock = args.clock or _clock_of(workload.unit)
        _warn(workload.notes)
        with Session(loaded, config=config, clock=clock, progress=True) as session, _bar(len(workload.requests)) as bar:
            _warn(workload.length_notes(session.engine.resolved.max_sequence_length))
            served = serve(session, workload, name=config.mode, on_output=lambda output: _advance(bar, output))
        if args.save:
            _say_saved([write_run(served.trace, args.save, overwrite=args.overwrite)])
        if args.report:
            _write_report(args.report, [served.view], f"{loaded.name}: {workload.name}", [])
        if args.json:
            print_json(out, document("run", workload, **served.to_dict()))
        else:
            from tracing.analysis import format_comparison

            print(format_comparison({served.name: served.summary}), file=out)
            print(endings(served.outputs), file=out)
    return 1 if any(output.finish_reason == "error" for output in served.outputs) else 0


def compare_legs(args: argparse.Namespace) -> int:
    """Serve in every leg; returns the exit status: 1 if outputs are DIFFERENT or a request failed."""
    from workbench.comparison import LEGS, compare
    from workbench.loading import load_for
    from workbench.saved_runs import check_folders, save_runs
    from workbench.workloads import parse_workload

    config = config_from(args)
    if args.report:
        check_file("--report", args.report)
    legs = [leg.strip() for leg in args.legs.split(",")]
    if args.save:
        names = [LEGS[leg].name if leg in LEGS else leg for leg in legs]
        check_folders(args.save, names, overwrite=args.overwrite)
        check_folder("--save", args.save)
    with _only_json(args.json) as out:
        loaded = load_for(config, args.model, progress=True)
        workload = parse_workload(args.workload, vocab_size=loaded.vocab_size)
        _warn(workload.notes)
        comparison = compare(
            workload,
            legs,
            model=loaded,
            config=config,
            clock=args.clock,
            repeats=args.repeats,
            warmup=args.warmup,
        )
        if args.save:
            _say_saved(save_runs(args.save, [run.trace for run in comparison.runs], overwrite=args.overwrite))
        if args.report:
            views = [run.view for run in comparison.runs]
            title = f"{loaded.name}: {workload.name}"
            _write_report(args.report, views, title, [comparison.verdict_text], repeats=args.repeats)
        if args.json:
            print_json(out, comparison.to_dict())
        else:
            print(comparison.text(is_whole=args.all), file=out)
            if not args.all:
                print("--all prints every metric, with the spread over repeats and the orders' reasons", file=out)
            if args.repeats == 1:
                print("1 run a leg: times vary by several per cent; use --repeats 5", file=out)
    has_failed = any(output.finish_reason == "error" for run in comparison.runs for output in run.outputs)
    return 0 if comparison.outputs_match and not has_failed else 1


def _warn(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"warning: workload: {note}", file=sys.stderr)


def _clock_of(unit: str) -> str:
    return "iterations" if unit == "iterations" else "virtual"


@contextlib.contextmanager
def _only_json(is_json: bool) -> Iterator[Any]:
    """The real standard output; with ``--json`` whatever else is printed goes to standard error."""
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if is_json else contextlib.nullcontext():
        yield out


def print_json(out: Any, value: Any) -> None:
    """One document, on one line."""
    from workbench.documents import jsonable

    json.dump(jsonable(value), out, allow_nan=False)
    out.write("\n")


def _bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="serve", unit="request", disable=None)  # None: only on a terminal


def _advance(bar: Any, output: Any) -> None:
    if output.finished:
        bar.update()


def endings(outputs: Sequence[Any]) -> str:
    """The first outputs, and of the others how many ended how."""
    lines = [""]
    for output in outputs[:_ENDINGS]:
        shown = repr(output.text) if output.text else " ".join(map(str, output.token_ids))
        lines.append(f"{output.request_id}: {len(output.token_ids)} tokens, {output.finish_reason}: {shown[:90]}")
    reasons = Counter(output.finish_reason for output in outputs[_ENDINGS:])
    if reasons:
        told = ", ".join(f"{reason} {count:,}" for reason, count in reasons.most_common())
        lines.append(f"and {reasons.total():,} more ({told}); --json has every output")
    return "\n".join(lines)


def _say_saved(folders: Sequence[Path]) -> None:
    print(f"saved: {', '.join(map(str, folders))}", file=sys.stderr)


def _write_report(path: str, views: Any, title: str, notes: Sequence[str], *, repeats: int = 1) -> None:
    from workbench.environment import environment_shown
    from workbench.report import write_report

    shown = environment_shown()
    written = write_report(path, views, title=title, environment=shown, notes=notes, repeats=repeats)
    print(f"report: {written}", file=sys.stderr)
