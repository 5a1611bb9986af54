"""A session's requests: as they were submitted, as the engine knows them, and what came out."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

from engine.emission import make_output
from engine.engine import Engine
from engine.errors import RequestError
from engine.intake import Intake
from engine.request import Request, RequestOutput, RequestTimings, SamplingParams
from tracing.records import RequestRecord
from workbench.arrivals import ClosedLoop, Submission
from workbench.watch import BorderWatch
from workbench.workloads import RequestSpec, SyntheticPrompt

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """A request as a caller words it."""

    spec: RequestSpec
    """With its arrival on the session's clock."""
    request_id: str | None = None
    loop: ClosedLoop | None = None
    """Lets it in."""


class RequestBook:
    """Keeps one entry a request, for as long as the session is not reset."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._intake = Intake(engine.resolved, engine.loaded.tokenizer)
        self._next_number = 0
        self.generation = 0
        """Changes when all are forgotten."""
        self._submissions: dict[str, Submission] = {}
        self._requests: dict[str, Request] = {}
        self._outputs: dict[str, RequestOutput] = {}

    @property
    def submissions(self) -> tuple[Submission, ...]:
        """All that were submitted, in order."""
        return tuple(self._submissions.values())

    @property
    def num_submissions(self) -> int:
        """How many those are."""
        return len(self._submissions)

    def newest(self, count: int) -> list[Submission]:
        """The last ``count`` that were submitted, in order."""
        return [*islice(reversed(self._submissions.values()), count)][::-1]

    def submission(self, request_id: str) -> Submission:
        """A request as it was submitted; KeyError if none was under that name."""
        return self._submissions[request_id]

    def request(self, request_id: str) -> Request | None:
        """The engine's record of a request; None before it has arrived."""
        return self._requests.get(request_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._submissions

    def draft(self, wishes: Sequence[Wish]) -> list[Submission]:
        """Check requests, whenever they arrive; enters none of them.

        Raises:
            RequestError: one cannot be served.
        """
        return [self._draft(wish, self._next_number + place) for place, wish in enumerate(wishes)]

    def _draft(self, wish: Wish, number: int) -> Submission:
        spec = wish.spec
        request_id = wish.request_id if wish.request_id is not None else f"request-{number}"
        if wish.request_id is None and request_id in self._engine.live_ids:
            request_id = f"session-{request_id}"
        if request_id in self._engine.live_ids and request_id not in self._submissions:
            raise RequestError(
                f"request_id {request_id!r} is in use by a request handed to the engine itself; take another",
                field="request_id",
                request_id=request_id,
            )
        if request_id in self._submissions:
            raise RequestError(
                f"request_id {request_id!r} was used in this session; take another, or reset()", field="request_id"
            )
        if not 0 <= spec.arrival < float("inf"):
            raise RequestError(f"arrival must be at least 0 on the clock, got {spec.arrival}", field="arrival")
        if not isinstance(spec.cache_salt, str):
            raise RequestError(f"cache_salt must be a string, got {spec.cache_salt!r}", field="cache_salt")
        made = spec.prompt if isinstance(spec.prompt, SyntheticPrompt) and not spec.chat else None
        checked = self._intake.check(
            self._chat_ids(spec.prompt) if spec.chat else spec.prompt if made is None else tuple(made),
            spec.params,
            key=number,
            number=number,
            request_id=request_id,
            stream=spec.stream,
            iteration=self._engine.controller.next_index,
            live=(),
        )
        return Submission(
            number=number,
            request_id=request_id,
            prompt_ids=checked.prompt_ids if made is None else made,  # its ids are made again when it arrives
            params=spec.params.replace(seed=checked.seed),
            arrival=spec.arrival,
            stream=spec.stream,
            cache_salt=spec.cache_salt,
            loop=wish.loop,
        )

    def _chat_ids(self, prompt: Prompt) -> Sequence[int]:
        tokenizer = self._engine.loaded.tokenizer
        if tokenizer is None or not isinstance(prompt, str):
            raise RequestError("chat=True needs a text prompt and a model with a tokenizer", field="chat")
        return tokenizer.encode(tokenizer.chat([{"role": "user", "content": prompt}]), add_special=False)

    def enter(self, submission: Submission) -> None:
        """Keep a drafted request."""
        self._submissions[submission.request_id] = submission
        self._next_number = max(self._next_number, submission.number + 1)

    def hand_in(self, submission: Submission, *, late_ns: int = 0) -> Request:
        """Give a request that arrived ``late_ns`` ago to the engine; returns the engine's."""
        self._engine.add_request(
            tuple(submission.prompt_ids),
            submission.params,
            request_id=submission.request_id,
            stream=submission.stream,
            cache_salt=submission.cache_salt,
        )
        request = self._engine.queue.newest
        assert request is not None
        request.timings = replace(request.timings, arrival_ns=request.timings.arrival_ns - late_ns)
        self._requests[submission.request_id] = request
        return request

    def withdraw(self, submission: Submission) -> None:
        """End a request that has not arrived."""
        now_ns = time.perf_counter_ns()
        self._outputs[submission.request_id] = RequestOutput(
            request_id=submission.request_id,
            prompt_token_ids=tuple(submission.prompt_ids),
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

    def keep(self, outputs: Iterable[RequestOutput]) -> None:
        """Keep what an iteration gave out."""
        for output in outputs:
            if output.request_id not in self._submissions:
                continue  # handed to the engine itself
            self._outputs[output.request_id] = output

    def outputs(self) -> dict[str, RequestOutput]:
        """Each request that has arrived or ended, in order of submission: its last output, or what it has so far."""
        found = {name: self.output(name) for name in self._submissions}
        return {name: output for name, output in found.items() if output is not None}

    def output(self, request_id: str) -> RequestOutput | None:
        """One of them; None while it is still to come."""
        output, request = self._outputs.get(request_id), self._requests.get(request_id)
        if output is not None and (output.finished or request is None):
            return output
        if request is None:
            return None
        if request.timings.finished_ns is not None:  # somebody else drove the engine, as engine.stream does
            return make_output(request, request.finish_reason, len(request.output_ids))
        return self._so_far(request)

    def _so_far(self, request: Request) -> RequestOutput:
        params = request.params
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_ids,
            token_ids=tuple(request.output_ids),
            text=self._text_so_far(request),
            new_token_ids=(),
            new_text="",
            finish_reason=None,
            stop_reason=None,
            logprobs=tuple(request.logprobs) if params.logprobs is not None else None,
            prompt_logprobs=tuple(request.prompt_logprobs) if params.prompt_logprobs is not None else None,
            timings=request.timings,
            num_cached_tokens=request.num_cached_tokens,
        )

    def _text_so_far(self, request: Request) -> str:
        tokenizer = self._engine.loaded.tokenizer
        if tokenizer is None or not request.params.detokenize:
            return ""
        return request.text if request.detokenizer is not None else tokenizer.decode(request.output_ids)

    def known_requests(self) -> Iterable[Request]:
        """Of all that have arrived, the engine's records."""
        return self._requests.values()

    def records(self, watch: BorderWatch) -> list[RequestRecord]:
        """When things happened to each request that has arrived."""
        return [self._record(request, watch) for request in self._requests.values()]

    def _record(self, request: Request, watch: BorderWatch) -> RequestRecord:
        timings, output = request.timings, self.output(request.request_id)
        drafts = watch.draft_counts(request)
        return RequestRecord(
            request_id=request.request_id,
            arrival_ns=timings.arrival_ns,
            admitted_ns=timings.admitted_ns,
            first_token_ns=timings.first_token_ns,
            finished_ns=timings.finished_ns,
            token_times_ns=watch.token_times(request),
            num_prompt_tokens=len(request.prompt_ids),
            num_output_tokens=len(request.output_ids),
            finish_reason=None if output is None else output.finish_reason,
            void_reasons=tuple(sorted(request.void_reasons)),
            drafts_proposed=drafts.proposed,
            drafts_accepted=drafts.accepted,
        )

    def clear(self) -> None:
        """Forget all; numbers, and with them seeds, start again."""
        self._submissions.clear()
        self._requests.clear()
        self._outputs.clear()
        self._next_number = 0
        self.generation += 1


def sampling_params(params: SamplingParams | None, changes: Mapping[str, Any]) -> SamplingParams:
    """Changes laid over ``params``, or over the defaults.

    Raises:
        RequestError: a name is unknown, or a value does not fit.
    """
    known = [field.name for field in fields(SamplingParams)]
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise RequestError(f"unknown sampling parameter {name!r}; {hint}", field=name)
    return params.replace(**changes) if params is not None else SamplingParams(**changes)


def as_prompts(prompt: Prompt | Sequence[Prompt]) -> tuple[list[Any], bool]:
    """The prompts, and whether they came as a list of prompts rather than as one list of ids."""
    if not isinstance(prompt, (list, tuple)) or not prompt or isinstance(prompt[0], int):
        return [prompt], False
    return list(prompt), True
