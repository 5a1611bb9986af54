"""Requests on their way to the engine: checked when submitted, handed in when their time comes."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from engine.request import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request as it was submitted, complete, so that it can be submitted again."""

    number: int
    """Counts from 0; what its seed was derived from if it brought none."""
    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    """With its seed settled."""
    arrival: float
    """On the session's clock."""
    stream: bool = False


class Arrivals:
    """Submissions that are not yet in the engine, by arrival, then in the order they were submitted."""

    def __init__(self) -> None:
        self._coming: list[Submission] = []

    def __len__(self) -> int:
        return len(self._coming)

    @property
    def coming(self) -> tuple[Submission, ...]:
        """All of them, the next first."""
        return tuple(self._coming)

    def add(self, submission: Submission) -> None:
        """Let it arrive at its time."""
        insort(self._coming, submission, key=lambda one: (one.arrival, one.number))

    def take_due(self, now: float) -> list[Submission]:
        """Take those whose arrival is not after ``now``."""
        count = 0
        while count < len(self._coming) and self._coming[count].arrival <= now:
            count += 1
        due, self._coming = self._coming[:count], self._coming[count:]
        return due

    def remove(self, request_id: str) -> Submission | None:
        """Take one out before it arrives; None if it is not here."""
        for index, submission in enumerate(self._coming):
            if submission.request_id == request_id:
                return self._coming.pop(index)
        return None

    def clear(self) -> None:
        """Forget all."""
        self._coming.clear()
