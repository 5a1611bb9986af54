"""Stands in for ``nsys`` where there is none: runs the program, and exports the ranges that it says it emitted.

As a program it takes the command lines that the workbench gives: ``profile``, ``export``, ``--version``.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.nsys_exports import GLOBAL_TID, NVTX_2023, about, write_tables  # noqa: E402
from tracing.nvtx_match import emitted_ranges  # noqa: E402
from tracing.run_folder import read_run  # noqa: E402
from workbench.nsys_tool import NsysError, find_nsys  # noqa: E402
from workbench.profile_job import RUN, read_captured  # noqa: E402

OFFSET_NS = 5_000_000
"""How far its clock is behind ours."""
CATEGORIES = ("iteration", "phase", "copy", "graph", "wait", "detail")


def make_fake_nsys(folder: Path, *, drops: str = "", status: int = 0) -> Path:
    """A program that acts as ``nsys``, without the ranges named ``drops``; ``status`` makes its export fail."""
    path = folder / "nsys"
    call = shlex.join([sys.executable, str(Path(__file__).resolve())])
    path.write_text(f'#!/bin/sh\nFAKE_DROPS="{drops}" FAKE_STATUS={status} exec {call} "$@"\n', encoding="utf-8")
    path.chmod(0o755)
    return path


def there_is_nsys() -> bool:
    """Whether the real one is on this machine."""
    try:
        find_nsys()
    except NsysError:
        return False
    return True


def _export(report: Path, out: Path, drops: str) -> None:
    folder = report.parent
    captured = read_captured(folder)
    records = read_run(folder / RUN).records
    rows = [
        {"start": 0, "eventType": 33, "globalTid": GLOBAL_TID, "domainId": 1, "category": number, "text": name}
        for number, name in enumerate(CATEGORIES)
    ]
    rows.append({"start": 0, "eventType": 75, "globalTid": GLOBAL_TID, "domainId": 1, "text": "engine"})
    for one in emitted_ranges(records.spans, records.iterations, session_id=captured.session_id):
        if captured.first <= one.iteration <= captured.last and one.name != drops:
            times = {"start": one.start_ns - OFFSET_NS, "end": one.end_ns - OFFSET_NS}
            about_it = {"text": one.name, "category": CATEGORIES.index(one.category), "int64Value": one.payload}
            rows.append({"eventType": 59, "globalTid": GLOBAL_TID, "domainId": 1, **about_it, **times})
    write_tables(out, {**about("2099.1.1"), "NVTX_EVENTS": (NVTX_2023, rows)})


def main(args: list[str], drops: str, status: int) -> int:
    if args == ["--version"]:
        print("NVIDIA Nsight Systems version 2099.1.1-0v0")  # noqa: T201
        return 0
    out = Path(next(arg for arg in args if arg.startswith("--output=")).partition("=")[2])
    if args[0] == "export":
        if not status:
            _export(Path(args[-1]), out, drops)
        return status
    program = args[next(n for n, arg in enumerate(args) if n and not arg.startswith("--")) :]
    done = subprocess.run(program, check=False).returncode
    out.with_suffix(".nsys-rep").touch()
    return done


if __name__ == "__main__":
    import os

    sys.exit(main(sys.argv[1:], os.environ["FAKE_DROPS"], int(os.environ["FAKE_STATUS"])))
