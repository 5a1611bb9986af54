"""Hand-made runs whose figures can be worked out in the head; milliseconds, so that axes have round numbers."""

from __future__ import annotations

from typing import Any

from tests.unit.tracing.traces import batch, device, phase, record, wait
from tracing.records import IterationRecord, RequestRecord, Span
from tracing.trace import Records, Trace

MS = 1_000_000
ENVIRONMENT = {"commit": "abc123def456-dirty", "cpu": "Pico 1", "cores": 2, "gpu": "NVIDIA H200"}


def spans() -> list[Span]:
    """Two iterations of 10 ms. Device work [2, 6] and [9, 19]: one bubble of 3 ms.

    In it the host waits until 7 in iteration 0's resolve, resolves until 8, and prepares until 9.
    """
    return [
        phase("prepare", 0, 2 * MS),
        device("forward", 2 * MS, 6 * MS, enqueued=2 * MS),
        phase("resolve", 2 * MS, 8 * MS),
        wait(2 * MS, 7 * MS),
        phase("prepare", 8 * MS, 9 * MS),
        device("forward", 9 * MS, 19 * MS, 1, enqueued=9 * MS),
        phase("resolve", 10 * MS, 14 * MS, 1),
    ]


def iterations(**fields: Any) -> list[IterationRecord]:
    return [
        record(0, 0, 10 * MS, order="no_overlap", new_tokens=4, launched=batch(0), **fields),
        record(1, 10 * MS, 20 * MS, order="overlap", new_tokens=2, launched=batch(1), **fields),
    ]


def requests() -> list[RequestRecord]:
    """Two that count: TTFT of 4 and 8 ms, TPOT of 2 ms; one that met a void iteration."""
    return [
        RequestRecord(
            request_id="a",
            arrival_ns=0,
            admitted_ns=1 * MS,
            first_token_ns=4 * MS,
            finished_ns=8 * MS,
            num_output_tokens=3,
            drafts_proposed=(4, 4),
            drafts_accepted=(3, 1),
        ),
        RequestRecord(
            request_id="b", arrival_ns=2 * MS, admitted_ns=5 * MS, first_token_ns=10 * MS, num_output_tokens=1
        ),
        RequestRecord(request_id="void", arrival_ns=0, admitted_ns=1, first_token_ns=2, void_reasons=("hand_stepped",)),
    ]


def trace(name: str = "async", **fields: Any) -> Trace:
    given: dict[str, Any] = {
        "records": Records(spans=spans(), iterations=iterations(), requests=requests()),
        "config": {"model": "toy", "device": "cpu", "seed": 7, "mode": name},
        "environment": ENVIRONMENT,
        "workload": {"name": "two", "clock": "iterations"},
    }
    return Trace(name=name, **(given | fields))
