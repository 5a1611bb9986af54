"""Rotary position embedding: frequencies with their scalings, and the rotation.

Letters: T tokens, H heads (any kind), D head size, R rotated dimensions of a head, its first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "divisors")
"""Scalings computed here. ``divisors`` is ours: GGUF files store Llama 3's scaling as one divisor a frequency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """How positions become angles."""

    theta: float = 10_000.0
    """Base of the wavelengths."""
    rope_type: str = "default"
    """One of ``ROPE_TYPES``."""
    factor: float = 1.0
    """How many times longer sequences got by scaling."""
    original_max_position: int = 0
    """Length before scaling; llama3 and yarn measure wavelengths against it."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths above original / this are stretched by ``factor``."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths below original / this stay."""
    beta_fast: float = 32.0
    """yarn: frequencies that turn more often than this over the original length stay."""
    beta_slow: float = 1.0
    """yarn: frequencies that turn less often than this are stretched by ``factor``."""
    truncate: bool = True
    """yarn: widen the ramp between the two to whole dimensions."""
    attention_factor: float = 1.0
    """Factor on cos and sin."""
    partial_factor: float = 1.0
    """R / D."""
    divisors: tuple[float, ...] = ()
    """One divisor for each of the R / 2 frequencies."""

    @property
    def length_factor(self) -> float:
        """How many times ``max_position_embeddings`` the checkpoint reaches; llama3 files count it in already."""
        return self.factor if self.rope_type in ("linear", "yarn") else 1.0


def rope_from_checkpoint(
    config: Mapping[str, Any],
    max_position: int,
    *,
    default_theta: float = 10_000.0,
    default_partial: float | None = None,
) -> RopeConfig:
    """Read either key style: ``rope_parameters``, or ``rope_scaling`` with a top-level ``rope_theta``.

    Args:
        config: Parsed ``config.json``.
        max_position: Its ``max_position_embeddings``.
        default_theta: Of a file that names none.
        default_partial: The same of ``partial_rotary_factor``; None: an architecture that turns whole heads.

    Raises:
        CheckpointError: The scaling is of a kind this engine does not compute, or lacks a number.
    """
    params = _flat_parameters(config)
    rope_type = params.get("rope_type") or params.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise CheckpointError(
            f"config.json: RoPE scaling {rope_type!r} is not supported; known: {', '.join(ROPE_TYPES)}"
        )
    partial = _first(
        params.get("partial_rotary_factor"), config.get("partial_rotary_factor"), _first(default_partial, 1.0)
    )
    if default_partial is None and partial != 1.0:
        raise CheckpointError(f"config.json: partial_rotary_factor must be 1 for this architecture, got {partial!r}")
    original = _first(
        config.get("original_max_position_embeddings"), params.get("original_max_position_embeddings"), max_position
    )
    base = RopeConfig(
        theta=float(_first(params.get("rope_theta"), config.get("rope_theta"), default_theta)),
        rope_type=rope_type,
        partial_factor=float(partial),
        original_max_position=int(original),
    )
    if rope_type == "linear":
        return replace(base, factor=_positive(params, "factor"))
    if rope_type == "llama3":
        return _with_llama3(base, params)
    if rope_type == "yarn":
        return _with_yarn(base, params, max_position / original)
    return replace(base, divisors=tuple(params.get("divisors", ())))


def _flat_parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    params = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = [value for value in params.values() if isinstance(value, Mapping)]
    if not nested:
        return params
    if any(value != nested[0] for value in nested):
        raise CheckpointError("config.json: rope_parameters that differ between layer types are not supported")
    return nested[0]


def _with_llama3(base: RopeConfig, params: Mapping[str, Any]) -> RopeConfig:
    low, high = _positive(params, "low_freq_factor"), _positive(params, "high_freq_factor")
    if low >= high:
        raise CheckpointError(f"config.json: low_freq_factor ({low}) must be below high_freq_factor ({high})")
    return replace(base, factor=_positive(params, "factor"), low_freq_factor=low, high_freq_factor=high)


def _with_yarn(base: RopeConfig, params: Mapping[str, Any], implied_factor: float) -> RopeConfig:
    factor = implied_factor if params.get("factor") is None else _positive(params, "factor")
    mscale, mscale_all_dim = params.get("mscale"), params.get("mscale_all_dim")
    if params.get("attention_factor") is not None:
        attention_factor = float(params["attention_factor"])
    elif mscale and mscale_all_dim:
        attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    else:
        attention_factor = _yarn_mscale(factor, 1.0)
    return replace(
        base,
        factor=factor,
        beta_fast=float(params.get("beta_fast") or 32.0),
        beta_slow=float(params.get("beta_slow") or 1.0),
        truncate=bool(_first(params.get("truncate"), True)),
        attention_factor=attention_factor,
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _first(*values: Any) -> Any:
    """The first value that is not None: a key may be present and null."""
    return next(value for value in values if value is not None)


def _positive(params: Mapping[str, Any], name: str) -> float:
    value = params.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise CheckpointError(f"config.json: RoPE scaling needs a positive {name}, got {value!r}")
    return float(value)


def inverse_frequencies(rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[R / 2] angles that one position adds, in ``dtype``."""
    size = int(head_dim * rope.partial_factor)
    if size < 2 or size % 2:
        raise CheckpointError(f"config.json: {rope.partial_factor} of head_dim {head_dim} must be even for RoPE")
    exponent = torch.arange(0, size, 2, dtype=dtype, device=device) / size
    frequencies = 1.0 / rope.theta**exponent
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope)
    if rope.rope_type == "yarn":
        return _yarn(frequencies, rope, size)
    if rope.rope_type == "divisors":
        if len(rope.divisors) != size // 2:
            raise CheckpointError(f"RoPE needs {size // 2} frequency divisors, the file has {len(rope.divisors)}")
        return frequencies / torch.tensor(rope.divisors, dtype=dtype, device=device)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths stretched, short ones kept, a linear blend between."""
    turns = rope.original_max_position * frequencies / (2 * math.pi)
    keep = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * keep + frequencies / rope.factor * (1.0 - keep)


def _yarn(frequencies: Tensor, rope: RopeConfig, size: int) -> Tensor:
    """A ramp over dimensions, from those that turn ``beta_fast`` times to those that turn ``beta_slow`` times."""

    def dimension(turns: float) -> float:
        return size * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    index = torch.arange(size // 2, dtype=frequencies.dtype, device=frequencies.device)
    stretch = ((index - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / rope.factor * stretch + frequencies * (1.0 - stretch)


def rotation_tables(positions_T: Tensor, frequencies: Tensor, attention_factor: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each [T, 1, R / 2], in the dtype of ``frequencies``."""
    angles = positions_T[:, None, None].to(frequencies.dtype) * frequencies
    return angles.cos() * attention_factor, angles.sin() * attention_factor


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + R / 2) of every head, whose other dimensions stay.

    Computed in the tables' dtype, returned in that of ``x_THD``.
    """
    size = 2 * cos.shape[-1]
    first, second = x_THD[..., :size].to(cos.dtype).chunk(2, dim=-1)
    turned = ((first * cos - second * sin).to(x_THD.dtype), (second * cos + first * sin).to(x_THD.dtype))
    return torch.cat((*turned, x_THD[..., size:]), dim=-1)
