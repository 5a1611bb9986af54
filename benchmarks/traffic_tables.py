"""What :mod:`benchmarks.traffic` prints: metrics as rows of repeats, and tables with a line a leg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from tracing.comparison import format_value
from tracing.text_table import aligned
from workbench.repeats import LegNumbers, PairedRatio, RepeatRow, median_interval, ratio_cells, repeat_notes

if TYPE_CHECKING:
    from benchmarks.traffic import Traffic

_PERCENTILES = ("p50", "p90", "p99")
_TIMES = {
    f"{name} {percentile}": ("requests", "ms", "lower")
    for name in ("wait", "TTFT", "TPOT")
    for percentile in _PERCENTILES
}
METRICS: dict[str, tuple[str, str, str]] = {
    "tokens/s": ("engine", "1/s", "higher"),
    "with prompts": ("engine", "1/s", "higher"),
    "busy": ("engine", "%", ""),
    **_TIMES,
    "hit": ("cache", "%", "higher"),
    "overlap": ("engine", "%", ""),
    "iterations": ("engine", "", ""),
    "cut off": ("requests", "", "lower"),
    "same tokens": ("requests", "", "higher"),
    "order probe": ("host", "µs", "lower"),
    "order probe, an abort to come": ("host", "µs", "lower"),
    "admit, table full": ("host", "µs", "lower"),
    "admit, one row free": ("host", "µs", "lower"),
    "admit, one in the queue aborted": ("host", "µs", "lower"),
    "add_request": ("host", "µs", "lower"),
}
"""Section, unit, and what is better, by metric."""

_WHOLE = ("tokens/s", "with prompts", "busy", "hit", "overlap", "iterations", "same tokens", "cut off")
_RATIOS = ("tokens/s", "wait p50", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")


def metric_row(label: str, legs: Sequence[Sequence[float | None]]) -> RepeatRow:
    """A metric of all legs, one number a repeat; ratios to the first leg are of the same repeat. Shares have none."""
    section, unit, better = METRICS[label]
    baseline, *others = legs
    has_ratio = unit not in ("%", "")
    return RepeatRow(
        section=section,
        label=label,
        unit=unit,
        better=better,
        legs=tuple(LegNumbers(tuple(samples)) for samples in legs),
        ratios=(None, *(_paired(baseline, leg) if has_ratio else None for leg in others)),
    )


def _paired(baseline: Sequence[float | None], leg: Sequence[float | None]) -> PairedRatio | None:
    pairs = zip(baseline, leg, strict=True)
    ratios = [ours / theirs for theirs, ours in pairs if theirs and ours is not None]
    return PairedRatio(median(ratios), median_interval(ratios)) if ratios else None


def print_serving(traffic: Traffic, repeats: int) -> None:
    """Medians, ratios, iterations by reason, and what to know of them."""
    print(f"\n{traffic.workload!r}")
    print(f"ideal prefix hit rate: {100 * traffic.ideal:.1f} % of prompt tokens")
    if traffic.names:
        for table in (
            medians_table("", traffic.names, traffic.rows, _WHOLE),
            medians_table("ms", traffic.names, traffic.rows, tuple(_TIMES)),
            ratios_table(traffic.names, traffic.rows),
            counts_table("orders", traffic.counts("orders")),
            counts_table("reasons", traffic.counts("reasons")),
            repeat_notes(traffic.names, repeats),
        ):
            print("", *table, sep="\n")
    for name, why in traffic.refused.items():
        print(f"leg {name} left out: {why}")


def medians_table(title: str, names: Sequence[str], rows: Sequence[RepeatRow], labels: Sequence[str]) -> list[str]:
    """A line a leg, medians over repeats."""
    shown = _chosen(rows, labels)
    head = [title, *(f"{row.label} %" if row.unit == "%" else row.label for row in shown)]
    values = [
        [name, *(format_value(row.legs[place].median, row.unit) for row in shown)] for place, name in enumerate(names)
    ]
    return aligned([head, *values], words=1)


def ratios_table(names: Sequence[str], rows: Sequence[RepeatRow]) -> list[str]:
    """A line a leg but the first, over the first: the median ratio and its interval."""
    shown = _chosen(rows, _RATIOS)
    cells = [[f"over {names[0]}", *(row.label for row in shown)]]
    for place, name in enumerate(names[1:], start=1):
        cells.append([name, *(" ".join(filter(None, ratio_cells(row.ratios[place]))) for row in shown)])
    return aligned(cells, words=1) if len(names) > 1 else []


def counts_table(title: str, counts: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A line a leg: iterations by order or reason."""
    columns = sorted({key for found in counts.values() for key in found})
    values = [[name, *(f"{found.get(key, 0):,.0f}" for key in columns)] for name, found in counts.items()]
    return aligned([[title, *columns], *values], words=1)


def _chosen(rows: Sequence[RepeatRow], labels: Sequence[str]) -> list[RepeatRow]:
    found = {row.label: row for row in rows}
    return [found[label] for label in labels]
