"""The panel's figures: made when somebody looks at them, for plotly takes a second to begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets

from engine.errors import EngineError
from workbench.figures import FIGURES, FigureError
from workbench.own_thread import on_own_thread

if TYPE_CHECKING:
    from workbench.session import Session

_NARROWEST = 480
_NONE_YET = "No figure yet: choose one and press Draw. Iterations that were stepped by hand are left out of figures."


class FigureShelf:
    """A choice of figures, the one that was drawn last, and a place to save it in; ``box`` is what a page shows."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.template = "light"
        self._width: int | None = None
        self._figure: Any = None
        self._is_stale = False
        self.choice = ipywidgets.Dropdown(options=list(FIGURES), description="figure")
        self.draw_button = ipywidgets.Button(
            description="Draw", icon="refresh", tooltip="Draw what was recorded so far"
        )
        self.path = ipywidgets.Text(
            value="figure.svg", description="save as", placeholder="figure.svg, .png, .pdf, .html"
        )
        self.save_button = ipywidgets.Button(description="Save", icon="save", disabled=True)
        self.line = ipywidgets.Label(_NONE_YET)
        self._row = ipywidgets.HBox([self.choice, self.draw_button, self.path, self.save_button])
        self.box = ipywidgets.VBox([self._row, self.line])
        self.draw_button.on_click(on_own_thread(lambda button: self.draw()))
        self.save_button.on_click(on_own_thread(lambda button: self.save()))
        self.choice.observe(on_own_thread(lambda change: self.draw()), names="value")

    @property
    def is_drawn(self) -> bool:
        """Whether there is a figure."""
        return self._figure is not None

    def draw(self) -> None:
        """Draw the chosen figure of what was recorded so far; what goes wrong is said in the line below."""
        try:
            figure = self._session.figure(self.choice.value, template=self.template)
            widget = figure.widget()
        except (EngineError, FigureError, ImportError) as error:
            self._say(f"not drawn: {error}")
            return
        widget.update_layout(width=self._width)
        old, self.box.children = self.box.children[2:], [self._row, self.line, widget]
        close_all(old)
        self._figure, self._is_stale = figure, False
        self.save_button.disabled = False
        self._say("")

    def mark_stale(self) -> None:
        """A run has ended since: what is shown is drawn again by the next :meth:`refresh`."""
        self._is_stale = True

    def refresh(self) -> None:
        """Draw again what is shown, if a run has ended since."""
        if self.is_drawn and self._is_stale:
            self.draw()

    def show_in(self, template: str) -> None:
        """Draw in the page's colours, ``light`` or ``dark``."""
        if template != self.template:
            self.template = template
            if self.is_drawn:
                self.draw()

    def fit(self, width: int) -> None:
        """Draw as wide as the page is, in pixels: plotly takes 700 where its widget is not on the page yet."""
        self._width = max(_NARROWEST, width) if width else None
        for widget in self.box.children[2:]:
            widget.update_layout(width=self._width)

    def save(self) -> None:
        """Write the figure that is shown, with its footer."""
        try:
            self._say(f"saved: {self._figure.save(self.path.value).resolve()}")
        except (EngineError, FigureError, OSError) as error:
            self._say(f"not saved: {error}")

    def close(self) -> None:
        """Take it off the page, with all that is in it."""
        close_all([self.box])

    def _say(self, text: str) -> None:
        self.line.value = text


def close_all(widgets: Sequence[Any]) -> None:
    """Close widgets with what is in them, their layouts and their styles: ipywidgets keeps each until it is closed."""
    for widget in widgets:
        close_all(getattr(widget, "children", ()))
        parts = [getattr(widget, name, None) for name in ("layout", "style")]
        for one in (widget, *parts):
            if isinstance(one, ipywidgets.Widget):
                one.close()
