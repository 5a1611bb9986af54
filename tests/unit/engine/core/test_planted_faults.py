"""Faults planted in the engine, each of which some check must notice: an invariant, the reference, or an exception.

A fault that goes unnoticed would mean that the tests beside this one prove less than they seem to.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.memory_world import MemoryWorld, play_memory
from tests.oracle_world import World, oracle_engine, play
from tests.planted_beside_faults import BESIDE, BESIDE_FAULTS, KEPT_FAULTS, play_kept
from tests.planted_chunk_faults import CHUNK_FAULTS, CHUNKS
from tests.planted_faults import BUCKETS, FAULTS, SLOW_DEVICE, Fault
from tests.planted_late_faults import LATE, LATE_FAULTS, RESERVED
from tests.planted_memory_faults import CHUNKED, EXPOSED, MEMORY_FAULTS, NO_CACHE, ROOMY, TIGHT
from tests.planted_state_faults import (
    BOTH,
    BUCKETED_STATES,
    CHUNKED_STATES,
    DRAFTS,
    HEADS,
    RIGHT,
    STATE_FAULTS,
    STATES,
    play_right,
)

log = logging.getLogger(__name__)
NUM_SCHEDULES = 30


def played(engine: Any, seed: int, *, text: bool) -> None:
    play(World(engine), random.Random(seed), text=text)


def played_tight(engine: Any, seed: int, *, text: bool) -> None:
    play_memory(MemoryWorld(engine), random.Random(seed), text=text)


def played_right(engine: Any, seed: int, *, text: bool) -> None:
    play_right(MemoryWorld(engine), random.Random(seed))


def played_kept(engine: Any, seed: int, *, text: bool) -> None:
    play_kept(World(engine))


def caught_by(fault: Fault, schedule: Callable[..., None] = played) -> str | None:
    """The first thing that a few schedules complain of; None if nothing does."""
    for seed in range(NUM_SCHEDULES):
        engine = oracle_engine(has_text=fault.text, **fault.options)
        engine.device.op_sleep_s = fault.slow
        try:
            schedule(engine, seed, text=fault.text)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            engine.close()
    return None


def require_caught(fault: Fault, found: str | None) -> None:
    """Something was noticed, and it is the fault and not how it was planted."""
    assert found is not None, f"{fault.name}: {NUM_SCHEDULES} schedules passed"
    for misfit in ("positional argument", "has no attribute", "is not defined", "unexpected keyword"):
        assert misfit not in found, f"{fault.name} does not fit the engine any more: {found}"
    log.info("%s: caught by %s", fault.name, found[:100])


class TestPlantedFaults:
    @pytest.mark.parametrize("fault", FAULTS + CHUNK_FAULTS, ids=lambda fault: fault.name)
    def test_are_noticed(self, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
        """What noticed each is shown by ``--log-cli-level=INFO``."""
        fault.plant(monkeypatch)
        require_caught(fault, caught_by(fault))

    @pytest.mark.parametrize("fault", MEMORY_FAULTS, ids=lambda fault: fault.name)
    def test_of_shared_and_short_memory_are_noticed(self, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
        fault.plant(monkeypatch)
        require_caught(fault, caught_by(fault, played_tight))

    @pytest.mark.parametrize("fault", STATE_FAULTS, ids=lambda fault: fault.name)
    def test_of_states_and_drafts_are_noticed(self, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
        fault.plant(monkeypatch)
        require_caught(fault, caught_by(fault, played_tight))

    @pytest.mark.parametrize("fault", BESIDE_FAULTS, ids=lambda fault: fault.name)
    def test_of_prompts_that_enter_beside_unresolved_tokens_are_noticed(
        self, fault: Fault, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fault.plant(monkeypatch)
        require_caught(fault, caught_by(fault, played_tight))

    @pytest.mark.parametrize("fault", KEPT_FAULTS, ids=lambda fault: fault.name)
    def test_of_rows_kept_beyond_their_end_are_noticed(self, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
        fault.plant(monkeypatch)
        require_caught(fault, caught_by(fault, played_kept))

    @pytest.mark.parametrize("fault", LATE_FAULTS, ids=lambda fault: fault.name)
    def test_of_lengths_on_the_device_are_noticed(self, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
        fault.plant(monkeypatch)
        require_caught(fault, caught_by(fault, played_tight))

    @pytest.mark.parametrize("fault", HEADS, ids=lambda fault: fault.name)
    def test_of_draft_heads_are_noticed(self, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
        fault.plant(monkeypatch)
        require_caught(fault, caught_by(fault, played_right))

    @pytest.mark.parametrize(
        "options", [{}, BUCKETS, SLOW_DEVICE, CHUNKS, {"nan_every": 31}, {"num_blocks": 26}], ids=str
    )
    def test_are_what_the_schedules_complain_of(self, options: dict[str, Any]) -> None:
        for seed in range(3):
            engine = oracle_engine(has_text=True, **options)
            engine.device.op_sleep_s = {"publish": 0.002}
            play(World(engine), random.Random(seed), text=True)
            engine.close()

    @pytest.mark.parametrize("options", [RIGHT, {**RIGHT, "prefix_caching": True}], ids=str)
    def test_are_what_the_schedules_of_right_heads_complain_of(self, options: dict[str, Any]) -> None:
        for seed in range(4):
            engine = oracle_engine(**options)
            played_right(engine, seed, text=False)
            engine.close()

    @pytest.mark.parametrize(
        "options",
        [
            TIGHT,
            NO_CACHE,
            CHUNKED,
            EXPOSED,
            ROOMY,
            {**TIGHT, "nan_every": 31},
            DRAFTS,
            STATES,
            BOTH,
            CHUNKED_STATES,
            BUCKETED_STATES,
            BESIDE,
            LATE,
            RESERVED,
            {**BOTH, "nan_every": 31},
        ],
        ids=str,
    )
    def test_are_what_the_schedules_of_short_memory_complain_of(self, options: dict[str, Any]) -> None:
        for seed in range(4):
            engine = oracle_engine(**options)
            played_tight(engine, seed, text=False)
            engine.close()
