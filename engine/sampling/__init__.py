"""Choosing tokens: samplers, random streams, log-probabilities, stop strings, incremental text."""

from __future__ import annotations

from engine.sampling.base import Sampled, Sampler, SamplingNeeds, SamplingRows

__all__ = ["Sampled", "Sampler", "SamplingNeeds", "SamplingRows", "make_sampler"]


def make_sampler(name: str) -> Sampler:
    """The sampler called ``name``; "auto" is the torch one.

    Raises:
        ConfigError: there is no such backend.
    """
    if name in ("auto", "torch"):
        from engine.sampling.torch import TorchSampler

        return TorchSampler()
    from engine.errors import ConfigError

    raise ConfigError(f"sampling_backend must be 'auto' or 'torch', got {name!r}")
