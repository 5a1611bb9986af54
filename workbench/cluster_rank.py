"""One rank of a cluster, where it runs: a session, and what is asked of it from outside, in plain values."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.controller import Border
from engine.parallel.log import to_rows
from engine.parallel.ranks import Ranks
from engine.request import RequestOutput
from tracing.trace import Trace
from workbench.cluster_place import Moved, Place, RequestLine
from workbench.expert_load import ExpertLoad
from workbench.session import Session


class RankEnd:
    """A rank's session. Each method is one call from outside; none is waited for by a person.

    Args:
        rank: From 0.
        size: How many there are.
        model: As for :class:`~workbench.session.Session`.
        options: More of its arguments.
        ranks: The connection; None: by the variables that ``torchrun`` would set.
    """

    def __init__(
        self, rank: int, size: int, model: Any, options: Mapping[str, Any], ranks: Ranks | None = None
    ) -> None:
        self.rank = rank
        self.session = Session(model, ranks=ranks, progress=False, **{**options, "expert_parallel": size})
        self._desk = self.session._desk

    # -- where it stands -------------------------------------------------------------------------------------------

    def place(self, ran: str | None = None) -> Place:
        """See :class:`Place`."""
        session, engine = self.session, self.session.engine
        current, phase, stop = engine.in_hand, engine.next_phase, session.stopped
        return Place(
            rank=self.rank,
            iteration=None if current is None else current.index,
            order=None if current is None else current.order.label,
            reason=None if current is None else current.reason.value,
            ran=ran,
            next_phase=None if phase is None else phase.value,
            begun=engine.controller.next_index,
            has_work=engine.has_unfinished(),
            is_settled=self._desk.is_settled,
            next_arrival=self._desk.next_arrival,
            mode=engine.mode,
            state="failed" if engine.failure is not None else engine.state.value,
            held=stop.text if stop is not None and stop.breakpoint is not None else None,
            num_waiting=engine.queue.num_waiting,
            num_live=engine.table.num_live,
        )

    # -- moves; all ranks make them at once ------------------------------------------------------------------------

    def begin(self, when: float | None = None) -> Moved:
        """Begin an iteration and stand before its first phase; nothing begins where nobody has work.

        Args:
            when: All jump to this time on the clock first, where all have run out of work.
        """
        self._jump(when)
        while self.session.begin_iteration() is None and not self._desk.is_settled:
            pass
        return Moved(self.place())

    def step_phase(self) -> Moved:
        """Run the phase before which the iteration in hand stands."""
        border: Border | None = self.session.step_phase()
        if border is None:
            return Moved(self.place())
        outputs = border.iteration.outputs if self.session.engine.in_hand is None else []
        return Moved(self.place(border.phase.value), tuple(one for one in outputs if one.finished))

    def run(self, n: int, when: float | None = None) -> Moved:
        """Run at most ``n`` iterations; fewer where all ranks run out of work."""
        self._jump(when)
        outcome = self.session.run(n)
        return Moved(self.place(), tuple(outcome))

    def _jump(self, when: float | None) -> None:
        if when is not None:
            self._desk.jump(when)

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, prompt: Any, options: Mapping[str, Any]) -> tuple[Any, Place]:
        """See :meth:`workbench.session.Session.submit`."""
        return self.session.submit(prompt, **options), self.place()

    def submit_workload(self, workload: Any) -> tuple[list[str], Place]:
        """See :meth:`workbench.session.Session.submit_workload`."""
        return self.session.submit_workload(workload), self.place()

    def abort(self, request_id: str) -> tuple[bool, Place]:
        """See :meth:`workbench.session.Session.abort`."""
        return self.session.abort(request_id), self.place()

    def requests(self) -> list[RequestLine]:
        """All that were submitted here, in order."""
        book, lines = self._desk.book, []
        for submission in self.session.submissions:
            request, output = book.request(submission.request_id), book.output(submission.request_id)
            ended = None if output is None else output.finish_reason
            lines.append(
                RequestLine(
                    rank=self.rank,
                    request_id=submission.request_id,
                    state=ended or ("to come" if request is None else request.state.value),
                    num_prompt=len(submission.prompt_ids),
                    num_output=0 if output is None else len(output.token_ids),
                    text="" if output is None else output.text,
                )
            )
        return lines

    def outputs(self) -> dict[str, RequestOutput]:
        """See :attr:`workbench.session.Session.outputs`."""
        return self.session.outputs

    # -- together, at a border -------------------------------------------------------------------------------------

    def set_mode(self, mode: str) -> Moved:
        """See :attr:`workbench.session.Session.mode`."""
        self.session.mode = mode
        return Moved(self.place())

    def pause(self) -> Moved:
        """Refuse to step until :meth:`resume`."""
        self.session.engine.pause()
        return Moved(self.place())

    def suspend(self, mode: str | None) -> Moved:
        """See :meth:`workbench.session.Session.suspend`."""
        self.session.suspend(mode)
        return Moved(self.place())

    def resume(self) -> Moved:
        """See :meth:`workbench.session.Session.resume`."""
        self.session.resume()
        return Moved(self.place())

    def load_weights(self, source: Any) -> Moved:
        """See :meth:`workbench.session.Session.load_weights`."""
        self.session.load_weights(source)
        return Moved(self.place())

    def reset(self) -> Moved:
        """See :meth:`workbench.session.Session.reset`."""
        outputs = self.session.reset()
        self.session.engine.fleet.ranks.log.clear()  # type: ignore[union-attr]
        return Moved(self.place(), tuple(outputs))

    # -- what was recorded -----------------------------------------------------------------------------------------

    def collectives(self) -> list[dict[str, Any]]:
        """What this rank did together with the others, as :func:`engine.parallel.log.to_rows` makes it."""
        engine = self.session.engine
        assert engine.fleet is not None
        if engine.failure is None:
            engine.device.synchronize()  # what is enqueued is on all ranks, and so comes to its end
        return to_rows(engine.fleet.ranks.log.entries())

    def trace(self) -> Trace:
        """See :attr:`workbench.session.Session.trace`."""
        return self.session.trace

    def expert_load(self) -> ExpertLoad:
        """See :meth:`workbench.session.Session.expert_load`."""
        return self.session.expert_load()

    def now_ns(self) -> int:
        """The clock that this rank's times are read on."""
        return time.perf_counter_ns()

    def close(self) -> None:
        """Leave the others."""
        self.session.close()


