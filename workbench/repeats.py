"""Numbers of legs that ran several times in turn: median, spread, and the ratio to the baseline, paired by repeat.

A pair is the same repeat of a leg and of the baseline, which ran within a minute of each other: what changes slowly
(clocks, heat, other jobs) falls out of its ratio. The interval around the median ratio assumes nothing of how the
ratios are spread, only that repeats do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from math import comb
from statistics import median
from typing import Any

from tracing.comparison import Row, comparison_rows, format_value
from tracing.summary import Summary
from tracing.text_table import aligned

WANTED_CONFIDENCE = 0.9
"""Intervals are as narrow as they can be and still cover the median this often; five repeats are the fewest that do."""
SAME = "≈"
"""Marks a ratio whose interval holds 1."""


@dataclass(frozen=True, slots=True)
class MedianInterval:
    """Two of the samples, between which the median lies."""

    low: float
    high: float
    confidence: float
    """How often such an interval covers the median, from 0 to 1."""

    def holds(self, value: float) -> bool:
        """Whether ``value`` is inside or on an end."""
        return self.low <= value <= self.high


def median_interval(samples: Sequence[float]) -> MedianInterval | None:
    """Where the median of what ``samples`` were drawn from lies, whatever that is like; None for fewer than two.

    The *k*-th smallest and the *k*-th largest of *n* samples miss the median if fewer than *k* samples lie on one side
    of it: ``1 − 2·P(Binomial(n, ½) < k)`` is the confidence. *k* is the largest that keeps :data:`WANTED_CONFIDENCE`,
    or 1 where none does: the interval of two samples covers the median half of the time, that of five 93.75 %.
    """
    count = len(samples)
    if count < 2:
        return None
    depth, confidence = 1, _confidence(count, 1)
    while (deeper := _confidence(count, depth + 1)) >= WANTED_CONFIDENCE:
        depth, confidence = depth + 1, deeper
    rising = sorted(samples)
    return MedianInterval(rising[depth - 1], rising[count - depth], confidence)


def _confidence(count: int, depth: int) -> float:
    missed: int = sum(comb(count, below) for below in range(depth))
    return 1.0 - 2.0 * missed / 2.0**count


@dataclass(frozen=True, slots=True)
class LegNumbers:
    """One metric of one leg."""

    samples: tuple[float | None, ...]
    """One a repeat; None: no samples."""

    @property
    def known(self) -> tuple[float, ...]:
        """The samples that there are."""
        return tuple(value for value in self.samples if value is not None)

    @property
    def median(self) -> float | None:
        """Over repeats."""
        return median(self.known) if self.known else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """Smallest and largest; None for fewer than two."""
        return (min(self.known), max(self.known)) if len(self.known) > 1 else None


class Lack(Enum):
    """Why a pair has no ratio."""

    LEG = "{leg} has no sample"
    BASELINE = "{baseline} has no sample"
    BOTH = "{baseline} and {leg} have no sample"
    ZERO = "{baseline} is 0"


@dataclass(frozen=True, slots=True)
class DroppedPair:
    """A repeat of which there is no ratio."""

    repeat: int
    """Counts from 1."""
    lack: Lack


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """A leg over the baseline."""

    median: float
    """Of the ratios of each repeat."""
    interval: MedianInterval | None
    """None for a single pair, which says nothing of noise."""
    num_pairs: int = 1
    """Repeats that both numbers are taken from."""
    dropped: tuple[DroppedPair, ...] = ()
    """Repeats that gave no pair."""

    @property
    def is_difference_seen(self) -> bool | None:
        """Whether the interval lies on one side of 1; None without an interval."""
        return None if self.interval is None else not self.interval.holds(1.0)

    @property
    def verdict(self) -> str:
        """In words."""
        if self.interval is None:
            return "one run each: no interval"
        found = f"at {100 * self.interval.confidence:.0f} %"
        return f"no difference seen {found}" if self.interval.holds(1.0) else f"different {found}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatRow:
    """One metric over all legs and repeats."""

    section: str
    label: str
    unit: str
    better: str
    """``lower``, ``higher``, or empty where neither is good by itself."""
    legs: tuple[LegNumbers, ...]
    ratios: tuple[PairedRatio | None, ...]
    """One a leg; None for the baseline, for shares, and for what the legs do not share."""

    def to_dict(self, names: Sequence[str]) -> dict[str, Any]:
        """Plain values for JSON, by leg."""
        pairs = zip(names, self.legs, self.ratios, strict=True)
        return {
            "section": self.section,
            "label": self.label,
            "unit": self.unit,
            "better": self.better,
            "legs": {name: _leg_dict(numbers, ratio) for name, numbers, ratio in pairs},
        }


def _leg_dict(numbers: LegNumbers, ratio: PairedRatio | None) -> dict[str, Any]:
    told: dict[str, Any] = {
        "samples": list(numbers.samples),
        "median": numbers.median,
        "spread": numbers.spread,
        "ratio": None,
    }
    if ratio is not None:
        told["ratio"] = {
            **asdict(ratio),
            "dropped": [{"repeat": one.repeat, "lack": one.lack.name.lower()} for one in ratio.dropped],
            "is_difference_seen": ratio.is_difference_seen,
        }
    return told


def repeat_rows(summaries: Sequence[Sequence[Summary]]) -> list[RepeatRow]:
    """Every metric of ``docs/metrics.md``.

    Args:
        summaries: One a leg and repeat; the first leg is the baseline.

    Raises:
        ValueError: there is none, or legs have different numbers of repeats.
    """
    counts = {len(repeats) for repeats in summaries}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"every leg needs the same number of repeats, at least one, got {sorted(counts)}")
    (repeats,) = counts
    rows = comparison_rows([summary for leg in summaries for summary in leg])
    return [_repeat_row(row, repeats) for row in rows]


def _repeat_row(row: Row, repeats: int) -> RepeatRow:
    legs = [row.values[first : first + repeats] for first in range(0, len(row.values), repeats)]
    return RepeatRow(
        section=row.section,
        label=row.label,
        unit=row.unit,
        better=row.better,
        legs=tuple(map(LegNumbers, legs)),
        ratios=(None, *(_paired(row, legs[0], leg) for leg in legs[1:])),
    )


def _paired(row: Row, baseline: Sequence[float | None], leg: Sequence[float | None]) -> PairedRatio | None:
    pairs = [Row(row.section, row.label, row.unit, pair, row.better).ratio for pair in zip(baseline, leg, strict=True)]
    ratios = [ratio for ratio in pairs if ratio is not None]
    if not ratios:
        return None
    # Of repeats that lack a sample none is taken in its place: the interval says how much those that are left can tell.
    dropped = [
        DroppedPair(repeat, _lack(*values))
        for repeat, (ratio, *values) in enumerate(zip(pairs, baseline, leg, strict=True), start=1)
        if ratio is None
    ]
    return PairedRatio(median(ratios), median_interval(ratios), len(ratios), tuple(dropped))


def _lack(baseline: float | None, leg: float | None) -> Lack:
    if baseline is None:
        return Lack.BOTH if leg is None else Lack.BASELINE
    return Lack.LEG if leg is None else Lack.ZERO


def table_head(names: Sequence[str], repeats: int) -> list[str]:
    """Heads of the columns that :func:`table_cells` fills."""
    many = repeats > 1
    head = ["", "unit", *(text for name in names for text in ((name, "min–max") if many else (name,)))]
    for name in names[1:]:
        head += [f"{name}/{names[0]}", "interval"] if many else [f"{name}/{names[0]}"]
    return head


def table_cells(row: RepeatRow, repeats: int) -> list[str]:
    """A row as text; a ratio whose interval holds 1 is marked."""
    many, cells = repeats > 1, [row.label, row.unit]
    for numbers in row.legs:
        cells.append(format_value(numbers.median, row.unit))
        if many:
            cells.append(_range_text(numbers.spread, row.unit))
    for ratio in row.ratios[1:]:
        cells += ratio_cells(ratio) if many else ratio_cells(ratio)[:1]
    return cells


def ratio_cells(ratio: PairedRatio | None) -> list[str]:
    """Ratio and interval, with the number of pairs where some were dropped."""
    if ratio is None:
        return ["", ""]
    mark = f" {SAME}" if ratio.is_difference_seen is False else ""
    interval = "" if ratio.interval is None else f"{ratio.interval.low:.2f}–{ratio.interval.high:.2f}"
    pairs = f"({ratio.num_pairs} of {ratio.num_pairs + len(ratio.dropped)})" if ratio.dropped else ""
    return [f"{ratio.median:.2f}x{mark}", " ".join(filter(None, (interval, pairs)))]


def _range_text(spread: tuple[float, float] | None, unit: str) -> str:
    return "" if spread is None else "–".join(format_value(end, unit) for end in spread)


def format_repeats(names: Sequence[str], rows: Sequence[RepeatRow], repeats: int) -> str:
    """A table for a terminal: of each leg median and spread, then each leg over the first."""
    cells = [table_head(names, repeats), *(table_cells(row, repeats) for row in rows)]
    head, *rest = aligned([[f"  {first}" if first else "", *others] for first, *others in cells])
    lines, section = [head], None
    for row, line in zip(rows, rest, strict=True):
        if row.section != section:
            lines += ["", row.section]
            section = row.section
        lines.append(line)
    return "\n".join(lines)


def format_few(names: Sequence[str], rows: Sequence[RepeatRow]) -> str:
    """A narrow table: of each leg the median, then each leg over the first with the interval."""
    cells = [["", "unit", *names, *(f"{name}/{names[0]}" for name in names[1:])]]
    for row in rows:
        medians = [format_value(numbers.median, row.unit) for numbers in row.legs]
        cells.append([row.label, row.unit, *medians, *(" ".join(filter(None, ratio_cells(r))) for r in row.ratios[1:])])
    return "\n".join(aligned(cells))


def repeat_notes(names: Sequence[str], repeats: int) -> list[str]:
    """What must be known to read the ratios; none for a single leg."""
    if len(names) < 2:
        return []
    if repeats == 1:
        return [
            f"One run a leg: ratios to {names[0]} have no interval, and what is noise cannot be told. Take 5 repeats."
        ]
    interval = median_interval(range(repeats))
    assert interval is not None
    covers = 100 * interval.confidence
    notes = [
        f"{repeats} repeats, paired: a ratio is the median over repeats of a leg over {names[0]}; its interval covers "
        f"the true median {covers:.1f} % of the time, whatever the noise. {SAME}: it holds 1, no difference seen."
    ]
    if interval.confidence < WANTED_CONFIDENCE:
        return [*notes, f"{covers:.1f} % is little: 5 repeats give 93.8 %."]
    return [
        *notes,
        f"Each row stands for itself: of 100 without a difference some {100 - covers:.0f} show one by chance.",
    ]


def dropped_notes(names: Sequence[str], rows: Sequence[RepeatRow]) -> list[str]:
    """Which ratios are of fewer pairs than there are repeats, and why; a sentence for all rows that lack the same."""
    found: dict[tuple[str, int, tuple[DroppedPair, ...]], list[str]] = {}
    for row in rows:
        for name, ratio in zip(names, row.ratios, strict=True):
            if ratio is not None and ratio.dropped:
                found.setdefault((name, ratio.num_pairs, ratio.dropped), []).append(row.label)
    return [
        f"{name}/{names[0]} of {', '.join(dict.fromkeys(labels))}: {count} of {count + len(dropped)} pairs; "
        f"{_dropped_text(dropped, leg=name, baseline=names[0])}."
        for (name, count, dropped), labels in found.items()
    ]


def _dropped_text(dropped: Sequence[DroppedPair], **legs: str) -> str:
    repeats: dict[Lack, list[str]] = {}
    for one in dropped:
        repeats.setdefault(one.lack, []).append(str(one.repeat))
    return ", ".join(
        f"{lack.value.format(**legs)} in repeat{'' if len(numbers) == 1 else 's'} {' and '.join(numbers)}"
        for lack, numbers in repeats.items()
    )


def find_row(label: str, rows: Sequence[RepeatRow]) -> RepeatRow:
    """The row called ``label``; where several are, by ``section: label``.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = [row for row in rows if label in (row.label, f"{row.section}: {row.label}")]
    if not found:
        known = ", ".join(dict.fromkeys(row.label for row in rows))
        raise ValueError(f"there is no metric {label!r} in this comparison; there are {known}")
    if len(found) > 1:
        choices = ", ".join(repr(f"{row.section}: {row.label}") for row in found)
        raise ValueError(f"several metrics are called {label!r}; say one of {choices}")
    return found[0]


def shared(values: Mapping[str, Any]) -> str:
    """One value where all are the same, or each with its name."""
    texts = {name: str(value) for name, value in values.items()}
    if len(set(texts.values())) == 1:
        return next(iter(texts.values()))
    return ", ".join(f"{name} {text}" for name, text in texts.items())
