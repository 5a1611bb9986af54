"""What callers felt: how long requests queued, waited for their first token, and for each one after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tracing.trace import Trace
from workbench.figures.chart import Axes, Chart, Mark, Series, run_colour
from workbench.figures.errors import FigureError
from workbench.figures.sources import why_empty

if TYPE_CHECKING:
    import pyarrow as pa

_TIMES = ("queue_delay_ns", "ttft_ns", "tpot_ns")
_TITLES = ("queue delay", "TTFT: time to first token", "TPOT: time per token after it")
_CLASSES = 4
"""Of prompt lengths."""


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


def latency(traces: Sequence[Trace], *, by: str = "request") -> tuple[pa.Table, Chart]:
    """Distributions of queue delay, TTFT and TPOT, or with ``by="prompt"`` the first two by the prompt's length.

    Raises:
        FigureError: ``by`` is something else.
    """
    if by == "request":
        table = latency_table(traces)
        return table, latency_chart(table, traces)
    if by == "prompt":
        table = prompt_table(traces)
        return table, prompt_chart(table, traces)
    raise FigureError(f"by must be 'request' or 'prompt', got {by!r}")


def prompt_table(traces: Sequence[Trace]) -> pa.Table:
    """One row a run and class of prompt lengths, of requests whose times count.

    The classes are quarters of all runs' requests, fewer where lengths are few. Columns ``run``, ``shortest`` and
    ``longest`` (of the class, tokens), ``requests``, and over them percentiles ``queue_delay_p50_ns``,
    ``queue_delay_p90_ns``, ``ttft_p50_ns``, ``ttft_p90_ns``.
    """
    import pyarrow as pa

    numbers = [f"{time}_{name}_ns" for time in ("queue_delay", "ttft") for name in ("p50", "p90")]
    schema = pa.schema(
        [
            ("run", pa.string()),
            *((name, pa.int64()) for name in ("shortest", "longest", "requests")),
            *((name, pa.float64()) for name in numbers),
        ]
    )
    wanted = ["num_prompt_tokens", "queue_delay_ns", "ttft_ns", "is_void"]
    runs = [
        (trace.name, [row for row in trace.requests.select(wanted).to_pylist() if _has_times(row)]) for trace in traces
    ]
    lengths = sorted(row["num_prompt_tokens"] for _, rows in runs for row in rows)
    found = [
        {"run": run, "shortest": shortest, "longest": longest, "requests": len(members), **_percentiles(members)}
        for run, rows in runs
        for shortest, longest in _length_classes(lengths)
        if (members := [row for row in rows if shortest <= row["num_prompt_tokens"] <= longest])
    ]
    return pa.Table.from_pylist(found, schema=schema)


def _has_times(row: Mapping[str, Any]) -> bool:
    return not row["is_void"] and row["queue_delay_ns"] is not None and row["ttft_ns"] is not None


def _length_classes(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Shortest and longest of each class; equal lengths are in one."""
    above = 0
    for part in range(1, _CLASSES + 1):
        inside = [length for length in lengths[: len(lengths) * part // _CLASSES] if length > above]
        if inside:
            yield inside[0], (above := inside[-1])


def _percentiles(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {
        f"{time}_p{percent}_ns": float(np.percentile([row[f"{time}_ns"] for row in rows], percent))
        for time in ("queue_delay", "ttft")
        for percent in (50, 90)
    }


def prompt_chart(table: pa.Table, traces: Sequence[Trace]) -> Chart:
    """A line a run for the median of each class of prompts, and a point for its 90th percentile."""
    rows = table.to_pylist()
    axes = [
        Axes(
            title=title,
            x_title="prompt (tokens)",
            y_title="time (ms)",
            series=tuple(
                series
                for place, trace in enumerate(traces)
                for series in _by_length([row for row in rows if row["run"] == trace.name], time, place, trace.name)
            ),
        )
        for time, title in (("queue_delay", _TITLES[0]), ("ttft", _TITLES[1]))
    ]
    hint = why_empty(traces, "No request has a first token and times that count. Let one run: session.run().")
    return Chart(title="Latency by prompt length", axes=tuple(axes), hint=hint)


def _by_length(rows: Sequence[Mapping[str, Any]], time: str, place: int, run: str) -> tuple[Series, Series]:
    p50, p90 = ([row[f"{time}_{name}_ns"] / 1e6 for row in rows] for name in ("p50", "p90"))
    ends = [rows[-1]["longest"]] if rows else []
    line = Series(
        name=f"{run}, p50",
        mark=Mark.STEPS,
        x=(*(row["shortest"] for row in rows), *ends),
        y=(*p50, *p50[-1:]),
        colour=run_colour(place),
        kind=place,
    )
    points = Series(
        name=f"{run}, p90",
        mark=Mark.POINTS,
        x=tuple((row["shortest"] + row["longest"]) / 2 for row in rows),
        y=tuple(p90),
        colour=run_colour(place),
        kind=place,
        notes=tuple(f"{row['requests']} requests of {row['shortest']} to {row['longest']} tokens" for row in rows),
    )
    return line, points


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
