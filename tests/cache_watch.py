"""Watches what each forward writes: the entries of its own tokens, the dummy block, and nothing else."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor

from engine.controller import Border
from engine.engine import Engine
from engine.invariants_device import CANARY
from engine.phases import Phase
from engine.plan import Plan


class CacheWatch:
    """Poisons an idle engine's cache, then compares it byte for byte around every forward.

    Free rows of the device's columns must stay as they are, too: padding has a row of its own.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.padded: Counter[str] = Counter()
        """Forwards with padding that were checked, "decode" and "mixed"."""
        self.eager = 0
        """Forwards that no graph ran."""
        self._caches: list[Tensor] = [tensor for layer in engine.runner.caches for tensor in layer]
        self._before: list[Tensor] = []
        self._poison()
        engine.controller.watch = self._at_border

    def _poison(self) -> None:
        """All blocks but the dummy, whatever stream and mode they were made in."""
        self.engine.device.synchronize()
        with torch.inference_mode():
            for tensor in self._caches:
                tensor[:-1].fill_(math.nan if tensor.is_floating_point() else CANARY)
        self.engine.device.synchronize()

    def _at_border(self, border: Border) -> None:
        plan = border.iteration.plan
        if border.phase is not Phase.FORWARD or plan is None:
            return
        if border.side == "before":
            self._before = self._snapshot()
        else:
            self._check(plan)

    def _snapshot(self) -> list[Tensor]:
        """Caches, then free rows of the columns, with nothing running before, during or after the copy."""
        self.engine.device.synchronize()
        columns, first = self.engine.runner.columns, self.engine.table.num_live
        free = [column[first : columns.dummy_row] for column in (columns.block_table, columns.ints, columns.floats)]
        copies = [tensor.clone() for tensor in (*self._caches, *free)]
        self.engine.device.synchronize()
        return copies

    def _check(self, plan: Plan) -> None:
        slots = slots_written(self.engine, plan)
        now, count = self._snapshot(), len(self._caches)
        for before, after in zip(self._before[:count], now[:count], strict=True):
            check_entries(before, after, slots)
        for before, after in zip(self._before[count:], now[count:], strict=True):
            assert torch.equal(bytes_of(before), bytes_of(after)), "a forward wrote to a free row"
        if plan.graph is None:
            self.eager += 1
        elif plan.graph.num_tokens > plan.dims.num_tokens:
            self.padded["mixed" if plan.graph.num_prefill else "decode"] += 1


def slots_written(engine: Engine, plan: Plan) -> list[int]:
    """Cache entries of the real tokens of a forward: a decode row's newest, all of a prompt."""
    table, block_size, slots = engine.table, engine.config.block_size, []
    for row in plan.table_rows.tolist():
        end = int(table.kv_len[row])
        for place in range(int(table.chunk_done[row]) if table.is_prefill[row] else end - 1, end):
            slots.append(int(table.block_ids[row, place // block_size]) * block_size + place % block_size)
    assert len(slots) == plan.dims.num_tokens
    return slots


def check_entries(before: Tensor, after: Tensor, slots: list[int]) -> None:
    """Of two copies of a cache tensor [blocks, block size, ...], only ``slots`` and the last block differ."""
    changed = (bytes_of(before) != bytes_of(after)).flatten(2).any(-1)
    changed[-1] = False
    own = torch.zeros_like(changed)
    own.view(-1)[slots] = True
    assert not (changed & ~own).any(), f"entries of nobody's token changed: {(changed & ~own).nonzero().tolist()}"
    written = after.flatten(0, 1)[slots]
    poison = written.isnan() if written.is_floating_point() else written == CANARY
    assert not poison.any(), "a token's entry was not written"


def bytes_of(tensor: Tensor) -> Tensor:
    """Its memory, so that NaN equals itself."""
    return tensor.contiguous().view(torch.uint8)
