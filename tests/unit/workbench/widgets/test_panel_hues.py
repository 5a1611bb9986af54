"""The hues of requests: twelve that stand out from the page, and from each other for eyes of every kind."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from workbench.panel.hues import NUM_HUES
from workbench.widgets.front_end import HOME

PAGES = {"light": ("#FFFFFF",), "dark": ("#111111", "#14181F", "#1E1E1E")}
"""Of JupyterLab, of a plain page, and of VS Code."""
SIGHTS = {
    "normal": np.eye(3),
    "protan": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "deutan": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "tritan": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
"""Linear RGB as those without one kind of cone see it: Machado, Oliveira and Fernandes, 2009, severity 1."""
LMS = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
OKLAB = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])


def hues(theme: str) -> list[str]:
    text = (HOME / "panel_hues.js").read_text(encoding="utf-8")
    found = re.search(rf"^  {theme}: \[(.*)\],$", text, re.MULTILINE)
    assert found is not None
    return re.findall(r'"(#[0-9A-F]{6})"', found[1])


def drafts(sheet: str) -> dict[str, tuple[str, str]]:
    """Of accepted drafts and of those turned down, by theme."""
    text = (HOME / sheet).read_text(encoding="utf-8")
    found = re.findall(r"--wb-draft: (#[0-9a-f]{6}); --wb-turned: (#[0-9a-f]{6});", text)
    return dict(zip(("light", "dark"), found, strict=True))


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) + 0.05 for colour in (one, other))
    return high / low


def seen(colour: str, sight: str) -> np.ndarray:
    """As a place in OKLab, where distances are about as large as they look."""
    return OKLAB @ np.cbrt(LMS @ np.clip(SIGHTS[sight] @ linear(colour), 0, 1))


@pytest.mark.parametrize("theme", PAGES)
class TestHues:
    def test_are_as_many_as_python_gives_away(self, theme: str) -> None:
        assert len(set(hues(theme))) == NUM_HUES

    def test_stand_out_from_the_page(self, theme: str) -> None:
        assert min(contrast(hue, page) for hue in hues(theme) for page in PAGES[theme]) >= 2.8

    def test_carry_letters_in_black_or_white(self, theme: str) -> None:
        assert min(max(contrast(hue, ink) for ink in ("#000000", "#FFFFFF")) for hue in hues(theme)) >= 4.5

    @pytest.mark.parametrize("sight", SIGHTS)
    def test_stand_apart_from_each_other(self, theme: str, sight: str) -> None:
        pairs = itertools.combinations(hues(theme), 2)

        assert min(np.linalg.norm(seen(one, sight) - seen(other, sight)) for one, other in pairs) >= 0.08


@pytest.mark.parametrize("theme", PAGES)
class TestDrafts:
    def test_have_their_hues_on_the_timeline_and_in_the_text_of_requests(self, theme: str) -> None:
        assert drafts("timeline.css")[theme] == drafts("panel.css")[theme]

    def test_accepted_or_turned_down_stand_out_from_the_page(self, theme: str) -> None:
        assert min(contrast(hue, page) for hue in drafts("timeline.css")[theme] for page in PAGES[theme]) >= 4.5

    @pytest.mark.parametrize("sight", SIGHTS)
    def test_accepted_and_turned_down_are_told_apart(self, theme: str, sight: str) -> None:
        accepted, turned = drafts("timeline.css")[theme]
        assert np.linalg.norm(seen(accepted, sight) - seen(turned, sight)) >= 0.16
