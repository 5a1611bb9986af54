"""Which cells of a notebook show a panel: one whose cells were all run again and show it no more is off the page."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from IPython.core.getipython import get_ipython


class Shown(Protocol):
    """What a cell shows."""

    def leave_page(self) -> None:
        """No cell shows it any more."""


class ShownCells:
    """The cells of one kernel, told by what IPython says behind each that ran.

    Without IPython, or where a front-end does not name its cells, nothing is ever said to be off the page; nor is what
    stands in a cell that was deleted.
    """

    def __init__(self) -> None:
        self._cells: WeakKeyDictionary[Shown, set[Hashable]] = WeakKeyDictionary()
        self._fresh: WeakSet[Shown] = WeakSet()
        """Shown by the cell that runs now."""
        self._shell: Any = None

    def show(self, one: Shown) -> None:
        """The cell that runs now shows it."""
        shell = get_ipython()
        if shell is None:
            return
        if shell is not self._shell:
            self._shell = shell
            shell.events.register("post_run_cell", self._cell_ran)
        self._fresh.add(one)

    def _cell_ran(self, result: Any) -> None:
        """A cell that is run again begins with its output taken away."""
        cell = getattr(result.info, "cell_id", None)
        fresh, self._fresh = self._fresh, WeakSet()
        for one in tuple(fresh):
            self._cells.setdefault(one, set()).add(cell)
        if cell is None:
            return
        for one, cells in tuple(self._cells.items()):
            if one not in fresh and cell in cells:
                cells.discard(cell)
                if not cells:
                    one.leave_page()
