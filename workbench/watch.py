"""What the session notes at phase borders: when tokens became known, and why an iteration's times may mean nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

from engine.controller import Border, Iteration
from engine.phases import Phase
from engine.request import Request
from workbench.drafted import DraftCounts, Drafted, DraftLog, DraftMarks

Watcher = Callable[[Border], None]
_FOLD_AT = 4096
"""Iterations noted before they are sorted by request; keeps the note itself at one append."""


def debugger_attached() -> bool:
    """Whether a trace function, a monitoring debugger or a debugpy client watches this thread."""
    if sys.gettrace() is not None:
        return True
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None:
        return True
    debugpy = sys.modules.get("debugpy")
    is_connected = getattr(debugpy, "is_client_connected", None)
    return bool(is_connected is not None and is_connected())


class BorderWatch:
    """Called by the controller at every border, between the phases' spans, so that it is charged to none of them.

    Args:
        inner: The watcher that was there before, called last.
        is_inline: The engine's device computes on the host's thread.
    """

    def __init__(self, inner: Watcher | None, *, is_inline: bool) -> None:
        self._inner = inner
        self.changes: Watcher | None = None
        """Records what phases read and wrote, while somebody wants that."""
        self.behind_admit: Callable[[Iteration], None] | None = None
        """Told of each iteration behind its admit."""
        self.behind_rewind: Callable[[Drafted], None] | None = None
        """Told of each verification once its accepted counts are known."""
        self._is_inline = is_inline
        self._device_was_read = False
        self._was_left = False
        self.last: Iteration | None = None
        """The iteration begun last."""
        self.behind: Phase | None = None
        """The phase of it that has ended last; None before the first."""
        self.advanced: Sequence[Request] = ()
        """Requests that got a token in the resolve that ran last."""
        self._notes: list[tuple[int, Sequence[Request], Drafted | None]] = []
        self._times: dict[int, list[int]] = {}
        self._drafts = DraftLog()

    def __call__(self, border: Border) -> None:
        """Note what there is to note at ``border``."""
        if border.side == "before":
            self._mark(border.iteration)
        else:
            self.behind = border.phase
            if border.phase is Phase.RESOLVE:
                self._note_tokens(border.iteration)
            elif border.phase is Phase.ADMIT and self.behind_admit is not None:
                self.behind_admit(border.iteration)
            elif border.phase is Phase.REWIND and self.behind_rewind is not None:
                drafted = Drafted.of(border.iteration)
                if drafted is not None:
                    self.behind_rewind(drafted)
        if self.changes is not None:
            self.changes(border)
        if self._inner is not None:  # last: the debug mode's checks poison what is void from here on
            self._inner(border)

    def _mark(self, iteration: Iteration) -> None:
        if iteration is not self.last:
            self.last, self.behind = iteration, None
        if self._is_inline:
            iteration.void_reasons.add("inline_device")
        if debugger_attached():
            iteration.void_reasons.add("debugger")
        if self._device_was_read:
            self._device_was_read = False
            iteration.void_reasons.add("device_read")
        if self._was_left:
            self._was_left = False
            iteration.void_reasons.add("resumed")

    def _note_tokens(self, iteration: Iteration) -> None:
        self.advanced = iteration.advanced
        self._notes.append((time.perf_counter_ns(), self.advanced, Drafted.of(iteration, is_resolved=True)))
        if len(self._notes) >= _FOLD_AT:
            self._fold()

    def engine_was_left(self) -> None:
        """Void the next iteration: nobody drove for a while, and running requests and the device waited for that."""
        self._was_left = True

    def device_was_read(self, iteration: Iteration | None) -> None:
        """Void the iteration in hand, or else the next one: its pending forward was waited for."""
        if iteration is None:
            self._device_was_read = True
        else:
            iteration.void_reasons.add("device_read")

    def token_times(self, request: Request) -> tuple[int, ...]:
        """When each of the request's tokens was known, nanoseconds; the first is its ``first_token_ns``.

        Later ones are read at the end of resolve, so they include the release of rows. Accepted drafts are known with
        the token behind them.
        """
        self._fold()
        times = self._times.get(request.key, [])[: len(request.output_ids)]
        if times and request.timings.first_token_ns is not None:
            return (request.timings.first_token_ns, *times[1:])
        return tuple(times)

    def draft_marks(self, request: Request, last: int) -> DraftMarks | None:
        """Which of its ``last`` tokens were drafts; None before its first verification, and without drafting."""
        self._fold()
        return self._drafts.marks(request, last)

    def draft_counts(self, request: Request) -> DraftCounts:
        """How many of its drafts were proposed and accepted, by place."""
        self._fold()
        return self._drafts.counts(request)

    def clear(self) -> None:
        """Forget all tokens and iterations."""
        self.last = self.behind = None
        self.advanced = ()
        self._device_was_read = self._was_left = False
        self._notes.clear()
        self._times.clear()
        self._drafts.clear()

    def _fold(self) -> None:
        for now_ns, requests, drafted in self._notes:
            if drafted is not None:
                for key, num_tokens in self._drafts.note(requests, drafted):
                    self._times.setdefault(key, []).extend([now_ns] * num_tokens)
                continue
            for request in requests:
                self._times.setdefault(request.key, []).append(now_ns)
        self._notes.clear()
