"""Tokens that wait in the log are their requests' all the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.request import Request, RequestTimings, SamplingParams
from engine.table import RequestTable
from engine.token_log import MOST_STEPS


def table_of(count: int) -> tuple[RequestTable, list[Request]]:
    table = RequestTable(4, 2)
    requests = [
        Request(
            key=key,
            request_id=f"r{key}",
            prompt_ids=(1, 2),
            params=SamplingParams(),
            seed=0,
            max_new_tokens=500,
            timings=RequestTimings(arrival_ns=0),
        )
        for key in range(count)
    ]
    for request in requests:
        table.add(request, np.array([request.key], dtype=np.int32), prefill_len=2)
    return table, requests


class TestTokenLog:
    def test_a_request_asked_for_its_output_has_every_token(self) -> None:
        table, requests = table_of(3)
        table.add_tokens(np.array([10, 20, 30]))
        table.add_tokens(np.array([11, 21, 31]))

        assert [request.output_ids for request in requests] == [[10, 11], [20, 21], [30, 31]]

    def test_tokens_appended_after_a_look_stand_in_order(self) -> None:
        table, requests = table_of(2)
        table.add_tokens(np.array([1, 2]))
        requests[0].output_ids.append(5)
        table.add_tokens(np.array([3, 4]))

        assert [request.output_ids for request in requests] == [[1, 5, 3], [2, 4]]

    def test_the_buffer_a_step_came_in_may_be_used_again(self) -> None:
        table, requests = table_of(1)
        tokens = np.array([7])
        table.add_tokens(tokens)
        tokens[0] = 8

        assert requests[0].output_ids == [7]

    def test_survivors_of_a_compaction_keep_their_own(self) -> None:
        table, requests = table_of(3)
        table.add_tokens(np.array([1, 2, 3]))
        table.keep(np.array([False, True, True]))
        table.add_tokens(np.array([5, 4]))  # the last row has moved to the first

        assert [request.output_ids for request in requests] == [[1], [2, 4], [3, 5]]

    def test_a_newcomer_has_none_of_the_tokens_before_it(self) -> None:
        table, requests = table_of(1)
        table.add_tokens(np.array([1]))
        newcomer = table_of(2)[1][1]
        table.add(newcomer, np.array([1], dtype=np.int32), prefill_len=2)
        table.add_tokens(np.array([2, 3]))

        assert requests[0].output_ids == [1, 2]
        assert newcomer.output_ids == [3]

    def test_it_never_grows_beyond_its_bound(self) -> None:
        table, requests = table_of(1)
        steps = 3 * MOST_STEPS + 5
        for step in range(steps):
            table.add_tokens(np.array([step]))

        assert table.log._waiting is not None
        assert len(table.log._waiting.steps) <= MOST_STEPS
        assert requests[0].output_ids == list(range(steps))

    def test_an_interrupt_while_handing_over_loses_and_doubles_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        table, requests = table_of(3)
        table.add_tokens(np.array([10, 20, 30]))
        table.add_verified(np.array([[11], [21], [31]]), np.array([1, 1, 1]), np.array([2, 2, 2]))
        take, calls = Request.take, []

        def interrupted(self: Request, *args: Any) -> None:
            take(self, *args)
            calls.append(self)
            if len(calls) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(Request, "take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            table.log.hand_over()

        assert [request.output_ids for request in requests] == [[10, 11], [20, 21], [30, 31]]
        assert [(request.num_drafted, request.num_accepted) for request in requests] == [(2, 0)] * 3

    def test_of_verified_rows_it_keeps_as_many_as_each_got_and_counts_their_drafts(self) -> None:
        table, requests = table_of(3)
        table.add_verified(np.array([[1, 2, 3], [4, -1, -1], [5, 6, -1]]), np.array([3, 1, 2]), np.array([2, 2, 2]))
        table.add_tokens(np.array([7, 8, 9]))
        table.add_verified(np.array([[10, -1], [11, 12], [13, -1]]), np.array([1, 2, 1]), np.array([1, 1, 0]))

        assert [request.num_drafted for request in requests] == [3, 3, 2]
        assert [request.num_accepted for request in requests] == [2, 1, 1]
        assert [one.output_ids for one in requests] == [[1, 2, 3, 7, 10], [4, 8, 11, 12], [5, 6, 9, 13]]
        assert table.num_output[:3].tolist() == [5, 4, 4]

    def test_of_no_rows_it_keeps_nothing(self) -> None:
        table, _ = table_of(0)
        nothing = np.zeros(0, dtype=np.int64)
        table.add_verified(np.zeros((0, 3), dtype=np.int64), nothing, nothing)
        newcomer = table_of(1)[1][0]
        table.add(newcomer, np.array([0], dtype=np.int32), prefill_len=2)
        table.add_tokens(np.array([4]))

        assert newcomer.output_ids == [4]

    def test_drafts_noted_after_a_look_are_added(self) -> None:
        table, requests = table_of(1)
        table.add_verified(np.array([[1, 2]]), np.array([2]), np.array([1]))
        requests[0].note_drafts(3, 2)
        table.add_verified(np.array([[3, -1]]), np.array([1]), np.array([1]))

        assert (requests[0].num_drafted, requests[0].num_accepted) == (5, 3)

    def test_a_reset_leaves_requests_what_they_had(self) -> None:
        table, requests = table_of(2)
        table.add_tokens(np.array([1, 2]))
        table.reset()

        assert [request.output_ids for request in requests] == [[1], [2]]
