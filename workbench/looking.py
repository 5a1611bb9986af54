"""The part of a session that is looked at: what stands there now, why, and all that was recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import RequestOutput
from tracing.analysis import summarise
from tracing.recorder import Recorder
from tracing.records import IterationRecord, RequestRecord, Span
from tracing.run_folder import write_run
from tracing.summary import Summary
from tracing.trace import Records, Trace
from workbench.delays import Delays
from workbench.desk import Desk
from workbench.device_values import read_device_value
from workbench.documents import asked_dict, jsonable, request_dict
from workbench.environment import environment
from workbench.expert_load import ExpertCounter, ExpertLoad, not_counting_text
from workbench.explain import explain_request
from workbench.explain_order import explain_iteration
from workbench.history import ChangeRecorder, History
from workbench.peek import SessionError
from workbench.policies import Policies
from workbench.report import RunView
from workbench.snapshot import RowView, Snapshot, row_view, take_snapshot
from workbench.watch import BorderWatch

if TYPE_CHECKING:
    from workbench.figures import Figure


class Looking:
    """May be asked at any time, while the session runs too. Nothing here changes a schedule or a token."""

    config: EngineConfig
    engine: Engine
    recorder: Recorder
    _desk: Desk
    _watch: BorderWatch
    _changes: ChangeRecorder
    history: History
    _delays: Delays
    _policies: Policies
    _experts: ExpertCounter

    # -- now -------------------------------------------------------------------------------------------------------

    @property
    def outputs(self) -> dict[str, RequestOutput]:
        """Each request that has arrived or ended, in order of submission: its last output, or what it has so far."""
        return self._desk.book.outputs()

    def explain(self, what: str | int | None = None) -> str:
        """Why something is as it is, in a sentence or two.

        Args:
            what: A request's id: why it is where it is. An iteration's number: why it took its order, and what would
                have to change for another. None: the same of the iteration in hand, or of the one that would come next.

        Raises:
            SessionError: there is no such request or iteration.
        """
        if isinstance(what, str):
            return explain_request(self.engine, self._desk, what)
        return explain_iteration(self.engine, self.history, what)

    @property
    def record_changes(self) -> bool:
        """Whether what each phase reads and writes is recorded, for :attr:`history`.

        It costs tens of microseconds a phase (``docs/metrics.md``), voids times, and keeps the newest 256 iterations.
        """
        return self._watch.changes is not None

    @record_changes.setter
    def record_changes(self, wanted: bool) -> None:
        self._watch.changes = self._changes if wanted else None

    def text(self, request_id: str) -> str:
        """The text a request has so far; empty before its first token.

        Raises:
            SessionError: no request of that name was submitted.
        """
        if request_id not in self._desk.book:
            raise SessionError(f"there is no request {request_id!r} in this session")
        output = self._desk.book.output(request_id)
        return "" if output is None else output.text

    def row(self, index: int) -> RowView:
        """What stands in a row of the request table now; IndexError if there is no such row."""
        return row_view(self.engine, index, self._desk.admissions)

    def snapshot(self) -> Snapshot:
        """All there is to see at this border, as values that stay as they are. Reads nothing on the device."""
        desk = self._desk
        return take_snapshot(
            self.engine, desk.clock, desk.arrivals.coming, self._watch.last, desk.admissions, desk.states
        )

    def expert_load(self) -> ExpertLoad:
        """Tokens that each expert of each layer was sent, as far as the device has come.

        Raises:
            SessionError: the session does not count them.
        """
        load = self._experts.read()
        if load is None:
            raise SessionError(not_counting_text(self._experts, self.engine.loaded.name))
        return load

    def read_device(self, name: str) -> Any:
        """Copy one of the device's tensors to the host: waits for the device, and so voids an iteration's times.

        Args:
            name: ``last_token``, ``drafts``, ``block_table``, ``ints``, ``floats``, or ``logits`` of the pending
                forward.

        Returns:
            A numpy array.

        Raises:
            ConfigError: the name is unknown.
            SessionError: there is no such tensor now.
        """
        value = read_device_value(self.engine, name)
        if value is None:
            why = "no forward is pending" if name == "logits" else "speculative_tokens is 0"
            raise SessionError(f"there are no {name} to read: {why}")
        self._watch.device_was_read(self.engine.in_hand)
        return value

    # -- what was recorded -----------------------------------------------------------------------------------------

    def spans(self) -> list[Span]:
        """The trace, by start."""
        return self.recorder.spans()

    def iterations(self) -> list[IterationRecord]:
        """One record an iteration, oldest first."""
        return self.recorder.iterations()

    def requests(self) -> list[RequestRecord]:
        """When things happened to each request that has arrived."""
        return self._desk.book.records(self._watch)

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
            name=self._modes_text(),
            records=Records(spans=self.spans(), iterations=self.iterations(), requests=self.requests()),
            config=self.resolved_config(),
            environment=environment() | ({"delays_s": dict(delays_s)} if (delays_s := self._delays.recorded_s) else {}),
            workload={"name": "session", "clock": self._desk.clock.name},
            counters=self.engine.counters.to_dict(),
            outputs=[self._output_dict(output) for output in self.outputs.values()],
            lost_iterations=self.recorder.lost_iterations,
            device_clock_error_ns=self.engine.device.clock_error_ns,
        )

    def _modes_text(self) -> str:
        """The mode, or where it was switched all of them in order of their first iteration."""
        modes = dict.fromkeys(record.mode for record in self.iterations())
        return ", then ".join(modes) or self.engine.mode

    def figure(self, name: str, **options: Any) -> Figure:
        """Draw what was recorded so far: ``latency``, ``throughput``, ``hidden`` or ``bubbles``.

        Args:
            name: Which.
            **options: As for :func:`workbench.figures.make_figure`.

        Raises:
            FigureError: there is no such figure or option.
        """
        from workbench.figures import make_figure

        return make_figure(name, self.trace, **options)

    def _output_dict(self, output: RequestOutput) -> Mapping[str, Any]:
        submission = self._desk.book.submission(output.request_id)
        told: Mapping[str, Any] = jsonable({**request_dict(output), "asked": asked_dict(submission)})
        return told

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
        if self._desk.finished and self.engine.failure is None and not self.engine.is_closed:
            self.engine.device.synchronize()

    def clear_trace(self) -> None:
        """Forget what was recorded so far.

        Raises:
            MidIterationError: an iteration is in hand, and half of it would be missing.
        """
        self.engine.require_border("clear_trace")
        self.recorder.clear()
        self._delays.clear()

    def resolved_config(self) -> dict[str, Any]:
        """The whole configuration, every automatic value settled, and the policies by name."""
        return {
            **self.engine.resolved.to_dict(),
            **replace(self._policies, order=self.engine.controller.policy).to_dict(),
        }

    def __repr__(self) -> str:
        state = self.snapshot()
        return f"<Session {state.model} {state.mode} on {state.device}: {state.headline}>"

    def _repr_html_(self) -> str:
        return self.snapshot()._repr_html_()
