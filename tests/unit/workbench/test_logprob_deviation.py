"""The largest difference of two outputs' log-probabilities, and where it is."""

from __future__ import annotations

import math

from engine.request import RequestOutput, RequestTimings
from workbench.logprob_deviation import Deviation, Row, largest_deviation


def output(logprobs: tuple[Row, ...] | None, prompt: tuple[Row | None, ...] | None = None) -> RequestOutput:
    return RequestOutput(
        request_id="request-0",
        prompt_token_ids=(1, 2),
        token_ids=(3,) * 4,
        text="",
        new_token_ids=(),
        new_text="",
        finish_reason="length",
        stop_reason=None,
        logprobs=logprobs,  # type: ignore[arg-type]
        prompt_logprobs=prompt,  # type: ignore[arg-type]
        timings=RequestTimings(0),
    )


def between(left: RequestOutput, right: RequestOutput, *, end: int = 4, are_filtered: bool = False) -> Deviation | None:
    return largest_deviation(left, right, end, are_filtered=are_filtered)


class TestDeviation:
    def test_is_none_where_nothing_was_asked_for(self) -> None:
        assert between(output(None), output(None)) is None

    def test_is_the_largest_of_all_positions(self) -> None:
        left = output(({3: -1.0}, {3: -2.0}, {3: -3.0}))
        right = output(({3: -1.125}, {3: -2.5}, {3: -3.0}))

        assert between(left, right) == (0.5, "output", 1)
        assert between(left, right, end=1) == (0.125, "output", 0)

    def test_of_a_prompt_leaves_its_first_token_out(self) -> None:
        assert between(output(None, (None, {2: -1.0})), output(None, (None, {2: -1.25}))) == (0.25, "prompt", 1)

    def test_is_infinite_where_a_row_is_missing(self) -> None:
        assert between(output(({3: -1.0}, {3: -2.0})), output(({3: -1.0},))) == (math.inf, "output", 1)

    def test_of_a_token_that_one_row_lacks_is_to_the_least_of_its_top(self) -> None:
        top = output(({3: -9.0, 5: -1.0, 6: -2.0},))
        near, far, lower = (output(({3: -9.0, 5: -1.0, 7: value},)) for value in (-1.875, -1.5, -2.5))

        assert between(top, near) == (0.125, "output", 0)
        assert between(top, far) == (0.5, "output", 0)
        assert between(top, lower) == (0.5, "output", 0)

    def test_of_a_token_that_only_one_filter_kept_is_not_counted(self) -> None:
        kept, dropped = output(({3: -1.0, 5: -2.0},)), output(({3: -1.125, 5: -math.inf},))

        assert between(kept, dropped) == (math.inf, "output", 0)
        assert between(kept, dropped, are_filtered=True) == (0.125, "output", 0)
        assert between(dropped, dropped) == (0.0, "output", 0)
