"""What the benchmarks of one run share: options, loaded models, the device's bandwidth, progress bars."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from tqdm import tqdm

from engine.config import EngineConfig
from engine.models.loader import LoadedModel
from workbench.bench.floor import copy_bandwidth
from workbench.bench.options import BenchOptions
from workbench.loading import check_device, load_for


class Workplace:
    """Made once a run.

    Args:
        options: What was asked for.

    Raises:
        ConfigError: the device or the attention backend is unknown, or there is no such device here.
    """

    def __init__(self, options: BenchOptions) -> None:
        self.options = options
        self._config = self.config()
        check_device(self._config)
        self._loaded: dict[str, LoadedModel] = {}

    def config(self, **values: Any) -> EngineConfig:
        """An engine's configuration on this run's device, with its attention.

        Raises:
            ConfigError: a value does not fit.
        """
        fixed = {"device": self.options.device, "attention_backend": self.options.attention}
        return EngineConfig.from_mapping({**fixed, **values}, source="bench")

    def load(self, name: str) -> LoadedModel:
        """A model, loaded once and shared by all engines of the run.

        Raises:
            CheckpointError: it cannot be loaded.
        """
        if name not in self._loaded:
            self._loaded[name] = load_for(self._config, name)
        return self._loaded[name]

    @cached_property
    def bandwidth(self) -> float:
        """Of a copy on the device, bytes a second, read and written; measured when first asked for."""
        return copy_bandwidth(torch.device("cuda" if self.options.is_cuda else "cpu"))

    def bar(self, total: int, description: str, unit: str) -> Any:
        """A progress bar on standard error, where that is a terminal."""
        return tqdm(total=total, desc=description, unit=unit, disable=None, leave=False)
