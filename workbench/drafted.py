"""What drafting gave each request: which of its tokens were drafts, and how many at each place were accepted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.controller import Iteration
from engine.request import Request


class Drafted(NamedTuple):
    """What one verification gave; one entry a row."""

    keys: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    """Accepted drafts and one more, whether or not an end came before."""
    num_drafts: NDArray[np.int64]

    @classmethod
    def of(cls, iteration: Iteration) -> Drafted | None:
        """Of an iteration behind its rewind; None without drafts."""
        verified, num_tokens = iteration.verified, iteration.num_tokens
        return None if verified is None or num_tokens is None else cls(verified.keys, num_tokens, verified.num_drafts)

    @property
    def num_verified(self) -> int:
        """Draft tokens of all rows together."""
        return int(self.num_drafts.sum())

    @property
    def num_accepted(self) -> int:
        """Of those, the accepted ones."""
        return int(self.num_tokens.sum()) - self.num_tokens.size


class DraftMarks(NamedTuple):
    """Which tokens of a request were drafts."""

    accepted: tuple[bool, ...]
    """One a token of those asked for: whether it is an accepted draft; else the model's own draw."""
    num_newest: int
    """Tokens that the newest verification gave it."""
    num_rejected: int
    """Drafts that it turned down; their ids are not known on the host."""


class DraftCounts(NamedTuple):
    """Of one request, by place behind the newest token; ``docs/metrics.md`` (Drafts) defines both."""

    proposed: tuple[int, ...]
    accepted: tuple[int, ...]


NO_DRAFTS = DraftCounts((), ())


class _Record:
    """Of one request."""

    def __init__(self) -> None:
        self.is_draft: list[bool] = []
        self.newest = (0, 0)
        """Tokens and drafts of the newest verification."""
        self.proposed: list[int] = []
        self.accepted: list[int] = []

    def note(self, num_tokens: int, num_drafts: int) -> None:
        self.newest = num_tokens, num_drafts
        self.is_draft += [True] * (num_tokens - 1) + [False]
        missing = num_drafts - len(self.proposed)
        self.proposed += [0] * missing
        self.accepted += [0] * missing
        for place in range(num_drafts):
            self.proposed[place] += 1
            self.accepted[place] += place < num_tokens - 1


class DraftLog:
    """Kept for every request that a verification gave tokens."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}

    def note(self, requests: Sequence[Request], drafted: Drafted) -> Iterator[tuple[int, int]]:
        """Take over one verification.

        Args:
            requests: Those that got tokens.
            drafted: What they got.

        Yields:
            Key and tokens of each request.
        """
        numbers = zip(drafted.num_tokens.tolist(), drafted.num_drafts.tolist(), strict=True)
        given = dict(zip(drafted.keys.tolist(), numbers, strict=True))
        for request in requests:
            num_tokens, num_drafts = given[request.key]
            self._records.setdefault(request.key, _Record()).note(num_tokens, num_drafts)
            yield request.key, num_tokens

    def marks(self, request: Request, last: int) -> DraftMarks | None:
        """Which of its ``last`` tokens were drafts; None before its first verification."""
        record = self._records.get(request.key)
        if record is None:
            return None
        count, (num_tokens, num_drafts) = len(request.output_ids), record.newest
        cut = max(0, len(record.is_draft) - count)  # drawn behind its end: nobody's
        shown = record.is_draft[max(0, count - last) : count]
        return DraftMarks(tuple(shown), max(0, num_tokens - cut), num_drafts - (num_tokens - 1))

    def counts(self, request: Request) -> DraftCounts:
        """How many of its drafts were proposed and accepted."""
        record = self._records.get(request.key)
        return NO_DRAFTS if record is None else DraftCounts(tuple(record.proposed), tuple(record.accepted))

    def clear(self) -> None:
        """Forget all requests."""
        self._records.clear()
