"""A snapshot as text and as HTML. Colours come from the notebook's own theme, so that light and dark both read well."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from html import escape
from typing import TYPE_CHECKING, Any

from tracing.records import PHASE_COLOURS
from workbench.bars import ink_on
from workbench.states import states_text
from workbench.timeline import runs, timeline_html

if TYPE_CHECKING:
    from workbench.snapshot import BlocksView, BudgetView, PendingView, PrefixView, QueuedView, RowView, Snapshot

Cells = Sequence[Sequence[str]]

_ROW_HEAD = ("row", "request", "state", "prompt", "output", "KV", "blocks", "newest", "text", "pending")
_QUEUE_HEAD = ("request", "prompt", "max output", "waits because")
_ROOM = {"pauses": "paused", "resumes": "resumed", "evictions": "evicted"}
"""Counters, and what they count."""
_MOST_QUEUED = 8
_MOST_BLOCKS = 256
"""Cells of the block map."""
_TEXT_SHOWN = 28
"""Characters of a row's newest text."""
_TABLE = "border-collapse:collapse;margin:2px 0 8px;font-size:12px"
_CELL = "padding:1px 8px;text-align:left;border-bottom:1px solid rgba(128,128,128,.3);white-space:pre"


def snapshot_text(snapshot: Snapshot) -> str:
    """Plain text, for terminals and debuggers."""
    lines = [
        f"{snapshot.model} · {_mode_text(snapshot)} · {snapshot.device} · clock {snapshot.clock}",
        snapshot.headline,
    ]
    if snapshot.phases:
        lines.append("order   " + " → ".join(_marked_phases(snapshot)) + "   (✓ done, [next])")
    lines.append("pending " + _forward_text(snapshot.pending))
    if snapshot.consumed is not None:
        lines.append("sampled " + _forward_text(snapshot.consumed))
    if snapshot.unfinished:
        lines.append("device  " + ", ".join(_unfinished_texts(snapshot)))
    if snapshot.budget is not None:
        lines.append("budget  " + budget_text(snapshot.budget))
    lines.append("blocks  " + _blocks_text(snapshot.blocks))
    if snapshot.prefix is not None:
        lines.append("prefix  " + prefix_text(snapshot.prefix))
    if snapshot.states is not None:
        lines.append("states  " + states_text(snapshot.states))
    if drafts := drafts_text(snapshot.counters):
        lines.append("drafts  " + drafts)
    lines += [f"room    {room_text(snapshot.counters)}"] if room_text(snapshot.counters) else []
    if snapshot.rows:
        lines += ["", *text_table(*_rows_table(snapshot))]
    if snapshot.queue:
        lines += ["", *text_table(_QUEUE_HEAD, map(_queue_cells, snapshot.queue[:_MOST_QUEUED]))]
        lines += _more(snapshot)
    return "\n".join(lines)


def snapshot_html(snapshot: Snapshot) -> str:
    """One ``div``, self-contained."""
    parts = [
        f"<div><b>{escape(snapshot.headline)}</b></div>",
        f"<div style='opacity:.75'>{escape(snapshot.model)} · {escape(_mode_text(snapshot))} · "
        f"{escape(snapshot.device)} · clock {escape(snapshot.clock)}</div>",
        _phase_strip(snapshot),
        f"<div>pending forward: {escape(_forward_text(snapshot.pending))}</div>",
        f"<div>sampled forward: {escape(_forward_text(snapshot.consumed))}</div>" if snapshot.consumed else "",
        f"<div>token budget: {escape(budget_text(snapshot.budget))}</div>" if snapshot.budget else "",
        _block_map(snapshot),
        f"<div>prefix cache: {escape(prefix_text(snapshot.prefix))}</div>" if snapshot.prefix else "",
        f"<div>recurrent states: {escape(states_text(snapshot.states))}</div>" if snapshot.states else "",
        f"<div>drafts: {drafts}</div>" if (drafts := drafts_text(snapshot.counters)) else "",
        f"<div>want of blocks: {room}</div>" if (room := room_text(snapshot.counters)) else "",
    ]
    if snapshot.rows:
        parts.append(html_table(*_rows_table(snapshot)))
    if snapshot.queue:
        parts.append(html_table(_QUEUE_HEAD, map(_queue_cells, snapshot.queue[:_MOST_QUEUED])))
        parts += [f"<div>{escape(line)}</div>" for line in _more(snapshot)]
    parts += [timeline_html(snapshot), _counter_lines(snapshot)]
    return f"<div style='font-family:sans-serif;line-height:1.5'>{''.join(parts)}</div>"


def _mode_text(snapshot: Snapshot) -> str:
    if snapshot.wanted_mode == snapshot.mode:
        return snapshot.mode
    return f"{snapshot.mode}, to be {snapshot.wanted_mode}"


