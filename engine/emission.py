"""Outputs: text for those who want it, stop strings, and what goes back to the caller.

Host work that overlap hides, so it is a phase of its own and is counted. A request is detokenised as it goes only if
it streams or has stop strings; all others once, at their end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.request import Request, RequestOutput
from engine.routing_replay import RoutingRecorder
from engine.sampling.detokenizer import IncrementalDetokenizer
from engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from engine.controller import Iteration

log = logging.getLogger(__name__)


class OutputEmitter:
    """Makes outputs; ``finished`` is told each request whose last output has been made, exactly once (I43)."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        finished: Callable[[Request], None],
        routing: RoutingRecorder | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._eos = eos_token_ids
        self._finished = finished
        self._routing = routing

    def emit(self, iteration: Iteration) -> list[Request]:
        """Fill ``iteration.outputs``; returns requests that end here and still hold a row."""
        stopped: list[Request] = []
        for request in iteration.speaking:
            if request.finish_reason is None:
                given = len(request.output_ids)
                has_ended = self._guarded(request, self._advance_text)
                iteration.new_tokens -= given - len(request.output_ids)  # taken back: behind a stop string
                if has_ended:
                    stopped.append(request)
                elif request.stream and not request.abort_requested:
                    self._emit_progress(request, iteration)
        for request in (*iteration.ended, *stopped):
            given = len(request.output_ids)
            output = self.last_output(request, iteration.index)
            iteration.new_tokens -= given - len(request.output_ids)
            iteration.outputs.append(output)
            self._finished(request)
        return stopped

    def _emit_progress(self, request: Request, iteration: Iteration) -> None:
        """An output of what may be shown: text held back for a stop string keeps back its tokens as well."""
        detokenizer = request.detokenizer
        shown = len(request.output_ids) if detokenizer is None else detokenizer.num_released_tokens
        if shown > request.emitted_tokens or len(request.text) > request.emitted_chars:
            iteration.outputs.append(self._output(request, None, shown))

    def _guarded(self, request: Request, work: Callable[[Request], None]) -> bool:
        """Whether the request has ended now; a fault in one request's text fails that request alone."""
        try:
            work(request)
        except Exception as error:
            log.exception("request %s failed while its text was made", request.request_id)
            request.finish_reason = "error"
            request.stop_reason = f"{type(error).__name__}: {error}"
            request.detokenizer = None
        return request.finish_reason is not None

    def _advance_text(self, request: Request) -> None:
        """Feed new tokens to the detokeniser; a stop string found ends the request at the token that completes it."""
        if not request.params.detokenize or self._tokenizer is None:
            return
        detokenizer = request.detokenizer
        if detokenizer is None:
            detokenizer = request.detokenizer = self._detokenizer(request)
        for token in self._text_tokens(request)[detokenizer.num_tokens :]:
            detokenizer.append(token)
            if detokenizer.hit is not None:
                break
        self._take_text(request)

    @staticmethod
    def _take_text(request: Request) -> None:
        detokenizer = request.detokenizer
        request.text = detokenizer.text
        if detokenizer.hit is not None:
            kept = detokenizer.num_tokens
            del request.output_ids[kept:]
            del request.logprobs[kept:]
            request.finish_reason = "stop"
            request.stop_reason = detokenizer.hit.stop

    def _detokenizer(self, request: Request) -> IncrementalDetokenizer:
        assert self._tokenizer is not None
        params = request.params
        return IncrementalDetokenizer(
            self._tokenizer.decode,
            stops=params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    def _text_tokens(self, request: Request) -> list[int]:
        """Output ids that have text: not the id that ended the request, unless it is asked for."""
        ids = request.output_ids
        ended_by_id = request.finish_reason == "stop" and not isinstance(request.stop_reason, str)
        if not ended_by_id or request.params.include_stop_str_in_output:
            return ids
        return ids[:-1]

    def _finish_text(self, request: Request) -> None:
        if not request.params.detokenize or self._tokenizer is None:
            return
        if request.detokenizer is None and not request.params.stop:
            request.text = self._tokenizer.decode(self._text_tokens(request))
            return
        self._advance_text(request)
        if request.detokenizer.hit is None:
            request.detokenizer.finish()
            self._take_text(request)

    def last_output(self, request: Request, iteration: int) -> RequestOutput:
        """The output that ends it, its text complete; ``finish_reason`` must be set."""
        self._guarded(request, self._finish_text)
        request.timings = replace(request.timings, finished_ns=time.perf_counter_ns(), finished_iteration=iteration)
        if self._routing is not None:
            self._routing.finish(request)
        return self._output(request, request.finish_reason, len(request.output_ids))

    def _output(self, request: Request, finish_reason: str | None, num_tokens: int) -> RequestOutput:
        output = make_output(request, finish_reason, num_tokens)
        request.emitted_tokens = num_tokens
        request.emitted_chars = len(output.text)
        return output


def make_output(request: Request, finish_reason: str | None, num_tokens: int) -> RequestOutput:
    """The request as a caller sees it, up to ``num_tokens``; ``new_*`` is what no earlier output held."""
    params = request.params
    is_read = len(request.prompt_logprobs) == len(request.prompt_ids)  # else it ended between two chunks
    prompt_logprobs = tuple(request.prompt_logprobs if is_read else ()) if params.prompt_logprobs is not None else None
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_ids,
        token_ids=tuple(request.output_ids[:num_tokens]),
        text=request.text,
        new_token_ids=tuple(request.output_ids[request.emitted_tokens : num_tokens]),
        new_text=request.text[request.emitted_chars :],
        finish_reason=finish_reason,
        stop_reason=request.stop_reason if finish_reason in ("stop", "error") else None,
        logprobs=tuple(request.logprobs[:num_tokens]) if params.logprobs is not None else None,
        prompt_logprobs=prompt_logprobs,
        timings=request.timings,
        num_cached_tokens=request.num_cached_tokens,
        routing=None if finish_reason is None else request.made_routing,
    )
