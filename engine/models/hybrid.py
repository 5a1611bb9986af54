"""Models with Mamba2 layers: Mamba2, Bamba, Nemotron-H and Granite-4-H are this one module, a list of residual layers.

Letters: T tokens of the batch, L logits rows, V vocabulary, E hidden size, F feed-forward size, H query heads,
G key/value heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, Unpack, cast

import torch
from torch import Tensor, nn

from engine.attention.base import Attention, AttentionPlanner, HeadSizes, PlannerLimits
from engine.batch import ForwardBatch
from engine.device import Device
from engine.errors import CheckpointError, ConfigError
from engine.kernels import Kernels, make_kernels
from engine.models.base import PLAIN_STATES, LayerCache, LayerState, PagedState, StateOptions
from engine.models.checkpoint import damaged
from engine.models.hybrid_config import AttentionConfig, HybridConfig, LayerKind, LayerSpec, MLPConfig
from engine.models.hybrid_families import read_hybrid
from engine.models.mamba2 import Mamba2Mixer, exact_dtype
from engine.models.moe import Fused, MoE, number_experts
from engine.models.mtp import NEMOTRON, DraftHead, heads_present, with_heads
from engine.models.parts import Linear, Placement, RMSNorm, empty, split_targets
from engine.models.rope import RopeConfig, inverse_frequencies
from engine.models.weights import WeightTargets, fill_weights
from engine.ssm import StateSpace, make_ssm

Tables = tuple[Tensor, Tensor]
"""Cosine and sine of the tokens' positions; of the angle 0 where positions are not told."""


class Backends(NamedTuple):
    """What a model computes with."""

    attention: Attention
    kernels: Kernels
    ssm: StateSpace