def _marked_phases(snapshot: Snapshot) -> list[str]:
    marks = {_State.DONE: "{} ✓", _State.NEXT: "[{}]", _State.COMING: "{}"}
    return [marks[state].format(phase) for phase, state in _phase_states(snapshot)]


def _forward_text(forward: PendingView | None) -> str:
    if forward is None:
        return "none"
    rows = f"{forward.num_prefill} prefill and {forward.num_decode} decode rows, {forward.num_tokens} tokens"
    padding = f", {forward.padding_tokens} padding" if forward.padding_tokens else ""
    dropped = f", {forward.table_rows.count(-1)} rows wasted" if -1 in forward.table_rows else ""
    return f"of iteration {forward.iteration}: {rows}{padding}{dropped}, {forward.ran_as}"


def _unfinished_texts(snapshot: Snapshot) -> list[str]:
    return [
        f"{work.name} {work.iteration} {'runs' if runs(work, snapshot.unfinished) else 'in line'}"
        for work in snapshot.unfinished
    ]


def budget_text(budget: BudgetView) -> str:
    """Which forward, and who has its tokens."""
    which = f"forward of iteration {budget.iteration}{'' if budget.is_launched else ', prepared'}"
    counts = ((budget.decode, "decode"), (budget.prompt, "prompt"), (budget.padding, "padding"))
    parts = [f"{count} {kind}" for count, kind in counts if count]
    return f"{which}: {' + '.join(parts)} of {budget.limit} tokens"


def prefix_text(prefix: PrefixView) -> str:
    """Hit rate with what it is a rate of, and what the cache lost."""
    rate = (
        "no request yet"
        if prefix.hit_rate is None
        else f"{100 * prefix.hit_rate:.0f} % of {prefix.query_tokens} tokens hit"
    )
    waits = f", {prefix.waits} waited for one being computed" if prefix.waits else ""
    return f"{rate}{waits}, {prefix.evicted_blocks} cached blocks evicted"


def room_text(counters: Mapping[str, Any]) -> str:
    """Pauses, resumes and evictions for want of blocks; empty where there were none."""
    counts = [(said, counters[name]) for name, said in _ROOM.items()]
    return ", ".join(f"{count} {said}" for said, count in counts) if any(count for _, count in counts) else ""


def drafts_text(counters: Mapping[str, Any]) -> str:
    """Acceptance by place and together; empty where nothing was drafted. ``docs/metrics.md`` (Drafts) defines both."""
    proposed, accepted = counters["drafts_proposed"], counters["drafts_accepted"]
    if not proposed:
        return ""
    total, taken = sum(proposed.values()), sum(accepted.values())
    places = ", ".join(
        f"draft {place + 1} {100 * accepted.get(place, 0) / proposed[place]:.0f} %" for place in sorted(proposed)
    )
    row = 1 + taken / proposed[0]
    return f"{taken:,} of {total:,} accepted ({places}), {row:.2f} tokens a verified row"


def _blocks_text(blocks: BlocksView) -> str:
    reused = "" if blocks.named is None else f", {blocks.num_shared} shared, {blocks.num_cached} cached"
    return f"{blocks.num_free} of {blocks.num_blocks} free{reused}, {blocks.block_size} tokens each"


def _rows_table(snapshot: Snapshot) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Heading and rows; what was skipped of prompts has a column where prefixes are cached."""
    rows: list[Sequence[str]] = [_row_cells(row) for row in snapshot.rows]
    if snapshot.prefix is None:
        return _ROW_HEAD, rows
    after = _ROW_HEAD.index("prompt") + 1
    skipped = [str(row.num_cached_tokens) for row in snapshot.rows]
    return (
        (*_ROW_HEAD[:after], "skipped", *_ROW_HEAD[after:]),
        [(*cells[:after], more, *cells[after:]) for cells, more in zip(rows, skipped, strict=True)],
    )


def _row_cells(row: RowView) -> tuple[str, ...]:
    text = row.newest_text
    cut = "…" if len(text) > _TEXT_SHOWN else ""
    return (
        str(row.row),
        row.request_id or "",
        row.standing,
        str(row.prompt_tokens),
        f"{row.output_tokens}/{row.max_tokens}",
        str(row.kv_len),
        str(len(row.blocks)),
        "" if row.newest_token is None else str(row.newest_token),
        cut + repr(text[-_TEXT_SHOWN:]) if text else "",
        "yes" if row.in_pending else "",
    )


def _queue_cells(queued: QueuedView) -> tuple[str, ...]:
    return queued.request_id, str(queued.prompt_tokens), str(queued.max_tokens), queued.why


def _more(snapshot: Snapshot) -> list[str]:
    hidden = len(snapshot.queue) - _MOST_QUEUED
    return [f"and {hidden} more waiting"] if hidden > 0 else []


def text_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of columns as wide as their widest cell."""
    table = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def html_table(head: Sequence[str], rows: Iterable[Sequence[str]], *, is_html: bool = False) -> str:
    """A table; its cells are text, or HTML already."""

    def line(cells: Sequence[str], tag: str) -> str:
        inner = [cell if is_html else escape(cell) for cell in cells]
        return "<tr>" + "".join(f"<{tag} style='{_CELL}'>{cell}</{tag}>" for cell in inner) + "</tr>"

    return f"<table style='{_TABLE}'>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


