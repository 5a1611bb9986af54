"""Mixture of experts: a router that picks a few feed-forwards for each token, their weights, and a shared one.

Letters: T tokens, E hidden size, X experts, K experts of a token, I inputs of an expert (E, or the latent size),
U rows of its first projection (2 F gated, else F), F its inner size, C groups of experts, L layers with experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.batch import RoutingTape
from engine.errors import CheckpointError
from engine.kernels import Activation, Kernels
from engine.kernels.routing import Routing as Routing  # part of a MoEConfig, so it can be had from here as well
from engine.kernels.routing import RoutingRule, weights_at, wide
from engine.models.parts import Linear, Placement, empty, split_targets
from engine.models.weights import entry_of, whole_of
from engine.parallel.dispatch import Dispatch
from engine.parallel.shard import WHOLE, current_shard

Fused = dict[str, tuple[Tensor, tuple[str, ...]]]
"""Names a checkpoint may hold instead: the tensor's destination, and the names it stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Sizes and switches of one layer's experts. CheckpointError says which sizes do not fit each other."""

    hidden_size: int
    num_experts: int
    top_k: int
    """Experts a token goes to."""
    expert_size: int
    """F."""
    activation: Activation = "swiglu"
    """``relu2``: down(relu(up x)^2), without a gate."""
    routing: Routing = Routing.SOFTMAX
    renormalise: bool = False
    """This and the next two: see :class:`RoutingRule`."""
    num_groups: int = 1
    top_groups: int = 1
    scaling: float = 1.0
    """Factor on the K weights, after ``renormalise``. The shared expert is not scaled."""
    shared_size: int = 0
    """Inner size of the expert that every token goes to; 0: there is none."""
    is_shared_gated: bool = False
    """Multiply its result by the sigmoid of one more projection (Qwen2-MoE)."""
    latent_size: int | None = None
    """I, where tokens are projected down before the routed experts and up behind them (Nemotron-H)."""
    has_bias: bool = False
    """Of the shared expert and the latent projections; routed experts never have biases."""

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise CheckpointError(f"config.json: {self.top_k} experts a token of {self.num_experts} cannot be")
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise CheckpointError(
                f"config.json: {self.num_experts} experts, n_group {self.num_groups} and topk_group {self.top_groups} "
                "do not fit each other"
            )
        group_size = self.num_experts // self.num_groups
        if self.top_k > self.top_groups * group_size or (self.rule.has_groups and group_size < 2):
            raise CheckpointError(
                f"config.json: {self.top_groups} groups of {group_size} experts are too few for {self.top_k} a token"
            )
        if self.num_groups > 1 and self.routing is not Routing.SIGMOID:
            raise CheckpointError(f"config.json: n_group must be 1 for this router, got {self.num_groups}")

    @property
    def rule(self) -> RoutingRule:
        """What the router does with its scores."""
        return RoutingRule(
            routing=self.routing,
            top_k=self.top_k,
            renormalise=self.renormalise,
            scaling=self.scaling,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
        )

    @property
    def input_size(self) -> int:
        """I."""
        return self.hidden_size if self.latent_size is None else self.latent_size


@dataclass(frozen=True, slots=True, kw_only=True)
class MoENames:
    """What a checkpoint calls the tensors, behind the prefix given to :meth:`MoE.targets`. The defaults are Qwen's.

    A name with ``{}`` is that of one expert's tensor; without, of one tensor [X, rows, inputs] of all of them.
    Several names of one projection are rows of it, equally many each.
    """

    router: str = "gate.weight"
    router_too: str | None = None
    """Another name for it."""
    correction_bias: str = "gate.e_score_correction_bias"
    up: tuple[str, ...] = ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight")
    down: str = "experts.{}.down_proj.weight"
    shared_up: tuple[str, ...] = ("shared_expert.gate_proj", "shared_expert.up_proj")
    """Without ``.weight``, as the three below: there may be biases."""
    shared_down: str = "shared_expert.down_proj"
    latent_in: str = "fc1_latent_proj"
    latent_out: str = "fc2_latent_proj"
    shared_gate: str = "shared_expert_gate.weight"
    """[1, E]."""
    whole_up: str | None = "experts.gate_up_proj"
    """What transformers 5 calls ``up`` of all experts; a file may hold it in place of those."""
    whole_down: str | None = "experts.down_proj"


class Router(nn.Module):
    """Scores every expert and picks K. Equal scores: the expert, or group, with the lower number goes first."""

    def __init__(self, config: MoEConfig, kernels: Kernels, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.config, self.kernels, self.rule = config, kernels, config.rule
        is_sigmoid = config.routing is Routing.SIGMOID
        if is_sigmoid:  # used as the checkpoint stores them, in float32: a rounded bias chooses others
            placement = {**placement, "dtype": wide(placement["dtype"])}
        self.weight = empty(config.num_experts, config.hidden_size, **placement)
        self.correction_bias = empty(config.num_experts, **placement) if is_sigmoid else None

    def forward(self, x_TE: Tensor, given_TK: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Numbers of the experts, [T, K] int64, best first, and their weights, [T, K] in float32 or float64.

        Args:
            x_TE: Tokens.
            given_TK: Experts to take instead, in this order; negative for tokens whose experts are chosen.
        """
        if self.correction_bias is None:
            score_TX = self.kernels.linear(x_TE, self.weight)
        else:
            score_TX = functional.linear(x_TE.to(self.weight.dtype), self.weight)
        ids_TK, weights_TK = self.kernels.route(score_TX, self.correction_bias, self.rule)
        if given_TK is None:
            return ids_TK, weights_TK
        is_given_T1 = given_TK[:, :1] >= 0
        ids_TK = torch.where(is_given_T1, given_TK.to(ids_TK.dtype), ids_TK)
        return ids_TK, torch.where(is_given_T1, weights_at(score_TX, ids_TK, self.rule), weights_TK)


