"""What is read out of configurations with Mamba2 layers, and what is refused with the key's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.attention import TorchAttention
from engine.errors import CheckpointError
from engine.models.base import PagedState, SlotState
from engine.models.hybrid import HybridModel
from engine.models.hybrid_config import LayerKind, LayerSpec
from engine.models.hybrid_families import read_hybrid
from engine.models.shapes import shape_config

MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "num_heads": 4,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "n_groups": 2,
}
BAMBA = {
    "architectures": ["BambaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 4,
    "attn_layer_indices": [1],
}
GRANITE = {
    **BAMBA,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "layer_types": ["mamba", "attention", "mamba"],
    "attention_multiplier": 0.25,
}
NEMOTRON = shape_config("tiny-hybrid")


def build(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> HybridModel:
    placement: dict[str, Any] = {"dtype": dtype, "device": torch.device("cpu")}
    return HybridModel.from_checkpoint_config(config, attention=TorchAttention(), **placement)


def kinds(config: dict[str, Any]) -> str:
    return letters(read_hybrid(config).layers)


def letters(layers: Sequence[LayerSpec]) -> str:
    named = {LayerKind.MAMBA: "M", LayerKind.ATTENTION: "*", LayerKind.MLP: "-", LayerKind.MOE: "E"}
    return "".join(named[layer.kind] for layer in layers)


def test_a_pattern_may_be_a_string_or_a_list_in_old_and_new_words() -> None:
    bare = {key: value for key, value in NEMOTRON.items() if key != "hybrid_override_pattern"}

    assert kinds(NEMOTRON) == "M*-ME"
    assert kinds({**bare, "layers_block_type": ["mamba", "attention", "mlp", "mamba", "moe"]}) == "M*-ME"
    new_words = ["linear_attention", "full_attention", "mlp", "linear_attention", "moe"]
    assert kinds({**bare, "layers_block_type": new_words, "num_hidden_layers": None}) == "M*-ME"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({}, "*E"),
        ({"mtp_hybrid_override_pattern": "*-"}, "*-"),
        ({"mtp_layers_block_type": ["full_attention", "mlp"]}, "*-"),
        ({"mtp_layers_block_type": ["attention", "mlp"]}, "*-"),
        ({"mtp_layers_block_type": ["full_attention", "moe"], "mtp_hybrid_override_pattern": "*-"}, "*-"),
        ({"mtp_layers_block_type": ["mlp", "full_attention"], "mtp_hybrid_override_pattern": "*-"}, "-*"),
    ],
    ids=str,
)
def test_layers_of_draft_heads_are_told_in_old_and_new_words(told: dict[str, Any], expected: str) -> None:
    """transformers 5 writes its list into every file, also where a pattern says otherwise."""
    bare = {key: value for key, value in NEMOTRON.items() if not key.startswith("mtp_")}

    heads = read_hybrid({**bare, **told}).draft_heads

    assert [letters(head) for head in heads] == [expected] * 2
    assert [layer.norm for head in heads for layer in head] == [f"mtp.layers.{i}.norm.weight" for i in range(4)]


def test_layers_of_two_branches_come_out_one_after_the_other() -> None:
    assert kinds(BAMBA) == "M-*-M-"
    assert kinds(GRANITE) == "ME*EME"
    assert kinds({**GRANITE, "num_local_experts": 0}) == "M-*-M-"


def test_old_names_of_keys_are_read() -> None:
    old = {key: value for key, value in NEMOTRON.items() if key not in ("n_groups", "conv_kernel", "head_dim")}
    config = read_hybrid(
        {
            **old,
            "mamba_n_groups": 4,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_dt_limit": [0.1, 2],
            "attention_head_dim": 24,
        }
    )

    mamba = config.mamba
    assert (mamba.num_groups, mamba.conv_width, mamba.conv_bias, mamba.dt_limits) == (4, 3, False, (0.1, 2.0))
    assert config.attention is not None
    assert config.attention.head_dim == 24


def test_a_key_that_is_null_is_absent() -> None:
    assert read_hybrid({**BAMBA, "attn_layer_indices": None, "time_step_limit": None}).attention is None
    assert read_hybrid({**NEMOTRON, "moe_latent_size": None}).moe.latent_size is None  # type: ignore[union-attr]


def test_half_of_bambas_heads_turn_whatever_the_file_says_beside_its_rope_keys() -> None:
    for factor in (1.0, 0.25, None):
        config = read_hybrid({**BAMBA, "partial_rotary_factor": factor, "rope_theta": 5000.0})
        assert config.attention is not None
        assert config.attention.rope is not None
        assert (config.attention.rope.partial_factor, config.attention.rope.theta) == (0.5, 5000.0)


def test_a_factor_among_bambas_rope_keys_is_read_as_transformers_reads_it() -> None:
    for key in ("rope_parameters", "rope_scaling"):
        rope = {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.25}
        config = read_hybrid({**BAMBA, key: rope})
        assert config.attention is not None
        assert config.attention.rope is not None
        assert config.attention.rope.partial_factor == 0.25


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (MAMBA2, {"num_heads": 5}, "expand"),
        (MAMBA2, {"n_groups": 3}, "groups"),
        (MAMBA2, {"hidden_act": "gelu"}, "hidden_act"),
        (MAMBA2, {"time_step_limit": [2.0, 1.0]}, "time_step_limit"),
        (MAMBA2, {"time_step_limit": ["a", "b"]}, "time_step_limit"),
        (MAMBA2, {"conv_kernel": 1}, "convolution"),
        (MAMBA2, {"vocab_size": None}, "vocab_size"),
        (MAMBA2, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (NEMOTRON, {"hybrid_override_pattern": "MX*"}, "hybrid_override_pattern"),
        (NEMOTRON, {"hybrid_override_pattern": None}, "hybrid_override_pattern"),
        (NEMOTRON, {"num_hidden_layers": 7}, "num_hidden_layers"),
        (NEMOTRON, {"mtp_hybrid_override_pattern": "*X"}, "mtp_hybrid_override_pattern"),
        (NEMOTRON, {"mtp_layers_block_type": ["full_attention", "sliding"]}, "sliding"),
        (NEMOTRON, {"mtp_hybrid_override_pattern": "*M"}, "a draft head must have one attention layer"),
        (NEMOTRON, {"mtp_hybrid_override_pattern": "-E"}, "a draft head must have one attention layer"),
        (NEMOTRON, {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        (NEMOTRON, {"num_key_value_heads": 3}, "num_key_value_heads"),
        (BAMBA, {"attn_layer_indices": [3]}, "attn_layer_indices"),
        (BAMBA, {"mamba_d_head": 7}, "mamba_d_head"),
        (GRANITE, {"layer_types": ["mamba"]}, "layer_types"),
        (GRANITE, {"layer_types": ["mamba", "moe", "mamba"]}, "moe"),
        (GRANITE, {"layer_types": ["mamba", "sliding", "mamba"]}, "sliding"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_hybrid({**base, **changes})


def test_states_and_what_exponentials_are_taken_of_are_never_rounded_to_half() -> None:
    model = build(NEMOTRON)

    slots = [state for state in model.cache_layout() if isinstance(state, SlotState)]
    assert [state.dtypes for state in slots] == [(torch.bfloat16, torch.float32)] * 2
    exact = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    ends = {name.rsplit(".", 1)[1] for name in exact if "router" not in name}
    assert ends == {"a_log", "d", "dt_bias"}


def test_the_cache_layout_follows_the_layers() -> None:
    layout = build(NEMOTRON).cache_layout()

    assert [type(state) for state in layout] == [SlotState, PagedState, SlotState]
    assert layout[0].shapes == ((8 * 16 + 2 * 2 * 16, 3), (8, 16, 16))
    assert build(MAMBA2).cache_layout() == [build(MAMBA2).config.mamba.slot_state(torch.bfloat16)] * 2


def test_another_models_configuration_is_refused_and_another_way_to_write_it_down_is_not() -> None:
    model = build(BAMBA)

    model.check_config({**BAMBA, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    model.check_config({**BAMBA, "max_position_embeddings": 99})
    for changes in ({"rope_theta": 5000.0}, {"attn_layer_indices": [2]}, {"mamba_d_conv": 3}, {"rms_norm_eps": 1e-3}):
        with pytest.raises(CheckpointError, match="must be the model's"):
            model.check_config({**BAMBA, **changes})


def test_the_shape_of_nemotron_h_4b_has_its_layers() -> None:
    pattern = kinds(shape_config("nemotron-h-4b"))

    assert (pattern.count("M"), pattern.count("-"), pattern.count("*"), len(pattern)) == (24, 24, 4, 52)
    assert len(kinds(shape_config("hybrid-2b"))) == 56
