"""What a model with Mamba2 layers is built from; ``hybrid_families.py`` reads it out of a ``config.json``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from engine.errors import CheckpointError
from engine.kernels import Activation
from engine.models.mamba2 import MixerConfig
from engine.models.moe import MoEConfig, MoENames
from engine.models.rope import RopeConfig


class LayerKind(Enum):
    """What one residual layer does."""

    MAMBA = "linear_attention"
    ATTENTION = "full_attention"
    MLP = "mlp"
    MOE = "moe"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One residual layer, ``x + mixer(norm(x))``, and what a checkpoint calls its parts."""

    kind: LayerKind
    norm: str
    mixer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Of all attention layers."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Factor on the scores."""
    rope: RopeConfig | None
    """None: positions are not told; the Mamba2 layers know the order."""
    bias: bool = False
    """Of all four projections."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: num_key_value_heads ({self.num_kv_heads}) must divide "
                f"num_attention_heads ({self.num_heads})"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"config.json: head_dim must be even, got {self.head_dim}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """Of all dense feed-forward layers."""

    size: int
    """F."""
    activation: Activation
    up: tuple[str, ...]
    """What a checkpoint calls the rows of the first projection; several names stand for equal parts."""
    down: str
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig:
    """Sizes and switches of one model with Mamba2 layers."""

    architecture: str
    """A key of ``engine.models.hybrid_families.FAMILIES``."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_position: int
    """Longest sequence the checkpoint was made for."""
    embedding_name: str
    final_norm_name: str
    mamba: MixerConfig
    attention: AttentionConfig | None = None
    mlp: MLPConfig | None = None
    moe: MoEConfig | None = None
    moe_names: MoENames | None = None
    draft_heads: tuple[tuple[LayerSpec, ...], ...] = ()
    """Layers of each MTP head that a checkpoint of this configuration may hold; one of them attends."""
    tie_word_embeddings: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor on what a layer adds."""
    logits_divisor: float = 1.0

    def __post_init__(self) -> None:
        for head in self.draft_heads:
            kinds = [layer.kind for layer in head]
            if kinds.count(LayerKind.ATTENTION) != 1 or LayerKind.MAMBA in kinds:
                raise CheckpointError(
                    "config.json: a draft head must have one attention layer and no Mamba2 layer, got "
                    + ", ".join(kind.value for kind in kinds)
                )
        parts = {LayerKind.ATTENTION: self.attention, LayerKind.MLP: self.mlp, LayerKind.MOE: self.moe}
        every = (*self.layers, *(layer for head in self.draft_heads for layer in head))
        assert all(parts[layer.kind] is not None for layer in every if layer.kind in parts)
