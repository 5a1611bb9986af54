"""What a viewer shows of a selected slice, as JSON: little for spans, everything for iterations and requests."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from tracing.by_number import IterationsByNumber
from tracing.importing import ImportedSpan
from tracing.records import BATCH_OF, BatchInfo, GraphUse, IterationRecord, RequestRecord, Span

_SHOWN_REQUESTS = 8
_IMPORTED = ("domain", "category", "payload", "device", "stream", "correlation", "graph", "bytes")


class SpanArgs:
    """Args of spans, each made from the iteration that its span belongs to.

    Args:
        iterations: Their records.
        origin_ns: What times in args are relative to.
    """

    def __init__(self, iterations: Iterable[IterationRecord], origin_ns: int) -> None:
        self._records = IterationsByNumber(iterations)
        self._origin_ns = origin_ns
        self._heads: dict[int, str] = {}
        """By the identity of the record."""

    def of(self, span: Span) -> str:
        """A JSON object."""
        record = self._records.of(span)
        if record is None:
            return f'{{"iteration":{span.iteration}{self._timing(span)}}}'  # an abandoned one left it behind
        return f"{self._head(record)}{self._timing(span)}{_work(span, record)}}}"

    def _head(self, record: IterationRecord) -> str:
        head = self._heads.get(id(record))
        if head is None:
            words = {"iteration": record.iteration, "order": record.order, "reason": record.reason}
            void = {"void": list(record.void_reasons)} if record.void_reasons else {}
            head = self._heads[id(record)] = json.dumps({**words, **void})[:-1]
        return head

    def _timing(self, span: Span) -> str:
        if span.enqueued_ns is None:
            return ""
        enqueued_ns, queued_ns = span.enqueued_ns - self._origin_ns, span.start_ns - span.enqueued_ns
        return f',"enqueued_us":{enqueued_ns / 1000},"queued_us":{queued_ns / 1000}'


def iteration_args(record: IterationRecord) -> str:
    """All that its record says, as a JSON object."""
    return _json(
        {
            "iteration": record.iteration,
            "mode": record.mode,
            "reason": record.reason,
            "void": list(record.void_reasons) or None,
            "consumed": _batch(record.consumed),
            "launched": _batch(record.launched),
            "graph": _graph(record.graph),
            "outputs": record.outputs,
            "new_tokens": record.new_tokens,
            "wasted_rows": dict(record.wasted_rows) or None,
            "rows_released": record.rows_released,
            "rows_moved": record.rows_moved,
        }
    )


def request_args(request: RequestRecord) -> str:
    """A JSON object."""
    return _json(
        {
            "prompt_tokens": request.num_prompt_tokens,
            "output_tokens": request.num_output_tokens,
            "finish_reason": request.finish_reason or "unfinished",
        }
    )


def imported_args(span: ImportedSpan) -> str:
    """What the tool says of it, as a JSON object."""
    return _json({name: getattr(span, name) for name in _IMPORTED})


def instant_args(span: Span) -> str:
    """An instant's own, and its iteration, as a JSON object."""
    return _json({**span.args, "iteration": span.iteration})


def plain(value: Any) -> Any:
    """``value`` as strict JSON holds it: mappings and sequences go through, what else JSON lacks becomes its text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def _json(values: Mapping[str, Any]) -> str:
    """Without what is None."""
    return json.dumps(plain({name: value for name, value in values.items() if value is not None}))


def _work(span: Span, record: IterationRecord) -> str:
    """Of device work: the batch it belongs to, and how a forward ran."""
    side = BATCH_OF.get(span.name) if span.is_device else None
    batch = None if side is None else record.launched if side == "launched" else record.consumed
    text = "" if batch is None else f',"batch":"{batch.kind}","rows":{batch.num_rows}'
    if span.name == "forward" and span.is_device and record.graph is not None:
        text += f',"graph":{json.dumps(record.graph.label)}'
    return text


def _batch(batch: BatchInfo | None) -> dict[str, Any] | None:
    if batch is None:
        return None
    ids = batch.request_ids
    return {
        "from_iteration": batch.iteration,
        "tokens": batch.num_tokens,
        "prefill_rows": batch.num_prefill,
        "decode_rows": batch.num_decode,
        "requests": len(ids),
        "request_ids": ", ".join(ids[:_SHOWN_REQUESTS]) + (", .." if len(ids) > _SHOWN_REQUESTS else ""),
    }


def _graph(use: GraphUse | None) -> dict[str, Any] | None:
    if use is None:
        return None
    return {
        "label": use.label,
        "hit": use.hit,
        "dims": None if use.dims is None else "{} tokens, {} prefill, {} decode rows".format(*use.dims),
        "miss_reason": use.miss_reason,
        "padding_tokens": use.padding_tokens,
    }
