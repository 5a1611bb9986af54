"""Faults planted in the engine, each of which some check must notice: an invariant, the reference, or an exception.

A fault that goes unnoticed would mean that the tests beside this one prove less than they seem to.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from tests.oracle_world import World, oracle_engine, play
from tests.planted_chunk_faults import CHUNK_FAULTS, CHUNKS
from tests.planted_faults import BUCKETS, FAULTS, SLOW_DEVICE, Fault

log = logging.getLogger(__name__)
NUM_SCHEDULES = 30


def caught_by(fault: Fault) -> str | None:
    """The first thing that a few schedules complain of; None if nothing does."""
    for seed in range(NUM_SCHEDULES):
        engine = oracle_engine(has_text=fault.text, **fault.options)
        engine.device.op_sleep_s = fault.slow
        try:
            play(World(engine), random.Random(seed), text=fault.text)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            engine.close()
    return None


class TestPlantedFaults:
    @pytest.mark.parametrize("fault", FAULTS + CHUNK_FAULTS, ids=lambda fault: fault.name)
    def test_are_noticed(self, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
        """What noticed each is shown by ``--log-cli-level=INFO``."""
        fault.plant(monkeypatch)

        found = caught_by(fault)

        assert found is not None, f"{fault.name}: {NUM_SCHEDULES} schedules passed"
        assert "positional argument" not in found, f"{fault.name} does not fit the engine any more: {found}"
        log.info("%s: caught by %s", fault.name, found[:100])

    @pytest.mark.parametrize(
        "options", [{}, BUCKETS, SLOW_DEVICE, CHUNKS, {"nan_every": 31}, {"num_blocks": 26}], ids=str
    )
    def test_are_what_the_schedules_complain_of(self, options: dict[str, Any]) -> None:
        for seed in range(3):
            engine = oracle_engine(has_text=True, **options)
            engine.device.op_sleep_s = {"publish": 0.002}
            play(World(engine), random.Random(seed), text=True)
            engine.close()
