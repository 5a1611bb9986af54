"""What a phase read and wrote on the host, worked out from the images before and behind it.

What was written is the difference of the two images. What was read cannot be seen; it is what
``docs/architecture.md`` says the phase reads, with the values that stood there. Device memory is not looked at:
``enqueued`` names the work that writes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from engine.phases import Order, Phase
from engine.step_function import FROM_DRAFT, FROM_SAMPLE, NO_BLOCK
from workbench.images import BorderImage, PendingImage, StagedImage, TableImage, VerifiedImage

_ROW = "row"
_NOT_SHOWN = ("key", "block_count", "is_prefill")
"""Columns that say what ``row``, ``blocks`` and ``state`` say."""
_AHEAD = "counts tokens of a forward that is not launched yet"
_AT_MOST = "counts tokens of a forward that is not launched yet, and all drafts of the one before as if accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A value that a phase read."""

    name: str
    """A column, ``blocks``, ``free blocks``, ``waiting``, ``pending``, or a buffer such as ``staged[1].kv_len``."""
    request_id: str | None
    """Whose; None: everybody's, or padding's."""
    value: Any
    is_stale: bool = False
    """Whether it stands there and means nothing any more."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A value that a phase wrote."""

    name: str
    """As for :class:`Reading`."""
    request_id: str | None
    old: Any
    """None: there was none."""
    new: Any
    """None: there is none any more."""
    old_is_stale: bool = False
    """Whether the old value meant nothing any more when it was written over."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChanges:
    """One phase of one iteration. A prompt shows it as text, a notebook as a table."""

    iteration: int
    order: str
    phase: str
    read: tuple[Reading, ...]
    wrote: tuple[Change, ...]
    enqueued: tuple[str, ...]
    """Work launched on the device, which writes what is there."""

    def of(self, request_id: str) -> tuple[Change, ...]:
        """What it wrote for one request."""
        return tuple(change for change in self.wrote if change.request_id == request_id)

    def __str__(self) -> str:
        from workbench.history_view import changes_text

        return changes_text(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from workbench.history_view import changes_html

        return changes_html(self)


def phase_changes(
    *, iteration: int, order: str, phase: Phase, before: BorderImage, behind: BorderImage
) -> PhaseChanges:
    """What ``phase`` read and wrote, from the images before and behind it."""
    return PhaseChanges(
        iteration=iteration,
        order=order,
        phase=phase.value,
        read=tuple(_read(phase, before, behind)),
        wrote=tuple(_written(before, behind, _AT_MOST if order == Order.MTP_OVERLAP_LATE.label else _AHEAD)),
        enqueued=tuple(_enqueued(phase, before, behind)),
    )


# -- read --------------------------------------------------------------------------------------------------------------


def _read(phase: Phase, before: BorderImage, behind: BorderImage) -> Iterator[Reading]:
    if phase is Phase.ADMIT:
        yield Reading(name="waiting", request_id=None, value=before.num_waiting)
        yield Reading(name="free blocks", request_id=None, value=before.num_free_blocks)
        yield from _columns_read(before.table, ("max_output",))
        yield from _chunks_read(before.table)
    elif phase is Phase.PREPARE:
        yield from _columns_read(before.table, ("kv_len", "num_output", "max_output"))
        yield from _chunks_read(before.table)
        yield Reading(name="free blocks", request_id=None, value=before.num_free_blocks)
    elif phase is Phase.FORWARD and before.staged is not None:
        yield from _staged_read(before.staged)
    elif phase in (Phase.SAMPLE, Phase.VERIFY) and before.pending is not None:
        yield from _pending_read(before.table, before.pending, behind.verified)
    elif phase in (Phase.DRAFT, Phase.REWIND) and behind.verified is not None:
        yield from _verified_read(phase, behind.verified)
        if phase is Phase.REWIND:
            yield from _columns_read(before.table, ("kv_len",))
    elif phase is Phase.RESOLVE:
        yield from _results_read(before, behind)
        yield from _columns_read(before.table, ("num_output", "max_output"))
    elif phase is Phase.EMIT:
        for request_id, reason in before.ended.items():
            yield Reading(name="finish reason", request_id=request_id, value=reason)


def _pending_read(table: TableImage, pending: PendingImage, verified: VerifiedImage | None) -> Iterator[Reading]:
    drafts = {} if verified is None else verified.drafts
    for request_id, row in zip(pending.request_ids, pending.table_rows.tolist(), strict=True):
        note = "its request ended: computed for nothing" if row < 0 else _partial_note(table, row)
        yield Reading(name="pending row", request_id=request_id, value=row, is_stale=row < 0, note=note)
        if drafts.get(request_id):
            yield Reading(name="drafts", request_id=request_id, value=f"{drafts[request_id]}, on the device")


def _verified_read(phase: Phase, verified: VerifiedImage) -> Iterator[Reading]:
    """What the two phases behind verify read of it: draft its newest ids on the device, rewind the counts."""
    for request_id, drafts in verified.drafts.items():
        if phase is Phase.DRAFT:
            yield Reading(name="newest id", request_id=request_id, value="on the device")
        elif drafts and verified.accepted is not None:
            yield Reading(
                name="accepted drafts", request_id=request_id, value=f"{verified.accepted[request_id]} of {drafts}"
            )


def _columns_read(table: TableImage, names: tuple[str, ...]) -> Iterator[Reading]:
    for name in names:
        for request_id, value in zip(table.request_ids, table.columns[name].tolist(), strict=True):
            yield Reading(name=name, request_id=request_id, value=value)


def _chunks_read(table: TableImage) -> Iterator[Reading]:
    for row, request_id in enumerate(table.request_ids):
        if table.state(row) == "prefill":
            done, end, _ = table.chunk(row)
            yield Reading(name="chunk_done", request_id=request_id, value=done)
            yield Reading(name="chunk_end", request_id=request_id, value=end)


def _partial_note(table: TableImage, row: int) -> str:
    _, end, length = table.chunk(row)
    return "a chunk, and not its prompt's last: nothing is sampled of it" if end < length else ""


def _staged_read(staged: StagedImage) -> Iterator[Reading]:
    for place, request_id in enumerate(staged.request_ids):
        for name, value in _staged_values(staged, place).items():
            yield Reading(name=f"staged[{staged.half}].{name}", request_id=request_id, value=value)


def _results_read(before: BorderImage, behind: BorderImage) -> Iterator[Reading]:
    for request_id in before.sampled or ():
        tokens = behind.tokens.get(request_id)
        note = "" if tokens is not None else "its row has no such owner any more, or was aborted: given to nobody"
        name = "sampled id" if before.verified is None else "verified ids"
        yield Reading(name=name, request_id=request_id, value=_plain(tokens), is_stale=tokens is None, note=note)


def _plain(tokens: tuple[int, ...] | None) -> Any:
    """One token as a number."""
    return tokens[0] if tokens is not None and len(tokens) == 1 else tokens


# -- written -----------------------------------------------------------------------------------------------------------


def _written(before: BorderImage, behind: BorderImage, ahead: str) -> Iterator[Change]:
    yield from _counts_written(before, behind)
    rewound = behind.verified if before.verified is not None and before.verified.accepted is None else None
    note = ahead if before.staged is None and behind.staged is not None else ""
    yield from table_changes(before.table, behind.table, ahead=note, rewound=rewound)
    yield from _record_written(before, behind)
    if behind.staged is not None and before.staged is None:
        yield from _staged_written(behind.overwritten, behind.staged)
    yield from _tokens_written(before, behind)
    for request_id, reason in behind.ended.items():
        if request_id not in before.ended:
            yield Change(name="finish reason", request_id=request_id, old=None, new=reason)
    for request_id, is_last in behind.outputs[len(before.outputs) :]:
        yield Change(name="output", request_id=request_id, old=None, new="last" if is_last else "progress")


def _tokens_written(before: BorderImage, behind: BorderImage) -> Iterator[Change]:
    for request_id, tokens in behind.tokens.items():
        if request_id in before.tokens:
            continue
        former = behind.former_tokens.get(request_id)
        drafts, name, note = len(tokens) - 1, "newest token", ""
        if drafts:
            name = "newest tokens"
            note = "the first is an accepted draft" if drafts == 1 else f"the first {drafts} are accepted drafts"
        yield Change(
            name=name,
            request_id=request_id,
            old=None if former is None else former[-1],
            new=_plain(tokens),
            note=note,
        )


def _counts_written(before: BorderImage, behind: BorderImage) -> Iterator[Change]:
    for name, old, new in (
        ("waiting", before.num_waiting, behind.num_waiting),
        ("free blocks", before.num_free_blocks, behind.num_free_blocks),
    ):
        if old != new:
            yield Change(name=name, request_id=None, old=old, new=new)


def table_changes(
    before: TableImage, behind: TableImage, *, ahead: str = "", rewound: VerifiedImage | None = None
) -> Iterator[Change]:
    """Differences of the table by request, wherever its row is now: an equal value in another row is no change.

    Args:
        before: The table then.
        behind: The table later.
        ahead: How ``kv_len`` counts what a later phase launches, if it does.
        rewound: What ``kv_len`` went back for, of a rewind.
    """
    if before is behind:
        return
    rows_before, rows_behind = before.row_of(), behind.row_of()
    for key, row in rows_before.items():
        if key not in rows_behind:
            yield from _left(before, row)
    for key, row in rows_behind.items():
        if key not in rows_before:
            yield from _entered(behind, row)
        else:
            notes = {"kv_len": ahead} if ahead else _rewind_notes(rewound, behind.request_ids[row])
            yield from _stayed(before, rows_before[key], behind, row, notes)


def _left(table: TableImage, row: int) -> Iterator[Change]:
    request_id = table.request_ids[row]
    yield Change(name=_ROW, request_id=request_id, old=row, new=None)
    yield Change(name="blocks", request_id=request_id, old=table.blocks(row), new=())


def _entered(table: TableImage, row: int) -> Iterator[Change]:
    request_id = table.request_ids[row]
    yield Change(name=_ROW, request_id=request_id, old=None, new=row)
    yield Change(name="state", request_id=request_id, old=None, new=table.state(row))
    for name in ("prompt_len", "chunk_end", "kv_len", "num_output", "max_output"):
        yield Change(name=name, request_id=request_id, old=None, new=int(table.columns[name][row]))
    yield Change(name="blocks", request_id=request_id, old=(), new=table.blocks(row))


def _rewind_notes(rewound: VerifiedImage | None, request_id: str) -> dict[str, str]:
    """By column, why rewind wrote it."""
    if rewound is None or rewound.accepted is None or request_id not in rewound.accepted:
        return {}
    accepted = rewound.accepted[request_id]
    rejected = rewound.drafts[request_id] - accepted
    state = "the next forward goes on from the state behind the newest token"
    return {
        "kv_len": f"{rejected} rejected draft{'' if rejected == 1 else 's'} taken back",
        "num_accepted": f"{state}, {accepted} accepted draft{'' if accepted == 1 else 's'} further",
    }


def _stayed(
    before: TableImage, old_row: int, behind: TableImage, row: int, notes: Mapping[str, str]
) -> Iterator[Change]:
    request_id = behind.request_ids[row]
    if old_row != row:
        yield Change(name=_ROW, request_id=request_id, old=old_row, new=row, note="moved to fill a hole")
    if before.state(old_row) != behind.state(row):
        yield Change(name="state", request_id=request_id, old=before.state(old_row), new=behind.state(row))
    for name, column in behind.columns.items():
        if name in _NOT_SHOWN or column is before.columns[name]:
            continue
        old, new = before.columns[name][old_row].item(), column[row].item()
        if old != new:
            yield Change(name=name, request_id=request_id, old=old, new=new, note=notes.get(name, ""))
    if before.blocks(old_row) != behind.blocks(row):
        yield Change(name="blocks", request_id=request_id, old=before.blocks(old_row), new=behind.blocks(row))


def _record_written(before: BorderImage, behind: BorderImage) -> Iterator[Change]:
    old, new = before.pending, behind.pending
    if (old is None) != (new is None) or (old is not None and new is not None and old.iteration != new.iteration):
        told = [None if one is None else f"forward of iteration {one.iteration}" for one in (old, new)]
        yield Change(name="pending", request_id=None, old=told[0], new=told[1])
    elif old is not None and new is not None and old is not new:
        pairs = zip(old.request_ids, old.table_rows.tolist(), new.table_rows.tolist(), strict=True)
        for request_id, old_row, new_row in pairs:
            if old_row != new_row:
                note = "its request ended: computed for nothing" if new_row < 0 else ""
                yield Change(name="pending row", request_id=request_id, old=old_row, new=new_row, note=note)
    if before.sampled is None and behind.sampled is not None:
        name = "sampled" if behind.verified is None else "verified"
        yield Change(name=name, request_id=None, old=None, new=f"ids of {len(behind.sampled)} rows, on their way")


def _staged_written(old: StagedImage | None, new: StagedImage) -> Iterator[Change]:
    """The half is two forwards old: what stood there is another step's, often another request's."""
    was = {} if old is None else {one: _staged_values(old, place) for place, one in enumerate(old.request_ids)}
    for place, request_id in enumerate(new.request_ids):
        former = was.get(request_id, {})
        for name, value in _staged_values(new, place).items():
            if former.get(name) != value:
                yield Change(
                    name=f"staged[{new.half}].{name}",
                    request_id=request_id,
                    old=former.get(name),
                    new=value,
                    old_is_stale=name in former,
                )


def _staged_values(staged: StagedImage, place: int) -> dict[str, Any]:
    """What one request's part of the half says, in plain values."""
    fields, row = staged.fields, int(staged.batch_rows[place])
    start, length = int(fields["query_start"][row]), int(fields["query_len"][row])
    ids = tuple(fields["token_ids"][start : start + length].tolist())
    values: dict[str, Any] = {
        "table_row": int(fields["table_row"][row]),
        "kv_len": int(fields["kv_len"][row]),
        "positions": tuple(fields["positions"][start : start + length].tolist()),
        "token_ids": _ids_text(ids),
    }
    if int(fields["row_block"][row]) != NO_BLOCK:
        values["row_block"] = int(fields["row_block"][row])
    return values


