"""What the dense decoder is built from, read out of a Hugging Face ``config.json`` of either key style."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import CheckpointError
from engine.models.rope import RopeConfig, rope_from_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one architecture does that no key of its config says."""

    qkv_bias: bool | None = None
    """Whether q, k and v carry biases; None: ``attention_bias`` decides."""
    o_bias: bool | None = None
    """The same for the output projection."""
    has_mlp_bias_key: bool = False
    """Whether ``mlp_bias`` is read."""
    qk_norm: bool = False
    """Normalise each head's query and key before RoPE."""
    windows: str = "none"
    """``none``; ``number``: a ``sliding_window`` that is not null acts in every layer; ``switched``: Qwen's keys."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What transformers assumes for keys a file may leave out, where it is not the usual value."""


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(has_mlp_bias_key=True, defaults={"max_position_embeddings": 2048}),
    "MistralForCausalLM": Family(
        qkv_bias=False,
        o_bias=False,
        windows="number",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131072},
    ),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True, o_bias=False, windows="switched", defaults={"max_position_embeddings": 32768}
    ),
    "Qwen3ForCausalLM": Family(
        qk_norm=True, windows="switched", defaults={"max_position_embeddings": 32768, "head_dim": 128}
    ),
}

_OUT_OF_SCOPE = {
    "quantization_config": "quantised weights",
    "num_experts": "mixture of experts",
    "num_local_experts": "mixture of experts",
    "dual_chunk_attention_config": "dual chunk attention",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of one dense decoder."""

    architecture: str
    """A key of ``FAMILIES``."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    """Longest sequence the checkpoint was made for, RoPE scaling counted in."""
    rope: RopeConfig
    windows: tuple[int | None, ...]
    """Keys a query sees in each layer, its own included; None: all."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: num_key_value_heads ({self.num_kv_heads}) must divide "
                f"num_attention_heads ({self.num_heads})"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"config.json: head_dim must be even for RoPE, got {self.head_dim}")

    @classmethod
    def from_checkpoint(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Read a parsed ``config.json``.

        Raises:
            CheckpointError: A size is missing, or the file asks for something this decoder does not compute.
        """
        architecture = architecture_of(config)
        family = FAMILIES[architecture]
        _refuse_out_of_scope(config)
        keys = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
        num_heads, hidden_size = _size(keys, "num_attention_heads"), _size(keys, "hidden_size")
        num_layers = _size(keys, "num_hidden_layers")
        max_position = _size(keys, "max_position_embeddings")
        rope = rope_from_checkpoint(config, max_position)
        attention_bias = bool(keys.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=_size(keys, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_size(keys, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_size(keys, "num_key_value_heads") if "num_key_value_heads" in keys else num_heads,
            head_dim=_size(keys, "head_dim") if "head_dim" in keys else hidden_size // num_heads,
            rms_norm_eps=float(keys.get("rms_norm_eps", 1e-6)),
            max_position=max(max_position, int(rope.original_max_position * rope.length_factor)),
            rope=rope,
            windows=_windows(family, config, num_layers),
            tie_word_embeddings=bool(keys.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            o_bias=attention_bias if family.o_bias is None else family.o_bias,
            mlp_bias=family.has_mlp_bias_key and bool(keys.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
        )


def architecture_of(config: Mapping[str, Any]) -> str:
    """The one entry of ``architectures``.

    Raises:
        CheckpointError: There is none, or more than one.
    """
    names = config.get("architectures")
    if not isinstance(names, (list, tuple)) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(f"config.json: architectures must be a list of one class name, got {names!r}")
    return names[0]


def _refuse_out_of_scope(config: Mapping[str, Any]) -> None:
    for key, feature in _OUT_OF_SCOPE.items():
        if config.get(key):
            raise CheckpointError(f"config.json: {key} asks for {feature}, which this architecture does not load here")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"config.json: hidden_act must be 'silu', got {activation!r}")


def _size(keys: Mapping[str, Any], name: str) -> int:
    value = keys.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {name} must be a positive whole number, got {value!r}")
    return value


def _windows(family: Family, config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    if family.windows == "none":
        return (None,) * num_layers
    # Here null means "no window", so a key that is present is not replaced by the default.
    window = config.get("sliding_window", family.defaults.get("sliding_window", 4096))
    if window is not None:
        window = _size({"sliding_window": window}, "sliding_window")
    if family.windows == "number":
        return (window,) * num_layers
    if not config.get("use_sliding_window", False):
        window = None
    layer_types = config.get("layer_types")
    if layer_types is None:
        first_sliding = config.get("max_window_layers", 28)
        return tuple(window if layer >= first_sliding else None for layer in range(num_layers))
    _check_layer_types(layer_types, num_layers)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _check_layer_types(layer_types: Any, num_layers: int) -> None:
    known = ("full_attention", "sliding_attention")
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise CheckpointError(f"config.json: layer_types must list {num_layers} layers, got {layer_types!r}")
    for kind in layer_types:
        if kind not in known:
            raise CheckpointError(f"config.json: layer_types may hold {' and '.join(known)}, got {kind!r}")
