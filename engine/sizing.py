"""Settling automatic options for one model and device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from engine.attention import backend_name
from engine.config import EngineConfig, ResolvedConfig
from engine.device import Device
from engine.errors import ConfigError
from engine.graphs import graph_sizes
from engine.models.base import DraftingModel, LayerState, Model, SlotState
from engine.models.loader import LoadedModel
from engine.sampling import sampler_name
from engine.step_function import bytes_per_slot, bytes_per_token, has_slots, layer_states, state_options


def resolve_config(config: EngineConfig, loaded: LoadedModel, device: Device) -> ResolvedConfig:
    """Settle every automatic value.

    Raises:
        ConfigError: a value does not fit the model.
    """
    model = loaded.model
    _check_drafts(config, loaded)
    config = _with_rewind(config, model)
    keeps_routing = config.routing_replay is not None
    layout = layer_states(model, config.speculative_tokens, state_options(config), keeps_routing=keeps_routing)
    dtype = _dtype(config, loaded, device)
    longest = model.max_position if config.chunked_prefill else min(model.max_position, config.max_batch_tokens)
    limit = config.max_sequence_length or longest
    if limit > model.max_position:
        raise ConfigError(
            f"max_sequence_length={limit} exceeds what {loaded.name} was made for ({model.max_position}); lower it"
        )
    if limit > config.max_batch_tokens and not config.chunked_prefill:
        raise ConfigError(
            f"max_sequence_length={limit} exceeds max_batch_tokens={config.max_batch_tokens}: without chunked prefill "
            "a sequence must fit one forward; set chunked_prefill, raise max_batch_tokens or lower max_sequence_length"
        )
    num_snapshots = _num_snapshots(config, layout)
    return ResolvedConfig(
        config=_with_graphs(config, device),
        dtype=dtype,
        num_blocks=_checked_blocks(_num_blocks(config, layout, limit, device), num_snapshots, config, layout, device),
        num_snapshots=num_snapshots,
        max_sequence_length=limit,
        vocab_size=loaded.vocab_size,
        # Some checkpoints write -1 for "none": no id, and no index of a logits row either.
        eos_token_ids=tuple(i for i in loaded.eos_token_ids if 0 <= i < loaded.vocab_size),
        sampling_backend=sampler_name(config.sampling_backend, device.torch_device.type),
        attention_backend=backend_name(config.attention_backend, device.torch_device.type, getattr(torch, dtype)),
        model=loaded.name,
        state_dtype=_state_dtype(layout),
    )


def _with_graphs(config: EngineConfig, device: Device) -> EngineConfig:
    """``graphs="auto"`` settled: every launch outside of a graph costs a GPU's host dear, so there it is not none."""
    if config.graphs != "auto":
        return config
    if device.kind != "cuda" or (config.has_ranks and config.expert_dispatch == "all_to_all"):
        return config.replace(graphs=None)
    if config.graph_all_prefills:  # prompts want graphs as well
        return config.replace(graphs=-1)
    width = config.decode_width
    rows = tuple(row * width for row in graph_sizes(config.max_requests, -1, "linear"))
    return config.replace(graphs=rows, graph_non_decode=False)


def _with_rewind(config: EngineConfig, model: Model) -> EngineConfig:
    """``state_rewind="auto"`` settled: replay, where the model's backend can; it moves and takes less memory."""
    if config.state_rewind != "auto" or not config.speculative_tokens or not has_slots(model.cache_layout()):
        return config
    replayed = config.replace(state_rewind="replayed")
    try:
        layer_states(model, 0, state_options(replayed))
    except ConfigError:
        return config.replace(state_rewind="stored")
    return replayed


def _dtype(config: EngineConfig, loaded: LoadedModel, device: Device) -> str:
    """The dtype of the loaded weights, which is what is computed in, whatever was asked for when they were loaded."""
    made_for = next((p.dtype for p in _parameters(loaded.model) if p.is_floating_point()), None)
    if made_for is None:  # a model without weights
        return config.dtype if config.dtype != "auto" else ("bfloat16" if device.kind == "cuda" else "float32")
    name = str(made_for).removeprefix("torch.")
    if config.dtype not in ("auto", name):
        raise ConfigError(
            f"dtype={config.dtype}, but {loaded.name} was loaded in {name}; load it again with that dtype"
        )
    return name