def _ids_text(ids: tuple[int, ...]) -> Any:
    """Staged ids; in words where some are on the device."""
    if ids == (FROM_SAMPLE,):
        return "the id sampled last, on the device"
    if all(token >= 0 for token in ids):
        return ids
    words = ["the id sampled last" if token == FROM_SAMPLE else _id_text(token) for token in ids]
    return f"{', '.join(words)}, on the device"


def _id_text(token: int) -> str:
    return f"draft {FROM_DRAFT - token + 1}" if token <= FROM_DRAFT else str(token)


# -- enqueued ----------------------------------------------------------------------------------------------------------


def _enqueued(phase: Phase, before: BorderImage, behind: BorderImage) -> Iterator[str]:
    if phase is Phase.FORWARD and before.staged is not None:
        yield f"publish: half {before.staged.half} to the device's slab, new rows and blocks to its columns"
        yield "forward: keys and values of every staged token into its blocks, logits"
    if phase is Phase.SAMPLE and behind.sampled is not None and before.sampled is None:
        yield "sample: newest id and position of each row on the device"
        yield "fetch: sampled ids to a pinned buffer, on the copy stream"
    if phase is Phase.VERIFY and behind.verified is not None and before.verified is None:
        yield "verify: ids drawn in turn, accepted counts, newest id and position of each row on the device"
        yield "fetch_accepted: the counts to a pinned buffer, on the copy stream"
        yield "fetch: the drawn ids behind them"
    if phase is Phase.DRAFT and behind.verified is not None and behind.verified.drafts:
        yield "draft: what follows each row's newest token, and the heads' entries of it"
    if phase in (Phase.ADMIT, Phase.RESOLVE, Phase.EMIT) and _moved(before.table, behind.table):
        yield "compact: device columns follow the rows that moved"


def _moved(before: TableImage, behind: TableImage) -> bool:
    rows = before.row_of()
    return any(rows.get(key, row) != row for key, row in behind.row_of().items())
