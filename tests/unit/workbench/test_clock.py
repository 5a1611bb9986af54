"""Clocks: what takes time on them and what does not."""

from __future__ import annotations

import time

import pytest

from engine.errors import ConfigError
from workbench.clock import IterationsClock, VirtualClock, WallClock, make_clock


class TestVirtualClock:
    def test_moves_by_what_the_engine_ran(self) -> None:
        clock = VirtualClock()

        clock.ran(2_000_000)
        clock.ran(500_000)

        assert clock.now() == pytest.approx(0.0025)

    def test_jumps_forward_when_idle_and_never_back(self) -> None:
        clock = VirtualClock()

        clock.skip_to(3.0)
        clock.skip_to(1.0)

        assert clock.now() == 3.0

    def test_reads_zero_after_a_reset(self) -> None:
        clock = VirtualClock()
        clock.skip_to(3.0)

        clock.reset()

        assert clock.now() == 0.0


class TestIterationsClock:
    def test_counts_iterations_begun_and_those_skipped(self) -> None:
        begun = [4]
        clock = IterationsClock(lambda: begun[0])
        assert clock.now() == 4

        clock.skip_to(10)
        begun[0] += 1

        assert clock.now() == 11

    def test_does_not_go_back_to_an_arrival_that_is_past(self) -> None:
        clock = IterationsClock(lambda: 7)

        clock.skip_to(5)

        assert clock.now() == 7


class TestWallClock:
    def test_waits_for_an_arrival_and_not_longer_than_needed(self) -> None:
        clock = WallClock()
        before = time.perf_counter()

        clock.skip_to(0.01)

        assert clock.now() >= 0.01
        assert time.perf_counter() - before < 5

    def test_does_not_wait_for_the_past(self) -> None:
        clock = WallClock()

        clock.skip_to(-1.0)

        assert clock.now() >= 0


class TestMakeClock:
    def test_refuses_an_unknown_name_with_the_known_ones(self) -> None:
        with pytest.raises(ConfigError, match="virtual, iterations, wall; got 'sundial'"):
            make_clock("sundial", lambda: 0)
