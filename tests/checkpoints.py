"""Tiny Hugging Face checkpoints with random weights, written by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TINY: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
"""Sizes that keep a forward under a millisecond; every count differs, so that a swapped axis shows."""


def write_checkpoint(
    folder: Path,
    architecture: str,
    *,
    seed: int = 0,
    old_keys: bool = False,
    shards: bool = False,
    edits: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """Save a random ``architecture`` with ``TINY`` sizes and ``changes`` into ``folder``.

    Args:
        folder: Made if it is not there.
        architecture: A transformers class name.
        seed: Of the weights.
        old_keys: Rewrite ``config.json`` in the key style of transformers 4.
        shards: Split the weights over several files with an index.
        edits: Changes to the saved file, see :func:`edit_config`: transformers settles some keys when it saves.
        changes: Config keys that differ from ``TINY``.
    """
    import transformers

    values = {**TINY, **changes}
    values["rope_parameters"] = dict(values["rope_parameters"])  # transformers writes into it
    config_class = getattr(transformers, architecture.replace("ForCausalLM", "Config"))
    model = getattr(transformers, architecture)(config_class(**values))
    randomise(model, seed)
    model.save_pretrained(folder, max_shard_size="50KB" if shards else "1GB")
    if old_keys:
        rewrite_config_in_old_keys(folder / "config.json")
    return edit_config(folder, **(edits or {}))


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter, norms and biases too: transformers starts those at 1 and 0, which hides mistakes."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            parameter.copy_(0.5 * noise)
        elif parameter.dim() == 1:
            parameter.copy_(1.0 + 0.3 * noise)
        else:
            parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5)


def rewrite_config_in_old_keys(path: Path) -> None:
    """Turn ``rope_parameters`` and ``dtype`` into ``rope_theta``, ``rope_scaling`` and ``torch_dtype``."""
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type" if kind == "linear" else "rope_type": kind, **rope}
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config))


def edit_config(folder: Path, **changes: Any) -> Path:
    """Change keys of a saved ``config.json``; a value of ``...`` removes the key."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder
