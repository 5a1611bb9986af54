"""The requests table: every state a request can be in, its newest tokens, its times."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.phases import Phase
from tests.oracle_world import loaded_oracle
from tests.unit.workbench.panel.test_bar_view import fail_in
from tests.unit.workbench.worlds import make_session, spread_workload
from tracing.void_words import VOID_WORDS
from workbench.panel import requests_view as module
from workbench.panel.hues import NUM_HUES
from workbench.panel.messages import RequestRow, RequestsView
from workbench.panel.requests_view import RequestRows
from workbench.panel.token_texts import TokenTexts, visible
from workbench.session import Session


def rows(session: Session, limit: int = 128) -> dict[str, RequestRow]:
    return by_id(RequestRows(session).view(limit))


def by_id(view: RequestsView) -> dict[str, RequestRow]:
    return {row["request_id"]: row for row in view["rows"]}


def text_session(**options: Any) -> Session:
    """On the oracle whose ids are pieces of text."""
    sizes = {"max_requests": 4, "max_batch_tokens": 128, "max_sequence_length": 96, "num_blocks": 24}
    return Session(loaded_oracle(has_text=True), device="inline", **{**sizes, **options})


class TestStates:
    def test_nobody_yet_is_told_what_to_do(self) -> None:
        with make_session() as session:
            view = RequestRows(session).view()
            assert view["rows"] == []
            assert "submit" in view["hint"]
        assert RequestRows(session).view()["hint"] == "The session is closed and had no requests."

    def test_coming_waiting_running_and_ended_in_this_order(self) -> None:
        with make_session(clock="iterations", max_requests=1) as session:
            session.submit([7], max_tokens=2, request_id="ended", ignore_eos=True)
            session.run()
            session.submit([1, 2], max_tokens=9, request_id="running", ignore_eos=True)
            session.submit([3], max_tokens=9, request_id="waiting")
            session.submit([4], max_tokens=9, request_id="coming", arrival=99)
            session.run(3)
            seen = rows(session)

        assert {name: row["state"] for name, row in seen.items()} == {
            "running": "decode",
            "waiting": "waiting",
            "coming": "coming",
            "ended": "finished",
        }
        assert list(seen) == ["running", "waiting", "coming", "ended"]
        assert {name: row["why"] for name, row in seen.items()} == {
            "running": "",
            "waiting": "no free row",
            "coming": "arrives at 99 iterations",
            "ended": "all 2 tokens of max_tokens",
        }
        assert {name: row["can_abort"] for name, row in seen.items()} == {
            "running": True,
            "waiting": True,
            "coming": True,
            "ended": False,
        }
        assert (seen["running"]["row"], seen["running"]["in_pending"]) == (0, True)
        assert (seen["ended"]["row"], seen["ended"]["blocks"], seen["ended"]["kv_len"]) == (None, [], 0)

    def test_each_agrees_with_the_table_at_every_border(self) -> None:
        with make_session(clock="iterations") as session:
            session.submit_workload(spread_workload())
            pane = RequestRows(session)
            while session.step_phase() is not None:
                shown = {row["request_id"]: row for row in pane.view()["rows"]}
                assert set(shown) == {one.request_id for one in session.submissions}
                for row in session.snapshot().rows:
                    assert row.request_id is not None
                    one = shown[row.request_id]
                    assert (one["row"], one["state"], one["kv_len"]) == (row.row, row.state, row.kv_len)
                    assert (tuple(one["blocks"]), one["in_pending"]) == (row.blocks, row.in_pending)
                    assert (one["output_tokens"], one["max_tokens"]) == (row.output_tokens, row.max_tokens)

    def test_waiting_for_memory_and_behind_one_that_does(self) -> None:
        with make_session(num_blocks=6) as session:
            session.submit([1] * 20, max_tokens=40, ignore_eos=True)
            session.submit([2] * 30, max_tokens=50, request_id="large")
            session.submit([3], max_tokens=3, request_id="small")
            session.run(3)
            seen = rows(session)

        assert seen["large"]["why"].startswith("not enough blocks")
        assert seen["small"]["why"] == "behind large"

    def test_aborted_before_and_after_it_is_taken_over(self) -> None:
        with make_session(clock="iterations") as session:
            session.submit([1], max_tokens=30, ignore_eos=True, request_id="live")
            session.submit([1], max_tokens=30, arrival=50, request_id="late")
            session.run(4)
            session.abort("late")
            session.abort("live")
            before = rows(session)
            session.run()
            behind = rows(session)

        assert (before["live"]["why"], before["live"]["can_abort"]) == (
            "aborted; the next admit or resolve ends it",
            False,
        )
        assert before["late"]["why"] == "aborted before it arrived"
        assert behind["live"]["why"] == "aborted with 3 tokens"

    def test_after_a_failure_rows_stand_as_they_stood(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=30, ignore_eos=True)
            session.run(4)
            fail_in(session, Phase.RESOLVE)
            with pytest.raises(ZeroDivisionError):
                session.run()
            assert rows(session)["request-0"]["state"] == "decode"

    def test_after_a_reset_nothing_is_left_and_after_a_restart_all_wait(self) -> None:
        with make_session() as session:
            pane = RequestRows(session)
            session.submit([1], max_tokens=5)
            session.run()
            assert [row["state"] for row in pane.view()["rows"]] == ["finished"]
            session.restart()
            assert [(row["state"], row["tokens"]) for row in pane.view()["rows"]] == [("waiting", [])]
            session.reset()
            assert pane.view()["rows"] == []

    def test_of_a_closed_session_can_be_read_and_not_aborted(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=30, ignore_eos=True)
            session.run(3)
        assert (rows(session)["request-0"]["state"], rows(session)["request-0"]["can_abort"]) == ("decode", False)

    def test_while_it_runs_in_the_background(self) -> None:
        async def work() -> list[int]:
            run = session.start()
            counts = []
            pane = RequestRows(session)
            while not run.done:
                counts.append(pane.view()["rows"][0]["output_tokens"])
                await asyncio.sleep(0)
            return counts

        with make_session(device="cpu", op_sleep_s=0.001) as session:
            session.submit([1], max_tokens=60, ignore_eos=True)
            counts = asyncio.run(work())

        assert counts == sorted(counts)
        assert len(set(counts)) > 3


class TestInPassing:
    def test_the_rows_that_run_are_new_and_the_others_as_they_were(self) -> None:
        with make_session(max_requests=2, clock="iterations") as session:
            session.submit([[1]] * 4, max_tokens=40, ignore_eos=True)
            session.run(4)
            pane = RequestRows(session)
            before = by_id(pane.view())
            session.step()
            waits = session.engine.queue.waiting[0]
            waits.void_reasons.add("paced")
            passing, whole = by_id(pane.view(in_passing=True)), by_id(RequestRows(session).view())

            assert [name for name in before if passing[name] == whole[name]] == ["request-0", "request-1", "request-3"]
            assert passing[waits.request_id] is before[waits.request_id]
            assert by_id(pane.view()) == whole

    def test_whoever_comes_goes_or_ends_is_told_at_once(self) -> None:
        with make_session(max_requests=2, clock="iterations") as session:
            pane = RequestRows(session)
            session.submit([[1]] * 5, max_tokens=3, ignore_eos=True)
            session.submit([1], max_tokens=3, arrival=6)
            number = 0
            while session.step_phase() is not None:
                states = {row["request_id"]: row["state"] for row in pane.view(in_passing=True)["rows"]}
                assert states == {name: row["state"] for name, row in rows(session).items()}
                number += 1
                if number == 9:
                    session.submit([2], max_tokens=3)
                    assert "request-6" in by_id(pane.view(in_passing=True))


class TestEnds:
    def test_in_words(self) -> None:
        with text_session() as session:
            ids = session.submit(["abc", "abd", "abe"], max_tokens=40, temperature=0.9)
            session.submit("abc", max_tokens=200, ignore_eos=True, request_id="cut", seed=3)
            session.run()
            whys = {name: row["why"] for name, row in rows(session).items()}
            reasons = {name: output.finish_reason for name, output in session.outputs.items()}
            token_ids = session.outputs["cut"].token_ids

        assert whys["cut"] == f"the sequence is as long as it may be, {len(token_ids)} tokens"
        for name in ids:
            expected = "all 40 tokens" if reasons[name] == "length" else "end of sequence after"
            assert whys[name].startswith(expected), (name, reasons[name])

    def test_of_a_stop_string_and_a_stop_id(self) -> None:
        with text_session() as plain:
            plain.submit("abc", max_tokens=20, temperature=0, ignore_eos=True)
            plain.run()
            output = plain.outputs["request-0"]
        with text_session() as session:
            stop_id = output.token_ids[6]
            session.submit("abc", max_tokens=20, temperature=0, ignore_eos=True, stop=[output.text[3:6]])
            session.submit("abc", max_tokens=20, temperature=0, ignore_eos=True, stop_token_ids=[stop_id])
            session.run()
            seen = rows(session)

        assert seen["request-0"]["why"].startswith(f"stop string {output.text[3:6]!r} after ")
        assert seen["request-1"]["why"].startswith(f"stop id {stop_id} after ")


class TestTokens:
    def test_are_the_newest_with_one_of_them_new(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=60, ignore_eos=True)
            pane = RequestRows(session)
            while session.step_phase() is not None:
                row = pane.view()["rows"][0]
                output_ids = session.outputs["request-0"].token_ids
                assert row["tokens"] == [str(one) for one in output_ids[-24:]]
                assert row["token_ids"] == [*output_ids[-24:]]
                assert (row["output_tokens"], row["logprobs"]) == (len(output_ids), [])

    def test_are_new_from_resolve_to_the_next_resolve_of_another(self) -> None:
        with make_session("legacy") as session:
            session.submit([1], max_tokens=2, ignore_eos=True, request_id="short")
            session.submit([2], max_tokens=9, ignore_eos=True, request_id="long")
            pane, new = RequestRows(session), []
            for _ in range(4):
                session.step()
                new.append({row["request_id"]: row["num_new"] for row in pane.view()["rows"]})

        assert new == [{"short": 1, "long": 1}] * 2 + [{"short": 0, "long": 1}] * 2

    def test_in_mid_iteration_are_new_until_resolve_gives_others(self) -> None:
        with make_session("legacy") as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(2)
            counts = []
            for _ in range(6):
                session.step_phase()
                row = rows(session)["request-0"]
                counts.append((row["output_tokens"], row["num_new"]))

        assert counts == [(2, 1)] * 4 + [(3, 1)] * 2

    def test_taken_back_by_a_stop_string_are_gone(self) -> None:
        with text_session() as plain:
            plain.submit("abc", max_tokens=20, temperature=0, ignore_eos=True)
            plain.run()
            text = plain.outputs["request-0"].text
        with text_session() as session:
            # The longer one begins first, so the shorter one is sure only once the longer one cannot be any more.
            stops = [text[3:4], text[2:8] + "never"]
            session.submit("abc", max_tokens=20, temperature=0, ignore_eos=True, stop=stops)
            pane, counts = RequestRows(session), []
            while session.step_phase() is not None:
                row = pane.view()["rows"][0]
                assert len(row["tokens"]) == row["output_tokens"]
                counts.append(row["output_tokens"])
            output = session.outputs["request-0"]

        assert max(counts) > counts[-1] > 0

        assert row["token_ids"] == [*output.token_ids]

    def test_carry_their_log_probability(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=4, logprobs=2, ignore_eos=True)
            session.run()
            output = session.outputs["request-0"]
            row = rows(session)["request-0"]

        assert output.logprobs is not None
        expected = [tops[token_id] for token_id, tops in zip(output.token_ids, output.logprobs, strict=True)]
        assert row["logprobs"] == pytest.approx(expected, abs=1e-4)

    def test_without_a_finite_log_probability_say_none(self) -> None:
        """JSON has no infinity: the whole redraw would fail."""
        with make_session() as session:
            session.submit([1], max_tokens=4, logprobs=2, ignore_eos=True)
            session.run(3)
            request = session.engine.table.live_requests()[0]
            request.logprobs[0][request.output_ids[0]] = float("-inf")
            del request.logprobs[1:]

            assert rows(session)["request-0"]["logprobs"] == [None] * len(request.output_ids)

    def test_are_fewer_where_many_requests_are_shown(self) -> None:
        with make_session(max_requests=64, num_blocks=400, max_batch_tokens=256) as session:
            session.submit([[1]] * 64, max_tokens=30, ignore_eos=True)
            session.run(28)

            assert {len(row["tokens"]) for row in rows(session).values()} == {12}


class TestVisibleText:
    @pytest.mark.parametrize(
        ("text", "shown"),
        [(" a", "·a"), ("\n", "⏎"), ("\t\r", "⇥␍"), ("\x00", "\\x00"), ("\u200b", "\\u200b"), ("é漢", "é漢"), ("", "")],
    )
    def test_has_a_mark_for_what_no_screen_shows(self, text: str, shown: str) -> None:
        assert visible(text) == shown

    def test_keeps_the_space_that_a_tokenizer_drops_at_the_start(self) -> None:
        """SentencePiece-like decoders drop the first space of a text, so ` the` alone looked like `the`."""

        class Dropping:
            def decode(self, ids: list[int]) -> str:
                return "".join({1: " the", 2: "cat", 3: ""}[one] for one in ids).removeprefix(" ")

            def token(self, token_id: int) -> str | None:
                return {3: "<|end|>"}.get(token_id)

        texts = TokenTexts(Dropping())  # type: ignore[arg-type]
        assert texts.of_all([1, 2, 3]) == ["·the", "cat", "<|end|>"]


class TestTimes:
    def test_are_those_of_the_request_records(self) -> None:
        with make_session(device="cpu") as session:
            session.submit([[1], [2, 3]], max_tokens=5, ignore_eos=True)
            session.run()
            records = {one.request_id: one for one in session.requests()}
            seen = rows(session)

        for name, record in records.items():
            assert record.first_token_ns is not None
            assert record.finished_ns is not None
            tpot = (record.finished_ns - record.first_token_ns) / 4
            assert seen[name]["ttft_ms"] == pytest.approx((record.first_token_ns - record.arrival_ns) / 1e6, abs=1e-3)
            assert seen[name]["tpot_ms"] == pytest.approx(tpot / 1e6, abs=1e-3)
            assert not seen[name]["is_void"]

    def test_are_unknown_before_they_are(self) -> None:
        with make_session(device="cpu") as session:
            session.submit([1], max_tokens=1, request_id="one")
            session.run()
            session.submit([1], max_tokens=9)
            waiting, ended = rows(session)["request-1"], rows(session)["one"]

        assert (waiting["queue_ms"], waiting["ttft_ms"], waiting["tpot_ms"]) == (None, None, None)
        assert ended["ttft_ms"] is not None
        assert ended["tpot_ms"] is None  # a single token has no time between tokens

    def test_are_void_from_the_first_phase_a_person_steps(self) -> None:
        with make_session(device="cpu") as session:
            session.submit([1], max_tokens=9, ignore_eos=True, request_id="before")
            session.run()
            session.submit([1], max_tokens=9, ignore_eos=True, request_id="stepped")
            session.run(2)
            assert not rows(session)["stepped"]["is_void"]
            session.step_phase()
            voids = [{name: row["is_void"] for name, row in rows(session).items()}]
            session.run()
            voids.append({name: row["is_void"] for name, row in rows(session).items()})

        assert voids == [{"stepped": True, "before": False}] * 2

    def test_say_why_they_do_not_count(self) -> None:
        """Whatever the reason was, the panel called it a person's stepping."""
        with make_session() as session:
            session.submit([1], max_tokens=3, request_id="inline")
            assert rows(session)["inline"]["why_void"] == ""
            session.run()

            assert rows(session)["inline"]["why_void"] == VOID_WORDS["inline_device"]


