"""Muon for matrices, AdamW for the rest, one learning rate for both, and its schedule.

Muon (K. Jordan and others, 2024) moves a matrix along its orthogonalised momentum; scaled as J. Liu and others (2025)
propose, its steps are as large as AdamW's.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz step: steepest at zero, singular values end near one."""
_STEP_SIZE = 0.2
"""Root mean square of AdamW's steps in units of the learning rate, about."""


def learning_rate(progress: float, peak: float, *, decay_from: float = 0.3) -> float:
    """The rate at ``progress`` (0 to 1): level at first, then in a straight line to zero."""
    if progress < decay_from:
        return peak
    return peak * max(0.0, (1 - progress) / (1 - decay_from))


@torch.no_grad()
def orthogonalise(matrices: Tensor) -> Tensor:
    """The nearest matrices with all singular values about one; [..., R, C], in bfloat16 on CUDA."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x.bfloat16() if x.is_cuda else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    found: Tensor = x.mT if is_tall else x
    return found.to(matrices.dtype)


class Muon:
    """Muon on parameters whose last two dimensions are matrices; equal shapes are stepped together."""

    def __init__(self, parameters: list[nn.Parameter], *, weight_decay: float) -> None:
        self._weight_decay = weight_decay
        groups: defaultdict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            groups[parameter.shape].append(parameter)
        self._groups = [(group, torch.zeros_like(torch.stack(list(group)))) for group in groups.values()]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move by the gradients, in place."""
        for group, momentum in self._groups:
            gradient = torch.stack([parameter.grad for parameter in group if parameter.grad is not None])
            momentum.lerp_(gradient, 1 - _MOMENTUM)
            update = orthogonalise(gradient.lerp(momentum, _MOMENTUM))
            scale = _STEP_SIZE * max(update.shape[-2:]) ** 0.5
            tensors: list[Tensor] = list(group)
            torch._foreach_mul_(tensors, 1 - rate * self._weight_decay)
            torch._foreach_add_(tensors, list(update.unbind()), alpha=-rate * scale)


class Optimiser:
    """Steps all parameters of a model."""

    def __init__(self, model: nn.Module, *, weight_decay: float = 0.05, uses_muon: bool = True) -> None:
        """Take the model's parameters.

        Args:
            model: Embeddings, output matrix, routers, convolutions and vectors go to AdamW.
            weight_decay: Of matrices, a unit of learning rate.
            uses_muon: False: AdamW for everything, to compare.
        """
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.ndim >= 2 and not any(
                part in name for part in ("embeddings", "lm_head", "gate.", "conv1d")
            )
            (matrices if is_matrix else others).append(parameter)
        self._parameters = [*matrices, *others]
        self._muon = Muon(matrices, weight_decay=weight_decay) if uses_muon else None
        groups = [{"params": others, "weight_decay": 0.0}]
        if not uses_muon:
            groups.append({"params": matrices, "weight_decay": weight_decay})
        is_cuda = self._parameters[0].is_cuda
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-10, fused=is_cuda)

    def step(self, rate: float) -> Tensor:
        """Clip the gradients to length one, move, clear them; gives their length before, on the device."""
        length = nn.utils.clip_grad_norm_(self._parameters, 1.0)
        if self._muon is not None:
            self._muon.step(rate)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        for parameter in self._parameters:
            parameter.grad = None
        return length


class Average:
    """A running average of all parameters and of the routers' biases, which only make sense together."""

    def __init__(self, model: nn.Module) -> None:
        self._live = [*model.parameters(), *_biases(model)]
        self._mean = [tensor.detach().clone() for tensor in self._live]

    @torch.no_grad()
    def update(self, weight: float) -> None:
        """Take the model as it is with ``weight``."""
        torch._foreach_lerp_(self._mean, [tensor.detach() for tensor in self._live], weight)

    @torch.no_grad()
    def into_model(self) -> None:
        """Write the average over the model."""
        torch._foreach_copy_([tensor.detach() for tensor in self._live], self._mean)


def _biases(model: nn.Module) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
