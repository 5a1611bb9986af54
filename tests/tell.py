"""Lines that a test wants read even when it passes: measured errors and margins."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import pytest


def tell(capsys: pytest.CaptureFixture[str], lines: Iterable[str]) -> None:
    """Write past pytest's capture."""
    with capsys.disabled():
        sys.stdout.write("".join(f"\n  {line}" for line in lines))
