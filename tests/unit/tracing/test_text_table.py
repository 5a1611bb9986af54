from __future__ import annotations

import pytest

from tracing.text_table import aligned


def test_words_stand_to_the_left_and_numbers_to_the_right() -> None:
    rows = [("", "unit", "legacy"), ("step time", "ms", "1.5"), ("rows", "", "12,345.0")]
    assert aligned(rows) == [
        "           unit    legacy",
        "step time  ms         1.5",
        "rows             12,345.0",
    ]
    assert aligned([("a", "b", "1"), ("aa", "b", "22")], words=1) == ["a   b   1", "aa  b  22"]


def test_no_line_ends_in_blanks() -> None:
    assert aligned([("a", "b", "c"), ("d", "", "")]) == ["a  b  c", "d"]


def test_no_rows_are_no_lines() -> None:
    assert aligned([]) == []


def test_rows_of_different_lengths_are_a_fault() -> None:
    with pytest.raises(ValueError, match="zip"):
        aligned([("a", "b"), ("c",)])
