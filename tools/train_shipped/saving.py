"""A checkpoint folder in the Hub's layout for Nemotron-H, written from a trained model and read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tools.train_shipped.architecture import Architecture
from tools.train_shipped.byte_tokens import PAD, SEPARATOR, tokenizer_config, tokenizer_json
from tools.train_shipped.model import ShippedModel

_EXACT = ("A_log", "D", "dt_bias", "gate.weight", "gate.e_score_correction_bias")
"""Kept in float32: engines compute with them in float32, and they are small."""


def checkpoint_tensors(model: ShippedModel, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """All weights by their names in a checkpoint, on the CPU; one tensor an expert."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        tensor = tensor.detach().cpu()
        wanted = torch.float32 if name.endswith(_EXACT) and dtype != torch.float64 else dtype
        if ".experts." in name:
            before, after = name.split(".experts.")
            for expert, of_one in enumerate(tensor):
                found[f"{before}.experts.{expert}.{after}.weight"] = of_one.to(wanted).contiguous()
        else:
            found[name] = tensor.to(wanted).contiguous()
    return found


def load_tensors(model: ShippedModel, tensors: dict[str, Tensor]) -> None:
    """Copy a checkpoint's tensors into the model.

    Raises:
        ValueError: One is missing, or one too many.
    """
    left = dict(tensors)
    with torch.no_grad():
        for name, target in model.state_dict().items():
            if ".experts." in name:
                before, after = name.split(".experts.")
                names = [f"{before}.experts.{expert}.{after}.weight" for expert in range(len(target))]
            else:
                names = [name]
            missing = [one for one in names if one not in left]
            if missing:
                raise ValueError(f"the checkpoint lacks {missing[0]}")
            parts = [left.pop(one) for one in names]
            target.copy_(torch.stack(parts) if ".experts." in name else parts[0])
    if left:
        raise ValueError(f"the checkpoint holds {min(left)}, which the model lacks")


def round_weights(model: ShippedModel) -> None:
    """Make the model compute with what will be stored, so that measured numbers are those of the file."""
    load_tensors(model, checkpoint_tensors(model))


def save_folder(model: ShippedModel, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write configuration, weights, tokenizer and generation defaults; creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    arch = model.arch
    config = arch.to_config() | {"torch_dtype": str(dtype).removeprefix("torch.")}
    _write(folder / "config.json", config)
    ends = {"bos_token_id": SEPARATOR, "eos_token_id": SEPARATOR, "pad_token_id": PAD}
    _write(folder / "generation_config.json", ends)
    _write(folder / "tokenizer.json", tokenizer_json())
    _write(folder / "tokenizer_config.json", tokenizer_config(arch.max_position))
    weights = folder / "model.safetensors"
    save_file(checkpoint_tensors(model, dtype), weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # the library writes for the owner alone; others install what we ship


def load_folder(folder: Path, arch: Architecture, device: torch.device) -> ShippedModel:
    """The model of a folder that :func:`save_folder` wrote, in float32 and evaluation mode.

    Raises:
        ValueError: It holds another architecture.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    differing = [key for key, value in arch.to_config().items() if key != "torch_dtype" and config.get(key) != value]
    if differing:
        raise ValueError(f"{folder / 'config.json'} differs from the architecture in {', '.join(differing)}")
    model = ShippedModel(arch)
    load_tensors(model, load_file(folder / "model.safetensors"))
    return model.to(device).eval()


def folder_bytes(folder: Path) -> int:
    """Bytes of all files in the folder."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
