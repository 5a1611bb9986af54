"""Whether an engine runs: pausing, suspending, resuming, and new weights in between.

    RUNNING   -> pause()   -> PAUSED      everything stays where it is, and stepping is refused
    any       -> suspend() -> SUSPENDED   as its mode says; ``Suspension`` tells what was given back
    PAUSED or SUSPENDED -> resume(), reset() -> RUNNING

All at an iteration border. What a suspended engine holds:

    mode        KV blocks       pending forward            rows, prefix names   caches, graphs, wide columns
    persist     on the device   on the device              kept                 on the device
    offload     in host memory  its logits in host memory  kept                 let go of, made anew by resume
    recompute   none            dropped                    none; all wait       let go of, made anew by resume
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.cache.blocks import BlockPool
from engine.cache.prefix_pool import PrefixPool
from engine.config import SuspendMode
from engine.controller import Controller
from engine.device import Device, Work
from engine.errors import CheckpointError, ConfigError, DeviceError, EngineError, EnginePausedError
from engine.models.base import Model
from engine.models.checkpoint import damaged, iter_folder_weights, read_json
from engine.models.gguf_file import GGUFFile
from engine.models.loader import LoadedModel
from engine.models.weights import Refillable, check_weights
from engine.prefix_cache import PrefixCache
from engine.results import PendingForward
from engine.runner import WIDE_COLUMNS, CaptureProgress, Runner
from engine.table import RequestTable

Weights = Iterable[tuple[str, Tensor]]
WeightSource = str | Path | Weights
"""A Hugging Face folder, a ``.gguf`` file, or (checkpoint name, tensor) pairs."""
_COLUMNS = ("block_table", "ints", "floats", "drafts", "length", "accepted", *WIDE_COLUMNS)


class EngineState(Enum):
    """Whether an engine may be stepped."""

    RUNNING = "running"
    PAUSED = "paused"
    SUSPENDED = "suspended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspension:
    """What a suspended engine has let go of."""

    mode: SuspendMode
    freed_bytes: int
    """By how much the memory in use fell: of the GPU, or on the CPU devices of the whole process, copies included."""
    saved_bytes: int
    """Host memory that holds what was copied off the device."""


def check_suspend_mode(mode: str) -> SuspendMode:
    """Return ``mode`` if it is one; raise ConfigError naming all otherwise."""
    if mode not in get_args(SuspendMode):
        raise ConfigError(f"mode must be one of {', '.join(get_args(SuspendMode))}; got {mode!r}")
    return mode  # type: ignore[return-value]


class Lifecycle:
    """One engine's state, and what moves it from one to another; the engine sees to borders and requests."""

    def __init__(
        self,
        *,
        loaded: LoadedModel,
        runner: Runner,
        pool: BlockPool,
        controller: Controller,
        cache: PrefixCache | None,
        progress: CaptureProgress | None,
    ) -> None:
        self._loaded = loaded
        self._runner = runner
        self._pool = pool
        self._controller = controller
        self._cache = cache
        self._progress = progress
        self.state = EngineState.RUNNING
        self.suspension: Suspension | None = None
        self._saved: HostCopy | None = None
        self._weights = _versions.setdefault(loaded.model, _Version())
        self._weights_seen = self._weights.number
        self._are_weights_torn = False
        """Copying new ones was interrupted: some are new and some are old."""
        self.void_reasons: set[str] = set()
        """Why the times of the iteration that begins next mean nothing: the device stood idle before it on purpose."""

    @property
    def is_running(self) -> bool:
        """Whether stepping is allowed."""
        return self.state is EngineState.RUNNING

    def require_running(self, what: str) -> None:
        """Refuse ``what`` while the engine stands still.

        Raises:
            EnginePausedError: naming the way on.
        """
        if self.state is not EngineState.RUNNING:
            mode = f" ({self.suspension.mode})" if self.suspension is not None else ""
            raise EnginePausedError(f"{what}: the engine is {self.state.value}{mode}; call resume() first")

    def take_void_reasons(self) -> set[str]:
        """:attr:`void_reasons`, for the iteration that begins now and none after it."""
        taken, self.void_reasons = self.void_reasons, set()
        return taken

    # -- standing still and going on -------------------------------------------------------------------------------

    def pause(self) -> None:
        """Refuse steps; nothing else changes."""
        if self.is_running:
            self.state = EngineState.PAUSED

    def suspend(self, mode: SuspendMode) -> Suspension:
        """Let go of memory as ``mode`` says; for recompute nothing may be pending or held any more.

        Raises:
            DeviceError: what was launched had failed; the engine is as it was.
            RuntimeError: host memory for the copies cannot be had; the engine is as it was.
        """
        runner = self._runner
        device, saved = runner.device, None
        before_bytes = device.used_bytes()
        if mode == "offload":
            slots = slots_in_use(self._controller.table, self._cache, runner.states_per_row)
            saved = HostCopy(runner, blocks_in_use(self._pool), self._controller.pending, slots)
        elif mode == "recompute":
            device.synchronize()
        saved_bytes = 0 if saved is None else saved.num_bytes
        self._saved = saved
        self.state = EngineState.SUSPENDED
        self.suspension = Suspension(mode=mode, freed_bytes=0, saved_bytes=saved_bytes)
        if mode != "persist":
            if saved is not None:
                saved.detach()
            runner.let_go()
            freed_bytes = max(0, before_bytes - device.used_bytes())
            self.suspension = Suspension(mode=mode, freed_bytes=freed_bytes, saved_bytes=saved_bytes)
        return self.suspension

    def resume(self) -> str | None:
        """Have everything where it was; returns the reason for which times until now are void, None if it ran.

        Raises:
            ConfigError: memory cannot be had any more. The engine is still suspended, and loses nothing.
            EngineError: weights are neither the old nor the new ones.
        """
        return self._go_on(with_saved=True)

    def restart(self) -> str | None:
        """:meth:`resume` without what was saved: the engine is about to be emptied."""
        return self._go_on(with_saved=False)

    def _go_on(self, *, with_saved: bool) -> str | None:
        if self.is_running:
            return None
        if self._are_weights_torn:
            raise EngineError(
                "copying new weights was interrupted, and some are old; call load_weights() with a whole checkpoint"
            )
        if self.suspension is not None and self.suspension.mode != "persist":
            self._runner.take_again(self._loaded.buckets, self._progress)
            if self._saved is not None and with_saved:
                try:
                    self._saved.restore()  # behind the captures, which draw into the columns of all rows
                except BaseException:
                    self._runner.let_go()
                    raise
        reason = self.state.value
        self.state, self.suspension, self._saved = EngineState.RUNNING, None, None
        self.void_reasons.add(reason)
        return reason

    def close(self) -> None:
        """Let go of what was saved."""
        self._saved = None

    # -- weights ---------------------------------------------------------------------------------------------------

    def load_weights(self, source: WeightSource) -> None:
        """See :meth:`engine.engine.Engine.load_weights`."""
        if self.is_running:
            raise EngineError("load_weights needs an engine that stands still; call pause() or suspend() first")
        loaded, device = self._loaded, self._runner.device
        model = loaded.model
        if not isinstance(model, Refillable):
            raise CheckpointError(
                f"model {loaded.name}: {type(model).__name__} has no weight_targets(), by which new weights are checked"
            )
        with _naming(source):
            read = _reader(source, model)
            check_weights(model.weight_targets(), read())
            device.synchronize()  # the pending forward reads the old ones
            self._are_weights_torn = True
            loaded.buckets.clear()  # weights are folded into them
            model.load_weights(read())
        device.synchronize()  # they were filled on another stream
        self._weights.number += 1
        self._take_new_weights()
        self._are_weights_torn = False

    def follow_weights(self) -> None:
        """Called before an iteration begins: another engine may have loaded weights into the model of both."""
        if self._weights_seen != self._weights.number:
            self._take_new_weights()

    def _take_new_weights(self) -> None:
        """No new request is answered from what the old weights computed; traced forwards are traced anew."""
        runner = self._runner
        if self._cache is not None:
            self._cache.forget()
        if runner.cache_tensors and runner.graphs and runner.device.kind != "cuda":
            runner.recapture(self._loaded.buckets)
        self._weights_seen = self._weights.number


