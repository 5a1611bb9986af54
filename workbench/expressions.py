"""Watch expressions: values of a person's own, noted at every iteration border."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError

if TYPE_CHECKING:
    from workbench.session import Session

_MOST_KEPT = 10_000
"""Iterations whose values are kept."""
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Raised:
    """What stands for a value where the expression raised."""

    error: str

    def __repr__(self) -> str:
        return f"<{self.error}>"


class WatchExpression:
    """One of them; ``session.watch`` makes it."""

    def __init__(self, name: str, function: Callable[[Session], Any], owner: Expressions) -> None:
        self.name = name
        self._function = function
        self._owner = owner
        self._values: deque[tuple[int, Any]] = deque(maxlen=_MOST_KEPT)

    @property
    def values(self) -> list[tuple[int, Any]]:
        """Iteration number and value at its end, oldest first."""
        return list(self._values)

    @property
    def last(self) -> Any:
        """The newest value; None before the first."""
        return self._values[-1][1] if self._values else None

    def at(self, iteration: int) -> Any:
        """The value at the end of an iteration; None where it was not noted."""
        return next((value for index, value in reversed(self._values) if index == iteration), None)

    def note(self, session: Session, iteration: int) -> None:
        """Work the value out; what it raises is kept in its place, for a watch must not stop a run."""
        try:
            value = self._function(session)
        except Exception as error:
            value = Raised(f"{type(error).__name__}: {error}")
        self._values.append((iteration, value))

    def clear(self) -> None:
        """Forget all values."""
        self._values.clear()

    def remove(self) -> None:
        """Watch it no longer; its values can still be read."""
        self._owner.remove(self)

    def __repr__(self) -> str:
        newest = self.values[-_SHOWN:]
        told = ", ".join(f"{index}: {value!r}" for index, value in newest) or "no value yet"
        return f"<watch {self.name}: {told}>"

    def _repr_html_(self) -> str:
        return f"<div>{escape(repr(self)[1:-1])}</div>"


class Expressions:
    """All watch expressions of a session, in the order they were made."""

    def __init__(self) -> None:
        self._by_name: dict[str, WatchExpression] = {}

    def add(self, name: str, function: Callable[[Session], Any]) -> WatchExpression:
        """Watch one more; another of the same name is replaced.

        Raises:
            ConfigError: ``name`` is empty or ``function`` cannot be called.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"watch(name, function): name must be a string that is not empty, got {name!r}")
        if not callable(function):
            raise ConfigError(f"watch {name!r}: expected a function of the session, got {function!r}")
        made = self._by_name[name] = WatchExpression(name, function, self)
        return made

    def remove(self, expression: WatchExpression) -> None:
        """Watch it no longer."""
        if self._by_name.get(expression.name) is expression:
            del self._by_name[expression.name]

    def note(self, session: Session, iteration: int) -> None:
        """Note the value of each, at the end of an iteration."""
        for expression in tuple(self._by_name.values()):
            expression.note(session, iteration)

    def at(self, iteration: int) -> dict[str, Any]:
        """Each one's value at the end of an iteration."""
        return {name: one.at(iteration) for name, one in self._by_name.items()}

    def clear(self) -> None:
        """Forget the values; go on watching."""
        for expression in self._by_name.values():
            expression.clear()

    def __iter__(self) -> Iterator[WatchExpression]:
        return iter(tuple(self._by_name.values()))

    def __len__(self) -> int:
        return len(self._by_name)

    def __bool__(self) -> bool:
        return bool(self._by_name)

    def __repr__(self) -> str:
        return "\n".join(map(repr, self)) or "no watch expressions; session.watch(name, function) makes one"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"
