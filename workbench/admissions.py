"""What admissions leave for whoever looks: what each request skipped, and who lost its row for want of blocks."""

from __future__ import annotations

from engine.controller import Iteration
from engine.request import Request, RequestState
from engine.table import RequestTable


class Admissions:
    """Told behind every admit; keeps a number for each request that was sent back."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._skipped: dict[int, int] = {}
        """By key, where it is not what the request skipped when it was admitted first."""
        self._evicted: dict[int, int] = {}
        """By key, the iteration that sent it back last."""
        self._back: set[int] = set()
        """Keys of those that have a row again."""

    def note(self, iteration: Iteration) -> None:
        """An admit has run."""
        if iteration.room is not None:
            for request in iteration.room.evicted:
                self._evicted[request.key] = iteration.index
                self._back.discard(request.key)
        for request in iteration.admitted:
            self._note_admitted(request)

    def _note_admitted(self, request: Request) -> None:
        key = request.key
        if key in self._back:  # a recovery or a suspension took its row, no lack of blocks
            self._back.remove(key)
            del self._evicted[key]
        elif key in self._evicted:
            self._back.add(key)
        skipped = 0 if request.row is None else int(self._table.chunk_done[request.row])
        if skipped != request.num_cached_tokens:
            self._skipped[key] = skipped
        else:
            self._skipped.pop(key, None)

    def skipped(self, request: Request) -> int:
        """Tokens that a prefix hit spared it when it was admitted last."""
        return self._skipped.get(request.key, request.num_cached_tokens)

    def evicted_in(self, request: Request) -> int | None:
        """The iteration that sent it back to the queue, while it waits for that and ever since; None: none did."""
        is_waiting = request.state is RequestState.WAITING
        return None if is_waiting == (request.key in self._back) else self._evicted.get(request.key)

    def clear(self) -> None:
        """Forget all requests."""
        self._skipped.clear()
        self._evicted.clear()
        self._back.clear()
