"""Which experts each token went to: kept beside keys and values, given out with the output, and forced on request.

What is recorded lies in KV blocks, in a tensor of its own: [num_blocks + 1, block_size, layers with experts, K] int16.
A token's choices are written where its keys are, by the forward that chooses. So whoever shares a block shares what is
in it, a prompt read in chunks fills it bit by bit, and padding goes to the dummy block.

Letters: T tokens of a forward, n tokens of a request, L layers with experts, K experts of a token.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.batch import BatchShape
from engine.device import Device, Event
from engine.errors import ConfigError, RequestError
from engine.models.base import PagedState
from engine.models.moe import MoE
from engine.request import Request
from engine.staging import Halves, HostSlab
from engine.table import RequestTable
from tracing.recorder import Recorder

Choices = NDArray[np.int16]
"""[n, L, K] numbers of experts, of all there are; the best first."""
NOT_GIVEN = -1
"""In place of a number: the router chooses."""
_MOST_EXPERTS = int(np.iinfo(np.int16).max)


@dataclass(frozen=True, slots=True)
class RoutingSizes:
    """How much there is to choose in a model."""

    num_layers: int
    """L; draft heads do not count."""
    top_k: int
    """K."""
    num_experts: int

    @classmethod
    def of(cls, model: object) -> RoutingSizes:
        """Of a model whose layers with experts have numbers (:func:`engine.models.moe.number_experts`).

        Raises:
            ConfigError: there are none, or too many experts for 16 bits.
        """
        modules = model.modules() if isinstance(model, nn.Module) else ()
        found = [module for module in modules if isinstance(module, MoE) and module.number is not None]
        if not found:
            raise ConfigError(
                "routing_replay: the model has no layers with experts whose choices could be kept; use None"
            )
        config = found[0].config
        if config.num_experts > _MOST_EXPERTS:
            raise ConfigError(f"routing_replay: at most {_MOST_EXPERTS} experts a layer, got {config.num_experts}")
        return cls(len(found), config.top_k, config.num_experts)

    @property
    def state(self) -> PagedState:
        """What is kept of each token."""
        return PagedState(shapes=((self.num_layers, self.top_k),), dtypes=(torch.int16,))

    def checked(self, routing: object) -> Choices:
        """A recording as the engine keeps it, a copy.

        Args:
            routing: [n, L, K] whole numbers: an array, or what numpy makes one of.

        Raises:
            RequestError: it is none; ``field`` is ``routing``.
        """

        def refuse(text: str) -> RequestError:
            return RequestError(f"routing: {text}", field="routing")

        try:
            given = np.asarray(routing)
        except ValueError as error:
            raise refuse(f"expected an array [tokens, layers, experts of a token]: {error}") from error
        wanted = (self.num_layers, self.top_k)
        if given.ndim != 3 or given.shape[1:] != wanted:
            raise refuse(f"expected [tokens, {wanted[0]} layers, {wanted[1]} experts of a token], got {given.shape}")
        if given.dtype.kind not in "iu":
            raise refuse(f"expected whole numbers, got {given.dtype}")
        if given.size and not (given.min() >= 0 and given.max() < self.num_experts):
            raise refuse(f"experts must lie in [0, {self.num_experts}), got {given.min()} to {given.max()}")
        ordered = np.sort(given, axis=2)
        twice = (ordered[:, :, 1:] == ordered[:, :, :-1]).any(axis=2)
        if twice.any():
            token, layer = np.argwhere(twice)[0].tolist()
            raise refuse(f"token {token} names an expert twice in layer {layer}: {given[token, layer].tolist()}")
        return given.astype(np.int16)


def salted(cache_salt: str, given: Choices) -> str:
    """The salt of a request that replays ``given``: it shares cached blocks with those that replay the same alone."""
    return f"{cache_salt}\0routing:{hashlib.sha256(np.ascontiguousarray(given).tobytes()).hexdigest()}"


# -- replay: choices on their way to a forward -------------------------------------------------------------------------


class _GivenHalf:
    """Choices staged for one forward, on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.view: Choices = tensor.numpy()
        self.copied: Event | None = None


class GivenRouting:
    """Choices that requests brought with them, one forward's at a time, where its layers read them.

    Args:
        device: Where.
        sizes: Of the model.
        max_tokens: Most tokens of a forward.
    """

    def __init__(self, device: Device, sizes: RoutingSizes, max_tokens: int) -> None:
        shape = (max_tokens, sizes.num_layers, sizes.top_k)
        self.device_TLK = device.zeros(shape, torch.int16).fill_(NOT_GIVEN)
        """Static, so that graphs may read it."""
        self._halves = Halves(*(_GivenHalf(device.host(shape, torch.int16)) for _ in range(2)))
        self._staged: _GivenHalf | None = None

    def stage(self, half: HostSlab, shape: BatchShape, table: RequestTable | None) -> None:
        """Stage what the rows staged in ``half`` bring for the tokens they read; host only.

        Blocks only if the last copy out of its own half is still queued.

        Args:
            half: Rows and lengths of the forward. Lengths must be exact, as they are in legacy mode.
            shape: Of the forward.
            table: Whose rows they are; None: all is padding.
        """
        staged = self._halves.acquire()
        staged.view[: shape.num_tokens] = NOT_GIVEN
        if table is not None:
            names = ("table_row", "query_start", "query_len", "kv_len")
            for row, start, length, end in zip(
                *(half.fields[name][: shape.num_rows].tolist() for name in names), strict=True
            ):
                request = table.requests[row] if row < table.num_live else None
                if request is not None and request.given_routing is not None:
                    known = request.given_routing[end - length : end]
                    staged.view[start : start + known.shape[0]] = known
        self._staged = staged

    def upload(self, num_tokens: int) -> None:
        """Copy what is staged to the device; inside launched work."""
        assert self._staged is not None
        self.device_TLK[:num_tokens].copy_(self._staged.tensor[:num_tokens], non_blocking=True)

    def note_copied(self, event: Event) -> None:
        """``event`` is recorded behind :meth:`upload`."""
        assert self._staged is not None
        self._staged.copied = event


