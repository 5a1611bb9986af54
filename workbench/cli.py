"""The command line: ``workbench run|compare|bench|demo|doctor|lab``. What the notebook does, without it."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from workbench.options import OneLineParser, UsageError, add_config_flags, config_from, did_you_mean

Command = Callable[[argparse.Namespace], int]
DEFAULT_WORKLOAD = "fixed:requests=16,input=64,output=32"
_MODELS = "a folder, a GGUF file, smollm2, shape:NAME or oracle (default: smollm2)"
_EXAMPLES = """\
examples:
  workbench demo
  workbench run --model smollm2 --workload fixed:requests=4,input=32,output=16
  workbench run --model shape:tiny --mode legacy --json > run.json
  workbench compare --model smollm2 --workload fixed:requests=16,input=64,output=32 --device cpu
  workbench compare --model oracle --legs legacy,async --repeats 3 --report runs/oracle.html
  workbench bench decode mix --device cuda
  workbench doctor
  workbench lab
"""
_RUN_EXAMPLES = """\
examples:
  workbench run --model smollm2 --workload fixed:requests=4,input=32,output=16,temperature=0.8,seed=1
  workbench run --model shape:tiny --workload poisson:rate=20,requests=32,input=64,output=32 --mode legacy
  workbench run --config engine.yaml --graphs 1,2,4,8 --max-requests 8 --workload file:prompts.jsonl --json
"""
_COMPARE_EXAMPLES = """\
examples:
  workbench compare --model smollm2 --workload fixed:requests=16,input=64,output=32 --device cpu
  workbench compare --model oracle --workload fixed:requests=8,input=20,output=16,arrive=2 --legs legacy,async
  workbench compare --model shape:tiny --repeats 3 --report runs/tiny.html
