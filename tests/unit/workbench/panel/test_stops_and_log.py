"""Breakpoints and events as rows."""

from __future__ import annotations

from typing import Any

import pytest

from engine.phases import Phase, Reason
from tests.unit.workbench.worlds import make_session
from workbench.panel.log_view import log_view
from workbench.panel.stops_view import stops_view


class TestStops:
    def test_without_any_tell_what_one_may_name(self) -> None:
        with make_session() as session:
            pane = stops_view(session)

        assert pane["rows"] == []
        assert pane["phases"] == [phase.value for phase in Phase]
        assert ["HEAD_ADMISSIBLE", Reason.HEAD_ADMISSIBLE.value] in pane["reasons"]
        assert pane["hint"]

    def test_count_hits_and_mark_the_one_that_stands(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.break_on("resolve")
            off = session.break_on("forward", request="request-0")
            off.disable()
            session.run()
            session.run()
            pane = stops_view(session)
            session.step()
            behind = stops_view(session)

        assert [(row["id"], row["text"], row["enabled"], row["hits"], row["is_hit"]) for row in pane["rows"]] == [
            (1, "before resolve", True, 2, True),
            (2, "before forward, for request-0", False, 0, False),
        ]
        assert pane["hint"] == ""
        assert [row["is_hit"] for row in behind["rows"]] == [False, False]

    @pytest.mark.parametrize("wanted", [{"phase": "resolve"}, {"bubble_longer_than_us": 0.001}])
    def test_none_stands_once_the_session_was_reset(self, wanted: dict[str, Any]) -> None:
        with make_session("legacy", device="cpu") as session:
            session.submit([1], max_tokens=30, ignore_eos=True)
            session.break_on(**wanted)
            session.run()
            assert [row["is_hit"] for row in stops_view(session)["rows"]] == [True]
            session.reset()

            assert [(row["hits"], row["is_hit"]) for row in stops_view(session)["rows"]] == [(0, False)]


class TestLog:
    def test_of_a_new_session_says_what_to_do(self) -> None:
        with make_session() as session:
            assert log_view(session)["rows"] == []
            assert "submit" in log_view(session)["hint"]

    def test_is_the_newest_first_and_counts_the_rest(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=3, ignore_eos=True)
            session.run()
            session.mode = "legacy"
            whole, short = log_view(session), log_view(session, 2)

        assert [row["kind"] for row in whole["rows"]] == ["mode", "stopped", "ended", "submitted"]
        assert whole["left_out"] == 0
        assert short["rows"] == whole["rows"][:2]
        assert short["left_out"] == 2
        assert whole["rows"][2]["text"] == "request-0: length, 3 tokens"
        assert [row["iteration"] for row in whole["rows"]] == [4, 4, 4, 0]
