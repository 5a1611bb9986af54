"""A decoder's fused operations behind one interface (``base.py``), and the factory that picks an implementation."""

from __future__ import annotations

from engine.kernels.base import Kernels, Norm, Projection
from engine.kernels.torch import TorchKernels

__all__ = ["Kernels", "Norm", "Projection", "TorchKernels", "make_kernels"]


def make_kernels(attention: str) -> Kernels:
    """The operations that go with an attention backend: plain torch beside the reference, fused beside the others.

    So ``attention_backend="torch"`` is the reference as a whole, and one option says what a model computes with.
    """
    if attention == "torch":
        return TorchKernels()
    from engine.kernels.triton import TritonKernels

    return TritonKernels()
