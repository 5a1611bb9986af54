"""A snapshot as text and as HTML. Colours come from the notebook's own theme, so that light and dark both read well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from tracing.records import PHASE_COLOURS, Category

if TYPE_CHECKING:
    from workbench.snapshot import BlocksView, PendingView, QueuedView, RowView, Snapshot

Cells = Sequence[Sequence[str]]

_ROW_HEAD = ("row", "request", "state", "prompt", "output", "KV", "blocks", "newest", "pending")
_QUEUE_HEAD = ("request", "prompt", "max output", "waits because")
_MOST_QUEUED = 8
_TABLE = "border-collapse:collapse;margin:2px 0 8px;font-size:12px"
_CELL = "padding:1px 8px;text-align:left;border-bottom:1px solid rgba(128,128,128,.3);white-space:pre"


def snapshot_text(snapshot: Snapshot) -> str:
    """Plain text, for terminals and debuggers."""
    lines = [
        f"{snapshot.model} · {_mode_text(snapshot)} · {snapshot.device} · clock {snapshot.clock}",
        snapshot.headline,
    ]
    if snapshot.phases:
        lines.append("order   " + " → ".join(_marked_phases(snapshot)))
    lines.append("pending " + _forward_text(snapshot.pending))
    if snapshot.consumed is not None:
        lines.append("sampled " + _forward_text(snapshot.consumed))
    lines.append("blocks  " + _blocks_text(snapshot.blocks))
    if snapshot.rows:
        lines += ["", *_text_table(_ROW_HEAD, map(_row_cells, snapshot.rows))]
    if snapshot.queue:
        lines += ["", *_text_table(_QUEUE_HEAD, map(_queue_cells, snapshot.queue[:_MOST_QUEUED]))]
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
        _block_map(snapshot),
    ]
    if snapshot.rows:
        parts.append(_html_table(_ROW_HEAD, map(_row_cells, snapshot.rows)))
    if snapshot.queue:
        parts.append(_html_table(_QUEUE_HEAD, map(_queue_cells, snapshot.queue[:_MOST_QUEUED])))
        parts += [f"<div>{escape(line)}</div>" for line in _more(snapshot)]
    parts += [_span_bars(snapshot), _counter_lines(snapshot)]
    return f"<div style='font-family:sans-serif;line-height:1.5'>{''.join(parts)}</div>"


def _mode_text(snapshot: Snapshot) -> str:
    if snapshot.wanted_mode == snapshot.mode:
        return snapshot.mode
    return f"{snapshot.mode}, to be {snapshot.wanted_mode}"


def _marked_phases(snapshot: Snapshot) -> list[str]:
    return [f"[{phase}]" if phase == snapshot.phase else phase for phase in snapshot.phases]


def _forward_text(forward: PendingView | None) -> str:
    if forward is None:
        return "none"
    rows = f"{forward.num_prefill} prefill and {forward.num_decode} decode rows, {forward.num_tokens} tokens"
    padding = f", {forward.padding_tokens} padding" if forward.padding_tokens else ""
    dropped = f", {forward.table_rows.count(-1)} rows wasted" if -1 in forward.table_rows else ""
    return f"of iteration {forward.iteration}: {rows}{padding}{dropped}, {forward.ran_as}"


def _blocks_text(blocks: BlocksView) -> str:
    return f"{blocks.num_free} of {blocks.num_blocks} free, {blocks.block_size} tokens each"


def _row_cells(row: RowView) -> tuple[str, ...]:
    newest = "" if row.newest_token is None else str(row.newest_token)
    text = f" {row.newest_text[-24:]!r}" if row.newest_text else ""
    return (
        str(row.row),
        row.request_id or "",
        row.finish_reason or row.state,
        str(row.prompt_tokens),
        f"{row.output_tokens}/{row.max_tokens}",
        str(row.kv_len),
        str(len(row.blocks)),
        newest + text,
        "yes" if row.in_pending else "",
    )


def _queue_cells(queued: QueuedView) -> tuple[str, ...]:
    return queued.request_id, str(queued.prompt_tokens), str(queued.max_tokens), queued.why


def _more(snapshot: Snapshot) -> list[str]:
    hidden = len(snapshot.queue) - _MOST_QUEUED
    return [f"and {hidden} more waiting"] if hidden > 0 else []


def _text_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    table = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _html_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag} style='{_CELL}'>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table style='{_TABLE}'>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _phase_strip(snapshot: Snapshot) -> str:
    """The order's phases: the one that ran last filled with its colour, the next one outlined."""
    boxes = []
    for phase in snapshot.phases:
        colour = PHASE_COLOURS.get(phase, PHASE_COLOURS["other"])
        is_last, is_next = phase == snapshot.phase, phase == snapshot.next_phase
        fill = f"background:{colour};color:{_ink_on(colour)}" if is_last else ""
        border = f"2px {'dashed' if is_next else 'solid'} {colour}"
        boxes.append(f"<span style='padding:1px 8px;margin-right:4px;border:{border};{fill}'>{phase}</span>")
    if not boxes:
        return ""
    return f"<div style='margin:6px 0'>{''.join(boxes)}<i>{escape(snapshot.order or '')}</i></div>"


