"""Void reasons in words, for everything that people read; records, tables and files keep the names."""

from __future__ import annotations

from collections.abc import Iterable

from tracing.records import TRACE_EDGE

VOID_WORDS: dict[str, str] = {
    "hand_stepped": "stepped by hand or held at a breakpoint",
    "debugger": "a debugger or trace function was attached",
    "device_read": "device memory was read in the middle",
    "invariants": "invariants were checked after each phase",
    "inline_device": "computed on the host's thread by the inline device",
    "changes_recorded": "reads and writes were recorded",
    "paced": "slowed down by pace_s",
    "event_loop": "the notebook's event loop came back late",
    "resumed": "nobody drove the engine before it",
    "recovered": "an iteration failed in between",
    "paused": "the engine was paused in between",
    "suspended": "the engine was suspended in between",
    TRACE_EDGE: "its device work is not all in the trace",
}
"""By the names of ``docs/metrics.md``; ``recovered`` is of requests only."""


def void_word(reason: str) -> str:
    """One reason; a name that is not known, as a run of another version may have, is told as it is."""
    return VOID_WORDS.get(reason, reason)


def void_words(reasons: Iterable[str]) -> str:
    """Several, with commas between them; empty without any."""
    return ", ".join(map(void_word, reasons))
