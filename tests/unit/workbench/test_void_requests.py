"""A request that lived through a void iteration says so for as long as it is known, whatever the trace still holds."""

from __future__ import annotations

import pytest

from engine.errors import IterationFailedError
from tests.unit.workbench.worlds import make_session, oracle
from tracing.recorder import Recorder
from workbench.session import Session


def marks(session: Session) -> dict[str, tuple[str, ...]]:
    return {one.request_id: one.void_reasons for one in session.requests()}


class TestRequests:
    def test_that_were_stepped_by_hand_stay_out_of_statistics_when_the_ring_has_lost_the_iteration(self) -> None:
        """A reviewer's find: they counted again once that record was overwritten."""
        recorder = Recorder(nvtx=False, capacity=200)
        options = {"device": "cpu", "max_requests": 4, "max_batch_tokens": 128, "max_sequence_length": 96}
        with Session(oracle(), "async", recorder=recorder, num_blocks=24, **options) as session:
            stepped = session.submit([1, 2, 3], max_tokens=6, ignore_eos=True)
            session.step()
            session.step_phase()
            session.run()
            later = session.submit([4, 5, 6], max_tokens=60, ignore_eos=True)
            session.run()

            assert recorder.lost_iterations > 6
            assert not any("hand_stepped" in one.void_reasons for one in session.iterations())
            assert marks(session) == {stepped: ("hand_stepped",), later: ()}
            latency = session.summary().requests
            assert (latency.count, latency.num_void) == (1, 1)
            table = session.trace.requests
            assert table.column("is_void").to_pylist() == [True, False]

    @pytest.mark.parametrize("place", ["first", "middle", "last"])
    def test_carry_the_mark_wherever_in_their_life_it_was(self, place: str) -> None:
        with make_session("legacy", device="cpu") as session:
            name = session.submit([1, 2, 3], max_tokens=4, ignore_eos=True)
            for number in range(4):
                if number == {"first": 0, "middle": 2, "last": 3}[place]:
                    session.step_phase()
                session.step()
            session.clear_trace()

            assert session.finished
            assert marks(session) == {name: ("hand_stepped",)}

    def test_that_live_on_after_a_failure_are_marked_too(self) -> None:
        with make_session(device="cpu") as session:
            name = session.submit([1, 2, 3], max_tokens=6, ignore_eos=True)
            session.step()
            phases = session.engine.controller._phases
            whole = dict(phases)
            phases.update(dict.fromkeys(phases, _fail))
            with pytest.raises(RuntimeError, match="planted"):
                session.step()
            phases.update(whole)
            with pytest.raises(IterationFailedError):
                session.step()
            session.recover()
            session.run()

            assert marks(session) == {name: ("recovered",)}

    def test_of_an_undisturbed_run_carry_none(self) -> None:
        with make_session(device="cpu") as session:
            name = session.submit([1, 2, 3], max_tokens=6)
            session.run()

            assert marks(session) == {name: ()}


def _fail(_: object) -> None:
    raise RuntimeError("planted")
