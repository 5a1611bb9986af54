"""What benchmarks hand back: legs and numbers, as JSON and as lines of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.engine import Engine

IDENTITY = ("benchmark", "metric", "model", "batch", "mode", "graphs", "lengths")
"""Keys of a result in JSON that say what was measured; two with equal ones can be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One engine that was measured."""

    name: str
    """Its own among the legs of a run."""
    model: str
    mode: str
    graphs: bool
    config: Mapping[str, Any]
    """Resolved."""

    @classmethod
    def of(cls, engine: Engine, benchmark: str, extra: str = "") -> Leg:
        """The leg that ``engine`` is; ``extra`` tells it from others of the benchmark with its mode and graphs."""
        graphs = bool(engine.resolved.config.graphs)
        return cls(
            name=f"{benchmark} {engine.mode}, graphs {on_off(graphs)}{extra}",
            model=engine.resolved.model,
            mode=engine.mode,
            graphs=graphs,
            config=engine.resolved.to_dict(),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {name: getattr(self, name) for name in ("name", "model", "mode", "graphs", "config")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One number, and what it is the number of."""

    benchmark: str
    metric: str
    leg: Leg
    batch: int
    """Rows, or requests."""
    lengths: str
    """Of the work: tokens in and out, or iterations."""
    value: float | None
    unit: str
    note: str = ""
    line: str = ""
    """Its line in the benchmark's own table; empty: the common one."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further numbers of the same run."""
    is_compared: bool = True
    """Whether ``--against`` looks at it: a main value, not one that explains another."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        own = ("benchmark", "metric", "batch", "lengths", "value", "unit", "note", "details", "is_compared")
        leg = self.leg
        return {
            "leg": leg.name,
            "model": leg.model,
            "mode": leg.mode,
            "graphs": leg.graphs,
            **{name: getattr(self, name) for name in own},
        }

    def __str__(self) -> str:
        what = f"{self.metric}, {self.batch} rows, {self.leg.mode}"
        shown = "no samples" if self.value is None else f"{self.value:,.4g}"
        return self.line or f"{self.benchmark:<9} {what:<46} {shown:>12} {self.unit:<4} {self.note}".rstrip()


def on_off(flag: bool) -> str:
    """As flags and tables say it."""
    return "on" if flag else "off"


def cell(value: float | None, width: int, digits: int) -> str:
    """A number to the right in ``width`` columns; a dash without samples."""
    return f"{'-' if value is None else format(value, f',.{digits}f'):>{width}}"


def phases(host_us: Mapping[str, float]) -> str:
    """Host work by phase, on one line."""
    return ", ".join(f"{name} {value:.0f}" for name, value in host_us.items()) or "-"


def percent(share: float | None) -> float | None:
    """A share as tables show it."""
    return None if share is None else 100 * share
