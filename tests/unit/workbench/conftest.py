"""What all tests of the workbench have in common."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def nobody_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session that is left for 50 ms voids its next iteration: on a busy machine any test may leave it that long."""
    monkeypatch.setattr("workbench.driver.LEFT_NS", 2**63)