class _State(Enum):
    DONE = "✓ done"
    NEXT = "▸ next"
    COMING = "to come"


def _phase_states(snapshot: Snapshot) -> list[tuple[str, _State]]:
    """Each phase of the order; all are done between iterations, none is said to be after a failure."""
    if snapshot.iteration is None:
        return [(phase, _State.DONE) for phase in snapshot.phases]
    if snapshot.next_phase not in snapshot.phases:
        return [(phase, _State.COMING) for phase in snapshot.phases]
    at = snapshot.phases.index(snapshot.next_phase)
    states = [_State.DONE] * at + [_State.NEXT] + [_State.COMING] * (len(snapshot.phases) - at - 1)
    return list(zip(snapshot.phases, states, strict=True))


def _phase_strip(snapshot: Snapshot) -> str:
    """The order's phases, and a legend of their states."""
    if not snapshot.phases:
        return ""
    pills = "".join(_pill(phase, state) for phase, state in _phase_states(snapshot))
    legend = " · ".join(state.value for state in _State)
    return (
        f"<div style='margin:6px 0'>{pills}<i>{escape(snapshot.order or '')}</i>"
        f"<span style='font-size:11px;opacity:.75;margin-left:16px'>{legend}</span></div>"
    )


def _pill(phase: str, state: _State) -> str:
    colour = PHASE_COLOURS.get(phase, PHASE_COLOURS["other"])
    look, mark = {
        _State.DONE: (f"border:2px solid {colour};background:{colour};color:{ink_on(colour)}", "✓ "),
        _State.NEXT: (f"border:2px solid {colour};font-weight:bold", "▸ "),
        _State.COMING: ("border:2px dashed rgba(128,128,128,.6);opacity:.65", ""),
    }[state]
    return f"<span style='padding:1px 8px;margin-right:4px;{look}'>{mark}{phase}</span>"


def _block_map(snapshot: Snapshot) -> str:
    """One cell a block, with the row that holds it; holders' ids show under the pointer."""
    blocks = snapshot.blocks
    rows = {row.request_id: row.row for row in snapshot.rows}
    cells = "".join(_block_cell(blocks, block, rows) for block in range(min(_MOST_BLOCKS, blocks.num_blocks)))
    rest = f" and {blocks.num_blocks - _MOST_BLOCKS} more" if blocks.num_blocks > _MOST_BLOCKS else ""
    more = "" if blocks.named is None else ", ×2 that two hold it, · that it is cached and nobody does"
    head = f"KV blocks: {_blocks_text(blocks)}; a number is the row that holds the block{more}"
    return f"<div>{head}</div><div style='line-height:16px'>{cells}{rest}</div>"


def _block_cell(blocks: BlocksView, block: int, rows: Mapping[str | None, int]) -> str:
    """Greys only: colours mean phases. Neighbouring rows differ in shade."""
    holders = blocks.holders[block]
    row = rows.get(holders[0]) if holders else None
    shade = "" if row is None else f"background:rgba(128,128,128,{(0.55, 0.25, 0.4)[row % 3]});"
    if len(holders) > 1:
        mark, told = f"×{len(holders)}", f"{', '.join(holders)} ({len(holders)} hold it)"
    elif holders:
        mark, told = "" if row is None else str(row), holders[0]
    else:
        mark, told = ("·", "cached, nobody holds it") if blocks.is_cached(block) else ("", "free")
    return (
        f"<span title='block {block}: {escape(told)}' style='display:inline-block;width:14px;height:14px;"
        f"margin:1px;font-size:10px;line-height:14px;text-align:center;vertical-align:top;"
        f"box-shadow:inset 0 0 0 1px rgba(128,128,128,.6);{shade}'>{mark}</span>"
    )


def _counter_lines(snapshot: Snapshot) -> str:
    """Counters that are not zero, folded away."""
    shown = [f"{name}: {value}" for name, value in snapshot.counters.items() if value]
    return f"<details><summary>counters</summary>{escape(' · '.join(shown))}</details>" if shown else ""
