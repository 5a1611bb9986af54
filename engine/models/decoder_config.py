"""What the decoder is built from, read out of a Hugging Face ``config.json`` of either key style."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.errors import CheckpointError
from engine.models import moe_families, mtp
from engine.models.moe import MoEConfig
from engine.models.moe_families import ExpertFamily
from engine.models.moe_families import size as _size
from engine.models.mtp import HeadNames
from engine.models.rope import RopeConfig, rope_from_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What one architecture does that no key of its config says."""

    qkv_bias: bool | None = None
    """Whether q, k and v carry biases; None: the key ``qkv_bias_key`` decides."""
    qkv_bias_key: str = "attention_bias"
    o_bias: bool | None = None
    """The same for the output projection; None: ``attention_bias`` decides."""
    has_mlp_bias_key: bool = False
    """Whether ``mlp_bias`` is read."""
    qk_norm: bool | None = False
    """Normalise each head's query and key before RoPE; None: ``use_qk_norm`` decides."""
    windows: str = "none"
    """Which layers have a window. ``none``; ``number``: a ``sliding_window`` that is not null acts in every layer.
    ``late``, ``every``, ``alternate``: only if ``use_sliding_window``, in layers from ``max_window_layers`` on, in
    every layer, in every second one before it."""
    partial_rotary: float | None = None
    """What ``partial_rotary_factor`` is taken for where a file leaves it out; None: heads are always turned whole."""
    experts: ExpertFamily | None = None
    """None: a dense model."""
    ignored: str | None = None
    """Regular expression of checkpoint names that are skipped; what is trained beside the model, not of it."""
    heads: HeadNames | None = None
    """What draft heads are called; None: there are none."""
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
        qkv_bias=True,
        o_bias=False,
        windows="late",
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
    ),
    "MiMoForCausalLM": Family(
        qkv_bias=True,
        o_bias=False,
        windows="late",
        heads=mtp.MIMO,
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
    ),
    "Qwen3ForCausalLM": Family(
        qk_norm=True,
        windows="late",
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768, "head_dim": 128},
    ),
    "MixtralForCausalLM": Family(
        qkv_bias=False,
        o_bias=False,
        windows="number",
        experts=moe_families.MIXTRAL,
        defaults={
            "num_key_value_heads": 8,
            "sliding_window": None,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "num_experts_per_tok": 2,
        },
    ),
    "Qwen2MoeForCausalLM": Family(
        qkv_bias=None,
        qkv_bias_key="qkv_bias",
        o_bias=False,
        windows="alternate",
        experts=moe_families.QWEN,
        defaults={
            "num_key_value_heads": 16,
            "max_position_embeddings": 32768,
            "qkv_bias": True,
            "num_experts_per_tok": 4,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=True,
        windows="every",
        experts=moe_families.QWEN,
        defaults={"num_key_value_heads": 4, "max_position_embeddings": 32768, "num_experts_per_tok": 8},
    ),
    "Glm4MoeForCausalLM": Family(
        qkv_bias=None,
        o_bias=False,
        qk_norm=None,
        partial_rotary=0.5,
        experts=moe_families.GLM4,
        heads=mtp.DEEPSEEK,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
        },
    ),
}

