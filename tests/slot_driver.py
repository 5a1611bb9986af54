"""The driver of ``forward_driver`` for models with state slots: every text has a slot of its own, found as NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.batch import BatchShape, ForwardBatch
from engine.models.base import Model, PagedState
from tests.forward_driver import ForwardDriver, Part, Text, split


class SlotDriver(ForwardDriver):
    """Slot ``num_slots`` is the dummy."""

    def __init__(self, model: Model, *, num_blocks: int = 128, block_size: int = 16, seed: int = 0) -> None:
        super().__init__(model, num_blocks=num_blocks, block_size=block_size, seed=seed)
        self.num_slots = 40
        self.free_slots = [(7 * number + seed) % self.num_slots for number in range(self.num_slots)]
        self.slot_of: dict[int, int] = {}
        for number, state in enumerate(model.cache_layout()):
            if not isinstance(state, PagedState):
                self.caches[number] = tuple(
                    torch.full((self.num_slots + 1, *shape), float("nan"), dtype=dtype)
                    for shape, dtype in zip(state.shapes, state.dtypes, strict=True)
                )

    def slot(self, text: Text) -> int:
        if id(text) not in self.slot_of:
            self.slot_of[id(text)] = self.free_slots.pop()
        return self.slot_of[id(text)]

    def batch(self, parts: Sequence[Part], *, every: bool = False, shape: BatchShape | None = None) -> ForwardBatch:
        batch = super().batch(parts, every=every, shape=shape)
        decode, prefill = split(parts)
        slots = [self.slot(part.text) for part in decode] + [self.num_slots] * (batch.shape.num_decode - len(decode))
        slots += [self.slot(part.text) for part in prefill]
        slots += [self.num_slots] * (batch.shape.num_rows - len(slots))
        rows = torch.arange(batch.shape.num_tokens) - batch.query_start_N[batch.row_T]
        return batch._replace(
            state_from_N=torch.tensor(slots),
            state_to_N=torch.tensor(slots),
            is_real_T=rows < batch.query_len_N[batch.row_T],
        )
