"""The part of a session through which requests come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.request import SamplingParams
from workbench.arrivals import Submission
from workbench.book import Prompt
from workbench.clock import Clock
from workbench.desk import Desk
from workbench.events import EventLog
from workbench.workloads import Workload


class Submitting:
    """Requests in, at any time: nothing runs before the session is driven."""

    events: EventLog
    _desk: Desk

    def submit(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        arrival: float | None = None,
        chat: bool = False,
        stream: bool = False,
        cache_salt: str = "",
        request_id: str | None = None,
        **sampling: Any,
    ) -> Any:
        """Hand in one request or several. Allowed at any time; in mid iteration the next admit sees it.

        Args:
            prompt: Text or token ids, or a list of such prompts.
            params: How to sample; None: 16 tokens at temperature 1.
            arrival: When it arrives on the session's clock; None: now.
            chat: The prompt is what a user says; the model's chat template is put around it.
            stream: Make text at every token, so that it can be read while it grows.
            cache_salt: With ``prefix_caching``: only requests of one salt share cached prefixes.
            request_id: A name that was not used in this session; None makes one.
            **sampling: Fields of :class:`~engine.request.SamplingParams`, laid over ``params``.

        Returns:
            The request's id; for a list of prompts a list of ids.

        Raises:
            RequestError: it cannot be served; ``field`` names the fault. Of a list then none was handed in.
        """
        ids, is_many = self._desk.submit(
            prompt,
            params,
            sampling,
            arrival=arrival,
            chat=chat,
            stream=stream,
            cache_salt=cache_salt,
            request_id=request_id,
        )
        self.events.tell("submitted", ", ".join(ids))
        return ids if is_many else ids[0]

    def submit_workload(self, workload: Workload | str, *, request_ids: Sequence[str] | None = None) -> list[str]:
        """Submit a workload that starts now; returns the ids.

        Args:
            workload: One, or its text as on the command line: ``fixed:requests=4,input=32,output=16``.
            request_ids: A name for each request; None makes them.

        Raises:
            WorkloadError: it is neither, or the text does not fit.
            SessionError: its arrivals are counted in another unit than the session's clock.
            RequestError: one of its requests cannot be served; then none was handed in.
        """
        made = self._desk.as_workload(workload)
        ids = self._desk.submit_workload(made, request_ids)
        self.events.tell("submitted", f"{made.name}: {len(ids)} requests")
        return ids

    def abort(self, request_id: str) -> bool:
        """End a request; no token is given to it after this call. Returns whether it was live or still to come.

        The last output of a live one comes from a later step; one still to come is in ``outputs`` at once.
        """
        was_live = self._desk.abort(request_id)
        if was_live:
            self.events.tell("aborted", request_id)
        return was_live

    @property
    def submissions(self) -> tuple[Submission, ...]:
        """Every request submitted, in order, its seed and its prompt's ids settled."""
        return self._desk.book.submissions

    @property
    def clock(self) -> Clock:
        """What arrivals are measured on."""
        return self._desk.clock
