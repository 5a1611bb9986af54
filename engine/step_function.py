"""One forward as a function of tensors alone: input ids from samples, cache slots, block-table rows, then the model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from engine.batch import BatchShape, ForwardBatch, PrefillPlan
from engine.device import Device
from engine.errors import ConfigError
from engine.models.base import LayerCache, Model

FROM_SAMPLE = -1
"""In ``token_ids``: take the row's newest sampled token, which is on the device only."""
NO_BLOCK = -1
"""In ``row_block``: the row takes no new block in this step."""


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
        self._tensors_a_layer = [len(state.shapes) for state in model.cache_layout()]

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Logits, [L, V]; ``inputs`` as :meth:`Runner._step_inputs` gives them."""
        caches = _grouped(inputs[12:], self._tensors_a_layer)
        is_decode = not self._shape.num_prefill
        fused = is_decode and inputs[0].is_cuda and has_decode_inputs()
        return self._model(self._fused_batch(*inputs[:12]) if fused else self._batch(*inputs[:12]), caches)

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


def make_caches(model: Model, device: Device, num_blocks: int, block_size: int) -> list[LayerCache]:
    """Zeroed cache tensors of every layer, [num_blocks, block_size, *per-token shape].

    Raises:
        ConfigError: they do not fit the device's memory.
    """
    states = model.cache_layout()
    try:
        return [
            tuple(
                device.zeros((num_blocks, block_size, *shape), dtype)
                for shape, dtype in zip(state.shapes, state.dtypes, strict=True)
            )
            for state in states
        ]
    except (RuntimeError, MemoryError) as error:  # torch's allocators raise RuntimeError, or a subclass on CUDA
        gib = num_blocks * block_size * sum(state.bytes_per_token() for state in states) / 2**30
        raise ConfigError(
            f"a KV pool of {num_blocks} blocks of {block_size} tokens takes {gib:,.1f} GiB, which cannot be had here; "
            "lower num_blocks, kv_cache_gb, block_size or max_requests"
        ) from error
