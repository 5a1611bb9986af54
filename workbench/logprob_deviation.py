"""How far the log-probabilities of two outputs of one request are apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from engine.request import RequestOutput

Row = Mapping[int, float]


class Deviation(NamedTuple):
    """The largest difference found, and where."""

    value: float
    """Infinite where a row is missing, or a token is possible in one output alone."""
    part: str
    """``prompt`` or ``output``."""
    position: int


def largest_deviation(
    left: RequestOutput, right: RequestOutput, num_outputs: int, *, are_filtered: bool
) -> Deviation | None:
    """Compare what both outputs have of the prompt and of the first ``num_outputs`` tokens.

    Args:
        left: One output.
        right: The other, with the same tokens that far.
        num_outputs: Output tokens to look at.
        are_filtered: Log-probabilities of output are those behind the filters; what these keep at their edge may
            differ by rounding, so minus infinity against a number then counts as no difference.

    Returns:
        None where no log-probabilities were asked for.
    """
    parts = (
        ("prompt", left.prompt_logprobs, right.prompt_logprobs, None, False),
        ("output", left.logprobs, right.logprobs, num_outputs, are_filtered),
    )
    found = [
        Deviation(_between(a, b, filtered), part, position)
        for part, lefts, rights, end, filtered in parts
        for position, (a, b) in enumerate(zip_longest(_rows(lefts, end), _rows(rights, end)))
    ]
    return max(found, key=lambda one: one.value, default=None)


def _rows(rows: Sequence[Row | None] | None, end: int | None) -> Sequence[Row | None]:
    return (rows or ())[:end]


def _between(left: Row | None, right: Row | None, are_filtered: bool) -> float:
    if left is None or right is None:
        return 0.0 if left is right else math.inf  # a prompt's first token has no row in either
    return max(_of_token(token, left, right, are_filtered) for token in left.keys() | right.keys())


def _of_token(token: int, left: Row, right: Row, are_filtered: bool) -> float:
    """A token that one row lacks is at most as likely there as the least likely of its top."""
    a, b = left.get(token), right.get(token)
    if a is not None and b is not None:
        apart = 0.0 if a == b else abs(a - b)
    else:
        low, high = (_least(left), b) if a is None else (_least(right), a)
        assert high is not None
        apart = 0.0 if high <= low else high - low
    return 0.0 if math.isinf(apart) and are_filtered else apart


def _least(row: Row) -> float:
    """Of the most likely tokens; the chosen one comes first and may lie far below them."""
    values = list(row.values())
    return min(values[1:] or values)
