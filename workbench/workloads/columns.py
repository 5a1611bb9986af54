"""Which columns of a table tell what, and how their cells are read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from numbers import Real
from typing import Any, NamedTuple

from workbench.workloads.rows import RowError
from workbench.workloads.workload import WorkloadError

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "iterations": 1.0}
"""What arrivals given as numbers may count, and what that is in the workload's unit."""

_USUAL_NAMES = {
    "arrival": ("timestamp", "arrival", "arrivaltime", "arrivedat", "arrivals", "time", "starttime"),
    "input": (
        "contexttokens", "requesttokens", "numprefilltokens", "inputlength", "inputtokens", "inputlen", "prompttokens",
        "promptlength", "promptlen", "numprompttokens", "numinputtokens", "input",
    ),
    "output": (
        "generatedtokens", "responsetokens", "numdecodetokens", "outputlength", "outputtokens", "outputlen",
        "completiontokens", "numoutputtokens", "output",
    ),
    "prefix": ("hashids",),
}  # fmt: skip
"""Lower case, letters and digits only, as traces in public use call them."""


class Record(NamedTuple):
    """What one row says."""

    number: int
    """Of the row."""
    arrival: float
    """In the workload's unit, from any origin; 0 without an arrival column."""
    is_moment: bool
    """``arrival`` counts from 1970."""
    input: int
    output: int
    prefix: tuple[int | str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Names of the columns that are read."""

    input: str
    output: str
    arrival: str | None = None
    prefix: str | None = None
    prefix_tokens: int = 512
    """Tokens that each id in ``prefix`` stands for."""
    unit: str | None = None
    """What arrivals given as numbers count; None: seconds."""
    is_whole_prefix: bool = False
    """Prefix ids name all of a prompt; fewer are a fault."""
    has_failures: bool = False
    """A row without output is a request that failed in the record."""

    def __post_init__(self) -> None:
        if self.unit is not None and self.unit not in UNITS:
            raise WorkloadError(f"unit must be one of {', '.join(UNITS)}; got {self.unit!r}")
        if self.prefix_tokens < 1:
            raise WorkloadError(f"prefix_tokens must be at least 1, got {self.prefix_tokens}")

    def has_failed(self, values: Mapping[str, Any]) -> bool:
        """Whether a row is a request that failed when it was recorded."""
        return self.has_failures and _read_whole(values.get(self.output)) == 0

    def read(self, number: int, values: Mapping[str, Any]) -> Record:
        """What a row says.

        Raises:
            RowError: a cell is missing, or not what it should be.
        """
        length = _length(values, self.input)
        arrival, is_moment = (0.0, False) if self.arrival is None else self._arrival(_cell(values, self.arrival))
        return Record(
            number=number,
            arrival=arrival,
            is_moment=is_moment,
            input=length,
            output=_length(values, self.output),
            prefix=() if self.prefix is None else self._prefix_ids(_cell(values, self.prefix), length),
        )

    def _arrival(self, cell: Any) -> tuple[float, bool]:
        """When, and whether that is a moment in the calendar."""
        number = _read_number(cell)
        if number is not None:
            return number * UNITS[self.unit or "s"], False
        moment = _read_moment(cell) if self.unit is None else None
        if moment is None:
            what = "a number or a timestamp" if self.unit is None else f"a number ({self.unit})"
            raise RowError(f"{self.arrival} must be {what}, got {cell!r}")
        return moment, True

    def _prefix_ids(self, cell: Any, length: int) -> tuple[int | str, ...]:
        ids = _read_ids(cell)
        if ids is None:
            raise RowError(f"{self.prefix} must be a list of ids, got {str(cell)[:40]!r}")
        blocks = -(-length // self.prefix_tokens)
        if len(ids) > blocks or (self.is_whole_prefix and len(ids) < blocks):
            raise RowError(
                f"{self.prefix} has {len(ids)} ids of {self.prefix_tokens} tokens, {length} prompt tokens have {blocks}"
            )
        return ids


def find_column(role: str, asked: str | None, columns: Sequence[str], source: str, *, is_needed: bool) -> str | None:
    """The column that was asked for, or else the one with a usual name.

    Raises:
        WorkloadError: it is not there, or stands there twice; the message lists the columns.
    """
    listed = ", ".join(columns)
    if asked is None:
        names = {_plain(name): name for name in reversed(columns)}
        asked = next((names[usual] for usual in _USUAL_NAMES[role] if usual in names), None)
        if asked is None and is_needed:
            raise WorkloadError(f"{source}: no column has a usual name for {role}; say {role}=COLUMN, one of: {listed}")
    elif asked not in columns:
        raise WorkloadError(f"{source}: there is no column {asked!r} for {role}=; the columns are: {listed}")
    if asked is not None and columns.count(asked) > 1:
        raise WorkloadError(f"{source}: column {asked!r} stands there {columns.count(asked)} times: {listed}")
    return asked


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _cell(values: Mapping[str, Any], column: str) -> Any:
    if column not in values:
        raise RowError(f"has no {column!r}, only {', '.join(map(str, values)) or 'nothing'}")
    return values[column]


def _length(values: Mapping[str, Any], column: str) -> int:
    cell = _cell(values, column)
    number = _read_whole(cell)
    if number is None or number < 1:
        raise RowError(f"{column} must be a whole number of at least 1, got {cell!r}")
    return number


def _read_whole(cell: Any) -> int | None:
    number = _read_number(cell)
    return int(number) if number is not None and number.is_integer() else None


def _read_number(cell: Any) -> float | None:
    """A finite number, also one written as text; True and False are none."""
    if isinstance(cell, bool) or not isinstance(cell, (str, Real)):
        return None
    try:
        number = float(cell)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _read_moment(cell: Any) -> float | None:
    """Seconds since 1970 of a datetime or an ISO 8601 text; without a zone it counts as UTC, so no hour is doubled."""
    try:
        moment = datetime.fromisoformat(cell.strip()) if isinstance(cell, str) else cell
        if not isinstance(moment, datetime):
            return None
        seconds = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    except ValueError:  # no date, or pandas' NaT, which is a datetime without a moment
        return None
    return seconds if math.isfinite(seconds) else None


def _read_ids(cell: Any) -> tuple[int | str, ...] | None:
    """Ids from a list, or from text that is a JSON list or ids between spaces."""
    if isinstance(cell, str):
        text = cell.strip()
        try:
            cell = json.loads(text) if text.startswith("[") else text.split()
        except ValueError:
            return None
    if hasattr(cell, "tolist"):  # an array, as a DataFrame read from Parquet holds them
        cell = cell.tolist()
    if not isinstance(cell, (list, tuple)):
        return None
    is_sound = all(isinstance(one, (int, str)) and not isinstance(one, bool) for one in cell)
    return tuple(cell) if is_sound else None
