"""One run as a value: its records, what they depend on, and the tables, which are made when first asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tracing.analysis import summarise
from tracing.canonical import sorted_requests, sorted_spans
from tracing.edges import judged
from tracing.records import IterationRecord, RequestRecord, Span
from tracing.summary import Summary

if TYPE_CHECKING:
    import pyarrow as pa  # imported where a table is made, so that recording does not need it

    from tracing.critical_path import CriticalPath
    from tracing.what_if import WhatIf


@dataclass(frozen=True, kw_only=True, repr=False)
class Records:
    """What was recorded, each kind in one sequence whatever order it came in."""

    spans: Sequence[Span] = ()
    """By start."""
    iterations: Sequence[IterationRecord] = ()
    """By begin; void where device work is missing from ``spans`` (:mod:`tracing.edges`)."""
    requests: Sequence[RequestRecord] = ()
    """By arrival."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "spans", sorted_spans(self.spans))
        object.__setattr__(self, "iterations", judged(self.spans, self.iterations))
        object.__setattr__(self, "requests", sorted_requests(self.requests))

    def __repr__(self) -> str:
        counts = {"iterations": self.iterations, "requests": self.requests, "spans": self.spans}
        return f"<Records: {', '.join(f'{len(kind):,} {name}' for name, kind in counts.items())}>"


@dataclass(frozen=True, kw_only=True, repr=False)
class Trace:
    """One run. Its tables are ``pyarrow.Table`` (``.to_pandas()``); ``docs/metrics.md`` explains their columns.

    Mappings hold what JSON holds.
    """

    name: str
    """Heads its column in comparisons: "legacy", "async"."""
    records: Records
    config: Mapping[str, Any] = field(default_factory=dict)
    """The whole resolved configuration."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """Versions and hardware."""
    workload: Mapping[str, Any] = field(default_factory=dict)
    """What was asked of the engine; empty where that was no workload."""
    counters: Mapping[str, Any] = field(default_factory=dict)
    """The engine's counts, of untraced iterations too."""
    outputs: Sequence[Mapping[str, Any]] = ()
    """What each request got: ids, text, end. May be left out."""
    lost_iterations: int = 0
    """Of them no record is left, because the recorder's ring was full."""
    rank: int = 0
    device_clock_error_ns: int | None = None
    """Bound on how far the device lanes are off the host's clock; None where they are taken on it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "outputs", tuple(self.outputs))

    @cached_property
    def summary(self) -> Summary:
        """All numbers of the run."""
        return summarise(self.records.spans, self.records.iterations, self.records.requests)

    @cached_property
    def spans(self) -> pa.Table:
        """One row a span, of every category."""
        from tracing.tables import spans_table

        return spans_table(self.records.spans)

    @cached_property
    def iterations(self) -> pa.Table:
        """One row an iteration: its record, and where its time went."""
        from tracing.tables import iterations_table

        return iterations_table(self.records.spans, self.records.iterations)

    @cached_property
    def requests(self) -> pa.Table:
        """One row a request: its record, and what its caller felt."""
        from tracing.tables import requests_table

        return requests_table(self.records.requests, self.records.iterations)

    @cached_property
    def phases(self) -> pa.Table:
        """One row a phase of an iteration: host work, wait, hidden and exposed."""
        from tracing.tables import phases_table

        return phases_table(self.records.spans, self.records.iterations)

    @cached_property
    def device(self) -> pa.Table:
        """One row a piece of device work."""
        from tracing.tables import device_table

        return device_table(self.records.spans, self.records.iterations)

    @cached_property
    def bubbles(self) -> pa.Table:
        """One row a bubble."""
        from tracing.tables import bubbles_table

        return bubbles_table(self.records.spans, self.records.iterations)

    @cached_property
    def blame(self) -> pa.Table:
        """One row a bubble and cause: how much of it is whose fault."""
        from tracing.tables import blame_table

        return blame_table(self.records.spans, self.records.iterations)

    def critical_path(self, iteration: int | None = None) -> CriticalPath:
        """What determined the time of the run, or of one iteration: the chain of work that ends last.

        Args:
            iteration: Its number; None: all that was measured.

        Raises:
            ValueError: there is no timed iteration of that number.
        """
        from tracing.critical_path import iteration_path, whole_path

        spans, iterations = self.records.spans, self.records.iterations
        return whole_path(spans, iterations) if iteration is None else iteration_path(spans, iterations, iteration)

    def what_if(self, *, scale: Mapping[str, float] | None = None, add_us: Mapping[str, float] | None = None) -> WhatIf:
        """Step times if some work took another time; :func:`tracing.what_if.what_if` has the names and the rules.

        Args:
            scale: By name, how many times as long: ``{"resolve": 0.5}``.
            add_us: By name, how many microseconds longer; shorter where it is negative.

        Raises:
            ValueError: a name is unknown, ambiguous or a wait, or a factor is negative.
        """
        from tracing.what_if import what_if

        add_ns = {name: round(us * 1e3) for name, us in (add_us or {}).items()}
        return what_if(self.records.spans, self.records.iterations, scale=scale, add_ns=add_ns)

    def __repr__(self) -> str:
        return f"<Trace {self.name}: {len(self.records.iterations):,} iterations, {len(self.records.spans):,} spans>"
