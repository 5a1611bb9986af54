"""Which state-space backend runs where, and making it."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from engine.errors import ConfigError
from engine.ssm.base import StateSpace
from engine.ssm.torch import TorchStateSpace

BACKENDS = ("torch", "triton", "mamba_ssm")
"""Every backend; ``torch`` is the reference and runs everywhere."""
_PACKAGES = {"triton": {"triton": "triton"}, "mamba_ssm": {"triton": "triton", "mamba_ssm": "mamba-ssm"}}


def ssm_name(name: str, device_type: str, dtype: torch.dtype) -> str:
    """The backend that ``name`` means: ``"auto"`` is triton on CUDA in any type but float64, else torch.

    Raises:
        ConfigError: ``name`` is not a backend, or does not run on this device, in this type or with these packages.
    """
    if name not in ("auto", *BACKENDS):
        raise ConfigError(f"ssm backend must be one of auto, torch or {' or '.join(BACKENDS[1:])}; got {name!r}")
    if name == "torch":
        return name
    wanted = "triton" if name == "auto" else name
    missing = _missing(wanted, device_type, dtype)
    if missing is None:
        return wanted
    if name == "auto":
        return "torch"
    raise ConfigError(f"ssm backend {name!r} needs {missing}, or use 'torch'")


def _missing(name: str, device_type: str, dtype: torch.dtype) -> str | None:
    """What keeps a backend's kernels from running; None: nothing."""
    if device_type != "cuda":
        return f"device='cuda', got {device_type!r}; ask for that"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return (
            f"dtype 'bfloat16', 'float16' or 'float32', got {str(dtype).removeprefix('torch.')!r}; ask for one of them"
        )
    for package, pip_name in _PACKAGES[name].items():
        if find_spec(package) is None:
            return f"the package {package}; install it with: pip install {pip_name}"
    return None


def make_ssm(name: str, device_type: str, dtype: torch.dtype) -> StateSpace:
    """The backend called ``name`` on ``device_type`` for activations of ``dtype``; see :func:`ssm_name`."""
    name = ssm_name(name, device_type, dtype)
    if name == "torch":
        return TorchStateSpace()
    if name == "mamba_ssm":
        from engine.ssm.mamba_ssm import MambaSsmStateSpace

        return MambaSsmStateSpace()
    from engine.ssm.triton import TritonStateSpace

    return TritonStateSpace()
