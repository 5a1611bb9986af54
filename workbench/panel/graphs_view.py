"""Captured sizes and how forwards used them, counted on as iterations are recorded."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from engine.batch import BatchDimensions
from engine.graph_gate import is_gated
from tracing.records import IterationRecord
from workbench.panel.messages import GraphCell, GraphsPane
from workbench.prospects import awaited_graph, prospects

if TYPE_CHECKING:
    from workbench.session import Session

Dims = tuple[int, int, int]
_LOOKED_AT = 64
"""Waiting requests looked through for the one that is next: those before it were aborted, or fit."""


class GraphTally:
    """Hits, misses and padding over the records that a session's recorder holds; reads each record once."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sizes = list(session.engine.runner.graphs.sizes)  # a closed engine has let go of them
        self._counted: deque[IterationRecord] = deque()
        self._hits: Counter[Dims] = Counter()
        self._padding: Counter[Dims] = Counter()
        self._misses: Counter[str] = Counter()
        self._real_tokens = 0
        """Of all launched batches."""

    def view(self) -> GraphsPane:
        """The grid now."""
        self._count_new()
        engine = self._session.engine
        pending = None if engine.pending is None else engine.pending.plan.graph
        gated = is_gated(engine.config, self._sizes)
        awaited, by = self._awaited() if gated else (None, "")
        padding = self._padding.total()
        computed = padding + self._real_tokens
        return GraphsPane(
            label=engine.device.graph_label,
            graphs=[
                self._cell(size, is_pending=size == pending, awaited_by=by if size == awaited else "")
                for size in self._sizes
            ],
            hits=self._hits.total(),
            misses={reason: count for reason, count in self._misses.most_common() if count and self._sizes},
            deferrals=engine.counters.graph_wait_steps if gated else None,
            padding_share=padding / computed if computed and self._sizes else None,
            memory=_memory_text(engine.graph_memory_bytes, engine.device.kind) if self._sizes else "",
            hint=self._hint(),
        )

    def _awaited(self) -> tuple[BatchDimensions | None, str]:
        """What the request waits for that is next, and its name."""
        for prospect in prospects(self._session.engine, _LOOKED_AT):
            graph = awaited_graph(prospect)
            if graph is not None:
                return graph, prospect.request.request_id
        return None, ""

    def _count_new(self) -> None:
        """Records come at the end and are lost at the beginning; once they were cleared, none that is known is left."""
        recorder, counted = self._session.recorder, self._counted
        oldest = recorder.oldest_iteration
        while counted and counted[0] is not oldest:
            self._count(counted.popleft(), -1)
        for record in recorder.iterations(newest=recorder.num_iterations - len(counted)):
            counted.append(record)
            self._count(record, 1)

    def _count(self, record: IterationRecord, sign: int) -> None:
        use = record.graph
        if use is None:
            return
        self._real_tokens += sign * (0 if record.launched is None else record.launched.num_tokens)
        if use.dims is None:
            self._misses[use.miss_reason or "unknown"] += sign
            return
        self._hits[use.dims] += sign
        self._padding[use.dims] += sign * use.padding_tokens

    def _cell(self, size: BatchDimensions, *, is_pending: bool, awaited_by: str) -> GraphCell:
        dims = size.num_tokens, size.num_prefill, size.num_decode
        return GraphCell(
            name=graph_name(size),
            num_tokens=size.num_tokens,
            num_prefill=size.num_prefill,
            num_decode=size.num_decode,
            hits=self._hits[dims],
            padding_tokens=self._padding[dims],
            is_pending=is_pending,
            awaited_by=awaited_by,
        )

    def _hint(self) -> str:
        if not self._sizes:
            return (
                "No graph was captured: every forward runs eagerly. Session(graphs=[4], graph_non_decode=False) "
                "captures decode forwards of 4 rows; on a CPU each size takes seconds."
            )
        if not self._counted:
            return "No forward yet: submit a request and run."
        return ""


def graph_name(size: BatchDimensions) -> str:
    """Tokens and rows of a captured size, in a few words."""
    kinds = [f"{count} {kind}" for count, kind in ((size.num_prefill, "prefill"), (size.num_decode, "decode")) if count]
    return f"{size.num_tokens} token{'' if size.num_tokens == 1 else 's'}: {' + '.join(kinds)}"


def _memory_text(num_bytes: int, device: str) -> str:
    whose = "of the GPU" if device == "cuda" else "by which the process grew"
    return f"{num_bytes / 2**20:.1f} MiB {whose}"
