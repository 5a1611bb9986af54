"""Which layers of a decoder have experts, and which, read out of a ``config.json`` of each family with experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import CheckpointError
from engine.models.moe import MoEConfig, MoENames, Routing

_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What the number of experts is called; transformers 4 and 5 differ within a family."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFamily:
    """How one architecture writes its experts down."""

    read: Callable[[Mapping[str, Any]], MoEConfig]
    """From the keys of a config, defaults filled in."""
    is_sparse: Callable[[Mapping[str, Any], int], bool]
    """Whether a layer, by number, has experts instead of one feed-forward."""
    prefix: str = ".mlp"
    """Between a layer's prefix and the names."""
    names: MoENames = field(default_factory=MoENames)


def size(keys: Mapping[str, Any], name: str) -> int:
    """A positive whole number; CheckpointError names the key otherwise."""
    value = keys.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {name} must be a positive whole number, got {value!r}")
    return value


def _num_experts(keys: Mapping[str, Any]) -> int:
    found = [name for name in _COUNT_KEYS if name in keys]
    if not found:
        raise CheckpointError(f"config.json: one of {', '.join(_COUNT_KEYS)} must say how many experts there are")
    return size(keys, found[0])


def _mixtral(keys: Mapping[str, Any]) -> MoEConfig:
    return MoEConfig(
        hidden_size=size(keys, "hidden_size"),
        num_experts=_num_experts(keys),
        top_k=size(keys, "num_experts_per_tok"),
        expert_size=size(keys, "intermediate_size"),
        renormalise=True,
    )


def _qwen(keys: Mapping[str, Any]) -> MoEConfig:
    shared = keys.get("shared_expert_intermediate_size")
    return MoEConfig(
        hidden_size=size(keys, "hidden_size"),
        num_experts=_num_experts(keys),
        top_k=size(keys, "num_experts_per_tok"),
        expert_size=size(keys, "moe_intermediate_size"),
        renormalise=bool(keys.get("norm_topk_prob", False)),
        shared_size=0 if shared is None else size(keys, "shared_expert_intermediate_size"),
        is_shared_gated=shared is not None,
    )


def _qwen_is_sparse(keys: Mapping[str, Any], layer: int) -> bool:
    return layer not in keys.get("mlp_only_layers", ()) and (layer + 1) % keys.get("decoder_sparse_step", 1) == 0


def _glm4(keys: Mapping[str, Any]) -> MoEConfig:
    expert_size = size(keys, "moe_intermediate_size")
    return MoEConfig(
        hidden_size=size(keys, "hidden_size"),
        num_experts=_num_experts(keys),
        top_k=size(keys, "num_experts_per_tok"),
        expert_size=expert_size,
        routing=Routing.SIGMOID,
        renormalise=bool(keys.get("norm_topk_prob", True)),
        num_groups=size(keys, "n_group"),
        top_groups=size(keys, "topk_group"),
        scaling=float(keys.get("routed_scaling_factor", 1.0)),
        shared_size=expert_size * size(keys, "n_shared_experts"),
    )


MIXTRAL = ExpertFamily(
    read=_mixtral,
    is_sparse=lambda keys, layer: True,
    prefix="",  # the names begin in two ways
    names=MoENames(
        router="block_sparse_moe.gate.weight",
        router_too="mlp.gate.weight",
        up=("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
        down="block_sparse_moe.experts.{}.w2.weight",
        whole_up="mlp.experts.gate_up_proj",
        whole_down="mlp.experts.down_proj",
    ),
)
QWEN = ExpertFamily(read=_qwen, is_sparse=_qwen_is_sparse)
GLM4 = ExpertFamily(
    read=_glm4,
    is_sparse=lambda keys, layer: layer >= keys.get("first_k_dense_replace", 1),
    names=MoENames(
        shared_up=("shared_experts.gate_proj", "shared_experts.up_proj"), shared_down="shared_experts.down_proj"
    ),
)
