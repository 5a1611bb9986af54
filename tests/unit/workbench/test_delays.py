"""Work made longer on purpose: the spans and the blame show it, the tokens do not, and it ends with its block."""

from __future__ import annotations

import pytest

from tests.unit.workbench.worlds import oracle
from tracing.records import Category
from workbench.peek import SessionError
from workbench.session import Session

SMALL = {"max_requests": 4, "max_batch_tokens": 64, "max_sequence_length": 64, "num_blocks": 64}
DELAY_S = 0.02


@pytest.fixture
def session() -> Session:
    with Session(oracle(), device="cpu", **SMALL) as made:
        made.submit([[1, 2, 3], [4, 5]], max_tokens=6, ignore_eos=True)
        yield made


def shortest_ms(session: Session, name: str, category: Category) -> float:
    return min(s.duration_ns for s in session.spans() if s.name == name and s.category is category) / 1e6


class TestPhases:
    def test_a_delayed_phase_shows_it_in_its_own_span(self, session: Session) -> None:
        with session.delayed({"resolve": DELAY_S}):
            session.run()
        assert shortest_ms(session, "resolve", Category.PHASE) >= 1e3 * DELAY_S

    def test_it_ends_with_its_block(self, session: Session) -> None:
        plain = dict(session.engine.controller.phase_functions)
        with pytest.raises(ZeroDivisionError), session.delayed({"resolve": DELAY_S, "emit": DELAY_S}):
            _ = 1 / 0
        assert session.engine.controller.phase_functions == plain

    def test_delays_of_one_phase_add_up(self, session: Session) -> None:
        with session.delayed({"emit": DELAY_S}), session.delayed({"emit": DELAY_S}):
            session.run(3)
        assert shortest_ms(session, "emit", Category.PHASE) >= 2e3 * DELAY_S
        assert session.trace.environment["delays_s"] == {"emit": 2 * DELAY_S}

    def test_they_may_end_in_another_order_than_they_began(self, session: Session) -> None:
        """Two tasks each with a delay of their own once left one in force for good."""
        plain = dict(session.engine.controller.phase_functions)
        first, second = session.delayed({"emit": DELAY_S}), session.delayed({"emit": DELAY_S})
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        session.run(3)
        assert shortest_ms(session, "emit", Category.PHASE) < 2e3 * DELAY_S
        second.__exit__(None, None, None)
        session.restart()
        session.run(3)
        assert shortest_ms(session, "emit", Category.PHASE) < 1e3 * DELAY_S
        assert set(session.engine.controller.phase_functions) == set(plain)


class TestDevice:
    def test_device_work_takes_longer(self, session: Session) -> None:
        with session.delayed({"device sample": DELAY_S}):
            session.run()
        assert shortest_ms(session, "sample", Category.DEVICE) >= 1e3 * DELAY_S

    def test_what_the_device_slept_before_is_there_again(self, session: Session) -> None:
        session.engine.device.op_sleep_s = {"forward": 0.001}
        with session.delayed({"device forward": DELAY_S}):
            assert session.engine.device.op_sleep_s == {"forward": 0.001 + DELAY_S}
        assert session.engine.device.op_sleep_s == {"forward": 0.001}


class TestTokens:
    def test_are_the_same_with_any_delay(self, session: Session) -> None:
        session.run()
        plain = {name: output.token_ids for name, output in session.outputs.items()}
        session.restart()
        with session.delayed({"prepare": 0.001, "resolve": 0.002, "device forward": 0.001}):
            session.run()
        assert {name: output.token_ids for name, output in session.outputs.items()} == plain


class TestProvenance:
    def test_a_trace_says_what_was_delayed(self, session: Session) -> None:
        assert "delays_s" not in session.trace.environment
        with session.delayed({"resolve": 0.001}):
            session.restart()
            session.run(3)
        assert session.trace.environment["delays_s"] == {"resolve": 0.001}

    def test_and_keeps_saying_it_when_another_delay_follows(self, session: Session) -> None:
        """A trace once held the session's own notes, which a later delay wrote into."""
        with session.delayed({"resolve": 0.001}):
            session.run(3)
        trace = session.trace
        with session.delayed({"resolve": 0.002, "emit": 0.001}):
            session.run(3)
        assert trace.environment["delays_s"] == {"resolve": 0.001}

    def test_until_it_is_forgotten(self, session: Session) -> None:
        with session.delayed({"resolve": 0.001}):
            session.run(3)
        session.restart()
        assert "delays_s" not in session.trace.environment


class TestMistakes:
    def test_unknown_work_names_what_there_is(self, session: Session) -> None:
        with pytest.raises(SessionError, match="phase must be one of admit"), session.delayed({"resolv": 1}):
            pass
        with pytest.raises(SessionError, match="publish, forward, sample"), session.delayed({"device resolve": 1}):
            pass

    @pytest.mark.parametrize("delay_s", [-1.0, float("nan"), float("inf")])
    def test_a_delay_is_a_number_of_seconds(self, session: Session, delay_s: float) -> None:
        with pytest.raises(SessionError, match="number of seconds"), session.delayed({"resolve": delay_s}):
            pass
        assert session.run()
