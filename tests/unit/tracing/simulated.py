"""Traces of an engine that is only arithmetic: what every length is and what waits for what is known beforehand.

Written apart from :mod:`tracing.replay`, so that the one can be checked by the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tests.unit.tracing.traces import batch, device, phase, record, wait
from tracing.records import IterationRecord, Span

Trace = tuple[list[Span], list[IterationRecord]]

HOST = {"admit": 20, "prepare": 100, "forward": 40, "sample": 40, "resolve": 80, "emit": 60}
DEVICE = {"publish": 10, "forward": 1000, "sample": 100, "fetch": 10}
ORDERS = {
    "primer": ("admit", "prepare", "forward"),
    "legacy": ("admit", "prepare", "forward", "sample", "resolve", "emit"),
    "overlap": ("prepare", "sample", "forward", "resolve", "emit"),
    "drain": ("sample", "resolve", "emit"),
}
ENQUEUED = {"forward": ("publish", "forward"), "sample": ("sample", "fetch")}
"""By phase: the first halfway through it, the second at its end."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Nanoseconds that everything takes."""

    host: Mapping[str, int] = field(default_factory=lambda: HOST)
    device: Mapping[str, int] = field(default_factory=lambda: DEVICE)
    between: int = 10
    """After each phase."""
    outside: int = 30
    launch: int = 0
    """From what device work waited for to its start."""
    wake: int = 0
    """From the end of the copy to the host's going on."""

    def with_host(self, **changes: int) -> Lengths:
        return replace(self, host={**self.host, **changes})

    def with_device(self, **changes: int) -> Lengths:
        return replace(self, device={**self.device, **changes})


def simulate(mode: str, count: int, lengths: Lengths) -> Trace:
    """``count`` decode steps, in async with a primer before and a drain behind them."""
    orders = ["legacy"] * count if mode == "legacy" else ["primer", *["overlap"] * count, "drain"]
    world = _World(lengths)
    for number, order in enumerate(orders):
        world.iterate(number, order, mode, is_last=number == len(orders) - 1)
    return world.spans, world.records


class _World:
    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths
        self.now = 1000
        self.spans: list[Span] = []
        self.records: list[IterationRecord] = []
        self.lane_free = {"compute": 0, "copy": 0}
        self.sampled = self.fetched = 0

    def iterate(self, number: int, order: str, mode: str, *, is_last: bool) -> None:
        begin = self.now
        for name in ORDERS[order]:
            self.run_phase(name, number)
            self.now += self.lengths.between
        fields = {"mode": mode, "order": order, "reason": f"why {order}", "num_active": int(not is_last)}
        self.records.append(record(number, begin, self.now, launched=batch(number), consumed=batch(number), **fields))
        self.now += self.lengths.outside

    def run_phase(self, name: str, number: int) -> None:
        begin, length = self.now, self.lengths.host[name]
        if name == "resolve":
            self.wait(number)
        first, second = ENQUEUED.get(name, (None, None))
        if first is not None and second is not None:
            self.enqueue(first, number, begin + length // 2)
            self.enqueue(second, number, begin + length)
        self.now += length
        self.spans.append(phase(name, begin, self.now, number))

    def wait(self, number: int) -> None:
        begin = self.now
        if self.fetched > begin:
            self.now = self.fetched + self.lengths.wake
        self.spans.append(wait(begin, self.now, number, "samples"))

    def enqueue(self, name: str, number: int, at: int) -> None:
        lane = "copy" if name == "fetch" else "compute"
        start = max(at, self.lane_free[lane], self.sampled if name == "fetch" else 0) + self.lengths.launch
        end = start + self.lengths.device[name]
        self.lane_free[lane] = end
        if name == "sample":
            self.sampled = end
        if name == "fetch":
            self.fetched = end
        self.spans.append(device(name, start, end, number, lane=lane, enqueued=at))
