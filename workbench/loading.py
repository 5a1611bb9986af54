"""Models and configurations for sessions, comparisons and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.models.loader import LoadedModel, load_model
from engine.parallel.distributed import shard_of, take_own_gpu
from engine.parallel.ranks import Ranks
from workbench.progress import waiting_line

DEFAULT_MODEL = "shipped"
"""What ``Session()`` loads: the model that comes with the package."""


def session_config(config: EngineConfig | None, mode: str | None, options: Mapping[str, Any]) -> EngineConfig:
    """``config`` with ``options`` and ``mode`` laid over it.

    Raises:
        ConfigError: an option is unknown or does not fit.
    """
    changes = {**options, **({} if mode is None else {"mode": mode})}
    return EngineConfig.from_mapping({**(config or EngineConfig()).to_dict(), **changes}, source="options")


def check_device(config: EngineConfig) -> None:
    """Refuse a device that is not there before anything is loaded for it.

    Raises:
        ConfigError: CUDA is asked for and cannot be had.
    """
    take_own_gpu(config)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device='cuda' needs a CUDA GPU and a CUDA build of torch; use device='cpu' or 'inline'")


def load_for(
    config: EngineConfig,
    model: str | Path | LoadedModel | None,
    *,
    ranks: Ranks | None = None,
    progress: bool = False,
) -> LoadedModel:
    """Load a model where and as ``config`` wants it; several engines may share it, for none changes it.

    Args:
        config: Where to, and with what precision.
        model: What; one that is loaded is given back as it is.
        ranks: Whose part of the experts it is to hold; None: of all there are, or with ``expert_parallel`` that of this
            process among those that ``torchrun`` started with it.
        progress: Show a line with the time it takes, in a notebook or on a terminal, if it takes longer than a second.

    Raises:
        ConfigError: the device is not there.
        CheckpointError: it cannot be loaded; for ``smollm2`` the message holds the command that installs it.
    """
    if isinstance(model, LoadedModel):
        return model
    check_device(config)
    dtype = None if config.dtype == "auto" else getattr(torch, config.dtype)
    is_cuda = config.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if is_cuda else torch.device("cpu")
    name = model or DEFAULT_MODEL
    with waiting_line(f"loading {name}", wanted=progress):
        return load_model(
            name,
            attention=config.attention_backend,
            ssm=config.ssm_backend,
            dtype=dtype,
            device=device,
            shard=shard_of(config, ranks, device),
        )
