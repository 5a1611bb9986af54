"""Traces that no engine would make: what holds of every trace must hold of them."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.unit.tracing.traces import batch, device, phase, record, wait
from tracing.records import IterationRecord, Span

Trace = tuple[list[Span], list[IterationRecord]]


@st.composite
def copies_before(draw: st.DrawFn, begin: int, until: int, iteration: int) -> list[Span]:
    """Work of an iteration that a wait at ``until`` may wait for: at most two copies and what they copy from."""
    found = []
    for name, lane in (("sample", "compute"), ("fetch", "copy"), ("fetch", "copy"))[: draw(st.integers(0, 3))]:
        enqueued = draw(st.integers(begin, until))
        start = draw(st.integers(max(0, enqueued - 3), enqueued + 30))
        found.append(device(name, start, start + draw(st.integers(0, 20)), iteration, lane=lane, enqueued=enqueued))
    return found


@st.composite
def any_trace(draw: st.DrawFn, *, knows_enqueues: bool = False) -> Trace:
    """Iterations of phases with waits, over device and copy work and enqueue times that are placed at random.

    Args:
        draw: Hypothesis gives it.
        knows_enqueues: Whether all device work says when it was enqueued, not some of it.
    """
    spans: list[Span] = []
    records: list[IterationRecord] = []
    now = draw(st.integers(0, 5))
    for iteration in range(draw(st.integers(0, 5))):
        begin = now
        for name in ("admit", "prepare", "forward", "sample", "resolve")[: draw(st.integers(0, 5))]:
            now += draw(st.integers(0, 3))
            long = draw(st.integers(0, 30))
            spans.append(phase(name, now, now + long, iteration))
            if draw(st.booleans()):
                start = now + draw(st.integers(0, long))
                spans.append(wait(start, draw(st.integers(start, now + long)), iteration))
                spans += draw(copies_before(begin, start, iteration))
            now += long
        now += draw(st.integers(0, 3))
        void = draw(st.sampled_from([(), (), ("debugger",)]))
        fields = {"void_reasons": void, "num_active": draw(st.integers(0, 1)), "launched": batch(iteration)}
        records.append(record(iteration, begin, now, **fields))
        now += draw(st.integers(0, 4))
    for _ in range(draw(st.integers(0, 15))):
        start, long = draw(st.integers(0, 150)), draw(st.integers(0, 20))
        lane = draw(st.sampled_from(["compute", "compute", "copy"]))
        noted = st.integers(max(0, start - 20), start + 5)
        enqueued = draw(noted if knows_enqueues else noted | st.none())
        spans.append(device("work", start, start + long, draw(st.integers(0, 5)), lane=lane, enqueued=enqueued))
    return spans, records
