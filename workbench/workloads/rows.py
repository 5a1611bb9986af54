"""Rows of tables: CSV files, files of JSON lines, and what Python code hands over, each with its place for messages."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from workbench.workloads.workload import WorkloadError


class RowError(ValueError):
    """A row cannot become a request; the text says why."""


class Row(NamedTuple):
    """One row of a table."""

    number: int
    """From 0, heads and blank lines not counted: names the row's own tokens, whatever excerpt it is taken in."""
    where: str
    """For messages: ``line 12``."""
    values: Mapping[str, Any] | None
    """By column; None: the row has a fault."""
    fault: str = ""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Tell what keeps a file from being read in one line.

    Raises:
        WorkloadError: it cannot be opened, is no UTF-8, or is no CSV.
    """
    try:
        yield
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise WorkloadError(f"workload file {path} cannot be read: {error}") from error


def csv_columns(path: Path) -> list[str]:
    """The names in a CSV file's head.

    Raises:
        WorkloadError: it cannot be read, or is empty.
    """
    with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        head = next(csv.reader(file), [])
    if not head:
        raise WorkloadError(f"workload file {path} is empty; expected a head with column names and rows")
    return [name.strip() for name in head]


def csv_rows(path: Path) -> Iterator[Row]:
    """A CSV file's rows; blank lines are none."""
    columns = csv_columns(path)
    with reading(path), path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.reader(file, strict=True)
        next(table)
        for number, cells in enumerate(filter(None, table)):
            where = f"line {table.line_num}"
            if len(cells) == len(columns):
                yield Row(number, where, dict(zip(columns, cells, strict=True)))
            else:
                yield Row(number, where, None, f"has {len(cells)} columns where the head has {len(columns)}")


def json_rows(path: Path) -> Iterator[Row]:
    """A file of one JSON object a line; blank lines are none."""
    with reading(path), path.open(encoding="utf-8-sig") as file:
        lines = ((place, line) for place, line in enumerate(file, start=1) if line.strip())
        for number, (place, line) in enumerate(lines):
            yield _json_row(number, f"line {place}", line)


def _json_row(number: int, where: str, line: str) -> Row:
    try:
        values = json.loads(line)
    except ValueError as error:
        return Row(number, where, None, f"is not a JSON object: {error}")
    return _mapping_row(number, where, values, "a JSON object")


def record_rows(rows: Any) -> Iterator[Row]:
    """Rows of mappings, of a pandas or polars DataFrame, or of a pyarrow Table; none of the three is imported.

    Raises:
        WorkloadError: it is nothing of the kind.
    """
    for number, values in enumerate(_records(rows)):
        yield _mapping_row(number, f"row {number}", values, "a mapping of column names to values")


def _records(rows: Any) -> Iterable[Any]:
    if hasattr(rows, "to_pylist"):  # pyarrow
        records: Sequence[Any] = rows.to_pylist()
        return records
    if hasattr(rows, "to_dicts"):  # polars
        records = rows.to_dicts()
        return records
    if hasattr(rows, "to_dict") and hasattr(rows, "columns"):  # pandas
        records = rows.to_dict("records")
        return records
    if isinstance(rows, (str, bytes, Mapping)) or not isinstance(rows, Iterable):
        raise WorkloadError(
            "rows must be mappings of column names to values, a DataFrame or a pyarrow Table, "
            f"got {type(rows).__name__}"
        )
    return rows


def _mapping_row(number: int, where: str, values: Any, expected: str) -> Row:
    if isinstance(values, Mapping):
        return Row(number, where, values)
    return Row(number, where, None, f"is a {type(values).__name__}; expected {expected}")
