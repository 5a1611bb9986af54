"""Progress bars: in a notebook and on a terminal, and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

_PATIENCE_S = 1.0
_REFRESH_S = 0.5


def progress_bar(total: int, *, wanted: bool = True, what: str = "serve", unit: str = "request") -> Any:
    """A ``tqdm`` bar; written to standard error, and not at all where that is a file or a pipe.

    Args:
        total: Units to come.
        wanted: False: a bar that does nothing.
        what: Stands before it.
        unit: What is counted.
    """
    from tqdm.auto import tqdm

    return tqdm(total=total, desc=what, unit=unit, disable=_disable(wanted))


@contextmanager
def waiting_line(text: str, *, wanted: bool = True) -> Iterator[None]:
    """A line with the time passed, for what takes longer than a second and cannot say how far it is.

    Written to standard error, and not at all where that is a file or a pipe; gone when the work is done. In a notebook
    it is written below the cell, and stays.

    Args:
        text: Stands before the time.
        wanted: False: nothing is shown.
    """
    is_done = Event()
    teller = Thread(target=_tell, args=(text, is_done), name="waiting line", daemon=True)
    if wanted:
        teller.start()
    try:
        yield
    finally:
        is_done.set()
        if wanted:
            teller.join()


def _tell(text: str, is_done: Event) -> None:
    from tqdm.std import tqdm

    if is_done.wait(_PATIENCE_S):
        return
    # A notebook shows standard error on red, and where a line was wiped out an empty one: there it is said and stays.
    where = {"file": sys.stdout, "leave": True} if _is_in_kernel() else {"leave": False}
    with tqdm(desc=text, bar_format="{desc} {elapsed}", disable=_disable(True), **where) as line:
        if line.disable:
            return
        line.start_t -= _PATIENCE_S
        while not is_done.wait(_REFRESH_S):
            line.refresh()


def _disable(wanted: bool) -> bool | None:
    """What tqdm takes. None: only on a terminal; a kernel's standard error is none, and shows bars all the same."""
    return (False if _is_in_kernel() else None) if wanted else True


def _is_in_kernel() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")
