"""What the panel says to the browser and hears from it, as plain values.

Each class is one JSON object. ``workbench/panel/*_view.py`` make them from a session, ``workbench/widgets/panel_*.js``
draw them; neither side knows anything else of the other. Times are milliseconds unless a name says otherwise, and None
where nothing is known.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict

# -- the bar and the strip ---------------------------------------------------------------------------------------------


class BarView(TypedDict):
    """The control bar: where the session stands and which buttons mean something now."""

    state: Literal["running", "paused", "finished", "failed", "closed"]
    headline: str
    """Where the engine stands, the place first; the order's reason is the strip's."""
    place: str
    """The same for :attr:`Notice.place`: differs once the session has moved on."""
    stopped: str
    """Why the last run stopped, while the session still stands there; else empty."""
    model: str
    device: str
    clock: str
    iterations: int
    """Begun so far."""
    mode: str
    wanted_mode: str
    """Differs from ``mode`` until a switch takes effect."""
    other_mode: str
    switch_text: str
    """What switching to ``other_mode`` would do now, in a sentence."""
    can: dict[str, bool]
    """By name of command (:data:`COMMANDS`): whether it would do something now."""
    badges: list[BadgeView]
    """What voids times, and what else must not be overlooked."""


class BadgeView(TypedDict):
    """A short warning."""

    text: str
    title: str
    """The whole of it, with the remedy."""


class PhaseCell(TypedDict):
    """One phase of the order, left to right."""

    name: str
    colour: str
    state: Literal["done", "last", "next", "coming"]
    """``last``: the one that ran last; the iteration stands behind it."""
    title: str
    """What this phase does, in a sentence."""


class StripView(TypedDict):
    """The order of the iteration in hand, or between iterations of the last one."""

    iteration: int | None
    is_in_hand: bool
    order: str | None
    colour: str
    reason: str
    """In words; empty before the first iteration."""
    why: str
    """``session.explain()``: why this order, and what would change it."""
    phases: list[PhaseCell]
    next_phase: str | None
    """Between iterations that of the iteration to come, where it is known."""
    next_order: str | None
    """Between iterations: what would come next, with its reason."""
    forwards: list[ForwardCell]
    """The sampled forward and the one that is prepared, if an iteration has them in hand, and the pending one."""


class ForwardCell(TypedDict):
    """A forward."""

    role: Literal["sampled", "pending", "prepared", "last"]
    """``prepared``: not launched yet. ``last``: the one launched last, where there is no other."""
    iteration: int
    on_device: Literal["runs", "in line", "has run", ""]
    """Where it stands on the device, as last asked; empty where that is not known: not launched, or not recorded."""
    text: str
    """Rows, tokens, and the graph it ran as."""
    budget: BudgetCell


class BudgetCell(TypedDict):
    """How a forward uses ``max_batch_tokens``, in tokens."""

    limit: int
    decode: int
    prompt: int
    """Of prompts and chunks."""
    padding: int


# -- panes -------------------------------------------------------------------------------------------------------------


class RejectedCell(TypedDict):
    """Drafts of a request that one verification turned down."""

    at: int
    """Place in the row's ``tokens`` of what the model drew instead of the first of them."""
    place: int
    """Which draft the first of them was, from 1."""
    tokens: list[str]
    """Their texts."""
    token_ids: list[int]
    """Of those."""


class RequestRow(TypedDict):
    """One request."""

    request_id: str
    state: str
    """``coming``, or a :class:`engine.request.RequestState`'s value."""
    row: int | None
    hue: int
    """0 to 11, the same in the block map and the table for the same request."""
    prompt_tokens: int
    cached_tokens: int | None
    """Of what it had to have in the cache when it was admitted last, the tokens it skipped; None: no prefix caching."""
    output_tokens: int
    max_tokens: int
    kv_len: int
    blocks: list[int]
    in_pending: bool
    tokens: list[str]
    """Texts of the newest of its output, oldest first, whitespace made visible; the last one is marked."""
    token_ids: list[int]
    """Of those."""
    logprobs: list[float | None]
    """Of those, None where one is not known; empty where none is."""
    num_new: int
    """How many of ``tokens`` came with the iteration that resolved last."""
    accepted: list[int]
    """Places in ``tokens`` of accepted drafts; the others are the model's own draws."""
    rejected: list[RejectedCell]
    """By its newest verifications that turned any down, oldest first; none behind its end."""
    drafts: str
    """How many of its drafts were accepted, in words; empty: it had none."""
    why: str
    """Why it waits or is paused, how far its prompt is read in chunks, that it is computed again after an eviction, or
    how it ended; empty while it runs otherwise."""
    queue_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    is_void: bool
    """Whether its times do not count."""
    why_void: str
    """Why they do not, in words; empty where they do."""
    can_abort: bool


