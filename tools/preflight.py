"""What an installation needs, checked before it starts. Standard library only: it runs before the environment exists.

``python tools/preflight.py check`` prints nothing but notes when all is well, else one line a fault and exit code 1.
``python tools/preflight.py has-torch`` exits 0 where the running interpreter holds a torch in pyproject's range.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIN_PYTHON = (3, 11)
INSTALL_GB = 3.0
"""Environment with a CPU build of torch, its downloads and the demo's weights."""
CUDA_INSTALL_GB = 10.0
"""The same with the CUDA build, which is what PyPI serves to Linux."""
RUN_GB = 0.2
"""Reports and caches, once all is installed."""
PROBE_PACKAGE = "nvtx"
"""A small package that the installation needs anyway; the index is asked for its versions."""
PROBE_TIMEOUT_S = 60


def python_fault(version: tuple[int, ...], executable: str) -> str | None:
    """Say what is wrong with a Python version; None where it will do."""
    if version >= MIN_PYTHON:
        return None
    have = ".".join(map(str, version))
    want = ".".join(map(str, MIN_PYTHON))
    return f"Python {want} or newer is needed, {executable} is {have}; name another: make PYTHON=/path/to/python{want}"


def venv_fault() -> str | None:
    """Debian's python3 may come without the modules that make an environment."""
    if importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip"):
        return None
    return (
        f"{sys.executable} cannot make environments; apt-get install python3-venv, or name another Python: PYTHON=..."
    )


def disk_fault(free_gb: float, *, need_gb: float, folder: Path) -> str | None:
    """Compare free disk space with what is needed, in units of 10^9 bytes."""
    if free_gb >= need_gb:
        return None
    return (
        f"{need_gb:g} GB of free disk are needed at {folder}, {free_gb:.1f} GB are free; "
        "make room, or name another place: make VENV=/other/disk/venv"
    )


def cuda_note(free_gb: float, *, is_linux: bool, folder: Path) -> str | None:
    """Warn of what cannot be known yet: whether pip will pick the CUDA build, which is several times as large."""
    if not is_linux or free_gb >= CUDA_INSTALL_GB:
        return None
    return (
        f"{free_gb:.1f} GB are free at {folder}; a CUDA build of torch needs about {CUDA_INSTALL_GB:g} GB. "
        "If pip picks one and you have no GPU, point TORCH at a CPU build: make TORCH=/path/to/torch.whl"
    )


def index_fault(python: str) -> str | None:
    """Ask the package index pip is configured for one question, so that proxies and mirrors are tested too."""
    command = [python, "-m", "pip", "--timeout", "15", "--retries", "1", "index", "versions", PROBE_PACKAGE]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"the package index gave no answer in {PROBE_TIMEOUT_S} s; check the network, or set PIP_INDEX_URL"
    if answer.returncode == 0:
        return None
    if "No module named pip" in answer.stderr:
        return None  # the environment brings its own pip; the installation itself will tell
    return "the package index does not answer; check the network, or set PIP_INDEX_URL or HTTPS_PROXY"


def in_range(version: str, requirement: str) -> bool:
    """Whether a version lies in a range like ``torch>=2.11,<2.15``; only >= and < are understood.

    Raises:
        ValueError: the requirement uses another comparison.
    """
    have = _release(version)
    for clause in re.sub(r"^[A-Za-z0-9_.-]+", "", requirement).split(","):
        match = re.fullmatch(r"\s*(>=|<)\s*([0-9.]+)\s*", clause)
        if match is None:
            raise ValueError(f"cannot read {clause!r} in {requirement!r}; expected >= or < and a version")
        limit = _release(match[2])
        if not (have >= limit if match[1] == ">=" else have < limit):
            return False
    return True


def _release(version: str) -> tuple[int, ...]:
    """``2.13.0+cpu`` to (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+", maxsplit=1)[0])[:3])


def torch_requirement(pyproject: Path) -> str:
    """The base requirement on torch, as written in pyproject.toml."""
    import tomllib  # not there before 3.11, and the version check must be able to speak

    requirements: list[str] = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"]
    return next(r for r in requirements if re.match(r"torch\b", r))


def has_torch() -> bool:
    """Whether this interpreter holds a torch in range; its metadata is read, torch is not imported."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return in_range(version, torch_requirement(ROOT / "pyproject.toml"))


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that is there."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def check(venv: Path, *, is_installed: bool) -> tuple[list[str], list[str]]:
    """Every fault and every note for an installation into ``venv``."""
    folder = _existing(venv.absolute())
    free_gb = shutil.disk_usage(folder).free / 1e9
    faults = [python_fault(sys.version_info[:3], sys.executable), venv_fault()]
    faults.append(disk_fault(free_gb, need_gb=RUN_GB if is_installed else INSTALL_GB, folder=folder))
    notes: list[str | None] = []
    if not is_installed:
        notes.append(cuda_note(free_gb, is_linux=sys.platform == "linux", folder=folder))
        faults.append(index_fault(sys.executable))
    return [f for f in faults if f], [n for n in notes if n]


def main(argv: list[str] | None = None) -> int:
    """Run one of the two questions; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=("check", "has-torch"))
    parser.add_argument("--venv", type=Path, default=Path(".venv"), help="where the environment is or will be")
    parser.add_argument("--stamp", default="", help="a file in the environment that says it is complete")
    options = parser.parse_args(argv)
    if options.question == "has-torch":
        return 0 if has_torch() else 1
    is_installed = bool(options.stamp) and (options.venv / options.stamp).exists()
    faults, notes = check(options.venv, is_installed=is_installed)
    for line in notes:
        print(f"preflight: note: {line}", file=sys.stderr)
    for line in faults:
        print(f"preflight: {line}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
