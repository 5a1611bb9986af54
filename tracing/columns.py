"""Spans as columns, for whoever reads many at once: an object a span takes longer than all that is done with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tracing.records import Category, Span

CATEGORIES = tuple(Category)
"""A span's ``category`` is a place in it."""

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanColumns:
    """One element a span, in the order of :meth:`tracing.recorder.Recorder.spans`. Copies: the caller's to keep."""

    names: Sequence[str]
    """What ``name``, ``lane`` and ``phase`` are places in. It grows, and what is there stays where it is."""
    name: Column
    category: Column
    lane: Column
    start_ns: Column
    end_ns: Column
    iteration: Column
    depth: Column
    phase: Column
    """-1: outside every phase."""
    enqueued_ns: Column
    """Of device work; of anything else it means nothing."""
    args: Mapping[int, Mapping[str, Any]]
    """Of instants that have some, by place."""
    values: Mapping[int, float]
    """Of counters, by place."""

    def span(self, place: int) -> Span:
        """One of them."""
        category, phase = CATEGORIES[self.category[place]], int(self.phase[place])
        return Span(
            name=self.names[self.name[place]],
            category=category,
            lane=self.names[self.lane[place]],
            start_ns=int(self.start_ns[place]),
            end_ns=int(self.end_ns[place]),
            iteration=int(self.iteration[place]),
            depth=int(self.depth[place]),
            phase=None if phase < 0 else self.names[phase],
            enqueued_ns=int(self.enqueued_ns[place]) if category is Category.DEVICE else None,
            value=self.values.get(place),
            args=self.args.get(place, {}),
        )

    def __len__(self) -> int:
        return len(self.name)

    @property
    def is_device(self) -> NDArray[np.bool_]:
        """Whether a device did it, of each."""
        is_device: NDArray[np.bool_] = self.category == CATEGORIES.index(Category.DEVICE)
        return is_device

    @property
    def recorded_ns(self) -> Column:
        """When the recorder made the record of each: device work when it was enqueued, others at their end."""
        return np.where(self.is_device, self.enqueued_ns, self.end_ns)
