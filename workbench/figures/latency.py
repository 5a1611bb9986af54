"""What callers felt: how long requests queued, waited for their first token, and for each one after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracing.trace import Trace
from workbench.figures.chart import Axes, Chart, Mark, Series, run_colour
from workbench.figures.sources import why_empty

if TYPE_CHECKING:
    import pyarrow as pa

_TIMES = ("queue_delay_ns", "ttft_ns", "tpot_ns")
_TITLES = ("queue delay", "TTFT: time to first token", "TPOT: time per token after it")


def latency_table(traces: Sequence[Trace]) -> pa.Table:
    """One row a request whose times count.

    Columns ``run``, ``request_id``, ``arrival_ns``, and as ``docs/metrics.md`` has them ``queue_delay_ns``,
    ``ttft_ns``, ``tpot_ns`` and ``e2e_ns``; null where it did not come that far.
    """
    import pyarrow as pa

    schema = pa.schema(
        [
            ("run", pa.string()),
            ("request_id", pa.string()),
            ("arrival_ns", pa.int64()),
            ("queue_delay_ns", pa.int64()),
            ("ttft_ns", pa.int64()),
            ("tpot_ns", pa.float64()),
            ("e2e_ns", pa.int64()),
        ]
    )
    wanted = [name for name in schema.names if name != "run"]
    rows = [
        {**row, "run": trace.name}
        for trace in traces
        for row in trace.requests.select([*wanted, "is_void"]).to_pylist()
        if not row["is_void"]
    ]
    return pa.Table.from_pylist(rows, schema=schema)


def latency_chart(table: pa.Table, traces: Sequence[Trace]) -> Chart:
    """How many of the requests were served within a time, a line a run; the median is where it crosses 50 %."""
    axes = [
        Axes(
            title=title,
            x_title="time (ms)",
            y_title="requests served within it (%)",
            y_top=100,
            series=tuple(_share_line(table, time, place, trace.name) for place, trace in enumerate(traces)),
        )
        for time, title in zip(_TIMES, _TITLES, strict=True)
    ]
    hint = why_empty(traces, "No request has a first token and times that count. Let one run: session.run().")
    return Chart(title="Latency", axes=tuple(axes), hint=hint)


def latency(traces: Sequence[Trace]) -> tuple[pa.Table, Chart]:
    """Distributions of queue delay, TTFT and TPOT."""
    table = latency_table(traces)
    return table, latency_chart(table, traces)


def _share_line(table: pa.Table, time: str, place: int, run: str) -> Series:
    times = [row[time] for row in table.select(["run", time]).to_pylist() if row["run"] == run]
    rising = sorted(value / 1e6 for value in times if value is not None)
    count = len(rising)
    return Series(
        name=run,
        mark=Mark.STEPS,
        x=(*rising[:1], *rising),
        y=tuple(100 * below / count for below in range(count + 1)) if count else (),
        colour=run_colour(place),
        kind=place,
    )