class RequestsView(TypedDict):
    """All requests: running, then waiting, then ended (the newest first)."""

    rows: list[RequestRow]
    left_out: int
    """Ended or waiting ones that are not listed."""
    hint: str
    """What to do when there is nothing to see."""


class RequestsPicture(RequestsView):
    """All requests as they were once; what has changed since is a :class:`RequestsNews` beside it."""

    number: int
    """Rises with each."""


class RequestsNews(TypedDict):
    """What has changed since a picture, all of it: so whoever has both has the truth, whatever came in between."""

    since: int
    """:attr:`RequestsPicture.number` of it; news of another one mean nothing."""
    number: int
    """Rises with each: of two to the same picture the later one holds. In a run they come by two ways."""
    order: list[str] | None
    """Ids of all rows there are; None: those of the picture, as they stood there."""
    rows: list[dict[str, Any]]
    """Those that are new, whole, and of those that differ from the picture's ``request_id`` and the fields that do;
    where blocks were only added, ``more_blocks`` has these, in the place of ``blocks``."""
    left_out: int
    hint: str


class BlocksPane(TypedDict):
    """The KV block pool, block by block. What there is a number of for each block is packed: base64 of bytes."""

    block_size: int
    num_blocks: int
    num_free: int
    """Blocks that nobody holds and that hold nothing of use."""
    num_shared: int
    """Blocks that several requests hold."""
    num_cached: int | None
    """Blocks that nobody holds and that a later request may reuse; None: no prefix caching, and none are shared."""
    kinds: str
    """A byte a block: 0 to 11 the hue of its holder, of several the first one's; 254 cached, 255 free."""
    refs: str
    """A byte a block: how many hold it, 255 for that or more. Empty: none is shared."""
    named: str
    """A bit a block, the lowest first: whether its contents are known by name. Empty: no prefix caching."""
    partly: list[int]
    """Of each held block that is not full, the block and its cached tokens, one behind the other."""
    holders: list[HolderCell]
    facts: list[list[str]]
    """Name and value of what prefix caching and pausing have done so far; empty where neither is on."""
    states: StatesCell | None
    """Recurrent states; None: the model has none."""


class StatesCell(TypedDict):
    """Slots of recurrent states, and the snapshots of prefixes."""

    text: str
    """How many there are, and how large."""
    slots: list[SlotCell]
    snapshots: list[SnapshotCell] | None
    """The least recently used first; None: no prefix caching."""
    snapshots_text: str
    """How many of the budget are kept, and what gave way."""


class SlotCell(TypedDict):
    """The live state of one row."""

    request_id: str
    """Empty: free."""
    hue: int
    """-1: free."""


class SnapshotCell(TypedDict):
    """A state behind a cached prefix."""

    slot: int
    block: int | None
    """The prefix's last; None: it has lost its name."""
    num_tokens: int | None
    """Of the prefix; None: nobody here begins so."""
    hue: int
    """Of the first holder of that block; -1: nobody holds it."""
    text: str
    """Which prefix, and who holds it."""


class HolderCell(TypedDict):
    """Who holds blocks."""

    request_id: str
    hue: int
    blocks: str
    """Its blocks in order, four bytes each, the lowest first, packed likewise."""
    tokens: int
    """Cached."""


class GraphCell(TypedDict):
    """One captured size."""

    name: str
    num_tokens: int
    num_prefill: int
    num_decode: int
    hits: int
    padding_tokens: int
    """All hits together."""
    is_pending: bool
    """Whether the pending forward replays it."""
    awaited_by: str
    """The waiting request that is next and would run in it if it were alone; empty: none."""


class GraphsPane(TypedDict):
    """Captured sizes and how they were used, over the iterations that are recorded."""

    label: str
    """``CUDA graph``, or ``bucket`` on the CPU devices."""
    graphs: list[GraphCell]
    hits: int
    misses: dict[str, int]
    """By reason."""
    deferrals: int | None
    """Iterations in which the request that was next waited for a graph, since the engine was made or reset; None: none
    ever waits, as ``graph_all_prefills`` is off."""
    padding_share: float | None
    """``padding share`` of docs/metrics.md: padding tokens / (padding tokens + tokens of launched batches)."""
    memory: str
    """What capturing took; empty where nothing was captured."""
    hint: str


