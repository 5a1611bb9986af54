"""One workload served to its end, and all that is to be told of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from engine.request import RequestOutput
from tracing.records import IterationRecord, RequestRecord, Span
from tracing.summary import Summary
from tracing.trace import Records, Trace
from workbench.arrivals import Submission
from workbench.documents import asked_dict, jsonable, request_dict
from workbench.environment import environment
from workbench.report import RunView
from workbench.session import Session
from workbench.workloads import Workload

OnOutput = Callable[[RequestOutput], None]


@dataclass(frozen=True)
class Run:
    """A finished run."""

    name: str
    workload: Workload
    clock: str
    config: Mapping[str, Any]
    """The whole resolved configuration."""
    outputs: tuple[RequestOutput, ...]
    """In the order of the workload."""
    submissions: tuple[Submission, ...]
    """What was asked for, in that order."""
    requests: tuple[RequestRecord, ...]
    spans: tuple[Span, ...]
    iterations: tuple[IterationRecord, ...]
    counters: Mapping[str, Any]
    lost_iterations: int
    """Of them no record is left, because the recorder's ring was full."""
    wall_s: float
    """From the first iteration's begin to the last one's end, by the caller's clock."""
    device_clock_error_ns: int | None = None
    """Bound on how far device times are off the host's clock; None where they are taken on it."""
    delays_s: Mapping[str, float] = field(default_factory=dict)
    """What :meth:`workbench.session.Session.delayed` made longer meanwhile."""

    @cached_property
    def summary(self) -> Summary:
        """Its numbers."""
        return self.view.summary

    @cached_property
    def view(self) -> RunView:
        """As the report shows it."""
        return RunView(
            name=self.name,
            spans=self.spans,
            iterations=self.iterations,
            requests=self.requests,
            config=self.config,
        )

    @cached_property
    def trace(self) -> Trace:
        """As it is saved, with tables of all that was recorded."""
        return Trace(
            name=self.name,
            records=Records(spans=self.spans, iterations=self.iterations, requests=self.requests),
            config=self.config,
            environment=environment() | ({"delays_s": dict(self.delays_s)} if self.delays_s else {}),
            workload={**self.workload.to_dict(), "clock": self.clock},
            counters=self.counters,
            outputs=[
                jsonable({**request_dict(output), "asked": asked_dict(submission)})
                for output, submission in zip(self.outputs, self.submissions, strict=True)
            ],
            lost_iterations=self.lost_iterations,
            device_clock_error_ns=self.device_clock_error_ns,
        )

    def _request_dict(self, output: RequestOutput) -> dict[str, Any]:
        """What came of one request; its drafts only where it had any."""
        record = next((one for one in self.requests if one.request_id == output.request_id), None)
        plain = request_dict(output)
        if record is None or not record.drafts_proposed:
            return plain
        return {
            **plain,
            "drafts": {"proposed": list(record.drafts_proposed), "accepted": list(record.drafts_accepted)},
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: config, every request, metrics and counters."""
        return {
            "name": self.name,
            "clock": self.clock,
            "config": dict(self.config),
            "requests": [self._request_dict(output) for output in self.outputs],
            "metrics": self.summary.to_dict(),
            "counters": dict(self.counters),
            "lost_iterations": self.lost_iterations,
            "wall_s": self.wall_s,
        }


def serve(
    session: Session,
    workload: Workload,
    *,
    name: str,
    on_output: OnOutput | None = None,
    request_ids: Sequence[str] | None = None,
) -> Run:
    """Serve ``workload`` to its end in a session where nothing ran yet.

    Args:
        session: Stays open.
        workload: Starts now.
        name: What the run is called in tables.
        on_output: Called with every output as it comes.
        request_ids: Names of the requests; None makes them.
    """
    ids = session.submit_workload(workload, request_ids=request_ids)
    begin = time.perf_counter()
    while not session.finished:
        for output in session.step():
            if on_output is not None:
                on_output(output)
    wall_s = time.perf_counter() - begin
    session.engine.device.synchronize()
    outputs, asked = session.outputs, {one.request_id: one for one in session.submissions}
    return Run(
        name=name,
        workload=workload,
        clock=session.clock.name,
        config=session.resolved_config(),
        outputs=tuple(outputs[request_id] for request_id in ids),
        submissions=tuple(asked[request_id] for request_id in ids),
        requests=tuple(session.requests()),
        spans=tuple(session.spans()),
        iterations=tuple(session.iterations()),
        counters=session.engine.counters.to_dict(),
        lost_iterations=session.recorder.lost_iterations,
        wall_s=wall_s,
        device_clock_error_ns=session.engine.device.clock_error_ns,
        delays_s=dict(session._delays.recorded_s),
    )


def document(command: str, workload: Workload, **parts: Any) -> dict[str, Any]:
    """The one JSON document of a command."""
    return {"command": command, "environment": environment(), "workload": workload.to_dict(), **parts}
