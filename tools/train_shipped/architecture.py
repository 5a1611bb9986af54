"""Sizes of the shipped model, and the ``config.json`` that says them to transformers and to our engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tools.train_shipped.byte_tokens import PAD, SEPARATOR


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A Nemotron-H in small. One mixer a layer: M = Mamba2, * = attention, - = feed-forward, E = experts."""

    vocab_size: int = 264
    """256 bytes, the file separator, padding; filled up to a multiple of 8, which matrix units like."""
    hidden_size: int = 192
    pattern: str = "MEMM*EMM*E"
    """Of the main model."""
    num_draft_heads: int = 2
    draft_pattern: str = "*-"
    """Of each draft head; a dense feed-forward, since experts would cost a quarter of all parameters."""
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    mamba_heads: int = 8
    """With ``mamba_head_dim``, ``state_size`` and the groups: rows of in_proj are a multiple of 8."""
    mamba_head_dim: int = 32
    state_size: int = 64
    num_groups: int = 1
    conv_width: int = 4
    chunk_size: int = 64
    """Of the parallel scan; a matter of speed only."""
    num_experts: int = 8
    top_k: int = 2
    expert_size: int = 80
    shared_size: int = 96
    """Inner size of the expert that every token goes to; transformers always makes one."""
    mlp_size: int = 192
    """Inner size of ``-`` layers."""
    norm_eps: float = 1e-5
    max_position: int = 4096
    """The last part of the training runs at this length."""

    def __post_init__(self) -> None:
        for name, pattern in (("pattern", self.pattern), ("draft_pattern", self.draft_pattern)):
            if not pattern or set(pattern) - set("M*-E"):
                raise ValueError(f"{name} must be made of M * - E, got {pattern!r}")
        if self.mamba_heads % self.num_groups or self.num_heads % self.num_kv_heads:
            raise ValueError("groups must divide Mamba heads, and key/value heads must divide heads")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k must be 1 to {self.num_experts}, got {self.top_k}")

    @property
    def inner_size(self) -> int:
        """Channels of a Mamba2 layer's x and gate."""
        return self.mamba_heads * self.mamba_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: x, B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    def to_config(self) -> dict[str, Any]:
        """The parsed ``config.json``, in the Hub's style for Nemotron-H.

        transformers clamps time steps at ``time_step_min`` in whole prompts only, against the released code; so small a
        value switches that off, and one-token steps, whole prompts and the training compute the same.
        """
        return {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": len(self.pattern),
            "hybrid_override_pattern": self.pattern,
            "num_nextn_predict_layers": self.num_draft_heads,
            "mtp_hybrid_override_pattern": self.draft_pattern,
            "tie_word_embeddings": False,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mamba_num_heads": self.mamba_heads,
            "mamba_head_dim": self.mamba_head_dim,
            "mamba_hidden_act": "silu",
            "mamba_proj_bias": False,
            "mamba_ssm_cache_dtype": "float32",
            "ssm_state_size": self.state_size,
            "n_groups": self.num_groups,
            "conv_kernel": self.conv_width,
            "use_conv_bias": True,
            "use_bias": False,
            "chunk_size": self.chunk_size,
            "time_step_min": 1e-12,
            "time_step_max": 0.1,
            "time_step_floor": 1e-12,
            "n_routed_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.expert_size,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": self.shared_size,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "intermediate_size": self.mlp_size,
            "mlp_hidden_act": "relu2",
            "mlp_bias": False,
            "layer_norm_epsilon": self.norm_eps,
            "max_position_embeddings": self.max_position,
            "residual_in_fp32": False,
            "initializer_range": 0.02,
            "bos_token_id": SEPARATOR,
            "eos_token_id": SEPARATOR,
            "pad_token_id": PAD,
            "torch_dtype": "bfloat16",
        }
