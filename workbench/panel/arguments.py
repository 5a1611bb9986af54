"""Arguments of commands as they come from a browser: read by name, checked, and refused in one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.panel.messages import COMMANDS
from workbench.peek import SessionError


class CommandError(SessionError):
    """A command or an argument of it means nothing; the message is one line."""


class Arguments:
    """What one command was given. An argument that is missing is None; so is a text field that was left empty.

    Raises:
        CommandError: there is no such command, or it has no such argument.
    """

    def __init__(self, name: object, args: object) -> None:
        if not isinstance(name, str) or name not in COMMANDS:
            raise CommandError(f"there is no command {name!r}; known are {', '.join(COMMANDS)}")
        self.command = name
        self._values = _checked(name, args)

    def _bad(self, name: str, expected: str) -> CommandError:
        return CommandError(f"{self.command}: {name} must be {expected}, got {self._values.get(name)!r}")

    def _get(self, name: str) -> Any:
        value = self._values.get(name)
        return None if isinstance(value, str) and not value.strip() else value

    def whole(self, name: str, *, low: int | None = None) -> int | None:
        """A whole number, at least ``low``; JavaScript may write it 3.0."""
        value, expected = self._get(name), "a whole number" + ("" if low is None else f" of at least {low}")
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
            raise self._bad(name, expected)
        return value

    def number(self, name: str) -> float | None:
        """A number; NaN and the infinities are none."""
        value = self._get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < float("inf"):
            raise self._bad(name, "a number")
        return value

    def flag(self, name: str) -> bool | None:
        """True or False."""
        value = self._get(name)
        if value is None or isinstance(value, bool):
            return value
        raise self._bad(name, "true or false")

    def text(self, name: str) -> str | None:
        """A text as it was typed."""
        value = self._get(name)
        if value is None or isinstance(value, str):
            return value
        raise self._bad(name, "a text")

    def texts(self, name: str) -> list[str] | None:
        """One text or several."""
        value = self._values.get(name)
        if value is None or isinstance(value, str):
            return [value] if value else None  # a line end alone is a stop string like any other
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return [one for one in value if one] or None
        raise self._bad(name, "a text or a list of texts")

    def required_text(self, name: str, example: str) -> str:
        """A text that has to be there."""
        value = self.text(name)
        if value is None:
            raise CommandError(f"{self.command}: {name} is missing, such as {example}")
        return value

    def required_whole(self, name: str) -> int:
        """A whole number that has to be there."""
        value = self.whole(name)
        if value is None:
            raise self._bad(name, "a whole number")
        return value

    def required_flag(self, name: str) -> bool:
        """True or False, one of which has to be there."""
        value = self.flag(name)
        if value is None:
            raise self._bad(name, "true or false")
        return value


def _checked(name: str, args: object) -> Mapping[str, Any]:
    if args is None:
        return {}
    if not isinstance(args, Mapping):
        raise CommandError(f"{name}: arguments come by name, got {args!r}")
    for one in args:
        if one not in COMMANDS[name]:
            known = ", ".join(COMMANDS[name]) or "no arguments"
            raise CommandError(f"{name} has no argument {one!r}; it takes {known}")
    return args
