"""Tokens on their way to their requests: kept by step, and handed over when somebody asks for them by request."""

from __future__ import annotations

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
        self._requests: list[Request] = []
        self._steps: list[NDArray[np.int64]] = []

    def append(self, requests: list[Request], tokens: NDArray[np.int64]) -> None:
        """Note token i for request i; the requests are those of the last call, or the log was handed over since.

        Args:
            requests: Not to be changed before the next :meth:`hand_over`.
            tokens: [n], copied.
        """
        if len(self._steps) == MOST_STEPS:
            self.hand_over()
        assert not self._steps or requests is self._requests, "hand over before rows change"
        self._requests = requests
        self._steps.append(tokens.copy())

    def hand_over(self) -> None:
        """Give every request its tokens."""
        if not self._steps:
            return
        tokens = np.stack(self._steps, axis=1).tolist()
        self._steps.clear()
        for request, its_tokens in zip(self._requests, tokens, strict=True):
            request.take(its_tokens)
