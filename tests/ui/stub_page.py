"""The timeline's module alone in a page: a stub stands for the widget's model, so nothing of Jupyter runs."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.ui.browser import load, opened_page
from workbench.widgets.front_end import HOME
from workbench.widgets.timeline import TimelineWidget
from workbench.widgets.timeline_stream import Outgoing

_ADDRESS = "http://timeline.test"
_TRAITS = ("selected_iteration", "follow", "cut_pauses", "max_spans", "hint", "look")


class StubPage:
    """The widget in its page. Moments are nanoseconds since the trace's origin, pauses included."""

    def __init__(self, page: Any, errors: list[str]) -> None:
        self.page = page
        self.errors = errors

    def deliver(self, messages: Sequence[Outgoing]) -> float:
        """Hand messages to the widget, as the kernel would; returns the browser's milliseconds for them."""
        times = [
            self.call("deliver", content, [base64.b64encode(buffer.tobytes()).decode() for buffer in buffers])
            for content, buffers in messages
        ]
        self.settle()
        return float(sum(times))

    def settle(self) -> None:
        """Let what is due be painted."""
        self.call("settled")

    def call(self, name: str, *arguments: Any) -> Any:
        """One of the page's functions."""
        return self.page.evaluate("([name, rest]) => window[name](...rest)", [name, list(arguments)])

    def trait(self, name: str) -> Any:
        """As the model has it."""
        return self.page.evaluate("(name) => window.model.state[name]", name)

    def set(self, name: str, value: Any) -> None:
        """Set a trait, as Python would."""
        self.page.evaluate("([name, value]) => window.model.set(name, value)", [name, value])
        self.settle()

    def sent(self) -> list[str]:
        """Kinds of the messages that the widget sent to the kernel."""
        kinds: list[str] = self.page.evaluate("() => window.model.sent.map((one) => one.kind)")
        return kinds

    def view(self) -> tuple[float, float]:
        """The stretch in view, as shown: without pauses."""
        begin, end = self.page.evaluate("() => [window.timeline.view.from, window.timeline.view.to]")
        return begin, end

    def show(self, begin: float, end: float) -> None:
        """Bring a stretch into view; ends following."""
        self.set("follow", False)
        self.page.evaluate("(ends) => { window.timeline.view.show(...ends); window.timeline.redraw(); }", [begin, end])
        self.settle()

    def place(self, lane: str, moment: float, *, part: float = 0.5, block: int = 0) -> tuple[float, float]:
        """Where on the page a moment of a lane (or of ``iterations``) lies; ``part`` of its height from the top."""
        x, y = self.call("place", lane, moment, part, block)
        return x, y

    def colour(self, lane: str, moment: float, *, part: float = 0.15, block: int = 0) -> str:
        """What is painted there, as #RRGGBB; near the top of the lane, where no words are."""
        colour: str = self.call("colour", *self.place(lane, moment, part=part, block=block))
        return colour

    def hover(self, lane: str, moment: float, *, part: float = 0.5, block: int = 0) -> str:
        """Move the pointer there; what the tooltip then says, empty if it is hidden."""
        self.page.mouse.move(*self.place(lane, moment, part=part, block=block))
        text: str = self.call("tip")
        return text

    def click(self, lane: str, moment: float) -> None:
        self.page.mouse.click(*self.place(lane, moment))
        self.settle()

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    def text(self, selector: str) -> str:
        """The words in an element."""
        words: str = self.page.inner_text(selector)
        return words


@contextmanager
def timeline_page(
    browser: Any, *, joined: bool = True, traits: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[StubPage]:
    """The widget with its traits' defaults.

    Args:
        browser: Of :func:`tests.ui.browser.opened_browser`.
        joined: As anywidget loads it; False: its modules one by one, so that errors name their file.
        traits: Laid over the defaults.
        **options: Of :func:`tests.ui.browser.opened_page`.
    """
    with opened_page(browser, **options) as (page, errors):
        load(page, errors, _ADDRESS, lambda route: _serve(route, joined))
        defaults = {name: TimelineWidget.class_traits()[name].default() for name in _TRAITS}
        stub = StubPage(page, errors)
        stub.call("start", {**defaults, **(traits or {})})
        stub.settle()
        yield stub


def _serve(route: Any, joined: bool) -> None:
    name = route.request.url.removeprefix(f"{_ADDRESS}/")
    if not name:
        text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
        route.fulfill(body=text.replace("MODULE", "joined.js" if joined else "timeline.js"), content_type="text/html")
    elif name == "joined.js":
        route.fulfill(body=TimelineWidget._esm, content_type="text/javascript")
    else:
        kind = "text/css" if name.endswith(".css") else "text/javascript"
        route.fulfill(body=(HOME / name).read_text(encoding="utf-8"), content_type=kind)
