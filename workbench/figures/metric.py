"""One metric of a comparison, repeat by repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from workbench.figures.chart import Axes, Chart, Mark, Series, run_colour
from workbench.repeats import RepeatRow, ratio_cells

if TYPE_CHECKING:
    import pyarrow as pa


def metric_table(row: RepeatRow, names: Sequence[str]) -> pa.Table:
    """One row a leg and repeat.

    Columns ``run``, ``repeat`` from 1, ``value`` in the metric's unit (null: no samples), and ``ratio`` to the first
    leg in the same repeat, null where it has none.
    """
    import pyarrow as pa

    schema = pa.schema([("run", pa.string()), ("repeat", pa.int64()), ("value", pa.float64()), ("ratio", pa.float64())])
    baseline = row.legs[0].samples
    rows = [
        {
            "run": name,
            "repeat": repeat,
            "value": value,
            "ratio": value / base if paired and base and value is not None else None,
        }
        for name, numbers, paired in zip(names, row.legs, row.ratios, strict=True)
        for repeat, (value, base) in enumerate(zip(numbers.samples, baseline, strict=True), start=1)
    ]
    return pa.Table.from_pylist(rows, schema=schema)


def metric_chart(row: RepeatRow, names: Sequence[str]) -> Chart:
    """A point a leg and repeat; points above each other are a pair."""
    unit = f" ({row.unit})" if row.unit else ""
    repeats = tuple(str(repeat + 1) for repeat in range(len(row.legs[0].samples)))
    series = tuple(
        Series(name=name, mark=Mark.POINTS, x=repeats, y=numbers.samples, colour=run_colour(place), kind=place)
        for place, (name, numbers) in enumerate(zip(names, row.legs, strict=True))
    )
    axes = Axes(title=_ratio_text(row, names), x_title="repeat", y_title=f"{row.label}{unit}", series=series)
    hint = f"No run has samples of {row.label}: it takes a longer workload, or iterations that are not void."
    return Chart(title=row.label, axes=(axes,), hint=hint)


def _ratio_text(row: RepeatRow, names: Sequence[str]) -> str:
    told = []
    for name, ratio in zip(names, row.ratios, strict=True):
        if ratio is not None:
            value, interval = ratio_cells(ratio)
            told.append(f"{name}/{names[0]} {value}{f' ({interval})' if interval else ''}: {ratio.verdict}")
    return "\n".join(told)
