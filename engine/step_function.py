"""One forward as a function of tensors alone: input ids from samples, cache slots, block-table rows, then the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from engine.batch import BatchShape, ForwardBatch, PrefillPlan, RoutingTape, Snapshots
from engine.config import EngineConfig, RoutingReplayMode
from engine.device import Device, has_triton
from engine.errors import ConfigError
from engine.models.base import (
    PLAIN_STATES,
    DraftingModel,
    LayerCache,
    LayerState,
    Model,
    PagedState,
    RecurrentModel,
    RemembersDrafts,
    SlotState,
    StateOptions,
)
from engine.routing_replay import RoutingSizes

if TYPE_CHECKING:
    from engine.kernels.triton_draft_inputs import DraftInputs
    from engine.kernels.triton_inputs import DecodeInputs

FROM_SAMPLE = -1
"""In ``token_ids``: take the row's newest sampled token, which is on the device only."""
FROM_DRAFT = -2
"""In ``token_ids``: take the row's first draft, which is on the device only; one less is the second, and so on."""
NO_BLOCK = -1
"""In ``row_block``: the row takes no new block in this step."""
NUM_PLAIN_INPUTS, NUM_DRAFT_INPUTS, NUM_STATE_INPUTS = 12, 3, 5
"""Tensors that :meth:`Runner._step_inputs` gives before the caches: always, with drafts the columns ``drafts``,
``length`` and ``accepted``, and where a model has state slots. Where routing is replayed one more follows: what is
given."""


def is_fusable(tensor: Tensor) -> bool:
    """Whether the inputs of a forward over decode rows alone are made by one kernel where ``tensor`` lies."""
    return tensor.is_cuda and has_triton()


