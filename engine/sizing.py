"""Settling automatic options for one model and device."""

from __future__ import annotations

import torch

from engine.attention import backend_name
from engine.config import EngineConfig, ResolvedConfig
from engine.device import Device
from engine.errors import ConfigError
from engine.models.base import Model
from engine.models.loader import LoadedModel
from engine.sampling import sampler_name


def resolve_config(config: EngineConfig, loaded: LoadedModel, device: Device) -> ResolvedConfig:
    """Settle every automatic value.

    Raises:
        ConfigError: a value does not fit the model.
    """
    model = loaded.model
    dtype = config.dtype if config.dtype != "auto" else ("bfloat16" if device.kind == "cuda" else "float32")
    limit = config.max_sequence_length or min(model.max_position, config.max_batch_tokens)
    if limit > model.max_position:
        raise ConfigError(
            f"max_sequence_length={limit} exceeds what {loaded.name} was made for ({model.max_position}); lower it"
        )
    if limit > config.max_batch_tokens:
        raise ConfigError(
            f"max_sequence_length={limit} exceeds max_batch_tokens={config.max_batch_tokens}: without chunked prefill "
            "a sequence must fit one forward; raise max_batch_tokens or lower max_sequence_length"
        )
    return ResolvedConfig(
        config=config,
        dtype=dtype,
        num_blocks=_num_blocks(config, model, limit),
        max_sequence_length=limit,
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        sampling_backend=sampler_name(config.sampling_backend, device.torch_device.type),
        attention_backend=backend_name(config.attention_backend, device.torch_device.type, getattr(torch, dtype)),
        model=loaded.name,
    )


def _num_blocks(config: EngineConfig, model: Model, limit: int) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    block_bytes = config.block_size * sum(state.bytes_per_token() for state in model.cache_layout())
    wanted = config.max_requests * -(-limit // config.block_size)
    if config.kv_cache_gb is None:
        return max(1, min(wanted, (1 << 30) // block_bytes))
    affordable = int(config.kv_cache_gb * (1 << 30)) // block_bytes
    if affordable < 1:
        raise ConfigError(
            f"kv_cache_gb={config.kv_cache_gb} holds no block of {block_bytes} bytes; raise it or lower block_size"
        )
    return affordable
