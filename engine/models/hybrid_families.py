"""How each family with Mamba2 layers writes its ``config.json``, in the keys of transformers 4 and 5.

Released files differ in what they leave out, so every default here is the one of the family's configuration class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import CheckpointError
from engine.models.config_keys import Keys
from engine.models.decoder_config import architecture_of
from engine.models.hybrid_config import AttentionConfig, HybridConfig, LayerKind, LayerSpec, MLPConfig
from engine.models.mamba2 import MixerConfig
from engine.models.moe import MoEConfig, MoENames, Routing
from engine.models.rope import RopeConfig, rope_from_checkpoint

_UNBOUNDED_POSITION = 131072
"""Longest sequence of a model without attention, whose checkpoint names none: its state has one size for all."""


def read_hybrid(config: Mapping[str, Any]) -> HybridConfig:
    """Read a parsed ``config.json``.

    Raises:
        CheckpointError: A size is missing, or the file asks for something these models do not compute.
    """
    architecture = architecture_of(config)
    read = FAMILIES.get(architecture)
    if read is None:
        raise CheckpointError(f"config.json: {architecture} is not one of {', '.join(FAMILIES)}")
    if config.get("quantization_config"):
        raise CheckpointError("config.json: quantization_config asks for quantised weights, which are not supported")
    given = {key: value for key, value in config.items() if value is not None}
    if config.get("num_key_value_heads", 0) is None and "num_attention_heads" in given:
        given["num_key_value_heads"] = given["num_attention_heads"]  # null is not the default here
    return read(Keys(given))


def _attention(
    keys: Keys,
    *,
    rope: RopeConfig | None,
    bias: bool,
    scale: float | None = None,
    default_head_dim: int | None = None,
    default_kv_heads: int | None = None,
) -> AttentionConfig:
    heads = keys.size("num_attention_heads", default=32)
    usual = default_head_dim or max(1, keys.size("hidden_size") // heads)
    head_dim = keys.size("head_dim", "attention_head_dim", default=usual)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=keys.size("num_key_value_heads", default=default_kv_heads or heads),
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else scale,
        rope=rope,
        bias=bias,
    )


def _mamba2(keys: Keys) -> HybridConfig:
    """One Mamba2 mixer a layer and nothing else."""
    keys.need("hidden_act", ("silu", "swish"))
    hidden, heads, head_dim = keys.size("hidden_size"), keys.size("num_heads"), keys.size("head_dim", default=64)
    inner = int(keys.number("expand", 2) * hidden)
    if inner != heads * head_dim:
        raise CheckpointError(f"config.json: expand * hidden_size ({inner}) must be num_heads * head_dim")
    eps = keys.number("layer_norm_epsilon", 1e-5)
    return HybridConfig(
        architecture=keys.architecture(),
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden,
        layers=_one_mixer_layers([LayerKind.MAMBA] * keys.size("num_hidden_layers")),
        norm_eps=eps,
        max_position=keys.size("max_position_embeddings", default=_UNBOUNDED_POSITION),
        embedding_name="backbone.embeddings.weight",
        final_norm_name="backbone.norm_f.weight",
        mamba=MixerConfig(
            hidden_size=hidden,
            num_heads=heads,
            head_dim=head_dim,
            num_groups=keys.size("n_groups", default=8),
            state_size=keys.size("state_size", default=128),
            conv_width=keys.size("conv_kernel", default=4),
            conv_bias=keys.is_on("use_conv_bias", default=True),
            proj_bias=keys.is_on("use_bias"),
            norm_eps=eps,
            dt_limits=keys.limits(),
        ),
        tie_word_embeddings=keys.is_on("tie_word_embeddings"),
    )


def _one_mixer_layers(kinds: list[LayerKind]) -> tuple[LayerSpec, ...]:
    """Layers of one mixer, as the ``backbone`` checkpoints name them."""
    prefixes = [f"backbone.layers.{number}" for number in range(len(kinds))]
    return tuple(
        LayerSpec(kind=kind, norm=f"{prefix}.norm.weight", mixer=f"{prefix}.mixer")
        for kind, prefix in zip(kinds, prefixes, strict=True)
    )


_PATTERN = {"M": LayerKind.MAMBA, "*": LayerKind.ATTENTION, "-": LayerKind.MLP, "E": LayerKind.MOE}
_OLD_NAMES = {"mamba": LayerKind.MAMBA, "attention": LayerKind.ATTENTION}
"""What transformers before 5.20 or so called two kinds of layers."""
_USUAL_HEAD = [LayerKind.ATTENTION, LayerKind.MOE]
"""Layers of a draft head of Nemotron-H whose file says nothing."""


def _layer_kinds(names: list[str]) -> list[LayerKind]:
    known = {kind.value: kind for kind in LayerKind} | _OLD_NAMES
    wrong = [name for name in names if name not in known]
    if wrong:
        raise CheckpointError(f"config.json: a layer may be {', '.join(known)}; got {wrong[0]!r}")
    return [known[name] for name in names]


def _nemotron_kinds(keys: Keys) -> list[LayerKind]:
    pattern = keys.get("layers_block_type", "layer_types", "hybrid_override_pattern")
    if isinstance(pattern, list):
        kinds = _layer_kinds(pattern)
    elif isinstance(pattern, str) and pattern and set(pattern) <= set(_PATTERN):
        kinds = [_PATTERN[letter] for letter in pattern]
    else:
        raise CheckpointError(
            f"config.json: hybrid_override_pattern must be made of {' '.join(_PATTERN)}, got {pattern!r}"
        )
    if keys.size("num_hidden_layers", default=len(kinds)) != len(kinds):
        raise CheckpointError(f"config.json: num_hidden_layers must be the pattern's {len(kinds)}")
    return kinds


def _nemotron_heads(keys: Keys) -> tuple[tuple[LayerSpec, ...], ...]:
    """MTP heads: each a pattern of layers, those of all heads numbered through."""
    count = keys.size("num_nextn_predict_layers") if keys.get("num_nextn_predict_layers") else 0
    kinds = _nemotron_head_kinds(keys)
    layers = [
        LayerSpec(kind=kind, norm=f"mtp.layers.{i}.norm.weight", mixer=f"mtp.layers.{i}.mixer")
        for i, kind in enumerate(kinds * count)
    ]
    return tuple(tuple(layers[i : i + len(kinds)]) for i in range(0, len(layers), len(kinds)))


def _nemotron_head_kinds(keys: Keys) -> list[LayerKind]:
    """The list of transformers 5, which writes it into every file: one that is the default gives way to a pattern."""
    names, pattern = keys.get("mtp_layers_block_type"), keys.get("mtp_hybrid_override_pattern")
    if isinstance(names, list) and names:
        kinds = _layer_kinds(names)
        if pattern is None or kinds != _USUAL_HEAD:
            return kinds
    if pattern is None:
        return _USUAL_HEAD
    if not isinstance(pattern, str) or not pattern or not set(pattern) <= set(_PATTERN):
        raise CheckpointError(
            f"config.json: mtp_hybrid_override_pattern must be made of {' '.join(_PATTERN)}, got {pattern!r}"
        )
    return [_PATTERN[letter] for letter in pattern]


def _nemotron_h(keys: Keys) -> HybridConfig:
    """One mixer a layer by a pattern; attention without positions, feed-forwards without gates."""
    keys.need("mlp_hidden_act", ("relu2",))
    keys.need("mamba_hidden_act", ("silu", "swish"))
    kinds, hidden = _nemotron_kinds(keys), keys.size("hidden_size")
    eps, mlp_bias = keys.number("layer_norm_epsilon", 1e-5), keys.is_on("mlp_bias")
    heads = _nemotron_heads(keys)
    has = {*kinds, *(layer.kind for head in heads for layer in head)}
    return HybridConfig(
        architecture=keys.architecture(),
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden,
        layers=_one_mixer_layers(kinds),
        draft_heads=heads,
        norm_eps=eps,
        max_position=keys.size("max_position_embeddings", default=4096),
        embedding_name="backbone.embeddings.weight",
        final_norm_name="backbone.norm_f.weight",
        mamba=MixerConfig(
            hidden_size=hidden,
            num_heads=keys.size("mamba_num_heads"),
            head_dim=keys.size("mamba_head_dim"),
            num_groups=keys.size("n_groups", "mamba_n_groups", default=8),
            state_size=keys.size("ssm_state_size"),
            conv_width=keys.size("conv_kernel", "mamba_d_conv", default=4),
            conv_bias=keys.is_on("use_conv_bias", "mamba_conv_bias", default=True),
            proj_bias=keys.is_on("use_bias"),
            norm_eps=eps,
            dt_limits=keys.limits(),
        ),
        attention=_attention(keys, rope=None, bias=False, default_head_dim=128, default_kv_heads=8)
        if LayerKind.ATTENTION in has
        else None,
        mlp=MLPConfig(
            size=keys.size("intermediate_size"), activation="relu2", up=("up_proj",), down="down_proj", bias=mlp_bias
        )
        if LayerKind.MLP in has
        else None,
        moe=_nemotron_moe(keys, hidden, mlp_bias) if LayerKind.MOE in has else None,
        moe_names=MoENames(
            up=("experts.{}.up_proj.weight",),
            shared_up=("shared_experts.up_proj",),
            shared_down="shared_experts.down_proj",
            whole_up="experts.up_proj",
        ),
        tie_word_embeddings=False,  # transformers ties nothing in this family, whatever the key says
    )


def _nemotron_moe(keys: Keys, hidden: int, bias: bool) -> MoEConfig:
    return MoEConfig(
        hidden_size=hidden,
        num_experts=keys.size("n_routed_experts", "num_local_experts"),
        top_k=keys.size("num_experts_per_tok", default=2),
        expert_size=keys.size("moe_intermediate_size"),
        activation="relu2",
        routing=Routing.SIGMOID,
        renormalise=keys.is_on("norm_topk_prob", default=True),
        num_groups=keys.size("n_group", default=1),
        top_groups=keys.size("topk_group", default=1),
        scaling=keys.number("routed_scaling_factor", 1.0),
        shared_size=keys.size("moe_shared_expert_intermediate_size"),
        latent_size=keys.size("moe_latent_size") if keys.get("moe_latent_size") is not None else None,
        has_bias=bias,
    )


def _two_branch_mixer(keys: Keys, eps: float) -> MixerConfig:
    """Of Bamba and Granite, which share their keys."""
    hidden, heads = keys.size("hidden_size"), keys.size("mamba_n_heads", default=128)
    inner = int(keys.number("mamba_expand", 2) * hidden)
    given = keys.get("mamba_d_head", default="auto")
    head_dim = inner // heads if given == "auto" else keys.size("mamba_d_head")
    if head_dim * heads != inner:
        raise CheckpointError(f"config.json: mamba_n_heads * mamba_d_head must be mamba_expand * hidden_size, {inner}")
    return MixerConfig(
        hidden_size=hidden,
        num_heads=heads,
        head_dim=head_dim,
        num_groups=keys.size("mamba_n_groups", default=1),
        state_size=keys.size("mamba_d_state", default=256),
        conv_width=keys.size("mamba_d_conv", default=4),
        conv_bias=keys.is_on("mamba_conv_bias", default=True),
        proj_bias=keys.is_on("mamba_proj_bias"),
        norm_eps=eps,
        dt_limits=keys.limits(),
    )


def _two_branch_layers(
    kinds: list[LayerKind], second: LayerKind, second_norm: str, second_mixer: str
) -> tuple[LayerSpec, ...]:
    """Layers of a mixer and a feed-forward, each with its norm."""
    mixers = {LayerKind.MAMBA: "mamba", LayerKind.ATTENTION: "self_attn"}
    found = []
    for number, kind in enumerate(kinds):
        if kind not in mixers:
            raise CheckpointError(f"config.json: a layer's mixer cannot be {kind.value!r} in this architecture")
        prefix = f"model.layers.{number}"
        found.append(LayerSpec(kind=kind, norm=f"{prefix}.input_layernorm.weight", mixer=f"{prefix}.{mixers[kind]}"))
        found.append(LayerSpec(kind=second, norm=f"{prefix}.{second_norm}.weight", mixer=f"{prefix}{second_mixer}"))
    return tuple(found)


def _bamba(keys: Keys) -> HybridConfig:
    """Mamba2 or attention, then SwiGLU; half of each attention head turns with its position."""
    keys.need("hidden_act", ("silu", "swish"))
    eps, layers = keys.number("rms_norm_eps", 1e-5), keys.size("num_hidden_layers")
    max_position = keys.size("max_position_embeddings", default=262144)
    attending = set(keys.get("attn_layer_indices", default=()))
    if not attending <= set(range(layers)):
        raise CheckpointError(f"config.json: attn_layer_indices must be below {layers}, got {sorted(attending)}")
    kinds = [LayerKind.ATTENTION if number in attending else LayerKind.MAMBA for number in range(layers)]
    # A factor outside of the RoPE keys is not read: the released code has it fixed, and transformers 5 puts it there.
    rope_keys = {key: value for key, value in keys.values.items() if key != "partial_rotary_factor"}
    rope = rope_from_checkpoint(rope_keys, max_position, default_partial=0.5)
    return HybridConfig(
        architecture=keys.architecture(),
        vocab_size=keys.size("vocab_size"),
        hidden_size=keys.size("hidden_size"),
        layers=_two_branch_layers(kinds, LayerKind.MLP, "pre_ff_layernorm", ".feed_forward"),
        norm_eps=eps,
        max_position=max(max_position, int(rope.original_max_position * rope.length_factor)),
        embedding_name="model.embed_tokens.weight",
        final_norm_name="model.final_layernorm.weight",
        mamba=_two_branch_mixer(keys, eps),
        attention=_attention(keys, rope=rope, bias=keys.is_on("attention_bias"), default_kv_heads=8)
        if attending
        else None,
        mlp=MLPConfig(
            size=keys.size("intermediate_size"),
            activation="swiglu",
            up=("gate_proj", "up_proj"),
            down="down_proj",
            bias=keys.is_on("mlp_bias"),
        ),
        tie_word_embeddings=keys.is_on("tie_word_embeddings"),
    )


def _granite(keys: Keys) -> HybridConfig:
    """Mamba2 or attention, then experts beside a shared feed-forward, or that alone; multipliers everywhere."""
    keys.need("hidden_act", ("silu", "swish"))
    eps, hidden, layers = keys.number("rms_norm_eps", 1e-6), keys.size("hidden_size"), keys.size("num_hidden_layers")
    names = keys.get("layer_types", "layers_block_type", default=["linear_attention"] * layers)
    kinds = _layer_kinds(names)
    if len(kinds) != layers:
        raise CheckpointError(f"config.json: layer_types must list {layers} layers, got {len(kinds)}")
    max_position = keys.size("max_position_embeddings", default=2048)
    keys.need("position_embedding_type", ("nope", "rope"))
    turns = keys.get("position_embedding_type") == "rope"
    rope = rope_from_checkpoint(keys.values, max_position) if turns else None
    has_experts = keys.get("num_local_experts", default=8) > 0
    shared = keys.size("shared_intermediate_size", default=1024)
    second = (LayerKind.MOE, "") if has_experts else (LayerKind.MLP, ".shared_mlp")
    attention = _attention(
        keys, scale=keys.number("attention_multiplier", 1.0), rope=rope, bias=keys.is_on("attention_bias")
    )
    return HybridConfig(
        architecture=keys.architecture(),
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden,
        layers=_two_branch_layers(kinds, second[0], "post_attention_layernorm", second[1]),
        norm_eps=eps,
        max_position=max_position,
        embedding_name="model.embed_tokens.weight",
        final_norm_name="model.norm.weight",
        mamba=_two_branch_mixer(keys, eps),
        attention=attention if LayerKind.ATTENTION in kinds else None,
        mlp=None
        if has_experts
        else MLPConfig(size=shared, activation="swiglu", up=("input_linear",), down="output_linear"),
        moe=_granite_moe(keys, hidden, shared) if has_experts else None,
        moe_names=MoENames(
            router="block_sparse_moe.router.layer.weight",
            up=("block_sparse_moe.input_linear.weight",),
            down="block_sparse_moe.output_linear.weight",
            shared_up=("shared_mlp.input_linear",),
            shared_down="shared_mlp.output_linear",
            whole_up=None,
            whole_down=None,
        ),
        tie_word_embeddings=keys.is_on("tie_word_embeddings"),
        embedding_multiplier=keys.number("embedding_multiplier", 1.0),
        residual_multiplier=keys.number("residual_multiplier", 1.0),
        logits_divisor=keys.number("logits_scaling", 1.0),
    )


def _granite_moe(keys: Keys, hidden: int, shared: int) -> MoEConfig:
    return MoEConfig(
        hidden_size=hidden,
        num_experts=keys.size("num_local_experts", default=8),
        top_k=keys.size("num_experts_per_tok", default=2),
        expert_size=keys.size("intermediate_size"),
        routing=Routing.TOPK_SOFTMAX,
        shared_size=shared,
    )


FAMILIES: dict[str, Callable[[Keys], HybridConfig]] = {
    "Mamba2ForCausalLM": _mamba2,
    "BambaForCausalLM": _bamba,
    "NemotronHForCausalLM": _nemotron_h,
    "GraniteMoeHybridForCausalLM": _granite,
}
"""How each architecture's keys are read."""
