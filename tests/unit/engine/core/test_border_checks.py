"""What the debug checks look at, and what they need not look at twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from engine import invariants
from engine.controller import Border
from engine.engine import Engine
from engine.errors import InvariantError
from engine.phases import Phase
from engine.request import SamplingParams
from tests.memory_world import MemoryWorld
from tests.oracle_world import World, loaded_oracle, oracle_engine

PARAMS = SamplingParams(max_tokens=20, temperature=0.0, seed=1, ignore_eos=True, detokenize=False)


def two_rows(**options: Any) -> World:
    """Two rows that decode, of a model with drafts and states."""
    world = World(oracle_engine(kind="mtp", speculative_tokens=2, **options))
    for salt in range(2):
        world.submit([salt, 5, 7, 9, 11], PARAMS)
    for _ in range(3):
        world.step()
    return world


def lengthen(engine: Engine) -> None:
    engine.table.kv_len[0] += 1


def take_another_s_block(engine: Engine) -> None:
    engine.table.block_ids[0, 0] = engine.table.block_ids[1, 0]


def hold_a_block_twice(engine: Engine) -> None:
    engine.pool.ref_counts[engine.table.block_ids[0, 0]] += 1


def accept_what_was_not_proposed(engine: Engine) -> None:
    engine.table.num_accepted[0] = 3


def take_another_s_slot(engine: Engine) -> None:
    engine.table.state_slot[0] = engine.table.state_slot[1]


def free_a_slot_that_a_row_has(engine: Engine) -> None:
    assert engine.table.slots is not None
    engine.table.slots.give_back(np.array([engine.table.state_slot[0]], dtype=np.int32))


CHANGES = [
    (lengthen, "I8"),
    (take_another_s_block, "I13"),
    (hold_a_block_twice, "I13"),
    (accept_what_was_not_proposed, "I24|I6"),
    (take_another_s_slot, "I21"),
    (free_a_slot_that_a_row_has, "I21"),
]


class TestBordersBeforeAPhase:
    @pytest.mark.parametrize(("change", "number"), CHANGES, ids=lambda value: getattr(value, "__name__", ""))
    @pytest.mark.parametrize("late", [False, True])
    def test_are_checked_where_what_watches_has_changed_the_books_since_the_phase_before(
        self, change: Callable[[Engine], None], number: str, late: bool
    ) -> None:
        """Found before the next phase works on it, and not behind that, which may have written over it."""
        world = two_rows(late_rewind=late)
        order = world.borders[-1][0]

        def look(border: Border) -> None:
            if (border.phase, border.side) == (Phase.REWIND, "after"):
                change(world.engine)

        world.on_border = look
        with pytest.raises(InvariantError, match=f"({number}): "):
            world.step()
        assert world.borders[-1] == (order, Phase.REWIND, "after")

    def test_are_not_checked_again_where_nothing_has_changed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        checked: list[tuple[Phase, str]] = []
        real = invariants._check_all

        def count(engine: Engine, border: Border) -> None:
            checked.append((border.phase, border.side))
            real(engine, border)

        world = two_rows()
        monkeypatch.setattr(invariants, "_check_all", count)
        world.step()
        phases = world.borders[-1][0].phases
        assert checked == [(phases[0], "before"), *((phase, "after") for phase in phases)]


class TestSharedOracles:
    def test_are_one_model_and_one_set_of_traces_however_they_are_asked_for(self) -> None:
        """Two spellings of one call were two models to the cache, each of which was traced anew."""
        plain = loaded_oracle()
        assert loaded_oracle(0) is loaded_oracle(nan_every=0, kind="oracle", skill="mixed") is plain
        with_text = loaded_oracle(has_text=True)
        assert with_text.tokenizer is not None
        assert with_text.model is plain.model
        assert with_text.buckets is plain.buckets
        assert loaded_oracle(kind="mtp").model is not plain.model


class TestMemoryWorlds:
    def test_do_not_count_what_an_admission_skipped_that_failed_behind_its_work(self) -> None:
        """It told of 12 skipped tokens, and nobody had seen it enter: it was aborted before it entered again."""
        world = MemoryWorld(oracle_engine(prefix_caching=True, mode="legacy"))
        shared = list(range(16))
        world.submit(shared, PARAMS)
        world.step()
        gone = world.submit([*shared, 3], PARAMS)
        assert world.fail_in(Phase.ADMIT, after=True)
        assert world.engine._live[gone].num_cached_tokens == len(shared)
        world.engine.recover()
        world.abort(gone)
        world.drain()
