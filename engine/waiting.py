"""Requests without a row, in the order of their arrival; finding, taking and losing one costs the same in any queue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import overload

from engine.request import Request


class WaitingList(Sequence[Request]):
    """Requests that wait and were not aborted, the oldest first.

    Those that came back from a row stand where they stood, in front. The first one is found at once; another index, and
    a loop over all of them, take as long as they are many.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[int, Request] = OrderedDict()
        self._inbox: OrderedDict[int, Request] = OrderedDict()
        """Handed in since the last admit."""
        self._num_aborted = 0

    @property
    def num_waiting(self) -> int:
        """All without a row, those with an abort to come included."""
        return len(self._queue) + len(self._inbox)

    @property
    def everybody(self) -> list[Request]:
        """All without a row, those with an abort to come included; a copy."""
        return [*self._queue.values(), *self._inbox.values()]

    @property
    def newest(self) -> Request | None:
        """Handed in last, of those that no admit has looked at."""
        return next(reversed(self._inbox.values()), None)

    def holds(self, request: Request) -> bool:
        """Whether it waits and was not aborted."""
        known = self._queue.get(request.key, self._inbox.get(request.key))
        return known is request and not request.abort_requested

    def submit(self, request: Request) -> None:
        """Leave it in the inbox."""
        self._inbox[request.key] = request

    def settle(self) -> None:
        """The inbox joins the queue."""
        self._queue.update(self._inbox)
        self._inbox.clear()

    def take(self, request: Request) -> None:
        """It leaves the queue for a row."""
        del self._queue[request.key]

    def put_back(self, requests: Iterable[Request]) -> None:
        """Requests go to the front, behind older ones there."""
        for request in sorted(requests, key=lambda request: request.key, reverse=True):
            self._num_aborted += request.abort_requested
            older = []
            for key in self._queue:
                if key > request.key:
                    break
                older.append(key)
            for key in (request.key, *reversed(older)):
                self._queue.setdefault(key, request)
                self._queue.move_to_end(key, last=False)

    def note_abort(self, request: Request) -> None:
        """Its abort was asked for; :meth:`drop` lets it go."""
        self._num_aborted += request.key in self._queue or request.key in self._inbox

    def drop(self, requests: Iterable[Request]) -> None:
        """Requests that have ended leave, those that wait here."""
        for request in requests:
            for part in (self._queue, self._inbox):
                if part.pop(request.key, None) is not None:
                    self._num_aborted -= request.abort_requested

    def clear(self) -> None:
        """Nobody waits."""
        self._queue.clear()
        self._inbox.clear()
        self._num_aborted = 0

    def __len__(self) -> int:
        return self.num_waiting - self._num_aborted

    def __iter__(self) -> Iterator[Request]:
        everybody = chain(self._queue.values(), self._inbox.values())
        return (request for request in everybody if not request.abort_requested)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        if index == 0:
            for request in self:
                return request
        return list(self)[index]


class WaitingView(Sequence[Request]):
    """What an admission policy chooses from: a waiting list that it can read and not change (I19)."""

    def __init__(self, waiting: WaitingList) -> None:
        self.__waiting = waiting

    def __len__(self) -> int:
        return len(self.__waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.__waiting)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        return self.__waiting[index]
