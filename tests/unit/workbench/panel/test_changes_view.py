"""Phase cards: what one iteration read and wrote, as far as it has come."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest

from engine.phases import Order
from engine.tokenizer import Tokenizer
from tests.unit.workbench.worlds import make_session, spread_workload
from tracing.records import PHASE_COLOURS
from workbench.panel import changes_view as module
from workbench.panel.changes_view import PhaseCards, readable_now
from workbench.panel.messages import PhaseCard, ValueCell
from workbench.session import Session


def wrote(card: PhaseCard, name: str) -> list[ValueCell]:
    return [cell for cell in card["wrote"] if cell["name"] == name]


class TestCards:
    def test_come_phase_by_phase(self) -> None:
        with make_session() as session:
            session.record_changes = True
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            session.run(3)
            cards, seen = PhaseCards(session), []
            for _ in range(5):
                session.step_phase()
                pane = cards.view()
                seen.append([card["phase"] for card in pane["cards"]])
            title = pane["title"]

        names = [phase.value for phase in Order.OVERLAP.phases]
        assert seen == [names[: count + 1] for count in range(5)]
        assert title == "iteration 3 overlap"
        assert [card["colour"] for card in pane["cards"]] == [PHASE_COLOURS[name] for name in names]
        assert (pane["recording"], pane["iteration"], pane["hint"]) == (True, 3, "")

    def test_show_old_and_new_by_request(self) -> None:
        with make_session() as session:
            session.record_changes = True
            session.submit([[1, 2], [3]], max_tokens=9, ignore_eos=True)
            session.run(3)
            prepare, *_, resolve, _ = PhaseCards(session).view()["cards"]
            outputs = {name: output.token_ids for name, output in session.outputs.items()}

        kv_len = wrote(prepare, "kv_len")
        assert [(cell["request_id"], cell["hue"], cell["old"], cell["new"]) for cell in kv_len] == [
            ("request-0", 0, "3", "4"),
            ("request-1", 1, "2", "3"),
        ]
        newest = wrote(resolve, "newest token")
        assert [(cell["old"], cell["new"]) for cell in newest] == [
            (str(ids[-2]), str(ids[-1])) for ids in outputs.values()
        ]
        everybody = [cell for cell in prepare["read"] if cell["name"] == "free blocks"]
        assert [(cell["request_id"], cell["hue"], cell["old"]) for cell in everybody] == [("", -1, "")]

    def test_show_the_text_of_a_token_beside_its_id(self) -> None:
        """An id alone says nothing to a reader."""

        class Letters:
            def decode(self, ids: list[int]) -> str:
                return "".join(chr(97 + one % 26) for one in ids)

        with make_session() as session:
            session.record_changes = True
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            session.run(2)
            session.engine.loaded = replace(session.engine.loaded, tokenizer=cast(Tokenizer, Letters()))
            cards = {card["phase"]: card for card in PhaseCards(session).view()["cards"]}
            (token,) = session.outputs["request-0"].token_ids[-1:]

        assert [cell["new"] for cell in wrote(cards["resolve"], "newest token")] == [
            f"{token} {chr(97 + token % 26)!r}"
        ]
        assert [cell["new"] for cell in wrote(cards["resolve"], "num_output")] == ["1"]

    def test_flag_what_is_stale(self) -> None:
        with make_session() as session:
            session.record_changes = True
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            session.run(6)
            prepare = PhaseCards(session).view()["cards"][0]

        staged = [cell for cell in prepare["wrote"] if cell["name"].startswith("staged") and "kv_len" in cell["name"]]
        assert [cell["is_stale"] for cell in staged] == [True]

    def test_of_every_iteration_agree_with_the_history(self) -> None:
        with make_session(clock="iterations") as session:
            session.record_changes = True
            session.submit_workload(spread_workload())
            session.run()
            cards = PhaseCards(session)
            for past in session.history:
                pane = cards.view(past.index)
                assert pane["iteration"] == past.index
                for card, phase in zip(pane["cards"], past.phases, strict=True):
                    assert card["phase"] == phase.phase
                    assert len(card["read"]) + len(card["wrote"]) + card["left_out"] == len(phase.read) + len(
                        phase.wrote
                    )
                    assert card["enqueued"] == list(phase.enqueued)

    def test_leave_out_what_nobody_could_read_and_say_how_much(self) -> None:
        with make_session(max_requests=64, num_blocks=400, max_batch_tokens=256) as session:
            session.record_changes = True
            session.submit([[1]] * 64, max_tokens=9, ignore_eos=True)
            session.run(3)
            prepare = PhaseCards(session).view()["cards"][0]

        assert (len(prepare["read"]), len(prepare["wrote"])) == (module.MOST_VALUES, module.MOST_VALUES)
        assert prepare["left_out"] > 3 * 64 - module.MOST_VALUES

    def test_are_made_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with make_session() as session:
            session.record_changes = True
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(3)
            cards = PhaseCards(session)
            first = cards.view()
            monkeypatch.setattr(PhaseCards, "_card", lambda *_: pytest.fail("made anew"))
            assert cards.view() == first

    def test_of_a_reset_session_are_not_those_of_the_run_before(self) -> None:
        with make_session() as session:
            session.record_changes = True
            cards = PhaseCards(session)
            session.submit([1, 2], max_tokens=9, request_id="old")
            session.run(1)
            cards.view()
            session.reset()
            assert cards.view()["cards"] == []
            session.submit([1, 2], max_tokens=9, request_id="new")
            session.run(1)
            names = {cell["request_id"] for card in cards.view(0)["cards"] for cell in card["wrote"]}

        assert names == {"", "new"}


class TestHints:
    def hint(self, session: Session, chosen: int | None = None) -> str:
        return PhaseCards(session).view(chosen)["hint"]

    def test_say_how_to_begin(self) -> None:
        with make_session() as session:
            assert self.hint(session).startswith("Switch recording on")
            session.record_changes = True
            assert self.hint(session).startswith("Nothing is recorded yet: Phase (P)")

    def test_of_an_iteration_that_was_not_recorded(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(2)
            session.record_changes = True
            session.run(1)
            assert "Iteration 1 was not recorded" in self.hint(session, 1)
            assert self.hint(session, 2) == self.hint(session) == ""


class TestDeviceValues:
    def test_logits_only_while_a_forward_is_pending(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            assert "logits" not in readable_now(session)
            while session.step_phase() is not None:
                for name in readable_now(session):
                    session.read_device(name)
                assert ("logits" in readable_now(session)) == (session.engine.pending is not None)
        assert readable_now(session) == []