class TestMany:
    def test_leave_out_the_oldest_ended_ones_and_say_how_many(self) -> None:
        with make_session() as session:
            session.submit([[1]] * 10, max_tokens=2, ignore_eos=True)
            session.run()
            session.submit([2], max_tokens=9, ignore_eos=True, request_id="live")
            session.run(2)
            view = RequestRows(session).view(4)

        assert [row["request_id"] for row in view["rows"]] == ["live", "request-9", "request-8", "request-7"]
        assert view["left_out"] == 7

    def test_leave_out_waiting_ones_where_even_those_are_too_many(self) -> None:
        with make_session(max_requests=2) as session:
            session.submit([[1]] * 9, max_tokens=9, ignore_eos=True)
            session.run(2)
            for limit in range(1, 10):
                view = RequestRows(session).view(limit)
                assert len(view["rows"]) == limit
                assert view["left_out"] == 9 - limit

    def test_rows_of_ended_ones_are_made_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with make_session() as session:
            session.submit([[1]] * 5, max_tokens=3, ignore_eos=True)
            session.run()
            pane = RequestRows(session)
            first = pane.view()
            monkeypatch.setattr(module, "end_text", lambda request: pytest.fail("made anew"))
            assert pane.view() == first

    def test_a_hue_stays_with_its_request_and_goes_round_by_order_of_submission(self) -> None:
        with make_session() as session:
            session.submit([[1]] * 14, max_tokens=4, ignore_eos=True)
            seen = []
            while not session.finished:
                seen.append({name: row["hue"] for name, row in rows(session).items()})
                session.step()

        assert all(one == seen[0] for one in seen)
        assert [seen[0][f"request-{index}"] for index in range(14)] == [*range(NUM_HUES), 0, 1]

    def test_one_handed_to_the_engine_itself_is_shown_too(self) -> None:
        with make_session() as session:
            session.engine.add_request([1, 2], request_id="foreign")
            assert rows(session)["foreign"]["state"] == "waiting"
            session.run(2)
            row = rows(session)["foreign"]
            assert row["state"] == "decode"
            assert 0 <= row["hue"] < NUM_HUES