class Experts(nn.Module):
    """The weights of a layer's experts, fused: ``up`` [X, U, I], gates before ups; ``down`` [X, I, F].

    With other ranks X counts this rank's experts only (:func:`engine.parallel.shard.building`), and :attr:`dispatch`
    takes tokens to those of the others.
    """

    dispatch: Dispatch | None = None
    """Set by the engine that runs the model."""

    def __init__(self, config: MoEConfig, kernels: Kernels, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.kernels = kernels
        self.activation: Activation = config.activation
        self.num_experts, self.shard = config.num_experts, current_shard()
        self.part = self.shard.part(config.num_experts)
        """Numbers of those that are here."""
        count = len(self.part)
        self.up = empty(count, first_rows(config, config.expert_size), config.input_size, **placement)
        self.down = empty(count, config.input_size, config.expert_size, **placement)

    def forward(
        self,
        x_TI: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        is_real_T: Tensor | None = None,
        expert_tokens: int = 0,
    ) -> Tensor:
        """[T, I]: for each token the sum of its experts' results, times their weights.

        Args:
            x_TI: Tokens.
            ids_TK: Their experts, of all there are.
            weights_TK: Their weights.
            is_real_T: As :meth:`MoE.forward`; with other ranks padding goes to no expert.
            expert_tokens: See :class:`engine.batch.BatchShape`.
        """
        if self.dispatch is not None:
            return self.dispatch(x_TI, ids_TK, weights_TK, is_real_T, expert_tokens, self.compute)
        assert self.shard.size == 1, "a model with a part of the experts is run by an engine that knows the others"
        return self.compute(x_TI, ids_TK, weights_TK)

    def compute(self, x_TI: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The same with experts that are here; ``ids`` count from the first of them."""
        return self.kernels.experts(x_TI, ids_TK, weights_TK, self.up, self.down, self.activation)

    def _wholes(self, names: MoENames) -> list[tuple[str, Tensor]]:
        """Each projection of all experts; what is not here is a stand-in."""
        ups = self.up.data.split(self.up.shape[1] // len(names.up), dim=1)
        local = [*ups, self.down.data]
        if self.shard != WHOLE:
            local = [whole_of(one, self.num_experts, self.part.start) for one in local]
        return list(zip((*names.up, names.down), local, strict=True))

    def targets(self, prefix: str, names: MoENames) -> dict[str, Tensor]:
        """Where each checkpoint tensor goes."""
        found: dict[str, Tensor] = {}
        for name, whole in self._wholes(names):
            if "{}" in name:
                numbers = range(self.num_experts)
                found.update((f"{prefix}.{name.format(number)}", entry_of(whole, number)) for number in numbers)
            else:
                found[f"{prefix}.{name}"] = whole
        return found

    def fused(self, prefix: str, names: MoENames) -> Fused:
        """What may stand in place of those, see :data:`Fused`."""
        numbers = range(self.num_experts)
        up, down = self.up.data, self.down.data
        if self.shard != WHOLE:
            up, down = (whole_of(one, self.num_experts, self.part.start) for one in (up, down))
        found: Fused = {}
        for whole_name, whole, parts in ((names.whole_up, up, names.up), (names.whole_down, down, (names.down,))):
            if whole_name is not None:
                stands_for = tuple(f"{prefix}.{part.format(number)}" for number in numbers for part in parts)
                found[f"{prefix}.{whole_name}"] = (whole, stands_for)
        return found


def first_rows(config: MoEConfig, inner_size: int) -> int:
    """Rows of an expert's first projection."""
    return 2 * inner_size if config.activation == "swiglu" else inner_size


class SharedExpert(nn.Module):
    """The feed-forward that every token goes through; see ``MoEConfig.shared_size``."""

    def __init__(self, config: MoEConfig, kernels: Kernels, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.kernels = kernels
        self.activation: Activation = config.activation
        hidden, inner, bias = config.hidden_size, config.shared_size, config.has_bias
        self.up = Linear(hidden, first_rows(config, inner), bias=bias, **placement)
        self.down = Linear(inner, hidden, bias=bias, **placement)
        self.gate = empty(1, hidden, **placement) if config.is_shared_gated else None

    def forward(self, x_TE: Tensor, routed_TE: Tensor) -> Tensor:
        """``routed``, whose memory the caller gives up, plus this expert's result."""
        inner_TF = self.kernels.activate(self.kernels.linear(x_TE, self.up.weight, self.up.bias), self.activation)
        if self.gate is not None:  # before a projection without bias it is the same factor as behind it
            inner_TF = inner_TF * self.kernels.linear(x_TE, self.gate).sigmoid()
        return self.kernels.linear_add(inner_TF, self.down, routed_TE)

    def targets(self, prefix: str, names: MoENames) -> dict[str, Tensor]:
        """Where each checkpoint tensor goes."""
        rows = self.up.weight.shape[0] // len(names.shared_up)
        ups = [f"{prefix}.{name}" for name in names.shared_up]
        found = {
            **split_targets(self.up, [rows] * len(ups), ups),
            **split_targets(self.down, [self.down.weight.shape[0]], [f"{prefix}.{names.shared_down}"]),
        }
        if self.gate is not None:
            found[f"{prefix}.{names.shared_gate}"] = self.gate.data
        return found


class MoE(nn.Module):
    """Router, routed experts and shared expert of one layer.

    A model with such layers has ``wants_real_tokens = True``, so that its batches say which tokens are padding.
    """

    number: int | None
    """Its place among the model's layers with experts, see :func:`number_experts`; None in draft heads."""
    load_X: Tensor | None
    """[X] int64 on the device: tokens sent to each expert so far. None: not counted. See :func:`count_expert_load`."""

    def __init__(
        self, config: MoEConfig, kernels: Kernels, names: MoENames | None = None, **placement: Unpack[Placement]
    ) -> None:
        super().__init__()
        if config.is_shared_gated and config.has_bias:
            raise CheckpointError("config.json: a gated shared expert with biases is not supported")
        self.config, self.names, self.number = config, names or MoENames(), None
        self.router = Router(config, kernels, **placement)
        self.experts = Experts(config, kernels, **placement)
        self.shared = SharedExpert(config, kernels, **placement) if config.shared_size else None
        self.kernels = kernels
        sizes = (config.hidden_size, config.latent_size)
        self.latent_in = None if sizes[1] is None else Linear(sizes[0], sizes[1], bias=config.has_bias, **placement)
        self.latent_out = None if sizes[1] is None else Linear(sizes[1], sizes[0], bias=config.has_bias, **placement)
        self.register_buffer("load_X", None, persistent=False)

    def forward(
        self,
        x_TE: Tensor,
        is_real_T: Tensor | None = None,
        expert_tokens: int = 0,
        routing: RoutingTape | None = None,
    ) -> Tensor:
        """The experts' sum, [T, E], without residual.

        Args:
            x_TE: Normed tokens, padding included; a token's result depends on no other token.
            is_real_T: [T] bool, False for padding, which is computed but not counted. None: all are real.
            expert_tokens: With other ranks, see :class:`engine.batch.BatchShape`.
            routing: Where the choices are noted, and may be told; layers without a number leave it alone.
        """
        if routing is None or self.number is None:
            ids_TK, weights_TK = self.router(x_TE)
        else:
            ids_TK, weights_TK = self.router(x_TE, routing.given_to(self.number))
            routing.note(self.number, ids_TK)
        if self.load_X is not None:
            ids_TK = counted(self.load_X, ids_TK, is_real_T)
        x_TI = x_TE
        if self.latent_in is not None:
            x_TI = self.kernels.linear(x_TE, self.latent_in.weight, self.latent_in.bias)
        out_TE: Tensor = self.experts(x_TI, ids_TK, weights_TK, is_real_T, expert_tokens)
        if self.latent_out is not None:
            out_TE = self.kernels.linear(out_TE, self.latent_out.weight, self.latent_out.bias)
        return out_TE if self.shared is None else self.shared(x_TE, out_TE)

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Where each checkpoint tensor goes; ``prefix`` is what all names have before what ``MoENames`` says."""
        found = {f"{prefix}.{self.names.router}": self.router.weight.data}
        if self.router.correction_bias is not None:
            found[f"{prefix}.{self.names.correction_bias}"] = self.router.correction_bias.data
        found.update(self.experts.targets(prefix, self.names))
        if self.shared is not None:
            found.update(self.shared.targets(prefix, self.names))
        for linear, name in ((self.latent_in, self.names.latent_in), (self.latent_out, self.names.latent_out)):
            if linear is not None:
                found.update(split_targets(linear, [linear.weight.shape[0]], [f"{prefix}.{name}"]))
        return found

    def fused(self, prefix: str) -> Fused:
        """What a checkpoint may hold in place of some of ``targets``, for ``WeightTargets``."""
        found = self.experts.fused(prefix, self.names)
        if self.names.router_too is not None:
            stands_for = (f"{prefix}.{self.names.router}",)
            found[f"{prefix}.{self.names.router_too}"] = (self.router.weight.data, stands_for)
        return found


def number_experts(layers: nn.Module) -> None:
    """Number the layers with experts of a model from 0, in order, so that their choices can be recorded and replayed.

    Args:
        layers: All of them, without draft heads: these choose anew in every pass.
    """
    for number, layer in enumerate(module for module in layers.modules() if isinstance(module, MoE)):
        layer.number = number


def counted(load_X: Tensor, ids_TK: Tensor, is_real_T: Tensor | None) -> Tensor:
    """``ids``, after adding to ``load`` [X] how many real tokens go to each expert.

    Only enqueues; integers are the same in any order. What is returned takes part in the sum, times 0, because a traced
    forward leaves out whatever its result does not need, a write to a tensor of its own included.
    """
    ones_TK = torch.ones_like(ids_TK) if is_real_T is None else is_real_T[:, None].expand_as(ids_TK).to(torch.int64)
    load_X.scatter_add_(0, ids_TK.flatten(), ones_TK.flatten())
    return ids_TK + load_X[0] * 0


def count_expert_load(model: nn.Module, *, is_on: bool = True) -> Tensor | None:
    """Let every :class:`MoE` of ``model`` count the tokens it sends to each expert, from zero; or stop counting.

    Off by default. To be called before an engine is built on the model: captured graphs and buckets hold what the
    forward did when they were made. The engine itself never reads the counts; who shows them (the workbench's view of
    expert load) copies them to the host at iteration borders.

    Returns:
        [L, X] int64 on the model's device, a row a layer with experts, in order, written by every forward; None when
        turned off, or where the model has no experts. Layers with fewer experts than X leave the rest 0.
    """
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    if not is_on or not layers:
        for layer in layers:
            layer.load_X = None
        return None
    most = max(layer.config.num_experts for layer in layers)
    load_LX = torch.zeros((len(layers), most), dtype=torch.int64, device=layers[0].router.weight.device)
    for layer, row_X in zip(layers, load_LX, strict=True):
        layer.load_X = row_X[: layer.config.num_experts]
    return load_LX
