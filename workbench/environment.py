"""What a number depends on besides the code: hardware, versions, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@cache
def environment() -> dict[str, Any]:
    """Plain values for JSON and the report's foot."""
    import numpy
    import torch

    return {
        "workbench": _version("inference-workbench"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def environment_shown() -> dict[str, Any]:
    """What of it is known and there, for people to read."""
    return {name: value for name, value in environment().items() if value is not None}


def commit() -> str | None:
    """The checkout's commit, ``-dirty`` where files differ from it; None outside a checkout.

    Notebooks do not count: Lab writes to one as it opens it, and no number depends on them.
    """
    try:
        found = _git("describe", "--always", "--abbrev=12")
        differs = _git("diff", "--name-only", "HEAD", "--", ".", ":(exclude)notebooks")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{found}-dirty" if found and differs else found or None


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


def cpu_name() -> str:
    """The processor as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def rss_bytes() -> int | None:
    """The process's resident set now; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
