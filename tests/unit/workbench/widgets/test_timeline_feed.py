"""A look at a recorder brings what is new, each span once, and nothing that was read before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tracing.traces import device, phase, record
from tests.unit.workbench.widgets.timeline_worlds import HandTrace, work
from tests.unit.workbench.worlds import make_session
from tracing.records import Category, Span
from workbench.widgets.timeline_feed import News, PauseFinder, TraceFeed

MANY = 100_000


def fingerprints(spans: list[Span]) -> Counter[tuple[object, ...]]:
    return Counter((one.name, one.lane, one.start_ns, one.end_ns, one.iteration, one.depth) for one in spans)


class TestLook:
    def test_brings_each_span_once(self) -> None:
        trace = HandTrace([phase("prepare", 0, 10), phase("forward", 10, 20)])
        feed = TraceFeed(trace)

        assert [span.name for span in feed.look(MANY).spans] == ["prepare", "forward"]
        assert feed.look(MANY).spans == []
        trace.recorded.append(phase("emit", 20, 30))
        assert [span.name for span in feed.look(MANY).spans] == ["emit"]

    def test_brings_device_work_when_its_end_is_known(self) -> None:
        trace = HandTrace([phase("forward", 0, 10)], works=[work("forward", 9), work("fetch", 9, lane="copy")])
        feed = TraceFeed(trace)
        first = feed.look(MANY)
        trace.works = [work("fetch", 9, lane="copy")]
        trace.recorded += [device("forward", 12, 40, enqueued=9), phase("resolve", 10, 45)]
        second = feed.look(MANY)

        assert [one.name for one in first.unfinished] == ["forward", "fetch"]
        assert sorted(span.name for span in second.spans) == ["forward", "resolve"]
        assert [one.name for one in second.unfinished] == ["fetch"]

    def test_tells_spans_of_one_moment_apart(self) -> None:
        trace = HandTrace([phase("prepare", 0, 10)])
        feed = TraceFeed(trace)
        feed.look(MANY)
        trace.recorded.append(phase("forward", 5, 10))

        assert [span.name for span in feed.look(MANY).spans] == ["forward"]

    def test_reads_no_more_than_it_needs(self) -> None:
        trace = HandTrace([phase("prepare", at, at + 1) for at in range(5_000)])
        feed = TraceFeed(trace)
        feed.look(MANY)
        trace.recorded += [phase("emit", 6_000 + at, 6_001 + at) for at in range(20)]
        trace.spans_read = 0
        feed.look(MANY)  # one long look is behind it, so this one begins large
        trace.recorded += [phase("emit", 7_000 + at, 7_001 + at) for at in range(20)]
        trace.spans_read = 0

        assert len(feed.look(MANY).spans) == 20
        assert trace.spans_read < 200

    def test_reads_of_a_long_run_the_newest_iterations_alone(self) -> None:
        """Each redraw copied the records of a whole run."""
        trace = HandTrace([], [record(number, 10 * number, 10 * number + 9) for number in range(5_000)])
        feed = TraceFeed(trace)
        feed.look(MANY)
        trace.iterations_read = 0
        trace.records += [record(number, 10 * number, 10 * number + 9) for number in range(5_000, 5_100)]

        assert [one.iteration for one in feed.look(MANY).iterations] == list(range(5_000, 5_100))
        assert feed.look(MANY).iterations == []
        assert trace.iterations_read < 1_000

    def test_says_what_it_skipped_when_more_is_new_than_was_asked_for(self) -> None:
        trace = HandTrace([phase("prepare", 0, 10)])
        feed = TraceFeed(trace)
        feed.look(MANY)
        trace.recorded += [phase("emit", 100 + at, 101 + at) for at in range(500)]
        news = feed.look(100)

        assert len(news.spans) == 100
        assert news.skipped == (10, 501)
        assert feed.look(100).skipped is None

    def test_says_what_the_ring_lost(self) -> None:
        trace = HandTrace([phase("prepare", 0, 10)], capacity=50)
        feed = TraceFeed(trace)
        feed.look(MANY)
        trace.recorded += [phase("emit", 100 + at, 101 + at) for at in range(80)]
        news = feed.look(MANY)

        assert not news.is_new_trace
        assert news.skipped == (10, 131)
        assert len(news.spans) == 50

    def test_of_a_first_run_brings_all_iterations_though_not_all_spans(self) -> None:
        """A page that was open before it kept the end of the run alone."""
        trace = HandTrace([])
        feed = TraceFeed(trace)
        feed.look(MANY)
        trace.recorded += [phase("emit", 10 * at, 10 * at + 9, at) for at in range(300)]
        trace.records += [record(at, 10 * at, 10 * at + 9) for at in range(300)]

        news = feed.look(100)

        assert len(news.spans) == 100
        assert [one.iteration for one in news.iterations] == list(range(300))

    def test_begins_with_the_iterations_of_the_spans_it_brings(self) -> None:
        trace = HandTrace(
            [phase("emit", 10 * at, 10 * at + 9, at) for at in range(300)],
            [record(at, 10 * at, 10 * at + 9) for at in range(300)],
        )
        news = TraceFeed(trace).look(100)

        assert len(news.spans) == 100
        assert [one.iteration for one in news.iterations] == list(range(200, 300))

    def test_knows_a_cleared_recorder(self) -> None:
        trace = HandTrace([phase("prepare", 0, 10, 3)], [record(3, 0, 12)])
        feed = TraceFeed(trace)
        feed.look(MANY)
        trace.clear()
        assert feed.look(MANY).is_new_trace
        trace.recorded, trace.records = [phase("prepare", 50, 60, 0)], [record(0, 50, 62)]
        news = feed.look(MANY)

        assert not news.is_new_trace
        assert [span.start_ns for span in news.spans] == [50]

    def test_knows_a_cleared_recorder_that_has_gone_on_by_its_numbers(self) -> None:
        trace = HandTrace([phase("prepare", 0, 10, 7)], [record(7, 0, 12)])
        feed = TraceFeed(trace)
        feed.look(MANY)
        trace.clear()
        trace.recorded = [phase("emit", 100 + at, 101 + at, at) for at in range(300)]
        trace.records = [record(at, 100 + at, 101 + at) for at in range(300)]
        news = feed.look(100)

        assert news.is_new_trace
        assert len(news.spans) == 100

    @given(st.lists(st.sampled_from(["phase", "step", "run", "look"]), min_size=3, max_size=25))
    def test_brings_a_sessions_whole_trace_in_whatever_pieces(self, acts: list[str]) -> None:
        with make_session(device="cpu") as session:
            session.submit([[1, 2, 3], [4, 5]], max_tokens=12, ignore_eos=True)
            feed, found, numbers = TraceFeed(session.recorder), [], []
            does: dict[str, Callable[[], object]] = {
                "phase": session.step_phase,
                "step": session.step,
                "run": lambda: session.run(4),
                "look": lambda: None,
            }
            for act in [*acts, "run"]:
                does[act]()
                news = feed.look(MANY)
                found += news.spans
                numbers += [one.iteration for one in news.iterations]
                assert news.skipped is None
            session.engine.device.synchronize()
            found += feed.look(MANY).spans

            assert fingerprints(found) == fingerprints(session.spans())
            assert numbers == [one.iteration for one in session.iterations()]


def news(*spans: Span, now_ns: int = 0, **rest: object) -> News:
    defaults = {"is_new_trace": False, "iterations": [], "unfinished": [], "skipped": None}
    return News(spans=list(spans), now_ns=now_ns, **{**defaults, **rest})  # type: ignore[arg-type]


class TestPauses:
    def test_are_where_nothing_happened_on_any_lane(self) -> None:
        finder = PauseFinder(least_ns=100)

        assert finder.add(news(phase("prepare", 0, 50), device("forward", 40, 300, enqueued=45))) == []
        assert finder.add(news(phase("resolve", 350, 360))) == []
        assert finder.add(news(phase("emit", 500, 510), phase("admit", 700, 710))) == [(360, 500), (510, 700)]

    def test_are_not_while_the_device_works(self) -> None:
        finder = PauseFinder(least_ns=100)
        finder.add(news(phase("forward", 0, 50), unfinished=[work("forward", 45)], now_ns=400))

        assert finder.add(news(device("forward", 60, 450, enqueued=45), phase("resolve", 480, 490))) == []

    def test_are_not_where_spans_are_missing(self) -> None:
        finder = PauseFinder(least_ns=100)
        finder.add(news(phase("forward", 0, 50)))

        assert finder.add(news(phase("resolve", 1_000, 1_010), skipped=(50, 990))) == []

    def test_do_not_count_a_counter_as_something_that_happened(self) -> None:
        finder = PauseFinder(least_ns=100)
        finder.add(news(phase("forward", 0, 50)))
        counter = Span(name="queue", category=Category.COUNTER, lane="host", start_ns=100, end_ns=100, value=1.0)

        assert finder.add(news(counter, phase("resolve", 180, 190))) == [(50, 180)]