# -- record: choices on their way to outputs ---------------------------------------------------------------------------


class Holdings(NamedTuple):
    """What the table's rows hold, before somebody changes it."""

    keys: NDArray[np.int64]
    block_ids: NDArray[np.int32]
    num_read: NDArray[np.int64]
    """[rows] tokens of its prompt that are in the cache; -1: the prompt is read, and all tokens but the newest are."""


class RoutingRecorder:
    """Takes recorded choices of requests to the host before their blocks become somebody else's.

    The copy runs behind all launched work and is waited for: simple, and no loss in legacy mode, where nothing is in
    flight when rows end.

    Args:
        table: Whose rows are recorded.
        device: Where.
        kept: Gives the recorded choices of all blocks; None while memory is given back.
        recorder: Notes the wait.
        sizes: Of the model.
    """

    def __init__(
        self,
        table: RequestTable,
        device: Device,
        kept: Callable[[], Tensor | None],
        recorder: Recorder,
        sizes: RoutingSizes,
    ) -> None:
        self.sizes = sizes
        self._table = table
        self._device = device
        self._kept = kept
        self._recorder = recorder

    def holdings(self, *, is_settled: bool = True) -> Holdings:
        """Of all rows, as they are now; copies.

        Args:
            is_settled: Whether what prepare counted has run; else only the chunks before a row's present one have.
        """
        table, n = self._table, self._table.num_live
        read = np.minimum(table.kv_len[:n], table.chunk_end[:n]) if is_settled else table.chunk_done[:n]
        num_read = np.where(table.is_prefill[:n], read, -1).astype(np.int64)
        return Holdings(table.key[:n].copy(), table.block_ids[:n].copy(), num_read)

    def save(self, requests: Iterable[Request], holdings: Holdings | None = None) -> None:
        """Copy what is recorded of ``requests`` to them; blocks until the device has done what is launched.

        Args:
            requests: Those without a row are left alone.
            holdings: What they held, if they hold it no more: their blocks must not have been written since.

        Raises:
            DeviceError: launched work had failed.
        """
        kept = self._kept()
        if kept is None:
            return
        held = self.holdings() if holdings is None else holdings
        found = [(request, *self._places(request, held, kept.shape[1])) for request in requests]
        found = [one for one in found if one[2]]
        if not found:
            return
        copied = self._fetch(kept, np.concatenate([blocks for _, blocks, _ in found]).astype(np.int64))
        at = 0
        for request, blocks, count in found:
            made: Choices = copied[at : at + blocks.size].reshape(-1, *kept.shape[2:])[:count].copy()
            at += blocks.size
            if request.made_routing is None or request.made_routing.shape[0] <= count:
                request.made_routing = made

    @staticmethod
    def _places(request: Request, held: Holdings, block_size: int) -> tuple[NDArray[np.int32], int]:
        """Blocks that hold its choices, and of how many tokens."""
        rows = np.flatnonzero(held.keys == request.key)
        if rows.size == 0:
            return np.zeros(0, dtype=np.int32), 0
        row, known = int(rows[0]), request.num_tokens - 1
        num_read = int(held.num_read[row])
        count = known if num_read < 0 else min(num_read, known)
        return held.block_ids[row, : -(-count // block_size)], count

    def _fetch(self, kept: Tensor, block_ids: NDArray[np.int64]) -> Choices:
        device = self._device
        index = device.host(block_ids.size, torch.int64).copy_(torch.from_numpy(block_ids))
        copy = device.host((block_ids.size, *kept.shape[1:]), torch.int16)

        def fetch() -> None:
            blocks = index.to(device.torch_device, non_blocking=True)
            copy.copy_(kept.index_select(0, blocks), non_blocking=True)

        device.compute.launch(fetch)
        with self._recorder.wait("routing"):
            device.compute.record().wait()
        view: Choices = copy.numpy()
        return view

    def finish(self, request: Request) -> None:
        """Settle what is recorded of a request that has ended: of all its tokens but the newest, as far as they ran."""
        if request.row is not None:
            self.save([request])
        made = request.made_routing
        if made is None:
            made = np.zeros((0, self.sizes.num_layers, self.sizes.top_k), dtype=np.int16)
        request.made_routing = made[: request.num_tokens - 1]
