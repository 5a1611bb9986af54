"""Outputs of some requests, collected while others step the engine too."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType

from engine.errors import EnginePausedError
from engine.request import RequestOutput

Boxes = dict[str, deque[RequestOutput]]
"""By request."""


class Mailboxes:
    """Collects the outputs of some requests and aborts those left unfinished.

    It collects from its construction on: others may serve the request to its end before anyone looks.

    Args:
        shared: Of all that collect, where outputs are delivered.
        abort: Ends a request.
        request_ids: Whose outputs.
    """

    def __init__(self, shared: Boxes, abort: Callable[[str], object], request_ids: Sequence[str]) -> None:
        self._shared = shared
        self._abort = abort
        self.boxes: Boxes = {request_id: deque() for request_id in request_ids}
        shared.update(self.boxes)

    def __enter__(self) -> Mailboxes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(abort=kind is not None)

    def __del__(self) -> None:
        self.close(abort=True)  # a stream nobody ever read from

    def close(self, *, abort: bool) -> None:
        """Collect nothing more; ``abort``: those that have not ended."""
        while self.boxes:
            request_id, box = self.boxes.popitem()
            if self._shared.get(request_id) is box:
                del self._shared[request_id]
                if abort:
                    self._abort(request_id)

    def emptied(self) -> Iterator[RequestOutput]:
        """What has been collected, which is then gone."""
        for box in self.boxes.values():
            while box:
                yield box.popleft()


class OutputStream(Iterator[RequestOutput]):
    """The outputs of one request, stepping the engine for them. No generator: a pause must not be its end.

    Args:
        mailbox: Of this request alone.
        step: Steps the engine.
    """

    def __init__(self, mailbox: Mailboxes, step: Callable[[], object]) -> None:
        self._mailbox = mailbox
        self._step = step
        (self._box,) = mailbox.boxes.values()
        self._is_over = False

    def __next__(self) -> RequestOutput:
        if self._is_over:
            raise StopIteration
        try:
            while not self._box:
                self._step()
        except EnginePausedError:
            raise
        except BaseException:
            self.close()
            raise
        output = self._box.popleft()
        if output.finished:
            self._is_over = True
            self._mailbox.close(abort=False)
        return output

    def close(self) -> None:
        """Abort the request unless it has ended."""
        self._is_over = True
        self._mailbox.close(abort=True)
