"""Numbers over repeats: intervals that cover what they say, ratios of pairs, what the table tells."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.unit.workbench.figures.figure_worlds import trace
from tracing.summary import Summary
from workbench.repeats import (
    SAME,
    Lack,
    MedianInterval,
    RepeatRow,
    dropped_notes,
    find_row,
    format_few,
    format_repeats,
    median_interval,
    repeat_notes,
    repeat_rows,
    shared,
)


def summary(tokens_per_s: float | None) -> Summary:
    return replace(trace().summary, tokens_per_s=tokens_per_s)


def speeds(*legs: tuple[float | None, ...]) -> RepeatRow:
    return find_row("tokens/s", repeat_rows([[summary(value) for value in leg] for leg in legs]))


class TestMedianInterval:
    def test_of_one_sample_there_is_none(self) -> None:
        assert median_interval([]) is None
        assert median_interval([3.0]) is None

    @pytest.mark.parametrize(
        ("count", "low", "high", "confidence"),
        [
            (2, 1, 2, 0.5),
            (3, 1, 3, 0.75),
            (4, 1, 4, 0.875),
            (5, 1, 5, 0.9375),
            (6, 1, 6, 0.96875),
            (7, 1, 7, 0.984375),
            (8, 2, 7, 0.9296875),  # 1 - 2 (1 + 8) / 256
            (20, 6, 15, 0.9586105346679688),  # of tables of the sign test
        ],
    )
    def test_is_of_the_depth_that_tables_of_the_sign_test_have(
        self, count: int, low: float, high: float, confidence: float
    ) -> None:
        samples = list(range(count, 0, -1))

        assert median_interval(samples) == MedianInterval(low, high, confidence)

    @pytest.mark.parametrize("count", [2, 5, 8, 11])
    @pytest.mark.parametrize("draw", ["normal", "exponential", "cauchy"])
    def test_covers_the_median_as_often_as_it_says_whatever_the_noise(self, count: int, draw: str) -> None:
        random, trials = np.random.default_rng(7), 4_000
        draws = {
            "normal": random.normal,
            "exponential": lambda size: random.exponential(size=size) - np.log(2),
            "cauchy": lambda size: random.standard_cauchy(size),
        }
        samples = draws[draw](size=(trials, count))  # of median 0, all of them

        found = [median_interval(row) for row in samples.tolist()]

        covered = np.mean([interval is not None and interval.holds(0.0) for interval in found])
        says = median_interval(range(count))
        assert says is not None
        assert covered == pytest.approx(says.confidence, abs=4 * (0.25 / trials) ** 0.5)

    def test_holds_its_ends(self) -> None:
        interval = MedianInterval(0.9, 1.0, 0.9)

        assert interval.holds(1.0)
        assert not interval.holds(1.01)


class TestRatios:
    def test_are_taken_by_repeat_and_not_of_medians(self) -> None:
        """The machine was twice as fast in the last repeat: only a ratio of pairs shows that the leg gains 10 %."""
        row = speeds((100, 110, 90, 105, 200), (110, 121, 99, 115.5, 220))

        ratio = row.ratios[1]
        assert ratio is not None
        assert ratio.median == pytest.approx(1.1)
        assert ratio.interval is not None
        assert ratio.interval.low == pytest.approx(1.1)
        assert ratio.is_difference_seen
        assert ratio.verdict == "different at 94 %"

    def test_an_interval_that_holds_1_shows_no_difference(self) -> None:
        row = speeds((100, 100, 100, 100, 100), (110, 120, 99, 115, 130))

        ratio = row.ratios[1]
        assert ratio is not None
        assert ratio.is_difference_seen is False
        assert ratio.verdict == "no difference seen at 94 %"
        assert f"1.15x {SAME}" in format_repeats(["a", "b"], [row], 5)

    def test_of_one_run_each_have_no_interval(self) -> None:
        ratio = speeds((100,), (120,)).ratios[1]

        assert ratio is not None
        assert (ratio.interval, ratio.is_difference_seen) == (None, None)
        assert ratio.verdict == "one run each: no interval"

    def test_leave_out_a_repeat_without_samples(self) -> None:
        row = speeds((100, None, 100), (120, 120, 130))

        assert row.ratios[1] is not None
        assert row.ratios[1].interval == MedianInterval(1.2, 1.3, 0.5)
        assert row.legs[0].median == 100

    def test_tell_how_many_pairs_were_dropped_and_why(self) -> None:
        """A ratio of two pairs stood in the table like one of five."""
        row = speeds((100, None, 0, None, 100), (120, 120, 120, None, 130))
        ratio, names = row.ratios[1], ["base", "new"]

        assert ratio is not None
        assert (ratio.num_pairs, [(one.repeat, one.lack) for one in ratio.dropped]) == (
            2,
            [(2, Lack.BASELINE), (3, Lack.ZERO), (4, Lack.BOTH)],
        )
        assert format_repeats(names, [row], 5).splitlines()[-1].endswith("1.25x  1.20–1.30 (2 of 5)")
        assert "1.25x 1.20–1.30 (2 of 5)" in format_few(names, [row])
        assert dropped_notes(names, [row, speeds((1, 1), (2, None))]) == [
            "new/base of tokens/s: 2 of 5 pairs; base has no sample in repeat 2, base is 0 in repeat 3, base and new "
            "have no sample in repeat 4.",
            "new/base of tokens/s: 1 of 2 pairs; new has no sample in repeat 2.",
        ]
        told = row.to_dict(names)["legs"]["new"]["ratio"]
        assert told["dropped"][0] == {"repeat": 2, "lack": "baseline"}
        assert json.loads(json.dumps(told))["num_pairs"] == 2

    def test_of_every_repeat_tell_of_no_dropped_pairs(self) -> None:
        row = speeds((100, 100), (120, 130))

        assert dropped_notes(["a", "b"], [row]) == []
        assert " of " not in format_repeats(["a", "b"], [row], 2)

    def test_are_of_every_leg_to_the_first(self) -> None:
        row = speeds((100,), (120,), (50,))

        assert [ratio and ratio.median for ratio in row.ratios] == [None, 1.2, 0.5]

    def test_shares_and_what_modes_do_not_share_have_none(self) -> None:
        rows = repeat_rows([[summary(1.0)], [summary(2.0)]])

        assert find_row("hidden share", rows).ratios == (None, None)
        assert find_row("queue delay p50", rows).ratios == (None, None)

    @pytest.mark.parametrize("counts", [(), (1, 2), (0, 0)])
    def test_legs_of_different_length_make_no_pairs(self, counts: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="every leg needs the same number of repeats"):
            repeat_rows([[summary(1.0)] * count for count in counts])


class TestTable:
    def test_has_medians_spread_ratio_and_interval(self) -> None:
        lines = format_repeats(["a", "b"], [speeds((100, 300, 200), (300, 600, 400))], 3).splitlines()

        assert lines[0].split() == ["unit", "a", "min–max", "b", "min–max", "b/a", "interval"]
        expected = ["tokens/s", "1/s", "200.0", "100.0–300.0", "400.0", "300.0–600.0", "2.00x", "2.00–3.00"]
        assert lines[-1].split() == expected

    def test_of_one_run_each_has_numbers_and_ratios_alone(self) -> None:
        lines = format_repeats(["a", "b"], [speeds((100,), (300,))], 1).splitlines()

        assert lines[0].split() == ["unit", "a", "b", "b/a"]
        assert lines[-1].split() == ["tokens/s", "1/s", "100.0", "300.0", "3.00x"]

    def test_of_one_leg_has_no_ratio(self) -> None:
        assert format_repeats(["a"], [speeds((100,))], 1).splitlines()[0].split() == ["unit", "a"]


class TestNotes:
    def test_say_how_sure_an_interval_is(self) -> None:
        first, second = repeat_notes(["a", "b"], 5)

        assert "covers the true median 93.8 % of the time" in first
        assert "some 6 show one by chance" in second

    def test_say_that_few_repeats_are_little(self) -> None:
        assert repeat_notes(["a", "b"], 3)[1] == "75.0 % is little: 5 repeats give 93.8 %."

    def test_say_that_one_run_has_no_interval(self) -> None:
        assert "have no interval" in repeat_notes(["a", "b"], 1)[0]
        assert repeat_notes(["a"], 5) == []


class TestFindRow:
    def test_wants_the_section_where_a_label_is_used_twice(self) -> None:
        row = speeds((1.0,))
        twice = [replace(row, section="host", label="forward"), replace(row, section="device", label="forward")]

        assert find_row("device: forward", twice) is twice[1]
        with pytest.raises(ValueError, match="several metrics are called 'forward'; say one of 'host: forward', 'dev"):
            find_row("forward", twice)
        with pytest.raises(ValueError, match="there is no metric 'x' in this comparison; there are forward"):
            find_row("x", twice)


def test_what_all_share_is_said_once() -> None:
    assert shared({"a": 1, "b": 1}) == "1"
    assert shared({"a": 1, "b": 2}) == "a 1, b 2"
