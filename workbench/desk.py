"""Where a session's requests come in: checked when submitted, handed to the engine when their time comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.engine import Engine
from engine.errors import RankError, RequestError
from engine.request import Request, SamplingParams
from workbench.admissions import Admissions
from workbench.arrivals import Arrivals, ClosedLoop, Submission
from workbench.book import Prompt, RequestBook, Wish, as_prompts, sampling_params
from workbench.clock import Clock
from workbench.peek import SessionError
from workbench.states import StateBook
from workbench.workloads import RequestSpec, Workload, as_workload

NEVER = float("inf")
"""Arrival of a request that was aborted before it came, in a replay; and of the next one where none is to come."""
_TOPIC = "arrivals"
"""Under which ranks agree on the next arrival."""


class Desk:
    """The book of all requests, those still to come, and the clock their arrivals are measured on.

    Args:
        engine: Gets the requests.
        clock: Tells when.
        is_driven: Whether somebody runs the engine now.
    """

    def __init__(self, engine: Engine, clock: Clock, is_driven: Callable[[], bool]) -> None:
        self._engine = engine
        self._is_driven = is_driven
        self._held: list[tuple[Request, int]] = []
        """Handed in since the engine was driven last, and by how much each was late on the clock."""
        self._settled_naps = 0
        """With other ranks: for so many of the times that all ran out of work it was agreed what comes next."""
        self.clock = clock
        self.book = RequestBook(engine)
        self.arrivals = Arrivals(lambda: engine.live_ids)
        self.admissions = Admissions(engine.table)
        self.states = StateBook(engine, self.book.known_requests)

    def submit(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None,
        changes: Mapping[str, Any],
        *,
        arrival: float | None,
        chat: bool,
        stream: bool,
        cache_salt: str,
        request_id: str | None,
    ) -> tuple[list[str], bool]:
        """See :meth:`workbench.session.Session.submit`; the ids, and whether a list of prompts was given."""
        settled = sampling_params(params, changes)
        prompts, is_many = as_prompts(prompt)
        if is_many and request_id is not None:
            raise RequestError("request_id names one request; leave it out for a list of prompts", field="request_id")
        when = self.clock.now() if arrival is None else arrival
        specs = [
            RequestSpec(prompt=one, params=settled, arrival=when, chat=chat, stream=stream, cache_salt=cache_salt)
            for one in prompts
        ]
        return self._submit([Wish(spec=spec, request_id=request_id) for spec in specs]), is_many

    def submit_workload(self, workload: Workload, request_ids: Sequence[str] | None = None) -> list[str]:
        """See :meth:`workbench.session.Session.submit_workload`."""
        if not workload.is_closed and workload.unit != self.clock.unit:
            fitting = "iterations" if workload.unit == "iterations" else "virtual"
            raise SessionError(
                f"workload {workload.name} counts arrivals in {workload.unit}, the session's {self.clock.name} clock "
                f"counts {self.clock.unit}; use clock={fitting!r}"
            )
        workload.length_notes(self._engine.resolved.max_sequence_length)  # says what to do about prompts too long
        start = self.clock.now()
        loop = None if workload.concurrency is None else ClosedLoop(workload.concurrency)
        names: Sequence[str | None] = [None] * len(workload.requests) if request_ids is None else request_ids
        return self._submit(
            [
                Wish(spec=spec.after(start), request_id=name, loop=loop)
                for spec, name in zip(workload.requests, names, strict=True)
            ]
        )

    def as_workload(self, workload: Workload | str) -> Workload:
        """A workload, or what text describes, with ids of this engine's vocabulary.

        Raises:
            WorkloadError: it is neither, or the text does not fit.
        """
        return as_workload(workload, vocab_size=self._engine.loaded.vocab_size)

    def _submit(self, wishes: Sequence[Wish]) -> list[str]:
        drafts = self.book.draft(wishes)
        for submission in drafts:
            self.enter(submission)
        return [submission.request_id for submission in drafts]

    def enter(self, submission: Submission) -> None:
        """Take a checked request; it is handed in now or when it arrives, and ended if that is never."""
        self.book.enter(submission)
        if submission.arrival == NEVER:
            self.book.withdraw(submission)
        elif submission.loop is not None:
            self.arrivals.add(submission)
            self._hand_in_all([(one, 0) for one in self.arrivals.take_let_in(submission.loop)])
        elif submission.arrival <= self.clock.now():
            if self._is_at_rest:
                self._hand_in_due(self.clock.now())  # what came before it stands before it
            self._hand_in(submission)
        else:
            self.arrivals.add(submission)

    def abort(self, request_id: str) -> bool:
        """See :meth:`workbench.session.Session.abort`."""
        coming = self.arrivals.remove(request_id)
        if coming is None:
            return self._engine.abort(request_id)
        self.book.withdraw(coming)
        return True

    def ready(self) -> bool:
        """Hand in what is due, between iterations only; an idle engine's clock jumps to the next arrival.

        Where several ranks have run out of work they all jump, to the earliest arrival at any of them; this blocks
        until all have come here.

        Returns:
            Whether there is anything to do.
        """
        self._let_time_go_on()
        if self._engine.in_hand is None:
            self._agree_on_arrivals()
            self._hand_in_due(self.clock.now())
            first = None if self._engine.has_unfinished() else self.arrivals.first
            if first is not None:
                self.clock.skip_to(first.arrival)
                self._hand_in_due(first.arrival)
        return self._engine.has_unfinished()

    # -- among ranks -----------------------------------------------------------------------------------------------

    @property
    def is_settled(self) -> bool:
        """Whether this rank knows of the arrivals to come at others, as far as they bear on what it does next."""
        fleet = self._engine.fleet
        return fleet is None or fleet.naps == self._settled_naps

    @property
    def next_arrival(self) -> float | None:
        """On the clock, of what comes next by itself; None where nothing does."""
        first = self.arrivals.first
        return None if first is None else first.arrival

    def _agree_on_arrivals(self) -> None:
        """Once each time that all ranks have run out of work, which all of them find in the same iteration."""
        fleet = self._engine.fleet
        if fleet is None or self.is_settled:
            return
        self._settled_naps = fleet.naps
        own = np.array([NEVER if self.next_arrival is None else self.next_arrival], dtype=np.float64)
        theirs = fleet.ranks.agree(_TOPIC, self._engine.controller.next_index, own.view(np.int64).tolist())
        earliest = float(np.ascontiguousarray(theirs[:, 0]).view(np.float64).min())
        if earliest != NEVER:
            self.jump(earliest)

    def jump(self, when: float) -> None:
        """Be at this time on the clock, as all ranks are at once; one of them at least has a request that arrives then.

        Blocks until that one has handed it in.

        Raises:
            RankError: no rank has one.
        """
        self.clock.skip_to(when)
        self._hand_in_due(max(when, self.clock.now()))
        if not self._engine.wait_for_work(self._engine.config.rank_timeout_s):
            raise RankError(f"other ranks have work, and none said so within {self._engine.config.rank_timeout_s:g} s")

    @property
    def idle_s(self) -> float:
        """Real seconds for which there is nothing to do until the next arrival; 0 on clocks that jump to it."""
        first = None if self._engine.has_unfinished() else self.arrivals.first
        return 0.0 if first is None else self.clock.wait_s(first.arrival)

    def _hand_in_due(self, now: float) -> None:
        due = []
        for submission in self.arrivals.take_due(now):
            # An iteration was running when it came: that wait is part of its queue delay and TTFT. In a closed loop it
            # comes as another ends, between iterations.
            late_s = now - submission.arrival if self.clock.unit == "s" and submission.loop is None else 0.0
            due.append((submission, int(late_s * 1e9)))
        self._hand_in_all(due)

    def _hand_in_all(self, taken: Sequence[tuple[Submission, int]]) -> None:
        """Each with how late it is, in nanoseconds; who cannot enter waits at the door, and nobody is lost.

        One whose name was given to the engine itself meanwhile enters once that request has ended. Where one is refused
        for another reason, that is raised, and all behind it wait too.
        """
        live = self._engine.live_ids if taken else frozenset()
        kept = [submission for submission, _ in taken if submission.request_id in live]
        entering = [one for one in taken if one[0].request_id not in live]
        try:
            while entering:
                self._hand_in(*entering[0])
                del entering[0]
        finally:
            kept = sorted([*kept, *(submission for submission, _ in entering)], key=lambda one: one.number)
            for submission in reversed(kept):
                self.arrivals.put_back(submission)

    def _hand_in(self, submission: Submission, late_ns: int = 0) -> None:
        request = self.book.hand_in(submission, late_ns=late_ns)
        if self._is_at_rest:
            self._held.append((request, late_ns))

    @property
    def _is_at_rest(self) -> bool:
        """Whether no time passes for requests: nobody drives, and the clock stands still meanwhile.

        In mid iteration that is of no use to them: what stands still there is void, and so are they.
        """
        return self.clock.stands_still and self._engine.in_hand is None and not self._is_driven()

    def _let_time_go_on(self) -> None:
        """The engine is driven: what was handed in while nobody did arrives now, and not when a person submitted it."""
        now_ns = time.perf_counter_ns()
        for request, late_ns in self._held:
            if request.timings.admitted_ns is None and request.timings.finished_ns is None:
                request.timings = replace(request.timings, arrival_ns=now_ns - late_ns)
        self._held.clear()

    @property
    def finished(self) -> bool:
        """Whether every request has ended and none is to come, at other ranks neither."""
        return not len(self.arrivals) and not self._engine.has_unfinished() and self.is_settled

    def clear(self) -> None:
        """Forget all requests; the clock reads 0 again."""
        self.arrivals.clear()
        self._held.clear()
        self.book.clear()
        self.admissions.clear()
        self.states.clear()
        self.clock.reset()
