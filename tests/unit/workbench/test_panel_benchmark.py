"""What the benchmark of the panel makes of the moments it has measured."""

from __future__ import annotations

from itertools import accumulate

import pytest

pytest.importorskip("anywidget")

from benchmarks.panel_kernel import lost_share

MS = 1_000_000


class TestLostShare:
    def test_is_what_iterations_with_redraws_take_longer(self) -> None:
        """Steps of 2 ms; each fiftieth has a redraw of 3 ms before it."""
        steps = [0, *([5 if number % 50 == 0 else 2 for number in range(1, 500)])]
        begins = [at * MS for at in accumulate(steps)]
        redraws = [begin - 3 * MS for begin, step in zip(begins, steps, strict=True) if step == 5]

        assert lost_share(begins, redraws) == pytest.approx(3 / 103, rel=0.02)

    def test_does_not_count_a_machine_that_grows_slower(self) -> None:
        begins = [at * MS for at in accumulate(2 + number // 100 for number in range(500))]

        assert lost_share(begins, begins[::50]) == pytest.approx(0, abs=0.005)

    def test_is_not_known_without_redraws(self) -> None:
        assert lost_share([0, MS, 2 * MS], []) != lost_share([0, MS, 2 * MS], [])
