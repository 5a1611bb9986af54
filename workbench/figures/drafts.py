"""How many drafts were accepted, by their place behind the newest token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracing.analysis import draft_table
from tracing.trace import Trace
from workbench.figures.chart import EXPOSED_COLOUR, HIDDEN_COLOUR, Axes, Chart, Mark, Series

if TYPE_CHECKING:
    import pyarrow as pa


def drafts_table(traces: Sequence[Trace]) -> pa.Table:
    """One row a run and place: ``run``, ``place`` from 1, ``proposed``, ``accepted``, and ``acceptance``, 0 to 1."""
    import pyarrow as pa

    schema = pa.schema(
        [
            ("run", pa.string()),
            *((name, pa.int64()) for name in ("place", "proposed", "accepted")),
            ("acceptance", pa.float64()),
        ]
    )
    rows = [
        {"run": trace.name, "place": place, "proposed": proposed, "accepted": accepted, "acceptance": acceptance}
        for trace in traces
        if (found := draft_table(trace.records.requests)) is not None
        for place, (proposed, accepted, acceptance) in enumerate(
            zip(found.proposed, found.accepted, found.acceptance, strict=True), start=1
        )
    ]
    return pa.Table.from_pylist(rows, schema=schema)


def drafts(traces: Sequence[Trace]) -> tuple[pa.Table, Chart]:
    """A bar a run and place: what part of the drafts there was accepted, and what part was not."""
    table = drafts_table(traces)
    rows = table.to_pylist()
    x = tuple(f"draft {row['place']}" if len(traces) == 1 else f"{row['run']}\ndraft {row['place']}" for row in rows)
    shares = [100 * row["acceptance"] for row in rows]
    notes = tuple(f"{row['accepted']:,} of {row['proposed']:,} drafts" for row in rows)
    series = tuple(
        Series(name=name, mark=Mark.BARS, x=x, y=tuple(y), colour=colour, hatch=hatch, notes=notes)
        for name, y, colour, hatch in (
            ("accepted", shares, HIDDEN_COLOUR, ""),
            ("rejected", [100 - share for share in shares], EXPOSED_COLOUR, "/"),
        )
    )
    axes = Axes(
        title=_title(traces), x_title="place behind the newest token", y_title="drafts (%)", y_top=100, series=series
    )
    return table, Chart(title="Acceptance of drafts", axes=(axes,), hint=_hint(traces))


def _title(traces: Sequence[Trace]) -> str:
    """Tokens a verified row, of each run that drafted."""
    found = [(trace.name, draft_table(trace.records.requests)) for trace in traces]
    told = [(name, table.tokens_per_row) for name, table in found if table is not None]
    if len(traces) == 1:
        return "".join(f"{tokens:.2f} tokens a verified row" for _, tokens in told)
    return "tokens a verified row: " + ", ".join(f"{name} {tokens:.2f}" for name, tokens in told) if told else ""


def _hint(traces: Sequence[Trace]) -> str:
    if not any(trace.records.requests for trace in traces):
        return "Nothing has run yet. Submit requests, then session.run()."
    return "Nothing was drafted: make the session of a model with draft heads, with speculative_tokens=1 or more."