def _ink_on(colour: str) -> str:
    """Black or white, whichever is read more easily on ``#RRGGBB``."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#000" if 0.3 * red + 0.6 * green + 0.1 * blue > 110 else "#fff"


def _block_map(snapshot: Snapshot) -> str:
    """One cell a block, filled where it is held; the holder's id shows under the pointer."""
    blocks = snapshot.blocks
    shown = blocks.holders[:256]
    cells = "".join(
        f"<span title='block {block}: {escape(holder or 'free')}' style='display:inline-block;width:8px;height:8px;"
        f"margin:1px;border:1px solid rgba(128,128,128,.6);{_block_fill(holder, snapshot)}'></span>"
        for block, holder in enumerate(shown)
    )
    rest = f" and {blocks.num_blocks - len(shown)} more" if blocks.num_blocks > len(shown) else ""
    return f"<div>KV blocks: {_blocks_text(blocks)}</div><div style='line-height:8px'>{cells}{rest}</div>"


def _block_fill(holder: str | None, snapshot: Snapshot) -> str:
    if holder is None:
        return ""
    colours = [colour for phase, colour in PHASE_COLOURS.items() if phase not in ("wait", "iteration", "other")]
    order = [row.request_id for row in snapshot.rows]
    return f"background:{colours[order.index(holder) % len(colours)]}"


def _span_bars(snapshot: Snapshot) -> str:
    """Host phases and device work of the iteration, to scale."""
    shown = [span for span in snapshot.spans if span.category in (Category.PHASE, Category.WAIT, Category.DEVICE)]
    if not shown:
        return ""
    start = min(span.start_ns for span in shown)
    length = max(1, max(span.end_ns for span in shown) - start)
    lanes: dict[str, list[str]] = {}
    for span in shown:
        colour = PHASE_COLOURS.get("wait" if span.category is Category.WAIT else span.name, PHASE_COLOURS["other"])
        left, width = (span.start_ns - start) / length * 100, max(0.15, span.duration_ns / length * 100)
        lanes.setdefault(span.lane, []).append(
            f"<span title='{escape(span.name)} {span.duration_ns / 1e3:,.0f} µs' style='position:absolute;height:12px;"
            f"left:{left:.2f}%;width:{width:.2f}%;background:{colour}'></span>"
        )
    bars = "".join(
        f"<div style='display:flex'><span style='width:70px;font-size:11px'>{escape(lane)}</span>"
        f"<div style='position:relative;flex:1;height:14px'>{''.join(boxes)}</div></div>"
        for lane, boxes in lanes.items()
    )
    return f"<div style='max-width:760px'>{bars}<div style='font-size:11px'>{length / 1e6:,.3f} ms</div></div>"


def _counter_lines(snapshot: Snapshot) -> str:
    """Counters that are not zero, folded away."""
    shown = [f"{name}: {value}" for name, value in snapshot.counters.items() if value]
    return f"<details><summary>counters</summary>{escape(' · '.join(shown))}</details>" if shown else ""
