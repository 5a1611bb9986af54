"""The requests pane in pieces: whoever has the newest picture and the newest news has the truth."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("anywidget")

from tests.unit.workbench.worlds import make_session
from workbench.panel.messages import RequestRow, RequestsView
from workbench.panel.requests_view import RequestRows
from workbench.widgets.panel_panes import PanelPanes
from workbench.widgets.row_news import RowNews, with_news


def view_of(rows: dict[str, int], left_out: int = 0) -> RequestsView:
    """Rows by name, each with one value that may change."""
    made: list[Any] = [
        {"request_id": name, "kv_len": value, "blocks": [*range(3 * value)]} for name, value in rows.items()
    ]
    return RequestsView(rows=made, left_out=left_out, hint="" if rows else "no request yet")


class Wire:
    """Panes whose messages are kept; ``state`` is what a page that heard all of them has."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.panes = PanelPanes()
        self.sent: list[dict[str, Any]] = []
        monkeypatch.setattr(self.panes, "_send", lambda message, buffers=None: self.sent.append(message["state"]))

    @property
    def state(self) -> dict[str, Any]:
        return {name: value for message in self.sent for name, value in message.items()}

    def show(self, view: RequestsView) -> dict[str, Any]:
        """What is sent for a view."""
        count = len(self.sent)
        self.panes.show("requests", view)
        assert len(self.sent) <= count + 1
        return self.sent[count] if self.sent[count:] else {}


