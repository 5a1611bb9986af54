"""Two files of benchmarks, cell by cell: ``workbench bench --against FILE``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.bench.options import BenchError
from workbench.bench.results import IDENTITY, on_off

Identity = tuple[Any, ...]
"""Values of :data:`~workbench.bench.results.IDENTITY`."""

_NOT_A_CONDITION = "commit"
"""The one thing in the environment that is meant to differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchFile:
    """What one run wrote, as far as comparing needs it."""

    path: Path
    commit: str | None
    conditions: Mapping[str, Any]
    """Hardware, versions, device, and whether it was quick."""
    configs: Mapping[str, Mapping[str, Any]]
    """Of each leg, by name."""
    cells: Mapping[Identity, tuple[float | None, str]]
    """Value and unit of every result that is compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRatio:
    """One cell that both files have."""

    identity: Identity
    before: float
    after: float
    unit: str

    @property
    def ratio(self) -> float:
        """After over before; infinite where only the later one is not 0."""
        if self.before:
            return self.after / self.before
        return 1.0 if not self.after else math.inf

    def fits(self, tolerance: float) -> bool:
        """Whether the ratio is no further from 1 than that."""
        return abs(self.ratio - 1) <= tolerance

    def line(self, tolerance: float) -> str:
        """As the table shows it."""
        verdict = "" if self.fits(tolerance) else "outside"
        values = f"{self.before:>12,.4g} {self.after:>12,.4g} {self.unit:<4} {self.ratio:>7.3f}"
        return f"{_name(self.identity):<76} {values}  {verdict}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """A later run beside an earlier one."""

    before: BenchFile
    ratios: tuple[CellRatio, ...]
    only_before: tuple[Identity, ...]
    only_after: tuple[Identity, ...]
    warnings: tuple[str, ...]
    tolerance: float

    @property
    def num_outside(self) -> int:
        """Cells whose ratio lies outside the tolerance."""
        return sum(not one.fits(self.tolerance) for one in self.ratios)

    def lines(self) -> list[str]:
        """The table with what goes before and after it."""
        path = self.before.path
        return [
            f"against {path} (commit {self.before.commit or 'unknown'}): before, after, ratio",
            *(f"warning: {warning}" for warning in self.warnings),
            *(one.line(self.tolerance) for one in self.ratios),
            *(f"only in {path}: {_name(identity)}" for identity in self.only_before),
            *(f"only in this run: {_name(identity)}" for identity in self.only_after),
            f"{self.num_outside} of {len(self.ratios)} cells outside 1 ± {self.tolerance:g}",
        ]


def read_bench_file(path: Path) -> BenchFile:
    """Read what ``workbench bench`` wrote.

    Raises:
        BenchError: there is no such file, or it is another's.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:  # neither UTF-8 nor JSON
        raise BenchError(f"{path} is not a file of workbench bench: it is no JSON") from error
    try:
        return _parse(path, document)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BenchError(f"{path} is not a file of workbench bench, or of another version of it") from error


def _parse(path: Path, document: Any) -> BenchFile:
    if document["command"] != "bench":
        raise ValueError(document["command"])
    environment = dict(document["environment"])
    commit = environment.pop(_NOT_A_CONDITION, None)
    return BenchFile(
        path=path,
        commit=commit,
        conditions={**environment, "device": document["device"], "quick": document["quick"]},
        configs={leg["name"]: dict(leg["config"]) for leg in document["legs"]},
        cells={
            tuple(result[key] for key in IDENTITY): (_number(result["value"]), str(result["unit"]))
            for result in document["results"]
            if result["is_compared"]
        },
    )


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def compare_files(before: BenchFile, after: BenchFile, tolerance: float) -> Against:
    """Cell by cell, in the order of the later run; a cell without samples counts as not there.

    Raises:
        BenchError: they have no cell in common.
    """
    then = {identity: value for identity, (value, _) in before.cells.items() if value is not None}
    now = {identity: (value, unit) for identity, (value, unit) in after.cells.items() if value is not None}
    ratios = tuple(
        CellRatio(identity=identity, before=then[identity], after=value, unit=unit)
        for identity, (value, unit) in now.items()
        if identity in then
    )
    if not ratios:
        raise BenchError(f"nothing to compare: no cell of {before.path} was measured in this run ({after.path})")
    return Against(
        before=before,
        ratios=ratios,
        only_before=tuple(identity for identity in then if identity not in now),
        only_after=tuple(identity for identity in now if identity not in then),
        warnings=(*_differing("", before.conditions, after.conditions), *_differing_legs(before, after)),
        tolerance=tolerance,
    )


def _differing_legs(before: BenchFile, after: BenchFile) -> Sequence[str]:
    shared = [name for name in after.configs if name in before.configs]
    return [line for name in shared for line in _differing(f"leg {name}: ", before.configs[name], after.configs[name])]


def _differing(prefix: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Sequence[str]:
    """A line for all keys whose values differ, none where they do not."""
    names = [name for name in dict.fromkeys((*before, *after)) if before.get(name) != after.get(name)]
    told = ", ".join(f"{name} was {before.get(name)!r} and is {after.get(name)!r}" for name in names)
    return [f"{prefix}{told}"] if told else []


def _name(identity: Identity) -> str:
    benchmark, metric, model, batch, mode, graphs, lengths = identity
    return f"{benchmark} {metric}: {model}, {batch} rows, {lengths}, {mode}, graphs {on_off(graphs)}"
