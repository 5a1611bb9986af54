"""Widgets that hear their page on the thread that made them; why is told in :mod:`workbench.own_thread`."""

from __future__ import annotations

from typing import Any

import anywidget

from workbench.own_thread import on_own_thread


class OwnThreadWidget(anywidget.AnyWidget):
    """A widget that takes messages of its page, traits and commands, in the order they come, on the thread it is of."""

    def __init__(self, **traits: Any) -> None:
        self._take = on_own_thread(super()._handle_msg)  # before the comm opens, which asks for :meth:`_handle_msg`
        super().__init__(**traits)

    def _handle_msg(self, msg: dict[str, Any]) -> None:
        self._take(msg)
