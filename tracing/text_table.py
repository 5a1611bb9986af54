"""Rows of words and numbers as lines for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, words: int = 2) -> list[str]:
    """One line a row, columns two spaces apart: the first ``words`` of them to the left, numbers to the right.

    Every row has a cell for every column; without rows there are no lines.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_padded(row, widths, words)).rstrip() for row in rows]


def _padded(row: Sequence[str], widths: Sequence[int], words: int) -> list[str]:
    return [
        cell.ljust(width) if column < words else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
