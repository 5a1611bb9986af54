"""The browser that the tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ui.browser import opened_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Closed behind the file's last test: Playwright's event loop would be in the way of tests that run their own."""
    with opened_browser() as opened:
        yield opened
