"""Attention backends behind one interface (``base.py``), and the factory that picks one."""

from __future__ import annotations

import torch

from engine.attention.base import Attention
from engine.attention.torch import TorchAttention
from engine.errors import ConfigError
from engine.models.base import PagedState

__all__ = ["Attention", "TorchAttention", "kv_state", "make_attention"]


def make_attention(name: str, device: str) -> Attention:
    """The backend called ``name`` on ``device``; ``"auto"`` picks the best one there is.

    Raises:
        ConfigError: ``name`` is not a backend.
    """
    if name in ("auto", "torch"):
        return TorchAttention()
    raise ConfigError(f"attention_backend must be one of auto, torch (device {device}); got {name!r}")


def kv_state(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> PagedState:
    """Cache layout of one attention layer: keys and values, each [num_kv_heads, head_dim] a token."""
    shape = (num_kv_heads, head_dim)
    return PagedState(shapes=(shape, shape), dtypes=(dtype, dtype))
