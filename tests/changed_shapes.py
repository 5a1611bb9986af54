"""Models of named shapes with some sizes changed: random weights, and just as large as a test needs."""

from __future__ import annotations

from typing import Any

import torch

from engine.models import shapes
from engine.models.loader import LoadedModel, load_model

TWO_LAYERS: dict[str, Any] = {
    "hybrid_override_pattern": "M*",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""Of ``tiny-hybrid``: a Mamba2 layer, an attention layer, and its two draft heads."""


def changed_shape(base: str, dtype: torch.dtype, **changes: Any) -> LoadedModel:
    """The model of shape ``base`` with other values for some keys of its configuration, on the CPU."""
    name = f"{base}, changed"
    shapes.SHAPES[name] = {**shapes.SHAPES[base], **changes}
    try:
        return load_model(f"shape:{name}", dtype=dtype)
    finally:
        del shapes.SHAPES[name]
