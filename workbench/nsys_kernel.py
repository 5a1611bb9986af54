"""``workbench install-nsys-kernel``: a Jupyter kernel that runs under Nsight Systems.

Nothing is recorded until ``session.capture(n)`` or its button opens the capture range; each use makes one report.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from workbench.environment import ROOT
from workbench.nsys_tool import Nsys, NsysError, capture_flags, find_nsys
from workbench.options import UsageError

KERNEL = "workbench-nsys"
_DISPLAY_NAME = "Python 3 (Nsight Systems)"


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "install-nsys-kernel",
        help="add a Jupyter kernel that runs under Nsight Systems, or take it away",
        allow_abbrev=False,
    )
    parser.add_argument("--remove", action="store_true", help="take it away again")
    parser.add_argument("--user", action="store_true", help="for every environment of yours (default: for this one)")
    parser.add_argument("--nsys", metavar="PATH", help="the nsys to use (default: on the PATH, or where it usually is)")
    parser.add_argument("--reports", metavar="FOLDER", help=f"where its reports go (default: {_reports()})")
    parser.set_defaults(command=run, name="install-nsys-kernel", flags=parser.flags)


def run(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status."""
    folder = kernel_folder(user=args.user)
    if args.remove:
        print(_remove(folder))  # noqa: T201 - the command's output
        return 0
    try:
        nsys = find_nsys(args.nsys)
    except NsysError as error:
        raise UsageError(str(error)) from error
    reports = Path(args.reports or _reports()).resolve()
    reports.mkdir(parents=True, exist_ok=True)
    write_kernel(folder, kernel_spec(nsys, reports, trace=_trace()))
    print(f"kernel '{_DISPLAY_NAME}' is in {folder}; its reports go to {reports}")  # noqa: T201
    return 0


def kernel_folder(*, user: bool) -> Path:
    """Where Jupyter looks for the kernel: in this Python's environment, or in the user's own folder.

    Raises:
        UsageError: Jupyter is not installed.
    """
    try:
        from jupyter_core.paths import ENV_JUPYTER_PATH, jupyter_data_dir
    except ImportError as error:
        raise UsageError("Jupyter is not installed; install it with: pip install -e '.[notebook]'") from error
    base = jupyter_data_dir() if user else ENV_JUPYTER_PATH[0]
    return Path(base) / "kernels" / KERNEL


def kernel_spec(nsys: Nsys, reports: Path, *, trace: tuple[str, ...]) -> dict[str, Any]:
    """What ``kernel.json`` holds. The kernel lives on when a capture range ends, and each range is a report."""
    program = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    report = reports / "notebook-%p"  # %p: the process, so that a kernel started anew overwrites nothing
    command = [str(nsys.path), "profile", *capture_flags(trace, end="repeat"), f"--output={report}"]
    return {
        "argv": [*command, *program],
        "display_name": _DISPLAY_NAME,
        "language": "python",
        "interrupt_mode": "message",  # a signal would reach nsys too
        "metadata": {"debugger": True},
    }


def write_kernel(folder: Path, spec: dict[str, Any]) -> None:
    """Write the kernel's folder; one that is there is replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.json").write_text(json.dumps(spec, indent=1) + "\n", encoding="utf-8")


def _remove(folder: Path) -> str:
    if not folder.exists():
        return f"there is no kernel in {folder}"
    shutil.rmtree(folder)
    return f"removed {folder}"


def _reports() -> Path:
    return ROOT / "runs" / "nsys"


def _trace() -> tuple[str, ...]:
    import torch

    return ("nvtx", "cuda") if torch.cuda.is_available() else ("nvtx",)
