"""What drafting gave each request: which of its tokens were drafts, which were turned down, how many accepted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.controller import Iteration
from engine.request import Request

KEPT_REJECTIONS = 8
"""Newest verifications of a request whose rejected drafts are kept, of those that rejected any."""


class Drafted(NamedTuple):
    """What one verification gave; one entry a row."""

    keys: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    """Accepted drafts and one more, whether or not an end came before."""
    num_drafts: NDArray[np.int64]
    foreseen: NDArray[np.int64] | None = None
    """[most drafts of a row, rows] the drafts, -1 where there is none; known from resolve on."""

    @classmethod
    def of(cls, iteration: Iteration, *, is_resolved: bool = False) -> Drafted | None:
        """Of an iteration behind its rewind, or with the drafts themselves behind its resolve; None without drafts."""
        verified, num_tokens = iteration.verified, iteration.num_tokens
        if verified is None or num_tokens is None:
            return None
        return cls(verified.keys, num_tokens, verified.num_drafts, verified.foreseen() if is_resolved else None)

    @property
    def num_verified(self) -> int:
        """Draft tokens of all rows together."""
        return int(self.num_drafts.sum())

    @property
    def num_accepted(self) -> int:
        """Of those, the accepted ones."""
        return int(self.num_tokens.sum()) - self.num_tokens.size


class RejectedDrafts(NamedTuple):
    """Drafts of one request that one verification turned down."""

    at: int
    """Place in its output of the token that the model drew instead of the first of them."""
    place: int
    """Of the first of them behind the newest token, from 1."""
    token_ids: tuple[int, ...]
    """All of them: those behind the first fall with it, whatever the model would have said of them."""


class DraftMarks(NamedTuple):
    """Which tokens of a request were drafts."""

    accepted: tuple[bool, ...]
    """One a token of those asked for: whether it is an accepted draft; else the model's own draw."""
    num_newest: int
    """Tokens that the newest verification gave it."""
    rejected: tuple[RejectedDrafts, ...]
    """Of the newest verifications that turned any down, with what the model drew instead among the tokens asked for."""


class DraftCounts(NamedTuple):
    """Of one request, by place behind the newest token; ``docs/metrics.md`` (Drafts) defines both."""

    proposed: tuple[int, ...]
    accepted: tuple[int, ...]


NO_DRAFTS = DraftCounts((), ())


class _Record:
    """Of one request."""

    def __init__(self) -> None:
        self.is_draft: list[bool] = []
        self.num_newest = 0
        """Tokens of the newest verification."""
        self.rejected: deque[RejectedDrafts] = deque(maxlen=KEPT_REJECTIONS)
        self.proposed: list[int] = []
        self.accepted: list[int] = []

    def note(self, num_tokens: int, num_drafts: int, foreseen: Sequence[int]) -> None:
        self.num_newest = num_tokens
        self.is_draft += [True] * (num_tokens - 1) + [False]
        if num_tokens <= num_drafts:
            rejected = tuple(foreseen[num_tokens - 1 : num_drafts])
            self.rejected.append(RejectedDrafts(len(self.is_draft) - 1, num_tokens, rejected))
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
            drafted: What they got, known to the drafts themselves.

        Yields:
            Key and tokens of each request.
        """
        assert drafted.foreseen is not None
        of_rows = (drafted.num_tokens.tolist(), drafted.num_drafts.tolist(), drafted.foreseen.T.tolist())
        given = dict(zip(drafted.keys.tolist(), zip(*of_rows, strict=True), strict=True))
        for request in requests:
            num_tokens, num_drafts, foreseen = given[request.key]
            self._records.setdefault(request.key, _Record()).note(num_tokens, num_drafts, foreseen)
            yield request.key, num_tokens

    def marks(self, request: Request, last: int) -> DraftMarks | None:
        """Which of its ``last`` tokens were drafts; None before its first verification."""
        record = self._records.get(request.key)
        if record is None:
            return None
        count = len(request.output_ids)
        first, cut = max(0, count - last), max(0, len(record.is_draft) - count)  # drawn behind its end: nobody's
        return DraftMarks(
            accepted=tuple(record.is_draft[first:count]),
            num_newest=max(0, record.num_newest - cut),
            rejected=tuple(one for one in record.rejected if first <= one.at < count),
        )

    def counts(self, request: Request) -> DraftCounts:
        """How many of its drafts were proposed and accepted."""
        record = self._records.get(request.key)
        return NO_DRAFTS if record is None else DraftCounts(tuple(record.proposed), tuple(record.accepted))

    def clear(self) -> None:
        """Forget all requests."""
        self._records.clear()
