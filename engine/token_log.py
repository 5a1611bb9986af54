"""Tokens on their way to their requests: kept by step, and handed over when somebody asks for them by request."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from engine.request import Held, Request

MOST_STEPS = 64
"""Kept before they are handed over, so that handing over never takes long."""


class TokenLog:
    """Tokens of steps in which each of the same requests got some, one without drafts.

    Appending to hundreds of lists at every step visits memory all over the heap, which costs more than all else that
    resolve does; the log takes one array a step. ``Request.output_ids`` hands over first, as do the counts of a
    request's drafts, so nobody sees a difference.
    """

    def __init__(self) -> None:
        self._waiting: _Waiting | None = None

    def append(
        self,
        requests: list[Request],
        tokens: NDArray[np.int64],
        drafts: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None,
    ) -> None:
        """Note tokens i for request i; the requests are those of the last call, or the log was handed over since.

        Args:
            requests: Not to be changed before the next :meth:`hand_over`.
            tokens: [n], or [n, W] with -1 behind what a request gets; copied.
            drafts: [n] and [n], that were verified for each, and of those the ones accepted; copied.
        """
        if self._waiting is not None and len(self._waiting.steps) == MOST_STEPS:
            self.hand_over()
        if self._waiting is None:
            self._waiting = _Waiting(requests, [], np.zeros((2, len(requests)), dtype=np.int64))
        assert requests is self._waiting.requests, "hand over before rows change"
        self._waiting.steps.append(tokens.copy())
        if drafts is not None:
            self._waiting.drafts[0] += drafts[0]
            self._waiting.drafts[1] += drafts[1]

    def hand_over(self) -> None:
        """Give every request its tokens; what an interrupt stops, the next call completes."""
        waiting = self._waiting
        if waiting is None:
            return
        if waiting.starts is None:
            waiting.starts = [request.held for request in waiting.requests]
        drafts = zip(*waiting.drafts.tolist(), strict=True)
        for request, tokens, its_drafts, start in zip(
            waiting.requests, waiting.tokens(), drafts, waiting.starts, strict=True
        ):
            request.take(tokens, its_drafts, start)
        self._waiting = None


@dataclass(slots=True)
class _Waiting:
    """What waits; it goes as a whole."""

    requests: list[Request]
    steps: list[NDArray[np.int64]]
    drafts: NDArray[np.int64]
    """[2, n] verified ones, and those accepted of them."""
    starts: list[Held] | None = None
    """Once handing over has begun: what each request had."""

    def tokens(self) -> Iterable[list[int]]:
        """Of each request."""
        if all(step.ndim == 1 for step in self.steps):
            each: list[list[int]] = np.stack(self.steps, axis=1).tolist()
            return each
        drawn = np.concatenate([step if step.ndim == 2 else step[:, None] for step in self.steps], axis=1)
        given = drawn >= 0
        every, ends = drawn[given].tolist(), np.cumsum(given.sum(1)).tolist()
        return (every[begin:end] for begin, end in itertools.pairwise([0, *ends]))
