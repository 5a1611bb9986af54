"""The columns of every table, with their types; ``docs/metrics.md`` says what each means.

A column whose name ends in ``_ns`` is in nanoseconds on the clock of the records. Null means that there is none.
"""

from __future__ import annotations

import pyarrow as pa

WORD = pa.dictionary(pa.int32(), pa.string())
"""A string out of few."""
NAMES = pa.list_(pa.field("element", pa.string(), nullable=False))
TIMES = pa.list_(pa.field("element", pa.int64(), nullable=False))
NUMBERS = TIMES
"""One a place."""
COUNTS = pa.map_(pa.string(), pa.field("value", pa.int64(), nullable=False))


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


def _whole(*names: str) -> list[pa.Field]:
    return [_required(name, pa.int64()) for name in names]


def _maybe(*names: str) -> list[pa.Field]:
    return [pa.field(name, pa.int64()) for name in names]


def _batch(name: str) -> list[pa.Field]:
    """One of an iteration's two batches; all null without it."""
    return [
        *_maybe(f"{name}_iteration"),
        pa.field(f"{name}_kind", WORD),
        *_maybe(f"{name}_num_tokens", f"{name}_num_prefill", f"{name}_num_decode"),
        pa.field(f"{name}_request_ids", NAMES),
    ]


SPANS = pa.schema(
    [
        _required("name", WORD),
        _required("category", WORD),
        _required("lane", WORD),
        *_whole("start_ns", "end_ns", "duration_ns", "iteration", "depth"),
        pa.field("phase", WORD),
        *_maybe("enqueued_ns"),
        pa.field("value", pa.float64()),
        pa.field("args", pa.string()),
    ]
)
ITERATIONS = pa.schema(
    [
        *_whole("iteration"),
        _required("mode", WORD),
        _required("order", WORD),
        _required("reason", WORD),
        *_whole("begin_ns", "end_ns", "duration_ns", "host_ns", "wait_ns", "other_ns"),
        *_maybe("hidden_ns", "exposed_ns", "busy_ns"),
        _required("is_void", pa.bool_()),
        _required("void_reasons", NAMES),
        *_batch("consumed"),
        *_batch("launched"),
        *_whole("outputs", "new_tokens"),
        _required("wasted_rows", COUNTS),
        pa.field("graph_label", WORD),
        pa.field("graph_hit", pa.bool_()),
        *_maybe("graph_num_tokens", "graph_num_prefill", "graph_num_decode"),
        pa.field("graph_miss_reason", WORD),
        *_maybe("graph_padding_tokens"),
        *_whole("rows_released", "rows_moved", "free_blocks", "num_waiting", "num_active"),
        *_maybe("num_device"),
    ]
)
REQUESTS = pa.schema(
    [
        _required("request_id", pa.string()),
        *_whole("arrival_ns"),
        *_maybe("admitted_ns", "first_token_ns", "finished_ns"),
        _required("token_times_ns", TIMES),
        *_whole("num_prompt_tokens", "num_output_tokens"),
        pa.field("finish_reason", WORD),
        *_maybe("queue_delay_ns", "ttft_ns"),
        pa.field("tpot_ns", pa.float64()),
        *_maybe("e2e_ns"),
        _required("is_void", pa.bool_()),
        _required("void_reasons", NAMES),
        _required("drafts_proposed", NUMBERS),
        _required("drafts_accepted", NUMBERS),
    ]
)
PHASES = pa.schema(
    [
        *_whole("iteration"),
        _required("phase", WORD),
        _required("batch", WORD),
        _required("mode", WORD),
        _required("order", WORD),
        _required("reason", WORD),
        *_whole("start_ns", "end_ns", "host_ns", "wait_ns"),
        *_maybe("hidden_ns", "exposed_ns"),
        _required("is_void", pa.bool_()),
    ]
)
DEVICE = pa.schema(
    [
        *_whole("iteration"),
        _required("name", WORD),
        _required("lane", WORD),
        _required("batch", WORD),
        *_maybe("enqueued_ns"),
        *_whole("start_ns", "end_ns", "duration_ns"),
        pa.field("is_void", pa.bool_()),
    ]
)
BUBBLES = pa.schema(
    [
        *_whole("bubble"),
        _required("kind", WORD),
        _required("before", WORD),
        *_whole("iteration"),
        _required("order", WORD),
        _required("reason", WORD),
        *_whole("start_ns", "end_ns", "duration_ns", "late_ns", "launch_ns"),
    ]
)
BLAME = pa.schema(
    [
        *_whole("bubble"),
        _required("cause", WORD),
        _required("kind", WORD),
        *_whole("iteration"),
        _required("order", WORD),
        _required("reason", WORD),
        *_whole("start_ns", "end_ns", "duration_ns"),
        _required("is_late", pa.bool_()),
    ]
)
