"""Which attention backend runs where, and making it."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from engine.attention.base import Attention
from engine.attention.torch import TorchAttention
from engine.errors import ConfigError

BACKENDS = ("torch", "triton", "flashinfer")
"""Every backend; ``torch`` is the reference and runs everywhere."""
_PACKAGES = {
    "triton": {"triton": "triton"},
    "flashinfer": {"triton": "triton", "flashinfer": "flashinfer-python"},
}
_HALF = (torch.bfloat16, torch.float16)


def backend_name(name: str, device: str, dtype: torch.dtype) -> str:
    """The backend that ``name`` means: ``"auto"`` is the fastest there is, which on CUDA in half precision is triton.

    Raises:
        ConfigError: ``name`` is not a backend, or does not run on this device, in this type or with these packages.
    """
    if name not in ("auto", *BACKENDS):
        raise ConfigError(f"attention_backend must be one of auto, torch or {' or '.join(BACKENDS[1:])}; got {name!r}")
    if name == "torch":
        return name
    wanted = "triton" if name == "auto" else name
    missing = _missing(wanted, device, dtype)
    if missing is None:
        return wanted
    if name == "auto":
        return "torch"
    raise ConfigError(f"attention_backend={name!r} needs {missing}, or use attention_backend='torch'")


def _missing(name: str, device: str, dtype: torch.dtype) -> str | None:
    """What keeps a backend's kernels from running; None: nothing."""
    if device != "cuda":
        return f"device='cuda', got {device!r}; ask for that"
    if dtype not in _HALF:
        return f"dtype 'bfloat16' or 'float16', got {str(dtype).removeprefix('torch.')!r}; ask for one of them"
    for package, pip_name in _PACKAGES[name].items():
        if find_spec(package) is None:
            return f"the package {package}; install it with: pip install {pip_name}"
    return None


def make_attention(name: str, device: str, dtype: torch.dtype = torch.float32) -> Attention:
    """The backend called ``name`` on ``device`` for activations of ``dtype``; see :func:`backend_name`."""
    name = backend_name(name, device, dtype)
    if name == "torch":
        return TorchAttention()
    if name == "flashinfer":
        from engine.attention.flashinfer import FlashInferAttention

        return FlashInferAttention()
    from engine.attention.triton import TritonAttention

    return TritonAttention()
