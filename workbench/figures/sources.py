"""The runs that a figure is drawn of: sessions, traces, finished runs, one or several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from tracing.records import TRACE_EDGE
from tracing.trace import Trace
from tracing.void_words import void_word
from workbench.figures.errors import FigureError


@runtime_checkable
class HasTrace(Protocol):
    """A session, or a finished run."""

    @property
    def trace(self) -> Trace:
        """All that was recorded."""
        ...


Source = Trace | HasTrace
Sources = Source | Sequence[Source] | Mapping[str, Source]
"""One run, several, or several under names of the caller's."""


def traces_of(sources: Sources) -> list[Trace]:
    """The runs' traces, each with a name of its own: a second ``async`` is called ``async (2)``.

    Raises:
        FigureError: there is none, or something is no run.
    """
    if isinstance(sources, Mapping):
        return [replace(_trace(source), name=str(name)) for name, source in sources.items()] or _none()
    several: Iterable[Any] = sources if isinstance(sources, Sequence) else [sources]
    return _named_apart([_trace(source) for source in several]) or _none()


def _trace(source: object) -> Trace:
    if isinstance(source, Trace):
        return source
    if isinstance(source, HasTrace):
        return source.trace
    raise FigureError(f"a figure is drawn of sessions, traces or runs; got {type(source).__name__}")


def _none() -> list[Trace]:
    raise FigureError("a figure is drawn of at least one session, trace or run; got none")


def _named_apart(traces: Sequence[Trace]) -> list[Trace]:
    met: Counter[str] = Counter()
    named = []
    for trace in traces:
        met[trace.name] += 1
        again = met[trace.name] > 1
        named.append(replace(trace, name=f"{trace.name} ({met[trace.name]})") if again else trace)
    return named


_REMEDIES = {
    "hand_stepped": "let it run by itself: session.run()",
    "debugger": "run without a debugger or trace function",
    "device_read": "run without reading device values",
    "invariants": "run with debug_invariants=False",
    "inline_device": "the inline device has no time of its own: use device='cpu' or 'cuda'",
    "resumed": "let it run without pauses: session.run()",
    "changes_recorded": "set session.record_changes = False",
    "event_loop": "use session.run() instead of a run in the background",
    TRACE_EDGE: "let the session run to its end",
}
"""How to get times that count, by void reason."""


def why_empty(traces: Sequence[Trace], otherwise: str) -> str:
    """What to do where there is nothing to draw.

    Args:
        traces: The figure's.
        otherwise: Said where there are iterations with times that count.
    """
    records = [record for trace in traces for record in trace.records.iterations]
    if not records:
        return "Nothing has run yet. Submit requests, then session.run()."
    if not all(record.is_void for record in records):
        return otherwise
    reasons = Counter(reason for record in records for reason in record.void_reasons)
    reason, _ = reasons.most_common(1)[0]
    remedy = _REMEDIES.get(reason, "run again without what caused that")
    void = f"All {len(records):,} iterations are void ({void_word(reason)})"
    return f"{void}: their times mean nothing. To have some, {remedy}."
