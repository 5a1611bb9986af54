"""Two ranks by hand: rank 0 works, rank 1 does dummy work for it; a hundred units of time."""

from __future__ import annotations

from tests.unit.tracing.traces import batch, device, phase, record, wait
from tracing.ranks import RankTrace
from tracing.records import NO_ITERATION, RequestRecord
from tracing.trace import Records, Trace


def busy_rank(base: int = 0) -> Trace:
    """Busy from 30 to 90, in two iterations that begin 10 behind a wait for ranks of 10 each."""
    spans = [
        wait(base, base + 10, NO_ITERATION, name="ranks"),
        phase("prepare", base + 10, base + 25, 0),
        wait(base + 12, base + 17, 0, name="ranks"),
        phase("forward", base + 25, base + 30, 0),
        device("forward", base + 30, base + 60, 0, enqueued=base + 28),
        wait(base + 40, base + 50, NO_ITERATION, name="ranks"),
        phase("forward", base + 50, base + 58, 1),
        device("forward", base + 60, base + 90, 1, enqueued=base + 55),
        phase("emit", base + 58, base + 100, 1),
    ]
    records = [
        record(0, base + 10, base + 30, order="overlap", launched=batch(0), new_tokens=1),
        record(1, base + 50, base + 100, order="overlap", consumed=batch(0), launched=batch(1), new_tokens=2),
    ]
    request = RequestRecord(
        request_id="a",
        arrival_ns=base,
        admitted_ns=base + 10,
        first_token_ns=base + 60,
        finished_ns=base + 100,
        token_times_ns=(base + 60, base + 100),
    )
    return Trace(name="async", records=Records(spans=spans, iterations=records, requests=[request]))


def idle_rank(base: int = 0) -> Trace:
    """Dummy work from 30 to 70, its host waiting from 0 to 5 and from 20 to 45."""
    spans = [
        wait(base, base + 5, NO_ITERATION, name="ranks"),
        phase("prepare", base + 5, base + 12, 0),
        phase("forward", base + 12, base + 18, 0),
        device("dummy_forward", base + 30, base + 70, 0, enqueued=base + 16),
        wait(base + 20, base + 45, NO_ITERATION, name="ranks"),
    ]
    records = [record(0, base + 5, base + 18, order="dummy", reason="others", num_active=0)]
    return Trace(name="async", records=Records(spans=spans, iterations=records))


def two_ranks(offset_ns: int = 0, error_ns: int = 0) -> list[RankTrace]:
    """The second one on a clock that is ``offset_ns`` behind."""
    return [RankTrace(0, busy_rank()), RankTrace(1, idle_rank(-offset_ns), offset_ns, error_ns)]
