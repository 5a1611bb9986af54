"""What ``workbench profile`` asks of the program it starts under a tool, and what that program answers, as files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import EngineError

JOB, CAPTURED, RUN, TORCH_TRACE = "job.json", "captured.json", "run", "torch.json"
"""Names in the folder of a profile: what was asked, what was captured, our run, and torch's trace."""

VERSIONS = ("nvtx", "torch")
"""Packages whose versions a result names."""

WHEN = ("start", "decode-full")
"""Moments from which captured iterations are counted: the first, or the first full batch of decode rows."""


class ProfileError(EngineError):
    """A profile cannot be made; one line with the remedy."""


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Which iterations are captured. Both numbers count from 0 at the beginning, or from the moment of ``--when``."""

    first: int = 0
    last: int | None = None
    """Captured too; None: all that come."""

    @property
    def count(self) -> int | None:
        """How many; None: all that come."""
        return None if self.last is None else self.last - self.first + 1


@dataclass(frozen=True, kw_only=True)
class Job:
    """One profile to make."""

    tool: str
    model: str | None
    workload: str
    clock: str | None
    config: Mapping[str, Any]
    stretch: Stretch = field(default_factory=Stretch)
    when: str = "start"


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What the program captured."""

    first: int
    """Index of the first iteration inside the capture range,"""
    last: int
    """and of the last."""
    session_id: int
    """In the payload of its ranges."""
    nvtx: str
    """Whether a tool was attached."""
    epoch_offset_ns: int
    """UTC time − ``perf_counter_ns``, read once."""
    versions: Mapping[str, str]
    workload_notes: Sequence[str] = ()
    """What differs from the trace the workload was made from."""


def parse_stretch(text: str) -> Stretch:
    """``100-200`` (both of them too), or ``100``: so many from the beginning.

    Raises:
        ProfileError: it is neither.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)", text)
    if found is None:
        raise ProfileError(f"--iterations takes A-B or a number, such as 100-200; got {text!r}")
    stretch = Stretch(first=int(found[1]), last=int(found[2])) if found[1] else Stretch(last=int(found[2]) - 1)
    if (stretch.count or 0) < 1:
        raise ProfileError(f"--iterations {text} holds no iteration")
    return stretch


def write_job(job: Job, folder: Path) -> None:
    """Put it where the program looks."""
    (folder / JOB).write_text(json.dumps(asdict(job), indent=1) + "\n", encoding="utf-8")


def read_job(folder: Path) -> Job:
    """The job in a folder.

    Raises:
        ProfileError: the file is damaged.
    """
    path = folder / JOB
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Job(**{**found, "stretch": Stretch(**found["stretch"])})
    except (ValueError, TypeError, KeyError, RecursionError) as error:  # no JSON, no UTF-8, or of another make
        raise _damaged(path, error) from error


def write_captured(captured: Captured | str, folder: Path) -> None:
    """Put the result where ``workbench profile`` looks; a text is an error in one line."""
    found = {"error": captured} if isinstance(captured, str) else asdict(captured)
    (folder / CAPTURED).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def read_captured(folder: Path) -> Captured:
    """What was captured.

    Raises:
        ProfileError: the program failed or ended without a word, or the file is damaged.
    """
    path = folder / CAPTURED
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if "error" in found:
            raise ProfileError(found["error"])
        captured = Captured(**found)
        _check_kinds(captured)
        return captured
    except FileNotFoundError:
        raise ProfileError(
            f"the program ended before it captured anything; {folder / 'log.txt'} has its words"
        ) from None
    except (ValueError, TypeError, RecursionError) as error:  # no JSON, no UTF-8, or of another make
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ProfileError:
    why = " ".join(str(error).split())
    return ProfileError(f"{path} is damaged: {why}; make the profile again, without --read")


def _check_kinds(captured: Captured) -> None:
    """What JSON holds is of the kinds that the comparison needs.

    Raises:
        TypeError: it is not.
    """
    numbers = (captured.first, captured.last, captured.session_id, captured.epoch_offset_ns)
    if not all(type(number) is int for number in numbers):
        raise TypeError("first, last, session_id and epoch_offset_ns must be whole numbers")
    if not isinstance(captured.versions, dict) or not all(
        isinstance(captured.versions.get(name), str) for name in VERSIONS
    ):
        raise TypeError(f"versions must name {' and '.join(VERSIONS)}")
    notes = captured.workload_notes
    if not isinstance(notes, (list, tuple)) or not all(isinstance(note, str) for note in notes):
        raise TypeError("workload_notes must be a list of texts")
