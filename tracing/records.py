"""What a trace is made of: typed, frozen records. Every time is an integer in nanoseconds.

The clock is ``time.perf_counter_ns`` (CLOCK_MONOTONIC on Linux), for host and device alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

PHASES = ("admit", "prepare", "forward", "sample", "verify", "draft", "rewind", "resolve", "emit")
"""The phases of design.md §2, in the order tables list them."""

BATCH_OF: dict[str, str] = {
    "prepare": "launched",
    "publish": "launched",
    "forward": "launched",
    "sample": "consumed",
    "verify": "consumed",
    "draft": "consumed",
    "rewind": "consumed",
    "fetch_accepted": "consumed",
    "fetch": "consumed",
    "resolve": "consumed",
    "emit": "consumed",
}
"""Which of an iteration's two batches a phase or a piece of device work belongs to; the rest belongs to neither."""

PHASE_COLOURS: dict[str, str] = {
    "admit": "#CC79A7",
    "prepare": "#E69F00",
    "forward": "#0072B2",
    "sample": "#009E73",
    "verify": "#999933",
    "draft": "#44AA99",
    "rewind": "#882255",
    "resolve": "#D55E00",
    "emit": "#56B4E9",
    "dummy_forward": "#8FBFE0",
    "dummy_draft": "#A9DAD3",
    "wait": "#9AA0A6",
    "ranks": "#F0E442",
    "copy": "#6A5ACD",
    "publish": "#6A5ACD",
    "fetch_accepted": "#6A5ACD",
    "fetch": "#6A5ACD",
    "iteration": "#5F6B7A",
    "other": "#BDBDBD",
}
"""One colour a phase, everywhere (NVTX, report, widgets): Okabe-Ito, then Tol's muted set, for the colour-blind.

Dummy work has a tint of what it stands for, and the wait for other ranks the yellow that no phase has.
"""

DUMMY_WORK = frozenset({"dummy_forward", "dummy_draft"})
"""Device work without rows of this rank: other ranks need its experts."""

DUMMY_ORDERS = frozenset({"dummy", "mtp_dummy", "mtp_legacy_dummy"})
"""Iterations in which a rank did nothing but that."""

RANKS_WAIT = "ranks"
"""The wait in which a host waits for the hosts of other ranks: inside prepare, and between two iterations."""

RELEASED_BY = {"accepted": "fetch_accepted"}
"""The copy that ends a wait, by the wait's name; another one ends with what its iteration enqueued last before it."""

NO_ITERATION = -1
"""Iteration number of a record made while no iteration was open."""

TRACE_EDGE = "trace_edge"
"""Void reason: device work that ran beside the iteration is not in the trace, or not all of the iteration is.

It says nothing against the times of requests, which are the host's alone.
"""

HOST_LANE = "host"
COMPUTE_LANE = "compute"
COPY_LANE = "copy"


class Category(Enum):
    """What kind of thing a :class:`Span` records."""

    PHASE = "phase"  # host span at depth 0: one phase function
    DETAIL = "detail"  # host span inside another one
    WAIT = "wait"  # host blocked on a device event
    DEVICE = "device"  # work of a device stream
    INSTANT = "instant"  # a moment; start equals end
    COUNTER = "counter"  # a number at a moment; start equals end


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One stretch of work on one lane."""

    name: str
    category: Category
    lane: str
    """``host``, or the stream's name: ``compute`` or ``copy``."""
    start_ns: int
    end_ns: int
    iteration: int = NO_ITERATION
    """The iteration open when a host span began; for device work, the one that enqueued it."""
    depth: int = 0
    """Host spans open around it when it began."""
    phase: str | None = None
    """The depth-0 host span around it; its own name for a phase itself; None outside every phase."""
    enqueued_ns: int | None = None
    """When the host noted it, right after enqueueing it (a device may have begun by then); device spans only."""
    value: float | None = None
    """Counters only."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Instants only."""

    @property
    def is_device(self) -> bool:
        """Whether a device did it."""
        return self.category is Category.DEVICE

    @property
    def duration_ns(self) -> int:
        """Length; 0 for instants and counters."""
        return self.end_ns - self.start_ns

    @property
    def noted_ns(self) -> int:
        """When the host had enqueued it; where that is not known, when it began: nothing is then launch latency."""
        return self.start_ns if self.enqueued_ns is None else self.enqueued_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedWork:
    """Device work that was enqueued and whose end is not known yet: it runs, or stands in line."""

    name: str
    lane: str
    """The stream's name: ``compute`` or ``copy``."""
    iteration: int
    """The one that enqueued it."""
    enqueued_ns: int


