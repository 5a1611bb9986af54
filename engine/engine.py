"""The engine a user holds: requests in, outputs out, one iteration or one phase at a time.

A request's life, in the order of the code: ``add_request`` checks it and leaves it in the queue's inbox; the admit
phase gives it a row and blocks; prepare stages its prompt; forward launches it; sample draws a token; resolve gives
it the token and finds its end; emit makes text and output; from then on it decodes, until resolve releases its row.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from engine.admission import RequestQueue, blocks_for
from engine.cache.blocks import BlockPool
from engine.config import EngineConfig, Mode, ResolvedConfig, check_mode
from engine.controller import Border, Controller, Iteration
from engine.counters import Counters
from engine.device import Device, make_device
from engine.emission import OutputEmitter
from engine.errors import ConfigError, DeviceError, IterationFailedError, MidIterationError, RequestError
from engine.invariants import check_border
from engine.models.base import Model
from engine.models.loader import LoadedModel, load_model, register_builtin
from engine.models.oracle import load_oracle
from engine.phases import Order, Phase
from engine.policy import OrderPolicy, prefer_overlap
from engine.request import Request, RequestOutput, RequestState, RequestTimings, SamplingParams
from engine.resolution import end_of
from engine.runner import PendingForward, Runner
from engine.sampling import make_sampler
from engine.sampling.base import Sampler
from engine.sampling.rng import derive_seed
from engine.table import RequestTable
from tracing.recorder import Recorder

Prompt = str | Sequence[int]
register_builtin("oracle", load_oracle)


@dataclass(frozen=True, slots=True)
class Failure:
    """What stopped the engine: everything is left as it was for a debugger."""

    phase: Phase | None
    """The phase it happened in; None between phases."""
    iteration: Iteration | None
    error: BaseException


class Engine:
    """Serves requests on one model. Not thread-safe: call it from one thread.

    Args:
        loaded: A model, as :func:`engine.models.loader.load_model` returns it; the engine does not change it.
        config: Options; the default is async mode on the thread device.
        device: Where it runs; None makes the one the config names. Must be where the model's weights are.
        recorder: The instrument; None makes one that is on.
        policy: May refuse overlap where it is legal.
        sampler: None makes the one the config names.
        progress: Called with (done, total) while graphs are captured.

    Raises:
        ConfigError: an option does not fit the model or the machine; the message names it.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig | None = None,
        *,
        device: Device | None = None,
        recorder: Recorder | None = None,
        policy: OrderPolicy = prefer_overlap,
        sampler: Sampler | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.loaded = loaded
        self.device = device or make_device(self.config.device)
        self.recorder = recorder or Recorder()
        self.resolved = resolve_config(self.config, loaded, self.device)
        self.counters = Counters()
        self.pool = BlockPool(self.resolved.num_blocks)
        self.table = RequestTable(self.config.max_requests, self.resolved.max_blocks_per_row)
        self.queue = RequestQueue(
            self.table,
            self.pool,
            max_batch_tokens=self.config.max_batch_tokens,
            block_size=self.config.block_size,
        )
        self.runner = Runner(
            resolved=self.resolved,
            device=self.device,
            model=loaded.model,
            sampler=sampler or make_sampler(self.resolved.sampling_backend),
            recorder=self.recorder,
            progress=progress,
        )
        self.controller = Controller(
            resolved=self.resolved,
            table=self.table,
            pool=self.pool,
            runner=self.runner,
            queue=self.queue,
            emitter=OutputEmitter(loaded.tokenizer, self.resolved.eos_token_ids, self._forget),
            counters=self.counters,
            recorder=self.recorder,
            policy=policy,
            watch=self._check if self.config.debug_invariants else None,
        )
        self.failure: Failure | None = None
        self._live: dict[str, Request] = {}
        self._next_key = 0
        self._in_hand: Iterator[Border] | None = None
        self._border: Border | None = None
        self._mailboxes: dict[str, deque[RequestOutput]] = {}

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path,
        config: EngineConfig | None = None,
        *,
        device: Device | None = None,
        recorder: Recorder | None = None,
        policy: OrderPolicy = prefer_overlap,
        progress: bool | Callable[[int, int], None] = True,
    ) -> Engine:
        """Load a model and build an engine on it.

        Args:
            path_or_name: A Hugging Face folder, a GGUF file, ``smollm2``, ``shape:NAME`` or ``oracle``.
            config: Options.
            device: See the class.
            recorder: See the class.
            policy: See the class.
            progress: A progress bar while graphs are captured, none, or your own function of (done, total).

        Raises:
            CheckpointError: the model cannot be loaded; the message names the file and the remedy.
            ConfigError: an option does not fit the model or the machine.
        """
        config = config or EngineConfig()
        device = device or make_device(config.device)
        dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
        loaded = load_model(
            path_or_name, attention=config.attention_backend, dtype=dtype, device=device.torch_device
        )
        report = _capture_bar if progress is True else progress or None
        return cls(loaded, config, device=device, recorder=recorder, policy=policy, progress=report)

    # -- requests --------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = False,
    ) -> str:
        """Hand in a request; it is admitted by a later iteration. Allowed at any time, also in mid iteration.

        Args:
            prompt: Text (needs a tokenizer) or token ids, at least one.
            params: How to sample; the default is 16 tokens at temperature 1.
            request_id: Your name for it, free again once its last output was returned; None makes one.
            stream: Make an output at every token rather than only at the end.

        Returns:
            The request's id.

        Raises:
            RequestError: it cannot be served; ``field`` names the fault. Nothing was changed.
        """
        request = self._checked_request(prompt, params or SamplingParams(), request_id, stream)
        self._next_key += 1
        self._live[request.request_id] = request
        self.queue.submit(request)
        self.counters.submitted += 1
        return request.request_id

    def abort(self, request_id: str) -> bool:
        """End a request; takes effect at the next admit or resolve, and no token is given after this call.

        Returns:
            Whether such a request was live. Its last output, with finish reason "abort", comes from a later step.
        """
        request = self._live.get(request_id)
        if request is None or request.abort_requested:
            return False
        self.queue.abort(request)
        return True

    def _checked_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, stream: bool
    ) -> Request:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, got {type(params).__name__}", field="params")
        key = self._next_key
        if request_id is None:
            request_id = f"request-{key}"
        if not isinstance(request_id, str) or not request_id:
            raise RequestError(f"request_id must be a string that is not empty, got {request_id!r}", field="request_id")
        if request_id in self._live:
            raise RequestError(
                f"request_id {request_id!r} is in use by a live request; wait for its end or take another",
                field="request_id",
                request_id=request_id,
                can_retry=True,
            )
        prompt_ids = self._checked_prompt(prompt, request_id)
        self._check_params(params, request_id)
        room = self.resolved.max_sequence_length - len(prompt_ids)
        request = Request(
            key=key,
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            seed=params.seed if params.seed is not None else derive_seed(self.config.seed, key),
            max_new_tokens=min(params.max_tokens, room),
            timings=RequestTimings(time.perf_counter_ns(), arrival_iteration=self.controller.next_index),
            stream=stream,
        )
        self._check_fits(request)
        return request

    def _checked_prompt(self, prompt: Prompt, request_id: str) -> tuple[int, ...]:
        def refuse(text: str) -> RequestError:
            return RequestError(f"prompt of {request_id}: {text}", field="prompt", request_id=request_id)

        if isinstance(prompt, str):
            if self.loaded.tokenizer is None:
                raise refuse(f"model {self.loaded.name} has no tokenizer; give token ids instead of text")
            ids: Sequence[Any] = self.loaded.tokenizer.encode(prompt)
        elif isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
            raise refuse(f"expected text or a list of token ids, got {type(prompt).__name__}")
        else:
            ids = prompt
        if not ids:
            raise refuse("it is empty; give at least one token")
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise refuse(f"token ids must be whole numbers, got {token_id!r}")
            if not 0 <= token_id < self.resolved.vocab_size:
                raise refuse(f"token id {token_id} is outside the vocabulary [0, {self.resolved.vocab_size})")
        return tuple(ids)

    def _check_params(self, params: SamplingParams, request_id: str) -> None:
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            for token_id in ids or ():
                if token_id >= self.resolved.vocab_size:
                    raise RequestError(
                        f"{name} of {request_id}: id {token_id} is outside the vocabulary "
                        f"[0, {self.resolved.vocab_size})",
                        field=name,
                        request_id=request_id,
                    )
        if params.stop and self.loaded.tokenizer is None:
            raise RequestError(
                f"stop of {request_id}: model {self.loaded.name} has no tokenizer, so text cannot be matched; "
                "use stop_token_ids",
                field="stop",
                request_id=request_id,
            )

    def _check_fits(self, request: Request) -> None:
        length, limit = len(request.prompt_ids), self.resolved.max_sequence_length
        problem = None
        if length >= limit:
            problem = f"{length} tokens leave no room for output within max_sequence_length={limit}"
        elif length > self.config.max_batch_tokens:
            problem = f"{length} tokens exceed max_batch_tokens={self.config.max_batch_tokens}; raise it"
        elif blocks_for(request, self.config.block_size) > self.pool.num_blocks:
            problem = (
                f"with max_tokens={request.max_new_tokens} it needs {blocks_for(request, self.config.block_size)} KV "
                f"blocks and the whole pool has {self.pool.num_blocks}; raise num_blocks or lower max_tokens"
            )
        if problem is not None:
            raise RequestError(
                f"prompt of {request.request_id}: {problem}", field="prompt", request_id=request.request_id
            )

    def _forget(self, request: Request) -> None:
        """Its last output is being made: the id is free again."""
        if self._live.get(request.request_id) is request:
            del self._live[request.request_id]
        self.counters.finished[request.finish_reason or "error"] += 1

    # -- iterations ------------------------------------------------------------------------------------------------

    def has_unfinished(self) -> bool:
        """Whether some request still owes its last output."""
        return bool(self._live) or bool(self.controller.unemitted) or self._in_hand is not None

    def step(self) -> list[RequestOutput]:
        """Run one iteration, or finish the one in hand; returns its outputs, none when there is nothing to do.

        Raises:
            IterationFailedError: an earlier iteration failed and neither ``recover`` nor ``reset`` was called.
        """
        if not self._start():
            return []
        assert self.controller.current is not None
        iteration = self.controller.current
        while self._advance() is not None:
            pass
        return iteration.outputs

    def step_phase(self) -> Border | None:
        """Run one phase and stand still behind it; None when there is nothing to do.

        The last phase of an iteration ends it: its outputs are in ``border.iteration.outputs``, and the next call
        begins another. Iterations stepped by hand are marked, and timing statistics leave them out.
        """
        if not self._start():
            return None
        current = self.controller.current
        assert current is not None
        current.void_reasons.add("hand_stepped")
        border = self._advance()
        assert border is not None
        if border.phase is current.order.phases[-1]:
            self._advance()
        return border

    @property
    def in_hand(self) -> Iteration | None:
        """The iteration begun and not ended, if any."""
        return self.controller.current

    @property
    def next_phase(self) -> Phase | None:
        """The phase that ``step_phase`` would run in the iteration in hand; None between iterations."""
        border = self._border
        return border.phase if border is not None and border.side == "before" else None

    def _start(self) -> bool:
        """Have an iteration in hand, standing before its next phase; False when there is nothing to do."""
        if self.failure is not None:
            phase = self.failure.phase.value if self.failure.phase else "between phases"
            raise IterationFailedError(
                f"an iteration failed in {phase}: {self.failure.error}; call recover() to go on or reset() to drop all"
            ) from self.failure.error
        if self._in_hand is not None:
            return True
        if not self.has_unfinished():
            return False
        self._in_hand = self.controller.iterate()
        if self.config.debug_invariants:
            self._advance_raw()
            assert self.controller.current is not None
            self.controller.current.void_reasons.add("invariants")
        else:
            self._advance_raw()
        return True

    def _advance(self) -> Border | None:
        """Run the phase the iteration stands before, and move up to the next; None once it has ended."""
        if self._in_hand is None:
            return None
        behind = self._advance_raw()
        if behind is not None:
            self._advance_raw()
        return behind

    def _advance_raw(self) -> Border | None:
        assert self._in_hand is not None
        iteration = self.controller.current
        try:
            self._border = next(self._in_hand, None)
        except BaseException as error:
            self.failure = Failure(self._border.phase if self._border else None, self.controller.current, error)
            self._in_hand = self._border = None
            self.recorder.abandon_iteration()
            raise
        if self._border is None:
            self._in_hand = None
            if iteration is not None:
                self._deliver(iteration.outputs)
        return self._border

    def _check(self, border: Border) -> None:
        check_border(self, border)

    # -- whole requests --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt] | str,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Serve prompts to their ends, beside whatever else is live.

        Args:
            prompts: Texts and token-id lists, mixed; one text alone is one prompt.
            params: One for all, or one each.
            progress: Show a progress bar on standard error.

        Returns:
            One finished output a prompt, in the order of ``prompts``.

        Raises:
            RequestError: a prompt or its parameters cannot be served; then none of them was handed in.
        """
        from tqdm import tqdm

        if isinstance(prompts, str):
            prompts = [prompts]
        each = self._params_each(prompts, params)
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            self._checked_request(prompt, one, f"prompt {index}", False)
        ids = [self.add_request(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        done: dict[str, RequestOutput] = {}
        with tqdm(total=len(ids), desc="generate", unit="request", disable=not progress) as bar:
            with self._mailbox(ids) as boxes:
                while len(done) < len(ids):
                    self.step()
                    for request_id, box in boxes.items():
                        while box:
                            output = box.popleft()
                            if output.finished:
                                done[request_id] = output
                                bar.update()
        return [done[request_id] for request_id in ids]

    @staticmethod
    def _params_each(
        prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"params: {len(params)} given for {len(prompts)} prompts", field="params")
        return list(params)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Serve one prompt, yielding an output at every token. Leaving the loop early aborts the request.

        Raises:
            RequestError: at the call, not at the first output.
        """
        request_id = self.add_request(prompt, params, stream=True)
        return self._stream(request_id)

    def _stream(self, request_id: str) -> Iterator[RequestOutput]:
        with self._mailbox([request_id]) as boxes:
            while True:
                while boxes[request_id]:
                    output = boxes[request_id].popleft()
                    yield output
                    if output.finished:
                        return
                self.step()

    def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """:meth:`stream` for an event loop: several may run at once, and others get a turn after each step."""
        request_id = self.add_request(prompt, params, stream=True)
        return self._astream(request_id)

    async def _astream(self, request_id: str) -> AsyncIterator[RequestOutput]:
        with self._mailbox([request_id]) as boxes:
            while True:
                while boxes[request_id]:
                    output = boxes[request_id].popleft()
                    yield output
                    if output.finished:
                        return
                self.step()
                await asyncio.sleep(0)

    def _mailbox(self, request_ids: Sequence[str]) -> _Mailboxes:
        return _Mailboxes(self, request_ids)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            box = self._mailboxes.get(output.request_id)
            if box is not None:
                box.append(output)

    # -- mode, recovery, end ---------------------------------------------------------------------------------------

    @property
    def mode(self) -> Mode:
        """The mode in force; a switch asked for shows once it has taken effect."""
        return self.controller.mode

    def set_mode(self, mode: str) -> None:
        """Switch between ``async`` and ``legacy`` at the next iteration border.

        A pending forward is drained first, by an iteration of its own whose outputs the next step returns; no
        request is lost and no token changes.

        Raises:
            ConfigError: any other name.
        """
        self.controller.wanted_mode = check_mode(mode)
        if self.controller.current is None and self.controller.pending is None:
            self.controller.mode = self.controller.wanted_mode

    @property
    def pending(self) -> PendingForward | None:
        """The forward that is launched and not sampled."""
        return self.controller.pending

    def require_border(self, what: str) -> None:
        """Refuse ``what`` in mid iteration.

        Raises:
            MidIterationError: naming the phase it stands before.
        """
        if self._in_hand is not None:
            phase = self.next_phase.value if self.next_phase else "an unknown phase"
            raise MidIterationError(f"{what} needs an iteration border; the iteration in hand stands before {phase}")

    def recover(self) -> None:
        """Go on after a failed iteration: what was launched is dropped, every row is computed again.

        Requests keep the tokens they have; those whose last token ends them end. The tokens that follow are the
        same, since a draw depends on seed and position only.
        """
        self._quiesce()
        self.controller.drop_pending()
        rows = sorted(self.table.live_requests(), key=lambda request: request.key)
        self.table.reset()
        self.pool.reset()
        back = []
        for request in rows:
            if request.finish_reason is None and (end := end_of(request, self.resolved.eos_token_ids)) is not None:
                request.finish_reason, request.stop_reason = end
            if request.finish_reason is not None:
                if request.state is not RequestState.FINISHED:
                    request.move_to(RequestState.FINISHED)
                if request not in self.controller.unemitted and self._live.get(request.request_id) is request:
                    self.controller.unemitted.append(request)
                continue
            if request.state is not RequestState.WAITING:
                request.move_to(RequestState.WAITING)
            back.append(request)
        self.queue.requeue(back)
        self.failure = None

    def reset(self) -> list[RequestOutput]:
        """Drop everything: the iteration in hand, the pending forward, every request, all counters.

        Returns:
            The last output of each live request, finish reason "abort".
        """
        from engine.emission import make_output

        if self._in_hand is not None:
            self.recorder.abandon_iteration()
        self._quiesce()
        self.controller.drop_pending()
        self.controller.unemitted.clear()
        self.controller.mode = self.controller.wanted_mode
        self.controller.next_index = 0
        self.queue.clear()
        self.table.reset()
        self.pool.reset()
        outputs = []
        for request in list(self._live.values()):
            request.finish_reason = "abort"
            request.state = RequestState.FINISHED
            self._forget(request)
            outputs.append(make_output(request, "abort"))
        self._deliver(outputs)
        self.counters.reset()
        self.failure = None
        return outputs

    def _quiesce(self) -> None:
        """Let launched work end, whatever it does, and clear a device error."""
        self._in_hand = self._border = None
        try:
            self.device.synchronize()
        except DeviceError:
            self.device.clear_error()
            self.device.synchronize()

    def close(self) -> None:
        """Stop the device's threads. The engine cannot be used afterwards."""
        self.device.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Mailboxes:
    """Collects the outputs of some requests while others step the engine too; aborts those left unfinished."""

    def __init__(self, engine: Engine, request_ids: Sequence[str]) -> None:
        self._engine = engine
        self._boxes: dict[str, deque[RequestOutput]] = {request_id: deque() for request_id in request_ids}
        engine._mailboxes.update(self._boxes)

    def __enter__(self) -> dict[str, deque[RequestOutput]]:
        return self._boxes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for request_id in self._boxes:
            del self._engine._mailboxes[request_id]
            if kind is not None:
                self._engine.abort(request_id)


