"""A session: one engine with a clock, arrivals to come, and everything that happened, driven at any grain.

``step_phase``, ``step`` and ``run`` go through the engine's one code path, so what is stepped is what is run.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from engine.config import EngineConfig
from engine.controller import Border
from engine.engine import Engine, Failure
from engine.errors import ConfigError, EngineError, RequestError
from engine.intake import Intake
from engine.models.loader import LoadedModel, load_model
from engine.policy import OrderPolicy, prefer_overlap
from engine.progress import CaptureBar
from engine.request import Request, RequestOutput, RequestTimings, SamplingParams
from tracing.analysis import summarise
from tracing.recorder import Recorder
from tracing.records import IterationRecord, RequestRecord, Span
from tracing.summary import Summary
from workbench.arrivals import Arrivals, Submission
from workbench.clock import Clock, make_clock
from workbench.device_values import read_device_value
from workbench.snapshot import RowView, Snapshot, row_view, take_snapshot
from workbench.watch import BorderWatch
from workbench.workloads import Workload

DEFAULT_MODEL = "smollm2"
"""What ``Session()`` loads until a model ships with the package."""

Prompt = str | Sequence[int]
_session_ids = itertools.count(1)


class SessionError(EngineError, RuntimeError):
    """A session cannot do what it was asked; the message says why and what would help."""


class Session:
    """One engine under a person's hands. Needs no notebook; close it, or use it in a ``with`` block.

    Args:
        model: A folder, a GGUF file, ``smollm2``, ``shape:NAME``, ``oracle``, or a model loaded before (two sessions
            may share one). None loads :data:`DEFAULT_MODEL`.
        mode: ``async`` or ``legacy``. None: the configuration's, ``async`` unless it says otherwise.
        config: Options of the engine.
        clock: What arrivals are measured on; see :mod:`workbench.clock`.
        policy: May refuse overlap where it is legal.
        progress: Show a bar while graphs are captured.
        engine_options: Fields of :class:`engine.config.EngineConfig`; they win over ``config``.

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
        progress: bool = False,
        **engine_options: Any,
    ) -> None:
        self.config = session_config(config, mode, engine_options)
        make_clock(clock, lambda: 0)  # a wrong name should not cost a model load
        loaded = model if isinstance(model, LoadedModel) else load_for(self.config, model)
        self.recorder = Recorder(session_id=next(_session_ids))
        self.engine = Engine(
            loaded,
            self.config,
            recorder=self.recorder,
            policy=policy,
            progress=CaptureBar() if progress else None,
        )
        self.clock: Clock = make_clock(clock, lambda: self.engine.controller.next_index)
        self._watch = BorderWatch(self.engine.controller.watch, is_inline=self.config.device == "inline")
        self.engine.controller.watch = self._watch
        self._intake = Intake(self.engine.resolved, loaded.tokenizer)
        self._arrivals = Arrivals()
        self._submissions: list[Submission] = []
        self._names: set[str] = set()
        self._requests: dict[str, Request] = {}
        self._outputs: dict[str, RequestOutput] = {}

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
        """Hand in one request or several. Allowed at any time; in mid iteration it is admitted by a later one.

        Args:
            prompt: Text or token ids, or a list of such prompts.
            params: How to sample; ``sampling`` gives or changes its fields, such as ``max_tokens=64``.
            arrival: When it arrives on the session's clock; None: now.
            chat: The prompt is what a user says; the model's chat template is put around it.
            stream: Make text at every token, so that it can be read while it grows.
            request_id: A name that was not used in this session; None makes one.

        Returns:
            The request's id; for a list of prompts a list of ids.

        Raises:
            RequestError: it cannot be served; ``field`` names the fault. Of a list then none was handed in.
        """
        params = _sampling_params(params, sampling)
        prompts, is_many = _as_prompts(prompt)
        if is_many and request_id is not None:
            raise RequestError("request_id names one request; leave it out for a list of prompts", field="request_id")
        made = [
            self._submission(one, params, arrival, chat, stream, request_id, len(self._submissions) + index)
            for index, one in enumerate(prompts)
        ]
        for submission in made:
            self._accept(submission)
        return [submission.request_id for submission in made] if is_many else made[0].request_id

    def submit_workload(self, workload: Workload) -> list[str]:
        """Submit a workload that starts now; returns the ids.

        Raises:
            SessionError: its arrivals are measured in another unit than the session's clock.
            RequestError: one of its requests cannot be served; then none was handed in.
        """
        if not workload.is_closed and workload.unit != self.clock.unit:
            fitting = "iterations" if workload.unit == "iterations" else "virtual"
            raise SessionError(
                f"workload {workload.name} counts arrivals in {workload.unit} and the session's clock counts "
                f"{self.clock.unit}; make the session with clock={fitting!r}"
            )
        start, first = self.clock.now(), len(self._submissions)
        made = [
            self._submission(spec.prompt, spec.params, start + spec.arrival, spec.chat, spec.stream, None, first + n)
            for n, spec in enumerate(workload.requests)
        ]
        for submission in made:
            self._accept(submission)
        return [submission.request_id for submission in made]

    def abort(self, request_id: str) -> bool:
        """End a request; no token is given to it after this call. Returns whether it was live or still to come."""
        coming = self._arrivals.remove(request_id)
        if coming is None:
            return self.engine.abort(request_id)
        self._submissions.remove(coming)
        self._outputs[request_id] = _never_arrived(coming)
        return True

    def _submission(
        self,
        prompt: Prompt,
        params: SamplingParams,
        arrival: float | None,
        chat: bool,
        stream: bool,
        request_id: str | None,
        number: int,
    ) -> Submission:
        """Check a request now, whenever it arrives."""
        request_id = request_id if request_id is not None else f"request-{number}"
        if request_id in self._names:
            raise RequestError(f"request_id {request_id!r} was used in this session; take another", field="request_id")
        if arrival is not None and not 0 <= arrival < float("inf"):
            raise RequestError(f"arrival must be a time of at least 0 on the clock, got {arrival!r}", field="arrival")
        checked = self._intake.check(
            self._chat_ids(prompt) if chat else prompt,
            params,
            key=number,
            request_id=request_id,
            stream=stream,
            iteration=self.engine.controller.next_index,
            live=(),
        )
        return Submission(
            number=number,
            request_id=request_id,
            prompt_ids=checked.prompt_ids,
            params=params.replace(seed=checked.seed),
            arrival=self.clock.now() if arrival is None else arrival,
            stream=stream,
        )

    def _chat_ids(self, prompt: Prompt) -> Sequence[int]:
        tokenizer = self.engine.loaded.tokenizer
        if tokenizer is None or not isinstance(prompt, str):
            raise RequestError("chat=True needs a text prompt and a model with a tokenizer", field="chat")
        return tokenizer.encode(tokenizer.chat([{"role": "user", "content": prompt}]), add_special=False)

    def _accept(self, submission: Submission) -> None:
        self._names.add(submission.request_id)
        self._submissions.append(submission)
        if submission.arrival <= self.clock.now():
            self._hand_in(submission)
        else:
            self._arrivals.add(submission)

    def _hand_in(self, submission: Submission) -> None:
        self.engine.add_request(
            submission.prompt_ids, submission.params, request_id=submission.request_id, stream=submission.stream
        )
        self._requests[submission.request_id] = self.engine.queue.waiting[-1]

    # -- driving ---------------------------------------------------------------------------------------------------

    def step_phase(self) -> Border | None:
        """Run one phase and stand still behind it; None when nothing is left to do.

        The iteration's times are void, and a virtual clock stands still.
        """
        if not self._ready():
            return None
        border = self.engine.step_phase()
        if border is not None and self.engine.in_hand is None:
            self._keep(border.iteration.outputs)
        return border

    def step(self) -> list[RequestOutput]:
        """Run one iteration, or finish the one in hand; returns its outputs, none when nothing is left to do."""
        if not self._ready():
            return []
        by_hand = self.engine.in_hand is not None
        begin_ns = time.perf_counter_ns()
        outputs = self.engine.step()
        if not by_hand:
            self.clock.ran(time.perf_counter_ns() - begin_ns)
        self._keep(outputs)
        return outputs

    def run(self, n: int | None = None) -> list[RequestOutput]:
        """Run ``n`` iterations, or until nothing is left to do; returns the requests that finished meanwhile."""
        if n is not None and n < 0:
            raise SessionError(f"run(n) takes a number of iterations of at least 0, got {n}")
        done: list[RequestOutput] = []
        for _ in itertools.count() if n is None else range(n):
            if self.finished:
                break
            done.extend(output for output in self.step() if output.finished)
        return done

    def run_until(self, predicate: Callable[[Session], object], *, limit: int = 10_000) -> int:
        """Run whole iterations until ``predicate(session)`` is true; an iteration in hand is finished first.

        Returns:
            The number of iterations it took, 0 if it was true at once.

        Raises:
            SessionError: it is not true after ``limit`` iterations, or when nothing is left to do.
        """
        for taken in range(limit + 1):
            if self.engine.in_hand is None and predicate(self):
                return taken
            if self.finished:
                raise SessionError(f"run_until: nothing is left to do after {taken} iterations and it is not true yet")
            if taken < limit:
                self.step()
        raise SessionError(f"run_until: it is not true after {limit} iterations; raise limit if it needs more")

    def _ready(self) -> bool:
        """Hand in what is due, at a border only; an idle engine's clock jumps to the next arrival."""
        if self.engine.in_hand is None:
            for submission in self._arrivals.take_due(self.clock.now()):
                self._hand_in(submission)
            if len(self._arrivals) and not self.engine.has_unfinished():
                when = self._arrivals.coming[0].arrival
                self.clock.skip_to(when)
                for submission in self._arrivals.take_due(when):
                    self._hand_in(submission)
        return self.engine.has_unfinished()

    def _keep(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            self._outputs[output.request_id] = output

    @property
    def submissions(self) -> tuple[Submission, ...]:
        """Every request submitted, as it was, in order."""
        return tuple(self._submissions)

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
        self._submissions.clear()
        self._forget()
        return outputs

    def restart(self) -> None:
        """Start over with the same requests, seeds and arrivals; an iteration in hand is discarded.

        Requests submitted in the middle arrive where the clock then stood. Aborts are not repeated, and the mode
        stays what it is.
        """
        submissions = list(self._submissions)
        self.reset()
        for submission in submissions:
            self._accept(submission)

    def _forget(self) -> None:
        self._names.clear()
        self._requests.clear()
        self._outputs.clear()
        self._watch.clear()
        self.recorder.clear()
        self.clock.reset()

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
        """Every request that has arrived, in the order they did: its last output, or what it has so far."""
        found = {request_id: self._output(request) for request_id, request in self._requests.items()}
        return found | {name: output for name, output in self._outputs.items() if name not in found}

    def _output(self, request: Request) -> RequestOutput:
        output = self._outputs.get(request.request_id)
        return output if output is not None and output.finished else self._so_far(request)

    def _so_far(self, request: Request) -> RequestOutput:
        params = request.params
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_ids,
            token_ids=tuple(request.output_ids),
            text=request.text if request.stream else self._text_of(request),
            new_token_ids=(),
            new_text="",
            finish_reason=None,
            stop_reason=None,
            logprobs=tuple(request.logprobs) if params.logprobs is not None else None,
            prompt_logprobs=tuple(request.prompt_logprobs) if params.prompt_logprobs is not None else None,
            timings=request.timings,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _text_of(self, request: Request) -> str:
        tokenizer = self.engine.loaded.tokenizer
        if tokenizer is None or not request.params.detokenize:
            return ""
        return tokenizer.decode(request.output_ids)

    def text(self, request_id: str) -> str:
        """The text a request has so far; empty before its first token.

        Raises:
            SessionError: no request of that name was submitted.
        """
        if request_id not in self._names:
            raise SessionError(f"no request {request_id!r} in this session")
        output = self.outputs.get(request_id)
        return "" if output is None else output.text

    def row(self, index: int) -> RowView:
        """What stands in a row of the request table now.

        Raises:
            IndexError: there is no such row.
        """
        return row_view(self.engine, index)

    def snapshot(self) -> Snapshot:
        """Everything there is to see at this border, as values that stay as they are. Reads nothing on the device."""
        return take_snapshot(self.engine, self.clock, self._arrivals.coming)

    def read_device(self, name: str) -> Any:
        """Copy one of the device's tensors to the host: waits for the device, and so voids an iteration's times.

        Args:
            name: ``last_token``, ``block_table``, ``ints``, ``floats``, or ``logits`` of the pending forward.

        Returns:
            A numpy array.

        Raises:
            SessionError: there is no such tensor now.
        """
        value = read_device_value(self.engine, name)
        if value is None:
            raise SessionError(f"there is no {name} to read now: no forward is pending")
        self._watch.device_was_read(self.engine.in_hand)
        return value

    def spans(self) -> list[Span]:
        """The trace, by start."""
        return self.recorder.spans()

    def iterations(self) -> list[IterationRecord]:
        """One record a finished iteration, oldest first."""
        return self.recorder.iterations()

    def requests(self) -> list[RequestRecord]:
        """When things happened to each request that has arrived."""
        return [self._record(request) for request in self._requests.values()]

    def _record(self, request: Request) -> RequestRecord:
        timings, output = request.timings, self._outputs.get(request.request_id)
        return RequestRecord(
            request_id=request.request_id,
            arrival_ns=timings.arrival_ns,
            admitted_ns=timings.admitted_ns,
            first_token_ns=timings.first_token_ns,
            finished_ns=timings.finished_ns,
            token_times_ns=self._watch.token_times(request),
            num_prompt_tokens=len(request.prompt_ids),
            num_output_tokens=len(request.output_ids),
            finish_reason=output.finish_reason if output is not None else None,
        )

    def summary(self) -> Summary:
        """All numbers of the session so far; ``docs/metrics.md`` defines them."""
        if self.engine.pending is None and self.engine.failure is None:
            self.engine.device.synchronize()  # idle, or about to be: the last copies' times are then known
        return summarise(self.spans(), self.iterations(), self.requests())

    def clear_trace(self) -> None:
        """Forget what was recorded, between iterations.

        Raises:
            MidIterationError: an iteration is in hand.
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


def session_config(config: EngineConfig | None, mode: str | None, options: Mapping[str, Any]) -> EngineConfig:
    """``config`` with ``options`` and ``mode`` laid over it.

    Raises:
        ConfigError: an option is unknown, or mode is given twice.
    """
    if mode is not None and "mode" in options:
        raise ConfigError("mode is given twice")
    changes = {**options, **({} if mode is None else {"mode": mode})}
    return EngineConfig.from_mapping({**(config or EngineConfig()).to_dict(), **changes}, source="Session")


def load_for(config: EngineConfig, model: str | Path | None) -> LoadedModel:
    """Load a model where and as ``config`` wants it, to be shared by several engines."""
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    is_cuda = config.device == "cuda" and torch.cuda.is_available()  # without one, making the device says so
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    return load_model(model or DEFAULT_MODEL, attention=config.attention_backend, dtype=dtype, device=device)


def _sampling_params(params: SamplingParams | None, changes: Mapping[str, Any]) -> SamplingParams:
    try:
        return params.replace(**changes) if params is not None else SamplingParams(**changes)
    except TypeError as error:
        raise RequestError(f"unknown sampling parameter: {error}", field="params") from error


def _as_prompts(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a list of prompts: of texts or of lists of ids."""
    is_many = not isinstance(prompt, (str, bytes)) and isinstance(prompt, Sequence) and bool(prompt)
    is_many = is_many and not all(isinstance(item, int) for item in prompt)
    return (list(prompt), True) if is_many else ([prompt], False)  # type: ignore[list-item, arg-type]


def _never_arrived(submission: Submission) -> RequestOutput:
    now_ns = time.perf_counter_ns()
    return RequestOutput(
        request_id=submission.request_id,
        prompt_token_ids=submission.prompt_ids,
        token_ids=(),
        text="",
        new_token_ids=(),
        new_text="",
        finish_reason="abort",
        stop_reason=None,
        logprobs=None,
        prompt_logprobs=None,
        timings=replace(RequestTimings(now_ns), finished_ns=now_ns),
    )
