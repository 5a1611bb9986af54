"""Past iterations and the changes of phases, as text and as HTML. Stale values are in brackets, and grey."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from tracing.void_words import void_words
from workbench.display import html_table, text_table

if TYPE_CHECKING:
    from tracing.records import BatchInfo
    from workbench.changes import Change, PhaseChanges, Reading
    from workbench.history import PastIteration
    from workbench.images import TableImage

_READ_HEAD = ("name", "request", "value", "")
_WROTE_HEAD = ("name", "request", "old", "new", "")
TABLE_HEAD = ("row", "request", "state", "prompt", "output", "KV", "blocks")
_MOST_SHOWN = 64
_MOST_ITEMS = 8
"""Of a sequence."""
_GREY = "<span style='opacity:.5'>{}</span>"


def changes_text(changes: PhaseChanges) -> str:
    """One phase, for terminals and debuggers."""
    lines = [f"iteration {changes.iteration} {changes.order}: {changes.phase}"]
    lines += _section("read", _READ_HEAD, [_read_cells(one) for one in changes.read])
    lines += _section("wrote", _WROTE_HEAD, [_change_cells(one) for one in changes.wrote])
    lines += [f"  enqueued  {work}" for work in changes.enqueued]
    return "\n".join(lines)


def changes_html(changes: PhaseChanges) -> str:
    """One phase as two tables."""
    parts = [f"<div><b>iteration {changes.iteration} {escape(changes.order)}: {escape(changes.phase)}</b></div>"]
    parts += _html_section("read", _READ_HEAD, [_read_cells(one, html=True) for one in changes.read])
    parts += _html_section("wrote", _WROTE_HEAD, [_change_cells(one, html=True) for one in changes.wrote])
    parts += [f"<div>enqueued: {escape(work)}</div>" for work in changes.enqueued]
    return _box(parts)


def iteration_text(past: PastIteration) -> str:
    """One iteration: its record, what was watched, its table before and after, what its phases wrote."""
    lines = [_headline(past), *_record_lines(past)]
    lines += [f"watch   {name}: {value!r}" for name, value in past.watched.items()]
    if not past.has_changes:
        return "\n".join([*lines, _not_recorded()])
    for title, table in (("table before", past.before), ("table after", past.after)):
        lines += _section(title, TABLE_HEAD, table_rows(table))
    for phase in past.phases:
        lines += ["", changes_text(phase)]
    return "\n".join(lines)


def iteration_html(past: PastIteration) -> str:
    """The same, each phase folded away."""
    parts = [f"<div><b>{escape(_headline(past))}</b></div>"]
    parts += [f"<div>{escape(line)}</div>" for line in _record_lines(past)]
    parts += [f"<div>watch {escape(name)}: {escape(repr(value))}</div>" for name, value in past.watched.items()]
    if not past.has_changes:
        return _box([*parts, f"<div style='opacity:.75'>{escape(_not_recorded())}</div>"])
    for title, table in (("table before", past.before), ("table after", past.after)):
        parts += _html_section(title, TABLE_HEAD, [[escape(cell) for cell in row] for row in table_rows(table)])
    for phase in past.phases:
        count = len(phase.wrote)
        head = f"{escape(phase.phase)}: {count} value{'' if count == 1 else 's'} written"
        parts.append(f"<details><summary>{head}</summary>{changes_html(phase)}</details>")
    return _box(parts)


def _headline(past: PastIteration) -> str:
    record = past.record
    if record is None:
        return f"iteration {past.index}: in hand, or not recorded"
    void = f", times void: {void_words(record.void_reasons)}" if record.is_void else ""
    return f"iteration {past.index} {record.order} ({record.reason}), {record.duration_ns / 1e6:.3f} ms{void}"


def _record_lines(past: PastIteration) -> list[str]:
    record = past.record
    if record is None:
        return []
    return [
        f"sampled {_batch(record.consumed)}",
        f"launched {_batch(record.launched)}",
        f"tokens  {record.new_tokens} given, {record.outputs} outputs, {record.rows_released} rows released, "
        f"{record.rows_moved} moved, {record.free_blocks} blocks free at the end",
    ]


def _batch(batch: BatchInfo | None) -> str:
    if batch is None:
        return "nothing"
    return f"forward {batch.iteration}: {batch.num_prefill} prefill and {batch.num_decode} decode rows"


def _not_recorded() -> str:
    return "tables and changes were not recorded: session.record_changes = True before it runs"


def table_rows(table: TableImage) -> list[list[str]]:
    """The cells of each live row, under :data:`TABLE_HEAD`."""
    return [
        [
            str(row.row),
            row.request_id or "",
            row.standing,
            str(row.prompt_tokens),
            f"{row.output_tokens}/{row.max_tokens}",
            str(row.kv_len),
            value_text(row.blocks),
        ]
        for row in table.rows
    ]


def _read_cells(one: Reading, *, html: bool = False) -> list[str]:
    value = _marked(one.value, one.is_stale, html)
    plain = [one.name, one.request_id or "", one.note]
    name, request_id, note = map(escape, plain) if html else plain
    return [name, request_id, value, note]


def _change_cells(one: Change, *, html: bool = False) -> list[str]:
    plain = [one.name, one.request_id or "", one.note]
    name, request_id, note = map(escape, plain) if html else plain
    return [name, request_id, _marked(one.old, one.old_is_stale, html), _marked(one.new, False, html), note]


def _marked(value: Any, is_stale: bool, html: bool) -> str:
    text = value_text(value)
    if html:
        return _GREY.format(escape(text)) if is_stale else escape(text)
    return f"({text})" if is_stale else text


def value_text(value: Any) -> str:
    """One value in a few characters; of a sequence its first items, and how many more there are."""
    if value is None:
        return "–"
    if not isinstance(value, tuple):
        return str(value)
    shown = [str(item) for item in value[:_MOST_ITEMS]]
    hidden = len(value) - len(shown)
    return " ".join(shown) + (f" … {hidden} more" if hidden else "") or "none"


def _section(title: str, head: Sequence[str], rows: list[list[str]]) -> list[str]:
    if not rows:
        return [f"  {title}: nothing"]
    lines = text_table(head, rows[:_MOST_SHOWN])
    return [f"  {title}", *(f"    {line}" for line in lines), *(f"    {line}" for line in _more(rows))]


def _html_section(title: str, head: Sequence[str], rows: list[list[str]]) -> list[str]:
    """``rows`` hold HTML."""
    if not rows:
        return [f"<div>{title}: nothing</div>"]
    more = (f"<div>{line}</div>" for line in _more(rows))
    return [f"<div>{title}</div>", html_table(head, rows[:_MOST_SHOWN], is_html=True), *more]


def _more(rows: Sequence[object]) -> list[str]:
    hidden = len(rows) - _MOST_SHOWN
    return [f"and {hidden} more"] if hidden > 0 else []


def _box(parts: Iterable[str]) -> str:
    return f"<div style='font-family:sans-serif;line-height:1.5'>{''.join(parts)}</div>"
