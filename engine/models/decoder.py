"""The decoder of attention layers: Llama, Mistral, Qwen, Mixtral, GLM-4 and MiMo are this one module with switches.

Letters: T tokens of the batch, L logits rows, V vocabulary, E hidden size, H query heads, G key/value heads,
D head size, Y = H + 2 G heads of the fused projection.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from engine.attention.base import Attention, AttentionPlanner, HeadSizes, PlannerLimits
from engine.batch import ForwardBatch
from engine.device import Device
from engine.errors import CheckpointError
from engine.kernels import Kernels, make_kernels
from engine.models.base import LayerCache, PagedState
from engine.models.checkpoint import damaged
from engine.models.decoder_config import FAMILIES, DecoderConfig
from engine.models.moe import Fused, MoE, number_experts
from engine.models.mtp import DraftHead, heads_present, with_heads
from engine.models.parts import FeedForward, Linear, Placement, RMSNorm, empty, split_targets
from engine.models.rope import RopeConfig, inverse_frequencies
from engine.models.weights import WeightTargets, fill_weights


@dataclass(frozen=True, slots=True)
class Backends:
    """What a model computes with."""

    attention: Attention
    kernels: Kernels


class SelfAttention(nn.Module):
    """Projections, head norms and RoPE around the attention backend."""

    def __init__(self, config: DecoderConfig, layer: int, backends: Backends, **placement: Unpack[Placement]) -> None:
        super().__init__()
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, size
        self.window = config.windows[layer]
        self.attention, self.kernels = backends.attention, backends.kernels
        self.qkv = Linear(config.hidden_size, (heads + 2 * kv_heads) * size, bias=config.qkv_bias, **placement)
        self.out = Linear(heads * size, config.hidden_size, bias=config.o_bias, **placement)
        self.q_norm = RMSNorm(size, config.rms_norm_eps, **placement) if config.qk_norm else None
        self.k_norm = RMSNorm(size, config.rms_norm_eps, **placement) if config.qk_norm else None

    def forward(
        self, x_TE: Tensor, norm: RMSNorm, tables: tuple[Tensor, Tensor], batch: ForwardBatch, cache: LayerCache
    ) -> Tensor:
        """``x`` plus the attention over ``norm`` of x."""
        q_THD = self.remember(x_TE, norm, tables, batch, cache)
        out_THD = self.attention.attend(q_THD, cache, batch, scale=self.head_dim**-0.5, window=self.window)
        return self.kernels.linear_add(out_THD.flatten(1), self.out, x_TE)

    def remember(
        self, x_TE: Tensor, norm: RMSNorm, tables: tuple[Tensor, Tensor], batch: ForwardBatch, cache: LayerCache
    ) -> Tensor:
        """Write keys and values; gives the queries [T, H, D]."""
        qkv_TI = self.kernels.norm_linear(x_TE, norm, self.qkv.weight, self.qkv.bias)
        head_norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        return self.kernels.rotate_and_append(
            qkv_TI.unflatten(1, (-1, self.head_dim)), head_norms, tables, cache, batch.slots_T
        )

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Where each checkpoint tensor goes; q, k and v are row ranges of the fused projection."""
        rows = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        found = {
            **split_targets(self.qkv, rows, [f"{prefix}.{name}_proj" for name in "qkv"]),
            **split_targets(self.out, [self.out.weight.shape[0]], [f"{prefix}.o_proj"]),
        }
        if self.q_norm is not None and self.k_norm is not None:
            found[f"{prefix}.q_norm.weight"] = self.q_norm.weight.data
            found[f"{prefix}.k_norm.weight"] = self.k_norm.weight.data
        return found


