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
    ranks = [
        RankTrace(0, rank_trace("forward", 0)),
        RankTrace(1, rank_trace("dummy_forward", 50 * US - LATE), LATE, 3 * US),
    ]
    with timeline_page(browser) as stub:
        stub.deliver(rank_messages(on_one_clock(ranks), 1_000))
        stub.show(0, 1_100 * US)
        yield stub
        assert stub.errors == []


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

    def test_zoom_and_move_together(self, page: StubPage) -> None:
        page.page.focus("canvas")
        page.press("+", "ArrowRight")
        begin, end = page.view()
        assert 0 < begin < end < 1_100 * US
        assert page.colour("host", 430 * US) == page.colour("host", 480 * US, block=1) == PHASE_COLOURS["forward"]
