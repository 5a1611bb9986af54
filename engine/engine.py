"""The engine a user holds: requests in, outputs out, one iteration or one phase at a time.

A request's life, in the order of the code: ``add_request`` checks it and leaves it in the queue's inbox; the admit
phase gives it a row and blocks; prepare stages its prompt; forward launches it; sample draws a token; resolve gives
it the token and finds its end; emit makes text and output; from then on it decodes, until resolve releases its row.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch

from engine.admission import AdmissionPolicy, RequestQueue, first_come_first_served
from engine.cache.blocks import BlockPool
from engine.cache.prefix import EvictionPolicy
from engine.cache.prefix_pool import PrefixPool
from engine.cache.slots import SlotPool
from engine.cache.snapshots import SnapshotIndex
from engine.config import EngineConfig, Mode, check_mode, check_routing_mode
from engine.controller import Border, Controller, Iteration
from engine.counters import Counters
from engine.device import Device, make_device
from engine.emission import OutputEmitter
from engine.errors import (
    ConfigError,
    DeviceError,
    EngineError,
    IterationFailedError,
    MidIterationError,
    RankError,
    RequestError,
)
from engine.graph_gate import graph_gate
from engine.graphs import GraphListPolicy, captured_by_default, checked_graphs
from engine.intake import Intake, Prompt
from engine.invariants import check_border
from engine.lifecycle import EngineState, Lifecycle, Suspension, WeightSource, check_suspend_mode
from engine.models.loader import LoadedModel, load_model, register_builtin
from engine.models.oracle import load_oracle, load_oracle_hybrid, load_oracle_moe, load_oracle_mtp
from engine.parallel.dispatch import bind_ranks
from engine.parallel.distributed import ProcessRanks, shard_of, take_own_gpu
from engine.parallel.fleet import Fleet, Intent, Outlook, by_rank
from engine.parallel.ranks import Ranks
from engine.pausing import RoomKeeper
from engine.phases import Phase
from engine.policy import OrderPolicy, check_policy, prefer_overlap
from engine.prefix_cache import PrefixCache
from engine.progress import CaptureBar
from engine.request import Request, RequestOutput, RequestState, SamplingParams
from engine.resolution import end_of
from engine.results import PendingForward
from engine.routing_replay import Choices, RoutingRecorder, RoutingSizes, salted
from engine.runner import CaptureProgress, Runner
from engine.sampling import make_sampler
from engine.sampling.base import Sampler
from engine.sizing import resolve_config
from engine.step_function import has_slots
from engine.streaming import Boxes, Mailboxes, OutputStream
from engine.table import RequestTable
from tracing.recorder import Recorder

register_builtin("oracle", load_oracle)
register_builtin("oracle-hybrid", load_oracle_hybrid)
register_builtin("oracle-mtp", load_oracle_mtp)
register_builtin("oracle-moe", load_oracle_moe)

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSED_NAP_S = 0.002
"""While an engine is paused, its streams on an event loop look so often whether it runs again."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What stopped the engine: everything is left as it was for a debugger."""

    phase: Phase | None
    """The phase it happened in; None between phases."""
    iteration: Iteration | None
    error: BaseException


@contextmanager
def _closing_on_error(device: Device | None) -> Iterator[None]:
    """Stop a device that was made for an engine which then cannot be."""
    try:
        yield
    except BaseException:
        if device is not None:
            device.close()
        raise


