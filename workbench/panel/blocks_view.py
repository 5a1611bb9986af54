"""The KV block pool, block by block: who holds each, and how full it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.request import RequestState
from workbench.panel.hues import hue_of
from workbench.panel.messages import BlocksPane, HolderCell

if TYPE_CHECKING:
    from workbench.session import Session

_FREE = -1


def blocks_view(session: Session) -> BlocksPane:
    """The pool now, as the host's books have it: what a prepared or launched forward will cache counts as cached."""
    engine = session.engine
    table, size, total = engine.table, engine.config.block_size, engine.pool.num_blocks
    requests = table.live_requests()
    ids, caches = table.block_ids[: len(requests)], table.kv_len[: len(requests), None]
    places = np.arange(ids.shape[1])
    is_held = places < table.block_count[: len(requests), None]
    is_held &= np.array([request.state is not RequestState.FINISHED for request in requests], dtype=np.bool_)[:, None]
    row_hues = np.array([hue_of(session, request.request_id) for request in requests], dtype=np.int64)
    hues: NDArray[np.int64] = np.full(total, _FREE, dtype=np.int64)
    fill: NDArray[np.float64] = np.zeros(total)
    hues[ids[is_held]] = np.broadcast_to(row_hues[:, None], ids.shape)[is_held]
    fill[ids[is_held]] = np.clip(caches / size - places, 0.0, 1.0)[is_held]
    holders = [
        HolderCell(request_id=request.request_id, hue=hue, blocks=blocks[:count], tokens=cached)
        for request, hue, blocks, count, cached in zip(
            requests, row_hues.tolist(), ids.tolist(), is_held.sum(axis=1).tolist(), caches[:, 0].tolist(), strict=True
        )
        if request.state is not RequestState.FINISHED
    ]
    return BlocksPane(
        block_size=size,
        num_blocks=total,
        num_free=engine.pool.num_free,
        hues=hues.tolist(),
        fill=fill.round(3).tolist(),
        holders=holders,
    )
