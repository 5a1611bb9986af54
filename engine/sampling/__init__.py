"""Choosing tokens: samplers, random streams, log-probabilities, stop strings, incremental text."""

from __future__ import annotations

from importlib.util import find_spec

from engine.errors import ConfigError
from engine.sampling.base import Sampled, Sampler, SamplingNeeds, SamplingRows

__all__ = ["Sampled", "Sampler", "SamplingNeeds", "SamplingRows", "make_sampler", "sampler_name"]


BACKENDS = ("torch", "triton", "flashinfer")
"""Every sampler; ``torch`` is the reference and runs everywhere."""
_PACKAGES = {"triton": ("triton",), "flashinfer": ("triton", "flashinfer")}


def sampler_name(name: str, device: str) -> str:
    """The sampler that ``name`` means on ``device``; "auto" is the fastest installed on CUDA, torch elsewhere.

    Raises:
        ConfigError: there is no such backend, or it does not run here.
    """
    if name not in ("auto", *BACKENDS):
        raise ConfigError(f"sampling_backend must be one of auto, {', '.join(BACKENDS)}; got {name!r}")
    if name == "auto":
        return next((n for n in ("flashinfer", "triton") if _obstacle(n, device) is None), "torch")
    obstacle = _obstacle(name, device)
    if obstacle is not None:
        raise ConfigError(f"sampling_backend={name!r} needs {obstacle}, or use sampling_backend='torch'")
    return name


def _obstacle(name: str, device: str) -> str | None:
    """What keeps a sampler from running; None: nothing."""
    packages = _PACKAGES.get(name, ())
    if packages and device != "cuda":
        return f"device='cuda', got {device!r}"
    missing = [package for package in packages if find_spec(package) is None]
    return f"the package {missing[0]}; workbench doctor tells how to install it" if missing else None


def make_sampler(name: str) -> Sampler:
    """The sampler called ``name``, one of ``BACKENDS``."""
    if name == "flashinfer":
        from engine.sampling.flashinfer import FlashInferSampler

        return FlashInferSampler()
    if name == "triton":
        from engine.sampling.triton import TritonSampler

        return TritonSampler()
    from engine.sampling.torch import TorchSampler

    return TorchSampler()
