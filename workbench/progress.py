"""Progress bars: in a notebook and on a terminal, and nowhere else."""

from __future__ import annotations

import sys
from typing import Any


def progress_bar(total: int, *, wanted: bool = True, what: str = "serve", unit: str = "request") -> Any:
    """A ``tqdm`` bar; written to standard error, and not at all where that is a file or a pipe.

    Args:
        total: Units to come.
        wanted: False: a bar that does nothing.
        what: Stands before it.
        unit: What is counted.
    """
    from tqdm.auto import tqdm

    # None: only on a terminal. A kernel's standard error is none, and shows bars all the same.
    disable = (False if _is_in_kernel() else None) if wanted else True
    return tqdm(total=total, desc=what, unit=unit, disable=disable)


def _is_in_kernel() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")