class TestNews:
    def test_have_the_rows_that_changed_and_no_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wire = Wire(monkeypatch)
        rows = {f"r{number}": 0 for number in range(30)}
        assert list(wire.show(view_of(rows))) == ["requests"]
        sent = wire.show(view_of({**rows, "r3": 1, "r7": 1}))

        assert list(sent) == ["requests_news"]
        assert [row["request_id"] for row in sent["requests_news"]["rows"]] == ["r3", "r7"]
        assert sent["requests_news"]["order"] is None

    def test_have_of_such_a_row_what_changed_and_of_its_blocks_those_that_were_added(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of a long request they were half of what a redraw sent."""
        wire = Wire(monkeypatch)
        made: list[Any] = [
            {"request_id": name, "state": "decode", "kv_len": 16, "blocks": [4]} for name in ("r1", "r2", "r3", "r4")
        ]

        def view(**fields: Any) -> RequestsView:
            return RequestsView(rows=[made[0], {**made[1], **fields}, *made[2:]], left_out=0, hint="")

        wire.show(view())
        more, others = view(kv_len=48, blocks=[4, 7, 9]), view(kv_len=48, blocks=[5])
        assert wire.show(more)["requests_news"]["rows"] == [{"request_id": "r2", "kv_len": 48, "more_blocks": [7, 9]}]
        assert wire.panes.shown("requests") == more
        assert wire.show(others)["requests_news"]["rows"] == [{"request_id": "r2", "kv_len": 48, "blocks": [5]}]
        assert wire.panes.shown("requests") == others
        assert "requests" in wire.show(view(blocks=[4, *range(10, 30)]))  # a new picture is shorter

    def test_tell_order_new_rows_and_removals(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wire = Wire(monkeypatch)
        rows = {f"r{number}": 0 for number in range(9)}
        wire.show(view_of(rows))
        later = {"r8": 0, **{name: 0 for name in rows if name not in ("r2", "r8")}, "new": 5}
        news = wire.show(view_of(later, left_out=3))["requests_news"]

        assert news["order"] == [*later]
        assert [row["request_id"] for row in news["rows"]] == ["new"]
        assert wire.panes.shown("requests") == view_of(later, left_out=3)

    def test_are_taken_back_where_all_is_as_it_was(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wire = Wire(monkeypatch)
        rows = {f"r{number}": 0 for number in range(9)}
        wire.show(view_of(rows))
        wire.show(view_of({**rows, "r1": 1}))
        assert wire.show(view_of(rows)) == {"requests_news": {}}
        assert wire.show(view_of(rows)) == {}
        wire.panes.rows_in_passing(view_of({**rows, "r1": 1}))
        assert wire.show(view_of(rows))["requests_news"]["rows"] == []  # of those that were carried a page may know
        assert wire.show(view_of(rows)) == {}

    def test_give_way_to_a_new_picture_once_most_rows_differ(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wire = Wire(monkeypatch)
        rows = {f"r{number}": 0 for number in range(9)}
        wire.show(view_of(rows))
        wire.show(view_of({**rows, "r1": 1}))
        sent = wire.show(view_of(dict.fromkeys(rows, 2)))

        assert sorted(sent) == ["requests", "requests_news"]  # in one message: no page pairs it with older news
        assert sent["requests_news"] == {}

    @pytest.mark.parametrize("seed", range(20))
    def test_with_their_picture_are_the_truth_for_a_page_that_missed_any_message(
        self, seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chance = random.Random(seed)
        wire = Wire(monkeypatch)
        rows: dict[str, int] = {}
        for step in range(120):
            names = [f"r{number}" for number in range(step // 4 + 1)]
            chance.shuffle(names)
            kept = names[: chance.randint(0, len(names))] if chance.random() < 0.2 else [*rows] or names
            rows = {name: rows.get(name, 0) for name in kept}
            for name in chance.sample(kept, min(len(kept), chance.randint(0, 2))):
                rows[name] += 1
            view = view_of(rows, chance.randint(0, 1))
            wire.show(view)
            state = wire.panes.get_state()  # a page that opens now is sent this
            assert with_news(state["requests"], state["requests_news"] or None) == view
            assert {key: state[key] for key in wire.state} == wire.state

    @pytest.mark.parametrize("seed", range(20))
    def test_that_were_carried_past_their_widget_are_in_no_ones_way(self, seed: int) -> None:
        """As a page has them that hears both ways, and one that was opened behind the last picture or news."""
        chance, panes = random.Random(seed), PanelPanes()
        rows = {f"r{number}": 0 for number in range(9)}
        panes.show("requests", view_of(rows))
        carried: Any = {}
        for _ in range(80):
            for name in chance.sample([*rows], chance.randint(0, 6)):
                rows[name] = chance.randint(0, 1)
            view = view_of(rows, chance.randint(0, 1))
            if chance.random() < 0.6:
                carried = panes.rows_in_passing(view)
                assert with_news(panes.requests, panes.requests_news or None, carried) == view
            else:
                panes.show("requests", view)
                assert with_news(panes.requests, carried, panes.requests_news or None) == view
                assert with_news(panes.requests, panes.requests_news or None) == view
            assert panes.shown("requests") == view

    def test_without_a_picture_cannot_be_carried(self) -> None:
        panes, rows = PanelPanes(), view_of({"r1": 0})
        assert panes.rows_in_passing(rows) is None
        panes.show("requests", rows)
        assert panes.rows_in_passing(rows) is not None
        assert panes.rows_in_passing({**rows, "rows": 2 * rows["rows"]}) is None

    def test_of_another_picture_mean_nothing(self) -> None:
        news = RowNews()
        rows = {f"r{number}": 0 for number in range(9)}
        news.of(view_of(rows))
        _, old = news.of(view_of({**rows, "r1": 1}))
        picture, _ = news.of(view_of(dict.fromkeys(rows, 2)))

        assert with_news(picture, old) == view_of(dict.fromkeys(rows, 2))


class TestOfASession:
    def test_waiting_and_ended_rows_are_not_sent_again_in_a_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        wire = Wire(monkeypatch)
        with make_session(max_requests=2, clock="iterations") as session:
            session.submit([[1], [2]], max_tokens=2, ignore_eos=True)
            session.run()
            session.submit([[1]] * 10, max_tokens=40, ignore_eos=True)
            session.submit([3], max_tokens=3, arrival=10_000)
            rows = RequestRows(session)
            session.run(5)
            wire.show(rows.view())
            for _ in range(4):
                session.step()
                view = rows.view()
                sent = wire.show(view)["requests_news"]
                assert [row["request_id"] for row in sent["rows"]] == ["request-2", "request-3"]
                assert wire.panes.shown("requests") == view == RequestRows(session).view()

    def test_rows_that_did_not_change_are_made_once(self) -> None:
        with make_session(max_requests=2, clock="iterations") as session:
            session.submit([[1], [2]], max_tokens=2, ignore_eos=True)
            session.run()
            session.submit([[1]] * 4, max_tokens=40, ignore_eos=True)
            session.submit([3], max_tokens=3, arrival=10_000)
            rows = RequestRows(session)
            session.run(4)
            before = by_id(rows.view())
            session.step()
            behind = by_id(rows.view())

        assert [name for name in before if before[name] is not behind[name]] == ["request-2", "request-3"]


def by_id(view: RequestsView) -> dict[str, RequestRow]:
    return {row["request_id"]: row for row in view["rows"]}
