"""Several ranks that share a model's experts, driven together from one place: a notebook, a terminal or a test.

Each rank is a :class:`~workbench.session.Session` of its own, in a process of its own or in a thread of this one. They
are always moved together, so that none waits for another while a person looks (:mod:`workbench.cluster_stepper`); what
is looked at is in :mod:`workbench.cluster_looking`.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from engine.config import EngineConfig, check_mode
from engine.request import RequestOutput
from workbench.cluster_asking import Asking
from workbench.cluster_links import ClusterError as ClusterError
from workbench.cluster_links import connect_processes, connect_threads
from workbench.cluster_looking import ClusterLooking
from workbench.cluster_stepper import are_between, held_text, is_over, jump_to, next_ranks
from workbench.cluster_views import Places
from workbench.progress import waiting_line
from workbench.stops import RunOutcome, Stop, StopCause

_MOST_ROUND = 32
"""Iterations that ranks run by themselves, at most, before they are asked again."""
_ROUND_S = 0.5
"""They are so many that they take about as long: a person may interrupt a run in between."""
_START_S = 180.0


class Cluster(ClusterLooking):
    """Ranks under a person's hands. Close it, or use it in a ``with`` block.

    Args:
        model: As for :class:`~workbench.session.Session`; each rank loads its part.
        ranks: How many; each holds an equal part of every layer's experts.
        in_process: Make them threads of this process: nothing is started, a debugger sees all of them, and they share
            one interpreter, so that times mean little.
        launcher: For processes, an engine launcher of ipyparallel by class or name (``"mpi"``, ``"slurm"``, ``"ssh"``);
            None: processes of this machine.
        limit_s: How long a rank may take for one answer, beside ``rank_timeout_s``; a run is asked every few
            iterations.
        progress: Show, in a notebook or on a terminal, how long the ranks have been starting.
        **options: Of every rank's session and engine, such as ``mode``, ``clock``, ``device``, ``expert_load``.

    Raises:
        ClusterError: a rank cannot be made; one line that names it.
    """

    def __init__(
        self,
        model: Any = "shipped",
        *,
        ranks: int = 2,
        in_process: bool = False,
        launcher: Any = None,
        limit_s: float = 60.0,
        progress: bool = True,
        **options: Any,
    ) -> None:
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 2:
            raise ClusterError(f"ranks must be a whole number, at least 2 (one rank is a Session); got {ranks!r}")
        config = options.get("config") or EngineConfig()
        timeout_s = options.get("rank_timeout_s", config.rank_timeout_s)
        self.size = ranks
        with waiting_line(f"starting {ranks} ranks", wanted=progress):
            connection = (
                connect_threads(ranks, model, options, timeout_s, _START_S)
                if in_process
                else connect_processes(ranks, model, options, launcher, _START_S)
            )
        self._asking = Asking(connection, limit_s + timeout_s)
        self._number = 0
        """Of the next request that brings no name."""

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(self, prompt: Any, *, rank: int = 0, request_id: str | None = None, **params: Any) -> Any:
        """Hand in a request at one rank; any time. It is named for its rank unless it brings a name.

        Args:
            prompt: See :meth:`workbench.session.Session.submit`; also a list of prompts.
            rank: Whose request it is: who keeps its caches and samples its tokens. Experts are everybody's.
            request_id: Its name.
            **params: Sampling parameters, and ``arrival``, ``chat``, ``stream``, ``cache_salt``.

        Raises:
            ClusterError: the rank refuses it; or there is no such rank.
        """
        self._check_rank(rank)
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            return [self.submit(one, rank=rank, request_id=request_id, **params) for one in prompt]
        if request_id is None:
            request_id, self._number = f"r{rank}-{self._number}", self._number + 1
        return self._tell(rank, "submit", prompt, {**params, "request_id": request_id})

    def submit_workload(self, workload: Any, *, rank: int = 0) -> list[str]:
        """Submit a workload that starts now at one rank; see :meth:`workbench.session.Session.submit_workload`."""
        return list(self._tell(self._check_rank(rank), "submit_workload", workload))

    def abort(self, request_id: str, *, rank: int = 0) -> bool:
        """End a request of a rank; see :meth:`workbench.session.Session.abort`."""
        return bool(self._tell(self._check_rank(rank), "abort", request_id))

    def _tell(self, rank: int, method: str, *args: Any) -> Any:
        ((found, place),) = self._asking.ask(method, *args, ranks=[rank])
        self._asking.take([place])
        return found

    # -- driving ---------------------------------------------------------------------------------------------------

    def step_phase(self) -> Places:
        """Run the next phase, on as many ranks as can run theirs without waiting for another; at a meeting on all.

        Between iterations it begins one on all ranks first. Nothing happens where nothing is left to do.

        Returns:
            Where all stand then; ``ran`` names the phase that a rank has run.
        """
        self._run_phase()
        return self.places

    def _run_phase(self) -> list[RequestOutput]:
        if not self._begin():
            return []
        ranks = next_ranks(self.places)
        self._asking.take([replace(place, ran=None) for place in self.places])
        return self._asking.move("step_phase", ranks=ranks)

    def _begin(self) -> bool:
        """Have an iteration in hand on all ranks; False where nothing is left to do, or a breakpoint holds one."""
        if not are_between(self.places):
            return True
        if is_over(self.places):
            return False
        self._asking.move("begin", jump_to(self.places))
        return not are_between(self.places) and held_text(self.places) is None

    def step(self) -> list[RequestOutput]:
        """Run one iteration on all ranks, or finish the one in hand; returns the last outputs of what ended.

        A breakpoint at a rank holds all of them; :attr:`places` says why.
        """
        if self._goes_by_phases:
            return self._run_by_phases()
        return [] if is_over(self.places) else self._asking.move("run", 1, jump_to(self.places))

    @property
    def _goes_by_phases(self) -> bool:
        """Whether a rank stands in mid iteration, or a breakpoint might hold it: then none may go ahead."""
        ends = self._asking.connection.ends
        return not are_between(self.places) or any(one.enabled for end in ends for one in end.session.breakpoints)

    def _run_by_phases(self) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        while True:
            outputs += self._run_phase()
            if are_between(self.places) or held_text(self.places) is not None:
                return outputs

    def run(self, n: int | None = None) -> RunOutcome:
        """Run ``n`` iterations on all ranks, or until nothing is left to do at any.

        An interrupt ends it behind some iteration; what ended till then is in :attr:`outputs`.

        Returns:
            The requests that ended, and why it stopped.

        Raises:
            ClusterError: a rank failed, died or did not answer.
        """
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 0):
            raise ClusterError(f"run(n) takes a number of iterations, at least 0; got {n!r}")
        outcome, round_ = RunOutcome(), 1
        while outcome.iterations != n and not self.finished:
            begun, was_in_hand = self.places[0].begun, not are_between(self.places)
            if self._goes_by_phases:
                outcome.extend(self._run_by_phases())
            else:
                begin_s = time.monotonic()
                count = round_ if n is None else min(round_, n - outcome.iterations)
                outcome.extend(self._asking.move("run", count, jump_to(self.places)))
                is_short = time.monotonic() - begin_s < _ROUND_S / 2
                round_ = min(2 * round_, _MOST_ROUND) if is_short else max(1, round_ // 2)
            held = held_text(self.places)
            if held is not None:
                return self._stop(outcome, StopCause.BREAKPOINT, held)
            outcome.iterations += self.places[0].begun - begun + was_in_hand
        if self.finished:
            return self._stop(outcome, StopCause.FINISHED, "nothing is left to do at any rank")
        return self._stop(outcome, StopCause.COUNT, f"ran {n} iteration{'' if n == 1 else 's'}")

    def _stop(self, outcome: RunOutcome, cause: StopCause, text: str) -> RunOutcome:
        first = self.places[0]
        outcome.stopped = Stop(
            cause=cause, text=text, iteration=first.iteration, phase=first.next_phase, iterations_begun=first.begun
        )
        return outcome

    def run_until_done(self) -> RunOutcome:
        """:meth:`run` until nothing is left to do at any rank."""
        return self.run()

    # -- together, at a border -------------------------------------------------------------------------------------

    def _at_border(self, what: str, *args: Any) -> None:
        if not are_between(self.places):
            raise ClusterError(f"{what} needs an iteration border on all ranks; finish the one in hand with step()")
        self._asking.move(what, *args)

    @property
    def mode(self) -> str:
        """The mode in force. Setting it drains pending forwards and goes on, from the next border, on all ranks."""
        return self.places[0].mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._asking.move("set_mode", check_mode(mode))

    def pause(self) -> None:
        """Refuse to step, on all ranks, until :meth:`resume`."""
        self._at_border("pause")

    def suspend(self, mode: str | None = None) -> None:
        """Give memory of the devices back until :meth:`resume`; see :meth:`engine.engine.Engine.suspend`."""
        self._at_border("suspend", mode)

    def resume(self) -> None:
        """Run again after :meth:`pause` or :meth:`suspend`."""
        self._at_border("resume")

    def load_weights(self, source: str | Path) -> None:
        """Copy new weights into the suspended ranks; see :meth:`engine.engine.Engine.load_weights`."""
        self._at_border("load_weights", str(source))

    def reset(self) -> list[RequestOutput]:
        """Drop everything on all ranks, accounts of collectives too; returns the aborted requests.

        An iteration in hand is run to its end first: ranks can leave it only together.
        """
        if not are_between(self.places):
            self._run_by_phases()
        return self._asking.move("reset")

    # -- end -------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<Cluster of {self.size} ranks: {self._state_text()}>"

    def _repr_html_(self) -> str:
        return f"<div>{self.size} ranks: {self._state_text()}</div>{self.places._repr_html_()}"

    def _state_text(self) -> str:
        if self._asking.is_closed:
            return "closed"
        return "nothing left to do" if self.finished else "ready to run"

    def close(self) -> None:
        """End the ranks, whatever they do."""
        self._asking.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
