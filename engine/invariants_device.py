"""What debug mode checks on the device, and what it poisons there and in staging, so that stale reads blow up.

``check_device`` waits for the device; on the inline device there is nothing to wait for, and it runs at every border.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from engine.columns import LAST_TOKEN, POSITION, banned_ids, row_floats, row_ints
from engine.errors import InvariantError
from engine.phases import Phase
from engine.request import Request

if TYPE_CHECKING:
    from engine.controller import Border, Iteration
    from engine.engine import Engine
    from engine.invariants_rows import LiveRows

CANARY = -7777
"""In every void integer: no token, row, block or position, so that using it as one fails."""


def require(holds: object, number: str, text: str, *values: object) -> None:
    """Raise InvariantError unless ``holds``; ``text`` is formatted only then, which costs more than the checks."""
    if not holds:
        raise InvariantError(f"{number}: {text.format(*values)}")


def check_device(engine: Engine) -> None:
    """I3, I11, I32, I51 on the device: every column of a published row is its request's. Waits for the device.

    Args:
        engine: At an iteration border, or at a phase border that is not between prepare and forward.

    Raises:
        InvariantError: naming the invariant and what was found.
        DeviceError: launched work raised.
    """
    from engine.invariants_rows import LiveRows  # it reads this module

    engine.device.synchronize()
    compare_device(engine, LiveRows.of(engine.table), {})


def drawn_tokens(iteration: Iteration) -> dict[int, list[int]]:
    """By table row, the tokens drawn for it and not resolved yet: those that the device knows more than the host.

    Only where the device has done what was launched, and not behind resolve.
    """
    verified, sampled = iteration.verified, iteration.sampled
    if verified is not None:
        steps = verified.buffers.tokens_view[:, 0, : verified.num_rows].T.tolist()
        counts = (verified.buffers.accepted_view[: verified.num_rows] + 1).tolist()
        return {verified.first_row + i: steps[i][:count] for i, count in enumerate(counts)}
    if sampled is not None:
        tokens = sampled.buffers.ints_view[0, : sampled.num_rows].tolist()
        return {row: [token] for row, token in enumerate(tokens, sampled.first_row)}
    return {}


def compare_device(engine: Engine, rows: LiveRows, drawn: Mapping[int, Sequence[int]]) -> None:
    """As :func:`check_device`, on a device that is idle.

    Args:
        engine: As there.
        rows: Its table's, as they are now.
        drawn: As :func:`drawn_tokens`; nothing where all is resolved.
    """
    columns, block_size = engine.runner.columns, engine.config.block_size
    block_table: list[list[int]] = columns.block_table.cpu().numpy().tolist()
    dummy, width, drafts = columns.dummy_block, len(block_table[0]), engine.config.speculative_tokens
    require(block_table[columns.dummy_row] == [dummy] * width, "I51", "the dummy row names a real block")
    ints, floats = columns.ints.cpu().numpy().tolist(), columns.floats.cpu().numpy().tolist()
    lengths = None if columns.length is None else columns.length.tolist()
    for row, request in enumerate(rows.requests):
        kv_len = rows.kv_len[row]
        if kv_len == 0:
            continue  # placed, not published yet
        assert request is not None
        # Blocks of a chunk that was placed are published with its forward.
        count = -(-(kv_len + drafts) // block_size) if rows.is_prefill[row] else rows.block_count[row]
        held, wanted = block_table[row], rows.block_ids[row][:count]
        require(held[:count] == wanted, "I11", "row {}: device blocks {}, host blocks {}", row, held, wanted)
        is_empty = held.count(dummy) == width - count
        require(is_empty, "I3", "row {}: stale blocks on the device: {}", row, held)
        ahead = drawn.get(row, ())
        _check_numbers(row, request, ints[row], floats[row], len(ahead))
        if ahead or not rows.is_fresh[row]:
            newest, known = ints[row][LAST_TOKEN], (*request.output_ids[-1:], *ahead)[-1]
            text = "row {}: the device goes on from {}, the host committed {}"
            require(newest == known, "I32", text, row, newest, known)
        if lengths is not None:
            length, known = lengths[row], request.num_tokens + len(ahead)
            require(length == known, "I8", "row {}: the device counts {} known tokens of {}", row, length, known)
        _check_wide(engine, row, request, is_unresolved=bool(ahead))


def _check_numbers(row: int, request: Request, ints: list[int], floats: list[float], num_drawn: int) -> None:
    wanted = list(row_ints(request))
    wanted[LAST_TOKEN] = ints[LAST_TOKEN]
    wanted[POSITION] += num_drawn
    require(ints == wanted, "I11", "row {}: device integers {}, its request's {}", row, ints, wanted)
    numbers = array("f", row_floats(request.params)).tolist()  # rounded as the device's are
    require(floats == numbers, "I11", "row {}: device parameters {}, its request's {}", row, floats, numbers)


def _check_wide(engine: Engine, row: int, request: Request, *, is_unresolved: bool) -> None:
    columns, params = engine.runner.columns, request.params
    vocab = columns.vocab_size
    if params.min_tokens and columns.stop_ids is not None:
        held = {i for i in columns.stop_ids[row].tolist() if i != vocab}
        require(held == set(banned_ids(params, engine.resolved.eos_token_ids)), "I11", "row {}: bans {}", row, held)
    if params.logit_bias:
        assert columns.bias_ids is not None
        assert columns.bias_values is not None
        pairs = zip(columns.bias_ids[row].tolist(), columns.bias_values[row].tolist(), strict=True)
        held_bias = {i: value for i, value in pairs if i != vocab}
        wanted = {i: float(np.float32(value)) for i, value in params.logit_bias.items()}
        require(held_bias == wanted, "I11", "row {}: biases {}, its request has {}", row, held_bias, wanted)
    if params.has_penalties and not is_unresolved:
        assert columns.output_counts is not None
        assert columns.prompt_mask is not None
        counts = columns.output_counts[row].cpu().numpy()
        made = np.bincount(np.asarray(request.output_ids, dtype=np.int64), minlength=vocab)
        require(np.array_equal(counts, made), "I11", "row {}: counts of another history", row)
        seen = np.flatnonzero(columns.prompt_mask[row].cpu().numpy()).tolist()
        require(seen == sorted(set(request.prompt_ids)), "I11", "row {}: prompt mask of another prompt", row)


def poison_void(engine: Engine, border: Border) -> None:
    """Overwrite what holds no meaning at this border: staging before prepare, free device rows, fetched results."""
    runner = engine.runner
    if border.side == "before" and border.phase is Phase.PREPARE:
        slabs = [runner.move_slab, runner.samples.index_slab]
        if runner.speculator is not None:
            slabs.append(runner.speculator.index_slab)
        if border.iteration.index % 4 < 2:  # else steady decode would never find a half it can advance
            slabs.append(runner.step_slab)
        for slab in slabs:
            slab.fill_idle(CANARY)
        columns, first = runner.columns, engine.table.num_live
        engine.device.compute.launch(lambda: columns.fill_free(first, CANARY))
    if border.side == "after" and border.phase is Phase.RESOLVE:
        sampled, verified = border.iteration.sampled, border.iteration.verified
        for results in [] if sampled is None else [sampled.buffers]:
            results.ints[1].fill_(CANARY)
        for step in [] if verified is None else verified.buffers.steps:
            step.ints[1].fill_(CANARY)
        if verified is not None:
            verified.buffers.accepted[1].fill_(CANARY)
