"""Requests on their way to the engine: checked when submitted, handed in when their time comes."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from engine.request import SamplingParams


@dataclass(frozen=True, eq=False, slots=True)
class ClosedLoop:
    """Lets its requests in, one after the other, while fewer than ``limit`` of them are live; each loop is its own."""

    limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request as it was submitted, complete, so that it can be submitted again."""

    number: int
    """Counts from 0; what its seed was derived from if it brought none."""
    request_id: str
    prompt_ids: Sequence[int]
    """Made ones may be a description that gives the same ids whenever it is asked."""
    params: SamplingParams
    """With its seed settled."""
    arrival: float
    """On the session's clock; in a closed loop when the loop starts."""
    stream: bool = False
    cache_salt: str = ""
    """Requests of one salt share cached prefixes."""
    loop: ClosedLoop | None = None
    """It enters when the loop lets it in, and not when it arrives."""


@dataclass(slots=True)
class _Line:
    """One closed loop: who stands outside, and who is in."""

    limit: int
    waiting: deque[Submission] = field(default_factory=deque)
    inside: set[str] = field(default_factory=set)


class Arrivals:
    """Submissions that are not yet in the engine, by arrival, then in the order they were submitted.

    Those of closed loops stand behind them, for the clock does not tell when they come.

    Args:
        live_ids: The requests that owe their last output now; a loop lets nobody in before it has come.
    """

    def __init__(self, live_ids: Callable[[], Collection[str]]) -> None:
        self._live_ids = live_ids
        self._coming: list[Submission] = []
        """The next one last, so that taking it moves no other."""
        self._lines: dict[ClosedLoop, _Line] = {}

    def __len__(self) -> int:
        return len(self._coming) + sum(len(line.waiting) for line in self._lines.values())

    @property
    def coming(self) -> tuple[Submission, ...]:
        """All of them, the next first."""
        return tuple(self._in_order())

    def soonest(self, count: int) -> list[Submission]:
        """At most ``count`` of them, the next first, however many come behind."""
        return list(islice(self._in_order(), max(0, count)))

    def _in_order(self) -> Iterator[Submission]:
        yield from reversed(self._coming)
        for line in self._lines.values():
            yield from line.waiting

    @property
    def first(self) -> Submission | None:
        """The one that comes next by itself: of a loop with room, or else by the clock; None where none does."""
        for line in self._lines.values():
            if line.waiting and self._room(line):
                return line.waiting[0]
        return self._coming[-1] if self._coming else None

    def add(self, submission: Submission) -> None:
        """Let it arrive at its time, or when its loop lets it in."""
        if submission.loop is None:
            insort(self._coming, submission, key=lambda one: (-one.arrival, -one.number))
        else:
            self._line(submission.loop).waiting.append(submission)

    def put_back(self, submission: Submission) -> None:
        """One that was taken and could not be handed in: it stands where it stood, the first of its time."""
        if submission.loop is None:
            self.add(submission)
        else:
            line = self._line(submission.loop)
            line.inside.discard(submission.request_id)
            line.waiting.appendleft(submission)

    def take_due(self, now: float) -> list[Submission]:
        """Take those whose arrival is not after ``now``, then those whom their loops let in."""
        due = []
        while self._coming and self._coming[-1].arrival <= now:
            due.append(self._coming.pop())
        for loop in self._lines:
            due += self.take_let_in(loop)
        return due

    def take_let_in(self, loop: ClosedLoop) -> list[Submission]:
        """Take those whom one loop lets in."""
        line = self._line(loop)
        if not line.waiting:
            return []
        # Asked for once: those taken here are inside before they are live.
        count = self._room(line)
        taken = [line.waiting.popleft() for _ in range(min(count, len(line.waiting)))]
        line.inside.update(one.request_id for one in taken)
        return taken

    def remove(self, request_id: str) -> Submission | None:
        """Take one out before it arrives; None if it is not here."""
        for queue in (self._coming, *(line.waiting for line in self._lines.values())):
            for submission in queue:
                if submission.request_id == request_id:
                    queue.remove(submission)
                    return submission
        return None

    def clear(self) -> None:
        """Forget all."""
        self._coming.clear()
        self._lines.clear()

    def _line(self, loop: ClosedLoop) -> _Line:
        return self._lines.setdefault(loop, _Line(loop.limit))

    def _room(self, line: _Line) -> int:
        line.inside.intersection_update(self._live_ids())
        return line.limit - len(line.inside)
