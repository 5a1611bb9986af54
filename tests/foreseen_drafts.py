"""Drafts as the device's columns have them before each verification: read by no way that the engine fetches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.controller import Border
from engine.engine import Engine
from engine.phases import Phase

SCHEDULES: list[dict[str, Any]] = [
    {"mode": "legacy"},
    {"mode": "async", "late_rewind": False},
    {"mode": "async", "late_rewind": True},
]
"""Options of all ways in which drafts are verified."""


class ForeseenDrafts:
    """Called at every border; by generation, the drafts that the iteration in hand verifies, if it does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.newest: dict[int, list[int]] = {}
        """Of rows that decode: what a row that read its prompt has there is none of it."""

    def __call__(self, border: Border) -> None:
        """Look; what has been launched is waited for."""
        if (border.phase, border.side) != (Phase.VERIFY, "before"):
            return
        engine, columns = self.engine, self.engine.runner.columns
        engine.device.synchronize()
        assert columns.drafts is not None
        assert engine.pending is not None
        drafts, decoding = columns.drafts.tolist(), engine.pending.table_rows[: engine.pending.dims.num_decode].tolist()
        self.newest = {int(engine.table.key[row]): drafts[row] for row in decoding if row >= 0}


def watch_too(engine: Engine, look: Callable[[Border], None]) -> None:
    """Call ``look`` at every border, before whoever watched already."""
    others = engine.controller.watch

    def both(border: Border) -> None:
        look(border)
        if others is not None:
            others(border)

    engine.controller.watch = both
