"""What other tools saw, as records that can be laid beside ours. Readers: :mod:`tracing.nsys_import`, and others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum


class TraceImportError(ValueError):
    """A file is not the trace it should be, or is damaged; the message names it and says in one line what is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))  # what a library says, and is told here, may have several lines


class ImportedKind(Enum):
    """What kind of thing a tool recorded."""

    RANGE = "range"  # an NVTX range, or a tool's own annotation of host time
    MARK = "mark"  # an NVTX mark; start equals end
    OPERATOR = "operator"  # a framework's operator, on the host
    RUNTIME = "runtime"  # a call of the CUDA runtime or driver, on the host
    KERNEL = "kernel"  # one kernel, on the device
    MEMCPY = "memcpy"  # one copy, on the device
    MEMSET = "memset"  # one fill, on the device
    GRAPH = "graph"  # one launched graph as a whole, on the device


DEVICE_KINDS = frozenset({ImportedKind.KERNEL, ImportedKind.MEMCPY, ImportedKind.MEMSET, ImportedKind.GRAPH})
"""What ran on a device; everything else ran on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedSpan:
    """One stretch of time as a tool recorded it. A field is None where the tool does not say."""

    kind: ImportedKind
    name: str
    start_ns: int
    end_ns: int
    """On the clock of the trace it belongs to; see :class:`ImportedTrace`."""
    domain: str | None = None
    """NVTX domain; None also for the default domain."""
    category: str | None = None
    """NVTX category by its name, or by its number as text where the trace holds no name."""
    payload: int | float | None = None
    """NVTX payload."""
    process: int | None = None
    thread: int | None = None
    """The host thread it ran on, or that it started on."""
    device: int | None = None
    stream: int | None = None
    correlation: int | None = None
    """The same number for a launch on the host and for what it launched."""
    graph: int | None = None
    """Of which graph it is a part: the executable graph where the tool tells it."""
    graph_node: int | None = None
    bytes: int | None = None
    """Moved or filled."""

    @property
    def duration_ns(self) -> int:
        """Length; 0 for marks."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedTrace:
    """Everything read from one file, sorted by start."""

    source: str
    """Tool and version, such as ``Nsight Systems 2023.4.4.54``."""
    spans: tuple[ImportedSpan, ...]
    notes: tuple[str, ...] = ()
    """What was left out, in words: one line a table, a kind, or a fault that could be passed over."""
    start_epoch_ns: int | None = None
    """UTC time of the trace's own zero; None where the tool does not say, or once the trace was moved."""

    def of(self, *kinds: ImportedKind) -> tuple[ImportedSpan, ...]:
        """Its spans of some kinds, by start."""
        return tuple(span for span in self.spans if span.kind in kinds)

    def moved(self, offset_ns: int) -> ImportedTrace:
        """The same trace with ``offset_ns`` added to every time: on our clock, if that is what the offset leads to."""
        spans = (
            replace(span, start_ns=span.start_ns + offset_ns, end_ns=span.end_ns + offset_ns) for span in self.spans
        )
        return replace(self, spans=tuple(spans), start_epoch_ns=None)


def by_start(spans: Iterable[ImportedSpan]) -> tuple[ImportedSpan, ...]:
    """Sorted by start, outer spans first where starts are equal."""
    return tuple(sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)))