@dataclass(slots=True)
class _Version:
    number: int = 0
    """How often weights were loaded into the model since."""


_versions: WeakKeyDictionary[Model, _Version] = WeakKeyDictionary()
"""Of each model that an engine was made on; engines that share it follow."""


# -- what offload keeps ------------------------------------------------------------------------------------------------


def blocks_in_use(pool: BlockPool) -> NDArray[np.int64]:
    """Blocks whose contents matter, ascending: held by somebody, or cached."""
    in_use = pool.ref_counts > 0
    if isinstance(pool, PrefixPool):
        in_use[pool.index.idle] = True
    return np.flatnonzero(in_use)


def slots_in_use(table: RequestTable, cache: PrefixCache | None, width: int) -> NDArray[np.int64]:
    """State slots whose contents matter: ``width`` of each row, and of snapshots; empty for models without."""
    rows = table.state_slot[: table.num_live].astype(np.int64)
    owned = rows[rows >= 0][:, None] * width + np.arange(width)
    kept = [] if cache is None or cache.snapshots is None else [cache.snapshots.slots]
    return np.concatenate([owned.ravel(), *kept])


class HostCopy:
    """What is not to be lost of the device's memory, in pinned host memory: blocks, slots, columns, pending logits.

    Making one waits for the device.
    """

    def __init__(
        self,
        runner: Runner,
        block_ids: NDArray[np.int64],
        pending: PendingForward | None,
        slot_ids: NDArray[np.int64] | None = None,
    ) -> None:
        self._runner = runner
        self._pending = pending
        device, tensors = runner.device, runner.cache_tensors
        device.synchronize()
        both = (np.zeros(0, dtype=np.int64) if slot_ids is None else slot_ids), block_ids
        self._indices = tuple(device.host(ids.size, torch.int64).copy_(torch.from_numpy(ids)) for ids in both)
        """Slots and blocks: what to keep of a tensor, by whether it is paged."""
        self._parts = [
            device.host((both[is_paged].size, *tensor.shape[1:]), tensor.dtype)
            for tensor, is_paged in zip(tensors, runner.are_paged, strict=True)
        ]
        held = {name: getattr(runner.columns, name) for name in _COLUMNS}
        self._columns = {name: _twin(device, column) for name, column in held.items() if column is not None}
        logits = None if pending is None else pending.logits
        self._rows = None if logits is None or logits.rows is None else _twin(device, logits.rows)
        self._prompt = None if logits is None or logits.prompt is None else _twin(device, logits.prompt)

        def save() -> None:
            indices = [ids.to(device.torch_device) for ids in self._indices]
            # one by one: each needs room for itself
            for source, target, is_paged in zip(tensors, self._parts, runner.are_paged, strict=True):
                target.copy_(source.index_select(0, indices[is_paged]), non_blocking=True)
            for name, copy in self._columns.items():
                copy.copy_(held[name], non_blocking=True)
            if logits is not None:
                for part, copied in ((logits.rows, self._rows), (logits.prompt, self._prompt)):
                    if part is not None and copied is not None:
                        copied.copy_(part, non_blocking=True)

        _run(device, save)

    @property
    def num_bytes(self) -> int:
        """Host memory it takes."""
        copies = [*self._indices, *self._parts, *self._columns.values(), self._rows, self._prompt]
        return sum(copy.nbytes for copy in copies if copy is not None)

    def detach(self) -> None:
        """Let the pending forward hold no device memory: its logits are the copies now, and no graph's."""
        if self._pending is not None:
            logits = self._pending.logits
            logits.rows, logits.prompt, logits.in_graph = self._rows, self._prompt, False
            self._pending.plan.prefill_plan = None  # only its forward needed it

    def restore(self) -> None:
        """Put everything back, bit for bit; waits until it is there."""
        device, columns, tensors = self._runner.device, self._runner.columns, self._runner.cache_tensors

        def put(copy: Tensor) -> Tensor:
            return copy.to(device.torch_device, non_blocking=True)

        def restore() -> None:
            indices = [put(ids) for ids in self._indices]
            for copy, target, is_paged in zip(self._parts, tensors, self._runner.are_paged, strict=True):
                target.index_copy_(0, indices[is_paged], put(copy))
            for name, copy in self._columns.items():
                if name in WIDE_COLUMNS:
                    setattr(columns, name, put(copy))
                else:
                    getattr(columns, name).copy_(copy, non_blocking=True)
            if self._pending is not None:
                logits = self._pending.logits
                logits.rows = None if self._rows is None else put(self._rows)
                logits.prompt = None if self._prompt is None else put(self._prompt)

        _run(device, restore)


