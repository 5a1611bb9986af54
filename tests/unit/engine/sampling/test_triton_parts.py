"""How the drawing kernels divide rows of logits; the kernels themselves are proven by tests/gpu."""

from __future__ import annotations

import pytest

from engine.sampling.triton import _BLOCK, _MOST_PARTS, _PROGRAMS, divided


@pytest.mark.parametrize("vocab", [1, 33, _BLOCK, _BLOCK + 1, 49_152, 151_936, _MOST_PARTS * _BLOCK + 1, 1_000_000])
@pytest.mark.parametrize("rows", [1, 7, 8, 256, _PROGRAMS + 1])
def test_parts_are_blocks_and_hold_all_columns_once(rows: int, vocab: int) -> None:
    share, parts = divided(rows, vocab)

    assert share % _BLOCK == 0
    assert 1 <= parts <= _MOST_PARTS
    assert (parts - 1) * share < vocab <= parts * share


def test_few_rows_are_divided_further_than_many() -> None:
    parts = [divided(rows, 151_936)[1] for rows in (1, 8, 32, 128, 1024)]

    assert parts == sorted(parts, reverse=True)
    assert parts[0] > 4 * parts[-1] == 4
