"""What both widgets of the panel share: commands come in from the browser, and whoever listens gets them checked."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from workbench.panel.messages import COMMANDS
from workbench.widgets.own_thread import OwnThreadWidget

log = logging.getLogger(__name__)

CommandFunction = Callable[[str, dict[str, Any]], None]


class CommandWidget(OwnThreadWidget):
    """A widget whose front-end sends :class:`~workbench.panel.messages.Command` messages."""

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self._functions: list[CommandFunction] = []
        self.on_msg(self._heard)

    def on_command(self, function: CommandFunction) -> None:
        """Call ``function(name, args)`` for each command, in the order in which they come.

        ``args`` has every name that :data:`~workbench.panel.messages.COMMANDS` gives the command; those that the
        browser left out are None. Their types are the browser's: whoever listens checks them. What the function raises
        ends in the notebook's log of the widget, where nobody looks: it should say what went wrong in a notice.
        """
        self._functions.append(function)

    def send_state(self, key: str | Iterable[str] | None = None) -> None:
        """As ipywidgets does it, but for the search for bytes: no trait holds any, and it takes most of a redraw."""
        state = self.get_state(key=key)
        if not state:
            return
        for name in state.keys() & self._property_lock.keys():
            self._property_lock[name] = state[name]  # what the front-end is told while it tells
        self._send({"method": "update", "state": state, "buffer_paths": []})

    def _heard(self, widget: Any, content: Any, buffers: Any) -> None:
        command = as_command(content)
        if command is None:
            log.warning("%s: not a command, ignored: %.200r", type(self).__name__, content)
            return
        for function in tuple(self._functions):
            function(*command)


def as_command(content: object) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments of a message, all arguments there; None for what is no command or names an unknown one."""
    if not isinstance(content, dict) or content.get("kind") != "command":
        return None
    name, args = content.get("name"), content.get("args", {})
    if not isinstance(name, str) or name not in COMMANDS or not isinstance(args, dict):
        return None
    if not args.keys() <= set(COMMANDS[name]):
        return None
    return name, {key: args.get(key) for key in COMMANDS[name]}
