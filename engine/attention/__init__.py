"""Attention backends behind one interface (``base.py``), and the factory that picks one."""

from __future__ import annotations

import torch

from engine.attention.backends import BACKENDS, backend_name, make_attention
from engine.attention.base import Attention
from engine.attention.torch import TorchAttention
from engine.models.base import PagedState

__all__ = ["BACKENDS", "Attention", "TorchAttention", "backend_name", "kv_state", "make_attention"]


def kv_state(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> PagedState:
    """Cache layout of one attention layer: keys and values, each [num_kv_heads, head_dim] a token."""
    shape = (num_kv_heads, head_dim)
    return PagedState(shapes=(shape, shape), dtypes=(dtype, dtype))
