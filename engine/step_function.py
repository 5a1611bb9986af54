"""One forward as a function of tensors alone: input ids from samples, cache slots, block-table rows, then the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from engine.batch import BatchShape, ForwardBatch, PrefillPlan, Snapshots
from engine.device import Device
from engine.errors import ConfigError
from engine.models.base import LayerCache, LayerState, Model, PagedState, SlotState

FROM_SAMPLE = -1
"""In ``token_ids``: take the row's newest sampled token, which is on the device only."""
NO_BLOCK = -1
"""In ``row_block``: the row takes no new block in this step."""
NUM_PLAIN_INPUTS, NUM_STATE_INPUTS = 12, 5
"""Tensors that :meth:`Runner._step_inputs` gives before the caches: always, and more where a model has state slots."""


@cache
def has_decode_inputs() -> bool:
    """Whether the kernel that makes a decode forward's inputs at once can be had."""
    return find_spec("triton") is not None


class StepFunction:
    """One forward as a function of tensors alone, for a fixed shape: what is run eagerly, traced and captured."""

    def __init__(
        self, model: Model, block_size: int, shape: BatchShape, prefill_plan: PrefillPlan | None = None
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._shape = shape
        self._prefill_plan = prefill_plan
        self.key = (block_size, shape)
        """Tells one traced forward of a model from another, next to its inputs' shapes."""
        layout = model.cache_layout()
        self._tensors_a_layer = [len(state.shapes) for state in layout]
        self._num_inputs = NUM_PLAIN_INPUTS + (NUM_STATE_INPUTS if has_slots(layout) else 0)
        self._marks_padding: bool = getattr(model, "wants_real_tokens", False)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Logits, [L, V]; ``inputs`` as :meth:`Runner._step_inputs` gives them."""
        plain, states = inputs[:NUM_PLAIN_INPUTS], inputs[NUM_PLAIN_INPUTS : self._num_inputs]
        caches = _grouped(inputs[self._num_inputs :], self._tensors_a_layer)
        is_decode = not self._shape.num_prefill
        fused = is_decode and plain[0].is_cuda and has_decode_inputs()
        batch = self._fused_batch(*plain) if fused else self._batch(*plain)
        if self._marks_padding:
            token_row, block_table = plain[2], plain[11]
            batch = batch._replace(is_real_T=token_row != block_table.shape[0] - 1)
        return self._model(self._with_states(batch, states), caches)

    def _with_states(self, batch: ForwardBatch, states: tuple[Tensor, ...]) -> ForwardBatch:
        if not states:
            return batch
        snapshots = Snapshots(*states[2:]) if self._shape.num_snapshots else None
        return batch._replace(state_from_N=states[0], state_to_N=states[1], snapshots=snapshots)

    def _batch(self, *inputs: Tensor) -> ForwardBatch:
        token_ids, positions, token_row, batch_row, table_row, query_start, query_len, kv_len, logits_idx = inputs[:9]
        last_token, block_table = inputs[10:]
        ids = torch.where(token_ids == FROM_SAMPLE, last_token.index_select(0, token_row), token_ids)
        column = torch.div(positions, self._block_size, rounding_mode="floor")
        block = block_table[token_row, column].to(torch.int64)
        return ForwardBatch(
            token_ids_T=ids,
            positions_T=positions,
            row_T=batch_row,
            slots_T=block * self._block_size + positions % self._block_size,
            block_table_NK=block_table.index_select(0, table_row)[:, : self._shape.num_kv_blocks].to(torch.int64),
            query_start_N=query_start,
            query_len_N=query_len,
            kv_len_N=kv_len,
            logits_idx_L=logits_idx,
            shape=self._shape,
            prefill_plan=self._prefill_plan,
        )

    def _fused_batch(self, *inputs: Tensor) -> ForwardBatch:
        """The same of one-token rows by one kernel, which also enters the blocks that rows take in this step."""
        from engine.kernels.triton_inputs import decode_inputs

        token_ids, _, _, batch_row, table_row, query_start, query_len, kv_len, logits_idx = inputs[:9]
        row_block, last_token, block_table = inputs[9:]
        made = decode_inputs(
            token_ids,
            kv_len,
            table_row,
            row_block,
            last_token,
            block_table,
            block_size=self._block_size,
            num_kv_blocks=self._shape.num_kv_blocks,
        )
        return ForwardBatch(
            token_ids_T=made.token_ids,
            positions_T=made.positions,
            row_T=batch_row,
            slots_T=made.slots,
            block_table_NK=made.block_table,
            query_start_N=query_start,
            query_len_N=query_len,
            kv_len_N=kv_len,
            logits_idx_L=logits_idx,
            shape=self._shape,
        )


def _grouped(flat: Sequence[Tensor], sizes: Sequence[int]) -> list[LayerCache]:
    layers, at = [], 0
    for size in sizes:
        layers.append(tuple(flat[at : at + size]))
        at += size
    return layers


def has_slots(layout: Sequence[LayerState]) -> bool:
    """Whether any layer has a state of slots."""
    return any(isinstance(state, SlotState) for state in layout)


def bytes_per_token(layout: Sequence[LayerState]) -> int:
    """Cache bytes of one token, all layers; 0 where no layer attends."""
    return sum(state.bytes_per_token() for state in layout if isinstance(state, PagedState))


def bytes_per_slot(layout: Sequence[LayerState]) -> int:
    """Bytes of one slot, all layers; 0 where no layer has slots."""
    return sum(state.bytes_per_slot() for state in layout if isinstance(state, SlotState))


def make_caches(model: Model, device: Device, num_blocks: int, block_size: int, num_slots: int = 0) -> list[LayerCache]:
    """Zeroed tensors of every layer state.

    Args:
        model: Says which.
        device: Where they lie.
        num_blocks: Leading size of paged ones, [num_blocks, block_size, *per-token shape]; the dummy block counts.
        block_size: Tokens of a block.
        num_slots: Leading size of those of slots, [num_slots, *shape]; the dummy slot counts.

    Raises:
        ConfigError: they do not fit the device's memory.
    """
    layout = model.cache_layout()

    def leading(state: LayerState) -> tuple[int, ...]:
        return (num_blocks, block_size) if isinstance(state, PagedState) else (num_slots,)

    try:
        return [
            tuple(
                device.zeros((*leading(state), *shape), dtype)
                for shape, dtype in zip(state.shapes, state.dtypes, strict=True)
            )
            for state in layout
        ]
    except (RuntimeError, MemoryError) as error:  # torch's allocators raise RuntimeError, or a subclass on CUDA
        gib = num_blocks * block_size * bytes_per_token(layout) / 2**30
        slots = f" and {num_slots} state slots {num_slots * bytes_per_slot(layout) / 2**30:,.1f} GiB" * bool(num_slots)
        raise ConfigError(
            f"a KV pool of {num_blocks} blocks of {block_size} tokens takes {gib:,.1f} GiB{slots}, which cannot be had "
            "here; lower num_blocks, kv_cache_gb, block_size or max_requests"
        ) from error
