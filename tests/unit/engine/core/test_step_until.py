"""``Engine.step(until)``: one code path that can stand still at a border without counting as stepped by hand."""

from __future__ import annotations

import pytest

from engine.controller import Border
from engine.phases import Phase
from engine.request import SamplingParams
from tests.oracle_world import oracle_engine

PARAMS = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)


class TestUntil:
    def test_stands_still_where_it_says_and_goes_on_from_there(self) -> None:
        with oracle_engine() as engine, oracle_engine() as plain:
            for one in (engine, plain):
                one.add_request([1, 2, 3], PARAMS)
            engine.step()
            assert engine.step(lambda border: border.phase is Phase.RESOLVE) == []

            assert engine.in_hand is not None
            assert engine.next_phase is Phase.RESOLVE
            assert "hand_stepped" not in engine.in_hand.void_reasons
            outputs = []
            while engine.has_unfinished():
                outputs += engine.step()
            expected = []
            while plain.has_unfinished():
                expected += plain.step()
            assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]

    def test_is_asked_at_every_border_it_comes_to_once(self) -> None:
        asked: list[Phase] = []

        def ask(border: Border) -> bool:
            assert border.side == "before"
            asked.append(border.phase)
            return True

        with oracle_engine() as engine:
            engine.add_request([1], PARAMS)
            for _ in range(4):
                engine.step(ask)

            # The fourth call stands before forward, runs it, and the primer has ended.
            assert asked == [Phase.ADMIT, Phase.PREPARE, Phase.FORWARD]
            assert engine.in_hand is None

    def test_that_raises_leaves_the_iteration_in_hand_and_unharmed(self) -> None:
        def fail(border: Border) -> bool:
            raise LookupError(border.phase.value)

        with oracle_engine() as engine:
            engine.add_request([1], PARAMS)
            with pytest.raises(LookupError, match="admit"):
                engine.step(fail)

            assert engine.failure is None
            assert engine.in_hand is not None
            engine.step()
            assert engine.in_hand is None
