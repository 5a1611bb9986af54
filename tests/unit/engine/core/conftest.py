"""Fixtures of the core's tests."""

from __future__ import annotations

import pytest

from tests.bug_kind_world import MODES


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found
