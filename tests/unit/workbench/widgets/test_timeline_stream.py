"""A session as messages: what the browser puts together is what the session recorded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.unit.tracing.traces import device, phase, record
from tests.unit.workbench.widgets.timeline_worlds import HandTrace, Reader, work
from tests.unit.workbench.worlds import make_session
from tracing.records import IterationRecord, Span
from workbench.report import RunView
from workbench.widgets.timeline import in_hand
from workbench.widgets.timeline_stream import InHand, TimelineStream, run_messages

MANY = 100_000


class TestStream:
    def test_says_in_pieces_what_it_would_say_at_once(self) -> None:
        with make_session() as session:
            session.submit([[1, 2, 3], [4, 5]], max_tokens=9, ignore_eos=True)
            stream, pieces, whole = TimelineStream(session.recorder), Reader(), Reader()
            pieces.read(stream.restart(MANY))
            while not session.finished:
                session.step()
                pieces.read(stream.follow(MANY))
            whole.read(TimelineStream(session.recorder).restart(MANY))

        for table, column in (
            ("spans", "start"),
            ("spans", "name"),
            ("iterations", "number"),
            ("iterations", "reason"),
        ):
            assert pieces.column(table, column) == whole.column(table, column)
        assert pieces.seqs == list(range(len(pieces.seqs)))

    def test_says_nothing_while_nothing_changes(self) -> None:
        trace = HandTrace([phase("prepare", 0, 10)], works=[work("forward", 9)])
        stream = TimelineStream(trace)
        stream.restart(MANY)

        assert stream.follow(MANY) == []
        trace.works = []
        assert Reader().read(stream.follow(MANY)).last["unfinished"] == []

    def test_counts_times_from_the_first_moment_for_good(self) -> None:
        trace = HandTrace([phase("prepare", 1_000, 1_010)], [record(0, 990, 1_020)])
        stream = TimelineStream(trace)
        reader = Reader().read(stream.restart(MANY))
        trace.recorded.append(phase("emit", 1_030, 1_040))
        reader.read(stream.follow(MANY))

        assert reader.column("spans", "start") == [10, 40]
        assert reader.column("iterations", "start") == [0]

    def test_tells_which_iteration_is_in_hand_and_when_it_began(self) -> None:
        trace, current = HandTrace([phase("prepare", 100, 110, 5)]), InHand(5, "overlap", "decode only")
        stream = TimelineStream(trace, lambda: current)
        first = Reader().read(stream.restart(MANY)).last["inHand"]
        trace.recorded.append(phase("forward", 200, 210, 5))
        later, _ = stream.follow(MANY)[0]

        assert first == {"iteration": 5, "order": "overlap", "reason": "decode only", "begin": 0}
        assert later["kind"] == "append"
        assert later["inHand"] == first

    def test_tells_of_a_session_that_is_stepped_what_it_is_in(self) -> None:
        with make_session() as session:
            stream = TimelineStream(session.recorder, lambda: in_hand(session))
            reader = Reader().read(stream.restart(MANY))
            session.submit([1, 2, 3], max_tokens=4)
            reader.read(stream.follow(MANY))
            assert reader.last["inHand"] is None
            session.step_phase()
            reader.read(stream.follow(MANY))
            assert (reader.last["inHand"]["iteration"], reader.last["inHand"]["order"]) == (0, "primer")
            began = reader.last["inHand"]["begin"]
            session.step_phase()
            reader.read(stream.follow(MANY))
            assert reader.last["inHand"]["begin"] == began
            session.step()
            reader.read(stream.follow(MANY))
            assert reader.last["inHand"] is None
            assert reader.tables["iterations"][0]["void"].startswith("stepped by hand")

    def test_begins_anew_after_the_session_was_reset(self) -> None:
        with make_session() as session:
            session.submit([1, 2, 3], max_tokens=4)
            stream, reader = TimelineStream(session.recorder), Reader()
            reader.read(stream.restart(MANY))
            session.run()
            reader.read(stream.follow(MANY))
            session.restart()
            messages = stream.follow(MANY)
            session.step()
            reader.read(messages + stream.follow(MANY))

        assert messages[0][0] == {"kind": "reset", "groups": [""]}
        assert reader.column("iterations", "number") == [0]

    def test_names_a_stretch_that_it_left_out(self) -> None:
        trace = HandTrace([phase("prepare", 0, 10)])
        stream, reader = TimelineStream(trace), Reader()
        reader.read(stream.restart(MANY))
        trace.recorded += [phase("emit", 100 + at, 101 + at) for at in range(500)]
        reader.read(stream.follow(100))

        assert reader.tables["skipped"] == [{"start": 10, "end": 501}]
        assert len(reader.tables["spans"]) == 101
        assert "skipped" not in Reader().read(stream.restart(MANY)).tables


def step_of(number: int, first_ns: int) -> tuple[list[Span], IterationRecord]:
    """An iteration of 1,000 ns; its device work begins late, so that there is a bubble."""
    base = first_ns + 1_000 * number
    spans = [
        device("forward", base + 200, base + 890, number, enqueued=base + 150),
        phase("prepare", base, base + 300, number),
        phase("resolve", base + 300, base + 900, number),
    ]
    return spans, record(number, base, base + 950, order="overlap", reason="decode only")


def go_on(trace: HandTrace, count: int, first_ns: int = 0) -> None:
    for number in range(len(trace.records), len(trace.records) + count):
        spans, one = step_of(number, first_ns)
        trace.recorded += spans
        trace.records.append(one)


class TestGlimpses:
    def both(self, counts: Sequence[int]) -> tuple[Reader, Reader]:
        """What is told by looks, and by glimpses with one look behind them, of the same runs."""
        trace = HandTrace()
        streams, readers = (TimelineStream(trace), TimelineStream(trace)), (Reader(), Reader())
        go_on(trace, 3)
        for stream, reader in zip(streams, readers, strict=True):
            reader.read(stream.restart(MANY))
        for count in counts:
            go_on(trace, count)
            readers[0].read(streams[0].follow(12))
            readers[1].read(streams[1].glimpse(12))
        while streams[1].is_behind:
            readers[1].read(streams[1].follow(12))
        return readers

    @pytest.mark.parametrize("counts", [[40], [40, 40, 40], [40, 2, 2, 40, 3], [4, 40, 1], [40] * 70])
    def test_tell_with_a_look_behind_them_what_looks_tell(self, counts: list[int]) -> None:
        looks, glimpses = self.both(counts)

        assert len(looks.tables["bubbles"]) > len(counts)
        for table in ("spans", "iterations", "bubbles", "skipped"):
            assert sorted(map(repr, glimpses.tables[table])) == sorted(map(repr, looks.tables[table]))
        assert sorted(glimpses.causes) == sorted(looks.causes)

    def test_tell_of_a_run_the_newest_alone(self) -> None:
        trace = HandTrace()
        go_on(trace, 3)
        stream = TimelineStream(trace)
        reader = Reader().read(stream.restart(MANY))
        go_on(trace, 100)
        reader.read(stream.glimpse(12))

        assert reader.column("iterations", "number") == [0, 1, 2, 99, 100, 101, 102]
        assert len(reader.tables["spans"]) == 9 + 12
        assert len(reader.tables["bubbles"]) == 2  # of the three iterations before it
        assert stream.is_behind
        assert stream.left_out

    def test_of_what_is_no_more_than_that_leave_nothing_out(self) -> None:
        trace = HandTrace()
        stream = TimelineStream(trace)
        go_on(trace, 3)
        reader = Reader().read(stream.glimpse(12))
        go_on(trace, 3)
        reader.read(stream.glimpse(12))

        assert reader.column("iterations", "number") == list(range(6))
        assert len(reader.tables["bubbles"]) == 5
        assert not stream.is_behind

    def test_begin_anew_after_the_trace_was_cleared(self) -> None:
        trace = HandTrace()
        stream = TimelineStream(trace)
        go_on(trace, 30)
        stream.glimpse(12)
        trace.clear()
        go_on(trace, 20, first_ns=100_000)

        assert stream.glimpse(12)[0][0]["kind"] == "reset"


class TestRuns:
    def test_stand_below_each_other_each_from_its_first_moment(self) -> None:
        runs = [
            RunView(name, [phase("prepare", base, base + 10)], [record(0, base - 5, base + 20)])
            for name, base in (("legacy", 1_000), ("async", 70_000))
        ]
        messages = run_messages(runs, MANY)
        reader = Reader().read(messages)

        assert messages[0][0] == {"kind": "reset", "groups": ["legacy", "async"]}
        assert [content["group"] for content, _ in messages[1:]] == [0, 1]
        assert reader.column("spans", "start") == [5, 5]

    def test_share_what_the_browser_may_keep(self) -> None:
        spans = [phase("emit", 10 * at, 10 * at + 5, at) for at in range(300)]
        records = [record(at, 10 * at, 10 * at + 6) for at in range(300)]
        reader = Reader().read(run_messages([RunView("a", spans, records), RunView("b", spans, records)], 200))

        assert len(reader.tables["spans"]) == 200
        assert reader.column("iterations", "number") == 2 * list(range(200, 300))

    def test_without_a_span_are_empty(self) -> None:
        assert Reader().read(run_messages([RunView("a", [], [])], MANY)).tables == {}

    def test_have_bubbles(self) -> None:
        spans = [device("forward", 0, 10, 0, enqueued=0), device("forward", 30, 40, 1, enqueued=25)]
        reader = Reader().read(run_messages([RunView("a", spans, [record(0, 0, 20), record(1, 20, 50)])], MANY))

        assert [(row["start"], row["end"]) for row in reader.tables["bubbles"]] == [(10, 30)]
