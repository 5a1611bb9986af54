"""``workbench profile``: a workload under an outside tool, and how far our spans are from what the tool saw."""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from time import strftime
from typing import Any

from engine.config import EngineConfig
from tracing.importing import TraceImportError
from workbench.nsys_tool import NsysError, find_nsys
from workbench.options import UsageError, add_config_flags, config_from
from workbench.profile_job import (
    JOB,
    WHEN,
    Captured,
    Job,
    ProfileError,
    Stretch,
    parse_stretch,
    read_captured,
    read_job,
    write_job,
)
from workbench.serve_commands import DEFAULT_WORKLOAD
from workbench.writable import check_folder

_LOG = "log.txt"
_OF_A_RUN = ("model", "workload", "clock", "iterations", "when", "graph_trace", "out")
"""Flags that say what is run and where to; the engine's options are such as well."""
_EXAMPLES = """\
examples:
  workbench profile --tool nsys --model oracle --workload fixed:requests=8,input=16,output=64
  workbench profile --tool nsys --iterations 100-200 --model smollm2 --workload fixed:requests=4,input=32,output=256
  workbench profile --tool torch --when decode-full --iterations 50 --device cuda --model shape:qwen3-0.6b
The folder holds the tool's own report, our run (workbench report FOLDER/run), agreement.json, and both on one time
axis in merged.json.gz, for Perfetto.
"""


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "profile",
        help="serve a workload under Nsight Systems or torch's profiler, and compare it with our own spans",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--tool", choices=("nsys", "torch"), required=True)
    parser.add_argument("--model", metavar="MODEL", help="as of workbench run (default: shipped)")
    parser.add_argument("--workload", metavar="WORKLOAD", help=f"(default: {DEFAULT_WORKLOAD})")
    parser.add_argument("--clock", help="virtual, iterations or wall (default: what the workload counts)")
    parser.add_argument("--iterations", metavar="A-B", help="capture these, both too; N: the first N (default: all)")
    parser.add_argument(
        "--when",
        choices=WHEN,
        help="count iterations from the start, or from the first full batch of decode rows (default: start)",
    )
    graphs = "nsys: how to record graphs (default: graph)"
    parser.add_argument("--graph-trace", choices=("graph", "node"), help=graphs)
    parser.add_argument("--nsys", metavar="PATH", help="the nsys to use (default: on the PATH, or where it usually is)")
    parser.add_argument("--out", metavar="FOLDER", help="for all that is made (default: runs/profile-TOOL-TIME)")
    help_text = "run nothing: compare what an earlier call left there; only --tool and --nsys go with it"
    parser.add_argument("--read", metavar="FOLDER", help=help_text)
    add_config_flags(parser)
    parser.set_defaults(command=run, name="profile", flags=parser.flags)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status: 1 if a range of ours is missing from the tool's trace."""
    try:
        folder = _earlier(Path(args.read), args) if args.read is not None else _record(_job(args), args)
        return _compare_nsys(folder, args) if args.tool == "nsys" else _compare_torch(folder)
    except (NsysError, TraceImportError) as error:
        raise UsageError(str(error)) from error


def _earlier(folder: Path, args: argparse.Namespace) -> Path:
    """The folder of ``--read``, sure to be a profile by the tool that was named.

    Raises:
        UsageError: it is none, or what only a run can take was given as well.
    """
    names = (*_OF_A_RUN, "config", *(one.name for one in fields(EngineConfig)))
    given = ["--" + name.replace("_", "-") for name in names if getattr(args, name, None) is not None]
    if given:
        raise UsageError(f"--read runs nothing, so {', '.join(given)} cannot go with it; leave out one or the other")
    if not folder.is_dir():
        raise UsageError(f"--read {folder}: there is no such folder; name one that workbench profile made")
    if not (folder / JOB).is_file():
        raise UsageError(
            f"--read {folder} holds no profile: it has no {JOB}; name a folder that workbench profile made"
        )
    tool = read_job(folder).tool
    if tool != args.tool:
        raise UsageError(f"--read {folder} was made with --tool {tool}; say so instead of --tool {args.tool}")
    return folder


def _job(args: argparse.Namespace) -> Job:
    return Job(
        tool=args.tool,
        model=args.model,
        workload=args.workload or DEFAULT_WORKLOAD,
        clock=args.clock,
        config=config_from(args).to_dict(),
        stretch=Stretch() if args.iterations is None else parse_stretch(args.iterations),
        when=args.when or "start",
    )


def _record(job: Job, args: argparse.Namespace) -> Path:
    """Run the workload under the tool; returns the folder with all that came of it."""
    folder = Path(args.out or f"runs/profile-{job.tool}-{strftime('%Y%m%d-%H%M%S')}")
    check_folder("--out", folder)
    before = _nsys_command(folder, job, args) if job.tool == "nsys" else []
    _prepare(folder)
    write_job(job, folder)
    _start(folder, before)
    return folder


def _nsys_command(folder: Path, job: Job, args: argparse.Namespace) -> list[str]:
    """What stands before the program; refuses an nsys that cannot be started, before anything is made."""
    nsys = find_nsys(args.nsys)
    nsys.version()
    is_cuda = job.config["device"] == "cuda"
    flags = [f"--cuda-graph-trace={args.graph_trace or 'graph'}"] if is_cuda else []
    return nsys.profile_command(folder / "nsys", trace=("nvtx", "cuda") if is_cuda else ("nvtx",), flags=flags)


def _compare_nsys(folder: Path, args: argparse.Namespace) -> int:
    from workbench.profile_report import compare_with_nsys

    captured = _captured(folder)
    export = folder / "nsys.sqlite"
    if not export.exists():
        reports = [path for suffix in (".nsys-rep", ".qdstrm") if (path := folder / f"nsys{suffix}").exists()]
        if not reports:
            raise ProfileError(f"nsys left no report; {folder / _LOG} has its words")
        export = find_nsys(args.nsys).export(reports[0])
    lines, is_whole = compare_with_nsys(folder, export, captured)
    _say(lines)
    return 0 if is_whole else 1


def _compare_torch(folder: Path) -> int:
    from workbench.profile_report import compare_with_torch

    _say(compare_with_torch(folder, _captured(folder)))
    return 0


def _captured(folder: Path) -> Captured:
    captured = read_captured(folder)
    for note in captured.workload_notes:
        print(f"warning: workload: {note}", file=sys.stderr)  # noqa: T201 - the command's output
    return captured


def _say(lines: list[str]) -> None:
    print("\n".join(lines))  # noqa: T201 - the command's output


def _prepare(folder: Path) -> None:
    """Make it, without what an earlier profile left there.

    Raises:
        UsageError: it holds something else.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / JOB).is_file():
        raise UsageError(f"--out {folder} holds files that are no profile's; name another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("captured.json", "nsys.nsys-rep", "nsys.qdstrm", "nsys.sqlite", "torch.json"):
        (folder / name).unlink(missing_ok=True)


def _start(folder: Path, before: list[str]) -> None:
    """Run the program under the tool and wait for its end; what both say goes into the log."""
    command = [*before, sys.executable, "-m", "workbench.profiled", str(folder)]
    with (folder / _LOG).open("w", encoding="utf-8") as log:
        subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
