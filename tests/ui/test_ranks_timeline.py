"""Several ranks on the timeline's one axis, in a browser: whose lanes are where, dummy work, waits for other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ui.browser import keep_shot, missing
from tests.unit.tracing.traces import batch, device, phase, record, wait
from tracing.ranks import RankTrace, on_one_clock
from tracing.records import NO_ITERATION, PHASE_COLOURS
from tracing.trace import Records, Trace

pytestmark = pytest.mark.skipif(missing("anywidget") is not None, reason=missing("anywidget") or "")

if missing("anywidget") is None:
    from tests.ui.stub_page import StubPage, timeline_page
    from workbench.widgets.timeline_stream import rank_messages

US = 1_000
LENGTH = 1_000 * US
LATE = 5_000_000 * US
"""How far the second rank's clock is behind."""


def rank_trace(work: str, base: int) -> Trace:
    """The host waits for ranks until 200 and from 300 to 400 µs; the device works from 450 to 900."""

    def at(micro: int) -> int:
        return base + micro * US

    spans = [
        wait(at(0), at(200), NO_ITERATION, name="ranks"),
        phase("prepare", at(200), at(420), 0),
        wait(at(300), at(400), 0, name="ranks"),
        phase("forward", at(420), at(440), 0),
        device(work, at(450), at(900), 0, enqueued=at(435)),
        phase("resolve", at(440), at(1_000), 0),
        wait(at(500), at(950), 0, name="samples"),
    ]
    order = "dummy" if work == "dummy_forward" else "overlap"
    return Trace(
        name="async",
        records=Records(spans=spans, iterations=[record(0, at(200), at(1_000), order=order, launched=batch(0))]),
    )


@pytest.fixture
def page(browser: Any) -> Iterator[StubPage]:
    """A page that shows two ranks: the first works, the second does dummy work 50 µs behind it."""
    with timeline_page(browser) as stub:
        show(stub)
        yield stub
        assert stub.errors == []


def show(stub: StubPage) -> None:
    """Both ranks, in a gather of 150 and a sum of 50 µs inside their device work."""
    ranks = [
        RankTrace(0, rank_trace("forward", 0), collectives=collectives(0)),
        RankTrace(1, rank_trace("dummy_forward", 50 * US - LATE), LATE, 3 * US, collectives(50 * US - LATE)),
    ]
    stub.deliver(rank_messages(on_one_clock(ranks), 1_000))
    stub.show(0, 1_100 * US)


def collectives(base: int) -> list[tuple[int, int, str, str, int]]:
    return [
        (base + 500 * US, base + 650 * US, "gather", "forward", 0),
        (base + 800 * US, base + 850 * US, "sum", "forward", 0),
    ]


class TestRanks:
    def test_have_a_group_of_lanes_each_on_one_axis(self, page: StubPage) -> None:
        keep_shot(page.page, "timeline-ranks")
        names = page.page.evaluate("() => window.timeline.store.groups.map((one) => one.name)")

        assert names == ["rank 0 ± 3.0 µs", "rank 1 ± 3.0 µs"]
        assert page.colour("host", 220 * US) == page.colour("host", 270 * US, block=1) == PHASE_COLOURS["prepare"]
        assert page.colour("host", 220 * US, block=1) != PHASE_COLOURS["prepare"]  # 50 µs behind
        assert page.place("host", 0, block=1)[1] > page.place("device compute", 0)[1]

    def test_dummy_work_is_hatched_and_says_what_it_is(self, page: StubPage) -> None:
        def colours(block: int) -> set[str]:
            return {page.colour("device compute", (600 + step) * US, block=block) for step in range(0, 40)}

        assert colours(0) == {PHASE_COLOURS["forward"]}
        assert len(colours(1)) > 1
        assert PHASE_COLOURS["dummy_forward"] in colours(1)
        told = page.hover("device compute", 700 * US, block=1)
        assert told.startswith("dummy_forward 0 · rank 1 ± 3.0 µs · device compute")
        assert "other ranks need its experts" in told

    def test_a_wait_for_ranks_has_a_colour_of_its_own_in_and_between_iterations(self, page: StubPage) -> None:
        def colours(begin: int) -> set[str]:
            return {page.colour("host", (begin + step) * US) for step in range(0, 60, 2)}

        assert PHASE_COLOURS["ranks"] in colours(20) & colours(320)
        assert PHASE_COLOURS["ranks"] not in colours(600)
        assert page.hover("host", 100 * US).startswith("waits for other ranks")

    def test_the_legend_has_both(self, page: StubPage) -> None:
        legend = page.text(".wb-legend")
        assert "host waits for other ranks" in legend
        assert "host waits for the device" in legend
        assert "dummy_forward" in legend

    def test_collectives_are_inside_the_work_of_the_device_in_the_colour_of_waits_for_ranks(
        self, page: StubPage
    ) -> None:
        def colours(begin: int, part: float, block: int = 0) -> set[str]:
            place = [page.colour("device compute", (begin + step) * US, part=part, block=block) for step in range(20)]
            return set(place)

        yellow, blue = PHASE_COLOURS["ranks"], PHASE_COLOURS["forward"]
        assert yellow in colours(560, 0.9) & colours(810, 0.9) & colours(610, 0.9, block=1)
        assert colours(560, 0.1) == colours(700, 0.9) == {blue}, "above one, and between two"
        assert yellow not in colours(470, 0.9)

    def test_a_collective_says_what_it_was_for_and_how_long_it_took(self, page: StubPage) -> None:
        lines = page.hover("device compute", 560 * US, part=0.9).splitlines()
        assert lines[:2] == ["gather for forward · rank 0 ± 3.0 µs · device compute", "150 µs"]
        assert lines[2].startswith("iteration 0, overlap")
        assert page.hover("device compute", 560 * US, part=0.2).startswith("forward 0")
        assert page.hover("device compute", 875 * US, part=0.9, block=1).startswith("sum for forward")
        assert page.hover("host", 560 * US).startswith("waits for samples")

    def test_the_legend_tells_collectives_from_what_the_host_waits_for(self, browser: Any) -> None:
        with timeline_page(browser) as page:
            page.deliver(rank_messages(on_one_clock([RankTrace(0, rank_trace("forward", 0))]), 1_000))
            assert "in a collective" not in page.text(".wb-legend")
            show(page)
            assert "device is in a collective with other ranks" in page.text(".wb-legend")

    def test_are_seen_as_well_on_a_dark_page(self, browser: Any) -> None:
        with timeline_page(browser, dark=True) as page:
            show(page)
            keep_shot(page.page, "timeline-ranks-dark")
            place = {page.colour("device compute", (560 + step) * US, part=0.9) for step in range(20)}
            assert PHASE_COLOURS["ranks"] in place
            assert page.errors == []

    def test_zoom_and_move_together(self, page: StubPage) -> None:
        page.page.focus("canvas")
        page.press("+", "ArrowRight")
        begin, end = page.view()
        assert 0 < begin < end < 1_100 * US
        assert page.colour("host", 430 * US) == page.colour("host", 480 * US, block=1) == PHASE_COLOURS["forward"]
