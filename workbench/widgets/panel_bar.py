"""The panel's control bar with the strip of the current order under it.

bar = PanelBar()
bar.on_command(lambda name, args: ...)  # each click and key
bar.bar = {...}                         # a BarView: what is shown, which buttons mean something

Keys work while the pointer or the focus is in the panel: in the nearest element around the bar that has the class
``wb-panel-whole`` (``box.add_class("wb-panel-whole")``), or else in the bar alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import traitlets

from engine.phases import Phase
from workbench.panel.messages import KEYS
from workbench.widgets.front_end import joined_module, style_sheet
from workbench.widgets.panel_command import CommandWidget

SHARED_MODULES = (
    "timeline_table.js",
    "timeline_look.js",
    "timeline_carried.js",
    "panel_make.js",
    "panel_hues.js",
    "panel_part.js",
    "panel_popover.js",
    "panel_form.js",
)
"""What both widgets need, in the order in which they need each other."""
BAR_MODULES = (
    *SHARED_MODULES,
    "panel_keys.js",
    "panel_buttons.js",
    "panel_mode.js",
    "panel_notice.js",
    "panel_strip.js",
    "panel_bar.js",
)
IN_FIELDS = ("bar", "strip")
"""Traits of which only the fields that have changed are handed on: most say the same for a whole run, and packing takes
the kernel time by the length."""
STYLE = "panel.css"
"""One sheet for both widgets."""


class PanelBar(CommandWidget):
    """Buttons, state, notices and the order strip. All traits are set from Python; the browser sends commands alone."""

    _esm = joined_module(*BAR_MODULES)
    _css = style_sheet(STYLE)

    bar = traitlets.Dict().tag(sync=True)
    """A :class:`~workbench.panel.messages.BarView`; empty: nothing is known yet, and no button works."""
    strip = traitlets.Dict().tag(sync=True)
    """A :class:`~workbench.panel.messages.StripView`."""
    notice = traitlets.Dict().tag(sync=True)
    """A :class:`~workbench.panel.messages.Notice`; empty: none."""
    rows = traitlets.Dict().tag(sync=True)
    """A :class:`~workbench.panel.messages.RequestsNews` on its way to the panes: in a run it comes with the bar and the
    timeline, since each message takes the kernel as long as making a view. Empty: none."""
    key_map = traitlets.Dict(KEYS).tag(sync=True)
    """Key to command. (``keys`` is taken: there ipywidgets lists the traits to sync.)"""
    phases = traitlets.List(traitlets.Unicode(), [phase.value for phase in Phase]).tag(sync=True)
    """Those that Until… offers."""
    pace = traitlets.Float(0.0, min=0.0).tag(sync=True)
    """Iterations a second; 0: as fast as they go."""

    def __init__(self, **traits: Any) -> None:
        self._handed: dict[str, Any] | None = None
        """What is set now and not sent; None: it is sent."""
        self._owed: set[str] = set()
        """Traits handed on since this widget sent them last."""
        self._sent: dict[str, dict[str, Any]] = {name: {} for name in IN_FIELDS}
        """Those of :data:`IN_FIELDS` as this widget sent them last."""
        self._changed: dict[str, dict[str, None]] = {name: {} for name in IN_FIELDS}
        """Their fields that were handed on since then, in the order they first were."""
        super().__init__(**traits)

    @contextmanager
    def handed_on(self) -> Iterator[dict[str, Any]]:
        """Put what is set meanwhile into the dict, for another widget to take to the page in a message of its own.

        A page that misses that message has the truth with the next one of this widget's own, which says it all again.
        Of :data:`IN_FIELDS` there are only the fields that were ever handed on since that one: put into what the page
        has they make the whole, whichever of the messages before it has heard.
        """
        handed: dict[str, Any] = {}
        self._handed = handed
        try:
            with self.hold_sync():
                yield handed
        finally:
            self._handed = None
            self._owed |= handed.keys()

    def send_state(self, key: str | Iterable[str] | None = None) -> None:
        """As every widget; not while it is handed on, and behind that with what is owed."""
        if self._handed is not None:
            self._handed |= {name: self._fields(name, value) for name, value in self.get_state(key=key).items()}
            return
        names = None if key is None else {*((key,) if isinstance(key, str) else key), *self._owed}
        self._owed = set()
        for name in IN_FIELDS:
            if names is None or name in names:
                self._sent[name], self._changed[name] = getattr(self, name), {}
        super().send_state(names)

    def _fields(self, name: str, value: Any) -> Any:
        """What is handed on of a trait."""
        if name not in IN_FIELDS:
            return value
        sent, changed = self._sent[name], self._changed[name]
        changed |= {field: None for field, told in value.items() if field not in sent or sent[field] != told}
        return {field: value[field] for field in changed}
