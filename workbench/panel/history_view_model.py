"""What is known of one past iteration: its facts with their units, what was watched, and its table at the end."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tracing.analysis import iteration_table
from tracing.records import BatchInfo, IterationRecord, Span
from tracing.summary import IterationTimes
from tracing.void_words import void_words
from workbench.explain_order import explain_record
from workbench.history_view import TABLE_HEAD, table_rows, value_text
from workbench.panel.messages import HistoryPane

if TYPE_CHECKING:
    from workbench.history import RecordedIteration
    from workbench.session import Session

Rows = list[list[str]]

_NOT_RECORDED = "Its table was not recorded: switch recording of changes on before it runs."


class PastFacts:
    """The history of one session; of the iteration shown last it keeps the facts, which do not change any more."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._shown: IterationRecord | None = None
        self._facts: Rows = []
        self._is_whole = False
        """Whether all device work of the iteration shown was known."""

    def view(self, chosen: int | None = None) -> HistoryPane:
        """Of iteration ``chosen``; None: the newest that has ended."""
        session = self._session
        recorder, images = session.recorder, session._changes.indices
        oldest, newest = recorder.oldest_iteration, recorder.iterations(newest=1)
        ends = [*images[:1], *images[-1:], *(record.iteration for record in (oldest, *newest) if record is not None)]
        if not ends:
            return _empty("No iteration yet: submit a request, then step or run.")
        index = chosen if chosen is not None else newest[-1].iteration if newest else images[-1]
        records = recorder.iterations(newest=max(ends[-1] - index, 0) + 2)  # back to the one before it
        at = bisect_left(records, index, key=lambda record: record.iteration)
        record = records[at] if at < len(records) and records[at].iteration == index else None
        recorded = session._changes.get(index)
        return HistoryPane(
            first=min(ends),
            last=max(ends),
            chosen=chosen,
            title=_title(index, record),
            why="" if record is None else explain_record(record),
            facts=[] if record is None else self._facts_of(record, records[max(0, at - 1)]),
            watched=[[name, value_text(value)] for name, value in session.watches.at(index).items()],
            table=[] if recorded is None else [list(TABLE_HEAD), *table_rows(recorded.last.table)],
            hint=self._hint(index, record, recorded),
        )

    def _hint(self, index: int, record: IterationRecord | None, recorded: RecordedIteration | None) -> str:
        current = self._session.engine.in_hand
        if current is not None and current.index == index:
            return "It is in hand: its facts come when it ends."
        if record is None and recorded is None:
            return f"Nothing is known of iteration {index} any more: the newest ones are kept."
        if record is None:
            return "It left no record: the recorder was off, or it never ended."
        return _NOT_RECORDED if recorded is None else ""

    def _facts_of(self, record: IterationRecord, before: IterationRecord) -> Rows:
        if record is not self._shown or not self._is_whole:
            # Device work of the iteration before may run beside this one.
            spans = self._session.recorder.spans_recorded(before.begin_ns, record.end_ns)
            self._shown, self._is_whole = record, _is_whole(record, spans)
            self._facts = [*_what(record), *_times(record, spans)]
        return self._facts


def _empty(hint: str) -> HistoryPane:
    return HistoryPane(first=0, last=-1, chosen=None, title="", why="", facts=[], watched=[], table=[], hint=hint)


def _title(index: int, record: IterationRecord | None) -> str:
    if record is None:
        return f"iteration {index}"
    return f"iteration {index} {record.order}, {record.duration_ns / 1e6:.3f} ms"


def _what(record: IterationRecord) -> Rows:
    return [
        ["order", record.order],
        ["reason", record.reason],
        ["mode", record.mode],
        ["sampled", _batch_text(record.consumed)],
        ["launched", _batch_text(record.launched)],
        ["ran", _graph_text(record)],
        ["padding", f"{0 if record.graph is None else record.graph.padding_tokens} tokens"],
        ["new tokens", str(record.new_tokens)],
        ["outputs", str(record.outputs)],
        ["rows released", str(record.rows_released)],
        ["rows moved", str(record.rows_moved)],
        ["rows wasted", _wasted_text(record)],
        ["at its end", f"{record.num_active} running, {record.num_waiting} waiting, {record.free_blocks} blocks free"],
    ]


def _times(record: IterationRecord, spans: Sequence[Span]) -> Rows:
    (times,) = iteration_table(spans, [record])
    rows = [
        ["step time", _ms(record.duration_ns)],
        ["host work", _ms(times.host_ns)],
        *_device_rows(record, times, spans),
        ["wait", _ms(times.wait_ns)],
        ["between phases", _ms(times.other_ns)],
    ]
    return [*rows, ["times are void", void_words(record.void_reasons)]] if record.is_void else rows


def _device_rows(record: IterationRecord, times: IterationTimes, spans: Sequence[Span]) -> Rows:
    if not _is_whole(record, spans):
        return [["device busy", "not known yet: its work has not ended"]]
    if not any(span.is_device for span in spans):
        return []
    return [
        ["exposed host work", _ms(times.exposed_ns)],
        ["hidden host work", _ms(times.hidden_ns)],
        ["device busy", _ms(times.busy_ns)],
    ]


def _is_whole(record: IterationRecord, spans: Sequence[Span]) -> bool:
    """Whether the times of all its device work are known; a record that says no number has none to wait for."""
    noted = sum(span.is_device and span.iteration == record.iteration for span in spans)
    return record.num_device is None or noted >= record.num_device


def _batch_text(batch: BatchInfo | None) -> str:
    if batch is None:
        return "nothing"
    rows = f"{batch.num_prefill} prefill and {batch.num_decode} decode rows"
    return f"forward {batch.iteration}: {rows}, {batch.num_tokens} tokens"


def _graph_text(record: IterationRecord) -> str:
    use = record.graph
    if use is None:
        return "no forward"
    if use.dims is None:
        return f"eagerly: {use.miss_reason}"
    return f"as {use.label} of {use.dims[0]} tokens, {use.dims[1]} prefill and {use.dims[2]} decode rows"


def _wasted_text(record: IterationRecord) -> str:
    return ", ".join(f"{count} by {cause}" for cause, count in record.wasted_rows.items()) or "0"


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:.3f} ms"
