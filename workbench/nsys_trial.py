"""Whether a range of ours arrives in a report of Nsight Systems; tried on one, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tracing.importing import ImportedKind, TraceImportError
from tracing.nsys_import import read_nsys
from tracing.nvtx_ranges import DOMAIN, NVTX_PIN
from workbench.environment import ROOT
from workbench.nsys_tool import Nsys, NsysError

_PROGRAM = """\
from tracing.recorder import Recorder
recorder = Recorder()
with recorder.capture():
    with recorder.phase("prepare"):
        pass
"""


def try_ranges(nsys: Nsys) -> str | None:
    """None if a range arrives with its name, domain and category; else what is wrong, and the remedy."""
    with tempfile.TemporaryDirectory() as scratch:
        try:
            return _fault(nsys, Path(scratch) / "trial")
        except (NsysError, TraceImportError, subprocess.TimeoutExpired) as error:
            return f"it made no report that can be read: {error}"


def _fault(nsys: Nsys, out: Path) -> str | None:
    command = [*nsys.profile_command(out, trace=("nvtx",)), sys.executable, "-c", _PROGRAM]
    status = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=False).returncode
    reports = [path for suffix in (".nsys-rep", ".qdstrm") if (path := out.with_suffix(suffix)).exists()]
    if not reports:
        return f"our capture range did not reach it (it ended with status {status}): pip install nvtx=={NVTX_PIN}"
    ranges = read_nsys(nsys.export(reports[0])).of(ImportedKind.RANGE)
    arrived = any((one.domain, one.category, one.name) == (DOMAIN, "phase", "prepare") for one in ranges)
    return None if arrived else f"our range did not arrive in its report: pip install nvtx=={NVTX_PIN}"
