"""Choosing tokens: samplers, random streams, log-probabilities, stop strings, incremental text."""

from __future__ import annotations

from importlib.util import find_spec

from engine.errors import ConfigError
from engine.sampling.base import Sampled, Sampler, SamplingNeeds, SamplingRows

__all__ = ["Sampled", "Sampler", "SamplingNeeds", "SamplingRows", "make_sampler", "sampler_name"]


BACKENDS = ("torch", "triton")
"""Every sampler; ``torch`` is the reference and runs everywhere."""


def sampler_name(name: str, device: str) -> str:
    """The sampler that ``name`` means on ``device``; "auto" is triton on CUDA where it is installed, else torch.

    Raises:
        ConfigError: there is no such backend, or it does not run here.
    """
    if name not in ("auto", *BACKENDS):
        raise ConfigError(f"sampling_backend must be one of auto, {' or '.join(BACKENDS)}; got {name!r}")
    can_fuse = device == "cuda" and find_spec("triton") is not None
    if name == "triton" and not can_fuse:
        raise ConfigError("sampling_backend='triton' needs device='cuda' and the package triton; or use 'torch'")
    return ("triton" if can_fuse else "torch") if name == "auto" else name


def make_sampler(name: str) -> Sampler:
    """The sampler called ``name``, one of ``BACKENDS``."""
    if name == "triton":
        from engine.sampling.triton import TritonSampler

        return TritonSampler()
    from engine.sampling.torch import TorchSampler

    return TorchSampler()