class Engine:
    """Serves requests on one model. Not thread-safe: call it from one thread.

    Args:
        loaded: A model, as :func:`engine.models.loader.load_model` returns it; only :meth:`load_weights` changes it.
        config: Options; the default is async mode on the thread device.
        device: Where it runs; None makes the one the config names. Must be where the model's weights are.
        recorder: The instrument; None makes one that is on.
        policy: May refuse overlap where it is legal.
        admission: Whose turn it is; the default is first come, first served.
        graph_list: Which forwards are captured; the default goes by ``graphs`` and ``graph_distribution``.
        sampler: None makes the one the config names.
        ranks: With ``expert_parallel``, the others that hold experts of the model; None joins those that ``torchrun``
            started together with this process.
        progress: Called with (done, total, bytes taken so far) while graphs are captured, again on :meth:`resume`.

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
        admission: AdmissionPolicy = first_come_first_served,
        graph_list: GraphListPolicy = captured_by_default,
        sampler: Sampler | None = None,
        ranks: Ranks | None = None,
        progress: CaptureProgress | None = None,
    ) -> None:
        check_policy(policy)
        check_policy(admission, "admission", "waiting, capacity")
        self.config = config or EngineConfig()
        self.loaded = loaded
        take_own_gpu(self.config)
        self.device = device or make_device(self.config.device)
        self.recorder = recorder or Recorder()
        with _closing_on_error(self.device if device is None else None):
            self.fleet = self._find_fleet(ranks)
            self._assemble(loaded, policy, admission, graph_list, sampler, progress)

    def _find_fleet(self, ranks: Ranks | None) -> Fleet | None:
        """The other ranks; each of them makes its engine at the same time, and captures the same graphs."""
        config = self.config
        if ranks is None and config.has_ranks:
            ranks = ProcessRanks.join(device=self.device.torch_device, timeout_s=config.rank_timeout_s)
        if ranks is not None and ranks.size != config.expert_parallel:
            raise ConfigError(
                f"expert_parallel={config.expert_parallel}, but {ranks.size} ranks were started; name that number"
            )
        bind_ranks(self.loaded.model, ranks, config.expert_dispatch)
        return None if ranks is None else Fleet(ranks, self.recorder)

    def _assemble(
        self,
        loaded: LoadedModel,
        policy: OrderPolicy,
        admission: AdmissionPolicy,
        graph_list: GraphListPolicy,
        sampler: Sampler | None,
        progress: CaptureProgress | None,
    ) -> None:
        self.resolved = resolve_config(self.config, loaded, self.device)
        self.counters = Counters()
        self.pool = self._make_pool()
        rows = self.config.max_requests
        slots = SlotPool(rows) if has_slots(loaded.model.cache_layout()) else None
        self.table = RequestTable(rows, self.resolved.max_blocks_per_row, slots)
        self.prefix_cache = self._make_prefix_cache()
        self.runner = Runner(
            resolved=self.resolved,
            device=self.device,
            model=loaded.model,
            sampler=sampler or make_sampler(self.resolved.sampling_backend),
            recorder=self.recorder,
            sizes=checked_graphs(graph_list, self.resolved.config, self.resolved.max_sequence_length),
            ranks=None if self.fleet is None else self.fleet.ranks,
        )
        if self.fleet is not None:
            self.fleet.check_alike(self.resolved, self.runner.graphs.sizes)
        self.runner.capture(loaded.buckets, progress)
        gate = graph_gate(self.resolved.config, self.runner.graphs.sizes, strict=self.runner.graphs.strict)
        self._intake = Intake(self.resolved, loaded.tokenizer, gate)
        self.queue = RequestQueue(
            self.table,
            self.pool,
            cache=self.prefix_cache,
            room=self._make_room_keeper(),
            max_batch_tokens=self.config.max_batch_tokens,
            chunked=self.config.chunked_prefill,
            block_size=self.config.block_size,
            gate=gate,
            policy=admission,
            drafts=self.config.speculative_tokens,
        )
        self.routing = self._make_routing_recorder()
        self._emitter = OutputEmitter(loaded.tokenizer, self.resolved.eos_token_ids, self._forget, self.routing)
        self.controller = Controller(
            resolved=self.resolved,
            table=self.table,
            pool=self.pool,
            runner=self.runner,
            queue=self.queue,
            emitter=self._emitter,
            counters=self.counters,
            recorder=self.recorder,
            policy=policy,
            cache=self.prefix_cache,
            fleet=self.fleet,
            routing=self.routing,
            watch=self._check if self.config.debug_invariants else None,
        )
        self._lifecycle = Lifecycle(
            loaded=loaded,
            runner=self.runner,
            pool=self.pool,
            controller=self.controller,
            cache=self.prefix_cache,
            progress=progress,
        )
        self.controller.owes_outputs = self._owes_outputs
        self.failure: Failure | None = None
        self._live: dict[str, Request] = {}
        self._early: list[RequestOutput] = []
        """Outputs of iterations that other ranks needed while this one was about to stand still."""
        self._next_key = 0
        self._in_hand: Iterator[Border] | None = None
        self._border: Border | None = None
        self._closed = False
        self._boxes: Boxes = {}

    def _make_pool(self) -> BlockPool:
        if not self.config.prefix_caching:
            return BlockPool(self.resolved.num_blocks)
        return PrefixPool(self.resolved.num_blocks, EvictionPolicy(self.config.eviction_policy))

    def _make_prefix_cache(self) -> PrefixCache | None:
        pool, rows = self.pool, self.config.max_requests
        if not isinstance(pool, PrefixPool):
            return None
        snapshots = None
        if self.table.slots is not None:
            first = rows * self.resolved.config.states_per_row
            snapshots = SnapshotIndex(first, self.resolved.num_snapshots, pool.index.is_held)
        return PrefixCache(self.table, pool, self.config.block_size, self.counters, snapshots)

    def _make_routing_recorder(self) -> RoutingRecorder | None:
        if self.config.routing_replay is None:
            return None
        runner, sizes = self.runner, RoutingSizes.of(self.loaded.model)
        return RoutingRecorder(self.table, self.device, lambda: runner.kept_routing, self.recorder, sizes)

    def _make_room_keeper(self) -> RoomKeeper | None:
        if self.config.capacity_policy == "guaranteed_no_evict":
            return None
        wanted = self.config.paused_blocks
        return RoomKeeper(
            self.table,
            self.pool,
            block_size=self.config.block_size,
            paused_blocks=self.resolved.num_blocks // 4 if wanted is None else wanted,
            lookahead=self.config.lookahead,
            cache=self.prefix_cache,
        )

    @classmethod
    def from_pretrained(
        cls,
        path_or_name: str | Path,
        config: EngineConfig | None = None,
        *,
        device: Device | None = None,
        recorder: Recorder | None = None,
        policy: OrderPolicy = prefer_overlap,
        admission: AdmissionPolicy = first_come_first_served,
        graph_list: GraphListPolicy = captured_by_default,
        ranks: Ranks | None = None,
        progress: bool | CaptureProgress = True,
    ) -> Engine:
        """Load a model and build an engine on it.

        Args:
            path_or_name: A Hugging Face folder, a GGUF file, ``smollm2``, ``shape:NAME`` or ``oracle``.
            config: Options.
            device: See the class.
            recorder: See the class.
            policy: See the class.
            admission: See the class.
            graph_list: See the class.
            ranks: See the class.
            progress: A progress bar while graphs are captured, none, or your own function, see the class.

        Raises:
            CheckpointError: the model cannot be loaded; the message names the file and the remedy.
            ConfigError: an option does not fit the model or the machine.
        """
        config = config or EngineConfig()
        take_own_gpu(config)
        made = None if device is not None else make_device(config.device)
        with _closing_on_error(made):
            used = device or made
            assert used is not None
            dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
            loaded = load_model(
                path_or_name,
                attention=config.attention_backend,
                ssm=config.ssm_backend,
                dtype=dtype,
                device=used.torch_device,
                shard=shard_of(config, ranks, used.torch_device),
            )
            report = CaptureBar() if progress is True else progress or None
            return cls(
                loaded,
                config,
                device=used,
                recorder=recorder,
                policy=policy,
                admission=admission,
                graph_list=graph_list,
                ranks=ranks,
                progress=report,
            )

    # -- requests --------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        stream: bool = False,
        cache_salt: str = "",
        routing: object = None,
    ) -> str:
        """Hand in a request; it is admitted by a later iteration. Allowed at any time, also in mid iteration.

        Args:
            prompt: Text (needs a tokenizer) or token ids, at least one.
            params: How to sample; the default is 16 tokens at temperature 1.
            request_id: Your name for it, free again once its last output was returned; None makes one.
            stream: Make an output at every token rather than only at the end.
            cache_salt: Only requests of the same salt share cached blocks: whether another tenant has sent a prompt
                cannot be told from how fast it is answered.
            routing: With ``routing_replay="replay"``: [tokens, layers, experts of a token] whole numbers, the experts
                that its first tokens go to, of prompt and output, as ``RequestOutput.routing`` tells them. Beyond them
                the router chooses.

        Returns:
            The request's id.

        Raises:
            RequestError: it cannot be served; ``field`` names the fault. Nothing was changed.
            EngineError: the engine is closed.
        """
        self._require_open()
        if not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt must be a string, got {cache_salt!r}", field="cache_salt")
        given = None if routing is None else self._checked_routing(routing)
        request = self._check_request(prompt, params or SamplingParams(), request_id, stream)
        request.given_routing = given
        request.cache_salt = cache_salt if given is None else salted(cache_salt, given)
        self._next_key += 1
        self._live[request.request_id] = request
        self.queue.submit(request)
        self.counters.submitted += 1
        if self.fleet is not None:
            self.fleet.wake()
        return request.request_id

    def abort(self, request_id: str) -> bool:
        """End a request; takes effect at the next admit or resolve, and no token is given after this call.

        Returns:
            Whether such a request was live and had not ended. Its last output, with finish reason "abort", comes from
            a later step.
        """
        request = self._live.get(request_id)
        if request is None or request.abort_requested or request.finish_reason is not None:
            return False
        self.queue.abort(request)
        return True

    def _check_request(self, prompt: Prompt, params: SamplingParams, request_id: str | None, stream: bool) -> Request:
        return self._intake.check(
            prompt,
            params,
            key=self._next_key,
            number=self.counters.submitted,
            request_id=request_id,
            stream=stream,
            iteration=self.controller.next_index,
            live=self._live,
        )

    def _checked_routing(self, routing: object) -> Choices:
        if self.routing is None or self.config.routing_replay != "replay":
            raise RequestError(
                f"routing needs an engine with routing_replay='replay', this one has {self.config.routing_replay!r}",
                field="routing",
            )
        return self.routing.sizes.checked(routing)

    @property
    def live_ids(self) -> frozenset[str]:
        """Ids in use: of requests that still owe their last output."""
        return frozenset(self._live)

    def _forget(self, request: Request) -> None:
        """Its last output is being made: the id is free again."""
        if self._live.get(request.request_id) is request:
            del self._live[request.request_id]
        if self.controller.current is not None:
            request.void_reasons |= self.controller.current.void_reasons
        self.counters.finished[request.finish_reason or "error"] += 1

    # -- iterations ------------------------------------------------------------------------------------------------

    def has_unfinished(self) -> bool:
        """Whether some request still owes its last output, at this rank or, for all that is known here, at another."""
        return self._owes_outputs() or self._in_hand is not None or (self.fleet is not None and self.fleet.is_awake)

    def _owes_outputs(self) -> bool:
        owed = self.controller.unemitted or self.controller.undelivered or self._early
        return bool(self._live) or bool(owed)

    def wait_for_work(self, timeout_s: float | None = None) -> bool:
        """Sleep until some rank has a request; of an engine without other ranks only the answer is of use.

        All ranks sleep once all of them have found nothing to do. A request handed in at any of them, from another
        thread for instance, wakes all.

        Args:
            timeout_s: The longest; None: for ever.

        Returns:
            Whether there is something to do.

        Raises:
            RankError: another rank has gone.
        """
        if self.has_unfinished():
            return True
        return self.fleet is not None and self.fleet.sleep(timeout_s)

    def step(self, until: Callable[[Border], bool] | None = None) -> list[RequestOutput]:
        """Run one iteration, or finish the one in hand; returns its outputs, none when there is nothing to do.

        Args:
            until: Asked at each border before a phase that this call comes to, a new iteration's first one included.
                Where it says True the iteration stands still and is in hand; what stands still does not count as
                stepped by hand until its caller says so.

        Raises:
            IterationFailedError: an earlier iteration failed and neither ``recover`` nor ``reset`` was called.
            EnginePausedError: it is paused or suspended.
        """
        is_new = self._in_hand is None
        if not self._start():
            return []
        assert self.controller.current is not None
        iteration = self.controller.current
        if is_new and self._stands_still(until):
            return []
        with self.device.active():
            while self._advance() is not None:
                if self._stands_still(until):
                    return []
        return iteration.outputs

    def _stands_still(self, until: Callable[[Border], bool] | None) -> bool:
        return until is not None and self._border is not None and until(self._border)

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
    def graph_memory_bytes(self) -> int:
        """Memory that capturing the graphs took; 0 without graphs. On the CPU devices growth of the whole process."""
        return self.runner.graph_memory_bytes

    @property
    def in_hand(self) -> Iteration | None:
        """The iteration begun and not ended, if any."""
        return self.controller.current

    @property
    def next_phase(self) -> Phase | None:
        """The phase that ``step_phase`` would run in the iteration in hand; None between iterations."""
        border = self._border
        return border.phase if border is not None and border.side == "before" else None

    @property
    def is_closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; make a new one")

    def _start(self) -> bool:
        """Have an iteration in hand, standing before its next phase; False when there is nothing to do."""
        self._require_sound()
        if self._in_hand is not None:
            return True
        self._lifecycle.require_running("step")
        if not self.has_unfinished():
            return False
        if self.fleet is not None:
            if self._owes_outputs():  # a request that another thread handed in as all fell asleep
                self.fleet.wake()
            outlook = self._hear_ranks(self.fleet, Intent.STEP)
            if not outlook.has_work or outlook.is_torn:
                return False
        self._begin_iteration()
        return True

    def _begin_iteration(self) -> None:
        self._lifecycle.follow_weights()
        self._in_hand = self.controller.iterate()
        self._advance_raw()
        if self.controller.current is not None:
            if self._lifecycle.void_reasons:
                self.controller.current.void_reasons |= self._lifecycle.take_void_reasons()
            if self.config.debug_invariants:
                self.controller.current.void_reasons.add("invariants")

    def _hear_ranks(self, fleet: Fleet, intent: Intent) -> Outlook:
        try:
            outlook = fleet.begin(self.controller.vote(intent), self.controller.next_index)
            self.controller.take_mode()
            return outlook
        except BaseException as error:
            self.failure = Failure(None, None, error)
            fleet.ranks.fail(self.controller.next_index)
            raise

    def _together(self, intent: Intent) -> None:
        """With other ranks, wait until all of them have come to this; what they need meanwhile is run.

        Raises:
            RankError: some rank came for something else, or not at all.
        """
        fleet = self.fleet
        if fleet is None:
            return
        fleet.wake()
        while True:
            outlook = self._hear_ranks(fleet, intent)
            if outlook.is_torn:
                there = by_rank(one.value for one in outlook.intents)
                raise RankError(f"ranks want different things at once ({there}); ask all of them for the same")
            if all(one is intent for one in outlook.intents) or (intent is Intent.CLOSE and not outlook.has_work):
                return
            if outlook.has_work:
                self._begin_iteration()
                iteration = self.controller.current
                with self.device.active():
                    while self._advance() is not None:
                        pass
                self._early += [] if iteration is None else iteration.outputs
            else:
                self._await_another(fleet, intent)

    def _await_another(self, fleet: Fleet, intent: Intent) -> None:
        """Nobody has work: until another rank comes to this as well, or has a request."""
        if not fleet.sleep(fleet.ranks.timeout_s):
            raise RankError(
                f"{intent.value}: no other rank came to it within {fleet.ranks.timeout_s:g} s; call it on all of them"
            )

    def _alike(self, do: Callable[[], T]) -> T:
        """Do what all ranks do now, and hear whether all could; where only some could, none can go on.

        Raises:
            RankError: another rank could not.
        """
        fleet, error = self.fleet, None
        try:
            result = do()
        except BaseException as raised:
            if fleet is None:
                raise
            error = raised
        if fleet is not None:
            try:
                all_could = fleet.hear_outcome(self.controller.next_index, could=error is None)
            except BaseException as unheard:
                self.failure = Failure(None, None, unheard)
                raise
            if not all_could.all() and all_could.any():
                failed = error or RankError(f"rank {int((~all_could).argmax())} could not do it, this one could")
                self.failure = Failure(None, None, failed)
                raise failed
        if error is not None:
            raise error
        return result

    def _require_sound(self) -> None:
        self._require_open()
        if self.failure is not None:
            phase = self.failure.phase.value if self.failure.phase else "between phases"
            way_on = "call recover() to go on or reset() to drop all"
            if self.fleet is not None:
                way_on = "make new engines on all ranks"
            raise IterationFailedError(
                f"an iteration failed in {phase}: {self.failure.error}; {way_on}"
            ) from self.failure.error

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
            if self.fleet is not None:
                self.fleet.ranks.fail(self.controller.next_index)
            raise
        if self._border is None:
            self._in_hand = None
            if iteration is not None:
                self._void(iteration.void_reasons)
                self._deliver(iteration.outputs)
                iteration.outputs[:0] = self._early  # whose mailboxes have them already
                self._early = []
        return self._border

    def _void(self, reasons: Iterable[str]) -> None:
        """Mark the live requests: an iteration they live through is void, and its record may be gone before theirs."""
        for reason in reasons:
            for request in self._live.values():
                request.void_reasons.add(reason)

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
            progress: Show a progress bar on standard error, if that is a terminal.

        Returns:
            One finished output a prompt, in the order of ``prompts``.

        Raises:
            RequestError: a prompt or its parameters cannot be served; then none of them was handed in.
            EnginePausedError: the engine is paused or suspended; none of them was handed in.
        """
        from tqdm import tqdm

        self._lifecycle.require_running("generate")
        if isinstance(prompts, str):
            prompts = [prompts]
        each = self._params_each(prompts, params)
        for index, (prompt, one) in enumerate(zip(prompts, each, strict=True)):
            self._check_request(prompt, one, f"prompt {index}", False)
        ids = [self.add_request(prompt, one) for prompt, one in zip(prompts, each, strict=True)]
        if self.fleet is not None:
            self.fleet.wake()  # also without prompts: then the others may have some
        done: dict[str, RequestOutput] = {}
        bar = tqdm(total=len(ids), desc="generate", unit="request", disable=None if progress else True)
        with bar, self._mailbox(ids) as mailbox:
            while len(done) < len(ids):
                self.step()
                for output in mailbox.emptied():
                    if output.finished:
                        done[output.request_id] = output
                        bar.update()
        while self.fleet is not None and self.has_unfinished():  # others may still need this rank's experts
            self.step()
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

        While the engine is paused or suspended, asking for the next output raises EnginePausedError; it can be asked
        for again after :meth:`resume`.

        Raises:
            RequestError: at the call, not at the first output.
        """
        request_id = self.add_request(prompt, params, stream=True)
        return OutputStream(self._mailbox([request_id]), self.step)

    def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """:meth:`stream` for an event loop: several may run at once, and others get a turn after each step.

        While the engine is paused or suspended it waits, for others on the loop to resume it.
        """
        request_id = self.add_request(prompt, params, stream=True)
        return self._astream(self._mailbox([request_id]))

    async def _astream(self, mailbox: Mailboxes) -> AsyncIterator[RequestOutput]:
        with mailbox:
            while True:
                for output in mailbox.emptied():
                    yield output
                    if output.finished:
                        return
                while not (self._lifecycle.is_running or self._closed):
                    await asyncio.sleep(PAUSED_NAP_S)
                self.step()
                await asyncio.sleep(0)

    def _mailbox(self, request_ids: Sequence[str]) -> Mailboxes:
        return Mailboxes(self._boxes, self.abort, request_ids)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            box = self._boxes.get(output.request_id)
            if box is not None:
                box.append(output)

    # -- standing still --------------------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        """Whether it runs, is paused, or is suspended."""
        return self._lifecycle.state

    @property
    def suspension(self) -> Suspension | None:
        """How it is suspended and what that gave back; None unless it is."""
        return self._lifecycle.suspension

    def pause(self) -> None:
        """Refuse to step until :meth:`resume`. Nothing else changes: the pending forward is sampled after that.

        Requests may be handed in and aborted meanwhile. Does nothing to an engine that stands still already.

        Raises:
            MidIterationError: an iteration is in hand.
            IterationFailedError: an iteration has failed.
        """
        self._require_sound()
        self.require_border("pause")
        if self._lifecycle.is_running:
            self._together(Intent.PAUSE)
        self._lifecycle.pause()

    def suspend(self, mode: str | None = None) -> Suspension:
        """:meth:`pause`, and give memory of the device back until :meth:`resume`. No token of anybody changes.

        Args:
            mode: ``persist``: none is given back. ``offload``: caches, graphs and the wide columns of rows go; blocks
                that are held or cached, the pending forward's logits and all columns wait in pinned host memory.
                ``recompute``: they go, nothing is kept, and every request goes back to the queue with the tokens it
                has. None: the option ``suspend_mode``.

        Returns:
            What was given back. Again in the same mode it does nothing.

        Raises:
            ConfigError: there is no such mode.
            MidIterationError: an iteration is in hand.
            IterationFailedError: an iteration has failed.
            EnginePausedError: it is suspended in another mode.
            DeviceError: launched work had failed (not with ``recompute``, which drops it); nothing has changed.
        """
        self._require_sound()
        self.require_border("suspend")
        wanted = check_suspend_mode(mode or self.config.suspend_mode or "persist")
        if self.suspension is not None:
            if self.suspension.mode == wanted:
                return self.suspension
            self._lifecycle.require_running("suspend")
        self._together(Intent(f"suspend({wanted})"))
        if wanted == "offload":
            self._save_routing()  # a reset would find the blocks gone
        if wanted == "recompute":
            dropped = self.pending
            self._compute_again()
            if dropped is not None:  # whoever still looks at its iteration must not keep the memory
                dropped.logits.rows = dropped.logits.prompt = None
        return self._alike(lambda: self._lifecycle.suspend(wanted))

    def resume(self) -> None:
        """Run again after :meth:`pause` or :meth:`suspend`; does nothing to an engine that runs.

        What was given back is taken again: caches are made, graphs captured with the progress shown as at first, and
        what was saved is copied back bit for bit. Times of the requests that lived through it, and of the next
        iteration, are void.

        Raises:
            ConfigError: the memory cannot be had; the engine is still suspended, and :meth:`resume` may be tried again.
            EngineError: :meth:`load_weights` was interrupted while it copied.
        """
        self._require_open()
        if self._lifecycle.is_running:
            return
        self._require_whole()
        self._together(Intent.RESUME)
        stood_still = self._alike(self._lifecycle.resume)
        if stood_still is not None:
            self._void([stood_still])

    def load_weights(self, source: WeightSource) -> None:
        """Copy new weights into the model, in place; only while the engine is paused or suspended.

        Everything is checked before anything is copied. Captured CUDA graphs stay good, traced forwards are traced
        again (torch keeps the memory of the old traces). Cached prefixes are forgotten: no later request reuses what
        the old weights computed. Suspended with ``recompute`` an engine goes on as a new one would; else requests that
        have a row keep their keys and values and the pending forward, one token each, as in Megatron-LM. Engines that
        share the loaded model have the new weights too, and follow in their next iteration; they must not be computing
        while this copies.

        Args:
            source: A Hugging Face folder, a ``.gguf`` file, or (checkpoint name, tensor) pairs, of this very model.

        Raises:
            CheckpointError: a tensor is missing, unexpected or misshapen, or the checkpoint is another model's; one
                line that names it. The old weights are whole.
            EngineError: the engine runs.
        """
        self._require_open()
        if not self._lifecycle.is_running:
            self._require_whole()
            self._together(Intent.LOAD_WEIGHTS)
            self._alike(lambda: self._lifecycle.load_weights(source))
            return
        self._lifecycle.load_weights(source)  # says that it cannot

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
            ConfigError: any other name, or ``async`` with ``routing_replay``.
        """
        wanted = check_mode(mode)
        check_routing_mode(self.config.routing_replay, wanted)
        self.controller.wanted_mode = wanted
        if self.fleet is not None:
            self.fleet.switches += 1
            self.fleet.wake()  # all hear of it in the next iteration, whether there is work or not
            return
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

    def require_border_among_ranks(self, what: str) -> None:
        """With other ranks, refuse ``what`` in mid iteration: they could not do it there.

        Raises:
            MidIterationError: naming the phase it stands before.
        """
        if self.fleet is not None:
            self.require_border(what)

    def _require_whole(self) -> None:
        """With other ranks, nothing more is done together where one of them has failed."""
        if self.fleet is not None:
            self._require_sound()

    def _require_alone(self, what: str) -> None:
        if self.fleet is not None:
            raise EngineError(
                f"{what}: what one rank has failed in, the others cannot go on from; make new engines on all of them"
            )

    def recover(self) -> None:
        """Go on after a failed iteration: what was launched is dropped, every row is computed again.

        Requests keep the tokens they have; those whose last token ends them end. The tokens that follow are the
        same, since a draw depends on seed and position only.

        Raises:
            EnginePausedError: it is paused or suspended, and so has not failed.
        """
        self._require_open()
        self._require_alone("recover")
        self._lifecycle.require_running("recover")
        self._void(["recovered"])
        self._compute_again()
        self.failure = None

    def _compute_again(self) -> None:
        """Drop the iteration in hand, what was launched and every row; requests wait with the tokens they have."""
        self._save_routing()
        self._quiesce()
        self.controller.drop_pending()
        self._clear_cache()
        waiting = set(self.queue.waiting)
        made = {output.request_id for output in self.controller.undelivered if output.finished}
        back = []
        for request in sorted(self._live.values(), key=lambda request: request.key):
            if request in waiting:
                continue
            if request.request_id in made:  # its last output is there, and only its id was not let go of
                self._forget(request)
                continue
            _drop_what_is_half_given(request)
            if request.finish_reason is None and (end := end_of(request, self.resolved.eos_token_ids)) is not None:
                request.finish_reason, request.stop_reason = end
            if request.finish_reason is not None:
                if request.state is not RequestState.FINISHED:
                    request.move_to(RequestState.FINISHED)
                if request not in self.controller.unemitted:
                    self.controller.unemitted.append(request)
                continue
            if request.state is not RequestState.WAITING:
                request.move_to(RequestState.WAITING)
            back.append(request)
        self.queue.requeue(back)

    def reset(self) -> list[RequestOutput]:
        """Drop everything: the iteration in hand, the pending forward, every request, all counters.

        A paused or suspended engine runs afterwards.

        Returns:
            The last output of each live request, finish reason "abort"; before them what a failed iteration had made.

        Raises:
            ConfigError: a suspended engine cannot have its memory back; nothing has changed.
        """
        self._require_open()
        if self.failure is not None:
            self._require_alone("reset")
        self.require_border_among_ranks("reset")
        self._together(Intent.RESET)
        self._save_routing()
        stood_still = self._alike(self._lifecycle.restart)
        if stood_still is not None:
            self._void([stood_still])
        self._quiesce()
        self.controller.drop_pending()
        self.controller.unemitted.clear()
        self.controller.mode = self.controller.wanted_mode
        self.queue.clear()
        self._clear_cache()
        early, self._early = self._early, []
        outputs, self.controller.undelivered = self.controller.undelivered, []
        for request in list(self._live.values()):
            request.finish_reason = "abort"
            request.state = RequestState.FINISHED
            outputs.append(self._emitter.last_output(request, self.controller.next_index))
            self._forget(request)
        self.controller.next_index = 0
        self._deliver(outputs)
        self.counters.reset()
        self.failure = None
        return [*early, *outputs]

    def _save_routing(self) -> None:
        """What is recorded of the rows, before they are dropped; a forward that may not have run tells nothing."""
        if self.routing is None:
            return
        is_settled = self._in_hand is None and self.failure is None
        if not is_settled:
            self._quiesce()
        self.routing.save(self.table.live_requests(), self.routing.holdings(is_settled=is_settled))

    def _clear_cache(self) -> None:
        """No row, no held block, no cached block."""
        self.table.reset()
        self.pool.reset()
        if self.prefix_cache is not None:
            self.prefix_cache.reset()

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix, also of blocks that live requests hold; these go on undisturbed.

        Returns:
            Cached blocks that are free now; 0 without prefix caching.
        """
        self._require_open()
        return 0 if self.prefix_cache is None else self.prefix_cache.forget()

    def _quiesce(self) -> None:
        """Let launched work end, whatever it does, clear a device error, and let go of the iteration in hand."""
        self._in_hand = self._border = None
        self.recorder.abandon_iteration()
        try:
            self.device.synchronize()
        except DeviceError:
            self.device.clear_error()
            self.device.synchronize()

    def close(self) -> None:
        """Stop the device's threads and let go of caches and graphs. The engine cannot be used afterwards.

        With other ranks it first runs what they need of it, until all have nothing to do or close too.
        """
        if self._closed:
            return
        self._leave_fleet()
        self._quiesce()
        self._closed = True
        self._lifecycle.close()
        self.device.close()
        self.runner.release()

    def _leave_fleet(self) -> None:
        fleet = self.fleet
        if fleet is None:
            return
        if self.failure is None and self._in_hand is None and self._lifecycle.is_running and fleet.is_awake:
            try:
                self._together(Intent.CLOSE)
            except RankError as error:
                log.warning("%s", error)
        fleet.ranks.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self.fleet is not None and self.failure is None:
            self.fleet.ranks.fail(self.controller.next_index)
            self.failure = Failure(None, None, error or kind())
        self.close()


def _drop_what_is_half_given(request: Request) -> None:
    """An interrupt in the middle of a commit: the token is drawn again, the same, with all that belongs to it.

    A prompt that was read in part is read anew, and its log probabilities with it.
    """
    if request.params.logprobs is not None:
        given = min(len(request.output_ids), len(request.logprobs))
        del request.output_ids[given:], request.logprobs[given:]
    request.drop_partial_prompt_logprobs()
