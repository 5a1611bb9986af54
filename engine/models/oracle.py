"""A model without weights whose logits are an integer hash of what it read through block table and rows.

Its cache holds (token id, position) of every token. A row's logits hash every entry it reads, with the place it was
read from, so any wrong block, slot, row, length or order changes the output; equality between schedules is exact in
every dtype, and a step costs well under a millisecond. For tests of scheduling (design §12).

``oracle-hybrid`` has a recurrent state as well: a rolling hash of the row's tokens, h' = A h + v(token) in wrapping
int64 arithmetic. It is compared with that of the tokens in the cache: while they agree the logits are ``oracle``'s, and
a token that enters it twice, or not at all, or in another order, changes them. ``oracle-mtp`` has three draft heads
besides, which foresee the model's tokens exactly if every hidden state and entry that they read is the right one.
``oracle-moe`` has 8 experts in the model and in each of its three heads; a token that comes to a wrong one, or whose
result does not come back, changes the logits as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from engine.batch import ForwardBatch
from engine.models.base import PLAIN_STATES, LayerCache, LayerState, PagedState, SlotState, StateOptions
from engine.models.loader import LoadedModel
from engine.parallel.dispatch import Dispatch
from engine.parallel.shard import current_shard

_MIX_TOKEN, _MIX_POSITION, _MIX_PLACE, _MIX_VOCAB = 2654435761, 40503, 2246822519, 3266489917
_MASK = (1 << 31) - 1
Skill = Literal["right", "mixed", "wrong"]
"""Of draft heads: always what the model will say, in two of three cases, or never."""
_ROLL = 6364136223846793005
_UNROLL = pow(_ROLL, -1, 1 << 64)
"""The factor A of the rolling hash, odd, and its inverse modulo 2**64."""


class OracleModel(nn.Module):
    """Letters: T tokens, N rows, K blocks a row, P keys (K blocks of tokens), V vocabulary, L logits rows."""

    def __init__(
        self,
        vocab_size: int = 64,
        *,
        device: torch.device,
        max_position: int = 4096,
        spread: float = 8.0,
        is_recurrent: bool = False,
        num_draft_heads: int = 0,
        skill: Skill = "mixed",
        num_experts: int = 0,
    ):
        super().__init__()
        self.num_experts = num_experts
        self.wants_real_tokens = num_experts > 0
        self.shard = current_shard()
        self.part = self.shard.part(num_experts)
        if num_experts:
            self.dispatch: Dispatch | None = None
            """Set by the engine; takes tokens to the experts of other ranks."""
        self.num_draft_heads = num_draft_heads
        self.hidden_size = 3
        """Of a token: what the row hashes to up to it, how far its state is astray, and the sum that heads check."""
        self.skill = skill
        self.is_recurrent = is_recurrent
        self.vocab_size = vocab_size
        self.max_position = max_position
        self.spread = spread
        """Logits lie in [0, spread)."""
        self.register_buffer("vocab_V", torch.arange(vocab_size, device=device, dtype=torch.int64) * _MIX_VOCAB)

        for name, factor in (("rolled_P", _ROLL), ("unrolled_P", _UNROLL)) if is_recurrent else ():
            powers = torch.tensor(_powers(factor, max_position), dtype=torch.int64, device=device)
            self.register_buffer(name, powers)

    def cache_layout(self) -> Sequence[LayerState]:
        """One layer of (token id, position) pairs; with a recurrent state one of hashes as well."""
        return self.state_layout(PLAIN_STATES)

    def state_layout(self, options: StateOptions) -> Sequence[LayerState]:
        """See :class:`engine.models.base.RecurrentModel`; for replay the tokens of the last forward are kept.

        The hash is an integer, whatever the type that is asked for.
        """
        paged = PagedState(shapes=((2,),), dtypes=(torch.int64,))
        shapes = ((1,), (options.replay_width,)) if options.replay_width else ((1,),)
        return [paged, SlotState(shapes=shapes, dtypes=(torch.int64,) * len(shapes))] if self.is_recurrent else [paged]

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Logits [L, V], float32, whatever was read."""
        return self.forward_hidden(batch, caches)[0]

    def forward_hidden(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> tuple[Tensor, Tensor]:
        """Logits [L, V], and the hidden states [T, 3] int64 that draft heads go on from."""
        (cache,) = caches[0]
        entries = torch.stack([batch.token_ids_T, batch.positions_T], dim=1)
        cache.view(-1, 2).index_copy_(0, batch.slots_T, entries)
        block_size = cache.shape[1]
        num_keys = batch.shape.num_kv_blocks * block_size
        read_NP2 = cache.index_select(0, batch.block_table_NK.reshape(-1)).reshape(-1, num_keys, 2)
        place_P = torch.arange(num_keys, device=cache.device)
        hash_NP = _mix(
            _mix(read_NP2[..., 0] * _MIX_TOKEN + read_NP2[..., 1] * _MIX_POSITION + 1) + place_P * _MIX_PLACE
        )
        prefix_NP = hash_NP.cumsum(dim=1)
        token_T = (
            torch.arange(batch.row_T.shape[0], device=cache.device) if self.num_draft_heads else batch.logits_idx_L
        )
        row_T = batch.row_T.index_select(0, token_T)
        before_T = (batch.kv_len_N - batch.query_len_N - batch.query_start_N).index_select(0, row_T)
        last_T = (before_T + token_T).clamp(0, num_keys - 1)
        prefix_T = prefix_NP.index_select(0, row_T).gather(1, last_T[:, None])[:, 0]
        astray_T = torch.zeros_like(prefix_T)
        if self.num_experts:
            astray_T = self._expert_error(batch, seed=1).index_select(0, token_T)
        if self.is_recurrent:
            rolled_T = self._roll(batch, *caches[1]).index_select(0, token_T)
            astray_T = astray_T + rolled_T - self._rolled_from(read_NP2[..., 0], row_T, last_T)
        if not self.num_draft_heads:
            return self._logits(prefix_T, astray_T), prefix_T
        tally_NP = _tally(read_NP2[..., 0]).cumsum(dim=1)
        tally_T = tally_NP.index_select(0, row_T).gather(1, last_T[:, None])[:, 0]
        hidden_T3 = torch.stack([prefix_T, astray_T, tally_T], dim=1)
        return self.draft_logits(-1, hidden_T3.index_select(0, batch.logits_idx_L)), hidden_T3

    def _expert_error(self, batch: ForwardBatch, seed: int) -> Tensor:
        """[T] what two experts of each token, wherever they are, come to, less what they should; 0 if all is right."""
        key_T = _mix(_mix(batch.token_ids_T * _MIX_TOKEN + batch.positions_T * _MIX_POSITION + seed) + 11)
        first_T = key_T % self.num_experts
        second_T = (first_T + 1 + (key_T >> 8) % (self.num_experts - 1)) % self.num_experts
        ids_T2, x_T1 = torch.stack([first_T, second_T], dim=1), key_T[:, None]
        weights_T2 = 1 + torch.stack([key_T >> 4, key_T >> 12], dim=1) % 7
        expected_T1 = _expert_sums(x_T1, ids_T2, weights_T2)
        if self.dispatch is None:
            found_T1 = _expert_sums(x_T1, ids_T2, weights_T2)
        else:
            found_T1 = self.dispatch(
                x_T1, ids_T2, weights_T2, batch.is_real_T, batch.shape.expert_tokens, self._compute_experts
            )
        error_T = (found_T1 - expected_T1)[:, 0]
        return error_T if batch.is_real_T is None else torch.where(batch.is_real_T, error_T, 0)

    def _compute_experts(self, x_T1: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return _expert_sums(x_T1, ids_TK + self.part.start, weights_TK)

    def _logits(self, prefix_L: Tensor, astray_L: Tensor) -> Tensor:
        mixed_LV = _mix(_mix(prefix_L + astray_L)[:, None] + self.get_buffer("vocab_V"))
        return (mixed_LV % 65536).to(torch.float32) * (self.spread / 65536)

    # -- draft heads -----------------------------------------------------------------------------------------------

    def draft_layout(self) -> Sequence[PagedState]:
        """Of each head, (token id, tally of the tokens before it) of each position."""
        return [PagedState(shapes=((2,),), dtypes=(torch.int64,))] * self.num_draft_heads

    def draft(self, head: int, before_TE: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """The hidden states that the model itself will have at these tokens, if all that is read here is right.

        A head's entries hold the tally before their token; each must be the one before it and that one's token. If any
        is not, because an entry was never made, or is another row's or a rejected draft's, the draft is another.
        """
        (entries,) = cache
        token_T, position_T = batch.token_ids_T, batch.positions_T
        flat = entries.view(-1, 2)
        flat.index_copy_(0, batch.slots_T, torch.stack([token_T, before_TE[:, 2]], dim=1))
        num_keys = batch.shape.num_kv_blocks * entries.shape[1]
        read_NP2 = entries.index_select(0, batch.block_table_NK.reshape(-1)).reshape(-1, num_keys, 2)
        is_next_NP = read_NP2[:, 1:, 1] == read_NP2[:, :-1, 1] + _tally(read_NP2[:, :-1, 0])
        place_P = torch.arange(1, num_keys, device=entries.device)
        is_read_TP = (place_P > batch.first_key) & (place_P <= position_T[:, None])
        is_sound_T = (is_next_NP.index_select(0, batch.row_T) | ~is_read_TP).all(dim=1)
        own_T = _mix(_mix(token_T * _MIX_TOKEN + position_T * _MIX_POSITION + 1) + position_T * _MIX_PLACE)
        prefix_T = before_TE[:, 0] + own_T + torch.where(is_sound_T, 0, 1)
        if self.num_experts:
            prefix_T = prefix_T + self._expert_error(batch, seed=head + 2)
        return torch.stack([prefix_T, before_TE[:, 1], before_TE[:, 2] + _tally(token_T)], dim=1)

    def draft_logits(self, head: int, hidden_LE: Tensor) -> Tensor:
        """Logits [L, V], the model's own (head -1); those of a head are moved on by one id where it lacks the skill."""
        logits_LV = self._logits(hidden_LE[:, 0], hidden_LE[:, 1])
        if head < 0 or self.skill == "right":
            return logits_LV
        is_wrong_L = torch.ones_like(hidden_LE[:, 0], dtype=torch.bool)
        if self.skill == "mixed":
            is_wrong_L = _mix(hidden_LE[:, 0] + 7) % 3 == 0
        return torch.where(is_wrong_L[:, None], logits_LV.roll(1, dims=1), logits_LV)

    def _rolled_from(self, token_NP: Tensor, row_T: Tensor, last_T: Tensor) -> Tensor:
        """The rolling hash that the tokens in the cache come to, of row ``row`` up to place ``last``; [T]."""
        count = token_NP.shape[1]
        unrolled_P = self.get_buffer("unrolled_P")[:count]
        sum_NP = ((token_NP * _MIX_TOKEN + 1) * unrolled_P).cumsum(dim=1)
        sum_T = sum_NP.index_select(0, row_T).gather(1, last_T[:, None])[:, 0]
        return self.get_buffer("rolled_P").index_select(0, last_T) * sum_T

    def _roll(self, batch: ForwardBatch, hashes: Tensor, kept: Tensor | None = None) -> Tensor:
        """The rolling hash behind each token, [T]; rows' last ones and snapshots are stored in ``hashes`` [slots, 1].

        With i a token's place in its row, h_i = A^i (A h + sum of A^-j v_j for j up to i), where h is the row's hash
        before this forward. Replayed rows store that one, and their own tokens in ``kept`` [slots, W].
        """
        assert batch.state_from_N is not None
        assert batch.state_to_N is not None
        rolled_P, unrolled_P = self.get_buffer("rolled_P"), self.get_buffer("unrolled_P")
        row_T, start_N, len_N = batch.row_T, batch.query_start_N, batch.query_len_N
        place_T = (torch.arange(row_T.shape[0], device=row_T.device) - start_N.index_select(0, row_T)).clamp(min=0)
        value_T = batch.token_ids_T * _MIX_TOKEN + 1
        sum_T = (value_T * unrolled_P.index_select(0, place_T)).cumsum(0)
        zero = torch.zeros_like(sum_T[:1])
        before_N = torch.cat([zero, sum_T]).index_select(0, start_N)
        was_N = hashes.index_select(0, batch.state_from_N)[:, 0]
        was_N = torch.where(batch.kv_len_N > len_N, was_N, torch.zeros_like(was_N))
        count = batch.shape.num_replayed
        if count:
            assert kept is not None
            was_N = torch.cat([_replayed(batch, was_N[:count], kept), was_N[count:]])
            own_VW = batch.token_ids_T[: batch.shape.num_stepping_tokens].view(count, -1)
            kept.index_copy_(0, batch.state_to_N[:count], own_VW)
        base_N = was_N * _signed(_ROLL) - before_N
        hash_T = rolled_P.index_select(0, place_T) * (sum_T + base_N.index_select(0, row_T))
        last_N = (start_N + len_N - 1).clamp(min=0)
        after_N = torch.cat([was_N[:count], hash_T.index_select(0, last_N)[count:]])
        hashes.index_copy_(0, batch.state_to_N, after_N[:, None])
        if batch.snapshots is not None:
            taken = batch.snapshots
            token_M = (start_N.index_select(0, taken.row_M) + taken.after_M - 1).clamp(min=0)
            hashes.index_copy_(0, taken.slot_M, hash_T.index_select(0, token_M)[:, None])
        return hash_T


def _replayed(batch: ForwardBatch, hash_V: Tensor, kept: Tensor) -> Tensor:
    """The hashes of the replayed rows behind those tokens of their last forwards that stand."""
    assert batch.state_from_N is not None
    assert batch.replayed_V is not None
    token_VW = kept.index_select(0, batch.state_from_N[: hash_V.shape[0]])
    for place in range(token_VW.shape[1]):
        after_V = hash_V * _signed(_ROLL) + token_VW[:, place] * _MIX_TOKEN + 1
        hash_V = torch.where(place < batch.replayed_V, after_V, hash_V)
    return hash_V


def _expert_sums(x_T1: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """[T, 1]: an expert's result is a hash of its number and the token's."""
    return (_mix(x_T1 + (ids_TK + 1) * _MIX_PLACE) * weights_TK).sum(1, keepdim=True)


def _tally(token_ids: Tensor) -> Tensor:
    return _mix(token_ids * _MIX_TOKEN + 5)


def rolling_hash(token_ids: Sequence[int]) -> int:
    """The recurrent state behind these tokens, one by one: what :meth:`OracleModel._roll` must come to; an int64."""
    state = 0
    for token in token_ids:
        state = (state * _ROLL + token * _MIX_TOKEN + 1) % (1 << 64)
    return _signed(state)


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


def _powers(factor: int, count: int) -> list[int]:
    power, powers = 1, []
    for _ in range(count):
        powers.append(_signed(power))
        power = power * factor % (1 << 64)
    return powers


def _mix(x: Tensor) -> Tensor:
    """Scramble to [0, 2**31), in wrapping int64 arithmetic."""
    x = x ^ ((x >> 16) & _MASK)
    x = x * 73244475
    x = x ^ ((x >> 16) & _MASK)
    x = x * 73244475
    return (x ^ ((x >> 16) & _MASK)) & _MASK


def load_oracle(*, attention: str, dtype: torch.dtype | None, device: torch.device, ssm: str = "auto") -> LoadedModel:
    """The model behind the name ``oracle``: 64 ids, the last one EOS; the options do not matter."""
    return _loaded("oracle", OracleModel(device=device))


def load_oracle_hybrid(
    *, attention: str, dtype: torch.dtype | None, device: torch.device, ssm: str = "auto"
) -> LoadedModel:
    """The model behind the name ``oracle-hybrid``: as ``oracle``, with a recurrent state."""
    return _loaded("oracle-hybrid", OracleModel(device=device, is_recurrent=True))


def load_oracle_mtp(
    *, attention: str, dtype: torch.dtype | None, device: torch.device, ssm: str = "auto"
) -> LoadedModel:
    """The model behind the name ``oracle-mtp``: as ``oracle-hybrid``, with three draft heads."""
    return _loaded("oracle-mtp", OracleModel(device=device, is_recurrent=True, num_draft_heads=3))


def load_oracle_moe(
    *, attention: str, dtype: torch.dtype | None, device: torch.device, ssm: str = "auto"
) -> LoadedModel:
    """The model behind the name ``oracle-moe``: as ``oracle-mtp``, with experts."""
    return _loaded("oracle-moe", OracleModel(device=device, is_recurrent=True, num_draft_heads=3, num_experts=8))


def _loaded(name: str, model: OracleModel) -> LoadedModel:
    return LoadedModel(
        model=model,
        tokenizer=None,
        name=name,
        eos_token_ids=(model.vocab_size - 1,),
        vocab_size=model.vocab_size,
        architecture="Oracle",
        config={},
    )
