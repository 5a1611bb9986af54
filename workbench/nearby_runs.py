"""Saved runs near the working folder, for the person who named one that is not there.

A relative path that a notebook saves to begins at the notebook's folder; on the command line, where the command runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

from tracing.run_folder import RunFolderError, is_run

_PLACES = ("runs", "notebooks/runs")
_MOST_NAMED = 8


@contextmanager
def naming_runs(folders: Iterable[str | Path]) -> Iterator[None]:
    """Add the names of runs that there are to the error about one that there is not."""
    try:
        yield
    except RunFolderError as error:
        if all(Path(folder).exists() for folder in folders):
            raise
        raise RunFolderError(f"{error}; {_hint(nearby_runs())}") from error


def nearby_runs(base: str | Path = ".") -> list[Path]:
    """Runs in ``runs`` and ``notebooks/runs``, one or two levels down, newest first; paths begin at ``base``."""
    roots = [Path(base) / place for place in _PLACES]
    found = chain.from_iterable(chain(root.glob("*"), root.glob("*/*")) for root in roots)
    return sorted(filter(is_run, found), key=lambda folder: folder.stat().st_mtime, reverse=True)


def _hint(runs: list[Path]) -> str:
    if not runs:
        return f"no saved run is in {' or '.join(_PLACES)} either; save one with --save or session.save(folder)"
    named = ", ".join(map(str, runs[:_MOST_NAMED]))
    return f"saved runs nearby: {named}{' and others' if len(runs) > _MOST_NAMED else ''}"