class StepFunction:
    """One forward as a function of tensors alone, for a fixed shape: what is run eagerly, traced and captured."""

    def __init__(
        self,
        model: Model,
        block_size: int,
        shape: BatchShape,
        prefill_plan: PrefillPlan | None = None,
        num_drafts: int = 0,
        *,
        counts_lengths: bool = False,
        states: StateOptions = PLAIN_STATES,
        routing: RoutingReplayMode | None = None,
        layout: Sequence[LayerState] | None = None,
    ) -> None:
        """See the class.

        Args:
            model: Runs it.
            block_size: Tokens of a block.
            shape: What it may branch on.
            prefill_plan: As in :class:`ForwardBatch`.
            num_drafts: Draft heads in use.
            counts_lengths: Where decode rows stand, and which state they go on from, is read from the columns of the
                device; what is staged of it is what the host knows, which may be a bound.
            states: How recurrent states are kept.
            routing: As the option ``routing_replay``.
            layout: Of the model's :func:`layer_states` for these arguments, if it is known: that takes some 40 µs.
        """
        self._model = model
        self._num_drafts = num_drafts
        self._counts_lengths = counts_lengths
        self._block_size = block_size
        self._shape = shape
        self._prefill_plan = prefill_plan
        self._routing = routing
        self.key = (block_size, shape, num_drafts, counts_lengths, states, getattr(model, "ranks_name", None), routing)
        """Tells one traced forward of a model from another, next to its inputs' shapes."""
        if layout is None:
            layout = layer_states(model, num_drafts, states, keeps_routing=routing is not None)
        self._replays = states.replay_width > 0 and has_slots(layout)
        self._model_shape = shape.for_model(replays=self._replays)
        self._tensors_a_layer = [len(state.shapes) for state in layout]
        self._num_plain = NUM_PLAIN_INPUTS + (NUM_DRAFT_INPUTS if num_drafts else 0)
        self._num_stated = self._num_plain + (NUM_STATE_INPUTS if has_slots(layout) else 0)
        self._num_inputs = self._num_stated + (routing == "replay")
        self._marks_padding: bool = getattr(model, "wants_real_tokens", False)

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Logits, [L, V]; ``inputs`` as :meth:`Runner._step_inputs` gives them."""
        plain, states = inputs[:NUM_PLAIN_INPUTS], inputs[self._num_plain : self._num_stated]
        caches = _grouped(inputs[self._num_inputs :], self._tensors_a_layer)
        fused = not self._shape.num_prefill and is_fusable(plain[0])
        before_T = None
        if self._num_drafts:
            columns = inputs[NUM_PLAIN_INPUTS : self._num_plain]
            make = self._fused_drafting_batch if fused else self._drafting_batch
            batch, states, before_T = make(plain, columns, states)
        else:
            batch = self._fused_batch(*plain) if fused else self._batch(*plain)
        if self._marks_padding:
            token_row, block_table = plain[2], plain[11]
            batch = batch._replace(is_real_T=token_row != block_table.shape[0] - 1)
        batch = self._with_states(batch, states)
        if self._replays:
            batch = batch._replace(replayed_V=replayed_counts(columns[2], plain[4][: self._shape.num_decode]))
        if self._routing is not None:
            (kept,) = caches.pop(len(caches) - 2 * self._num_drafts - 1)
            given = inputs[self._num_stated] if self._routing == "replay" else None
            batch = batch._replace(routing=RoutingTape(kept.flatten(0, 1), batch.slots_T, given))
        if before_T is None:
            return self._model(batch, caches)
        own = len(caches) - 2 * self._num_drafts
        return self._with_heads(batch, caches[:own], caches[own:], before_T)

    def _with_heads(
        self,
        batch: ForwardBatch,
        caches: Sequence[LayerCache],
        head_caches: Sequence[LayerCache],
        before_T: Tensor,
    ) -> Tensor:
        """The forward, and behind it the draft heads over the same tokens, so that they remember them.

        ``before_T`` is where the hidden states that each of them goes on from lie.
        """
        model = cast(DraftingModel, self._model)  # or it has no layout
        logits, hidden_TE = model.forward_hidden(batch, caches)
        for head in range(self._num_drafts):
            (states,), cache = head_caches[2 * head : 2 * head + 2]
            states = states.flatten(0, 1)
            states.index_copy_(0, batch.slots_T, hidden_TE.to(states.dtype))
            before_TE, own = states.index_select(0, before_T), batch._replace(first_key=head + 1)
            is_last = head + 1 == self._num_drafts  # no head goes on from it: all but its entries is for nobody
            if is_last and isinstance(model, RemembersDrafts):
                model.remember(head, before_TE, own, cache)
            else:
                hidden_TE = model.draft(head, before_TE, own, cache)
        return logits

    def _drafting_batch(
        self, plain: tuple[Tensor, ...], columns: tuple[Tensor, ...], states: tuple[Tensor, ...]
    ) -> tuple[ForwardBatch, tuple[Tensor, ...], Tensor]:
        """The batch, ``states``, and where the entries of the positions before its tokens lie."""
        drafts, length, accepted = columns
        if self._counts_lengths:
            plain = self._with_lengths(plain, length)
            states = states if self._replays else self._with_accepted(states, plain[4], accepted)
        batch = self._batch(_with_drafts(plain[0], plain[2], drafts), *plain[1:])
        return batch, states, slots_before(batch.positions_T, plain[2], plain[11], self._block_size)

    def _fused_drafting_batch(
        self, plain: tuple[Tensor, ...], columns: tuple[Tensor, ...], states: tuple[Tensor, ...]
    ) -> tuple[ForwardBatch, tuple[Tensor, ...], Tensor]:
        """The same of decode rows alone by one kernel."""
        from engine.kernels.triton_draft_inputs import draft_inputs

        token_ids, _, _, _, table_row, _, _, kv_len, _ = plain[:9]
        last_token, block_table = plain[10:]
        drafts, length, accepted = columns
        made = draft_inputs(
            token_ids,
            kv_len,
            table_row,
            last_token,
            drafts,
            length,
            accepted,
            block_table,
            states[0] if states and not self._replays else None,
            block_size=self._block_size,
            num_kv_blocks=self._shape.num_kv_blocks,
            counts_lengths=self._counts_lengths,
        )
        batch = self._made_batch(made, plain, made.kv_len)
        return batch, states if made.state_from is None else (made.state_from, *states[1:]), made.before

    def _with_lengths(self, plain: tuple[Tensor, ...], length_R: Tensor) -> tuple[Tensor, ...]:
        """``plain`` with positions and lengths of decode rows that follow ``length``; padding keeps what is staged."""
        token_ids, positions, token_row, batch_row, table_row, query_start, query_len, kv_len, *rest = plain
        own_T = length_R.index_select(0, token_row) + (FROM_DRAFT - token_ids)  # the newest token, then its drafts
        positions = torch.where(token_ids <= FROM_SAMPLE, own_T, positions)
        count = self._shape.num_decode
        row_n, staged_n = table_row[:count], kv_len[:count]
        own_n = length_R.index_select(0, row_n) + self._num_drafts
        own_n = torch.where(row_n == length_R.shape[0] - 1, staged_n, own_n)
        kv_len = torch.cat([own_n, kv_len[count:]]) if self._shape.num_prefill else own_n
        return token_ids, positions, token_row, batch_row, table_row, query_start, query_len, kv_len, *rest

    def _with_accepted(self, states: tuple[Tensor, ...], table_row: Tensor, accepted_R: Tensor) -> tuple[Tensor, ...]:
        """``states`` of which decode rows go on from behind their last accepted draft; staged is where they lie."""
        if not states:
            return states
        count = self._shape.num_decode
        state_from_N = states[0]
        own_n = state_from_N[:count] + accepted_R.index_select(0, table_row[:count]).clamp(min=0)
        if self._shape.num_prefill:
            own_n = torch.cat([own_n, state_from_N[count:]])
        return own_n, *states[1:]

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
            shape=self._model_shape,
            prefill_plan=self._prefill_plan,
        )

    def _fused_batch(self, *inputs: Tensor) -> ForwardBatch:
        """The same of one-token rows by one kernel, which also enters the blocks that rows take in this step."""
        from engine.kernels.triton_inputs import decode_inputs

        token_ids, _, _, _, table_row, _, _, kv_len, _ = inputs[:9]
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
        return self._made_batch(made, inputs, kv_len)

    def _made_batch(
        self, made: DecodeInputs | DraftInputs, plain: tuple[Tensor, ...], kv_len_N: Tensor
    ) -> ForwardBatch:
        """Of decode rows alone: what one kernel made, and what is read as it is staged."""
        _, _, _, batch_row, _, query_start, query_len, _, logits_idx = plain[:9]
        return ForwardBatch(
            token_ids_T=made.token_ids,
            positions_T=made.positions,
            row_T=batch_row,
            slots_T=made.slots,
            block_table_NK=made.block_table,
            query_start_N=query_start,
            query_len_N=query_len,
            kv_len_N=kv_len_N,
            logits_idx_L=logits_idx,
            shape=self._model_shape,
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


def replayed_counts(accepted_R: Tensor, row_V: Tensor) -> Tensor:
    """[V] tokens of its last forward that each row has to read once more: the newest one and the accepted drafts.

    None behind a prompt and of nobody's rows, whose ``accepted`` is -1.
    """
    return accepted_R.index_select(0, row_V) + 1


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


def state_options(config: EngineConfig) -> StateOptions:
    """How recurrent states are kept."""
    return StateOptions(
        replay_width=config.decode_width if config.replays_states else 0,
        dtype=None if config.mamba_state_dtype == "auto" else getattr(torch, config.mamba_state_dtype),
    )


def layer_states(
    model: Model, num_drafts: int, states: StateOptions = PLAIN_STATES, *, keeps_routing: bool = False
) -> Sequence[LayerState]:
    """What a forward keeps: the layers' own states; of each draft head in use the hidden states it takes, its own.

    Between them, if it ``keeps_routing``, the experts that tokens went to.

    Raises:
        ConfigError: the model cannot keep ``states`` so, or has no experts.
    """
    layout = list(model.state_layout(states) if isinstance(model, RecurrentModel) else model.cache_layout())
    if states.replay_width and has_slots(layout) and not isinstance(model, RecurrentModel):
        raise ConfigError("state_rewind='replayed' needs a model with state_layout; use 'stored'")
    if keeps_routing:
        layout.append(RoutingSizes.of(model).state)
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
