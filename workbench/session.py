"""A session: one engine with a clock, arrivals to come, and everything that happened, driven at any grain.

``step_phase``, ``step`` and ``run`` go through the engine's one code path, so what is stepped is what is run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from engine.config import EngineConfig
from engine.controller import Border
from engine.engine import Engine, Failure
from engine.errors import RequestError
from engine.models.loader import LoadedModel
from engine.phases import Phase
from engine.policy import OrderPolicy, prefer_overlap
from engine.progress import CaptureBar
from engine.request import RequestOutput, SamplingParams
from tracing.analysis import summarise
from tracing.recorder import Recorder
from tracing.records import IterationRecord, RequestRecord, Span
from tracing.run_folder import write_run
from tracing.summary import Summary
from tracing.trace import Records, Trace
from workbench.arrivals import Arrivals, Submission
from workbench.book import Prompt, RequestBook, Wish, as_prompts, sampling_params
from workbench.clock import Clock, make_clock
from workbench.device_values import read_device_value
from workbench.documents import jsonable, request_dict
from workbench.environment import environment
from workbench.loading import load_for, session_config
from workbench.peek import SessionError as SessionError
from workbench.peek import as_phase, coming_phases
from workbench.report import RunView
from workbench.snapshot import RowView, Snapshot, row_view, take_snapshot
from workbench.watch import BorderWatch
from workbench.workloads import RequestSpec, Workload

_session_ids = itertools.count(1)


class Session:
    """One engine under a person's hands. Needs no notebook; close it, or use it in a ``with`` block.

    Args:
        model: A folder, a GGUF file, ``smollm2``, ``shape:NAME``, ``oracle``, or a model loaded before (two sessions
            may share one). None: ``smollm2``.
        mode: ``async`` or ``legacy``. None: the configuration's, which is ``async`` unless it says otherwise.
        config: Options of the engine.
        clock: What arrivals are measured on: ``virtual``, ``iterations`` or ``wall``; see :mod:`workbench.clock`.
        policy: May refuse overlap where it is legal.
        recorder: The instrument; None makes one that is on.
        progress: Show a bar while graphs are captured.
        **engine_options: Fields of :class:`engine.config.EngineConfig`; they win over ``config``.

    Raises:
        CheckpointError: the model cannot be loaded; for ``smollm2`` the message holds the command that installs it.
        ConfigError: an option is unknown or does not fit.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | None = None,
        mode: str | None = None,
        config: EngineConfig | None = None,
        *,
        clock: str = "virtual",
        policy: OrderPolicy = prefer_overlap,
        recorder: Recorder | None = None,
        progress: bool = False,
        **engine_options: Any,
    ) -> None:
        self.config = session_config(config, mode, engine_options)
        self.clock: Clock = make_clock(clock, lambda: self.engine.controller.next_index)
        self.recorder = recorder or Recorder(session_id=next(_session_ids))
        self.engine = Engine(
            load_for(self.config, model),
            self.config,
            recorder=self.recorder,
            policy=policy,
            progress=CaptureBar() if progress else None,
        )
        self._watch = BorderWatch(self.engine.controller.watch, is_inline=self.config.device == "inline")
        self.engine.controller.watch = self._watch
        self._arrivals = Arrivals()
        self._book = RequestBook(self.engine)

    # -- requests --------------------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        arrival: float | None = None,
        chat: bool = False,
        stream: bool = False,
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
            request_id: A name that was not used in this session; None makes one.
            **sampling: Fields of :class:`~engine.request.SamplingParams`, laid over ``params``.

        Returns:
            The request's id; for a list of prompts a list of ids.

        Raises:
            RequestError: it cannot be served; ``field`` names the fault. Of a list then none was handed in.
        """
        settled = sampling_params(params, sampling)
        prompts, is_many = as_prompts(prompt)
        if is_many and request_id is not None:
            raise RequestError("request_id names one request; leave it out for a list of prompts", field="request_id")
        when = self.clock.now() if arrival is None else arrival
        wishes = [
            Wish(
                spec=RequestSpec(prompt=one, params=settled, arrival=when, chat=chat, stream=stream),
                request_id=request_id,
            )
            for one in prompts
        ]
        ids = self._submit(wishes)
        return ids if is_many else ids[0]

    def submit_workload(self, workload: Workload) -> list[str]:
        """Submit a workload that starts now; returns the ids.

        Raises:
            SessionError: its arrivals are counted in another unit than the session's clock.
            RequestError: one of its requests cannot be served; then none was handed in.
        """
        if not workload.is_closed and workload.unit != self.clock.unit:
            fitting = "iterations" if workload.unit == "iterations" else "virtual"
            raise SessionError(
                f"workload {workload.name} counts arrivals in {workload.unit}, the session's {self.clock.name} clock "
                f"counts {self.clock.unit}; use clock={fitting!r}"
            )
        start = self.clock.now()
        return self._submit([Wish(spec=spec.after(start)) for spec in workload.requests])

    def _submit(self, wishes: Sequence[Wish]) -> list[str]:
        drafts = self._book.draft(wishes)
        for submission in drafts:
            self._enter(submission)
        return [submission.request_id for submission in drafts]

    def _enter(self, submission: Submission) -> None:
        self._book.enter(submission)
        if submission.arrival <= self.clock.now():
            self._book.hand_in(submission)
        else:
            self._arrivals.add(submission)

    def abort(self, request_id: str) -> bool:
        """End a request; no token is given to it after this call. Returns whether it was live or still to come.

        The last output of a live one comes from a later step; one still to come is in ``outputs`` at once.
        """
        coming = self._arrivals.remove(request_id)
        if coming is None:
            return self.engine.abort(request_id)
        self._book.withdraw(coming)
        return True

    @property
    def submissions(self) -> tuple[Submission, ...]:
        """Every request submitted, in order, its seed and its prompt's ids settled."""
        return self._book.submissions

    # -- driving ---------------------------------------------------------------------------------------------------

    def step_phase(self) -> Border | None:
        """Run one phase and stand still behind it; None when nothing is left to do.

        The iteration's times are void, and a virtual clock stands still.
        """
        if not self._ready():
            return None
        border = self.engine.step_phase()
        if border is not None and self.engine.in_hand is None:
            self._book.keep(border.iteration.outputs)
        return border

    def step(self) -> list[RequestOutput]:
        """Run one iteration, or finish the one in hand; returns its outputs, none when nothing is left to do."""
        if not self._ready():
            return []
        is_by_hand = self.engine.in_hand is not None
        begin_ns = time.perf_counter_ns()
        outputs = self.engine.step()
        if not is_by_hand:
            self.clock.ran(time.perf_counter_ns() - begin_ns)
        self._book.keep(outputs)
        return outputs

    def run(self, n: int | None = None) -> list[RequestOutput]:
        """Run ``n`` iterations, or until nothing is left to do; returns the requests that ended meanwhile.

        Raises:
            SessionError: ``n`` is negative.
        """
        if n is not None and n < 0:
            raise SessionError(f"run(n) takes a number of iterations, at least 0; got {n}")
        done: list[RequestOutput] = []
        for _ in itertools.count() if n is None else range(n):
            if self.finished:
                break
            done.extend(output for output in self.step() if output.finished)
        return done

    def capture(self, n: int | None = None) -> list[RequestOutput]:
        """Run ``n`` iterations, or until nothing is left to do, for a profiler that waits for the range ``capture``.

        At its end it waits for the device once, so that the profiler sees the work of the last iteration too.
        ``docs/metrics.md`` has the command lines; without a profiler this is :meth:`run`.

        Returns:
            The requests that ended meanwhile.

        Raises:
            MidIterationError: an iteration is in hand, and the profiler would see half of it.
            SessionError: ``n`` is negative.
        """
        self.engine.require_border("capture")
        with self.recorder.capture():
            done = self.run(n)
            self.engine.device.synchronize()
        return done

    def capture_button(self, n: int = 100) -> Any:
        """A button for the notebook that runs :meth:`capture`, beside a field for the number of iterations."""
        from workbench.capture_button import CaptureButton

        return CaptureButton(self, n).widget

    def run_until(self, predicate: Callable[[Session], object], *, limit: int = 10_000) -> int:
        """Run whole iterations until ``predicate(session)`` is true; an iteration in hand is finished first.

        Returns:
            The number of iterations it took, 0 if it was true at once.

        Raises:
            SessionError: it is not true after ``limit`` iterations, or when nothing is left to do.
        """
        if self.engine.in_hand is not None:
            self.step()
        for taken in range(limit + 1):
            if predicate(self):
                return taken
            if self.finished:
                raise SessionError(f"run_until: not true after {taken} iterations, and nothing is left to do")
            if taken < limit:
                self.step()
        raise SessionError(f"run_until: not true after {limit} iterations; raise limit if it takes longer")

    def run_to(self, phase: Phase | str, *, limit: int = 10_000) -> Snapshot:
        """Run on until just before ``phase``, and stand there; nothing runs if it stands there already.

        That is in the iteration in hand, or else in the next one that has the phase. Iterations without it run
        whole, and their times count. To stand before the first phase of an order is to stand between iterations.

        Args:
            phase: ``admit``, ``prepare``, ``forward``, ``sample``, ``resolve`` or ``emit``.
            limit: The most iterations to run through.

        Returns:
            What there is to see there.

        Raises:
            SessionError: no phase has that name, none comes within ``limit`` iterations, or nothing is left to do.
        """
        wanted = as_phase(phase)
        for _ in range(limit + 1):
            if not self._ready():
                raise SessionError(f"run_to: no {wanted.value} is to come, and nothing is left to do")
            coming = coming_phases(self.engine)
            if wanted in coming:
                for _ in range(coming.index(wanted)):
                    self.step_phase()
                return self.snapshot()
            self.step()
        raise SessionError(f"run_to: no {wanted.value} within {limit} iterations; raise limit if it takes longer")

    def _ready(self) -> bool:
        """Hand in what is due, between iterations only; an idle engine's clock jumps to the next arrival."""
        if self.engine.in_hand is None:
            self._hand_in_due(self.clock.now())
            if len(self._arrivals) and not self.engine.has_unfinished():
                when = self._arrivals.coming[0].arrival
                self.clock.skip_to(when)
                self._hand_in_due(when)
        return self.engine.has_unfinished()

    def _hand_in_due(self, now: float) -> None:
        for submission in self._arrivals.take_due(now):
            # An iteration was running when it came: that wait is part of its queue delay and TTFT.
            late_s = now - submission.arrival if self.clock.unit == "s" else 0.0
            self._book.hand_in(submission, late_ns=int(late_s * 1e9))

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do: every request has ended and none is to come."""
        return not len(self._arrivals) and not self.engine.has_unfinished()

    @property
    def mode(self) -> str:
        """The mode in force. Setting it drains the pending forward and goes on, from the next iteration border."""
        return self.engine.mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self.engine.set_mode(mode)

    # -- after a failure, starting over ----------------------------------------------------------------------------

    @property
    def last_failure(self) -> Failure | None:
        """What stopped the engine, with the phase it happened in; None once it was recovered or reset."""
        return self.engine.failure

    def recover(self) -> None:
        """Go on after a failed iteration; no token is lost or changed."""
        self.engine.recover()

    def reset(self) -> list[RequestOutput]:
        """Drop everything, in mid iteration too: requests, trace, counters, clock. Returns the aborted requests."""
        outputs = self.engine.reset()
        self._arrivals.clear()
        self._book.clear()
        self._watch.clear()
        self.recorder.clear()
        self.clock.reset()
        return outputs

    def restart(self) -> None:
        """Start over with the same requests, seeds and arrivals; an iteration in hand is discarded.

        A request submitted during the run arrives where the clock then stood. Aborts are not repeated, and the mode
        stays what it is.
        """
        submissions = self._book.submissions
        self.reset()
        for submission in submissions:
            self._enter(submission)

    def close(self) -> None:
        """Stop the engine's threads; what was recorded can still be read."""
        self.engine.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- looking ---------------------------------------------------------------------------------------------------

    @property
    def outputs(self) -> dict[str, RequestOutput]:
        """Each request that has arrived or ended, in order of submission: its last output, or what it has so far."""
        return self._book.outputs()

    def text(self, request_id: str) -> str:
        """The text a request has so far; empty before its first token.

        Raises:
            SessionError: no request of that name was submitted.
        """
        if request_id not in self._book:
            raise SessionError(f"there is no request {request_id!r} in this session")
        output = self._book.output(request_id)
        return "" if output is None else output.text

    def row(self, index: int) -> RowView:
        """What stands in a row of the request table now; IndexError if there is no such row."""
        return row_view(self.engine, index)

    def snapshot(self) -> Snapshot:
        """All there is to see at this border, as values that stay as they are. Reads nothing on the device."""
        return take_snapshot(self.engine, self.clock, self._arrivals.coming, self._watch.last)

    def read_device(self, name: str) -> Any:
        """Copy one of the device's tensors to the host: waits for the device, and so voids an iteration's times.

        Args:
            name: ``last_token``, ``block_table``, ``ints``, ``floats``, or ``logits`` of the pending forward.

        Returns:
            A numpy array.

        Raises:
            ConfigError: the name is unknown.
            SessionError: there is no such tensor now.
        """
        value = read_device_value(self.engine, name)
        if value is None:
            raise SessionError(f"there are no {name} to read: no forward is pending")
        self._watch.device_was_read(self.engine.in_hand)
        return value

    def spans(self) -> list[Span]:
        """The trace, by start."""
        return self.recorder.spans()

    def iterations(self) -> list[IterationRecord]:
        """One record an iteration, oldest first."""
        return self.recorder.iterations()

    def requests(self) -> list[RequestRecord]:
        """When things happened to each request that has arrived."""
        return self._book.records(self._watch)

    def summary(self) -> Summary:
        """All numbers of the session so far; ``docs/metrics.md`` defines them."""
        self._settle()
        return summarise(self.spans(), self.iterations(), self.requests())

    def run_view(self, name: str) -> RunView:
        """All that was recorded so far under a name, for :func:`~workbench.border_view.step_borders` and reports."""
        self._settle()
        return RunView(name, self.spans(), self.iterations(), self.requests(), self.resolved_config())

    @property
    def trace(self) -> Trace:
        """All that was recorded so far, as a value that stays as it is, with its tables: ``session.trace.phases``.

        Made anew at each call: keep it in a name to look at several of its tables.
        """
        self._settle()
        return Trace(
            name=self.mode,
            records=Records(spans=self.spans(), iterations=self.iterations(), requests=self.requests()),
            config=self.resolved_config(),
            environment=environment(),
            counters=self.engine.counters.to_dict(),
            outputs=[jsonable(request_dict(output)) for output in self.outputs.values()],
            lost_iterations=self.recorder.lost_iterations,
            device_clock_error_ns=self.engine.device.clock_error_ns,
        )

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write :attr:`trace` as a run folder, which ``workbench.load_run`` reads and ``workbench report`` shows.

        Args:
            folder: Where; made if it is missing.
            overwrite: Replace the run that stands there.

        Raises:
            MidIterationError: an iteration is in hand, and half of it would be missing.
            RunFolderError: the folder is in use.
        """
        self.engine.require_border("save")
        return write_run(self.trace, folder, overwrite=overwrite)

    def _settle(self) -> None:
        """At the end of a run, let the last copies' times be known."""
        if self.finished and self.last_failure is None and not self.engine.is_closed:
            self.engine.device.synchronize()

    def clear_trace(self) -> None:
        """Forget what was recorded so far.

        Raises:
            MidIterationError: an iteration is in hand, and half of it would be missing.
        """
        self.engine.require_border("clear_trace")
        self.recorder.clear()

    def resolved_config(self) -> dict[str, Any]:
        """The whole configuration, every automatic value settled."""
        return self.engine.resolved.to_dict()

    def __repr__(self) -> str:
        state = self.snapshot()
        return f"<Session {state.model} {state.mode} on {state.device}: {state.headline}>"

    def _repr_html_(self) -> str:
        return self.snapshot()._repr_html_()