_EXPERTS = "mixture of experts"
_OUT_OF_SCOPE = {
    "quantization_config": "quantised weights",
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "dual_chunk_attention_config": "dual chunk attention",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of one decoder."""

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
    moe: MoEConfig | None = None
    """Of the layers with experts."""
    sparse: tuple[bool, ...] = ()
    """Whether each layer has experts; empty: none has."""
    num_draft_heads: int = 0
    """MTP layers that a checkpoint of this configuration may hold."""

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
        _refuse_out_of_scope(family, config)
        keys = {**family.defaults, **{key: value for key, value in config.items() if value is not None}}
        num_heads, hidden_size = _size(keys, "num_attention_heads"), _size(keys, "hidden_size")
        num_layers = _size(keys, "num_hidden_layers")
        if config.get("num_key_value_heads", 0) is None:
            keys["num_key_value_heads"] = num_heads  # null is not the default here
        max_position = _size(keys, "max_position_embeddings")
        rope = rope_from_checkpoint(
            config,
            max_position,
            default_theta=family.defaults.get("rope_theta", 10_000.0),
            default_partial=family.partial_rotary,
        )
        moe, sparse = _experts(family, keys, num_layers)
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
            qkv_bias=_decided(family.qkv_bias, keys, family.qkv_bias_key),
            o_bias=_decided(family.o_bias, keys, "attention_bias"),
            mlp_bias=family.has_mlp_bias_key and bool(keys.get("mlp_bias", False)),
            qk_norm=_decided(family.qk_norm, keys, "use_qk_norm"),
            moe=moe,
            sparse=sparse,
            num_draft_heads=0 if family.heads is None else _num_heads(keys),
        )

    def of_draft_head(self) -> DecoderConfig:
        """Of the one layer of a draft head: it sees all keys, and has experts where the model's last layer has."""
        return replace(self, num_layers=1, windows=(None,), sparse=self.sparse[-1:], num_draft_heads=0)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The one entry of ``architectures``.

    Raises:
        CheckpointError: There is none, or more than one.
    """
    names = config.get("architectures")
    if not isinstance(names, (list, tuple)) or len(names) != 1 or not isinstance(names[0], str):
        raise CheckpointError(f"config.json: architectures must be a list of one class name, got {names!r}")
    return names[0]


def _num_heads(keys: Mapping[str, Any]) -> int:
    for key in ("num_nextn_predict_layers", "num_mtp_layers"):
        if keys.get(key):
            return _size(keys, key)
    return 0


def _decided(always: bool | None, keys: Mapping[str, Any], key: str) -> bool:
    return bool(keys.get(key, False)) if always is None else always


def _experts(family: Family, keys: Mapping[str, Any], num_layers: int) -> tuple[MoEConfig | None, tuple[bool, ...]]:
    if family.experts is None:
        return None, ()
    sparse = tuple(family.experts.is_sparse(keys, layer) for layer in range(num_layers))
    return (family.experts.read(keys), sparse) if any(sparse) else (None, ())


def _refuse_out_of_scope(family: Family, config: Mapping[str, Any]) -> None:
    for key, feature in _OUT_OF_SCOPE.items():
        if config.get(key) and not (feature == _EXPERTS and family.experts is not None):
            raise CheckpointError(f"config.json: {key} asks for {feature}, which this architecture does not load here")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"config.json: hidden_act must be 'silu', got {activation!r}")


def _windows(family: Family, config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    is_off = family.windows != "number" and not config.get("use_sliding_window", False)
    layer_types = config.get("layer_types") if family.windows in ("late", "alternate") else None
    if layer_types is not None:
        _check_layer_types(layer_types, num_layers)
    if family.windows == "none" or is_off:
        return (None,) * num_layers
    # Here null means "no window", so a key that is present is not replaced by the default.
    window = config.get("sliding_window", family.defaults.get("sliding_window", 4096))
    if window is not None:
        window = _size({"sliding_window": window}, "sliding_window")
    if layer_types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    border = config.get("max_window_layers", 28)
    has_window: dict[str, Callable[[int], bool]] = {
        "number": lambda layer: True,
        "every": lambda layer: True,
        "late": lambda layer: layer >= border,
        "alternate": lambda layer: layer < border and layer % 2 == 0,
    }
    return tuple(window if has_window[family.windows](layer) else None for layer in range(num_layers))


def _check_layer_types(layer_types: Any, num_layers: int) -> None:
    known = ("full_attention", "sliding_attention")
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise CheckpointError(f"config.json: layer_types must list {num_layers} layers, got {layer_types!r}")
    for kind in layer_types:
        if kind not in known:
            raise CheckpointError(f"config.json: layer_types may hold {' and '.join(known)}, got {kind!r}")
