"""The panel's tabs and panes: one trait a pane, sent when there is something new in it and it can be seen.

panes = PanelPanes()
panes.on_command(lambda name, args: ...)
panes.observe(..., names="tab")         # the pane that a person looks at
panes.show("requests", {...})           # a RequestsView
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import traitlets

from workbench.panel.messages import TABS, RequestsNews, RequestsPicture, RequestsView
from workbench.widgets.front_end import joined_module, style_sheet
from workbench.widgets.panel_bar import SHARED_MODULES, STYLE
from workbench.widgets.panel_command import CommandWidget
from workbench.widgets.row_news import NO_NEWS, RowNews, with_news

PANES_MODULES = (
    *SHARED_MODULES,
    "panel_tabs.js",
    "panel_tokens.js",
    "panel_row_news.js",
    "panel_requests.js",
    "panel_block_map.js",
    "panel_states.js",
    "panel_blocks.js",
    "panel_graphs.js",
    "panel_experts.js",
    "panel_changes.js",
    "panel_history.js",
    "panel_stops.js",
    "panel_log.js",
    "panel_panes.js",
)
PANES = {tab: "events" if tab == "log" else tab for tab in TABS if tab != "figures"}
"""Tab to the trait of its pane."""


class PanelPanes(CommandWidget):
    """A tab bar and the pane of the chosen tab. A pane's empty dict: it has not been sent yet.

    The tab ``figures`` has no pane: what it shows is no part of this widget and stands below it.
    """

    _esm = joined_module(*PANES_MODULES)
    _css = style_sheet(STYLE)

    tab = traitlets.Unicode(TABS[0]).tag(sync=True)
    """By a click or the arrow keys, or from Python; one of ``tabs``."""
    tabs = traitlets.List(traitlets.Unicode(), list(TABS)).tag(sync=True)
    """Those that can be chosen, left to right."""

    requests = traitlets.Dict().tag(sync=True)
    """A :class:`~workbench.panel.messages.RequestsPicture`."""
    requests_news = traitlets.Dict().tag(sync=True)
    """The :class:`~workbench.panel.messages.RequestsNews` to that picture; empty: none."""
    blocks = traitlets.Dict().tag(sync=True)
    """A :class:`~workbench.panel.messages.BlocksPane`."""
    graphs = traitlets.Dict().tag(sync=True)
    """A :class:`~workbench.panel.messages.GraphsPane`."""
    experts = traitlets.Dict().tag(sync=True)
    """A :class:`~workbench.panel.messages.ExpertsPane`."""
    changes = traitlets.Dict().tag(sync=True)
    """A :class:`~workbench.panel.messages.ChangesPane`."""
    history = traitlets.Dict().tag(sync=True)
    """A :class:`~workbench.panel.messages.HistoryPane`."""
    stops = traitlets.Dict().tag(sync=True)
    """A :class:`~workbench.panel.messages.StopsPane`."""
    events = traitlets.Dict().tag(sync=True)
    """A :class:`~workbench.panel.messages.LogPane`, of the tab ``log``. (``log`` is taken: traitlets' logger.)"""

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self._row_news = RowNews()
        self._in_passing: RequestsNews | None = None
        """Those that somebody else has carried last."""

    def show(self, tab: str, view: Mapping[str, Any]) -> None:
        """Put a view into the pane of a tab; of the requests only those rows are sent that are not there yet.

        Raises:
            ValueError: The tab has no pane.
        """
        if tab not in PANES:
            raise ValueError(f"no pane of that name: {tab!r}; there are {', '.join(PANES)}")
        if tab == "requests":
            picture, news = self._row_news.of(cast(RequestsView, view))
            with self.hold_sync():  # a picture goes with its news in one message
                self.requests, self.requests_news = dict(picture), NO_NEWS if news is None else dict(news)
        else:
            setattr(self, PANES[tab], dict(view))

    def rows_in_passing(self, view: Mapping[str, Any]) -> dict[str, Any] | None:
        """News of the requests for another widget to carry to the page, so that a redraw is one message.

        They are not kept: a page that comes later sees what :meth:`show` has sent last.

        Returns:
            A :class:`~workbench.panel.messages.RequestsNews`; None: there is no picture to them, so show the view.
        """
        self._in_passing = self._row_news.to_carry(cast(RequestsView, view))
        return None if self._in_passing is None else dict(self._in_passing)

    def shown(self, tab: str) -> Mapping[str, Any]:
        """What the pane of a tab shows in the browser."""
        if tab == "requests" and self.requests:
            sent = cast(RequestsNews, self.requests_news) if self.requests_news else None
            return with_news(cast(RequestsPicture, self.requests), sent, self._in_passing)
        view: Mapping[str, Any] = getattr(self, PANES[tab])
        return view

    @traitlets.validate("tab")
    def _known(self, proposal: traitlets.Bunch) -> str:
        if proposal.value not in self.tabs:
            raise traitlets.TraitError(f"tab must be one of {', '.join(self.tabs)}, not {proposal.value!r}")
        return str(proposal.value)
