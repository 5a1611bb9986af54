"""What debug mode checks on the device, and what it poisons there and in staging, so that stale reads blow up.

``check_device`` waits for the device; on the inline device there is nothing to wait for, and it runs at every border.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.columns import LAST_TOKEN, POSITION, banned_ids, row_floats, row_ints
from engine.errors import InvariantError
from engine.phases import Phase
from engine.request import Request

if TYPE_CHECKING:
    from engine.controller import Border
    from engine.engine import Engine

CANARY = -7777
"""In every void integer: no token, row, block or position, so that using it as one fails."""


def require(holds: object, number: str, text: str, *values: object) -> None:
    """Raise InvariantError unless ``holds``; ``text`` is formatted only then, which costs more than the checks."""
    if not holds:
        raise InvariantError(f"{number}: {text.format(*values)}")


def check_device(engine: Engine, *, unresolved: range = range(0)) -> None:
    """I3, I11, I32, I51 on the device: every column of a published row is its request's. Waits for the device.

    Args:
        engine: At an iteration border, or at a phase border that is not between prepare and forward.
        unresolved: Rows between sample and resolve, of which the device knows one token more than the host.

    Raises:
        InvariantError: naming the invariant and what was found.
        DeviceError: launched work raised.
    """
    engine.device.synchronize()
    table, columns = engine.table, engine.runner.columns
    block_table = columns.block_table.cpu().numpy()
    require((block_table[columns.dummy_row] == columns.dummy_block).all(), "I51", "the dummy row names a real block")
    ints, floats = columns.ints.cpu().numpy(), columns.floats.cpu().numpy()
    for row in range(table.num_live):
        if table.kv_len[row] == 0:
            continue  # placed, not published yet
        is_sampled = row in unresolved
        count, request = int(table.block_count[row]), table.requests[row]
        if table.is_prefill[row]:  # blocks of a chunk that was placed are published with its forward
            count = -(-int(table.kv_len[row]) // engine.config.block_size)
        assert request is not None
        held, wanted = block_table[row], table.block_ids[row, :count]
        require(
            np.array_equal(held[:count], wanted), "I11", "row {}: device blocks {}, host blocks {}", row, held, wanted
        )
        require((held[count:] == columns.dummy_block).all(), "I3", "row {}: stale blocks on the device: {}", row, held)
        _check_numbers(row, request, ints[row], floats[row], is_sampled)
        if not is_sampled and not table.is_fresh[row]:
            newest = int(ints[row, LAST_TOKEN])
            require(
                newest == request.output_ids[-1],
                "I32",
                "row {}: the device goes on from {}, the host committed {}",
                row,
                newest,
                request.output_ids[-1],
            )
        _check_wide(engine, row, request, is_sampled)


def _check_numbers(
    row: int, request: Request, ints: NDArray[np.int64], floats: NDArray[np.float32], is_unresolved: bool
) -> None:
    wanted = list(row_ints(request))
    wanted[LAST_TOKEN] = int(ints[LAST_TOKEN])
    wanted[POSITION] += is_unresolved
    require(ints.tolist() == wanted, "I11", "row {}: device integers {}, its request's {}", row, ints.tolist(), wanted)
    numbers = np.asarray(row_floats(request.params), dtype=np.float32)
    require(
        np.array_equal(floats, numbers), "I11", "row {}: device parameters {}, its request's {}", row, floats, numbers
    )


def _check_wide(engine: Engine, row: int, request: Request, is_unresolved: bool) -> None:
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
        if border.iteration.index % 4 < 2:  # else steady decode would never find a half it can advance
            slabs.append(runner.step_slab)
        for slab in slabs:
            slab.fill_idle(CANARY)
        columns, first = runner.columns, engine.table.num_live
        engine.device.compute.launch(lambda: columns.fill_free(first, CANARY))
    if border.side == "after" and border.phase is Phase.RESOLVE and border.iteration.sampled is not None:
        border.iteration.sampled.buffers.ints[1].fill_(CANARY)
