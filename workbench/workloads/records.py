"""From rows of a table to a workload; rows that are not usable are counted and told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from engine.request import SamplingParams
from workbench.clock import Unit
from workbench.workloads.columns import Columns, Record
from workbench.workloads.prompts import SyntheticPrompt
from workbench.workloads.rows import Row, RowError
from workbench.workloads.shaping import LengthCutter, Shaping
from workbench.workloads.workload import RequestSpec, Workload, WorkloadError

_TOLD = 3
"""Rows that a note tells one by one."""


@dataclass(slots=True)
class LeftOut:
    """Rows that become no request."""

    num_rows: int = 0
    """All that were read, good ones too."""
    malformed: list[str] = field(default_factory=list)
    """Place and fault."""
    failed: list[str] = field(default_factory=list)
    """Places of requests that had failed when they were recorded."""

    @property
    def notes(self) -> list[str]:
        """One line a kind."""
        found = []
        if self.malformed:
            faults = _first(self.malformed, "; ")
            found.append(f"{len(self.malformed)} of {self.num_rows} rows are malformed and left out: {faults}")
        if self.failed:
            places = _first(self.failed, ", ")
            found.append(f"{len(self.failed)} of {self.num_rows} rows are failed requests and left out: {places}")
        return found


def _first(items: list[str], between: str) -> str:
    """The first few, and how many more."""
    more = [f"and {len(items) - _TOLD} more"] if len(items) > _TOLD else []
    return between.join(items[:_TOLD] + more)


def make_workload(
    rows: Iterable[Row],
    columns: Columns,
    *,
    name: str,
    source: str,
    vocab_size: int,
    shaping: Shaping | None = None,
    params: SamplingParams | None = None,
) -> Workload:
    """See :meth:`workbench.workloads.Workload.from_records`.

    Args:
        rows: In the table's order; read no further than needed.
        columns: Which are read.
        name: What the workload was made from.
        source: What messages call the table.
        vocab_size: Ids that prompts may hold.
        shaping: What is done to them.
        params: Of every request.
    """
    shaping = shaping or Shaping()
    params = params or SamplingParams(temperature=0.0, ignore_eos=True)
    block_tokens = _block_tokens(columns, shaping)
    if columns.arrival is None and shaping.changes_arrivals:
        raise WorkloadError(f"{source}: scale= and spread= need arrivals, and no column tells them")
    records, left_out = read_records(rows, columns, shaping)
    if not records:
        raise WorkloadError(_why_none(source, left_out, shaping))
    cutter = LengthCutter(shaping)
    specs = [
        _spec(record, arrival, cutter, block_tokens, vocab_size, shaping.seed, params)
        for record, arrival in zip(records, shaping.arrivals(records), strict=True)
    ]
    short = []
    if shaping.requests is not None and len(records) < shaping.requests:
        short = [f"{source} ends after {len(records)} of the {shaping.requests} requests asked for"]
    return Workload(
        name=name,
        requests=tuple(sorted(specs, key=lambda spec: spec.arrival)),
        unit=_unit(columns, shaping),
        concurrency=shaping.concurrency,
        notes=(*left_out.notes, *short, *cutter.notes),
    )


def read_records(rows: Iterable[Row], columns: Columns, shaping: Shaping) -> tuple[list[Record], LeftOut]:
    """The rows that are usable, no more than are wanted, and those passed over on the way."""
    left_out = LeftOut()
    records: list[Record] = []
    for row in islice(rows, shaping.first, None):
        left_out.num_rows += 1
        try:
            record = _read(row, columns, records)
        except RowError as fault:
            left_out.malformed.append(f"{row.where}: {fault}")
            continue
        if record is None:
            left_out.failed.append(row.where)
            continue
        records.append(record)
        if len(records) == shaping.requests:
            break
    return records, left_out


def _read(row: Row, columns: Columns, before: Sequence[Record]) -> Record | None:
    """The row's record; None: the request failed when it was recorded.

    Raises:
        RowError: the row is not usable.
    """
    if row.values is None:
        raise RowError(row.fault)
    if columns.has_failed(row.values):
        return None
    record = columns.read(row.number, row.values)
    if before and record.is_moment != before[0].is_moment:
        kinds = ("a number", "a timestamp") if before[0].is_moment else ("a timestamp", "a number")
        raise RowError(f"{columns.arrival} is {kinds[0]} where rows before have {kinds[1]}")
    return record


def _why_none(source: str, left_out: LeftOut, shaping: Shaping) -> str:
    behind = f" behind the first {shaping.first}" if shaping.first else ""
    if not left_out.num_rows:
        return f"{source} holds no row{behind}"
    return f"{source} holds no request{behind}: " + "; ".join(left_out.notes)


def _block_tokens(columns: Columns, shaping: Shaping) -> int:
    tokens, rest = divmod(columns.prefix_tokens, shaping.shrink)
    if columns.prefix is not None and rest:
        raise WorkloadError(
            f"shrink={shaping.shrink} must divide the {columns.prefix_tokens} tokens of a prefix id, or shared "
            "prefixes would not stay shared"
        )
    return max(1, tokens)


def _unit(columns: Columns, shaping: Shaping) -> Unit:
    if shaping.rate is not None:
        return "s"
    if shaping.concurrency is not None or columns.arrival is None or columns.unit == "iterations":
        return "iterations"
    return "s"


def _spec(
    record: Record,
    arrival: float,
    cutter: LengthCutter,
    block_tokens: int,
    vocab_size: int,
    seed: int,
    params: SamplingParams,
) -> RequestSpec:
    lengths = cutter.fit(record.input, record.output)
    prompt = SyntheticPrompt(
        length=lengths.input,
        own=record.number,
        vocab_size=vocab_size,
        seed=seed,
        blocks=record.prefix,
        block_tokens=block_tokens,
    )
    sampling = params.replace(max_tokens=lengths.output, seed=(params.seed or 0) + record.number)
    return RequestSpec(prompt=prompt, params=sampling, arrival=arrival)