def _parameters(model: Model) -> Iterator[torch.Tensor]:
    return model.parameters() if isinstance(model, torch.nn.Module) else iter(())


def _check_drafts(config: EngineConfig, loaded: LoadedModel) -> None:
    wanted, model = config.speculative_tokens, loaded.model
    has = model.num_draft_heads if isinstance(model, DraftingModel) else 0
    if wanted > has:
        raise ConfigError(
            f"speculative_tokens={wanted}: {loaded.name} has {has or 'no'} draft head{'s' * (has != 1)}; "
            + (f"use at most {has}" if has else "use 0, or a model with MTP layers")
        )


def _num_blocks(config: EngineConfig, layout: Sequence[LayerState], limit: int, device: Device) -> int:
    if config.num_blocks is not None:
        return config.num_blocks
    block_bytes = config.block_size * bytes_per_token(layout)
    wanted = config.max_requests * -(-(limit + 2 * config.speculative_tokens) // config.block_size)
    if block_bytes == 0:  # nothing attends: blocks only count tokens
        return wanted
    if config.kv_cache_gb is None:
        return max(1, min(wanted, _unasked_bytes(device) // block_bytes))
    affordable = int(config.kv_cache_gb * (1 << 30)) // block_bytes
    if affordable < 1:
        raise ConfigError(
            f"kv_cache_gb={config.kv_cache_gb} holds no block of {block_bytes} bytes; raise it or lower block_size"
        )
    return affordable


def _num_snapshots(config: EngineConfig, layout: Sequence[LayerState]) -> int:
    slot_bytes = bytes_per_slot(layout)
    if not slot_bytes or not config.prefix_caching:
        return 0
    if config.mamba_cache_gb is None:
        return config.max_requests
    affordable = int(config.mamba_cache_gb * (1 << 30)) // slot_bytes
    if affordable < 1 and config.mamba_cache_gb:
        raise ConfigError(f"mamba_cache_gb={config.mamba_cache_gb} holds no state of {slot_bytes} bytes; raise it")
    return affordable


def _state_dtype(layout: Sequence[LayerState]) -> str:
    """Of the largest tensor of a slot: what sums up over a sequence."""
    parts = [
        part
        for state in layout
        if isinstance(state, SlotState)
        for part in zip(state.shapes, state.dtypes, strict=True)
    ]
    if not parts:
        return ""
    _, dtype = max(parts, key=lambda part: torch.Size(part[0]).numel())
    return str(dtype).removeprefix("torch.")


def _unasked_bytes(device: Device) -> int:
    """What a pool may take that nobody gave a size: the CPU's memory is others' too, a GPU's is there to be used."""
    return (device.memory_bytes() - device.used_bytes()) // 2 if device.kind == "cuda" else 1 << 30


def _checked_blocks(
    num_blocks: int, num_snapshots: int, config: EngineConfig, layout: Sequence[LayerState], device: Device
) -> int:
    """``num_blocks`` if a machine like this could hold them at all; what else is in its memory is not looked at."""
    num_slots = config.max_requests * config.states_per_row + num_snapshots + 1
    sizes = (num_blocks + 1) * config.block_size * bytes_per_token(layout), num_slots * bytes_per_slot(layout)
    if sum(sizes) > device.memory_bytes():
        states = f" and {num_slots} state slots {sizes[1] / 2**30:,.1f} GiB" if sizes[1] else ""
        pool = f"a KV pool of {num_blocks} blocks of {config.block_size} tokens takes {sizes[0] / 2**30:,.1f} GiB"
        raise ConfigError(
            f"{pool}{states}, there are {device.memory_bytes() / 2**30:,.1f}; "
            "lower num_blocks, kv_cache_gb, block_size or max_requests"
        )
    return num_blocks
