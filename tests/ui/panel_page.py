"""The panel's two widgets alone in a page: stubs stand for their models, so nothing of Jupyter runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ui.browser import load, opened_page
from workbench.widgets.front_end import HOME
from workbench.widgets.panel_bar import PanelBar
from workbench.widgets.panel_panes import PanelPanes

_ADDRESS = "http://panel.test"
_WIDGETS = {"bar": PanelBar, "panes": PanelPanes}
_TRAITS = {
    "bar": ("bar", "strip", "notice", "rows", "key_map", "phases", "pace"),
    "panes": (
        "tab",
        "tabs",
        "requests",
        "requests_news",
        "blocks",
        "graphs",
        "experts",
        "changes",
        "history",
        "stops",
        "events",
    ),
}


class PanelPage:
    """Both widgets in their page."""

    def __init__(self, page: Any, errors: list[str]) -> None:
        self.page = page
        self.errors = errors

    def set(self, trait: str, value: Any) -> None:
        """Set a trait of whichever widget has it, as Python would."""
        widget = next(name for name, traits in _TRAITS.items() if trait in traits)
        self.page.evaluate("([name, trait, value]) => window.set(name, trait, value)", [widget, trait, value])
        self.settle()

    def open_second_panes(self) -> None:
        """Another view of the same model, as a second cell or a new tab shows it."""
        self.page.evaluate("() => window.openSecond()")
        self.settle()

    def trait(self, trait: str) -> Any:
        """As the model of the panes has it."""
        return self.page.evaluate("(trait) => window.models.panes.state[trait]", trait)

    def settle(self) -> None:
        """Let what is due be painted."""
        self.page.evaluate("() => window.settled()")

    def commands(self) -> list[tuple[str, dict[str, Any]]]:
        """What was sent since the last call: name and arguments of each command."""
        sent = self.page.evaluate("() => Object.values(window.models).flatMap((model) => model.sent.splice(0))")
        assert all(one.keys() == {"kind", "name", "args"} and one["kind"] == "command" for one in sent), sent
        return [(one["name"], one["args"]) for one in sent]

    def heard(self) -> list[str]:
        """Keys that a notebook's own shortcuts would have heard since the last call."""
        keys: list[str] = self.page.evaluate("() => window.heard.splice(0)")
        return keys

    def button(self, name: str) -> Any:
        """The visible button of this exact name."""
        return self.page.get_by_role("button", name=name, exact=True)

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def open_tab(self, name: str) -> None:
        """Click a tab by the words on it."""
        self.page.get_by_role("tab", name=name).click()
        self.settle()

    def answer(self, command: str, text: str = "done", level: str = "info") -> None:
        """The notice of a command, told while the session stands where ``panel_worlds.bar_view`` says."""
        number = self.page.evaluate("() => (window.models.bar.state.notice.number || 0) + 1")
        notice = {"number": number, "level": level, "text": text, "detail": "", "command": command}
        self.set("notice", {**notice, "place": "1205 forward"})

    def point(self) -> None:
        """Move the pointer into the panel, over nothing that has a hint."""
        self.page.hover(".wb-headline")

    def leave(self) -> None:
        """Move the pointer out of the panel."""
        self.page.mouse.move(2, 2)


@contextmanager
def panel_page(
    browser: Any, traits: Mapping[str, Any] | None = None, *, joined: bool = True, **options: Any
) -> Iterator[PanelPage]:
    """The widgets with their traits' defaults.

    Args:
        browser: Of :func:`tests.ui.browser.opened_browser`.
        traits: Laid over the defaults, of either widget.
        joined: As anywidget loads them; False: their modules one by one, so that errors name their file.
        **options: Of :func:`tests.ui.browser.opened_page`.
    """
    given = dict(traits or {})
    with opened_page(browser, **options) as (page, errors):
        load(page, errors, _ADDRESS, lambda route: _serve(route, joined))
        states = {
            name: {trait: given.get(trait, _default(kind, trait)) for trait in _TRAITS[name]}
            for name, kind in _WIDGETS.items()
        }
        page.evaluate("(states) => window.start(states)", states)
        panel = PanelPage(page, errors)
        panel.settle()
        yield panel


def _default(kind: Any, trait: str) -> Any:
    default = kind.class_traits()[trait]
    return getattr(kind(), default.name)


def _serve(route: Any, joined: bool) -> None:
    name = route.request.url.removeprefix(f"{_ADDRESS}/")
    if not name:
        text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        for place, part in (("BAR", "bar"), ("PANES", "panes")):
            text = text.replace(f'"/{place}"', f'"/joined-{part}.js"' if joined else f'"/panel_{part}.js"')
        route.fulfill(body=text, content_type="text/html")
    elif name.startswith("joined-"):
        route.fulfill(body=_WIDGETS[name[7:-3]]._esm, content_type="text/javascript")
    else:
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        route.fulfill(body=(HOME / name).read_text(encoding="utf-8"), content_type=kind)
