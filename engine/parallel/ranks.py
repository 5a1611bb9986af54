"""One rank among those that share a model's experts, and what it can do together with the others.

``agree`` is the host's: a few whole numbers of everybody, before anything is launched that depends on them. ``gather``,
``sum`` and ``exchange`` are the device's: they run inside forwards, in the order of the compute stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import count
from time import perf_counter_ns
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import RankError
from engine.parallel.log import CollectiveLog

NUM_VALUES = 16
"""Of every agreement, topic and iteration included: ranks that are not at the same one must still understand that."""

_numbers = count()
_known: WeakValueDictionary[str, Ranks] = WeakValueDictionary()


class Ranks(ABC):
    """This rank's end of the connection.

    Attributes:
        rank: From 0.
        size: How many there are.
        timeout_s: How long one waits for the others before it gives up.
        log: What was done together.
        name: By which operators of traced forwards find it in this process.
    """

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.log = CollectiveLog()
        self.name = f"ranks-{next(_numbers)}"
        _known[self.name] = self

    def agree(self, topic: str, iteration: int, values: Sequence[int]) -> NDArray[np.int64]:
        """Exchange whole numbers; blocks until all ranks have come to the same agreement.

        Args:
            topic: What about, one of ``TOPICS``.
            iteration: Of this rank; must be that of all.
            values: At most ``NUM_VALUES - 2``.

        Returns:
            [size, len(values)] int64, a row a rank.

        Raises:
            RankError: a rank has gone, does not come within ``timeout_s``, or is at another agreement.
        """
        assert len(values) <= NUM_VALUES - 2
        mine = np.zeros(NUM_VALUES, dtype=np.int64)
        mine[0], mine[1], mine[2 : 2 + len(values)] = TOPICS.index(topic), iteration, values
        noted = self.log.add("host", "agree", topic, iteration, mine.nbytes)
        all_ = self._exchange_values(mine, f"the agreement on {topic} of iteration {iteration}")
        noted.end_ns = perf_counter_ns()
        for rank, row in enumerate(all_):
            there, number = TOPICS[int(row[0])], int(row[1])
            if there == FAILED:
                raise RankError(f"rank {rank} has failed in iteration {number}; see its own error, and start all anew")
            if (there, number) != (topic, iteration):
                raise RankError(
                    f"rank {self.rank} agrees on {topic} in iteration {iteration}, rank {rank} on {there} in iteration "
                    f"{number}: ranks must be driven alike (each step on all of them)"
                )
        return all_[:, 2 : 2 + len(values)]

    def gather(self, x: Tensor) -> Tensor:
        """[size * T, ...] of every rank's ``x`` [T, ...], rank 0's first; of one shape on all ranks. On the device.

        Raises:
            RankError: as :meth:`agree`; on the thread device it comes with the next wait.
        """
        noted = self.log.add_device("gather", x.nbytes)
        all_ = self._gather(x.contiguous())
        noted.end_ns = perf_counter_ns()
        return all_

    def sum(self, x: Tensor) -> Tensor:
        """[T, ...]: this rank's part of the sum of all ranks' ``x`` [size * T, ...]. On the device."""
        noted = self.log.add_device("sum", x.nbytes)
        part = self._sum(x.contiguous())
        noted.end_ns = perf_counter_ns()
        return part

    def exchange(self, x: Tensor, counts: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Give ``counts[r]`` rows of ``x`` to rank r, in order, and take what each has for this one.

        Waits on the host for the counts, so it can be in no graph.

        Returns:
            The rows, rank 0's first, and how many came from each.
        """
        noted = self.log.add_device("exchange", x.new_empty((1, *x.shape[1:])).nbytes)
        found = self._exchange(x.contiguous(), list(counts))
        noted.end_ns = perf_counter_ns()
        return found

    # -- what is under it ------------------------------------------------------------------------------------------

    @abstractmethod
    def _exchange_values(self, mine: NDArray[np.int64], what: str) -> NDArray[np.int64]: ...

    @abstractmethod
    def _gather(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _sum(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def _exchange(self, x: Tensor, counts: list[int]) -> tuple[Tensor, list[int]]: ...

    @abstractmethod
    def wake(self, round_: int) -> None:
        """Let those who :meth:`sleep` go on."""

    @abstractmethod
    def sleep(self, round_: int, timeout_s: float | None) -> bool:
        """Wait for :meth:`wake` of any rank with this round's number; whether it came. 0.0: do not wait, only look."""

    @abstractmethod
    def fail(self, iteration: int) -> None:
        """Tell the others that this rank will not come any more; does not wait, and raises nothing."""

    @abstractmethod
    def close(self) -> None:
        """Leave; nothing may be done together any more."""


FAILED = "failure"
TOPICS = ("options", "iteration", "batch", "arrivals", "outcome", FAILED)
"""What ranks agree on: at the start, at the beginning of each iteration, before each forward is staged; and where all
have run out of work, when the next request is to come anywhere; and whether all could do what all did together."""


def ranks_named(name: str) -> Ranks:
    """The one that has this name in this process.

    Raises:
        RankError: it is gone; a traced forward has outlived it.
    """
    found = _known.get(name)
    if found is None:
        raise RankError(f"{name}: the ranks that this forward was made for are closed")
    return found
