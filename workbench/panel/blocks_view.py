"""The KV block pool, block by block: who holds each, how full it is, and what a later request may reuse.

All of it is made of whole arrays: a pool has thousands of blocks, and is drawn several times a second.
"""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.cache.prefix_pool import PrefixPool
from engine.request import RequestState
from workbench.panel.hues import hue_of
from workbench.panel.messages import BlocksPane, HolderCell, SlotCell, SnapshotCell, StatesCell
from workbench.snapshot import prefix_view
from workbench.states import KeptState, SnapshotsView, bytes_text

if TYPE_CHECKING:
    from workbench.session import Session

CACHED, FREE = 254, 255
"""Of :attr:`BlocksPane.kinds`."""


class BlockMap:
    """The map of one session's pool, made anew at each look but for what is named."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._named: tuple[int, NDArray[np.bool_]] | None = None
        """As of a version of the pool's index."""

    def view(self) -> BlocksPane:
        """The pool now, as the host's books have it: what a prepared or launched forward will write counts as there."""
        session, engine = self._session, self._session.engine
        table, size, pool = engine.table, engine.config.block_size, engine.pool
        requests = table.live_requests()
        ids = table.block_ids[: len(requests)]
        # What a hit skips is in the cache before the row's first forward is prepared.
        caches = np.maximum(table.kv_len[: len(requests)], table.chunk_done[: len(requests)])
        places = np.arange(ids.shape[1])
        is_held = places < table.block_count[: len(requests), None]
        is_held &= np.array([one.state is not RequestState.FINISHED for one in requests], dtype=np.bool_)[:, None]
        held = ids[is_held]
        row_hues = np.array([hue_of(session, one.request_id) for one in requests], dtype=np.uint8)
        refs = np.bincount(held, minlength=pool.num_blocks)
        kinds: NDArray[np.uint8] = np.full(pool.num_blocks, FREE, dtype=np.uint8)
        named = self._names()
        if named is not None:
            kinds[named & (refs == 0)] = CACHED
        # Backwards: of several holders the first one's hue stays.
        kinds[held[::-1]] = np.broadcast_to(row_hues[:, None], ids.shape)[is_held][::-1]
        tokens: NDArray[np.int64] = np.zeros(pool.num_blocks, dtype=np.int64)
        np.maximum.at(tokens, held, np.clip(caches[:, None] - places * size, 0, size)[is_held])
        partly = np.flatnonzero((refs > 0) & (tokens < size))
        return BlocksPane(
            block_size=size,
            num_blocks=pool.num_blocks,
            num_free=int(np.count_nonzero(kinds == FREE)),
            num_shared=int(np.count_nonzero(refs > 1)),
            num_cached=None if named is None else int(np.count_nonzero(kinds == CACHED)),
            kinds=_packed(kinds),
            refs=_packed(np.minimum(refs, 255).astype(np.uint8)) if (refs > 1).any() else "",
            named="" if named is None else _packed(np.packbits(named, bitorder="little")),
            partly=np.stack([partly, tokens[partly]], axis=1).ravel().tolist(),
            holders=[
                HolderCell(
                    request_id=request.request_id,
                    hue=int(row_hues[row]),
                    blocks=_packed(ids[row, : table.block_count[row]].astype("<u4")),
                    tokens=int(caches[row]),
                )
                for row, request in enumerate(requests)
                if request.state is not RequestState.FINISHED
            ],
            facts=self._facts(),
            states=_states_cell(session),
        )

    def _names(self) -> NDArray[np.bool_] | None:
        """[num_blocks] whether a block's contents are known by name; None without prefix caching."""
        pool = self._session.engine.pool
        if not isinstance(pool, PrefixPool):
            return None
        index = pool.index
        if self._named is None or self._named[0] != index.version:
            flags = map(index.__contains__, range(pool.num_blocks))
            self._named = index.version, np.fromiter(flags, dtype=np.bool_, count=pool.num_blocks)
        return self._named[1]

    def _facts(self) -> list[list[str]]:
        engine = self._session.engine
        facts: list[list[str]] = []
        prefix, counters = prefix_view(engine), engine.counters
        if prefix is not None:
            rate, hit, asked = prefix.hit_rate, prefix.hit_tokens, prefix.query_tokens
            facts.append(["prefix hits", "–" if rate is None else f"{100 * rate:.0f} % ({hit:,} of {asked:,} tokens)"])
            facts.append(["cached blocks evicted", f"{prefix.evicted_blocks:,}"])
        if engine.config.capacity_policy == "max_utilization":
            facts.append(["rows paused", f"{counters.pauses:,}"])
            facts.append(["resumed", f"{counters.resumes:,}"])
            facts.append(["requests evicted", f"{counters.evictions:,}"])
        return facts


def _states_cell(session: Session) -> StatesCell | None:
    states = session._desk.states.view()
    if states is None:
        return None
    kept = states.snapshots
    each = "" if states.states_per_slot == 1 else f", {states.states_per_slot} states each: one behind every draft"
    if states.replayed_tokens:
        each = f", each with inputs of {states.replayed_tokens} tokens, to replay those that are accepted"
    return StatesCell(
        text=f"{states.num_live} of {len(states.slots)} live{each}; {bytes_text(states.state_bytes)} a state",
        slots=[
            SlotCell(request_id=request_id, hue=hue_of(session, request_id) if request_id else -1)
            for request_id in states.slots
        ],
        snapshots=None if kept is None else [_snapshot_cell(session, one) for one in kept.kept],
        snapshots_text="" if kept is None else _snapshots_text(kept),
    )


def _snapshot_cell(session: Session, one: KeptState) -> SnapshotCell:
    what = f"the first {one.num_tokens:,} tokens of {one.begins}" if one.begins else "a prefix of nobody here"
    whose = f"held by {', '.join(one.holders)}" if one.holders else "cached: may give way"
    return SnapshotCell(
        slot=one.slot,
        block=one.block,
        num_tokens=one.num_tokens,
        hue=hue_of(session, one.holders[0]) if one.holders else -1,
        text=f"{what}, {whose}",
    )


def _snapshots_text(kept: SnapshotsView) -> str:
    gone = f", {kept.num_evicted:,} gave way" if kept.num_evicted else ""
    return f"{len(kept.kept):,} of {kept.num_slots:,} kept, {kept.num_free:,} free{gone}"


def _packed(values: NDArray[Any]) -> str:
    return b64encode(values.tobytes()).decode("ascii")
