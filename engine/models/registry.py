"""Which class runs which architecture of a checkpoint's ``config.json``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from engine.attention.base import Attention
from engine.errors import CheckpointError, ConfigError
from engine.models.base import Model


class LoadableModel(Model, Protocol):
    """A :class:`~engine.models.base.Model` that can be built from a checkpoint."""

    @classmethod
    def from_checkpoint_config(
        cls, config: Mapping[str, Any], *, attention: Attention, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Build with uninitialised weights from a parsed ``config.json``; CheckpointError if it cannot be."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy (name, tensor) pairs in; CheckpointError names what is missing, unexpected or misshapen."""
        ...


_SHIPPED: dict[str, tuple[str, str]] = {
    "LlamaForCausalLM": ("engine.models.decoder", "DecoderModel"),
    "MistralForCausalLM": ("engine.models.decoder", "DecoderModel"),
    "Qwen2ForCausalLM": ("engine.models.decoder", "DecoderModel"),
    "Qwen3ForCausalLM": ("engine.models.decoder", "DecoderModel"),
    "MiMoForCausalLM": ("engine.models.decoder", "DecoderModel"),
    "MixtralForCausalLM": ("engine.models.decoder", "DecoderModel"),
    "Qwen2MoeForCausalLM": ("engine.models.decoder", "DecoderModel"),
    "Qwen3MoeForCausalLM": ("engine.models.decoder", "DecoderModel"),
    "Glm4MoeForCausalLM": ("engine.models.decoder", "DecoderModel"),
    "Mamba2ForCausalLM": ("engine.models.hybrid", "HybridModel"),
    "BambaForCausalLM": ("engine.models.hybrid", "HybridModel"),
    "NemotronHForCausalLM": ("engine.models.hybrid", "HybridModel"),
    "GraniteMoeHybridForCausalLM": ("engine.models.hybrid", "HybridModel"),
}
"""Module and class by architecture; imported when first asked for."""

_registered: dict[str, type[LoadableModel]] = {}

_NEEDED = ("from_checkpoint_config", "load_weights", "cache_layout", "forward")


def register_model(name: str, cls: type[Any]) -> None:
    """Run checkpoints whose ``architectures`` names ``name`` with ``cls``.

    Registering a name again replaces its class, so a notebook cell can be run twice; a shipped name can be replaced.

    Args:
        name: The entry of ``architectures`` in ``config.json``.
        cls: A ``torch.nn.Module`` with the members of :class:`LoadableModel`; the README has an example.

    Raises:
        ConfigError: ``cls`` lacks one of them.
    """
    missing = [member for member in _NEEDED if not callable(getattr(cls, member, None))]
    if missing:
        raise ConfigError(
            f"register_model({name!r}): {cls!r} must define {', '.join(missing)}; see README, 'Your model'"
        )
    _registered[name] = cls


def known_architectures() -> list[str]:
    """Names that :func:`model_class` finds, sorted."""
    return sorted({*_SHIPPED, *_registered})


def model_class(architecture: str) -> type[LoadableModel]:
    """The class for ``architecture``.

    Raises:
        CheckpointError: It is neither shipped nor registered.
    """
    if architecture in _registered:
        return _registered[architecture]
    if architecture in _SHIPPED:
        module, name = _SHIPPED[architecture]
        found: type[LoadableModel] = getattr(import_module(module), name)
        return found
    raise CheckpointError(
        f"architecture {architecture!r} is not known; known: {', '.join(known_architectures())}. "
        "To run your own, call engine.register_model(name, cls); README, 'Your model', has a 30-line example"
    )
