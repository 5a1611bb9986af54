"""What a session tells of iterations that wait for accepted counts behind their forward."""

from __future__ import annotations

from pathlib import Path

from engine.phases import Order, Phase
from tests.unit.workbench.worlds import make_drafting_session, spread_workload, tokens
from tracing.records import IterationRecord
from workbench.explain_order import explain_record
from workbench.panel.strip_view import phase_title, strip_view
from workbench.session import Session

LATE = Order.MTP_OVERLAP_LATE


def submit_two(session: Session) -> None:
    session.submit([5, 6, 7], request_id="a", max_tokens=24, temperature=0, ignore_eos=True)
    session.submit([9, 8, 7, 6], request_id="b", max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)


def late_session() -> Session:
    """Two requests that decode, whose next iteration rewinds late."""
    session = make_drafting_session(late_rewind=True)
    submit_two(session)
    session.run(3)
    return session


def late_ones(session: Session) -> list[IterationRecord]:
    return [record for record in session.iterations() if record.order == LATE.label]


def test_the_tokens_are_the_same_run_or_stepped() -> None:
    with make_drafting_session() as plain, make_drafting_session(late_rewind=True) as late:
        for session in (plain, late):
            session.submit_workload(spread_workload())
        plain.run()
        while not late.finished:
            late.step_phase()
        assert tokens(late) == tokens(plain)
        assert len(late_ones(late)) > 4


def test_the_order_to_come_is_told_with_its_reason() -> None:
    with late_session() as session:
        told = session.explain()
        assert "would take mtp_overlap_late (prepare → verify → draft → forward → rewind → resolve → emit)" in told
        assert "the device counts lengths itself" in told
        session.run(1)
        (last,) = late_ones(session)[-1:]
        assert explain_record(last).startswith(f"Iteration {last.iteration} took mtp_overlap_late")
        assert "With late_rewind=False it would have waited" in explain_record(last)


def test_the_strip_says_of_each_phase_what_the_device_does_meanwhile() -> None:
    titles = {phase: phase_title(LATE, phase) for phase in LATE.phases}
    assert "lengths are what they are at most" in titles[Phase.PREPARE]
    assert "before the host knows a count" in titles[Phase.FORWARD]
    assert "The next forward is enqueued" in titles[Phase.REWIND]
    with late_session() as session:
        session.step_phase()
        strip = strip_view(session)
        assert [cell["name"] for cell in strip["phases"]] == [phase.value for phase in LATE.phases]


def test_recorded_changes_say_that_lengths_are_bounds_and_what_rewind_took_back() -> None:
    with late_session() as session:
        session.record_changes = True
        session.run(4)
        rejecting = 0
        for past in session.history:
            if not past.has_changes or past.record is None or past.record.order != LATE.label:
                continue
            (length,) = [one for one in past.phase("prepare").of("a") if one.name == "kv_len"]
            assert length.new - length.old == 3
            assert length.note.endswith("all drafts of the one before as if accepted")
            taken_back = [one for one in past.phase("rewind").of("a") if one.name == "kv_len"]
            rejecting += len(taken_back)
            assert all(one.note.endswith("taken back") for one in taken_back)
        assert rejecting


def test_a_request_is_explained_at_every_border() -> None:
    with late_session() as session:
        said = []
        for _ in LATE.phases:
            session.step_phase()
            said.append(session.explain("a"))
        assert sum("its 2 drafts verified: rewind learns how many" in one for one in said) == 3
        assert "of 2 drafts accepted" in said[LATE.phases.index(Phase.REWIND)]


def test_a_recorded_run_is_played_again_with_its_orders(tmp_path: Path) -> None:
    with make_drafting_session(late_rewind=True) as session:
        session.submit_workload(spread_workload())
        session.run()
        session.save(tmp_path / "run")
        with make_drafting_session(late_rewind=True) as again:
            replay = again.replay(tmp_path / "run")
            again.run()
            assert replay.differing_orders == []
            assert tokens(again) == tokens(session)
            assert len(late_ones(again)) == len(late_ones(session)) > 0
