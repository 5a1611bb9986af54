"""Whether what a command is to write can be written: asked before the run, which may take minutes, and not after it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from workbench.options import UsageError


def check_file(option: str, path: str | Path) -> None:
    """Refuse a file that cannot be written. One that is there keeps its content, and none is left that was not.

    Raises:
        UsageError: one line that names ``option``.
    """
    file = Path(path)
    with _told(option, file), _folder_made(file.parent):
        is_there = file.exists()
        with file.open("ab"):
            pass
        if not is_there:
            file.unlink()


def check_folder(option: str, path: str | Path) -> None:
    """Refuse a folder in which no file can be made; none is left that was not there.

    Raises:
        UsageError: one line that names ``option``.
    """
    folder = Path(path)
    with _told(option, folder), _folder_made(folder), tempfile.TemporaryFile(dir=folder):
        pass


@contextmanager
def _told(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"{option} {path} cannot be written: {why}; name a place that can") from error


@contextmanager
def _folder_made(folder: Path) -> Iterator[None]:
    """With the folders on the way, and without those again that it made."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        for one in reversed(missing):
            one.mkdir(exist_ok=True)
        yield
    finally:
        for one in missing:
            with suppress(OSError):  # not made, or somebody put something into it
                one.rmdir()
