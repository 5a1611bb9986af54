"""A headless Chromium without network, and what its pages said on their consoles."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = ("--no-sandbox", "--disable-background-networking")


def missing(*packages: str) -> str | None:
    """Why nothing can be opened here, with what brings it; None if it can."""
    lacking = [package for package in ("playwright", *packages) if find_spec(package) is None]
    if lacking:
        return f"needs {' and '.join(lacking)}: make test-ui installs the extra ui"
    return None if executable() else "needs Chromium: apt-get install chromium, or playwright install chromium"


def executable() -> str | None:
    """Chromium on the path, or else the one that Playwright brought."""
    on_path = next((path for name in _NAMES if (path := shutil.which(name))), None)
    return on_path or next(map(str, _brought_by_playwright()), None)


def _brought_by_playwright() -> list[Path]:
    home = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH") or Path.home() / ".cache" / "ms-playwright")
    return sorted(home.glob("chromium-*/chrome-linux*/chrome"), reverse=True)


@contextmanager
def opened_browser() -> Iterator[Any]:
    """Playwright's browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened_page(
    browser: Any, *, width: int = 1280, height: int = 800, dark: bool = False, scale: float = 1
) -> Iterator[tuple[Any, list[str]]]:
    """A blank page of its own, and the list to which its errors are added."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        device_scale_factor=scale,
        color_scheme="dark" if dark else "light",
    )
    try:
        page = context.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda line: errors.append(line.text) if line.type == "error" else None)
        yield page, errors
    finally:
        context.close()


def load(page: Any, errors: list[str], address: str, serve: Callable[[Any], None]) -> None:
    """Open a page whose every file ``serve`` answers, and wait until its modules say that they are there."""
    page.route(f"{address}/**", serve)
    page.goto(f"{address}/")
    try:
        page.wait_for_function("() => window.isReady", timeout=90_000)
    except Exception as error:
        raise AssertionError(f"the modules were not loaded: {errors}") from error


def keep_shot(page: Any, name: str) -> None:
    """For people to look at: into the folder that UI_SHOTS names, if it names one."""
    folder = os.environ.get("UI_SHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=str(Path(folder) / f"{name}.png"))
