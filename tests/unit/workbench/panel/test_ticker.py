"""The ticker: how often it looks and draws, what it costs, and when it ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import pytest

from tests.unit.workbench.panel.loops import run_in_turns, turns_loop
from workbench.panel.ticker import LONGEST_S, PERIOD_S, Ticker


class Page:
    """Something to look at, and how often it was drawn."""

    def __init__(self, draw: Callable[[], None] = lambda: None) -> None:
        self.now: Hashable = 0
        self.drawn: list[Hashable] = []
        self._draw = draw

    def stamp(self) -> Hashable:
        return self.now

    def redraw(self) -> None:
        self.drawn.append(self.now)
        self._draw()


class Changing(Page):
    """Another one at each look."""

    def stamp(self) -> Hashable:
        self.now = int(str(self.now)) + 1
        return self.now


async def run_for(seconds: float, page: Page) -> Ticker:
    ticker = Ticker(page.stamp, page.redraw, spent_s=turns_loop().time)
    assert ticker.start()
    await asyncio.sleep(seconds)
    return ticker


class TestPace:
    @pytest.mark.parametrize("cost_s", [0.0, 0.001, 0.004])
    def test_a_quick_redraw_comes_five_times_a_second_for_less_than_three_percent(self, cost_s: float) -> None:
        page = Changing(lambda: turns_loop().work(cost_s))
        run_in_turns(run_for(20, page))

        assert len(page.drawn) >= 5 * 20
        assert len(page.drawn) * cost_s < 0.03 * 20

    def test_what_cheap_redraws_leave_over_is_spent_on_the_dear_ones_between_them(self) -> None:
        """In a run some redraws show all there is: alone those were too dear for five a second."""
        page = Changing(lambda: turns_loop().work(0.007 if page.now % 2 else 0.0005))
        run_in_turns(run_for(20, page))

        assert len(page.drawn) >= 5 * 20
        assert len(page.drawn) * 0.00375 < 0.03 * 20

    def test_idle_hours_leave_no_more_than_one_dear_redraw_over(self) -> None:
        page = Page(lambda: turns_loop().work(0.05))

        async def work() -> None:
            ticker = await run_for(100, page)
            page.drawn.clear()
            begin_s = turns_loop().time()
            for _ in range(500):
                page.now = len(page.drawn), turns_loop().time()
                await asyncio.sleep(0.01)
            ticker.stop()
            # The first comes at once, each of the others behind the longest wait there is.
            assert len(page.drawn) <= 1 + (turns_loop().time() - begin_s) / LONGEST_S

        run_in_turns(work())

    @pytest.mark.parametrize("cost_s", [0.008, 0.02])
    def test_a_slow_redraw_comes_less_often_and_costs_no_more(self, cost_s: float) -> None:
        page = Changing(lambda: turns_loop().work(cost_s))
        run_in_turns(run_for(20, page))

        assert len(page.drawn) < 5 * 20
        assert len(page.drawn) * cost_s < 0.03 * 20

    def test_the_slowest_redraw_still_comes(self) -> None:
        page = Changing(lambda: turns_loop().work(0.5))
        run_in_turns(run_for(20, page))

        assert len(page.drawn) >= 20 / (LONGEST_S + 0.5) - 1

    def test_a_redraw_that_waits_for_a_core_is_not_a_dear_one(self) -> None:
        """On a busy machine wall time was taken for cost, and a run was shown once a second."""
        page = Changing(lambda: turns_loop().work(0.03))

        async def work() -> None:
            ticker = Ticker(page.stamp, page.redraw, spent_s=lambda: 0.0)
            ticker.start()
            await asyncio.sleep(20)

        run_in_turns(work())
        assert len(page.drawn) >= 5 * 20

    def test_looks_that_come_late_make_the_next_ones_no_later(self) -> None:
        """The engine's slice lay between two looks each time, and was paid for with a rest that had to be shorter."""
        page = Changing()

        async def work() -> float:
            await run_for(0, page)
            for _ in range(1_000):
                turns_loop().work(0.02)
                await asyncio.sleep(0)
            return turns_loop().time()

        turns_s = run_in_turns(work())
        assert len(page.drawn) == pytest.approx(turns_s / PERIOD_S, rel=0.02)

    def test_what_is_known_to_be_behind_is_drawn_without_a_look(self) -> None:
        page = Page()

        async def work() -> None:
            ticker = await run_for(1, page)
            page.stamp = None  # type: ignore[method-assign, assignment]
            ticker.is_behind = True
            await asyncio.sleep(PERIOD_S)
            assert not ticker.is_behind
            ticker.stop()

        run_in_turns(work())
        assert page.drawn == [0, 0]

    def test_nothing_is_drawn_while_nothing_changes(self) -> None:
        page = Page()

        async def work() -> None:
            await run_for(5, page)
            page.now = 1
            await asyncio.sleep(5)

        run_in_turns(work())
        assert page.drawn == [0, 1]

    def test_what_somebody_else_has_drawn_is_not_drawn_again(self) -> None:
        page = Page()

        async def work() -> None:
            ticker = await run_for(1, page)
            page.now = ticker.shown = 1
            await asyncio.sleep(1)

        run_in_turns(work())
        assert page.drawn == [0]


