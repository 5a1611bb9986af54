"""Copying checkpoint tensors into a model, by name, with nothing missing and nothing left over."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError

_SHOWN = 4
"""Names an error lists before it only counts."""


class WeightTargets(NamedTuple):
    """Where a model's weights go."""

    targets: Mapping[str, Tensor]
    """Destination by checkpoint name; a view of a larger parameter is fine."""
    ignored: str | None = None
    """Regular expression of checkpoint names that are skipped, matched whole."""
    fused: Mapping[str, tuple[Tensor, tuple[str, ...]]] = MappingProxyType({})
    """Other names a checkpoint may use: the destination, and the names in ``targets`` that it is there in place of."""
    optional: frozenset[str] = frozenset()
    """Of ``targets``, names that a checkpoint may lack."""


@runtime_checkable
class Refillable(Protocol):
    """A model whose weights can be checked before they are copied, so that a live engine may take new ones."""

    def weight_targets(self) -> WeightTargets:
        """Where :meth:`load_weights` copies to."""
        ...

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Refuse another model's parsed ``config.json``: CheckpointError names what differs."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy a checkpoint's tensors in."""
        ...


class WholeOf(Tensor):
    """Stands in for a tensor of which only neighbouring entries of the first dimension are here; has no memory."""

    part: Tensor
    """Those that are."""
    first: int
    """The number of the first of them."""


def whole_of(part: Tensor, size: int, first: int) -> Tensor:
    """A target for the whole tensor, [size, ...], of which ``part`` is kept; an entry of it is a target as well.

    Entries that are not kept are copied nowhere: a checkpoint must hold them, and hold them rightly.
    """
    whole = torch.empty((size, *part.shape[1:]), dtype=part.dtype, device="meta").as_subclass(WholeOf)
    whole.part, whole.first = part, first
    return whole


def entry_of(whole: Tensor, number: int) -> Tensor:
    """The target for one entry of a whole tensor."""
    if not isinstance(whole, WholeOf):
        return whole[number]
    place = number - whole.first
    if 0 <= place < whole.part.shape[0]:
        return whole.part[place]
    return torch.empty(whole.shape[1:], dtype=whole.dtype, device="meta")


def fill_target(target: Tensor, tensor: Tensor) -> None:
    """Copy ``tensor`` to its target, or what is kept of it."""
    with torch.no_grad():
        if isinstance(target, WholeOf):
            target.part.copy_(tensor[target.first : target.first + target.part.shape[0]])
        elif not target.is_meta:
            target.copy_(tensor)


def weight_targets(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and stored buffer of ``module`` by name: what :func:`fill_weights` fills by default."""
    return {name: tensor.data for name, tensor in module.state_dict(keep_vars=True).items()}


def fill_weights(
    targets: Mapping[str, Tensor] | WeightTargets, weights: Iterable[tuple[str, Tensor]], *, ignored: str | None = None
) -> frozenset[str]:
    """Copy each tensor of ``weights`` into the target of its name, converted to the target's dtype and device.

    Args:
        targets: Destination by checkpoint name; a view of a larger parameter is fine. Or all that
            :class:`WeightTargets` says.
        weights: (checkpoint name, tensor), any device.
        ignored: Regular expression of checkpoint names that are skipped, matched whole.

    Returns:
        Names of ``optional`` that were not there.

    Raises:
        CheckpointError: A tensor is missing, unexpected, twice there, of another shape, or not of a float type.
    """
    places = targets if isinstance(targets, WeightTargets) else WeightTargets(targets, ignored)
    absent = dict.fromkeys(places.targets)
    for target, tensor in _matched(places, weights, absent):
        fill_target(target, tensor)
    return frozenset(absent)


def check_weights(places: WeightTargets, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Raise what :func:`fill_weights` would raise, and copy nothing."""
    for _ in _matched(places, weights, dict.fromkeys(places.targets)):
        pass


def _matched(
    places: WeightTargets, weights: Iterable[tuple[str, Tensor]], missing: dict[str, None]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each target with its tensor, checked; what is missing or unexpected is known, and raised, at the end.

    ``missing`` holds all names at first, and at the end those of ``optional`` that were not there.
    """
    unexpected: list[str] = []
    names: tuple[str, ...]
    for name, tensor in weights:
        if name in places.targets:
            target, names = places.targets[name], (name,)
        elif name in places.fused:
            target, names = places.fused[name]
        else:
            if places.ignored is None or re.fullmatch(places.ignored, name) is None:
                unexpected.append(name)
            continue
        for one in names:
            if one not in missing:
                raise CheckpointError(f"checkpoint holds tensor {one} twice")
        _check(name, target, tensor)
        yield target, tensor
        for one in names:
            del missing[one]
    needed = [name for name in missing if name not in places.optional]
    if needed:
        raise CheckpointError(f"checkpoint lacks {_listed(needed)}")
    if unexpected:
        raise CheckpointError(f"checkpoint holds {_listed(unexpected)}, which this model has no place for")


def _check(name: str, target: Tensor, tensor: Tensor) -> None:
    if target.shape != tensor.shape:
        raise CheckpointError(f"tensor {name} must have shape {list(target.shape)}, got {list(tensor.shape)}")
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise CheckpointError(f"tensor {name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{'tensor' if len(names) == 1 else f'{len(names)} tensors'} {shown}{more}"
