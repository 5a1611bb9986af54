"""An agreement as lines for a terminal."""

from __future__ import annotations

from tracing.agreement import Agreement, Share, WorkAgreement
from tracing.text_table import aligned

_TITLES = (
    "lane",
    "work",
    "count",
    "length",
    "start",
    "end",
    "length p50",
    "length p99",
    "in all",
    "inside",
    "launched",
)


def agreement_lines(found: Agreement, tool: str) -> list[str]:
    """A row a name of work, then what was compared over the whole; ``tool`` is what the tool is called."""
    if not found.work:
        return [f"nothing of ours was found in the trace of {tool}", *_missing(found)]
    cells = [_TITLES, *(_cells(row) for row in found.work)]
    lines = aligned(cells)
    lines.append(
        f"µs, ours less {tool}; start and end: median; p50, p99: of absolute values; inside: gaps between kernels;"
    )
    lines.append(f"launched: first kernel's start less the return of the launch, by {tool}, median")
    if found.wall_ns:
        lines.append(f"over {found.wall_ns / 1e6:.1f} ms: " + "; ".join(_shares(found, tool)))
    if found.note_delay_p50_ns is not None:
        lines.append(f"a launch is noted {found.note_delay_p50_ns / 1e3:.1f} µs after it returned, by {tool}'s clock")
    if not found.is_by_launches:
        lines.append(f"{tool} shows no launches, so work was matched by time alone")
    return [*lines, *_missing(found)]


def _shares(found: Agreement, tool: str) -> list[str]:
    parts = []
    for name, share in (("bubbles", found.bubbles), ("hidden share", found.hidden)):
        if share is not None:
            parts.append(f"{name} {_share(share, tool)}")
    if found.inner_gaps is not None:
        parts.append(f"gaps inside pieces {100 * found.inner_gaps:.2f} %")
    if found.strange_ns:
        parts.append(f"work that is not ours {found.strange_ns / 1e3:.1f} µs")
    return parts


def _share(share: Share, tool: str) -> str:
    return f"{100 * share.ours:.2f} % by us, {100 * share.tool:.2f} % by {tool} ({100 * share.apart:+.2f})"


def _missing(found: Agreement) -> list[str]:
    names = ", ".join(f"{number} {name}" for name, number in sorted(found.missing.items()))
    return [f"not in the tool's trace: {names}"] if names else []


def _cells(row: WorkAgreement) -> tuple[str, ...]:
    return (
        row.lane,
        row.name,
        str(row.count),
        f"{row.tool_length_p50_ns / 1e3:.1f} µs",
        f"{row.start.median_ns / 1e3:+.1f}",
        f"{row.end.median_ns / 1e3:+.1f}",
        _length(row.length.p50_ns, row.length_share_p50),
        _length(row.length.p99_ns, row.length_share_p99),
        "" if row.total_share is None else f"{100 * row.total_share:+.2f} %",
        "" if row.inner_gap_share is None else f"{100 * row.inner_gap_share:.1f} %",
        "" if row.after_launch_p50_ns is None else f"{row.after_launch_p50_ns / 1e3:+.1f}",
    )


def _length(apart_ns: float, share: float | None) -> str:
    return f"{apart_ns / 1e3:.1f}" + ("" if share is None else f" ({100 * share:.1f} %)")