class TestTrouble:
    def test_a_redraw_that_raises_is_logged_once_and_the_next_one_comes(self, caplog: pytest.LogCaptureFixture) -> None:
        page = Page(lambda: None if page.now == 2 else fail())

        def fail() -> None:
            raise ZeroDivisionError("in a view")

        async def work() -> None:
            ticker = await run_for(2, page)
            page.now = 2
            await asyncio.sleep(1)
            assert ticker.is_running

        with caplog.at_level(logging.ERROR, "workbench.panel.ticker"):
            run_in_turns(work())

        assert page.drawn == [0, 2]
        assert [record.getMessage() for record in caplog.records] == ["the panel could not be redrawn"]
        assert "ZeroDivisionError: in a view" in caplog.text

    def test_a_stamp_that_raises_stops_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        class Broken(Changing):
            def stamp(self) -> Hashable:
                if super().stamp() == 1:
                    raise RuntimeError("in a stamp")
                return self.now

        page = Broken()
        with caplog.at_level(logging.ERROR):
            run_in_turns(run_for(1, page))
        assert page.drawn[0] == 2
        assert "RuntimeError: in a stamp" in caplog.text


class TestItsEnd:
    def test_stopped_it_draws_no_more_and_can_begin_again(self) -> None:
        page = Changing()

        async def work() -> list[int]:
            ticker = await run_for(1, page)
            ticker.stop()
            counts = [len(page.drawn)]
            await asyncio.sleep(1)
            counts.append(len(page.drawn))
            assert not ticker.is_running
            ticker.start()
            await asyncio.sleep(1)
            return [*counts, len(page.drawn)]

        stopped, later, again = run_in_turns(work())
        assert 0 < stopped == later < again

    def test_it_stops_from_within_a_redraw(self) -> None:
        """A click on a page's button may close the panel that is being drawn."""
        page = Changing(lambda: ticker.stop())
        ticker = Ticker(page.stamp, page.redraw)

        async def work() -> None:
            ticker.start()
            await asyncio.sleep(2)

        run_in_turns(work())
        assert page.drawn == [1]

    def test_it_keeps_no_panel_that_nobody_holds(self) -> None:
        async def work() -> tuple[Any, Ticker]:
            page = Changing()
            ticker = await run_for(1, page)
            held = weakref.ref(page)
            del page
            gc.collect()
            await asyncio.sleep(1)
            return held(), ticker

        page, ticker = run_in_turns(work())
        assert page is None
        assert not ticker.is_running

    def test_without_a_loop_it_waits_for_one(self) -> None:
        page = Changing()
        ticker = Ticker(page.stamp, page.redraw)
        assert not ticker.start()
        ticker.stop()

        async def work() -> None:
            assert ticker.start()
            assert ticker.start()
            assert len(asyncio.all_tasks()) == 2
            await asyncio.sleep(1)

        run_in_turns(work())
        assert page.drawn

    def test_a_loop_that_was_closed_under_it_is_left_for_the_next(self) -> None:
        """Its task was for ever "not done", so a panel that met a second loop stood still, and close() raised."""
        page = Changing()
        ticker = Ticker(page.stamp, page.redraw)
        loop = asyncio.new_event_loop()

        async def begin() -> None:
            ticker.start()

        loop.run_until_complete(begin())
        task = ticker._task
        loop.close()
        assert task is not None
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        assert not ticker.is_running

        async def work() -> None:
            assert ticker.start()
            await asyncio.sleep(1)

        run_in_turns(work())
        assert page.drawn
        ticker.stop()