# -- in a process of its own -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call gave, or the error it raised, as text: error classes of the rank may not be known elsewhere."""

    value: Any = None
    error: str | None = None
    """One line."""
    kind: str = ""
    """Class of the error."""


_end: RankEnd | None = None
"""Of this process."""


def answer(name: str, *args: Any) -> Answer:
    """Call a method of this process' rank."""
    assert _end is not None, "no rank was made in this process"
    return answer_of(_end, name, *args)


def answer_of(end: RankEnd, name: str, *args: Any) -> Answer:
    """Call a method of ``end``; what it raises is told."""
    try:
        return Answer(getattr(end, name)(*args))
    except Exception as error:
        return Answer(None, " ".join(str(error).split()), type(error).__name__)


def look_around() -> tuple[str, str, int, int]:
    """This process' host by name and by address, a free port on it, and the process' number."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return socket.gethostname(), socket.getfqdn(), port, os.getpid()


def make_end(
    rank: int, size: int, address: str, port: int, threads: int | None, model: Any, options: Mapping[str, Any]
) -> Answer:
    """Make this process' rank; returns where it stands.

    Args:
        rank: From 0.
        size: How many there are; all are made at once, for they wait for one another.
        address: Of rank 0's host.
        port: A free one there.
        threads: For torch's operators; None: as many as it takes by itself.
        model: See :class:`RankEnd`.
        options: See :class:`RankEnd`.
    """
    global _end
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(port)}
    try:
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        _end = RankEnd(rank, size, model, options)
        return Answer(_end.place())
    except Exception as error:
        return Answer(None, " ".join(str(error).split()), type(error).__name__)
