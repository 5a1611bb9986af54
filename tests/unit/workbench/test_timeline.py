"""The snapshot's timeline: device work by time, work that has not ended, waits, cut pauses."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

from tests.unit.tracing.traces import device, phase, wait
from tests.unit.workbench.worlds import make_session
from tracing.records import Span, UnfinishedWork
from workbench.bars import Scale, ink_on
from workbench.snapshot import Snapshot
from workbench.timeline import timeline_html

SLOW: dict[str, Any] = {"device": "cpu", "op_sleep_s": 0.05}


@cache
def empty_snapshot() -> Snapshot:
    with make_session() as session:
        return session.snapshot()


def seen(*spans: Span, unfinished: tuple[UnfinishedWork, ...] = (), taken_ns: int = 2_000) -> Snapshot:
    return replace(empty_snapshot(), spans=spans, unfinished=unfinished, taken_ns=taken_ns)


def work(name: str, enqueued_ns: int, *, lane: str = "compute", iteration: int = 2) -> UnfinishedWork:
    return UnfinishedWork(name=name, lane=lane, iteration=iteration, enqueued_ns=enqueued_ns)


def bars(snapshot: Snapshot) -> dict[str, tuple[float, float]]:
    """Left and right of each bar in percent, by its title up to the first comma."""
    found = re.findall(r"title='([^',]+)[^']*' style='[^']*left:([\d.]+)%;width:([\d.]+)%", timeline_html(snapshot))
    return {title: (float(left), float(left) + float(width)) for title, left, width in found}


class TestDeviceWork:
    def test_of_an_earlier_iteration_is_shown_where_it_ran(self) -> None:
        snapshot = seen(phase("resolve", 1_000, 2_000), device("forward", 0, 1_500, iteration=1))

        assert bars(snapshot)["forward 1"] == (0, 50)
        assert "◂ forward 1" in timeline_html(snapshot)
        assert "began 1 µs before the iteration" in timeline_html(snapshot)

    def test_is_in_the_snapshot_by_time_while_the_host_waits_for_it(self) -> None:
        with make_session(overlap_admission=False, **SLOW) as session:
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            session.step()
            session.run_to("admit")  # behind the resolve of iteration 1, which waited for forward 0
            spans = session.snapshot().spans

        assert ("forward", 0) in {(span.name, span.iteration) for span in spans}

    def test_that_has_not_ended_is_told_at_the_border_where_overlap_begins(self) -> None:
        with make_session(**SLOW) as session:
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            session.run(2)
            snapshot = session.run_to("resolve")

        assert [one.name for one in snapshot.unfinished if one.lane == "compute"][-1] == "forward"
        assert snapshot.unfinished[-1].iteration == 2
        assert "forward 2" in str(snapshot)
        assert "forward 2, " in timeline_html(snapshot)

    def test_is_never_both_finished_and_unfinished(self) -> None:
        with make_session(device="cpu") as session:
            session.submit([1, 2], max_tokens=60, ignore_eos=True)
            while session.step_phase() is not None:
                snapshot = session.snapshot()
                ended = {(span.name, span.lane, span.enqueued_ns) for span in snapshot.spans}
                assert not ended & {(one.name, one.lane, one.enqueued_ns) for one in snapshot.unfinished}


class TestUnfinishedWork:
    def test_the_oldest_runs_open_ended_past_now_and_the_rest_stands_in_line(self) -> None:
        text = timeline_html(
            seen(phase("prepare", 1_000, 1_400), unfinished=(work("sample", 1_200), work("forward", 1_300)))
        )
        found = bars(seen(phase("prepare", 1_000, 1_400), unfinished=(work("sample", 1_200), work("forward", 1_300))))

        assert found["sample 2"][0] < found["now"][0] < found["sample 2"][1]
        assert found["forward 2"][0] >= found["sample 2"][1] - 0.02
        assert round(found["forward 2"][1]) == 100
        assert "sample 2, running" in text
        assert "forward 2, in line" in text
        assert "not to scale" in text

    def test_a_copy_is_not_said_to_run_before_what_it_copies(self) -> None:
        unfinished = (work("sample", 1_200), work("fetch", 1_250, lane="copy"))

        text = timeline_html(seen(phase("sample", 1_000, 1_400), unfinished=unfinished))

        assert "fetch 2, in line" in text
        assert "device copy" in text

    def test_begins_no_sooner_than_the_work_before_it_ended(self) -> None:
        snapshot = seen(
            phase("forward", 1_000, 1_200), device("sample", 1_000, 1_600), unfinished=(work("forward", 1_100),)
        )

        assert bars(snapshot)["forward 2"][0] == bars(snapshot)["sample 0"][1]


class TestLegend:
    def test_tells_waits_apart_from_phases(self) -> None:
        text = timeline_html(seen(phase("resolve", 1_000, 2_000), wait(1_100, 1_900)))

        assert "host waits for the device" in text
        assert "waits for results" in text

    def test_names_no_wait_where_there_is_none(self) -> None:
        assert "waits" not in timeline_html(seen(phase("resolve", 1_000, 2_000)))

    def test_nothing_is_drawn_before_the_first_iteration(self) -> None:
        assert timeline_html(empty_snapshot()) == ""


class TestScale:
    def test_cuts_the_pauses_of_a_person(self) -> None:
        scale = Scale(0, 10_000_300, [(0, 100), (10_000_000, 10_000_300)])

        assert scale.cuts == [(100, 10_000_000)]
        assert scale.shown_ns == 400
        assert (scale.at(0), scale.at(10_000_300)) == (0, 100)
        assert scale.at(100) < 25 < scale.at(10_000_000) < 27

    def test_keeps_gaps_that_belong_to_the_schedule(self) -> None:
        scale = Scale(0, 100, [(0, 40), (60, 100)])

        assert scale.cuts == []
        assert scale.at(50) == 50

    def test_leaves_the_asked_for_room_at_the_right(self) -> None:
        assert Scale(10, 20, [(10, 20)], width=60).at(20) == 60


class TestInk:
    def test_is_dark_on_light_and_light_on_dark(self) -> None:
        assert (ink_on("#FFFFFF"), ink_on("#0072B2")) == ("#000", "#fff")
