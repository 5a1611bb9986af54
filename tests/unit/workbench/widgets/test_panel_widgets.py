"""The panel's two widgets without a browser: what they hear, and what their front-ends are made of."""

from __future__ import annotations

import logging
import random
import re
from typing import Any

import pytest

pytest.importorskip("anywidget")

import traitlets

from workbench.panel.messages import COMMANDS, KEYS, TABS
from workbench.widgets.front_end import HOME, joined_module
from workbench.widgets.panel_bar import BAR_MODULES, PanelBar
from workbench.widgets.panel_panes import PANES, PANES_MODULES, PanelPanes

TOP_LEVEL = re.compile(r"^(?:export )?(?:const|let|class|function\*?) (\w+)", re.MULTILINE)
WIDGETS = {PanelBar: BAR_MODULES, PanelPanes: PANES_MODULES}


@pytest.fixture(params=[PanelBar, PanelPanes])
def widget(request: pytest.FixtureRequest) -> Any:
    return request.param()


class TestCommands:
    def test_are_told_to_everybody_with_all_their_arguments(self, widget: Any) -> None:
        heard: list[tuple[str, dict[str, Any]]] = []
        for _ in range(2):
            widget.on_command(lambda name, args: heard.append((name, args)))
        widget._handle_custom_msg({"kind": "command", "name": "break_on", "args": {"phase": "resolve"}}, [])

        assert heard == 2 * [("break_on", {**dict.fromkeys(COMMANDS["break_on"]), "phase": "resolve"})]

    @pytest.mark.parametrize("name", COMMANDS)
    def test_of_every_name_are_heard(self, widget: Any, name: str) -> None:
        heard = []
        widget.on_command(lambda name, args: heard.append((name, args)))
        widget._handle_custom_msg({"kind": "command", "name": name}, [])

        assert heard == [(name, dict.fromkeys(COMMANDS[name]))]

    @pytest.mark.parametrize(
        "content",
        [
            None,
            "step",
            {},
            {"kind": "ready"},
            {"kind": "command", "name": "launch_missiles", "args": {}},
            {"kind": "command", "name": ["step"], "args": {}},
            {"kind": "command", "name": "run", "args": [5]},
            {"kind": "command", "name": "run", "args": {"n": 5, "m": 6}},
        ],
    )
    def test_that_are_none_are_logged_and_ignored(
        self, widget: Any, content: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        heard = []
        widget.on_command(lambda name, args: heard.append(name))
        with caplog.at_level(logging.WARNING):
            widget._handle_custom_msg(content, [])

        assert heard == []
        (record,) = caplog.records
        assert "not a command" in record.getMessage()

    def test_of_one_widget_are_not_heard_by_another(self) -> None:
        one, other = PanelBar(), PanelBar()
        heard = []
        other.on_command(lambda name, args: heard.append(name))
        one._handle_custom_msg({"kind": "command", "name": "step", "args": {}}, [])

        assert heard == []


class TestHandedOn:
    """In a run the timeline's message takes what is new to the bar."""

    def sent_by(self, bar: PanelBar, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        monkeypatch.setattr(bar, "_send", lambda message, buffers=None: sent.append(message["state"]))
        return sent

    def test_traits_are_not_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bar = PanelBar()
        sent = self.sent_by(bar, monkeypatch)
        with bar.handed_on() as handed:
            bar.bar, bar.pace = {"state": "running"}, 2.0

        assert handed == {"bar": {"state": "running"}, "pace": 2.0}
        assert sent == []
        assert bar.pace == 2.0

    @pytest.mark.parametrize("seed", range(20))
    def test_fields_put_into_what_a_page_has_are_the_whole_whichever_messages_it_missed(
        self, seed: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A page that hears all, and one that hears of what is handed on only now and then."""
        chance, bar = random.Random(seed), PanelBar()
        sent = self.sent_by(bar, monkeypatch)
        faithful: dict[str, Any] = {}
        other: dict[str, Any] = {}
        for _ in range(60):
            view = {name: chance.randint(0, 1) for name in ("state", "clock", "iterations")}
            sent.clear()
            if chance.random() < 0.8:
                with bar.handed_on() as handed:
                    bar.strip = view
                faithful |= handed.get("strip", {})
                if handed and chance.random() < 0.5:
                    other |= handed["strip"]
                    assert other == view
            else:
                with bar.hold_sync():
                    bar.strip = view
                for message in sent:
                    faithful, other = dict(message["strip"]), dict(message["strip"])
                    assert other == view
            assert faithful == view

    def test_traits_are_sent_with_the_next_message_once_though_they_stayed_as_they_are(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A page that missed them would have kept what it had."""
        bar = PanelBar()
        sent = self.sent_by(bar, monkeypatch)
        with bar.handed_on():
            bar.bar = {"state": "running"}
        for _ in range(2):
            with bar.hold_sync():
                bar.bar = {"state": "running"}

        assert sent == [{"bar": {"state": "running"}}]

    def test_is_over_when_making_them_failed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bar = PanelBar()
        sent = self.sent_by(bar, monkeypatch)
        with pytest.raises(ZeroDivisionError), bar.handed_on():
            bar.pace = 1 / 0
        bar.pace = 2.0

        assert sent == [{"pace": 2.0}]


class TestTraits:
    def test_of_the_bar_begin_empty_with_keys_that_are_commands(self) -> None:
        bar = PanelBar()

        assert (bar.bar, bar.strip, bar.notice, bar.pace) == ({}, {}, {}, 0.0)
        assert bar.key_map == KEYS
        assert set(KEYS.values()) <= COMMANDS.keys()

    def test_hide_none_of_the_widgets_own(self) -> None:
        """ipywidgets keeps the list of traits to sync in ``keys``, traitlets a logger in ``log``."""
        for kind in WIDGETS:
            widget = kind()
            assert {"bar", "pace"} <= set(widget.keys) or {"tab", "requests"} <= set(widget.keys)
            widget.log.debug("still a logger")

    def test_of_the_panes_name_every_tab_but_the_figures(self) -> None:
        panes = PanelPanes()

        assert panes.tabs == list(TABS)
        assert set(PANES) == set(TABS) - {"figures"}
        assert all(getattr(panes, trait) == {} for trait in PANES.values())

    def test_take_a_view_by_the_name_of_its_tab(self) -> None:
        panes = PanelPanes()
        view = {"rows": [], "left_out": 0, "hint": "nothing"}
        panes.show("log", view)

        assert panes.events == view
        with pytest.raises(ValueError, match=r"'figures'.*requests"):
            panes.show("figures", {})

    def test_refuse_a_tab_that_is_not_there(self) -> None:
        panes = PanelPanes()
        with pytest.raises(traitlets.TraitError, match="'nowhere'"):
            panes.tab = "nowhere"

        assert panes.tab == "requests"


@pytest.mark.parametrize(("kind", "modules"), WIDGETS.items(), ids=lambda one: getattr(one, "__name__", ""))
class TestJoinedModule:
    def test_imports_nothing_and_exports_one_thing(self, kind: Any, modules: tuple[str, ...]) -> None:
        text = kind._esm

        assert not re.search(r"^import ", text, re.MULTILINE)
        assert re.findall(r"^export \w+", text, re.MULTILINE) == ["export default"]

    def test_has_no_name_twice_at_the_top(self, kind: Any, modules: tuple[str, ...]) -> None:
        names = TOP_LEVEL.findall(joined_module(*modules))

        assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)

    def test_lists_a_module_behind_those_it_imports(self, kind: Any, modules: tuple[str, ...]) -> None:
        for place, name in enumerate(modules):
            wanted = re.findall(r'from "\./([^"]+)"', (HOME / name).read_text(encoding="utf-8"))
            assert set(wanted) <= set(modules[:place]), name

    def test_asks_nothing_of_the_network(self, kind: Any, modules: tuple[str, ...]) -> None:
        text = (kind._esm + kind._css).replace("http://www.w3.org/2000/svg", "")

        assert not re.search(r"https?://|@import|fetch\(|XMLHttpRequest|new WebSocket", text)

    def test_brings_words_into_the_page_as_text_alone(self, kind: Any, modules: tuple[str, ...]) -> None:
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", kind._esm)


def test_every_module_that_lies_there_belongs_to_a_widget() -> None:
    assert {path.name for path in HOME.glob("panel_*.js")} == {
        name for name in (*BAR_MODULES, *PANES_MODULES) if name.startswith("panel_")
    }
