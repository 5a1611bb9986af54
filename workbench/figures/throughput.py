"""Tokens a second over a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracing.trace import Trace
from workbench.figures.chart import Axes, Chart, Mark, Series, run_colour
from workbench.figures.sources import why_empty
from workbench.figures.windows import pauses_in, windows_of

if TYPE_CHECKING:
    import pyarrow as pa


def throughput_table(traces: Sequence[Trace], window: int | None = None) -> pa.Table:
    """One row a window of timed iterations.

    Columns ``run``, ``stretch``, ``first_iteration``, ``last_iteration``, ``start_ns`` and ``end_ns`` after the run's
    first iteration began, ``new_tokens``, ``tokens_per_s``. Windows of one stretch adjoin.

    Tokens over time, summed over a run's rows, is its ``tokens/s``; of a run that somebody held and ran on it is more,
    for time in which nobody ran the engine is in no window.
    """
    import pyarrow as pa

    schema = pa.schema(
        [
            ("run", pa.string()),
            *((name, pa.int64()) for name in ("stretch", "first_iteration", "last_iteration", "start_ns", "end_ns")),
            ("new_tokens", pa.int64()),
            ("tokens_per_s", pa.float64()),
        ]
    )
    rows = [row for trace in traces for row in _rows(trace, window)]
    return pa.Table.from_pylist(rows, schema=schema)


def _rows(trace: Trace, length: int | None) -> list[dict[str, object]]:
    iterations = trace.records.iterations
    rows: list[dict[str, object]] = []
    pauses = pauses_in(trace.records.spans, iterations)
    for window in windows_of(iterations, length, pauses):
        tokens, time_ns = sum(record.new_tokens for record in window.records), window.end_ns - window.start_ns
        rows.append(
            {
                "run": trace.name,
                "stretch": window.stretch,
                "first_iteration": window.records[0].iteration,
                "last_iteration": window.records[-1].iteration,
                "start_ns": window.start_ns - iterations[0].begin_ns,
                "end_ns": window.end_ns - iterations[0].begin_ns,
                "new_tokens": tokens,
                "tokens_per_s": tokens * 1e9 / time_ns if time_ns else None,
            }
        )
    return rows


def throughput_chart(table: pa.Table, traces: Sequence[Trace]) -> Chart:
    """A line a run, broken where time was not measured and where nobody ran the engine."""
    series = tuple(_line(table, place, trace.name) for place, trace in enumerate(traces))
    axes = Axes(title="", x_title="time since the run's first iteration (s)", y_title="tokens/s", series=series)
    hint = why_empty(traces, "No iteration has given a token yet. Let the session run: session.run().")
    return Chart(title="Throughput", axes=(axes,), hint=hint)


def throughput(traces: Sequence[Trace], *, window: int | None = None) -> tuple[pa.Table, Chart]:
    """Tokens a second, by windows of ``window`` iterations; None: about sixty windows."""
    table = throughput_table(traces, window)
    return table, throughput_chart(table, traces)


def _line(table: pa.Table, place: int, run: str) -> Series:
    rows = [row for row in table.to_pylist() if row["run"] == run]
    x: list[float] = []
    y: list[float | None] = []
    notes: list[str] = []
    for at, row in enumerate(rows):
        span = f"iterations {row['first_iteration']} to {row['last_iteration']}, {row['new_tokens']} tokens"
        x.append(row["start_ns"] / 1e9)
        y.append(row["tokens_per_s"])
        notes.append(span)
        if at + 1 == len(rows) or rows[at + 1]["stretch"] != row["stretch"]:  # to its end, then a gap
            x += [row["end_ns"] / 1e9] * 2
            y += [row["tokens_per_s"], None]
            notes += [span, ""]
    return Series(
        name=run, mark=Mark.STEPS, x=tuple(x), y=tuple(y), colour=run_colour(place), kind=place, notes=tuple(notes)
    )
