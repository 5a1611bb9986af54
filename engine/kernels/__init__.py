"""A decoder's fused operations behind one interface (``base.py``), and the factory that picks an implementation."""

from __future__ import annotations

from engine.kernels.base import Activation, Kernels, Norm, Projection
from engine.kernels.torch import TorchKernels

__all__ = ["Activation", "Kernels", "Norm", "Projection", "TorchKernels", "make_kernels"]


def make_kernels(attention: str) -> Kernels:
    """The operations of the same name as an attention backend, so that one option says what a model computes with."""
    if attention == "torch":
        return TorchKernels()
    if attention == "flashinfer":
        from engine.kernels.flashinfer import FlashInferKernels

        return FlashInferKernels()
    from engine.kernels.triton import TritonKernels

    return TritonKernels()
