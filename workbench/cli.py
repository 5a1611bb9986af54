"""The command line: ``workbench COMMAND``. What the notebook does, without it."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from tracing.importing import TraceImportError
from tracing.run_folder import RunFolderError
from workbench.export import add_export_parser
from workbench.options import OneLineParser, UsageError, did_you_mean
from workbench.serve_commands import (
    COMPARE_EXAMPLES,
    MODELS,
    RUN_EXAMPLES,
    add_compare_flags,
    add_run_flags,
    compare_legs,
    run,
)
from workbench.what_if_command import EXAMPLES as WHAT_IF_EXAMPLES
from workbench.what_if_command import add_what_if_flags, what_if_command
from workbench.writable import check_file, check_folder

Command = Callable[[argparse.Namespace], int]
_EXAMPLES = """\
examples:
  workbench demo
  workbench run --model smollm2 --workload fixed:requests=4,input=32,output=16
  workbench run --model shape:tiny --mode legacy --json > run.json
  workbench compare --model smollm2 --workload fixed:requests=16,input=64,output=32 --device cpu
  workbench compare --model oracle --legs legacy,async --repeats 3 --report runs/oracle.html
  workbench report runs/demo/legacy runs/demo/async
  workbench bench decode mix --device cuda
  workbench export runs/demo/async --chrome async.json.gz
  workbench profile --tool nsys --iterations 100-200 --model smollm2
  workbench whatif runs/demo/async resolve=0.5x
  workbench doctor
  workbench lab
"""
_REPORT_EXAMPLES = """\
examples:
  workbench report runs/demo/async
  workbench report runs/demo/legacy runs/demo/async --out runs/both.html
  workbench run --model shape:tiny --save runs/before
  workbench run --model shape:tiny --graphs 8 --save runs/after
  workbench report runs/before runs/after
A run's folder is made by --save, by the demo, or by session.save(folder).
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without µ still gets its table
    try:
        _check_values(sys.argv[1:] if argv is None else argv)
        args, rest = _parser().parse_known_args(argv)
        command: Command = args.command
        if rest and command is not _lab:
            raise UsageError(f"{_unknown(args, rest)}; workbench {args.name} --help shows what it takes")
        args.rest = rest
        return command(args)
    except (EngineError, RunFolderError, TraceImportError, UsageError) as error:
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


def _check_values(argv: Sequence[str]) -> None:
    """Refuse an option with an empty value, which a shell makes of a variable that is not set.

    Raises:
        UsageError: there is one.
    """
    for flag, value in zip(argv, [*argv, None][1:], strict=True):
        name, equals, joined = flag.partition("=")
        if flag.startswith("--") and (value == "" or (equals and not joined)):
            raise UsageError(f"{name} is given without a value")


def _unknown(args: argparse.Namespace, rest: Sequence[str]) -> str:
    """What to say of arguments that nobody took."""
    flag = rest[0].partition("=")[0]
    if args.command is compare_legs and flag in ("--mode", "--modes"):
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
    _add_serving(commands)
    _add_report(commands)
    _add_bench(commands)
    _add_demo(commands)
    _add_profile(commands)
    _add_what_if(commands)
    add_export_parser(commands)
    _add_doctor(commands)
    _add_lab(commands)
    return parser


def _command(commands: Any, name: str, function: Command, **text: Any) -> OneLineParser:
    parser: OneLineParser = commands.add_parser(
        name, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **text
    )
    parser.set_defaults(command=function, name=name, flags=parser.flags)
    return parser


def _add_serving(commands: Any) -> None:
    add_run_flags(_command(commands, "run", run, help="serve a workload once", epilog=RUN_EXAMPLES))
    help_text = "serve a workload in several modes"
    add_compare_flags(_command(commands, "compare", compare_legs, help=help_text, epilog=COMPARE_EXAMPLES))


def _add_report(commands: Any) -> None:
    help_text = "write the report of saved runs, side by side with differences marked"
    parser = _command(commands, "report", _report, help=help_text, epilog=_REPORT_EXAMPLES)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a saved run; the first is the baseline")
    parser.add_argument("--out", metavar="FILE.html", default="report.html", help="the report (default: %(default)s)")


def _add_bench(commands: Any) -> None:
    from workbench.bench.command import EXAMPLES, add_bench_flags

    help_text = "measure decode, a mix of requests, host time, hidden share, recorder cost"
    add_bench_flags(_command(commands, "bench", _bench, help=help_text, epilog=EXAMPLES))


def _add_demo(commands: Any) -> None:
    parser = _command(commands, "demo", _demo, help="serve real prompts in both modes and compare")
    parser.add_argument("--device", default="cpu", help="cpu, inline or cuda (default: %(default)s)")
    parser.add_argument("--out", default="runs/demo", help="folder for the report (default: %(default)s)")
    models = MODELS.replace("default: shipped", "default: smollm2, behind a short act of the shipped model")
    parser.add_argument("--model", metavar="MODEL", help=f"{models}; needs a chat template")


def _add_profile(commands: Any) -> None:
    from workbench import nsys_kernel, profile

    profile.add_parser(commands)
    nsys_kernel.add_parser(commands)


def _add_what_if(commands: Any) -> None:
    help_text = "what bounds a saved run, and its step if some work took another time"
    add_what_if_flags(_command(commands, "whatif", what_if_command, help=help_text, epilog=WHAT_IF_EXAMPLES))


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


def _report(args: argparse.Namespace) -> int:
    from workbench.nearby_runs import naming_runs
    from workbench.saved_runs import report_of

    check_file("--out", args.out)
    with naming_runs(args.runs):
        notes = report_of(args.runs, args.out)
    for note in notes:
        print(note)
    print(f"report: {args.out}")
    return 0


def _bench(args: argparse.Namespace) -> int:
    from workbench.bench.command import bench

    check_folder("--out", args.out)
    return bench(args, _say_beside_bars)


def _demo(args: argparse.Namespace) -> int:
    from workbench.demo import run_demo

    check_folder("--out", args.out)
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


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, flush=True)


def _say_beside_bars(text: str) -> None:
    """Leaves no pieces of a progress bar between the lines."""
    from tqdm import tqdm

    tqdm.write(text)
    sys.stdout.flush()
