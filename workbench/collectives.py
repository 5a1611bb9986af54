"""What ranks did together, number by number, side by side; ``docs/metrics.md`` (Other ranks) says when two match."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest

from engine.parallel.log import Collective, Difference, Place, first_difference
from tracing.ranks import CollectiveSpan
from workbench.bars import dummy_fill
from workbench.display import text_table

_SHOWN = 60
"""Rows that a prompt or a cell lists: around the first difference, or the newest."""
_BEFORE_ALL = -1
_PLACES: tuple[Place, ...] = ("host", "device")
_HEAD = ("number", "where", "kind", "purpose", "iteration", "bytes")
_DUMMY_FILL = dummy_fill("#DCE3EA")
_DIFFERENT = "#F6C6CE"
_CELL = "padding:1px 8px;font-size:12px;text-align:left"
_NUMBER = "padding:1px 8px;font-size:12px;text-align:right"


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """The collective of one number at one place."""

    number: int
    """From 0, of the host's or of the device's."""
    place: Place
    by_rank: tuple[Collective | None, ...]
    """What each rank did there; None: nothing any more."""

    @property
    def first(self) -> Collective:
        """Of the first rank that did something."""
        return next(one for one in self.by_rank if one is not None)

    def cell(self, rank: int) -> str:
        """What a rank did, in a word; in more where it is something else than what the first one did."""
        one = self.by_rank[rank]
        if one is None:
            return "nothing"
        if not one.is_partner_of(self.first):
            return str(one)
        return "dummy" if one.is_dummy else "✓"

    def waited_us(self, rank: int) -> float | None:
        """Microseconds from when a rank came to it until it went on; None: not known, or it has not gone on."""
        one = self.by_rank[rank]
        return None if one is None or not has_times(one) else (one.end_ns - one.begin_ns) / 1e3


@dataclass(frozen=True, slots=True, repr=False)
class CollectivesTable:
    """All collectives of some ranks. A prompt shows it as text, a notebook as a table with dummy work hatched."""

    num_ranks: int
    rows: tuple[CollectiveRow, ...]
    """By iteration; in each the host's before the device's."""
    difference: Difference | None
    """Where ranks first differ; None: nowhere."""

    @property
    def verdict(self) -> str:
        """Whether all ranks did the same, in a sentence."""
        if self.difference is not None:
            return str(self.difference)
        counts = " and ".join(f"{sum(row.place == place for row in self.rows):,} of the {place}" for place in _PLACES)
        return f"{self.num_ranks} ranks did the same, in the same order: {counts}"

    def is_different(self, row: CollectiveRow) -> bool:
        """Whether the first difference is there."""
        found = self.difference
        return found is not None and (found.place, found.number) == (row.place, row.number)

    def shown(self) -> tuple[CollectiveRow, ...]:
        """The rows that it shows of itself."""
        at = next((at for at, row in enumerate(self.rows) if self.is_different(row)), len(self.rows))
        first = max(0, min(at - _SHOWN // 2, len(self.rows) - _SHOWN))
        return self.rows[first : first + _SHOWN]

    def __str__(self) -> str:
        shown = self.shown()
        ranks = range(self.num_ranks)
        head = ("", *_HEAD, *(name for rank in ranks for name in _names(rank)))
        rows = [
            (
                "→" if self.is_different(row) else "",
                *_facts(row),
                *(text for rank in ranks for text in _cells(row, rank)),
            )
            for row in shown
        ]
        return "\n".join([self.verdict, *text_table(head, rows), *self._rest(len(shown))])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        shown = self.shown()
        head = "".join(f"<th style='{_CELL}'>{name}</th>" for name in _HEAD)
        names = [name for rank in range(self.num_ranks) for name in _names(rank)]
        head += "".join(f"<th style='{_CELL}'>{name}</th>" for name in names)
        lines = "".join(self._html_line(row) for row in shown)
        foot = "".join(
            f"<div style='font-size:11px;opacity:.8'>{escape(line)}</div>" for line in self._rest(len(shown))
        )
        return (
            f"<div style='font-family:sans-serif'><div>{escape(self.verdict)}</div>"
            f"<table style='border-collapse:collapse'><tr>{head}</tr>{lines}</table>{foot}</div>"
        )

    def _html_line(self, row: CollectiveRow) -> str:
        is_different = self.is_different(row)
        style = f" style='background:{_DIFFERENT};color:#000'" if is_different else ""
        cells = "".join(f"<td style='{_CELL}'>{escape(fact)}</td>" for fact in _facts(row))
        for rank, one in enumerate(row.by_rank):
            is_hatched = one is not None and one.is_dummy and not is_different
            fill = f";background:{_DUMMY_FILL};color:#000" if is_hatched else ""
            did, waited = _cells(row, rank)
            cells += f"<td style='{_CELL}{fill}'>{escape(did)}</td><td style='{_NUMBER}'>{waited}</td>"
        return f"<tr{style}>{cells}</tr>"

    def _rest(self, num_shown: int) -> list[str]:
        hidden = len(self.rows) - num_shown
        which = "the newest" if self.difference is None else "those around the difference"
        return [f"{which}, {num_shown:,} of {len(self.rows):,}; all are in .rows"] if hidden else []


def collectives_table(logs: Sequence[Sequence[Collective]]) -> CollectivesTable:
    """Put the ranks' accounts side by side.

    Args:
        logs: Of each rank, rank 0's first; complete, or all begun at the same iteration.
    """
    host, device = (list(_rows_of(place, logs)) for place in _PLACES)
    return CollectivesTable(len(logs), tuple(_merged(host, device)), first_difference(logs))


def has_times(one: Collective) -> bool:
    """Whether it is known when a rank came to it and when it went on."""
    return bool(one.begin_ns and one.end_ns)


def device_spans(log: Sequence[Collective]) -> list[CollectiveSpan]:
    """What a rank's device spent in collectives, where that is known: for :class:`~tracing.ranks.RankTrace`.

    Not of a rank on CUDA: there its log has the times at which the host enqueued them.
    """
    timed = (one for one in log if one.place == "device" and has_times(one))
    return [CollectiveSpan(one.begin_ns, one.end_ns, one.kind, one.purpose, one.iteration) for one in timed]


def _names(rank: int) -> tuple[str, str]:
    return f"rank {rank}", f"rank {rank} µs"


def _cells(row: CollectiveRow, rank: int) -> tuple[str, str]:
    waited_us = row.waited_us(rank)
    return row.cell(rank), "" if waited_us is None else f"{waited_us:,.1f}"


def _rows_of(place: Place, logs: Sequence[Sequence[Collective]]) -> Iterator[CollectiveRow]:
    accounts = [[one for one in log if one.place == place] for log in logs]
    for number, by_rank in enumerate(zip_longest(*accounts)):
        yield CollectiveRow(number, place, by_rank)


def _merged(host: Sequence[CollectiveRow], device: Sequence[CollectiveRow]) -> Iterator[CollectiveRow]:
    """Each in its own order; the device's of an iteration behind the host's."""
    at = 0
    for row in device:
        while at < len(host) and _when(host[at]) <= _when(row):
            yield host[at]
            at += 1
        yield row
    yield from host[at:]


def _when(row: CollectiveRow) -> int:
    """The iteration; what is agreed on at the start counts other things in its place."""
    return _BEFORE_ALL if row.first.purpose == "options" else row.first.iteration


def _facts(row: CollectiveRow) -> tuple[str, ...]:
    first = row.first
    when = "start" if _when(row) == _BEFORE_ALL else str(first.iteration)
    return str(row.number), row.place, first.kind, first.purpose, when, f"{first.num_bytes:,}"
