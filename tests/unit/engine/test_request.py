"""Sampling parameters and request states: what is refused, and by which name."""

from __future__ import annotations

from typing import Any

import pytest

from engine import RequestError, SamplingParams
from engine.request import LEGAL_MOVES, Request, RequestState, RequestTimings

NAN, INF = float("nan"), float("inf")
REFUSED: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2.5),
    ("max_tokens", True),
    ("max_tokens", None),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", INF),
    ("temperature", "1"),
    ("top_k", -2),
    ("top_k", 1.0),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", -0.5),
    ("top_p", NAN),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("seed", 1.5),
    ("seed", 2**64),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -3.0),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", NAN),
    ("stop", 5),
    ("stop", [5]),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop_token_ids", 5),
    ("stop_token_ids", "5"),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["5"]),
    ("logit_bias", [1]),
    ("logit_bias", {"1": 2.0}),
    ("logit_bias", {1: 200.0}),
    ("logit_bias", {1: NAN}),
    ("logprobs", -1),
    ("logprobs", 257),
    ("logprobs", True),
    ("prompt_logprobs", -1),
]


def make_request() -> Request:
    return Request(
        key=0,
        request_id="r",
        prompt_ids=(1, 2),
        params=SamplingParams(),
        seed=0,
        max_new_tokens=4,
        timings=RequestTimings(0),
    )


class TestSamplingParams:
    @pytest.mark.parametrize(("name", "value"), REFUSED)
    def test_refuses_a_bad_value_and_names_the_field(self, name: str, value: object) -> None:
        with pytest.raises(RequestError, match=name) as caught:
            SamplingParams(**{name: value})

        assert caught.value.field == name

    def test_stop_strings_need_text(self) -> None:
        with pytest.raises(RequestError, match="detokenize=False"):
            SamplingParams(stop="x", detokenize=False)

    @pytest.mark.parametrize(
        ("given", "kept"), [(None, ()), ("ab", ("ab",)), (["a", "b"], ("a", "b")), ([], ()), (("x",), ("x",))]
    )
    def test_stop_is_kept_as_strings(self, given: Any, kept: tuple[str, ...]) -> None:
        assert SamplingParams(stop=given).stop_strings == kept

    def test_one_stop_id_stays_one(self) -> None:
        assert SamplingParams(stop_token_ids=[7]).stop_token_ids == (7,)

    @pytest.mark.parametrize(
        ("options", "greedy"),
        [
            ({"temperature": 0}, True),
            ({"temperature": 1e-6}, True),
            ({"temperature": 1e-4}, False),
            ({"top_k": 1}, True),
            ({}, False),
        ],
    )
    def test_greedy_by_one_threshold(self, options: dict[str, Any], greedy: bool) -> None:
        assert SamplingParams(**options).is_greedy is greedy


class TestRequestState:
    def test_a_finished_request_never_moves_again(self) -> None:
        assert LEGAL_MOVES[RequestState.FINISHED] == frozenset()

    def test_an_illegal_move_is_refused(self) -> None:
        request = make_request()

        with pytest.raises(AssertionError, match="waiting -> decode"):
            request.move_to(RequestState.DECODE)

    def test_counts_what_the_host_knows(self) -> None:
        request = make_request()
        request.output_ids.extend([5, 6, 7])

        assert (request.num_tokens, request.remaining_tokens) == (5, 1)