def _twin(device: Device, tensor: Tensor) -> Tensor:
    return device.host(tuple(tensor.shape), tensor.dtype)


def _run(device: Device, work: Work) -> None:
    """Launch work on an idle device and wait for it; a failure is raised and forgotten."""
    device.compute.launch(work)
    try:
        device.synchronize()
    except DeviceError:
        device.clear_error()
        raise


# -- where weights come from -------------------------------------------------------------------------------------------


@contextmanager
def _naming(source: WeightSource) -> Iterator[None]:
    """Put the source before the message of a CheckpointError that does not name it."""
    try:
        yield
    except CheckpointError as error:
        name = str(source) if isinstance(source, str | Path) else "new weights"
        if name in str(error):
            raise
        raise CheckpointError(f"{name}: {error}") from error


def _reader(source: WeightSource, model: Refillable) -> Callable[[], Weights]:
    """What reads the source from its beginning, twice; a checkpoint with a configuration must be of ``model``."""
    if not isinstance(source, str | Path):
        pairs = list(source)
        for pair in pairs:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], Tensor)):
                raise CheckpointError(f"weights are (checkpoint name, tensor) pairs, got {type(pair).__name__}")
        return lambda: pairs
    path = Path(source).expanduser()
    if path.is_dir():
        model.check_config(read_json(path / "config.json"))
        return lambda: iter_folder_weights(path)
    if path.suffix.lower() == ".gguf":
        file = GGUFFile(path)
        with damaged("its metadata"):
            config = file.config()
        model.check_config(config)
        return file.iter_weights
    raise CheckpointError(f"{source} must be a checkpoint folder, a .gguf file or (name, tensor) pairs")
