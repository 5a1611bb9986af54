"""Staged inputs: named fields laid out in one slab, so that a step needs one host-to-device copy.

The device side is one tensor with a fixed address, which graphs read. The host side exists twice: while the copy of
one step may still be queued, the next step is staged in the other (I30). Each half carries the event of its last copy.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device import Device, Event, Part
from engine.layout import Layout

_ALIGN = 16
_POISON = 0x7F
_NUMPY: dict[torch.dtype, type[np.generic]] = {
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.float32: np.float32,
}


@dataclass(frozen=True, slots=True)
class Field:
    """One named array of a slab."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Its size without alignment."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


class Half(Protocol):
    """What exists twice on the host, so that one can be written while a copy out of the other is still queued."""

    copied: Event | None
    """Behind the last copy out of it."""


H = TypeVar("H", bound=Half)


class Halves(Generic[H]):
    """Two of them, taken in turns (I30)."""

    def __init__(self, first: H, second: H) -> None:
        self.both = (first, second)
        self._next = 0
        self.num_waits = 0
        """How often the host had to wait for a copy before writing; 0 in a healthy run (I33)."""

    def acquire(self) -> H:
        """The half to write next; blocks only if the last copy out of it has not run yet."""
        half = self.both[self._next]
        self._next ^= 1
        if half.copied is not None and not half.copied.done():
            self.num_waits += 1
            half.copied.wait()
        half.copied = None
        return half


class HostSlab:
    """One host half: ``fields[name]`` is a numpy view that may be written once :meth:`acquire` has returned."""

    def __init__(
        self, device: Device, layout: list[tuple[Field, int]], target: Tensor, parts: Sequence[Part] = ()
    ) -> None:
        self.tensor = device.host(target.numel(), torch.uint8)
        raw = self.tensor.numpy()
        self.fields: dict[str, NDArray[Any]] = {
            field.name: raw[offset : offset + field.num_bytes].view(_NUMPY[field.dtype]).reshape(field.shape)
            for field, offset in layout
        }
        self.upload = device.bind_copy(target, self.tensor, parts)
        """Copies this half to the device, or of its parts what is counted; call inside launched work, then record
        :attr:`copied`."""
        self.copied: Event | None = None
        """Behind the last copy out of this half."""
        self.layout: Layout | None = None
        """The decode batch its fields still describe, if they do."""


class Slab:
    """A device tensor of named fields with two host halves.

    Args:
        device: Where it lies.
        fields: What it holds.
        parts: How many fields each part has, if a copy is to take less than everything. A part of equal int64 fields is
            taken by their beginnings; any other as if it were one field of 8-byte words.
    """

    def __init__(self, device: Device, fields: list[Field], parts: Sequence[int] = ()) -> None:
        layout: list[tuple[Field, int]] = []
        num_bytes = 0
        for field in fields:
            layout.append((field, num_bytes))
            num_bytes += _aligned(field.num_bytes)
        self.device_tensor = device.zeros(num_bytes, torch.uint8)
        self.device_fields: dict[str, Tensor] = {
            field.name: self.device_tensor[offset : offset + field.num_bytes].view(field.dtype).view(field.shape)
            for field, offset in layout
        }
        assert sum(parts) in (0, len(fields)), "parts hold all fields"
        ends = list(itertools.accumulate(parts))
        self.parts = [_part(layout[end - size : end]) for size, end in zip(parts, ends, strict=True)]
        """What a copy counts the elements of."""
        self._halves = Halves(*(HostSlab(device, layout, self.device_tensor, self.parts) for _ in range(2)))

    @property
    def num_waits(self) -> int:
        """How often the host had to wait for a copy before staging; 0 in a healthy run (I33)."""
        return self._halves.num_waits

    def acquire(self) -> HostSlab:
        """The half to stage the next step in; blocks only if its last copy has not run yet."""
        return self._halves.acquire()

    def poison(self) -> None:
        """Debug mode, in launched work: what the next copy leaves out is no index of anything."""
        self.device_tensor.fill_(_POISON)

    def fill_idle(self, value: int) -> None:
        """Debug mode: overwrite every half that no queued copy reads, integers by ``value`` and floats by NaN.

        Only for moments at which no half is staged and waiting to be launched.
        """
        for half in self._halves.both:
            if half.copied is None or half.copied.done():
                half.layout = None
                for column in half.fields.values():
                    column.fill(np.nan if column.dtype == np.float32 else value)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def _part(layout: Sequence[tuple[Field, int]]) -> Part:
    (first, begin), (last, last_begin) = layout[0], layout[-1]
    if {(field.shape, field.dtype) for field, _ in layout} == {(first.shape, torch.int64)}:
        return Part(begin, _aligned(first.num_bytes), len(layout))
    return Part(begin, last_begin + _aligned(last.num_bytes) - begin, 1)
