"""Debug mode's checks of recurrent states and of what drafting leaves in the caches.

Slots of rows and snapshots on the host; on oracle models also what lies in slots and blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.invariants_device import drawn_tokens, require
from engine.models.oracle import _MIX_PLACE, _MIX_POSITION, _MIX_TOKEN, OracleModel, _mix, rolling_hash
from engine.phases import Phase

if TYPE_CHECKING:
    from engine.controller import Border
    from engine.engine import Engine

_SETTLING = (Phase.FORWARD, Phase.REWIND, Phase.RESOLVE)
"""Behind these caches and lengths agree again: elsewhere the same is not read twice, for it costs."""


def check_states(engine: Engine, border: Border) -> None:
    """I21 to I24 at a phase border, and what drafting adds to them.

    Raises:
        InvariantError: naming the invariant and what was found.
    """
    if engine.table.slots is not None:
        check_slots(engine)
        check_snapshots(engine)
    num_accepted = engine.table.num_accepted[: engine.table.num_live].tolist()
    is_prefill = engine.table.is_prefill[: engine.table.num_live].tolist()
    most = [0 if prompt else engine.config.speculative_tokens for prompt in is_prefill]
    is_within = all(0 <= count <= limit for count, limit in zip(num_accepted, most, strict=True))
    require(is_within, "I24", "rows go on behind {} accepted drafts, of at most {}", num_accepted, most)
    model = engine.loaded.model
    if engine.device.kind != "inline" or not isinstance(model, OracleModel) or not engine.runner.cache_tensors:
        return
    check_accepted(engine, border)
    told = tokens_told(engine, border)
    if model.is_recurrent:
        hashes: list[int] = engine.runner.cache_tensors[1][:, 0].tolist()
        if engine.resolved.config.replays_states:
            check_replayed(engine, told, hashes)
        else:
            check_advanced(engine, told, hashes)
        check_kept(engine, hashes)
    if engine.config.speculative_tokens and border.side == "after" and border.phase in _SETTLING:
        check_remembered(engine, told)


def check_accepted(engine: Engine, border: Border) -> None:
    """I24: the device knows of each row how many drafts were accepted last, and the host the same once it has rewound.

    Not between verify and rewind, nor while rows are staged that the device has not been told of.
    """
    accepted, table, iteration = engine.runner.columns.accepted, engine.table, border.iteration
    phases = iteration.order.phases
    done = phases[: phases.index(border.phase) + (border.side == "after")]
    is_ahead = iteration.verified is not None and Phase.REWIND not in done
    is_staged = iteration.plan is not None and Phase.FORWARD not in done
    if accepted is None or is_ahead or is_staged:
        return
    counts = accepted[: table.num_live].tolist()
    for row, (count, known) in enumerate(zip(counts, table.num_accepted[: table.num_live].tolist(), strict=True)):
        if table.kv_len[row]:  # else it is placed, and its forward not launched
            require(max(count, 0) == known, "I24", "row {}: {} accepted drafts on the device, {}", row, count, known)


def tokens_told(engine: Engine, border: Border) -> dict[int, list[int]]:
    """By row, the tokens that its launched forwards have read, of which the cache and the states tell.

    Without rows whose length counts what is not launched or not rewound yet. Inline device only.
    """
    iteration, table, drafts = border.iteration, engine.table, engine.runner.columns.drafts
    phases = iteration.order.phases
    done = phases[: phases.index(border.phase) + (border.side == "after")]
    if iteration.plan is not None and Phase.PREPARE in done and Phase.FORWARD not in done:
        return {}
    is_drawn = Phase.SAMPLE in done or Phase.VERIFY in done
    drawn = drawn_tokens(iteration) if is_drawn and Phase.RESOLVE not in done else {}
    if iteration.verified is not None and Phase.REWIND not in done and Phase.VERIFY in done:
        return {}
    reading, told = _rows_reading_drafts(engine), {}
    for row, request in enumerate(table.requests[: table.num_live]):
        assert request is not None
        count, tokens = int(table.kv_len[row]), [*request.prompt_ids, *request.output_ids, *drawn.get(row, ())]
        if drafts is not None and row in reading:
            tokens += drafts[row].tolist()
        if 0 < count <= len(tokens):  # else placed and not launched, or its newest tokens are on the device alone
            told[row] = tokens[:count]
    return told


def _rows_reading_drafts(engine: Engine) -> set[int]:
    """Of the pending forward those that decode in it; prompts that it reads may count as decoding from prepare on."""
    pending = engine.controller.pending
    return set() if pending is None else set(pending.table_rows[: pending.dims.num_decode].tolist())


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


def check_advanced(engine: Engine, told: dict[int, list[int]], hashes: list[int]) -> None:
    """I22: a row's state is the one behind the tokens that its launched forwards have read, each of them once.

    With drafting there is one behind its newest token and one behind each draft, until it is known which are accepted.
    """
    table, width, reading = engine.table, engine.config.decode_width, _rows_reading_drafts(engine)
    for row, tokens in told.items():
        own = int(table.state_slot[row]) * width
        if row in reading:
            wanted = {own + i: tokens[: len(tokens) - width + 1 + i] for i in range(width)}
        else:
            wanted = {own + int(table.num_accepted[row]): tokens}
        for slot, read in wanted.items():
            is_right = hashes[slot] == rolling_hash(read)
            require(is_right, "I22", "row {}: its state is not the one behind its {} tokens", row, len(read))


def check_replayed(engine: Engine, told: dict[int, list[int]], hashes: list[int]) -> None:
    """I22 where accepted tokens are replayed: a row's state, and what its slot keeps, are its tokens, each once.

    Behind a prompt the state is the one behind all of them. Else it is the one before the tokens of the last forward,
    of which those are kept that stand: while it runs all of them, and then as many as the device has accepted.
    """
    table, width, columns = engine.table, engine.config.decode_width, engine.runner.columns
    reading = _rows_reading_drafts(engine)
    assert columns.accepted is not None
    accepted, kept = columns.accepted.tolist(), engine.runner.cache_tensors[2].tolist()
    for row, tokens in told.items():
        slot, count = int(table.state_slot[row]), width if row in reading else accepted[row] + 1
        before, behind = tokens[: len(tokens) - count], tokens[len(tokens) - count :]
        is_right = hashes[slot] == rolling_hash(before)
        require(is_right, "I22", "row {}: its state is not the one before the {} tokens it replays", row, count)
        require(kept[slot][:count] == behind, "I22", "row {}: it keeps {} to replay, not {}", row, kept[slot], behind)


def check_remembered(engine: Engine, told: dict[int, list[int]]) -> None:
    """I38: keys, and the hidden states that draft heads go on from, are those of the row's own tokens, none rejected.

    Head h sees the hidden states of the model (0) or of the head before, which start at position h.
    """
    table, size, caches = engine.table, engine.config.block_size, engine.runner.caches
    first_head = len(caches) - 2 * engine.config.speculative_tokens
    for row, tokens in told.items():
        count = len(tokens)
        blocks = torch.from_numpy(table.block_ids[row, : -(-count // size)].astype("int64"))
        entries = caches[0][0].index_select(0, blocks).flatten(0, 1)[:count].tolist()
        is_own = entries == [[token, place] for place, token in enumerate(tokens)]
        require(is_own, "I38", "row {}: other keys than those of its {} tokens", row, count)
        wanted = _hidden_states(tokens)
        for head in range(engine.config.speculative_tokens):
            (states,), (marks,) = caches[first_head + 2 * head : first_head + 2 * head + 2]
            found = states.index_select(0, blocks).flatten(0, 1)[:count].tolist()
            is_right = found[head:] == wanted[head:]
            require(is_right, "I38", "row {}: head {} goes on from hidden states of other tokens", row, head)
            noted = marks.index_select(0, blocks).flatten(0, 1)[:count].tolist()
            expected = [[token, before[2]] for token, before in zip(tokens[1:], wanted, strict=False)]
            is_right = noted[head + 1 :] == expected[head:]
            require(is_right, "I38", "row {}: head {} holds entries of other tokens", row, head)


def _hidden_states(tokens: list[int]) -> list[list[int]]:
    """What the oracle's hidden states must be behind each of ``tokens``: hash, nothing astray, tally."""
    mixed: Any = _mix  # of numpy's arrays too, which cost less where they are as short
    token_T, place_T = np.array(tokens, dtype=np.int64), np.arange(len(tokens), dtype=np.int64)
    entry_T = mixed(mixed(token_T * _MIX_TOKEN + place_T * _MIX_POSITION + 1) + place_T * _MIX_PLACE)
    tally_T = mixed(token_T * _MIX_TOKEN + 5)
    made: list[list[int]] = np.stack([entry_T.cumsum(), np.zeros_like(token_T), tally_T.cumsum()], axis=1).tolist()
    return made


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
