"""Recorded choices of experts in files, see :mod:`engine.routing_replay`."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from engine.errors import ConfigError
from engine.routing_replay import Choices


def save_routing(path: str | Path, recordings: Mapping[str, Choices]) -> None:
    """Write recordings, by any names (request ids, say), to a compressed ``.npz`` file.

    Args:
        path: The file, written over; its name is taken as it is.
        recordings: ``RequestOutput.routing`` of each.
    """
    arrays: dict[str, Any] = {f"routing_{i}": one for i, one in enumerate(recordings.values())}
    with Path(path).open("wb") as file:
        np.savez_compressed(file, names=np.array(list(recordings), dtype=np.str_), **arrays)


def load_routing(path: str | Path) -> dict[str, Choices]:
    """What :func:`save_routing` wrote.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            return {str(name): file[f"routing_{i}"] for i, name in enumerate(file["names"])}
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile, zlib.error) as error:
        raise ConfigError(f"{path} cannot be read as recorded routing: {error}") from error
