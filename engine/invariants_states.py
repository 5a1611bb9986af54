"""Debug mode's checks of recurrent states: slots of rows, snapshots, and on oracle models what lies in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.invariants_device import require
from engine.models.oracle import OracleModel, rolling_hash
from engine.phases import Phase

if TYPE_CHECKING:
    from engine.controller import Border
    from engine.engine import Engine


def check_states(engine: Engine, border: Border) -> None:
    """I21 to I24 at a phase border.

    Raises:
        InvariantError: naming the invariant and what was found.
    """
    if engine.table.slots is None:
        return
    check_slots(engine)
    check_snapshots(engine)
    model = engine.loaded.model
    if engine.device.kind == "inline" and isinstance(model, OracleModel) and engine.runner.cache_tensors:
        hashes: list[int] = engine.runner.cache_tensors[1][:, 0].tolist()
        check_advanced(engine, border, hashes)
        check_kept(engine, hashes)


def check_slots(engine: Engine) -> None:
    """I21: every live row has a slot of its own, and the others are free."""
    table, slots = engine.table, engine.table.slots
    assert slots is not None
    held = table.state_slot[: table.num_live].tolist()
    free = slots.free_ids.tolist()
    require(sorted(held + free) == [*range(slots.num_slots)], "I21", "slots of rows {}, free ones {}", held, free)
    cache = engine.prefix_cache
    kept = set() if cache is None or cache.snapshots is None else set(cache.snapshots.slots.tolist())
    for row in range(table.num_live):
        source = int(table.state_from[row])
        if source < 0 or table.kv_len[row]:
            continue  # it goes on from its own state, or its first forward is launched
        require(source in kept, "I21", "row {} starts from slot {}, which keeps no state", row, source)


def check_snapshots(engine: Engine) -> None:
    """I23: every snapshot goes by the name of a block that is known, and lies in a slot of its own."""
    cache = engine.prefix_cache
    if cache is None or cache.snapshots is None:
        return
    try:
        cache.snapshots.check(reserved=len(cache.staged))
    except AssertionError as fault:
        require(False, "I23", "{}", fault)
    for digest in cache.snapshots:
        require(cache.pool.index.knows(digest), "I23", "a snapshot outlived the name of its block")


def check_advanced(engine: Engine, border: Border, hashes: list[int]) -> None:
    """I22: a row's state is the one behind the tokens that its launched forwards have read, each of them once."""
    iteration = border.iteration
    phases = iteration.order.phases
    done = phases[: phases.index(border.phase) + (border.side == "after")]
    if iteration.plan is not None and Phase.PREPARE in done and Phase.FORWARD not in done:
        return  # lengths count tokens that are not launched yet
    table = engine.table
    for row, request in enumerate(table.requests[: table.num_live]):
        assert request is not None
        tokens, count = [*request.prompt_ids, *request.output_ids], int(table.kv_len[row])
        if not 0 < count <= len(tokens):
            continue  # placed and not launched; or its newest tokens are known to the device alone, or are drafts
        slot = int(table.state_slot[row]) * engine.config.decode_width + int(table.num_accepted[row])
        state, wanted = hashes[slot], rolling_hash(tokens[:count])
        require(state == wanted, "I22", "row {}: its state is not the one behind its {} tokens", row, count)


def check_kept(engine: Engine, hashes: list[int]) -> None:
    """I23: a snapshot holds the state of a fresh prefill of the blocks it is named after."""
    cache = engine.prefix_cache
    if cache is None or cache.snapshots is None:
        return
    for request in engine.table.live_requests():
        tokens = [*request.prompt_ids, *request.output_ids]
        for depth, digest in enumerate(request.digests, 1):
            slot = cache.snapshots.find(digest)
            if slot is None or depth * engine.config.block_size > len(tokens):
                continue
            wanted = rolling_hash(tokens[: depth * engine.config.block_size])
            require(hashes[slot] == wanted, "I23", "the snapshot behind {} blocks is another state", depth)
