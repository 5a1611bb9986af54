"""What a caller hands in and gets back, and the engine's own record of a request in between."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.errors import RequestError
from engine.token_log import TokenLog

FinishReason = str  # "stop" | "length" | "abort" | "error"
MAX_LOGPROBS = 256


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    Raises:
        RequestError: a value is out of its range; ``field`` names it.
    """

    max_tokens: int = 16
    """Most tokens to generate, at least 1."""
    min_tokens: int = 0
    """Neither EOS, stop ids nor stop strings end the request before this many tokens."""
    temperature: float = 1.0
    """0 is greedy: the highest logit, lowest id on ties. Values under 1e-5 count as 0."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1: off; 1 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches p, in (0, 1]; 1: off."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one, in [0, 1]; 0: off."""
    seed: int | None = None
    """Random stream of this request. None: derived from the engine's seed and the request's number."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of single ids, each within [-100, 100]."""
    presence_penalty: float = 0.0
    """Subtracted from logits of ids that were generated, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Times the number of times generated, subtracted, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of ids in prompt or output; above 0."""
    stop: str | Sequence[str] | None = None
    """Strings that end the request, matched on text."""
    stop_token_ids: Sequence[int] | None = None
    """Ids that end the request."""
    include_stop_str_in_output: bool = False
    """Keep the stop string (or stop id's text) in the text."""
    ignore_eos: bool = False
    """Go on over the model's end-of-sequence ids."""
    logprobs: int | None = None
    """Log probabilities of each token: the chosen id and the n most likely. None: none."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens; the first has none."""
    detokenize: bool = True
    """Produce text. False with stop strings is refused."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_stops()
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", self._checked_bias(self.logit_bias))

    def _check_numbers(self) -> None:
        _check_int("max_tokens", self.max_tokens, low=1)
        _check_int("min_tokens", self.min_tokens, low=0)
        if self.min_tokens > self.max_tokens:
            raise _bad("min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens)
        _check_float("temperature", self.temperature, low=0.0)
        _check_int("top_k", self.top_k, low=-1)
        _check_float("top_p", self.top_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise _bad("top_p", "in (0, 1]", self.top_p)
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        _check_float("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _check_float("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _check_float("repetition_penalty", self.repetition_penalty, low=0.0)
        if self.repetition_penalty == 0.0:
            raise _bad("repetition_penalty", "above 0", self.repetition_penalty)
        if self.seed is not None:
            _check_int("seed", self.seed, low=-(2**63), high=2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=0, high=MAX_LOGPROBS)

    def _check_stops(self) -> None:
        stops: Any = self.stop
        if isinstance(stops, str):
            stops = (stops,)
        if stops is not None:
            if not isinstance(stops, Sequence) or not all(isinstance(s, str) for s in stops):
                raise _bad("stop", "a string or a list of strings (ids go to stop_token_ids)", self.stop)
            if any(s == "" for s in stops):
                raise _bad("stop", "strings that are not empty", self.stop)
            object.__setattr__(self, "stop", tuple(stops) or None)
        ids: Any = self.stop_token_ids
        if ids is not None:
            if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
                raise _bad("stop_token_ids", "a list of token ids", ids)
            for token_id in ids:
                _check_int("stop_token_ids", token_id, low=0)
            object.__setattr__(self, "stop_token_ids", tuple(ids) or None)
        if self.stop and not self.detokenize:
            raise _bad("stop", "None with detokenize=False (strings are matched on text)", self.stop)

    @staticmethod
    def _checked_bias(bias: Mapping[int, float]) -> dict[int, float]:
        if not isinstance(bias, Mapping):
            raise _bad("logit_bias", "a mapping of token id to bias", bias)
        for token_id, value in bias.items():
            _check_int("logit_bias", token_id, low=0)
            _check_float("logit_bias", value, low=-100.0, high=100.0)
        return {int(token_id): float(value) for token_id, value in bias.items()}

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, empty without any."""
        return tuple(self.stop) if self.stop else ()

    @property
    def is_greedy(self) -> bool:
        """Whether the highest logit is always taken."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on tokens seen before."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with ``changes`` applied and checked."""
        return replace(self, **changes)


GREEDY_TEMPERATURE = 1e-5
"""Below this a temperature counts as 0 everywhere: one threshold for the whole stack."""


def _bad(name: str, expected: str, got: object) -> RequestError:
    return RequestError(f"{name} must be {expected}, got {got!r}", field=name)


def _check_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _bad(name, "a whole number", value)
    if value < low or (high is not None and value > high):
        raise _bad(name, f"at least {low}" if high is None else f"within [{low}, {high}]", value)


def _check_float(name: str, value: object, *, low: float, high: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _bad(name, "a finite number", value)
    if not low <= value <= high:
        raise _bad(name, f"at least {low}" if math.isinf(high) else f"within [{low}, {high}]", value)


class Logprob:
    """Documentation only: log-probability rows are plain dicts ``{token id: log probability}``.

    The chosen id is always in it, first; then the n most likely, sorted from high to low.
    """


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """When things happened to a request, on the engine's clock in nanoseconds; None: not yet."""

    arrival_ns: int
    """Handed to add_request."""
    admitted_ns: int | None = None
    """Given blocks and a row."""
    first_token_ns: int | None = None
    """Its first token was known to the host."""
    finished_ns: int | None = None
    """Its last output was made."""
    arrival_iteration: int = 0
    """Iterations begun before it arrived."""
    first_token_iteration: int | None = None
    """The iteration that resolved its first token."""
    finished_iteration: int | None = None
    """The iteration that emitted its end."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Everything known of a request so far (cumulative), and what is new since the last output."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    new_token_ids: tuple[int, ...]
    new_text: str
    finish_reason: FinishReason | None
    """"stop", "length", "abort", "error"; None while it runs."""
    stop_reason: str | int | None
    """The stop string or stop id that ended it; None for EOS, length and abort; the message for errors."""
    logprobs: tuple[dict[int, float], ...] | None
    """One dict a generated token; see :class:`Logprob`."""
    prompt_logprobs: tuple[dict[int, float] | None, ...] | None
    """One entry a prompt token; the first is None. Empty if it ended before its prompt was read."""
    timings: RequestTimings
    num_cached_tokens: int = 0
    """Prompt tokens whose computation a prefix hit skipped."""
    routing: NDArray[np.int16] | None = field(default=None, compare=False, repr=False)
    """With ``routing_replay``, in the last output: [tokens, layers with experts, experts of a token] which experts each
    token of prompt and output went to, but for the last one, which no forward has read. Fewer tokens if it ended before
    its prompt was read."""

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


class RequestState(Enum):
    """Where a request stands; :meth:`Request.move_to` allows only the moves in ``LEGAL_MOVES``."""

    WAITING = "waiting"  # queued, holds no blocks
    PREFILL = "prefill"  # has a row, its prompt is not all in the cache yet
    DECODE = "decode"  # adds one token a step
    PAUSED = "paused"  # keeps its blocks, runs nothing
    FINISHED = "finished"  # blocks given back, never moves again


LEGAL_MOVES: dict[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.PREFILL, RequestState.FINISHED}),
    RequestState.PREFILL: frozenset({RequestState.DECODE, RequestState.FINISHED, RequestState.WAITING}),
    RequestState.DECODE: frozenset({RequestState.PAUSED, RequestState.FINISHED, RequestState.WAITING}),
    RequestState.PAUSED: frozenset({RequestState.DECODE, RequestState.FINISHED, RequestState.WAITING}),
    RequestState.FINISHED: frozenset(),
}


class Held(NamedTuple):
    """What a request has got so far."""

    num_tokens: int
    num_drafted: int
    num_accepted: int


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of one request. ``key`` is unique for ever; ``request_id`` may be used again."""

    key: int
    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    """Resolved random stream."""
    max_new_tokens: int
    """max_tokens, clamped so that prompt and output fit max_sequence_length."""
    timings: RequestTimings
    stream: bool = False
    """Make an output at every token, not only at the end."""
    state: RequestState = RequestState.WAITING
    row: int | None = None
    """Its place in the table while it has one."""
    token_log: TokenLog | None = None
    """Where tokens may wait that are its own already; the table's, while it has a row."""
    _output_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=list)
    abort_requested: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    """Tokens that a prefix hit skipped when it was admitted first."""
    _drafts: tuple[int, int] = (0, 0)
    graph_wait_steps: int = 0
    """Iterations in a row in which it headed the queue and no captured graph held it; 0 once it is admitted."""
    cache_salt: str = ""
    """Requests of different salts share no cached blocks."""
    given_routing: NDArray[np.int16] | None = None
    """Experts that its first tokens are to go to; see :mod:`engine.routing_replay`, as of the next."""
    made_routing: NDArray[np.int16] | None = None
    """Experts that its tokens went to, once its blocks were given back."""
    digests: list[bytes] = field(default_factory=list)
    """Names of its full blocks, prompt first, as far as they were made; see :mod:`engine.cache.prefix`."""
    cache_epoch: int = -1
    """When it was placed, counted in resets of the prefix cache; blocks of an earlier time are not named."""
    emitted_tokens: int = 0
    """Output tokens already handed out."""
    emitted_chars: int = 0
    """Characters of text already handed out."""
    text: str = ""
    detokenizer: Any = None
    """Incremental detokeniser with its stop matcher, made when first needed."""
    void_reasons: set[str] = field(default_factory=set)
    """Why its timings mean nothing: of the void iterations it lived through."""

    @property
    def output_ids(self) -> list[int]:
        """Tokens generated so far."""
        if self.token_log is not None:
            self.token_log.hand_over()
        return self._output_ids

    @property
    def num_drafted(self) -> int:
        """Draft tokens verified for it."""
        return self._handed_drafts()[0]

    @property
    def num_accepted(self) -> int:
        """Of those, the ones that its own draws bore out."""
        return self._handed_drafts()[1]

    def note_drafts(self, num_drafts: int, accepted: int) -> None:
        """Of one verification."""
        drafted, taken = self._handed_drafts()
        self._drafts = (drafted + num_drafts, taken + accepted)

    def _handed_drafts(self) -> tuple[int, int]:
        if self.token_log is not None:
            self.token_log.hand_over()
        return self._drafts

    @property
    def held(self) -> Held:
        """What it has without what waits in the log; for the log alone."""
        return Held(len(self._output_ids), *self._drafts)

    def take(self, tokens: list[int], drafts: tuple[int, int], start: Held) -> None:
        """Put ``tokens``, and drafts verified and accepted, behind ``start``, again if need be; for the log alone."""
        self._output_ids[start.num_tokens :] = tokens
        self._drafts = (start.num_drafted + drafts[0], start.num_accepted + drafts[1])

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens whose values the host knows."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether log probabilities of prompt tokens are wanted and not all there; a prompt's first token has none."""
        return self.params.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_ids)

    def drop_partial_prompt_logprobs(self) -> None:
        """Forget those of a prompt that was read in part: it is read anew, and they with it."""
        if self.owes_prompt_logprobs:
            self.prompt_logprobs.clear()

    @property
    def remaining_tokens(self) -> int:
        """Output tokens it may still get."""
        return self.max_new_tokens - len(self.output_ids)

    @property
    def is_watched(self) -> bool:
        """Whether a token of it needs more than to be kept: it streams, has stops, or wants log probabilities."""
        params = self.params
        return self.stream or bool(params.stop or params.stop_token_ids) or params.logprobs is not None

    def move_to(self, state: RequestState) -> None:
        """Change state.

        Raises:
            AssertionError: the move is not in ``LEGAL_MOVES``.
        """
        assert state in LEGAL_MOVES[self.state], f"{self.request_id}: {self.state.value} -> {state.value}"
        self.state = state
