"""Our spans beside an outside tool's: what was found, how far it is apart, and both on one time axis."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tracing.agreement import Agreement, agreement
from tracing.agreement_table import agreement_lines
from tracing.chrome import write_chrome_trace
from tracing.importing import DEVICE_KINDS, ImportedTrace
from tracing.nsys_import import read_nsys
from tracing.nvtx_match import (
    ClockFit,
    Difference,
    RangeMatch,
    differences,
    emitted_ranges,
    fit_clock,
    match_ranges,
)
from tracing.run_folder import read_run
from tracing.text_table import aligned
from tracing.torch_profile import read_torch_trace
from tracing.trace import Records, Trace
from workbench.documents import jsonable
from workbench.profile_job import RUN, TORCH_TRACE, Captured

AGREEMENT, MERGED = "agreement.json", "merged.json.gz"
_TITLES = ("category", "range", "count", "start p50", "start p99", "length p50", "length p99")


def compare_with_nsys(folder: Path, export: Path, captured: Captured) -> tuple[list[str], bool]:
    """Compare ranges, and device work where the tool saw any; writes ``agreement.json`` and the merged timeline.

    Returns:
        Lines for the terminal, and whether every range of ours arrived.

    Raises:
        TraceImportError: the export cannot be read, or holds none of our ranges.
    """
    trace, imported = captured_trace(folder, captured), read_nsys(export)
    match = match_captured(trace, imported, captured)
    fit = fit_clock(match.pairs)
    rows = differences(match.pairs, fit.offset_ns)
    placed = imported.moved(fit.offset_ns)
    total = len(match.pairs) + len(match.missing)
    found = f"{len(match.pairs)} of {total} ranges found with name, category and payload"
    stretch = f"{imported.source}, nvtx {captured.versions['nvtx']}: iterations {captured.first} to {captured.last}"
    lines = [f"{stretch}, {found}", "", *difference_lines(rows)]
    lines += ["", _clock_line(fit, imported, captured)]
    lines += [f"missing: {one.category} {one.name} of iteration {one.iteration}" for one in match.missing[:5]]
    device = _device_agreement(trace, placed)
    lines += ["", *agreement_lines(device, "nsys")] if device is not None else []
    ranges = {"found": len(match.pairs), "missing": len(match.missing), "unknown": len(match.unknown)}
    parts = {"ranges": ranges, "clock": asdict(fit), "differences": [asdict(row) for row in rows]}
    return lines + _write(folder, trace, placed, captured, device, parts), not match.missing


def compare_with_torch(folder: Path, captured: Captured) -> list[str]:
    """Compare device work; writes ``agreement.json`` and the merged timeline. Returns lines for the terminal.

    Raises:
        TraceImportError: the trace cannot be read.
    """
    trace, imported = captured_trace(folder, captured), read_torch_trace(folder / TORCH_TRACE)
    device = _device_agreement(trace, imported)
    lines = [f"torch {captured.versions['torch']}: iterations {captured.first} to {captured.last}", ""]
    if device is None:
        lines.append("torch's profiler saw no work on a device: there is nothing to compare without --device cuda")
    else:
        lines += agreement_lines(device, "torch")
    return lines + _write(folder, trace, imported, captured, device, {})


def captured_trace(folder: Path, captured: Captured) -> Trace:
    """Our run, cut down to the captured iterations."""
    trace = read_run(folder / RUN)
    inside = range(captured.first, captured.last + 1)
    records = Records(
        spans=[span for span in trace.records.spans if span.iteration in inside],
        iterations=[record for record in trace.records.iterations if record.iteration in inside],
        requests=trace.records.requests,
    )
    return replace(trace, records=records)


def match_captured(trace: Trace, imported: ImportedTrace, captured: Captured) -> RangeMatch:
    """Which ranges of the captured iterations the tool saw."""
    records = trace.records
    emitted = emitted_ranges(records.spans, records.iterations, session_id=captured.session_id)
    return match_ranges(emitted, imported)


def difference_lines(rows: Sequence[Difference]) -> list[str]:
    """A table of absolute values in µs."""
    cells = [_TITLES, *(_cells(row) for row in rows)]
    return [*aligned(cells), "distance of our span from the tool's, µs"]


def _cells(row: Difference) -> tuple[str, ...]:
    times = (row.start_p50_ns, row.start_p99_ns, row.length_p50_ns, row.length_p99_ns)
    return (row.category, row.name, str(row.count), *(f"{time / 1e3:.1f}" for time in times))


def _clock_line(fit: ClockFit, imported: ImportedTrace, captured: Captured) -> str:
    line = (
        f"clock: {fit.count} starts laid on ours by their median; what remains is "
        f"{fit.residual_p50_ns / 1e3:.1f} µs in the median, {fit.residual_p99_ns / 1e3:.1f} µs at p99; "
        f"drift {fit.drift_ns / 1e3:.1f} µs"
    )
    if imported.start_epoch_ns is not None:
        apart_ns = imported.start_epoch_ns - captured.epoch_offset_ns - fit.offset_ns
        line += f"; the tool's own start time is {apart_ns / 1e3:.0f} µs off that"
    return line


def _device_agreement(trace: Trace, placed: ImportedTrace) -> Agreement | None:
    """None where the tool saw nothing on a device."""
    if not placed.of(*DEVICE_KINDS):
        return None
    return agreement(trace.records.spans, trace.records.iterations, placed)


def _write(
    folder: Path,
    trace: Trace,
    placed: ImportedTrace,
    captured: Captured,
    device: Agreement | None,
    parts: dict[str, Any],
) -> list[str]:
    """The files; returns what is left to be said."""
    write_chrome_trace(trace, folder / MERGED, imported=[placed])
    document = {
        "tool": placed.source,
        "captured": asdict(captured),
        "environment": trace.environment,
        **parts,
        "device": None if device is None else asdict(device),
        "notes": placed.notes,
    }
    (folder / AGREEMENT).write_text(json.dumps(jsonable(document), indent=1) + "\n", encoding="utf-8")
    return ["", *(f"note: {note}" for note in placed.notes), f"written: {folder}"]
