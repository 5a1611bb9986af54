"""Recurrent states as the host's books have them: whose the live slots are, and which prefixes have a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from engine.cache.prefix_pool import PrefixPool
from engine.cache.snapshots import SnapshotIndex
from engine.engine import Engine
from engine.request import Request, RequestState
from engine.step_function import bytes_per_slot, layer_states, state_options


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """A snapshot: the state behind a cached prefix."""

    slot: int
    block: int | None
    """The block that the prefix ends with; None: it has just lost its name."""
    num_tokens: int | None
    """Tokens of the prefix; None: none of the requests that are known begins so."""
    begins: str
    """A request that begins with it; empty: none that is known."""
    holders: tuple[str, ...]
    """Requests that hold the block now. Without any the snapshot may give way to a newer one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotsView:
    """All snapshots."""

    kept: tuple[KeptState, ...]
    """The least recently used first: those that nobody holds give way in this order."""
    num_slots: int
    """The budget: snapshots that there is memory for."""
    num_free: int
    num_evicted: int
    """Snapshots that gave way to others, since the engine was made or reset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesView:
    """Of a model with recurrent layers."""

    slots: tuple[str, ...]
    """By slot, the request that has it; empty: free."""
    states_per_slot: int
    """1, and with drafting one more for each draft unless accepted ones are replayed."""
    replayed_tokens: int
    """Tokens of a row's last forward of which its slot keeps inputs, to replay those that are accepted; 0: none."""
    state_bytes: int
    """Of one state, all layers together, and of what is kept beside it."""
    snapshots: SnapshotsView | None
    """None without prefix caching."""

    @property
    def num_live(self) -> int:
        """Slots that a request has."""
        return sum(map(bool, self.slots))


class StateBook:
    """Makes views, and remembers which prefix each snapshot's name stands for.

    Args:
        engine: Whose states.
        requests: All requests that are known, ended ones too.
    """

    def __init__(self, engine: Engine, requests: Callable[[], Iterable[Request]]) -> None:
        self._engine = engine
        self._requests = requests
        self._prefixes: dict[bytes, tuple[str, int]] = {}
        self._state_bytes: int | None = None

    def view(self) -> StatesView | None:
        """The states now; None where the model has none."""
        engine = self._engine
        if engine.table.slots is None:
            return None
        if self._state_bytes is None:
            config = engine.resolved.config
            layout = layer_states(engine.loaded.model, config.speculative_tokens, state_options(config))
            self._state_bytes = bytes_per_slot(layout)
        slots = [""] * engine.table.slots.num_slots
        for request in _with_rows(engine):
            assert request.row is not None
            slots[int(engine.table.state_slot[request.row])] = request.request_id
        index = None if engine.prefix_cache is None else engine.prefix_cache.snapshots
        return StatesView(
            slots=tuple(slots),
            states_per_slot=engine.resolved.config.states_per_row,
            replayed_tokens=state_options(engine.resolved.config).replay_width,
            state_bytes=self._state_bytes,
            snapshots=None if index is None else self._snapshots(index),
        )

    def _snapshots(self, index: SnapshotIndex) -> SnapshotsView:
        names = list(index)
        self._learn(names)
        return SnapshotsView(
            kept=tuple(self._kept(name, index) for name in names),
            num_slots=index.num_slots,
            num_free=index.num_free,
            num_evicted=index.num_evicted,
        )

    def _kept(self, name: bytes, index: SnapshotIndex) -> KeptState:
        slot, pool = index.find(name), self._engine.pool
        assert slot is not None
        assert isinstance(pool, PrefixPool)
        blocks = pool.index.match([name])
        begins, depth = self._prefixes.get(name, ("", 0))
        return KeptState(
            slot=slot,
            block=blocks[0] if blocks else None,
            num_tokens=depth * self._engine.config.block_size if depth else None,
            begins=begins,
            holders=self._holders(blocks[0]) if blocks else (),
        )

    def _holders(self, block: int) -> tuple[str, ...]:
        table = self._engine.table
        return tuple(
            request.request_id
            for request in _with_rows(self._engine)
            if block in table.block_ids[request.row, : table.block_count[request.row]]
        )

    def _learn(self, names: list[bytes]) -> None:
        """Find out once of each name whose tokens it stands for, and how many."""
        unknown = {name for name in names if name not in self._prefixes}
        if not unknown:
            return
        for request in (*self._engine.table.live_requests(), *self._requests()):
            for depth, name in enumerate(request.digests, start=1):
                if name in unknown:
                    self._prefixes[name] = request.request_id, depth
                    unknown.remove(name)
            if not unknown:
                return

    def clear(self) -> None:
        """Forget all names."""
        self._prefixes.clear()


def states_text(states: StatesView) -> str:
    """In one line."""
    each = f", {states.states_per_slot} states each" if states.states_per_slot > 1 else ""
    beside = f" with inputs of {states.replayed_tokens} tokens to replay" if states.replayed_tokens else ""
    text = (
        f"{states.num_live} of {len(states.slots)} slots live{each}, {bytes_text(states.state_bytes)} a state{beside}"
    )
    kept = states.snapshots
    if kept is None:
        return text
    gone = f", {kept.num_evicted} gave way" if kept.num_evicted else ""
    return f"{text}; {len(kept.kept)} of {kept.num_slots} snapshots kept{gone}"


def bytes_text(count: int) -> str:
    """A size in the unit that suits it."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def _with_rows(engine: Engine) -> list[Request]:
    return [one for one in engine.table.live_requests() if one.state is not RequestState.FINISHED]
