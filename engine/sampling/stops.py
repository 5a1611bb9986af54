"""Stop strings, found in text that arrives piece by piece.

What counts as the match does not depend on how the text was cut into pieces: of all occurrences in the whole
text the one that begins first, and of those that begin there the longest. So a match is only sure once no
occurrence that begins earlier, or there and longer, can still be completed; until then it is a candidate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopHit:
    """An occurrence of a stop string."""

    stop: str
    """The string."""
    start: int
    """Characters of the whole text before it."""

    @property
    def end(self) -> int:
        """Characters of the whole text up to its end."""
        return self.start + len(self.stop)


class _Search:
    """Knuth, Morris and Pratt's search for one string: constant work a character, nothing looked at twice."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.found: int | None = None
        """Where the first occurrence begins."""
        self.progress = 0
        """Characters of the stop that the text ends with."""
        self._fallback = [0] * (len(stop) + 1)  # of a prefix: the longest shorter prefix that ends it
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._fallback[length]
            length += stop[i] == stop[length]
            self._fallback[i + 1] = length

    def feed(self, text: str, position: int, armed: bool) -> None:
        """Go on over ``text``, which begins at ``position``; occurrences that end in it count if ``armed``."""
        for i, char in enumerate(text, start=position + 1):
            while self.progress and char != self.stop[self.progress]:
                self.progress = self._fallback[self.progress]
            self.progress += char == self.stop[self.progress]
            if self.progress < len(self.stop):
                continue
            if armed:
                self.found, self.progress = i - len(self.stop), 0
                return
            self.progress = self._fallback[self.progress]


class StopMatcher:
    """Passes text on up to the first stop string, and holds back what may turn out to begin one.

    Args:
        stops: The strings, none empty. No strings: everything passes.
        include: Keep the stop string that was found in the text.

    Raises:
        ValueError: a string is empty.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if not all(stops):
            raise ValueError(f"stop strings must not be empty, got {stops!r}")
        self._searches = [_Search(stop) for stop in dict.fromkeys(stops)]
        self._include = include
        self._held = ""
        self._num_passed = 0
        self.hit: StopHit | None = None
        """The match, once it is sure."""
        self.candidate: StopHit | None = None
        """The match as far as is known; ``hit`` may still come to begin earlier or be longer."""

    def feed(self, text: str, armed: bool = True) -> str:
        """Take the next piece.

        Args:
            text: Whole characters. Ignored after a hit.
            armed: Whether an occurrence may end in this piece; one that ends elsewhere is no match for good.

        Returns:
            What may be passed on now; with a hit, all that is left up to the cut.
        """
        if self.hit is not None:
            return ""
        position = self._num_passed + len(self._held)
        self._held += text
        for search in self._searches:
            if search.found is None:
                search.feed(text, position, armed)
        self.candidate = self._best()
        first_open = self._first_open()
        if self.candidate is not None and self.candidate.start < first_open:
            return self._settle(self.candidate)
        limit = first_open if self.candidate is None else min(first_open, self.candidate.start)
        return self._pass_until(limit)

    def flush(self) -> str:
        """The text has ended: a candidate becomes the hit, otherwise all that was held back comes out."""
        if self.hit is not None:
            return ""
        if self.candidate is not None:
            return self._settle(self.candidate)
        return self._pass_until(self._num_passed + len(self._held))

    def _best(self) -> StopHit | None:
        found = [StopHit(s.stop, s.found) for s in self._searches if s.found is not None]
        return min(found, key=lambda hit: (hit.start, -len(hit.stop)), default=None)

    def _first_open(self) -> int:
        """Where the earliest occurrence begins that later text could still complete; the end without one."""
        end = self._num_passed + len(self._held)
        return end - max((s.progress for s in self._searches if s.found is None), default=0)

    def _settle(self, hit: StopHit) -> str:
        self.hit = hit
        passed = self._pass_until(hit.end if self._include else hit.start)
        self._held = ""
        return passed

    def _pass_until(self, position: int) -> str:
        length = position - self._num_passed
        passed, self._held = self._held[:length], self._held[length:]
        self._num_passed = position
        return passed