def resolve_config(config: EngineConfig, loaded: LoadedModel, device: Device) -> ResolvedConfig:
    """Settle every automatic value.

    Raises:
        ConfigError: a value does not fit the model.
    """
    model = loaded.model
    dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if device.kind == "cuda" else "float32")
    limit = config.max_sequence_length or min(model.max_position, 2048)
    if limit > model.max_position:
        raise ConfigError(
            f"max_sequence_length={limit} exceeds what {loaded.name} was made for ({model.max_position}); lower it"
        )
    return ResolvedConfig(
        config=config,
        dtype=dtype,
        num_blocks=_num_blocks(config, model, limit),
        max_sequence_length=limit,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        sampling_backend="torch" if config.sampling_backend == "auto" else config.sampling_backend,
        attention_backend="torch" if config.attention_backend == "auto" else config.attention_backend,
        model=loaded.name,
    )


def _num_blocks(config: EngineConfig, model: Model, limit: int) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    block_bytes = config.block_size * sum(state.bytes_per_token() for state in model.cache_layout())
    wanted = config.max_requests * -(-limit // config.block_size)
    if config.kv_cache_gb is None:
        return max(1, min(wanted, (1 << 30) // block_bytes))
    affordable = int(config.kv_cache_gb * (1 << 30)) // block_bytes
    if affordable < 1:
        raise ConfigError(
            f"kv_cache_gb={config.kv_cache_gb} holds no block of {block_bytes} bytes; raise it or lower block_size"
        )
    return affordable


def _capture_bar(done: int, total: int) -> None:
    """One progress bar a capture, made at the first call."""
    from tqdm import tqdm

    bar = getattr(_capture_bar, "bar", None)
    if bar is None:
        bar = tqdm(total=total, desc="capture", unit="graph")
        setattr(_capture_bar, "bar", bar)
    bar.update(done - bar.n)
    if done == total:
        bar.close()
        setattr(_capture_bar, "bar", None)


__all__ = ["Engine", "Failure", "Order", "Prompt", "resolve_config"]
