"""Writes GGUF files the way llama.cpp's converter does, from a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(folder: Path, path: Path, *, kind: str = "F32", extra: dict[str, Any] | None = None) -> Path:
    """Write the Llama checkpoint in ``folder`` to ``path``, with a vocabulary of single bytes.

    Args:
        folder: One-file safetensors checkpoint.
        path: Where to.
        kind: Quantisation of the matrices, a gguf type name.
        extra: Method name of ``gguf.GGUFWriter`` to arguments, called before writing; ``tensors`` adds tensors.
    """
    import gguf
    from safetensors.numpy import load_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*map(chr, range(33, 33 + config.vocab_size - 1)), "!!"])
    writer.add_token_merges(["! !"])
    extra = dict(extra or {})
    for name, values in extra.pop("tensors", {}).items():
        writer.add_tensor(name, values)
    for method, value in extra.items():
        getattr(writer, method)(value)
    for name, weight in load_file(folder / "model.safetensors").items():
        _add(writer, gguf_name(name), permuted(name, weight, config), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, name: str, weight: NDArray[Any], kind: str) -> None:
    import gguf

    target = gguf.GGMLQuantizationType[kind]
    if weight.ndim == 1 or target == gguf.GGMLQuantizationType.F32:
        writer.add_tensor(name, weight)
    else:
        writer.add_tensor(name, gguf.quantize(weight, target), raw_dtype=target)


def gguf_name(name: str) -> str:
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, end = name.rsplit(".", 1)
    if stem in top:
        return f"{top[stem]}.{end}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.{end}"


def permuted(name: str, weight: NDArray[Any], config: Any) -> NDArray[Any]:
    """Row order of q and k for rotation of neighbours: each head's two halves, interleaved."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for part, count in heads.items():
        if f".{part}." in name:
            halves = weight.reshape(count, 2, weight.shape[0] // count // 2, *weight.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
    return weight
