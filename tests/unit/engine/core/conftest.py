"""Fixtures of the core's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.bug_kind_world import MODES


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(autouse=True)
def plain_traces() -> Iterator[None]:
    """Traces run as they are: optimising one takes torch longer than the few times that a small world replays it.

    Buckets that torch has optimised are run by ``tests/cpu``.
    """
    with torch.jit.optimized_execution(False):
        yield
