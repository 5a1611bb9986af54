"""Reading a Hugging Face folder: ``config.json``, safetensors in one file or in shards, end-of-sequence ids."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from engine.errors import CheckpointError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; CheckpointError names the file if it is missing, not JSON, or no object.

    transformers 5 writes infinity as ``{"__float__": "Infinity"}``; it is read as a float.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=_read_float)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _read_float(value: dict[str, Any]) -> Any:
    return float(value["__float__"]) if set(value) == {"__float__"} else value


def iter_folder_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor in the folder's safetensors, on the CPU, one at a time.

    Raises:
        CheckpointError: No safetensors (pickled weights are refused), or a file is missing or damaged.
    """
    for path in weight_files(folder):
        yield from _iter_file(path)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, in name order; see :func:`iter_folder_weights`."""
    if (folder / _INDEX).is_file():
        index = read_json(folder / _INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise CheckpointError(f"{folder / _INDEX} must hold a weight_map of tensor name to file name")
        files = [folder / name for name in sorted(set(index.values()))]
    else:
        files = [folder / _SINGLE]
    for path in files:
        if not path.is_file():
            raise CheckpointError(_missing_weights(folder, path))
    return files


def _missing_weights(folder: Path, path: Path) -> str:
    pickled = sorted(name.name for pattern in _PICKLED for name in folder.glob(pattern))
    if pickled and path.name == _SINGLE:
        return (
            f"{folder / pickled[0]}: pickled weights are refused because reading them can run code; "
            "save the model as safetensors (transformers: model.save_pretrained(folder))"
        )
    return f"weights file {path} is missing"


def _iter_file(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged or truncated: {error}") from error


def eos_ids(*sources: Mapping[str, Any]) -> tuple[int, ...]:
    """``eos_token_id`` of each source, one or several, in order and without repeats."""
    found: dict[int, None] = {}
    for source in sources:
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, (list, tuple)) else [value]:
            if token_id is None:
                continue
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise CheckpointError(f"eos_token_id must be an id or a list of ids, got {value!r}")
            found[token_id] = None
    return tuple(found)


_DAMAGE = (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError, UnicodeError, RuntimeError)


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """Turn what a parser trips over in a damaged file into a CheckpointError that names ``what`` was read."""
    try:
        yield
    except CheckpointError:
        raise
    except _DAMAGE as error:
        raise CheckpointError(f"{what} is damaged ({type(error).__name__}: {error})") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the tokenizers library's way to fail
            raise
        raise CheckpointError(f"{what} is damaged ({error})") from error
