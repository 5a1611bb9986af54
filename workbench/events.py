"""What happened to a session, in order, as plain values: for event logs, and for whoever listens."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from engine.lifecycle import Suspension
from engine.pausing import Room
from engine.request import Request
from workbench.states import bytes_text

log = logging.getLogger(__name__)

KINDS = (
    "submitted",
    "aborted",
    "ended",
    "paused",
    "resumed",
    "evicted",
    "mode",
    "started",
    "stopped",
    "failed",
    "recovered",
    "reset",
    "restarted",
    "replay",
    "forgot",
    "suspended",
    "awake",
    "weights",
    "closed",
)
"""Every kind there is. ``ended`` is a request's last output; ``started`` and ``stopped`` are runs of iterations.

``paused``, ``resumed`` and ``evicted`` are requests for want of blocks, one event for all of an iteration;
``forgot`` is the prefix cache. ``suspended``, ``awake`` and ``weights`` are the engine, whose memory was given back, is
there again, and has new weights in it."""
_MOST_KEPT = 2_000
_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened, other than a phase: those are spans."""

    kind: str
    text: str
    iterations_begun: int
    time_ns: int
    """On the clock of the spans."""

    def __str__(self) -> str:
        return f"{self.iterations_begun:>6}  {self.kind:<9}  {self.text}"


def room_events(room: Room, num_free: int) -> Iterator[tuple[str, str]]:
    """Kind and text of what an admit did to have blocks enough.

    Args:
        room: What it did.
        num_free: Blocks free behind it.
    """
    free = f"{num_free} block{'' if num_free == 1 else 's'} free"
    if room.paused:
        yield "paused", f"{_ids(room.paused)}: no block for the next token, {free}"
    if room.resumed:
        yield "resumed", f"{_ids(room.resumed)}: {free}"
    if room.evicted:
        yield "evicted", f"{_ids(room.evicted)}: back to the queue, to be computed again; {free}"


def suspension_text(suspension: Suspension) -> str:
    """What a suspended engine has let go of."""
    freed, saved = bytes_text(max(0, suspension.freed_bytes)), bytes_text(suspension.saved_bytes)
    return f"{suspension.mode}: {freed} given back, {saved} kept on the host"


def _ids(requests: Sequence[Request]) -> str:
    return ", ".join(request.request_id for request in requests)


Listener = Callable[[Event], None]


class EventLog:
    """The newest events of a session, and who is told of them."""

    def __init__(self, iterations_begun: Callable[[], int]) -> None:
        self._iterations_begun = iterations_begun
        self._events: deque[Event] = deque(maxlen=_MOST_KEPT)
        self._listeners: list[Listener] = []

    def tell(self, kind: str, text: str) -> None:
        """Keep an event and tell the listeners; one that raises is logged and does no harm."""
        assert kind in KINDS, kind
        event = Event(kind=kind, text=text, iterations_begun=self._iterations_begun(), time_ns=time.perf_counter_ns())
        self._events.append(event)
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception:
                log.exception("a listener failed on the event %r", event.text)

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Have ``listener`` called with each event from now on, on the session's thread; returns what ends that."""
        self._listeners.append(listener)

        def stop_listening() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)

        return stop_listening

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._events))

    def __getitem__(self, index: int) -> Event:
        return self._events[index]

    def __repr__(self) -> str:
        newest = list(self._events)[-_SHOWN:]
        return "\n".join(map(str, newest)) or "no events yet"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"
