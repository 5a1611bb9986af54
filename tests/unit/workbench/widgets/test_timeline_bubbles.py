"""Bubbles that are told piece by piece are those of the whole run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tracing.traces import device, phase, record
from tests.unit.workbench.worlds import make_session
from tracing.blame import BlameRow, Bubble, blame_bubbles
from tracing.records import IterationRecord, Span
from workbench.widgets.timeline_bubbles import BubbleFinder
from workbench.widgets.timeline_feed import TraceFeed

Told = list[tuple[int, int, str, int, str, int, tuple[tuple[str, int, bool], ...]]]


def told(bubbles: list[Bubble] | tuple[Bubble, ...], rows: list[BlameRow] | tuple[BlameRow, ...]) -> Told:
    return [
        (
            bubble.start_ns,
            bubble.end_ns,
            bubble.before,
            bubble.iteration,
            bubble.reason,
            bubble.late_ns,
            tuple((row.label, row.time_ns, row.is_late) for row in rows if row.bubble == bubble.index),
        )
        for bubble in bubbles
    ]


def steps(count: int, *, first: int = 0) -> tuple[list[Span], list[IterationRecord]]:
    """Legacy steps of 100 ns: the device waits for the host in each of them."""
    spans, records = [], []
    for number in range(first, first + count):
        base = 100 * number
        spans += [
            phase("prepare", base, base + 20, number),
            phase("forward", base + 20, base + 30, number),
            device("forward", base + 32, base + 80, number, enqueued=base + 29),
            phase("resolve", base + 30, base + 95, number),
        ]
        records.append(record(number, base, base + 97, order="legacy", reason="mode"))
    return spans, records


class TestBubbleFinder:
    @given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.sampled_from(["legacy", "async"]))
    def test_tells_a_sessions_bubbles_in_whatever_pieces(self, pieces: list[int], mode: str) -> None:
        with make_session(mode, device="cpu") as session:
            session.submit([[1, 2, 3], [4, 5]], max_tokens=20, ignore_eos=True)
            feed, finder, found = TraceFeed(session.recorder), BubbleFinder(), []
            for count in [*pieces, 20]:
                session.run(count)
                news = feed.look(100_000)
                found += told(*finder.add(news.spans, news.iterations))
            session.engine.device.synchronize()
            news = feed.look(100_000)
            found += told(*finder.add(news.spans, news.iterations))
            whole = blame_bubbles(session.spans(), session.iterations())

        assert found == told(whole.bubbles, whole.rows)

    def test_knows_the_iteration_that_launched_what_ended_a_bubble_long_before(self) -> None:
        finder = BubbleFinder()
        first = device("forward", 10, 220, 0, enqueued=5)
        records = [record(number, 100 * number, 100 * number + 99, reason=f"reason {number}") for number in range(4)]
        finder.add([first], records[:3])
        bubbles, _ = finder.add([device("forward", 250, 280, 1, enqueued=110)], records[3:])

        assert [(bubble.start_ns, bubble.end_ns, bubble.reason) for bubble in bubbles] == [(220, 250, "reason 1")]

    def test_keeps_no_more_than_a_few_iterations(self) -> None:
        finder = BubbleFinder()
        for first in range(0, 200, 10):
            finder.add(*steps(10, first=first))

        assert len(finder._records) <= 4
        assert len(finder._spans) <= 20

    def test_tells_nothing_of_a_stretch_whose_spans_are_missing(self) -> None:
        finder = BubbleFinder()
        finder.add(*steps(3))
        spans, records = steps(40, first=3)
        newest = spans[-40:]  # of the last ten steps
        bubbles, _ = finder.add(newest, records, skipped=(300, newest[0].end_ns))

        assert [bubble.start_ns for bubble in bubbles] == [100 * number + 80 for number in range(34, 42)]
        whole = blame_bubbles(*steps(43))
        assert {bubble.time_ns for bubble in bubbles} == {bubble.time_ns for bubble in whole.bubbles}
