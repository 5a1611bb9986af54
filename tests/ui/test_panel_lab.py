"""The panel's keys in JupyterLab, whose own shortcuts are letters too: D, D deletes the cell, M makes it text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ui.browser import missing
from tests.ui.lab import Lab, opened_lab

NEEDED = ("anywidget", "jupyterlab", "nbformat")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing(*NEEDED) is not None, reason=missing(*NEEDED) or "")]

CELLS = [
    f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from ipywidgets import VBox
from tests.ui.panel_worlds import bar_view, requests_view
from workbench.widgets.panel_bar import PanelBar
from workbench.widgets.panel_panes import PanelPanes

heard = []
bar, panes = PanelBar(bar=bar_view()), PanelPanes(requests=requests_view())
for widget in (bar, panes):
    widget.on_command(lambda name, args: heard.append((name, args)))
whole = VBox([bar, panes])
whole.add_class("wb-panel-whole")
whole
""".strip(),
    "counted = globals().get('counted', 0) + 1",
]


def cells(lab: Lab) -> list[str]:
    kinds: list[str] = lab.page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.content.widgets.map((cell) => cell.model.type)"
    )
    return kinds


def test_keys_drive_the_panel_and_leave_the_notebook_alone(browser: Any, tmp_path: Path) -> None:
    with opened_lab(browser, tmp_path, CELLS) as lab:
        lab.run_all()
        lab.page.wait_for_selector(".wb-panel-bar .wb-headline:text('overlap')")
        before = cells(lab)
        lab.page.keyboard.press("Escape")  # the notebook has the focus and takes letters as commands
        lab.page.hover(".wb-headline")
        for key in ("p", "s", "m", "r", " "):
            lab.page.keyboard.press(key)
        lab.wait_for("[name for name, _ in heard]", ["step_phase", "step", "set_mode", "run", "pause"])
        lab.page.locator(".wb-panel [data-command=step]").focus()
        for key in ("d", "d", "m", "b", "x"):
            lab.page.keyboard.press(key)
        lab.page.locator("[data-command=submit]").click()
        lab.page.keyboard.type("ddm b")
        lab.page.keyboard.press("Control+Enter")
        lab.wait_for("heard[-1][0], heard[-1][1]['prompt']", ("submit", "ddm b"))
        lab.page.get_by_role("tab", name="Breakpoints").click()
        lab.wait_for("panes.tab", "stops")

        assert cells(lab) == before
        assert lab.ask("counted") == 1
        assert lab.errors == []