class ExpertsPane(TypedDict):
    """Tokens sent to each expert, layer by layer."""

    layers: list[int]
    """Number of each layer with experts."""
    num_experts: int
    counts: str
    """Layer by layer, eight bytes an expert, the lowest first, base64: tokens. Empty: nothing was counted."""
    imbalances: list[float]
    """Of each layer, its largest load over its mean."""
    summary: str
    hint: str


class ValueCell(TypedDict):
    """One value that a phase read or wrote."""

    name: str
    request_id: str
    """Empty: everybody's."""
    hue: int
    """-1 for everybody's."""
    old: str
    """Empty where nothing stood there, and for what was read."""
    new: str
    is_stale: bool
    """Of something read: it means nothing any more. Of something written: what it replaced meant nothing."""
    note: str


class PhaseCard(TypedDict):
    """What one phase read, wrote and launched."""

    phase: str
    colour: str
    read: list[ValueCell]
    wrote: list[ValueCell]
    enqueued: list[str]
    left_out: int
    """Values read and written that are not listed."""


class ChangesPane(TypedDict):
    """What the phases of one iteration read and wrote."""

    recording: bool
    iteration: int | None
    title: str
    cards: list[PhaseCard]
    device_values: list[str]
    """Names that :meth:`~workbench.session.Session.read_device` takes now."""
    device_value: str
    """The one that was read last, as text; empty if none."""
    hint: str


class HistoryPane(TypedDict):
    """The slider and what is known of the iteration chosen on it."""

    first: int
    last: int
    """-1: no iteration yet."""
    chosen: int | None
    """None: the newest, whatever that is."""
    title: str
    why: str
    facts: list[list[str]]
    """Rows of name and value, with units."""
    watched: list[list[str]]
    """Watch expressions: name and value at its end."""
    table: list[list[str]]
    """The request table as it was at its end, a heading row first; empty where it was not recorded."""
    hint: str


class StopRow(TypedDict):
    """One breakpoint."""

    id: int
    text: str
    enabled: bool
    hits: int
    is_hit: bool
    """Whether the session stands at it now."""


class StopsPane(TypedDict):
    """Breakpoints and what a new one may name."""

    rows: list[StopRow]
    phases: list[str]
    reasons: list[list[str]]
    """Name and words of each :class:`engine.phases.Reason`."""
    hint: str


class EventRow(TypedDict):
    """One event."""

    iteration: int
    kind: str
    text: str


class LogPane(TypedDict):
    """Events, the newest first."""

    rows: list[EventRow]
    left_out: int
    hint: str


# -- what is heard -----------------------------------------------------------------------------------------------------


class Notice(TypedDict):
    """What a command had to say, shown under the bar until the next one, or until the session moves on without it."""

    number: int
    """Rises with each, so that the same text twice is seen twice."""
    level: Literal["info", "error"]
    text: str
    """One line; empty where what was done shows itself: then the notice before stays."""
    detail: str
    """A traceback where the engine failed; empty otherwise."""
    command: str
    """What it answers: one of :data:`COMMANDS`; empty for a run in the background that ended."""
    place: str
    """Where the session stood: :attr:`BarView.place` then."""


class Command(TypedDict):
    """A click or a key: ``{"kind": "command", "name": "run", "args": {"n": 100}}``."""

    kind: Literal["command"]
    name: str
    args: dict[str, Any]


COMMANDS: dict[str, tuple[str, ...]] = {
    "step_phase": (),
    "step": (),
    "run": ("n",),  # None: until nothing is left to do
    "run_to": ("phase",),
    "run_until": ("expression",),  # of s, the session: "s.row(0).output_tokens >= 8"
    "pause": (),
    "set_mode": ("mode",),
    "set_pace": ("per_s",),  # iterations a second; 0: as fast as they go
    "submit": ("prompt", "max_tokens", "temperature", "stop", "seed"),
    "abort": ("request_id",),
    "restart": (),
    "reset": (),
    "recover": (),
    "record_changes": ("wanted",),
    "read_device": ("name",),
    "break_on": ("phase", "request", "reason", "when", "graph_miss", "bubble_us"),
    "enable_stop": ("id", "enabled"),
    "remove_stop": ("id",),
    "choose": ("iteration",),  # None: follow the newest
    "save": ("folder",),
}
"""Each command with the names of its arguments; those that are left out are None."""
KEYS: dict[str, str] = {
    "p": "step_phase",
    "s": "step",
    "r": "run",
    " ": "pause",
    "m": "set_mode",
}
"""Keys of the bar while the pointer or the focus is in the panel."""
TABS = ("requests", "blocks", "graphs", "experts", "changes", "history", "figures", "stops", "log")
"""Left to right; ``experts`` only where the model has some."""
