"""Which experts a model that is being built holds: all of them, or those of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of each layer's experts: equally many a rank, neighbours, rank 0's first."""

    rank: int = 0
    size: int = 1

    def part(self, num_experts: int) -> range:
        """The numbers of its experts.

        Raises:
            ConfigError: they cannot be shared out evenly.
        """
        if num_experts % self.size:
            raise ConfigError(
                f"expert_parallel={self.size}: {num_experts} experts cannot be shared out evenly; use a divisor"
            )
        count = num_experts // self.size
        return range(self.rank * count, (self.rank + 1) * count)


WHOLE = Shard()
_current: ContextVar[Shard] = ContextVar("shard", default=WHOLE)


def current_shard() -> Shard:
    """Of the model that is being built."""
    return _current.get()


@contextmanager
def building(shard: Shard | None) -> Iterator[None]:
    """Models that are built in here hold the experts of ``shard`` only; None: all."""
    token = _current.set(shard or WHOLE)
    try:
        yield
    finally:
        _current.reset(token)
