"""Files as torch.profiler writes them, made by hand, in the shape of one of torch 2.13."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tracing.records import Category, Span

BASE_NS = 1_790_857_026_000_000_000
STREAMS = {"compute": 7, "copy": 20}
Event = dict[str, Any]


def event(category: str, name: str, start_ns: int, end_ns: int, **args: Any) -> Event:
    """Of a moment counted from the file's base."""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0 if "stream" in args else 4711,
        "tid": args.get("stream", 4711),
        "ts": start_ns / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": args,
    }


def kernel(start_ns: int, end_ns: int, correlation: int, *, stream: int = 7, graph: int = 0, node: int = 0) -> Event:
    ids = {"graph id": graph, "graph node id": node}
    return event("kernel", "gemm", start_ns, end_ns, device=0, stream=stream, correlation=correlation, **ids)


def copy(start_ns: int, end_ns: int, correlation: int, *, stream: int = 7) -> Event:
    name = "Memcpy HtoD (Pinned -> Device)"
    return event("gpu_memcpy", name, start_ns, end_ns, device=0, stream=stream, correlation=correlation, bytes=64)


def launch(start_ns: int, end_ns: int, correlation: int, name: str = "cudaLaunchKernel") -> Event:
    return event("cuda_runtime", name, start_ns, end_ns, cbid=211, correlation=correlation)


def write_kineto(path: Path, events: Iterable[Event], **head: Any) -> Path:
    """Also what stands between events in a real file: names of processes, arrows."""
    noise: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 1.0, "args": {"name": "python"}},
        {"ph": "s", "id": 3, "pid": 4711, "tid": 4711, "ts": 2.0, "cat": "ac2g", "name": "ac2g"},
        {"ph": "i", "s": "g", "pid": "Traces", "tid": "Trace 0", "ts": 3.0, "name": "Iteration Start: x"},
    ]
    document: Mapping[str, Any] = {
        "schemaVersion": 1,
        "deviceProperties": [],
        **head,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": [*noise, *events],
        "traceName": path.name,
    }
    text = json.dumps(document).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def mirrored(spans: Sequence[Span], *, late_ns: int = 0, lag_ns: int = 0, kernels: int = 4) -> list[Event]:
    """What the profiler would show of our device work: launches just before we noted it, kernels inside it.

    Args:
        spans: Ours; its clock is the file's, so that the offset is 0.
        late_ns: The first kernel starts so long after our start.
        lag_ns: The last one ends so long before our end.
        kernels: Of one piece, without gaps.
    """
    events = []
    for number, span in enumerate((span for span in spans if span.category is Category.DEVICE), start=1):
        assert span.enqueued_ns is not None
        events.append(launch(span.enqueued_ns - 4_000, span.enqueued_ns - 1_000, number, "cudaGraphLaunch"))
        start_ns = min(span.start_ns + late_ns, span.end_ns)
        end_ns = max(start_ns, span.end_ns - lag_ns)
        edges = [start_ns + (end_ns - start_ns) * part // kernels for part in range(kernels + 1)]
        events += [
            kernel(left, right, number, stream=STREAMS[span.lane], graph=5, node=node)
            for node, (left, right) in enumerate(pairwise(edges), start=1)
        ]
    return events
