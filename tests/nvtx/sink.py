"""A sink that keeps every range it is given, and checks that push and pop are balanced on each thread."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Range(NamedTuple):
    kind: str
    """``push``, ``start`` or ``mark``."""
    name: str
    category: str
    colour: str
    payload: int


@dataclass
class RecordingSink:
    ranges: list[Range] = field(default_factory=list)
    stacks: dict[int, list[Range]] = field(default_factory=lambda: defaultdict(list))
    """Pushed and not popped, a thread each."""
    started: dict[int, Range] = field(default_factory=dict)
    """Started and not ended."""

    def attributes(self, name: str, category: str, colour: str) -> Any:
        return name, category, colour

    def push(self, attributes: Any, payload: int) -> None:
        self.stacks[threading.get_ident()].append(self._keep("push", attributes, payload))

    def pop(self) -> None:
        assert self.stacks[threading.get_ident()], "popped what was not pushed on this thread"
        self.stacks[threading.get_ident()].pop()

    def start(self, attributes: Any, payload: int) -> int:
        token = len(self.ranges)
        self.started[token] = self._keep("start", attributes, payload)
        return token

    def end(self, token: int) -> None:
        del self.started[token]

    def mark(self, attributes: Any, payload: int) -> None:
        self._keep("mark", attributes, payload)

    def open_ranges(self) -> list[Range]:
        """What was opened and not closed, on any thread."""
        return [one for stack in self.stacks.values() for one in stack] + list(self.started.values())

    def _keep(self, kind: str, attributes: Any, payload: int) -> Range:
        self.ranges.append(Range(kind, *attributes, payload))
        return self.ranges[-1]
