"""Requests that have ended, the newest first, however many those are."""

from __future__ import annotations

from bisect import insort

from engine.request import Request, RequestState
from workbench.arrivals import Submission
from workbench.book import RequestBook


class EndedRequests:
    """Those of a book, by when they ended; each is looked at until it has ended, and filed once."""

    def __init__(self, book: RequestBook) -> None:
        self._book = book
        self._generation = book.generation
        self._num_seen = 0
        self._open: list[Submission] = []
        self._filed: list[tuple[int, int, Submission, Request | None]] = []
        """When it ended, or was withdrawn before it came, and its number; the newest last."""

    def newest(self, count: int) -> list[tuple[Submission, Request | None]]:
        """At most ``count``, the newest first; None: it never came. A view without room for any looks at none."""
        if count < 1:
            return []
        unsettled = self._file_ended()
        found = [*unsettled, *((one, request) for _, _, one, request in reversed(self._filed[-count:]))]
        return found[:count]

    def _file_ended(self) -> list[tuple[Submission, Request | None]]:
        """Returns those whose last output is still owed: the newest of all, the last submitted first."""
        book = self._book
        if book.generation != self._generation:
            self._generation, self._num_seen, self._open, self._filed = book.generation, 0, [], []
        self._open += book.newest(book.num_submissions - self._num_seen)
        self._num_seen = book.num_submissions
        still_open: list[Submission] = []
        unsettled: list[tuple[Submission, Request | None]] = []
        for submission in self._open:
            request = book.request(submission.request_id)
            if request is not None and request.state is not RequestState.FINISHED:
                still_open.append(submission)
                continue
            ended_ns = _withdrawn_ns(book, submission) if request is None else request.timings.finished_ns
            if ended_ns is not None:
                insort(self._filed, (ended_ns, submission.number, submission, request))
                continue
            still_open.append(submission)
            if request is not None:
                unsettled.append((submission, request))
        self._open = still_open
        return unsettled[::-1]


def _withdrawn_ns(book: RequestBook, submission: Submission) -> int | None:
    output = book.output(submission.request_id)
    return None if output is None else output.timings.finished_ns