class Layer(nn.Module):
    """Attention, then feed-forward or experts, each on a normed input and added to the stream."""

    def __init__(self, config: DecoderConfig, layer: int, backends: Backends, **placement: Unpack[Placement]) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(size, eps, **placement)
        self.attention = SelfAttention(config, layer, backends, **placement)
        self.mlp_norm = RMSNorm(size, eps, **placement)
        self.kernels = backends.kernels
        self.mlp: FeedForward | MoE
        self.mlp_prefix = ".mlp"
        if config.moe is not None and config.sparse[layer]:
            family = FAMILIES[config.architecture].experts
            assert family is not None, "an architecture whose config has experts names their tensors"
            self.mlp = MoE(config.moe, self.kernels, family.names, **placement)
            self.mlp_prefix = family.prefix
        else:
            inner = config.intermediate_size
            self.mlp = FeedForward(size, inner, self.kernels, bias=config.mlp_bias, **placement)

    def forward(self, x_TE: Tensor, tables: tuple[Tensor, Tensor], batch: ForwardBatch, cache: LayerCache) -> Tensor:
        x_TE = self.attention(x_TE, self.attention_norm, tables, batch, cache)
        if isinstance(self.mlp, MoE):
            normed_TE = self.kernels.rms_norm(x_TE, self.mlp_norm)
            added_TE = self.mlp(normed_TE, batch.is_real_T, batch.shape.expert_tokens, batch.routing)
            return x_TE + added_TE  # type: ignore[no-any-return]
        return self.mlp(x_TE, self.mlp_norm)  # type: ignore[no-any-return]

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Where each checkpoint tensor goes."""
        return {
            f"{prefix}.input_layernorm.weight": self.attention_norm.weight.data,
            **self.attention.targets(f"{prefix}.self_attn"),
            f"{prefix}.post_attention_layernorm.weight": self.mlp_norm.weight.data,
            **self.mlp.targets(prefix + self.mlp_prefix),
        }

    def fused(self, prefix: str) -> Fused:
        """What a checkpoint may hold in place of some of them."""
        return self.mlp.fused(prefix + self.mlp_prefix) if isinstance(self.mlp, MoE) else {}


class DecoderModel(nn.Module):
    """A decoder over a paged cache; see :class:`engine.models.base.Model`."""

    def __init__(self, config: DecoderConfig, *, attention: Attention, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.config = config
        self.vocab_size, self.max_position = config.vocab_size, config.max_position
        self.wants_real_tokens = config.moe is not None
        """Whether batches should say which tokens are padding: the counts of expert load leave it out."""
        self.embedding = empty(config.vocab_size, config.hidden_size, **placement)
        self.attention, self.kernels = attention, make_kernels(attention.name)
        backends = Backends(attention, self.kernels)
        self.layers = nn.ModuleList(Layer(config, layer, backends, **placement) for layer in range(config.num_layers))
        number_experts(self.layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **placement)
        self.heads = nn.ModuleList(self._make_head(backends, **placement) for _ in range(config.num_draft_heads))
        self.are_heads_optional = True
        """Until a checkpoint has been loaded: its file may lack the draft heads that its configuration tells of."""
        # None when tied: torch.jit refuses to trace a module that holds one parameter under two names.
        self.head = None if config.tie_word_embeddings else empty(config.vocab_size, config.hidden_size, **placement)
        self.dtype = placement["dtype"]
        # Angles need float32: bfloat16 cannot tell position 4096 from 4097.
        angle_dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
        frequencies = inverse_frequencies(config.rope, config.head_dim, angle_dtype, placement["device"])
        self.register_buffer("frequencies", frequencies, persistent=False)

    def _make_head(self, backends: Backends, **placement: Unpack[Placement]) -> DraftHead:
        config, names = self.config, FAMILIES[self.config.architecture].heads
        assert names is not None
        layer = Layer(config.of_draft_head(), 0, backends, **placement)
        return DraftHead(
            config.hidden_size,
            config.rms_norm_eps,
            [layer],
            is_hidden_first=names.is_hidden_first,
            kernels=self.kernels,
            **placement,
        )

    def _draft_heads(self) -> Sequence[DraftHead]:
        return cast(Sequence[DraftHead], self.heads)

    @classmethod
    def from_checkpoint_config(
        cls, config: Mapping[str, Any], *, attention: Attention, **placement: Unpack[Placement]
    ) -> DecoderModel:
        """Build with uninitialised weights from a parsed ``config.json``; CheckpointError if it cannot be."""
        with damaged("its configuration"):
            parsed = DecoderConfig.from_checkpoint(config)
        return cls(parsed, attention=attention, **placement)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a checkpoint's tensors in; CheckpointError names what is missing, unexpected or misshapen."""
        absent = fill_weights(self.weight_targets(), weights)
        groups = [frozenset(targets) for targets, _ in self._head_targets()]
        self.heads = self.heads[: heads_present(groups, absent)]
        self.are_heads_optional = False

    def weight_targets(self) -> WeightTargets:
        """Where each checkpoint tensor goes."""
        targets = {"model.embed_tokens.weight": self.embedding.data, "model.norm.weight": self.norm.weight.data}
        ignored = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq" + self._ignored_of_family()
        if self.head is None:
            ignored += r"|lm_head\.weight"  # some tied files hold a copy; the config decides
        else:
            targets["lm_head.weight"] = self.head.data
        fused: Fused = {}
        for number, layer in enumerate(self.layers):
            targets.update(layer.targets(f"model.layers.{number}"))  # type: ignore[operator]
            fused.update(layer.fused(f"model.layers.{number}"))  # type: ignore[operator]
        places = WeightTargets(targets, ignored, fused)
        return with_heads(places, self._head_targets(), are_optional=self.are_heads_optional)

    def _ignored_of_family(self) -> str:
        """What its checkpoints hold besides the model, as further branches of a regular expression."""
        family, found = FAMILIES[self.config.architecture], ""
        if family.ignored is not None:
            found += "|" + family.ignored
        if family.heads is not None and family.heads.rest is not None:
            own = "|".join(str(number) for number in range(self.config.num_layers))
            found += "|" + family.heads.rest.replace("{own}", own)
        return found

    def _head_targets(self) -> list[tuple[dict[str, Tensor], Fused]]:
        """Of each draft head, as :class:`WeightTargets` wants them."""
        names, found = FAMILIES[self.config.architecture].heads, []
        for number, head in enumerate(self._draft_heads()):
            assert names is not None
            behind = self.config.num_layers + number
            prefix = names.prefix.format(head=number, number=behind)
            layer = cast(Layer, head.layers[0])
            targets = {**head.targets(names, head=number, number=behind), **layer.targets(prefix)}
            found.append((targets, layer.fused(prefix)))
        return found

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that would compute otherwise than this model: CheckpointError names what differs.

        Numbers may differ by the rounding of another file format, and the limit on positions may be another.
        """
        with damaged("its configuration"):
            other = DecoderConfig.from_checkpoint(config)
        for one in fields(DecoderConfig):  # an architecture is what its switches say, and angles are compared below
            mine, theirs = getattr(self.config, one.name), getattr(other, one.name)
            if one.name in ("architecture", "max_position", "rope"):
                continue
            if not (math.isclose(mine, theirs, rel_tol=1e-6) if isinstance(mine, float) else mine == theirs):
                raise CheckpointError(f"{one.name} must be the model's, {mine!r}, got {theirs!r}")
        if not _turn_alike(self.config.rope, other.rope, self.config.head_dim):
            raise CheckpointError(f"rope must be the model's, {self.config.rope}, got {other.rope}")

    def cache_layout(self) -> Sequence[PagedState]:
        """Keys and values of every layer."""
        shape = (self.config.num_kv_heads, self.config.head_dim)
        return [PagedState(shapes=(shape, shape), dtypes=(self.dtype, self.dtype))] * self.config.num_layers

    def make_planner(self, device: Device, limits: PlannerLimits) -> AttentionPlanner | None:
        """See :class:`engine.models.base.PlansPrefill`; layers with a window are not planned."""
        if None not in self.config.windows:
            return None
        config = self.config
        sizes = HeadSizes(config.num_heads, config.num_kv_heads, config.head_dim, self.dtype)
        return self.attention.make_planner(device, limits, sizes)

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Logits, shape [L, V], in the model's dtype."""
        x_LE = batch.logits_rows(self._stream(batch, caches))
        return self.kernels.norm_linear(x_LE, self.norm, self._output_matrix())

    def _stream(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        """[T, E] what the last layer leaves, before the last norm."""
        x_TE, tables = self.kernels.embed(batch.token_ids_T, self.embedding), self._tables(batch)
        for layer, cache in zip(self.layers, caches, strict=True):
            x_TE = layer(x_TE, tables, batch, cache)
        return x_TE

    def _tables(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        frequencies: Tensor = self.frequencies  # type: ignore[assignment]
        return self.kernels.rotation_tables(batch.positions_T, frequencies, self.config.rope.attention_factor)

    def _output_matrix(self) -> Tensor:
        return self.embedding if self.head is None else self.head

    # -- drafting; see engine.models.base.DraftingModel --------------------------------------------------------------

    @property
    def num_draft_heads(self) -> int:
        """MTP layers that the checkpoint held."""
        return len(self.heads)

    @property
    def hidden_size(self) -> int:
        """E."""
        return self.config.hidden_size

    def draft_layout(self) -> Sequence[PagedState]:
        """Keys and values of every head's layer."""
        return list(self.cache_layout()[:1]) * self.num_draft_heads

    def forward_hidden(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> tuple[Tensor, Tensor]:
        """Logits [L, V], and all tokens' hidden states behind the last norm [T, E]."""
        hidden_TE = self.kernels.rms_norm(self._stream(batch, caches), self.norm)
        return self.kernels.linear(batch.logits_rows(hidden_TE), self._output_matrix()), hidden_TE

    def draft(self, head: int, before_TE: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """Hidden states of one head behind its norm [T, E]; see :class:`engine.models.base.DraftingModel`."""
        one = self._draft_heads()[head]
        x_TE = one.join(self.kernels.embed(batch.token_ids_T, self.embedding), before_TE)
        return one.finish(one.layers[0](x_TE, self._tables(batch), batch, cache))

    def remember(self, head: int, before_TE: Tensor, batch: ForwardBatch, cache: LayerCache) -> None:
        """See :class:`engine.models.base.RemembersDrafts`."""
        one = self._draft_heads()[head]
        x_TE, layer = one.join(self.kernels.embed(batch.token_ids_T, self.embedding), before_TE), one.layers[0]
        layer.attention.remember(x_TE, layer.attention_norm, self._tables(batch), batch, cache)  # type: ignore[operator,union-attr]

    def draft_logits(self, head: int, hidden_LE: Tensor) -> Tensor:
        """Logits [L, V] of one head's hidden states, by the model's own output matrix."""
        return self.kernels.linear(hidden_LE, self._output_matrix())


def _turn_alike(one: RopeConfig, other: RopeConfig, head_dim: int) -> bool:
    """Whether both turn heads by the same angles, however they are written down."""
    angles = [inverse_frequencies(rope, head_dim, torch.float64, torch.device("cpu")) for rope in (one, other)]
    is_as_long = math.isclose(one.attention_factor, other.attention_factor, rel_tol=1e-6)
    return (
        is_as_long and angles[0].shape == angles[1].shape and torch.allclose(angles[0], angles[1], rtol=1e-5, atol=0.0)
    )