exit status: 0 if outputs agree (equal, or apart by rounding alone), 1 if they are DIFFERENT or a request failed,
2 for a wrong call
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without µ still gets its table
    try:
        args, rest = _parser().parse_known_args(argv)
        command: Command = args.command
        if rest and command is not _lab:
            raise UsageError(f"{_unknown(args, rest)}; workbench {args.name} --help shows what it takes")
        args.rest = rest
        return command(args)
    except (EngineError, UsageError) as error:
        print("workbench: error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read us has gone; say nothing at exit
        return 1
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        print(f"workbench: error: cannot use{where}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("workbench: interrupted", file=sys.stderr)
        return 130


def _unknown(args: argparse.Namespace, rest: Sequence[str]) -> str:
    """What to say of arguments that nobody took."""
    flag = rest[0].partition("=")[0]
    if args.command is _compare and flag == "--mode":
        return "compare chooses modes by --legs, such as --legs legacy,async"
    return f"unrecognized arguments: {' '.join(rest)}{did_you_mean(flag, args.flags)}"


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="workbench",
        description="Drive a dynamic-batching engine, and compare its scheduling modes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_run(commands)
    _add_compare(commands)
    _add_bench(commands)
    _add_demo(commands)
    _add_doctor(commands)
    _add_lab(commands)
    return parser


def _command(commands: Any, name: str, function: Command, **text: Any) -> OneLineParser:
    parser: OneLineParser = commands.add_parser(
        name, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **text
    )
    parser.set_defaults(command=function, name=name, flags=parser.flags)
    return parser


def _add_serving_flags(parser: argparse.ArgumentParser) -> None:
    from workbench.workloads import known_workloads

    parser.add_argument("--model", metavar="MODEL", help=_MODELS)
    kinds = f"one of {known_workloads()} (default: %(default)s)"
    parser.add_argument("--workload", metavar="WORKLOAD", default=DEFAULT_WORKLOAD, help=kinds)
    parser.add_argument("--clock", help="virtual, iterations or wall (default: what the workload counts)")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else on stdout")
    parser.add_argument("--report", metavar="FILE.html", help="also write the report with its timeline")


def _add_run(commands: Any) -> None:
    parser = _command(commands, "run", _run, help="serve a workload once", epilog=_RUN_EXAMPLES)
    _add_serving_flags(parser)
    add_config_flags(parser)


def _add_compare(commands: Any) -> None:
    parser = _command(commands, "compare", _compare, help="serve a workload in several modes", epilog=_COMPARE_EXAMPLES)
    _add_serving_flags(parser)
    parser.add_argument(
        "--legs",
        default="legacy,no-overlap,async",
        help="what to compare, the first is the baseline: legacy, no-overlap, async (default: all three)",
    )
    parser.add_argument("--repeats", type=int, default=1, help="measured runs a leg (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="runs before them that do not count (default: 1)")
    add_config_flags(parser, without=("mode",))


def _add_bench(commands: Any) -> None:
    from workbench.bench.command import EXAMPLES, add_bench_flags

    help_text = "measure decode, a mix of requests, host time, hidden share, recorder cost"
    add_bench_flags(_command(commands, "bench", _bench, help=help_text, epilog=EXAMPLES))


def _add_demo(commands: Any) -> None:
    parser = _command(commands, "demo", _demo, help="serve real prompts in both modes and compare")
    parser.add_argument("--device", default="cpu", help="cpu, inline or cuda (default: %(default)s)")
    parser.add_argument("--out", default="runs/demo", help="folder for the report (default: %(default)s)")
    parser.add_argument("--model", metavar="MODEL", help=_MODELS + "; needs a chat template")


def _add_doctor(commands: Any) -> None:
    parser = _command(commands, "doctor", _doctor, help="say what this machine has, and the remedy for what it lacks")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def _add_lab(commands: Any) -> None:
    _command(
        commands,
        "lab",
        _lab,
        help="open the notebooks in JupyterLab",
        epilog="other options go to jupyter lab: --port 9999",
    )


def _run(args: argparse.Namespace) -> int:
    from workbench.loading import load_for
    from workbench.runs import document, serve
    from workbench.session import Session
    from workbench.workloads import parse_workload

    config = config_from(args)
    _check_report(args.report)
    with _only_json(args.json) as out:
        loaded = load_for(config, args.model)
        workload = parse_workload(args.workload, vocab_size=loaded.vocab_size)
        clock = args.clock or _clock_of(workload.unit)
        with Session(loaded, config=config, clock=clock, progress=True) as session, _bar(len(workload.requests)) as bar:
            run = serve(session, workload, name=config.mode, on_output=lambda output: _advance(bar, output))
        if args.report:
            _write_report(args.report, [run.view], f"{loaded.name}: {workload.name}", [])
        if args.json:
            _print_json(out, document("run", workload, **run.to_dict()))
        else:
            from tracing.analysis import format_comparison

            print(format_comparison({run.name: run.summary}), file=out)
            print(_endings(run.outputs), file=out)
    return 1 if any(output.finish_reason == "error" for output in run.outputs) else 0


def _compare(args: argparse.Namespace) -> int:
    from workbench.comparison import compare
    from workbench.loading import load_for
    from workbench.workloads import parse_workload

    config = config_from(args)
    _check_report(args.report)
    with _only_json(args.json) as out:
        loaded = load_for(config, args.model)
        workload = parse_workload(args.workload, vocab_size=loaded.vocab_size)
        legs = [leg.strip() for leg in args.legs.split(",")]
        with _bar(len(workload.requests) * len(legs) * max(args.repeats, 0)) as bar:
            comparison = compare(
                workload,
                legs,
                model=loaded,
                config=config,
                clock=args.clock,
                repeats=args.repeats,
                warmup=args.warmup,
                on_run=lambda name, session: lambda output: _advance(bar, output),
            )
        if args.report:
            views = [run.view for run in comparison.runs]
            title = f"{loaded.name}: {workload.name}"
            _write_report(args.report, views, title, [comparison.verdict_text], repeats=args.repeats)
        if args.json:
            _print_json(out, comparison.to_dict())
        else:
            print(comparison, file=out)
            if args.repeats == 1:
                print("1 run a leg: times vary by several per cent; use --repeats 5", file=out)
    has_failed = any(output.finish_reason == "error" for run in comparison.runs for output in run.outputs)
    return 0 if comparison.outputs_match and not has_failed else 1


def _bench(args: argparse.Namespace) -> int:
    from workbench.bench.command import bench

    return bench(args, _say_beside_bars)


def _demo(args: argparse.Namespace) -> int:
    from workbench.demo import run_demo

    return run_demo(model=args.model, device=args.device, out=Path(args.out), say=_say)


def _doctor(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from workbench.doctor import examine, format_checks

    checks = examine()
    print(json.dumps([asdict(check) for check in checks], indent=2) if args.json else format_checks(checks))
    return 0


def _lab(args: argparse.Namespace) -> int:
    import subprocess
    from importlib.util import find_spec

    from workbench.environment import ROOT

    if find_spec("jupyterlab") is None:
        raise UsageError("JupyterLab is not installed; install it with: pip install -e '.[notebook]'")
    notebooks = ROOT / "notebooks"
    if not notebooks.is_dir():
        raise UsageError(f"there is no folder {notebooks}; run this from a clone of the project")
    return subprocess.run([sys.executable, "-m", "jupyterlab", str(notebooks), *args.rest], check=False).returncode


def _clock_of(unit: str) -> str:
    return "iterations" if unit == "iterations" else "virtual"


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


def _say_beside_bars(text: str) -> None:
    """Leaves no pieces of a progress bar between the lines."""
    from tqdm import tqdm

    tqdm.write(text)
    sys.stdout.flush()


@contextlib.contextmanager
def _only_json(is_json: bool) -> Iterator[Any]:
    """The real standard output; with ``--json`` whatever else is printed goes to standard error."""
    out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr) if is_json else contextlib.nullcontext():
        yield out


def _print_json(out: Any, value: Any) -> None:
    from workbench.runs import jsonable

    json.dump(jsonable(value), out, allow_nan=False)
    out.write("\n")


def _bar(total: int) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, desc="serve", unit="request", disable=None)  # None: only on a terminal


def _advance(bar: Any, output: Any) -> None:
    if output.finished:
        bar.update()


def _endings(outputs: Sequence[Any]) -> str:
    lines = [""]
    for output in outputs:
        shown = repr(output.text) if output.text else " ".join(map(str, output.token_ids))
        lines.append(f"{output.request_id}: {len(output.token_ids)} tokens, {output.finish_reason}: {shown[:90]}")
    return "\n".join(lines)


def _check_report(path: str | None) -> None:
    """Refuse a report that cannot be written, before the run and not after it."""
    if path is None:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise UsageError(f"--report {path} cannot be written: {error.strerror or error}") from error


def _write_report(path: str, views: Any, title: str, notes: Sequence[str], *, repeats: int = 1) -> None:
    from workbench.environment import environment_shown
    from workbench.report import write_report

    shown = environment_shown()
    written = write_report(path, views, title=title, environment=shown, notes=notes, repeats=repeats)
    print(f"report: {written}", file=sys.stderr)
