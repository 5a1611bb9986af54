"""A model without weights whose logits are an integer hash of what it read through block table and rows.

Its cache holds (token id, position) of every token. A row's logits hash every entry it reads, with the place it was
read from, so any wrong block, slot, row, length or order changes the output; equality between schedules is exact in
every dtype, and a step costs well under a millisecond. For tests of scheduling (design §12).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engine.batch import ForwardBatch
from engine.models.base import LayerCache, PagedState
from engine.models.loader import LoadedModel

_MIX_TOKEN, _MIX_POSITION, _MIX_PLACE, _MIX_VOCAB = 2654435761, 40503, 2246822519, 3266489917
_MASK = (1 << 31) - 1


class OracleModel(nn.Module):
    """Letters: T tokens, N rows, K blocks a row, P keys (K blocks of tokens), V vocabulary, L logits rows."""

    def __init__(self, vocab_size: int = 64, *, device: torch.device, max_position: int = 4096, spread: float = 8.0):
        super().__init__()
        self.vocab_size = vocab_size
        self.max_position = max_position
        self.spread = spread
        """Logits lie in [0, spread)."""
        self.register_buffer("vocab_V", torch.arange(vocab_size, device=device, dtype=torch.int64) * _MIX_VOCAB)

    def cache_layout(self) -> Sequence[PagedState]:
        """One layer of (token id, position) pairs."""
        return [PagedState(shapes=((2,),), dtypes=(torch.int64,))]

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Logits [L, V], float32, whatever was read."""
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
        token_L = batch.logits_idx_L
        row_L = batch.row_T.index_select(0, token_L)
        start_L = batch.query_start_N.index_select(0, row_L)
        before_L = batch.kv_len_N.index_select(0, row_L) - batch.query_len_N.index_select(0, row_L)
        last_L = (before_L + token_L - start_L).clamp(0, num_keys - 1)
        state_L = prefix_NP.index_select(0, row_L).gather(1, last_L[:, None])
        mixed_LV = _mix(_mix(state_L) + self.vocab_V)  # type: ignore[operator]
        return (mixed_LV % 65536).to(torch.float32) * (self.spread / 65536)


def _mix(x: Tensor) -> Tensor:
    """Scramble to [0, 2**31), in wrapping int64 arithmetic."""
    x = x ^ ((x >> 16) & _MASK)
    x = x * 73244475
    x = x ^ ((x >> 16) & _MASK)
    x = x * 73244475
    return (x ^ ((x >> 16) & _MASK)) & _MASK


def load_oracle(*, attention: str, dtype: torch.dtype | None, device: torch.device) -> LoadedModel:
    """The model behind the name ``oracle``: 64 ids, the last one EOS; ``attention`` and ``dtype`` do not matter."""
    model = OracleModel(device=device)
    return LoadedModel(
        model=model,
        tokenizer=None,
        name="oracle",
        eos_token_ids=(model.vocab_size - 1,),
        vocab_size=model.vocab_size,
        architecture="Oracle",
        config={},
    )
