"""GGUF files of the Llama architecture: metadata as a ``config.json``, tensors dequantised under their usual names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError

_ROPE_DIVISORS = "rope_freqs.weight"
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUFFile:
    """An open GGUF file. Holds a memory map; tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            CheckpointError: The file is missing, no GGUF, truncated, one part of several, or not a dense Llama.
        """
        gguf = _gguf_package(path)
        self.path = path
        try:
            self._reader = gguf.GGUFReader(path)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
        except (ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path} is no GGUF file, or is truncated: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._refuse_out_of_scope()

    def metadata(self, key: str, default: Any = None) -> Any:
        """The value stored under ``key``: a number, a string, a bool or a list of them."""
        entry = self._reader.fields.get(key)
        return default if entry is None else entry.contents()

    def _refuse_out_of_scope(self) -> None:
        architecture = self.metadata("general.architecture")
        if architecture != "llama":
            raise CheckpointError(f"{self.path}: GGUF architecture must be 'llama', got {architecture!r}")
        if self.metadata("llama.expert_count", 0):
            raise CheckpointError(f"{self.path}: mixture-of-experts GGUF files are not supported")
        if self.metadata("split.count", 1) > 1:
            raise CheckpointError(f"{self.path}: split GGUF files are not supported; merge them with llama-gguf-split")

    def tokenizer_metadata(self) -> dict[str, Any]:
        """Every ``tokenizer.*`` entry."""
        return {key: self.metadata(key) for key in self._reader.fields if key.startswith("tokenizer.")}

    def config(self) -> dict[str, Any]:
        """The metadata in ``config.json``'s keys.

        Raises:
            CheckpointError: A number is missing, or the RoPE scaling is of an unknown kind.
        """
        heads = self._needed("llama.attention.head_count")
        hidden = self._needed("llama.embedding_length")
        head_dim = self.metadata("llama.attention.key_length", hidden // heads)
        if self.metadata("llama.rope.dimension_count", head_dim) != head_dim:
            raise CheckpointError(f"{self.path}: RoPE on part of a head is not supported")
        return {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": self._vocab_size(),
            "hidden_size": hidden,
            "intermediate_size": self._needed("llama.feed_forward_length"),
            "num_hidden_layers": self._needed("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.metadata("llama.attention.head_count_kv", heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._needed("llama.context_length"),
            "rms_norm_eps": self._needed("llama.attention.layer_norm_rms_epsilon"),
            "rope_parameters": self._rope_parameters(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
        }

    def _needed(self, key: str) -> Any:
        value = self.metadata(key)
        if value is None:
            raise CheckpointError(f"{self.path} lacks the metadata entry {key}")
        return value

    def _vocab_size(self) -> int:
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError(f"{self.path} lacks tensor token_embd.weight")
        return int(embedding.shape[1])

    def _rope_parameters(self) -> dict[str, Any]:
        params: dict[str, Any] = {"rope_theta": self.metadata("llama.rope.freq_base", 10_000.0)}
        scaling = self.metadata("llama.rope.scaling.type", "none")
        if _ROPE_DIVISORS in self._tensors:
            return {**params, "rope_type": "divisors", "divisors": self._dequantised(_ROPE_DIVISORS).tolist()}
        if scaling == "none":
            return {**params, "rope_type": "default"}
        factors = [self.metadata(f"llama.rope.scaling.{kind}attn_factor", 1.0) for kind in ("", "yarn_")]
        if scaling not in ("linear", "yarn") or factors != [1.0, 1.0]:
            raise CheckpointError(
                f"{self.path}: RoPE scaling {scaling!r} with attention factors {factors} is not supported"
            )
        params |= {"rope_type": scaling, "factor": self._needed("llama.rope.scaling.factor")}
        original = self.metadata("llama.rope.scaling.original_context_length")
        return params if original is None else {**params, "original_max_position_embeddings": original}

    def iter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, float32 tensor) of every tensor but the RoPE divisors, on the CPU, one at a time."""
        heads = self._needed("llama.attention.head_count")
        kv_heads = self.metadata("llama.attention.head_count_kv", heads)
        for gguf_name in self._tensors:
            if gguf_name == _ROPE_DIVISORS:
                continue
            tensor = self._dequantised(gguf_name)
            if ".attn_q." in gguf_name:
                tensor = _unpermuted(tensor, heads)
            elif ".attn_k." in gguf_name:
                tensor = _unpermuted(tensor, kv_heads)
            yield _checkpoint_name(gguf_name), tensor

    def _dequantised(self, name: str) -> Tensor:
        gguf = _gguf_package(self.path)
        tensor = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise CheckpointError(
                f"{self.path}: tensor {name} has type {kind}, which gguf cannot dequantise"
            ) from error
        return torch.tensor(values, dtype=torch.float32)  # a copy: plain float32 comes as a view of the memory map


def _gguf_package(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(f"reading {path} needs the package gguf; install it with: pip install gguf") from error
    return gguf


def _checkpoint_name(gguf_name: str) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", gguf_name)
    if layer is None or layer[2] not in _LAYER_NAMES:
        return _TOP_NAMES.get(gguf_name, gguf_name)  # an unknown name is refused where weights are filled in
    return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"


def _unpermuted(tensor: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's row order.

    It turns neighbours (2 i, 2 i + 1), so its converter interleaves each head's halves; we turn (i, i + D / 2).
    """
    rows = tensor.view(heads, tensor.shape[0] // heads // 2, 2, -1)
    return rows.transpose(1, 2).reshape(tensor.shape)
