"""Checks at the door: a request that passes can be served to its end, one that does not is told why."""

from __future__ import annotations

import itertools
import time
from collections.abc import Container, Sequence
from typing import Any

from engine.admission import blocks_for
from engine.config import ResolvedConfig
from engine.errors import RequestError
from engine.graph_gate import GraphGate
from engine.request import Request, RequestTimings, SamplingParams
from engine.sampling.rng import derive_seed
from engine.tokenizer import Tokenizer

Prompt = str | Sequence[int]
"""Text, or token ids."""


class Intake:
    """Knows the limits of one engine and makes its requests."""

    def __init__(self, resolved: ResolvedConfig, tokenizer: Tokenizer | None, gate: GraphGate | None = None) -> None:
        self._resolved = resolved
        self._tokenizer = tokenizer
        self._gate = gate

    def check(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        key: int,
        number: int,
        request_id: str | None,
        stream: bool,
        iteration: int,
        live: Container[str],
    ) -> Request:
        """The engine's record of a request that can be served.

        Args:
            prompt: Text or ids.
            params: How to sample.
            key: Its unique key.
            number: Requests accepted before it since the engine was made or reset; seeds those without a seed.
            request_id: The caller's name for it, or None.
            stream: Whether it makes an output at every token.
            iteration: Iterations begun so far.
            live: Ids in use.

        Raises:
            RequestError: it cannot; ``field`` names the fault.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {type(params).__name__}", field="params")
        if request_id is None:
            request_id = _free_name(f"request-{key}", live)
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id must be a string that is not empty, got {request_id!r}", field="request_id")
        if not request_id.isprintable() or request_id.strip() != request_id:
            raise RequestError(
                f"request_id must be printable characters without blanks at its ends, got {request_id!r}",
                field="request_id",
            )
        if request_id in live:
            raise RequestError(
                f"request_id {request_id!r} is in use by a live request; wait for its end or take another",
                field="request_id",
                request_id=request_id,
                can_retry=True,
            )
        prompt_ids = self._checked_prompt(prompt, request_id)
        self._check_params(params, request_id)
        room = self._resolved.max_sequence_length - len(prompt_ids)
        request = Request(
            key=key,
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            seed=params.seed if params.seed is not None else derive_seed(self._resolved.config.seed, number),
            max_new_tokens=min(params.max_tokens, room),
            timings=RequestTimings(time.perf_counter_ns(), arrival_iteration=iteration),
            stream=stream,
        )
        self._check_fits(request)
        return request

    def _checked_prompt(self, prompt: Prompt, request_id: str) -> tuple[int, ...]:
        def refuse(text: str) -> RequestError:
            return RequestError(f"prompt of {request_id}: {text}", field="prompt", request_id=request_id)

        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise refuse(f"model {self._resolved.model} has no tokenizer; give token ids instead of text")
            try:
                prompt.encode("utf-8")
            except UnicodeEncodeError as error:  # half of a surrogate pair, as JSON can hold it
                raise refuse(f"it is no Unicode text: {error}") from error
            ids: Sequence[Any] = self._tokenizer.encode(prompt)
        elif isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
            raise refuse(f"expected text or a list of token ids, got {type(prompt).__name__}")
        else:
            ids = prompt
        if not ids:
            raise refuse("it is empty; give at least one token")
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise refuse(f"token ids must be whole numbers, got {token_id!r}")
            if not 0 <= token_id < self._resolved.vocab_size:
                raise refuse(f"token id {token_id} is outside the vocabulary [0, {self._resolved.vocab_size})")
        return tuple(ids)

    def _check_params(self, params: SamplingParams, request_id: str) -> None:
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token_id in ids or ():
                if token_id >= self._resolved.vocab_size:
                    raise RequestError(
                        f"{name} of {request_id}: id {token_id} is outside the vocabulary "
                        f"[0, {self._resolved.vocab_size})",
                        field=name,
                        request_id=request_id,
                    )
        if params.stop and self._tokenizer is None:
            raise RequestError(
                f"stop of {request_id}: model {self._resolved.model} has no tokenizer, so text cannot be matched; "
                "use stop_token_ids",
                field="stop",
                request_id=request_id,
            )

    def _check_fits(self, request: Request) -> None:
        length, limit = len(request.prompt_ids), self._resolved.max_sequence_length
        config, pool = self._resolved.config, self._resolved.num_blocks
        blocks = blocks_for(request, config.block_size, config.speculative_tokens)
        problem = None
        if length >= limit:
            problem = f"{length} tokens leave no room for output within max_sequence_length={limit}"
        elif blocks > pool:
            problem = (
                f"with max_tokens={request.max_new_tokens} it needs {blocks} KV blocks and the whole pool has {pool}; "
                "raise num_blocks or lower max_tokens"
            )
        elif self._gate is not None and not self._gate.fits_alone(length):
            # What a prefix hit might spare is left out of account: an answer must not depend on what is cached now.
            problem = self._gate.no_graph_message(length)
        if problem is not None:
            raise RequestError(
                f"prompt of {request.request_id}: {problem}", field="prompt", request_id=request.request_id
            )


def _free_name(name: str, live: Container[str]) -> str:
    """``name``, or ``name`` with a number where a caller has given it to a request of their own."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(free for free in names if free not in live)
