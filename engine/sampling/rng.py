"""Counter-based random numbers: a hash of (seed, output position, kind of draw), the same bits on every device.

There is no state to keep, save or share, so a request's stream cannot depend on its row, batch, mode,
preemption, graph replay or rank. The hash is the finaliser of splitmix64 in wrapping 64-bit arithmetic:
for one seed and kind the stream is splitmix64 itself, started at a state hashed from both.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's increment: odd, 2**64 / golden ratio
_MULTIPLY_1 = 0xBF58476D1CE4E5B9
_MULTIPLY_2 = 0x94D049BB133111EB
_ENGINE_SALT = 0xD1B54A32D192ED03  # keeps derived seeds apart from any draw
_UNIT = 2.0**-53


class DrawKind(IntEnum):
    """What a uniform is for; each kind has a stream of its own. Values are fixed: they are part of every seed."""

    TARGET = 1
    """The token of an output position."""
    DRAFT = 2
    """A draft for it."""
    ACCEPT = 3
    """Whether the draft is accepted."""


def to_int64(bits: int) -> int:
    """The signed value with the same low 64 bits, fit for an int64 tensor or numpy column."""
    bits &= _MASK
    return bits - (1 << 64) if bits >> 63 else bits


def _mix_host(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLY_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLY_2) & _MASK
    return value ^ (value >> 31)


def _shift_right(value: Tensor, count: int) -> Tensor:
    """Logical shift; torch's shift of int64 drags the sign along."""
    return (value >> count) & ((1 << (64 - count)) - 1)


def _mix(value: Tensor) -> Tensor:
    value = (value ^ _shift_right(value, 30)) * to_int64(_MULTIPLY_1)
    value = (value ^ _shift_right(value, 27)) * to_int64(_MULTIPLY_2)
    return value ^ _shift_right(value, 31)


def uniform(seed: Tensor, position: Tensor, kind: DrawKind) -> Tensor:
    """One uniform an entry; enqueues work only.

    Args:
        seed: Any shape, int64, the bits of a uint64.
        position: Same shape, int64, output position from 0.
        kind: What the number is for.

    Returns:
        Same shape, float64 in [0, 1), a multiple of 2**-53; equal to :func:`uniform_host` bit for bit.
    """
    start = _mix(seed + to_int64(kind * _GOLDEN))
    bits = _mix(start + (position + 1) * to_int64(_GOLDEN))
    return _shift_right(bits, 11).to(torch.float64) * _UNIT


def uniform_host(seed: int, position: int, kind: DrawKind) -> float:
    """The same number without torch; ``seed`` may be any int, its low 64 bits count."""
    start = _mix_host(seed + kind * _GOLDEN)
    return (_mix_host(start + (position + 1) * _GOLDEN) >> 11) * _UNIT


def derive_seed(engine_seed: int, number: int) -> int:
    """The seed of request ``number`` that brought none, in [0, 2**63)."""
    return _mix_host(_mix_host(engine_seed + _ENGINE_SALT) + (number + 1) * _GOLDEN) >> 1
