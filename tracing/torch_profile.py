"""Reads what ``torch.profiler`` exports: kernels, copies, fills, CUDA calls, operators and annotations."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from tracing.importing import DEVICE_KINDS, ImportedKind, ImportedSpan, ImportedTrace, TraceImportError, by_start
from tracing.torch_clock import CLOCK_KEY, ClockLine, noted_line

_SOURCE = "torch.profiler"
_REMEDY = "torch.profiler.profile(..).export_chrome_trace makes one"
_KINDS = {
    "kernel": ImportedKind.KERNEL,
    "gpu_memcpy": ImportedKind.MEMCPY,
    "gpu_memset": ImportedKind.MEMSET,
    "cuda_runtime": ImportedKind.RUNTIME,
    "cuda_driver": ImportedKind.RUNTIME,
    "user_annotation": ImportedKind.RANGE,
    "cpu_op": ImportedKind.OPERATOR,
}
_NO_LOSS = frozenset({"Trace", "overhead", "gpu_user_annotation"})
"""Frames, the profiler's own cost, and annotations that it projects on a stream: nothing of ours ran there."""

_Place = Callable[[int], int]


def read_torch_trace(path: str | Path, *, clock: ClockLine | None = None) -> ImportedTrace:
    """Read an exported trace, compressed or not.

    Args:
        path: What ``export_chrome_trace`` wrote.
        clock: What lays its times on our clock, where the trace itself does not hold that.

    Returns:
        Its spans on our clock; on its own, with ``start_epoch_ns``, where nothing tells how the two lie.
        ``notes`` tells what was left out.

    Raises:
        TraceImportError: the file is missing, cut off, empty, or no such trace.
    """
    source = Path(path)
    document = _load(source)
    base_ns = document.get("baseTimeNanoseconds", 0)  # traces of torch 2.2 and older have none: theirs is Unix time
    if _whole(base_ns) is None:
        raise TraceImportError(f"{source} is damaged: baseTimeNanoseconds is {base_ns!r}")
    try:
        line = noted_line(document.get(CLOCK_KEY)) or clock
    except ValueError as error:
        raise TraceImportError(f"{source} is damaged: {CLOCK_KEY} holds no clocks ({error})") from error
    spans, notes = _read(document["traceEvents"], _placing(line, base_ns))
    if not spans:
        raise TraceImportError(f"{source} holds no event of a kind that is read: nothing ran while it was recorded")
    if line is None:
        notes.append("its times are not on our clock: make it with tracing.torch_clock.noting_clock")
        return ImportedTrace(source=_SOURCE, spans=by_start(spans), notes=tuple(notes), start_epoch_ns=base_ns)
    notes.append(f"laid on our clock to within {line.error_ns:,} ns, and what the profiler's own clock is off")
    return ImportedTrace(source=_SOURCE, spans=by_start(spans), notes=tuple(notes))


def _load(path: Path) -> dict[str, Any]:
    """The whole document, sure to have a list of events."""
    try:
        data = path.read_bytes()
        document = json.loads(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TraceImportError(f"{path} is cut off or damaged ({error}); export it again") from error
    except OSError as error:
        raise TraceImportError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # no JSON, or no UTF-8
        fault = f"is no JSON, or cut off ({error})" if data else "is empty"
        raise TraceImportError(f"{path} {fault}; {_REMEDY}") from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise TraceImportError(f"{path} is no trace: it has no list traceEvents; {_REMEDY}")
    if "schemaVersion" not in document:
        raise TraceImportError(f"{path} is a Chrome trace, but not of {_SOURCE}: it has no schemaVersion; {_REMEDY}")
    return document


def _read(events: Sequence[Any], place: _Place) -> tuple[list[ImportedSpan], list[str]]:
    spans, left_out = [], Counter[str]()
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        category = str(event.get("cat"))
        kind = _KINDS.get(category)
        span = None if kind is None else _span(event, kind, place)
        if span is not None:
            spans.append(span)
        elif category not in _NO_LOSS:
            left_out[category] += 1
    reasons = {name: "without times" if name in _KINDS else "which is not read" for name in left_out}
    return spans, [f"{left_out[name]:,} events of category {name}, {reasons[name]}" for name in sorted(left_out)]


def _span(event: Mapping[str, Any], kind: ImportedKind, place: _Place) -> ImportedSpan | None:
    """None where it has no times."""
    start_us, length_us = event.get("ts"), event.get("dur")
    if not _is_time(start_us) or not _is_time(length_us):
        return None
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    is_device = kind in DEVICE_KINDS
    start_ns = place(round(start_us * 1000))
    return ImportedSpan(
        kind=kind,
        name=str(event.get("name", kind.value)),
        start_ns=start_ns,
        end_ns=start_ns + round(length_us * 1000),
        process=None if is_device else _whole(event.get("pid")),
        thread=None if is_device else _whole(event.get("tid")),
        device=_whole(args.get("device")),
        stream=_whole(args.get("stream")),
        correlation=_whole(args.get("correlation")),
        graph=_whole(args.get("graph id")) or None,  # 0 means no graph
        graph_node=_whole(args.get("graph node id")) or None,
        bytes=_whole(args.get("bytes")),
    )


def _placing(line: ClockLine | None, base_ns: int) -> _Place:
    return (lambda at_ns: at_ns) if line is None else (lambda at_ns: line.host_ns(base_ns + at_ns))


def _is_time(value: Any) -> TypeGuard[float]:
    """Whether it is microseconds that a clock could show."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**60


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
