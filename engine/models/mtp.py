"""Draft heads (multi-token prediction) as checkpoints store them: DeepSeek's and GLM's, MiMo's, Nemotron-H's.

Head k at position p joins the normed hidden state of position p - 1 with the normed embedding of the token at p, and
sends the sum through layers of its own; what its last norm leaves is its hidden state, from which head k + 1 goes on
and the token at p + 1 is foretold. Embedding and output matrix are the model's. See :class:`DraftingModel` for what the
engine asks for.

Letters: T tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.kernels import Kernels
from engine.models.moe import Fused
from engine.models.parts import Linear, Placement, RMSNorm
from engine.models.weights import WeightTargets


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNames:
    """What one family calls the tensors around a head's layers; ``{head}`` is its number, from 0."""

    prefix: str
    token_norm: str
    hidden_norm: str
    project: str
    final_norm: str
    last_prefix: str | None = None
    """Where the last norm is, if not under ``prefix``; ``{last}`` is the number of the head's last layer."""
    is_hidden_first: bool = False
    """Whether the projection takes [hidden | embedding] rather than [embedding | hidden]."""
    rest: str | None = None
    """Regular expression of tensors that are skipped besides: copies of the model's embedding and output matrix, and
    heads that the configuration does not tell of. ``{own}`` stands for the numbers of the model's layers."""


DEEPSEEK = HeadNames(
    prefix="model.layers.{number}",
    token_norm="enorm",
    hidden_norm="hnorm",
    project="eh_proj",
    final_norm="shared_head.norm",
    rest=r"model\.layers\.(?!(?:{own})\.)\d+\..*",
)
"""``{number}`` counts on from the model's layers."""
NEMOTRON = HeadNames(
    prefix="mtp.layers.{number}",
    token_norm="enorm",
    hidden_norm="hnorm",
    project="eh_proj",
    final_norm="final_layernorm",
    last_prefix="mtp.layers.{last}",
    rest=r"mtp\..*",
)
"""A head is several layers, all heads' numbered through."""
MIMO = HeadNames(
    prefix="model.mtp_layers.{head}",
    token_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    project="input_proj",
    final_norm="final_layernorm",
    rest=r"model\.mtp_layers\..*",
    is_hidden_first=True,
)


class DraftHead(nn.Module):
    """Everything of a head but its layers' own names and caches.

    Args:
        size: E.
        eps: Of the norms.
        layers: What the joined input goes through.
        is_hidden_first: See :class:`HeadNames`.
        kernels: Norms and projections.
    """

    def __init__(
        self,
        size: int,
        eps: float,
        layers: Sequence[nn.Module],
        *,
        is_hidden_first: bool,
        kernels: Kernels,
        **placement: Unpack[Placement],
    ) -> None:
        super().__init__()
        self.kernels, self.is_hidden_first = kernels, is_hidden_first
        self.token_norm = RMSNorm(size, eps, **placement)
        self.hidden_norm = RMSNorm(size, eps, **placement)
        self.project = Linear(2 * size, size, bias=False, **placement)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(size, eps, **placement)

    def join(self, embedded_TE: Tensor, before_TE: Tensor) -> Tensor:
        """What the layers begin with, [T, E]."""
        token_TE = self.kernels.rms_norm(embedded_TE, self.token_norm)
        hidden_TE = self.kernels.rms_norm(before_TE.to(embedded_TE.dtype), self.hidden_norm)
        pair = (hidden_TE, token_TE) if self.is_hidden_first else (token_TE, hidden_TE)
        return self.kernels.linear(torch.cat(pair, dim=1), self.project.weight)

    def finish(self, x_TE: Tensor) -> Tensor:
        """The head's hidden state, [T, E]."""
        return self.kernels.rms_norm(x_TE, self.norm)

    def targets(self, names: HeadNames, *, head: int, number: int) -> dict[str, Tensor]:
        """Where the tensors around the layers go; ``number`` is that of the head's first layer."""
        prefix = names.prefix.format(head=head, number=number)
        last = prefix if names.last_prefix is None else names.last_prefix.format(last=number + len(self.layers) - 1)
        return {
            f"{prefix}.{names.token_norm}.weight": self.token_norm.weight.data,
            f"{prefix}.{names.hidden_norm}.weight": self.hidden_norm.weight.data,
            f"{prefix}.{names.project}.weight": self.project.weight.data,
            f"{last}.{names.final_norm}.weight": self.norm.weight.data,
        }


def with_heads(
    places: WeightTargets, heads: Sequence[tuple[Mapping[str, Tensor], Fused]], *, are_optional: bool
) -> WeightTargets:
    """A model's places and those of its heads, which a checkpoint may lack where they are optional."""
    targets, fused, optional = dict(places.targets), dict(places.fused), set(places.optional)
    for head_targets, head_fused in heads:
        targets.update(head_targets)
        fused.update(head_fused)
        if are_optional:
            optional |= head_targets.keys()
    return places._replace(targets=targets, fused=fused, optional=frozenset(optional))


def heads_present(groups: Sequence[frozenset[str]], absent: Iterable[str]) -> int:
    """How many heads a checkpoint holds, the first ones.

    Args:
        groups: Names of each head's tensors.
        absent: Names that the checkpoint lacks.

    Raises:
        CheckpointError: it holds a part of a head, or one behind a head that it lacks.
    """
    lacking = frozenset(absent)
    count = next((head for head, names in enumerate(groups) if names & lacking), len(groups))
    for head, names in enumerate(groups[count:], count):
        if names - lacking:
            raise CheckpointError(f"checkpoint lacks {min(names & lacking or names)} of draft head {head}")
    return count
