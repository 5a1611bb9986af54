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
from engine.models.base import DraftingModel, LayerCache, LayerState, Model, PagedState, SlotState

FROM_SAMPLE = -1
"""In ``token_ids``: take the row's newest sampled token, which is on the device only."""
FROM_DRAFT = -2
"""In ``token_ids``: take the row's first draft, which is on the device only; one less is the second, and so on."""
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
        self,
        model: Model,
        block_size: int,
        shape: BatchShape,
        prefill_plan: PrefillPlan | None = None,
        num_drafts: int = 0,
    ) -> None:
        self._model = model
        self._num_drafts = num_drafts
        self._block_size = block_size
        self._shape = shape
        self._prefill_plan = prefill_plan
        self.key = (block_size, shape, num_drafts)
        """Tells one traced forward of a model from another, next to its inputs' shapes."""
        layout = layer_states(model, num_drafts)
        self._tensors_a_layer = [len(state.shapes) for state in layout]
        self._num_plain = NUM_PLAIN_INPUTS + (num_drafts > 0)
        self._num_inputs = self._num_plain + (NUM_STATE_INPUTS if has_slots(layout) else 0)
        self._marks_padding: bool = getattr(model, "wants_real_tokens", False)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Logits, [L, V]; ``inputs`` as :meth:`Runner._step_inputs` gives them."""
        plain, states = inputs[:NUM_PLAIN_INPUTS], inputs[self._num_plain : self._num_inputs]
        caches = _grouped(inputs[self._num_inputs :], self._tensors_a_layer)
        is_decode = not self._shape.num_prefill and not self._num_drafts
        fused = is_decode and plain[0].is_cuda and has_decode_inputs()
        if self._num_drafts:
            plain = (_with_drafts(plain[0], plain[2], inputs[NUM_PLAIN_INPUTS]), *plain[1:])
        batch = self._fused_batch(*plain) if fused else self._batch(*plain)
        if self._marks_padding:
            token_row, block_table = plain[2], plain[11]
            batch = batch._replace(is_real_T=token_row != block_table.shape[0] - 1)
        batch = self._with_states(batch, states)
        if not self._num_drafts:
            return self._model(batch, caches)
        own = len(caches) - 2 * self._num_drafts
        return self._with_heads(batch, caches[:own], caches[own:], plain[2], plain[11])

    def _with_heads(
        self,
        batch: ForwardBatch,
        caches: Sequence[LayerCache],
        head_caches: Sequence[LayerCache],
        token_row: Tensor,
        block_table: Tensor,
    ) -> Tensor:
        """The forward, and behind it the draft heads over the same tokens, so that they remember them."""
        model = self._model
        assert isinstance(model, DraftingModel)
        logits, hidden_TE = model.forward_hidden(batch, caches)
        before_T = slots_before(batch.positions_T, token_row, block_table, self._block_size)
        for head in range(self._num_drafts):
            (states,), cache = head_caches[2 * head : 2 * head + 2]
            states = states.flatten(0, 1)
            states.index_copy_(0, batch.slots_T, hidden_TE.to(states.dtype))
            hidden_TE = model.draft(head, states.index_select(0, before_T), batch._replace(first_key=head + 1), cache)
        return logits

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
            shape=self._shape.for_model(),
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


def _with_drafts(token_ids: Tensor, token_row: Tensor, drafts_RS: Tensor) -> Tensor:
    """Token ids with drafts in place of ``FROM_DRAFT`` and less."""
    which = (FROM_DRAFT - token_ids).clamp(0, drafts_RS.shape[1] - 1)
    drafts_T = drafts_RS.index_select(0, token_row).gather(1, which[:, None])[:, 0]
    return torch.where(token_ids <= FROM_DRAFT, drafts_T, token_ids)


def slots_before(positions_T: Tensor, row_T: Tensor, block_table: Tensor, block_size: int) -> Tensor:
    """Where the entry of the position before each token lies; a first token has none, and gets its own.

    Args:
        positions_T: [T] of the tokens.
        row_T: [T] their rows in the block table.
        block_table: Of all rows.
        block_size: Tokens of a block.
    """
    before_T = (positions_T - 1).clamp(min=0)
    block_T = block_table[row_T, torch.div(before_T, block_size, rounding_mode="floor")].to(torch.int64)
    return block_T * block_size + before_T % block_size


def layer_states(model: Model, num_drafts: int) -> Sequence[LayerState]:
    """What a forward keeps: the layers' own states; of each draft head in use the hidden states it takes, its own."""
    layout = list(model.cache_layout())
    if num_drafts:
        assert isinstance(model, DraftingModel)
        dtype = next((p.dtype for p in model.parameters()), torch.int64) if isinstance(model, torch.nn.Module) else None
        hidden = PagedState(shapes=((model.hidden_size,),), dtypes=(dtype or torch.float32,))
        for state in model.draft_layout()[:num_drafts]:
            layout += [hidden, state]
    return layout


def has_slots(layout: Sequence[LayerState]) -> bool:
    """Whether any layer has a state of slots."""
    return any(isinstance(state, SlotState) for state in layout)


def bytes_per_token(layout: Sequence[LayerState]) -> int:
    """Cache bytes of one token, all layers; 0 where no layer attends."""
    return sum(state.bytes_per_token() for state in layout if isinstance(state, PagedState))


def bytes_per_slot(layout: Sequence[LayerState]) -> int:
    """Bytes of one slot, all layers; 0 where no layer has slots."""
    return sum(state.bytes_per_slot() for state in layout if isinstance(state, SlotState))


def make_caches(
    layout: Sequence[LayerState], device: Device, num_blocks: int, block_size: int, num_slots: int = 0
) -> list[LayerCache]:
    """Zeroed tensors of every layer state.

    Args:
        layout: As :func:`layer_states` gives it.
        device: Where they lie.
        num_blocks: Leading size of paged ones, [num_blocks, block_size, *per-token shape]; the dummy block counts.
        block_size: Tokens of a block.
        num_slots: Leading size of those of slots, [num_slots, *shape]; the dummy slot counts.

    Raises:
        ConfigError: they do not fit the device's memory.
    """

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
