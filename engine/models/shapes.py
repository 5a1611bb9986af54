"""Named model sizes with random weights, for performance work: ``shape:NAME``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from engine.errors import CheckpointError
from engine.models.moe import Experts

_SEED = 20240229
"""One seed for all shapes: a shape's weights are the same in every run on the same kind of device."""

_QWEN3_VOCAB = 151936


def _config(architecture: str, *, heads: tuple[int, int], **keys: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        **keys,
    }


def _nemotron_h(pattern: str, **keys: Any) -> dict[str, Any]:
    """M Mamba2, * attention, - feed-forward, E experts; where ``keys`` says nothing, released models' sizes."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "conv_kernel": 4,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
        **keys,
    }


_DRAFTS: dict[str, Any] = {"num_nextn_predict_layers": 2, "mtp_hybrid_override_pattern": "*-"}
"""Two MTP heads, an attention layer and a feed-forward each, which cost nothing unless ``speculative_tokens`` asks for
them; the released Nemotron-H of these sizes have none."""

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _config(
        "LlamaForCausalLM",
        heads=(4, 2),
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        max_position_embeddings=4096,
    ),
    "qwen3-0.6b": _config(
        "Qwen3ForCausalLM",
        heads=(16, 8),
        vocab_size=_QWEN3_VOCAB,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": _config(
        "Qwen3ForCausalLM",
        heads=(32, 8),
        vocab_size=_QWEN3_VOCAB,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        head_dim=128,
        max_position_embeddings=40960,
    ),
    "llama-3.2-1b": _config(
        "LlamaForCausalLM",
        heads=(32, 8),
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        rope_theta=500_000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "583m": _config(
        "LlamaForCausalLM",
        heads=(16, 16),
        vocab_size=50304,
        hidden_size=1152,
        intermediate_size=4096,
        num_hidden_layers=24,
        max_position_embeddings=4096,
    ),
    "tiny-moe": _config(
        "Qwen3MoeForCausalLM",
        heads=(4, 2),
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        head_dim=16,
        max_position_embeddings=4096,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
    ),
    "qwen3-30b-a3b": _config(
        "Qwen3MoeForCausalLM",
        heads=(32, 4),
        vocab_size=_QWEN3_VOCAB,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        head_dim=128,
        max_position_embeddings=40960,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
    ),
    "mimo-7b": _config(
        "MiMoForCausalLM",
        heads=(32, 8),
        vocab_size=151680,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=36,
        head_dim=128,
        max_position_embeddings=32768,
        attention_bias=True,
        rms_norm_eps=1e-5,
        rope_theta=640_000.0,
        num_nextn_predict_layers=1,
    ),
    "nemotron-h-4b": _nemotron_h(
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        vocab_size=131072,
        hidden_size=3072,
        intermediate_size=12288,
        mamba_num_heads=112,
        num_attention_heads=32,
        **_DRAFTS,
    ),
    "hybrid-2b": _nemotron_h(
        "M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-M-M-M*-M-",
        vocab_size=131072,
        hidden_size=2048,
        intermediate_size=8192,
        mamba_num_heads=64,
        num_attention_heads=16,
        **_DRAFTS,
    ),
    "tiny-hybrid": _nemotron_h(
        "M*-ME",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=96,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        moe_shared_expert_intermediate_size=48,
        **_DRAFTS,
    ),
}
"""Configurations in config.json's own keys."""


def shape_config(name: str) -> dict[str, Any]:
    """A fresh copy of the configuration called ``name``; CheckpointError naming the known ones otherwise."""
    if name not in SHAPES:
        raise CheckpointError(f"shape:{name} is not known; shapes are {', '.join(SHAPES)}")
    config = SHAPES[name]
    return {**config, **({"rope_scaling": dict(config["rope_scaling"])} if "rope_scaling" in config else {})}


@torch.no_grad()
def fill_randomly(model: nn.Module) -> None:
    """Seeded normal weights, made on the model's device.

    A matrix, and each of a stack of them, gets deviation 1 / sqrt(inputs), so that every branch keeps its input's size,
    the next token depends on the whole context, and logits have deviation about 1. Norm weights are 1, biases 0.
    Mamba2's A is -1 to -16 and its time steps 0.001 to 0.1, as where its training starts: some heads forget in a few
    tokens, some in thousands.
    """
    wholes = {
        id(parameter): (module.num_experts, module.part.start)
        for module in model.modules()
        if isinstance(module, Experts) and module.shard.size > 1
        for parameter in module.parameters()
    }
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in model.named_parameters():
        device = parameter.device
        generator = generators.setdefault(device, torch.Generator(device).manual_seed(_SEED))
        if parameter.dim() >= 2:
            whole = wholes.get(id(parameter))
            scale = parameter.shape[-1] ** -0.5
            if whole is None:
                parameter.normal_(0.0, scale, generator=generator)
            else:  # the same values on every rank as on one that holds all experts
                size, first = whole
                full = parameter.new_empty((size, *parameter.shape[1:])).normal_(0.0, scale, generator=generator)
                parameter.copy_(full[first : first + parameter.shape[0]])
        elif name.endswith("a_log"):
            parameter.uniform_(1.0, 16.0, generator=generator).log_()
        elif name.endswith("dt_bias"):  # softplus of it is the time step where the projection gives 0
            step = parameter.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp()
            parameter.copy_(step.expm1().log())
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
