"""Any records at all: what a table or a file must not lose may be anywhere in them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tracing.records import BatchInfo, Category, GraphUse, IterationRecord, RequestRecord, Span
from tracing.trace import Records, Trace

# Small numbers and known words first: only then do spans nest, meet and belong to an iteration.
times = st.integers(0, 40) | st.integers(0, 1 << 62)
whole = st.integers(0, 2) | st.integers(-1, 1 << 40)
words = st.sampled_from(["prepare", "forward", "overlap"]) | st.text(max_size=8)
plain_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
json_objects = st.dictionaries(st.text(max_size=5), plain_json, max_size=3)


@st.composite
def intervals(draw: st.DrawFn) -> tuple[int, int]:
    start, end = sorted((draw(times), draw(times)))
    return start, end


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start, end = draw(intervals())
    return Span(
        name=draw(words),
        category=draw(st.sampled_from(Category)),
        lane=draw(st.sampled_from(["host", "compute", "copy"]) | words),
        start_ns=start,
        end_ns=end,
        iteration=draw(whole),
        depth=draw(st.integers(0, 5)),
        phase=draw(st.none() | words),
        enqueued_ns=draw(st.none() | times),
        value=draw(st.none() | st.floats(allow_nan=False)),
        args=draw(json_objects),
    )


batches = st.builds(
    BatchInfo,
    iteration=whole,
    num_tokens=whole,
    num_prefill=whole,
    num_decode=whole,
    request_ids=st.lists(words, max_size=3).map(tuple),
)
graphs = st.builds(
    GraphUse,
    label=words,
    hit=st.booleans(),
    dims=st.none() | st.tuples(whole, whole, whole),
    miss_reason=st.none() | words,
    padding_tokens=whole,
)


@st.composite
def iterations(draw: st.DrawFn) -> IterationRecord:
    begin, end = draw(intervals())
    counts = ("outputs", "new_tokens", "rows_released", "rows_moved", "free_blocks", "num_waiting", "num_active")
    return IterationRecord(
        iteration=draw(whole),
        mode=draw(words),
        order=draw(words),
        reason=draw(words),
        begin_ns=begin,
        end_ns=end,
        consumed=draw(st.none() | batches),
        launched=draw(st.none() | batches),
        wasted_rows=draw(st.dictionaries(words, whole, max_size=2)),
        graph=draw(st.none() | graphs),
        void_reasons=draw(st.lists(words, max_size=2).map(tuple)),
        num_device=draw(st.none() | whole),
        **{name: draw(whole) for name in counts},
    )


requests = st.builds(
    RequestRecord,
    request_id=words,
    arrival_ns=times,
    admitted_ns=st.none() | times,
    first_token_ns=st.none() | times,
    finished_ns=st.none() | times,
    token_times_ns=st.lists(times, max_size=3).map(tuple),
    num_prompt_tokens=whole,
    num_output_tokens=whole,
    finish_reason=st.none() | words,
    void_reasons=st.lists(words, max_size=2).map(tuple),
    drafts_proposed=st.lists(whole, max_size=2).map(tuple),
    drafts_accepted=st.lists(whole, max_size=2).map(tuple),
)


def records() -> st.SearchStrategy[Records]:
    def some(kind: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
        return st.lists(kind, max_size=4)

    return st.builds(Records, spans=some(spans()), iterations=some(iterations()), requests=some(requests))


def traces() -> st.SearchStrategy[Trace]:
    return st.builds(
        Trace,
        name=words,
        records=records(),
        config=json_objects,
        environment=json_objects,
        workload=json_objects,
        counters=json_objects,
        outputs=st.lists(json_objects, max_size=2),
        lost_iterations=st.integers(0, 9),
        rank=st.integers(0, 9),
        device_clock_error_ns=st.none() | times,
    )
