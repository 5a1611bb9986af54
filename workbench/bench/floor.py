"""The least time of a decode step: the bytes it must read over the bandwidth of a copy. docs/metrics.md defines it."""

from __future__ import annotations

import time
from statistics import median

import torch
from torch import Tensor, nn

from engine.models.base import PLAIN_STATES, Model, StateOptions
from engine.models.moe import MoE
from engine.step_function import bytes_per_slot, bytes_per_token, layer_states

_COPIES, _SAMPLES = 4, 9
_BUFFER_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
"""Far above every cache."""


def copy_bandwidth(device: torch.device, *, buffer_bytes: int | None = None) -> float:
    """Bytes a second of a copy inside the device's memory, read and written; median. Waits for the device."""
    size = buffer_bytes or _BUFFER_BYTES[device.type]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    _copy_seconds(target, source)  # the first writing of a page is slower
    return 2 * size / median(_copy_seconds(target, source) for _ in range(_SAMPLES))


def _copy_seconds(target: Tensor, source: Tensor) -> float:
    """Of one copy; on CUDA between two events around several, so that launching one costs nothing."""
    if target.device.type != "cuda":
        begin = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - begin
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    for _ in range(_COPIES):
        target.copy_(source)
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after)) / 1e3 / _COPIES


def weight_bytes(model: Model) -> int:
    """Bytes of the weights that every decode step reads: all but an embedding that is not also the head.

    Such a one is read one row a token. Two matrices with a row for each id are embedding and head, a single one is
    both.
    """
    named = model.named_parameters() if isinstance(model, nn.Module) else iter(())
    parameters = [parameter for name, parameter in named if not name.startswith("heads.")]  # those only draft
    vocabulary = [one for one in parameters if one.dim() == 2 and one.shape[0] == model.vocab_size]
    looked_up = _bytes(vocabulary[0]) if len(vocabulary) > 1 else 0
    return sum(map(_bytes, parameters)) - looked_up


def unread_expert_bytes(model: Model, tokens: float) -> float:
    """Bytes of the routed experts that a step of so many tokens is expected to leave alone, if each is chosen alike.

    A token misses an expert with the chance 1 - k/X, and all tokens do with that to the power of their number.
    """
    if not isinstance(model, nn.Module):
        return 0.0
    unread = 0.0
    for name, layer in model.named_modules():
        if isinstance(layer, MoE) and not name.startswith("heads."):
            missed = (1 - layer.config.top_k / layer.config.num_experts) ** tokens
            unread += missed * (_bytes(layer.experts.up) + _bytes(layer.experts.down))
    return unread


def kv_bytes(model: Model, tokens: float) -> float:
    """Cache bytes of so many tokens, all layers; a sliding window is not taken off."""
    return tokens * bytes_per_token(model.cache_layout())


def state_bytes(model: Model, rows: float, states: StateOptions = PLAIN_STATES) -> float:
    """Bytes of recurrent state that a decode step of so many rows reads and writes, once each, if kept so."""
    return 2 * rows * bytes_per_slot(layer_states(model, 0, states))


def floor_ms(model: Model, *, rows: int, cached: float, bandwidth: float, states: StateOptions = PLAIN_STATES) -> float:
    """Milliseconds of a decode step of ``rows`` rows with ``cached`` tokens each, if reading were all.

    Args:
        model: Weights and cache layout.
        rows: Requests in the step.
        cached: Tokens whose keys and values a row reads, on average.
        bandwidth: Bytes a second.
        states: How recurrent states are kept.
    """
    read = weight_bytes(model) - unread_expert_bytes(model, rows)
    read += kv_bytes(model, rows * cached) + state_bytes(model, rows, states)
    return read / bandwidth * 1e3


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