class HybridAttention(nn.Module):
    """Projections and RoPE, if any, around the attention backend."""

    def __init__(
        self, config: AttentionConfig, hidden_size: int, backends: Backends, **placement: Unpack[Placement]
    ) -> None:
        super().__init__()
        self.config, self.attention, self.kernels = config, backends.attention, backends.kernels
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = Linear(hidden_size, (heads + 2 * kv_heads) * size, bias=config.bias, **placement)
        self.out = Linear(heads * size, hidden_size, bias=config.bias, **placement)

    def forward(self, x_TE: Tensor, norm: RMSNorm, tables: Tables, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """What goes into ``out``: the attention over ``norm`` of x; [T, H * D]."""
        q_THD = self.remember(x_TE, norm, tables, batch, cache)
        return self.attention.attend(q_THD, cache, batch, scale=self.config.scale).flatten(1)

    def remember(self, x_TE: Tensor, norm: RMSNorm, tables: Tables, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """Write keys and values; gives the queries [T, H, D]."""
        qkv_TYD = self.kernels.norm_linear(x_TE, norm, self.qkv.weight, self.qkv.bias).unflatten(
            1, (-1, self.config.head_dim)
        )
        return self.kernels.rotate_and_append(qkv_TYD, None, tables, cache, batch.slots_T)

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Where each checkpoint tensor goes; q, k and v are row ranges of the fused projection."""
        config = self.config
        rows = [heads * config.head_dim for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        return {
            **split_targets(self.qkv, rows, [f"{prefix}.{name}_proj" for name in "qkv"]),
            **split_targets(self.out, [self.out.weight.shape[0]], [f"{prefix}.o_proj"]),
        }


class MLP(nn.Module):
    """A feed-forward, with a gate or without."""

    def __init__(self, config: MLPConfig, hidden_size: int, kernels: Kernels, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.config, self.kernels = config, kernels
        parts = 2 if config.activation == "swiglu" else 1
        self.up = Linear(hidden_size, parts * config.size, bias=config.bias, **placement)
        self.out = Linear(config.size, hidden_size, bias=config.bias, **placement)

    def forward(self, x_TE: Tensor, norm: RMSNorm) -> Tensor:
        """What goes into ``out``; [T, F]."""
        return self.kernels.norm_activate(x_TE, norm, self.up, self.config.activation)

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Where each checkpoint tensor goes."""
        names = self.config.up
        rows = [self.up.weight.shape[0] // len(names)] * len(names)
        return {
            **split_targets(self.up, rows, [f"{prefix}.{name}" for name in names]),
            **split_targets(self.out, [self.out.weight.shape[0]], [f"{prefix}.{self.config.down}"]),
        }


class ResidualLayer(nn.Module):
    """``x + multiplier * mixer(norm(x))``."""

    def __init__(
        self, spec: LayerSpec, config: HybridConfig, backends: Backends, **placement: Unpack[Placement]
    ) -> None:
        super().__init__()
        self.spec, self.kernels = spec, backends.kernels
        self.multiplier = config.residual_multiplier
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, **placement)
        self.mixer = _make_mixer(spec.kind, config, backends, **placement)

    def forward(self, x_TE: Tensor, tables: Tables | None, batch: ForwardBatch, cache: LayerCache | None) -> Tensor:
        """The stream behind the layer; the caller gives ``x`` up.

        Args:
            x_TE: The stream.
            tables: For attention layers.
            batch: What the forward reads.
            cache: For layers with a state.
        """
        mixer = self.mixer
        if isinstance(mixer, MoE):
            normed_TE = self.kernels.rms_norm(x_TE, self.norm)
            return self._add(mixer(normed_TE, batch.is_real_T, batch.shape.expert_tokens, batch.routing), x_TE)
        if isinstance(mixer, MLP):
            inner = mixer(x_TE, self.norm)
        elif isinstance(mixer, Mamba2Mixer):
            assert cache is not None
            if self.multiplier == 1.0:
                return mixer.add_to(x_TE, self.norm, batch, cache)
            inner = mixer(x_TE, self.norm, batch, cache)
        else:
            inner = mixer(x_TE, self.norm, tables, batch, cache)
        out = mixer.out
        if self.multiplier == 1.0:
            return self.kernels.linear_add(inner, out, x_TE)
        return self._add(self.kernels.linear(inner, out.weight, out.bias), x_TE)

    def _add(self, branch_TE: Tensor, x_TE: Tensor) -> Tensor:
        return torch.add(x_TE, branch_TE, alpha=self.multiplier)

    def targets(self) -> dict[str, Tensor]:
        """Where each checkpoint tensor goes."""
        return {self.spec.norm: self.norm.weight.data, **self.mixer.targets(self.spec.mixer)}


def _make_mixer(
    kind: LayerKind, config: HybridConfig, backends: Backends, **placement: Unpack[Placement]
) -> Mamba2Mixer | HybridAttention | MLP | MoE:
    if kind is LayerKind.MAMBA:
        return Mamba2Mixer(config.mamba, backends.ssm, backends.kernels, **placement)
    if kind is LayerKind.ATTENTION:
        assert config.attention is not None
        return HybridAttention(config.attention, config.hidden_size, backends, **placement)
    if kind is LayerKind.MLP:
        assert config.mlp is not None
        return MLP(config.mlp, config.hidden_size, backends.kernels, **placement)
    assert config.moe is not None
    return MoE(config.moe, backends.kernels, config.moe_names, **placement)


class HybridModel(nn.Module):
    """Residual layers over paged caches and state slots; see :class:`engine.models.base.Model`.

    Without attention layers it has no paged state at all, and reads neither block tables nor ``batch.slots_T``.
    """

    def __init__(
        self, config: HybridConfig, *, attention: Attention, ssm: str = "auto", **placement: Unpack[Placement]
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, placement["dtype"]
        self.vocab_size, self.max_position = config.vocab_size, config.max_position
        self.embedding = empty(config.vocab_size, config.hidden_size, **placement)
        self.attention, self.kernels = attention, make_kernels(attention.name)
        wanted = "torch" if ssm == "auto" and attention.name == "torch" else ssm  # the reference all through
        self.ssm = make_ssm(wanted, placement["device"].type, placement["dtype"])
        backends = Backends(attention, self.kernels, self.ssm)
        self.layers = nn.ModuleList(ResidualLayer(spec, config, backends, **placement) for spec in config.layers)
        number_experts(self.layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, **placement)
        self.heads = nn.ModuleList(self._make_head(head, backends, **placement) for head in config.draft_heads)
        self.are_heads_optional = True
        """Until a checkpoint has been loaded: its file may lack the draft heads that its configuration tells of."""
        # None when tied: torch.jit refuses to trace a module that holds one parameter under two names.
        self.head = None if config.tie_word_embeddings else empty(config.vocab_size, config.hidden_size, **placement)
        kinds = [spec.kind for spec in config.layers]
        kinds += [spec.kind for head in config.draft_heads for spec in head]
        self.wants_real_tokens = LayerKind.MOE in kinds
        self.register_buffer("frequencies", self._frequencies(placement["device"]), persistent=False)

    def _make_head(self, specs: Sequence[LayerSpec], backends: Backends, **placement: Unpack[Placement]) -> DraftHead:
        config = self.config
        return DraftHead(
            config.hidden_size,
            config.norm_eps,
            [ResidualLayer(spec, config, backends, **placement) for spec in specs],
            is_hidden_first=NEMOTRON.is_hidden_first,
            kernels=self.kernels,
            **placement,
        )

    def _draft_heads(self) -> Sequence[DraftHead]:
        return cast(Sequence[DraftHead], self.heads)

    def _frequencies(self, device: torch.device) -> Tensor | None:
        """What positions are multiplied by; zeros turn nothing, so that one kernel serves both kinds of attention."""
        attention, dtype = self.config.attention, exact_dtype(self.dtype)
        if attention is None:
            return None
        if attention.rope is None:
            return torch.zeros(attention.head_dim // 2, dtype=dtype, device=device)
        return inverse_frequencies(attention.rope, attention.head_dim, dtype, device)

    @classmethod
    def from_checkpoint_config(
        cls, config: Mapping[str, Any], *, attention: Attention, ssm: str = "auto", **placement: Unpack[Placement]
    ) -> HybridModel:
        """Build with uninitialised weights from a parsed ``config.json``; CheckpointError if it cannot be."""
        with damaged("its configuration"):
            parsed = read_hybrid(config)
        return cls(parsed, attention=attention, ssm=ssm, **placement)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a checkpoint's tensors in; CheckpointError names what is missing, unexpected or misshapen."""
        absent = fill_weights(self.weight_targets(), weights)
        groups = [frozenset(targets) for targets, _ in self._head_targets()]
        self.heads = self.heads[: heads_present(groups, absent)]
        self.are_heads_optional = False

    def weight_targets(self) -> WeightTargets:
        """Where each checkpoint tensor goes."""
        config = self.config
        targets = {config.embedding_name: self.embedding.data, config.final_norm_name: self.norm.weight.data}
        ignored = rf"{NEMOTRON.rest}|.*\.rotary_emb\.inv_freq"
        if self.head is None:
            ignored += r"|lm_head\.weight"  # some tied files hold a copy; the config decides
        else:
            targets["lm_head.weight"] = self.head.data
        fused: dict[str, tuple[Tensor, tuple[str, ...]]] = {}
        for layer in self._layers():
            targets.update(layer.targets())
            if isinstance(layer.mixer, MoE):
                fused.update(layer.mixer.fused(layer.spec.mixer))
        places = WeightTargets(targets, ignored, fused)
        return with_heads(places, self._head_targets(), are_optional=self.are_heads_optional)

    def _head_targets(self) -> list[tuple[dict[str, Tensor], Fused]]:
        """Of each draft head, as :class:`WeightTargets` wants them."""
        found, number = [], 0
        for place, head in enumerate(self._draft_heads()):
            targets = head.targets(NEMOTRON, head=place, number=number)
            fused: Fused = {}
            for layer in cast(Iterable[ResidualLayer], head.layers):
                targets.update(layer.targets())
                if isinstance(layer.mixer, MoE):
                    fused.update(layer.mixer.fused(layer.spec.mixer))
            found.append((targets, fused))
            number += len(head.layers)
        return found

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Refuse a checkpoint that would compute otherwise than this model: CheckpointError names what differs.

        The limit on positions may be another, and so may the way that equal angles are written down.
        """
        with damaged("its configuration"):
            other = read_hybrid(config)
        for one in fields(HybridConfig):
            mine, theirs = getattr(self.config, one.name), getattr(other, one.name)
            if one.name != "max_position" and not _alike(mine, theirs):
                raise CheckpointError(f"{one.name} must be the model's, {mine!r}, got {theirs!r}")

    def cache_layout(self) -> Sequence[LayerState]:
        """Keys and values of attention layers, slots of Mamba2 layers, in the order of the layers."""
        return self.state_layout(PLAIN_STATES)

    def state_layout(self, options: StateOptions) -> Sequence[LayerState]:
        """See :class:`engine.models.base.RecurrentModel`."""
        if options.replay_width and not self.ssm.can_replay:
            raise ConfigError(
                f"state_rewind='replayed' is not computed by ssm_backend={self.ssm.name!r}; use ssm_backend='triton' "
                "or 'torch', or state_rewind='stored'"
            )
        found: list[LayerState] = []
        for spec in self.config.layers:
            if spec.kind is LayerKind.MAMBA:
                found.append(self.config.mamba.slot_state(self.dtype, options))
            elif spec.kind is LayerKind.ATTENTION:
                assert self.config.attention is not None
                shape = (self.config.attention.num_kv_heads, self.config.attention.head_dim)
                found.append(PagedState(shapes=(shape, shape), dtypes=(self.dtype, self.dtype)))
        return found

    def make_planner(self, device: Device, limits: PlannerLimits) -> AttentionPlanner | None:
        """See :class:`engine.models.base.PlansPrefill`; there may be no layer that attends."""
        config = self.config.attention
        if config is None:
            return None
        sizes = HeadSizes(config.num_heads, config.num_kv_heads, config.head_dim, self.dtype)
        return self.attention.make_planner(device, limits, sizes)

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        """Logits, shape [L, V], in the model's dtype."""
        x_LE = batch.logits_rows(self.stream(batch, caches))
        return self._divided(self.kernels.norm_linear(x_LE, self.norm, self._output_matrix()))

    def _output_matrix(self) -> Tensor:
        return self.embedding if self.head is None else self.head

    def _divided(self, logits_LV: Tensor) -> Tensor:
        return logits_LV if self.config.logits_divisor == 1.0 else logits_LV / self.config.logits_divisor

    def _embedded(self, batch: ForwardBatch) -> Tensor:
        """An ordinary kernel, which Triton kernels behind it rely on; see ``engine/kernels/triton_elementwise.py``."""
        x_TE = self.kernels.embed(batch.token_ids_T, self.embedding)
        return x_TE if self.config.embedding_multiplier == 1.0 else x_TE * self.config.embedding_multiplier

    def stream(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        """[T, E] what the last layer leaves, before the last norm."""
        x_TE, tables, left = self._embedded(batch), self._tables(batch), list(caches)
        for layer in self._layers():
            cache = left.pop(0) if layer.spec.kind in (LayerKind.MAMBA, LayerKind.ATTENTION) else None
            x_TE = layer(x_TE, tables, batch, cache)
        assert not left, "one cache a layer with a state"
        return x_TE

    # -- drafting; see engine.models.base.DraftingModel --------------------------------------------------------------

    @property
    def num_draft_heads(self) -> int:
        """MTP heads that the checkpoint held."""
        return len(self.heads)

    @property
    def hidden_size(self) -> int:
        """E."""
        return self.config.hidden_size

    def draft_layout(self) -> Sequence[PagedState]:
        """Keys and values of every head's attention layer."""
        attention = self.config.attention
        if attention is None:
            return []
        shape = (attention.num_kv_heads, attention.head_dim)
        return [PagedState(shapes=(shape, shape), dtypes=(self.dtype, self.dtype))] * self.num_draft_heads

    def forward_hidden(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> tuple[Tensor, Tensor]:
        """Logits [L, V], and all tokens' hidden states behind the last norm [T, E]."""
        hidden_TE = self.kernels.rms_norm(self.stream(batch, caches), self.norm)
        return self.draft_logits(-1, batch.logits_rows(hidden_TE)), hidden_TE

    def draft(self, head: int, before_TE: Tensor, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """Hidden states of one head behind its norm [T, E]; see :class:`engine.models.base.DraftingModel`."""
        one, tables = self._draft_heads()[head], self._tables(batch)
        x_TE = one.join(self._embedded(batch), before_TE)
        for layer in cast(Iterable[ResidualLayer], one.layers):
            x_TE = layer(x_TE, tables, batch, cache if layer.spec.kind is LayerKind.ATTENTION else None)
        return one.finish(x_TE)

    def remember(self, head: int, before_TE: Tensor, batch: ForwardBatch, cache: LayerCache) -> None:
        """See :class:`engine.models.base.RemembersDrafts`."""
        one, tables = self._draft_heads()[head], self._tables(batch)
        assert tables is not None
        x_TE = one.join(self._embedded(batch), before_TE)
        for layer in cast(Iterable[ResidualLayer], one.layers):
            if isinstance(layer.mixer, HybridAttention):
                layer.mixer.remember(x_TE, layer.norm, tables, batch, cache)
                return  # the one layer with a cache
            x_TE = layer(x_TE, tables, batch, None)

    def draft_logits(self, head: int, hidden_LE: Tensor) -> Tensor:
        """Logits [L, V] of hidden states behind a norm: those of a head, or the model's own (-1)."""
        return self._divided(self.kernels.linear(hidden_LE, self._output_matrix()))

    def _tables(self, batch: ForwardBatch) -> Tables | None:
        if self.config.attention is None:
            return None
        rope, frequencies = self.config.attention.rope, cast(Tensor, self.frequencies)
        return self.kernels.rotation_tables(batch.positions_T, frequencies, rope.attention_factor if rope else 1.0)

    def _layers(self) -> Iterable[ResidualLayer]:
        return cast(Iterable[ResidualLayer], self.layers)


def _alike(mine: Any, theirs: Any) -> bool:
    """Equal but for what another file format may round."""
    if isinstance(mine, float) and isinstance(theirs, float):
        return math.isclose(mine, theirs, rel_tol=1e-6) or mine == theirs
    if isinstance(mine, AttentionConfig) and isinstance(theirs, AttentionConfig):
        rest = (one.name for one in fields(AttentionConfig) if one.name != "rope")
        same = all(_alike(getattr(mine, name), getattr(theirs, name)) for name in rest)
        return same and _turn_alike(mine.rope, theirs.rope, mine.head_dim)
    return bool(mine == theirs)


def _turn_alike(mine: RopeConfig | None, theirs: RopeConfig | None, head_dim: int) -> bool:
    if mine is None or theirs is None:
        return mine is theirs
    angles = [inverse_frequencies(rope, head_dim, torch.float64, torch.device("cpu")) for rope in (mine, theirs)]
    is_as_long = math.isclose(mine.attention_factor, theirs.attention_factor, rel_tol=1e-6)
    is_as_wide = angles[0].shape == angles[1].shape
    return is_as_long and is_as_wide and torch.allclose(angles[0], angles[1], rtol=1e-5, atol=0.0)
