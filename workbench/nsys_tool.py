"""Finding Nsight Systems on this machine, and calling it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracing.nvtx_ranges import CAPTURE, DOMAIN

NSYS_VARIABLE = "WORKBENCH_NSYS"
REMEDY = f"install NVIDIA Nsight Systems and put nsys on the PATH, or name it: {NSYS_VARIABLE}=/path/to/nsys"
_PLACES = (
    "opt/nvidia/nsight-systems/*/bin/nsys",
    "opt/nvidia/nsight-systems-cli/*/bin/nsys",
    "usr/local/cuda*/bin/nsys",
    "opt/nsys-*/usr/lib/*/nsight-systems/target-linux-x64/nsys",  # Debian's packages, unpacked into a folder
)
_IMPORTER = "QdstrmImporter"


class NsysError(Exception):
    """Nsight Systems is not there, or failed; one line with the remedy."""


@dataclass(frozen=True)
class Nsys:
    """One installation."""

    path: Path

    def version(self) -> str:
        """Such as ``2023.4.4.54``; empty if it does not say.

        Raises:
            NsysError: it cannot be started.
        """
        words = _call([str(self.path), "--version"], timeout_s=60).split()
        return words[-1].partition("-")[0] if words else ""

    def profile_command(self, out: Path, *, trace: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
        """What stands before a command to profile it: only what runs in our capture range, and no CPU samples.

        Args:
            out: The report, without its suffix.
            trace: What to record: ``nvtx``, ``cuda``.
            flags: More options of ``nsys profile``; the last of each wins.
        """
        return [str(self.path), "profile", *capture_flags(trace), *flags, "--force-overwrite=true", f"--output={out}"]

    def export(self, report: Path) -> Path:
        """Make the SQLite export beside a report, which may end in ``.nsys-rep`` or ``.qdstrm``.

        Raises:
            NsysError: a part of the tool is missing, or it failed.
        """
        if report.suffix == ".qdstrm":
            report = self._import(report)
        out = report.with_suffix(".sqlite")
        out.unlink(missing_ok=True)
        _call([str(self.path), "export", "--type=sqlite", f"--output={out}", str(report)])
        if not out.exists():
            raise NsysError(f"nsys made no export of {report}")
        return out

    def _import(self, recording: Path) -> Path:
        """Make a report of what a target-only installation leaves."""
        importer = _importer_of(self.path)
        if importer is None:
            raise NsysError(
                f"{recording} cannot be read here: {_IMPORTER}, a part of nsys's host package, is missing; "
                "workbench profile --read FOLDER goes on where it is there"
            )
        report = recording.with_suffix(".nsys-rep")
        report.unlink(missing_ok=True)
        libraries = {**os.environ, "LD_LIBRARY_PATH": str(importer.parent)}
        _call([str(importer), "-i", str(recording), "-o", str(report)], environment=libraries)
        return report


def capture_flags(trace: Sequence[str], *, end: str = "stop") -> list[str]:
    """Options of ``nsys profile`` for our capture range; nothing is killed at its end.

    Args:
        trace: What to record.
        end: ``stop`` records the first range, ``repeat`` makes a report of each.
    """
    return [
        f"--trace={','.join(trace)}",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=nvtx",
        f"--nvtx-capture={CAPTURE}@{DOMAIN}",
        f"--capture-range-end={end}",  # the default, stop-shutdown, ends the program as well
        "--kill=none",
    ]


def find_nsys(given: str | None = None, *, root: Path = Path("/")) -> Nsys:
    """The installation that was ``given``, or else named by the variable, on the PATH, or in a usual place.

    Raises:
        NsysError: there is none; the message says what to do.
    """
    named = given or os.environ.get(NSYS_VARIABLE)
    if named:
        found = shutil.which(named)
        if found is None:
            raise NsysError(f"{named} is no program; {REMEDY}")
        return Nsys(Path(found).resolve())
    found = shutil.which("nsys")
    places = [Path(found)] if found else _usual_places(root)
    if not places:
        raise NsysError(f"Nsight Systems is not here; {REMEDY}")
    return Nsys(places[0].resolve())


def _usual_places(root: Path) -> list[Path]:
    """The newest first, as far as their folders tell."""
    return [
        path
        for pattern in _PLACES
        for path in sorted(root.glob(pattern), key=_numbers, reverse=True)
        if os.access(path, os.X_OK)
    ]


def _numbers(path: Path) -> list[tuple[int, ...]]:
    """Of each folder, so that 2024.10 is behind 2024.9 and not before it."""
    return [tuple(map(int, re.findall(r"\d+", part))) for part in path.parts]


def _importer_of(nsys: Path) -> Path | None:
    """Some packages keep the host's part beside the target's, Debian's in another folder of the same name."""
    folders: Iterable[Path] = (parent for base in nsys.parents for parent in (base, base / "lib" / "nsight-systems"))
    for folder in folders:
        for found in folder.glob(f"host-linux-*/{_IMPORTER}"):
            return found
    return None


def _call(command: list[str], *, environment: dict[str, str] | None = None, timeout_s: float = 600) -> str:
    """Run a program silently; returns what it printed."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NsysError(f"{name} cannot be run: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).replace("\r", "\n").strip().splitlines()
        raise NsysError(f"{name} failed with status {done.returncode}: {said[-1] if said else 'it said nothing'}")
    return done.stdout
