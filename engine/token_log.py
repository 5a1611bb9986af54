"""Tokens on their way to their requests: kept by step, and handed over when somebody asks for them by request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from engine.request import Request

MOST_STEPS = 64
"""Kept before they are handed over, so that handing over never takes long."""


class TokenLog:
    """Tokens of steps in which each of the same requests got one.

    Appending to hundreds of lists at every step visits memory all over the heap, which costs more than all else that
    resolve does; the log takes one array a step. ``Request.output_ids`` hands over first, so nobody sees a difference.
    """

    def __init__(self) -> None:
        self._held: _Held | None = None

    def append(self, requests: list[Request], tokens: NDArray[np.int64]) -> None:
        """Note token i for request i; the requests are those of the last call, or the log was handed over since.

        Args:
            requests: Not to be changed before the next :meth:`hand_over`.
            tokens: [n], copied.
        """
        if self._held is not None and len(self._held.steps) == MOST_STEPS:
            self.hand_over()
        if self._held is None:
            self._held = _Held(requests, [])
        assert requests is self._held.requests, "hand over before rows change"
        self._held.steps.append(tokens.copy())

    def hand_over(self) -> None:
        """Give every request its tokens; what an interrupt stops, the next call completes."""
        held = self._held
        if held is None:
            return
        if held.starts is None:
            held.starts = [request.num_taken for request in held.requests]
        tokens = np.stack(held.steps, axis=1).tolist()
        for request, start, its_tokens in zip(held.requests, held.starts, tokens, strict=True):
            request.take(its_tokens, start)
        self._held = None


@dataclass(slots=True)
class _Held:
    """What waits; it goes as a whole."""

    requests: list[Request]
    steps: list[NDArray[np.int64]]
    starts: list[int] | None = None
    """Once handing over has begun: where each request's tokens belong."""