class DeviceTiming(Protocol):
    """Start and end of one piece of device work, known some time after it was enqueued."""

    def done(self) -> bool:
        """Whether both times are known. Never blocks."""
        ...

    @property
    def start_ns(self) -> int:
        """Host clock; valid once :meth:`done` returned True."""
        ...

    @property
    def end_ns(self) -> int:
        """Host clock; valid once :meth:`done` returned True."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchInfo:
    """One batch, named by the iteration that launched its forward."""

    iteration: int
    num_tokens: int
    """Query tokens without padding."""
    num_prefill: int
    """Rows reading their prompt."""
    num_decode: int
    """Rows adding one token each, or with drafting one and as many as are accepted."""
    request_ids: tuple[str, ...]
    """One a row, in row order."""

    @property
    def num_rows(self) -> int:
        """Rows, prefill and decode."""
        return self.num_prefill + self.num_decode

    @property
    def kind(self) -> str:
        """``decode``, ``prefill`` or ``mixed``; ``empty`` without rows."""
        if self.num_prefill and self.num_decode:
            return "mixed"
        if self.num_prefill:
            return "prefill"
        return "decode" if self.num_decode else "empty"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphUse:
    """How the launched forward ran."""

    label: str
    """``CUDA graph``, ``bucket`` (a frozen trace on the CPU) or ``eager``."""
    hit: bool
    """Whether a captured shape was replayed."""
    dims: tuple[int, int, int] | None = None
    """(tokens, prefill rows, decode rows) of the captured shape; None when eager."""
    miss_reason: str | None = None
    """Why nothing captured was replayed; None on a hit."""
    padding_tokens: int = 0
    """Tokens computed only to fill the captured shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationRecord:
    """One call of the controller, from its first phase border to its last."""

    iteration: int
    mode: str
    """``legacy`` or ``async``."""
    order: str
    """Name of the sequence of phases it took."""
    reason: str
    """Why this order was chosen."""
    begin_ns: int
    end_ns: int
    consumed: BatchInfo | None = None
    """The batch whose logits were sampled; its sample and resolve ran here."""
    launched: BatchInfo | None = None
    """The batch whose forward was enqueued; its prepare ran here."""
    outputs: int = 0
    """Request outputs made."""
    new_tokens: int = 0
    """Tokens given to requests, less those taken back because a stop string before them became sure."""
    wasted_rows: Mapping[str, int] = field(default_factory=dict)
    """Rows of a launched forward whose request this iteration found to have ended before anybody sampled them.

    By cause: eos, stop_string, length, abort, error.
    """
    graph: GraphUse | None = None
    """How the launched forward ran; None without one."""
    rows_released: int = 0
    """Rows given back to the table because their request ended, whether a launched forward held them or not."""
    rows_moved: int = 0
    """Rows that changed place to fill holes."""
    void_reasons: tuple[str, ...] = ()
    """Why its times mean nothing; empty: they count.

    hand_stepped, debugger, device_read, invariants, inline_device, changes_recorded, paced, resumed,
    event_loop or trace_edge.
    """
    free_blocks: int = 0
    """KV blocks free at its end."""
    num_waiting: int = 0
    """Queued requests at its end."""
    num_active: int = 0
    """Requests with a row at its end."""
    num_device: int | None = None
    """Pieces of device work noted in it, whether their times became known or not; None: it does not say."""

    @property
    def duration_ns(self) -> int:
        """Wall time from begin to end."""
        return self.end_ns - self.begin_ns

    @property
    def is_void(self) -> bool:
        """Whether timing statistics leave it out."""
        return bool(self.void_reasons)

    @property
    def is_disturbed(self) -> bool:
        """Whether it also took longer than it would have, so that requests which lived through it are left out."""
        return any(reason != TRACE_EDGE for reason in self.void_reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """When things happened to one request; None: they did not."""

    request_id: str
    arrival_ns: int
    """Handed to the engine."""
    admitted_ns: int | None = None
    """Given blocks and a row."""
    first_token_ns: int | None = None
    """Its first token was known to the host."""
    finished_ns: int | None = None
    """Its last output was made."""
    token_times_ns: tuple[int, ...] = ()
    """When each output token was known to the host; the first is ``first_token_ns``. They rise; accepted drafts have
    the time of the token behind them."""
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reason: str | None = None
    void_reasons: tuple[str, ...] = ()
    """Why its times mean nothing: of the void iterations it lived through, whether their records are left or not."""
    drafts_proposed: tuple[int, ...] = ()
    """Draft tokens verified for it, by their place behind the newest token; empty without drafting."""
    drafts_accepted: tuple[int, ...] = ()
    """Of those, the accepted ones."""
