from __future__ import annotations

import pytest

from tracing.importing import ImportedKind, ImportedSpan
from tracing.nvtx_match import EmittedRange, RangePair
from workbench.profile_lanes import lanes_side_by_side


def pair(name: str, category: str, start: int, end: int) -> RangePair:
    """Seen by the tool a microsecond longer, on a clock that is 500 behind."""
    theirs = ImportedSpan(kind=ImportedKind.RANGE, name=name, start_ns=start - 500, end_ns=end + 500)
    return RangePair(EmittedRange(name, category, 7, start, end), theirs)


PAIRS = [pair("resolve", "phase", 1_000, 9_000), pair("samples", "wait", 2_000, 8_000)]


class TestLanes:
    def test_both_sides_have_a_lane_a_category_and_the_same_bars(self) -> None:
        page = lanes_side_by_side(PAIRS, 500, 7, "nsys")

        assert [name for name in ("phases, ours", "waits, ours", "phases, nsys", "waits, nsys") if name in page] == [
            "phases, ours",
            "waits, ours",
            "phases, nsys",
            "waits, nsys",
        ]
        assert "resolve: 8.0 µs" in page
        assert "resolve: 9.0 µs" in page
        assert "copies" not in page

    def test_an_iteration_that_is_not_there_is_told(self) -> None:
        with pytest.raises(ValueError, match="iteration 8 is not among those"):
            lanes_side_by_side(PAIRS, 500, 8, "nsys")
