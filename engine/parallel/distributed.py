"""Ranks that are processes, of one machine or several, over ``torch.distributed``: gloo on the CPU, NCCL on CUDA.

The host's agreements have a gloo group of their own, whatever the device's collectives run on: a host that waits for
numbers must not stand behind what its device waits for.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from engine.config import EngineConfig
from engine.errors import ConfigError, RankError
from engine.parallel.ranks import FAILED, NUM_VALUES, TOPICS, Ranks
from engine.parallel.shard import Shard

log = logging.getLogger(__name__)

T = TypeVar("T")

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_BEAT_S = 1.0
"""How often a rank shows that it lives."""
_SLICE_S = 1.0
"""How long a sleeping rank waits at a time before it looks whether the others are still there."""

# Torch 2.13 has given them other names, and warns of those of before.
_gather_tensor: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_sum: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_joined: ProcessRanks | None = None
_times_joined = count()
"""All ranks join equally often, so they meet each time under a name of its own."""


@cache
def _meeting_place(rank: int, size: int, timeout_s: float) -> Store:
    """Kept as long as the process lives: rank 0 may hold it for all."""
    with _telling(f"rank {rank} found nobody at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"):
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            size,
            is_master=rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )


def is_launched() -> bool:
    """Whether this process was started as one of several, by ``torchrun`` or the like."""
    return all(name in os.environ for name in _VARIABLES)


class ProcessRanks(Ranks):
    """This process' rank. One a process: :meth:`join` makes it, or gives back the one that is there.

    Args:
        meeting: Where ranks find each other.
        prefix: Of its keys that are theirs alone.
        rank: This one's.
        size: How many.
        device: What the collectives of forwards run on.
        timeout_s: As in :class:`Ranks`.
    """

    def __init__(
        self, meeting: Store, prefix: str, rank: int, size: int, device: torch.device, timeout_s: float
    ) -> None:
        super().__init__(rank, size, timeout_s)
        self.device = device
        self._meeting, self._prefix = meeting, prefix
        self._store = store = PrefixStore(prefix, meeting)
        self._is_left = False
        self._heard: dict[int, tuple[bytes, float]] = {}
        """Of each other rank: its newest sign of life, and when it was first seen."""
        self._stops = threading.Event()
        store.set(f"lives/{rank}", "0")
        backend = "nccl" if device.type == "cuda" else "gloo"
        wait = timedelta(seconds=timeout_s)
        with _telling(f"rank {rank}: {size} ranks could not find each other within {timeout_s:g} s"):
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait)
            self._host = dist.new_group(backend="gloo", timeout=wait)
            self._device = dist.group.WORLD
        if size > 1:
            threading.Thread(target=self._beat, name="rank-lives", daemon=True).start()

    @classmethod
    def join(cls, *, device: torch.device, timeout_s: float) -> ProcessRanks:
        """Join those that were started together with this process; waits for all of them.

        Raises:
            ConfigError: it was not started as one of several, or another group has been joined already.
            RankError: the others do not come.
        """
        global _joined
        if _joined is not None and not _joined._is_left:
            if _joined.device != device:
                raise ConfigError(f"this process has joined its ranks on {_joined.device} already, not on {device}")
            return _joined
        if not is_launched():
            raise ConfigError(
                "expert_parallel: this process is alone; start the ranks with torchrun --nproc-per-node N -m workbench "
                "run ..., or from a notebook with Cluster(ranks=N)"
            )
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        prefix = f"workbench/{attempt}/{next(_times_joined)}"
        _joined = cls(_meeting_place(rank, size, timeout_s), prefix, rank, size, device, timeout_s)
        return _joined

    def _run(self, what: str, do: Callable[[], T]) -> T:
        if self._is_left:
            raise RankError(f"{what}: this rank has left the others")
        with _telling(
            f"rank {self.rank} gave up {what}: another rank has died, hangs, or is not driven (it waits "
            f"{self.timeout_s:g} s at most)"
        ):
            return do()

    def _exchange_values(self, mine: NDArray[np.int64], what: str) -> NDArray[np.int64]:
        all_ = np.zeros((self.size, mine.size), dtype=np.int64)
        out = list(torch.from_numpy(all_).unbind(0))
        self._run(what, lambda: dist.all_gather(out, torch.from_numpy(mine), group=self._host))
        return all_

    def _gather(self, x: Tensor) -> Tensor:
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._run("a gather", lambda: _gather_tensor(out, x, group=self._device))
        return out

    def _sum(self, x: Tensor) -> Tensor:
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        self._run("a sum", lambda: _scatter_sum(out, x, group=self._device))
        return out

    def _exchange(self, x: Tensor, counts: list[int]) -> tuple[Tensor, list[int]]:
        given = torch.tensor(counts, dtype=torch.int64, device=x.device)
        taken = torch.empty_like(given)
        self._run("an exchange", lambda: dist.all_to_all_single(taken, given, group=self._device))
        took = [int(one) for one in taken.tolist()]
        out = x.new_empty((sum(took), *x.shape[1:]))
        self._run("an exchange", lambda: dist.all_to_all_single(out, x, took, counts, group=self._device))
        return out, took

    def wake(self, round_: int) -> None:
        self._run("waking the others", lambda: self._store.set(f"wake/{round_}", "1"))

    def sleep(self, round_: int, timeout_s: float | None) -> bool:
        if timeout_s == 0.0:
            with suppress(RankError):  # who has left wakes nobody
                return self._run("asking whether others wake", lambda: bool(self._store.check([f"wake/{round_}"])))
            return False
        left_s = float("inf") if timeout_s is None else timeout_s
        while left_s > 0:
            self._look_for_the_dead()
            slice_s = min(_SLICE_S, left_s)
            try:
                self._store.wait([f"wake/{round_}"], timedelta(seconds=slice_s))
                return True
            except (dist.DistStoreError, RuntimeError) as error:
                if "timeout" not in str(error).lower() and "timed out" not in str(error).lower():
                    raise RankError(f"rank {self.rank} slept, and the others have gone: {_line(error)}") from error
            left_s -= slice_s
        return False

    def _beat(self) -> None:
        """Say again and again that this process lives, over a connection of its own: a wait keeps one busy."""
        store = PrefixStore(self._prefix, cast(Any, self._meeting).clone())
        while not self._stops.wait(_BEAT_S):
            with suppress(Exception):
                store.set(f"lives/{self.rank}", str(time.time_ns()))

    def _look_for_the_dead(self) -> None:
        """A sleeper meets nobody, so nothing else would tell it that it sleeps for ever."""
        now = time.monotonic()
        for rank in range(self.size):
            if rank == self.rank:
                continue
            if self._store.check([f"left/{rank}"]):
                raise RankError(f"rank {self.rank} slept, and rank {rank} has left")
            beat = self._store.get(f"lives/{rank}")
            if self._heard.get(rank, (b"", now))[0] != beat:
                self._heard[rank] = beat, now
            elif now - self._heard[rank][1] > self.timeout_s:
                raise RankError(f"rank {self.rank} slept, and rank {rank} has died: no sign for {self.timeout_s:g} s")

    def fail(self, iteration: int) -> None:
        """It stands in for this rank at the next agreement, which the others come to; nobody waits for theirs here."""
        mine = torch.zeros(NUM_VALUES, dtype=torch.int64)
        mine[0], mine[1] = TOPICS.index(FAILED), iteration
        out = [torch.empty_like(mine) for _ in range(self.size)]
        with suppress(Exception):
            self._last_word = cast(Any, dist.all_gather(out, mine, group=self._host, async_op=True)), out, mine

    def close(self) -> None:
        global _joined
        if self._is_left:
            return
        self._is_left = True
        self._stops.set()
        with suppress(Exception):
            self._store.set(f"left/{self.rank}", "1")
        with suppress(Exception):
            dist.destroy_process_group()
        if _joined is self:
            _joined = None


def take_own_gpu(config: EngineConfig) -> None:
    """Let each rank of a machine use a GPU of its own, before anything is put on one.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    if not (config.has_ranks and config.device == "cuda" and "LOCAL_RANK" in os.environ):
        return
    local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if local >= count:
        raise ConfigError(
            f"expert_parallel: rank {local} of this machine has no GPU of its own, there are {count}; start fewer "
            "ranks a machine"
        )
    torch.cuda.set_device(local)


def shard_of(config: EngineConfig, ranks: Ranks | None, device: torch.device) -> Shard | None:
    """Which experts a model for ``config`` is to hold; joins the ranks of this process where none are given."""
    if ranks is None and config.has_ranks:
        ranks = ProcessRanks.join(device=device, timeout_s=config.rank_timeout_s)
    return None if ranks is None else Shard(ranks.rank, ranks.size)


@contextmanager
def _telling(what: str) -> Any:
    """One line for what torch.distributed raises."""
    try:
        yield
    except (RuntimeError, dist.DistError, ValueError) as error:
        if isinstance(error, RankError):
            raise
        raise RankError(f"{what}: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
