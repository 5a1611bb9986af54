"""A session whose model drafts: everything that a person does with one, in both modes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from engine.phases import Order, Phase, Reason
from tracing.records import Category
from workbench.background import Background
from workbench.border_view import step_borders
from workbench.comparison import compare
from workbench.panel.commands import Commands
from workbench.panel.strip_view import phase_title
from workbench.panel.views import Views
from workbench.replays import ReplayError
from workbench.report import write_report
from workbench.report_data import ORDER_COLOURS
from workbench.session import Session

from .worlds import drafting_oracle, make_session as make_plain_session, spread_workload, tokens
from .worlds import make_drafting_session as make_session

MODES = ("async", "legacy")
DRAFTS = 2


def submit_two(session: Session, max_tokens: int = 20) -> None:
    session.submit([5, 6, 7], request_id="a", max_tokens=max_tokens, temperature=0, ignore_eos=True)
    session.submit([9, 8, 7, 6], request_id="b", max_tokens=max_tokens, temperature=0.8, seed=3, ignore_eos=True)


def step_to(session: Session, phase: Phase) -> None:
    """Run phases until ``phase`` of an iteration with verified drafts has run."""
    while True:
        border = session.step_phase()
        assert border is not None
        verified = border.iteration.verified
        if border.phase is phase and verified is not None and verified.has_decode:
            return


@pytest.mark.parametrize("mode", MODES)
class TestDriving:
    def test_every_phase_is_stepped_and_explained(self, mode: str) -> None:
        with make_session(mode) as session:
            session.record_changes = True
            submit_two(session)
            seen = set()
            while (border := session.step_phase()) is not None:
                seen.add(border.phase)
                assert str(session.snapshot())
                assert session.snapshot()._repr_html_()
                assert session.explain()
                assert [session.explain(name) for name in ("a", "b")]
            assert {Phase.VERIFY, Phase.DRAFT, Phase.REWIND} <= seen
            assert Phase.SAMPLE not in seen or mode == "async"
            for past in session.history:
                assert str(past)
                assert past._repr_html_()
                assert all(str(phase) and phase._repr_html_() for phase in past.phases)

    def test_a_run_to_each_phase_stands_before_it(self, mode: str) -> None:
        with make_session(mode) as session:
            submit_two(session)
            session.run(2)
            session.run_to("verify")
            for phase in ("draft", "rewind", "resolve", "emit"):
                session.run_to(phase)
                assert session.snapshot().next_phase == phase

    def test_a_background_run_gives_what_a_run_gives(self, mode: str) -> None:
        async def in_background(session: Session) -> None:
            await session.run_async()

        with make_session(mode) as plain, make_session(mode, device="cpu") as session:
            for one in (plain, session):
                one.submit_workload(spread_workload())
            plain.run()
            asyncio.run(in_background(session))
            assert tokens(session) == tokens(plain)

    def test_drafts_change_no_token(self, mode: str) -> None:
        found = []
        for drafts in (0, 1, 3):
            with make_session(mode, speculative_tokens=drafts) as session:
                session.submit_workload(spread_workload())
                session.run()
                found.append(tokens(session))
        assert found[0] == found[1] == found[2]

    def test_a_saved_run_is_loaded_and_replayed_step_by_step(self, mode: str, tmp_path: Path) -> None:
        with make_session(mode) as session, make_session(mode) as again:
            session.submit_workload(spread_workload())
            session.run()
            session.save(tmp_path / "run")
            replay = again.replay(tmp_path / "run")
            while again.step_phase() is not None:
                assert replay.headline
            assert not replay.differing_orders
            assert not replay.notes
            assert tokens(again) == tokens(session)

    def test_delays_of_its_phases_and_of_its_device_work_change_no_token(self, mode: str) -> None:
        delays = {name: 1e-4 for name in ("verify", "draft", "rewind")}
        delays |= {f"device {name}": 1e-4 for name in ("verify", "draft", "fetch_accepted")}
        with make_session(mode) as plain, make_session(mode, device="cpu") as slow:
            for one in (plain, slow):
                submit_two(one)
            plain.run()
            with slow.delayed(delays):
                slow.run()
            assert tokens(slow) == tokens(plain)


def test_switching_modes_on_the_way_loses_nothing() -> None:
    with make_session("async") as plain, make_session("async") as switched:
        for one in (plain, switched):
            one.submit_workload(spread_workload())
        plain.run()
        for mode in ("legacy", "async", "legacy"):
            switched.run(3)
            switched.step_phase()
            switched.mode = mode
        switched.run()
        assert tokens(switched) == tokens(plain)
        orders = {record.order for record in switched.iterations()}
        assert {"mtp_legacy", "mtp_drain", "mtp_no_overlap"} <= orders


def test_what_comes_next_is_told_with_its_drafting_phases() -> None:
    with make_session("async") as session:
        submit_two(session)
        session.run(3)
        assert "mtp_overlap (verify → draft → rewind → prepare" in session.explain()
        assert session.step_phase() is not None
        assert session.history is not None


def test_modes_are_compared_and_reported(tmp_path: Path) -> None:
    comparison = compare(
        spread_workload(),
        ("legacy", "async"),
        model=drafting_oracle(),
        repeats=1,
        warmup=0,
        progress=False,
        device="cpu",
        max_requests=4,
        max_batch_tokens=128,
        max_sequence_length=96,
        num_blocks=40,
        speculative_tokens=DRAFTS,
    )
    assert comparison.ids_equal
    assert {order.order for order in comparison.runs[0].summary.orders} == {"mtp_legacy"}
    assert "mtp_overlap" in {order.order for order in comparison.runs[1].summary.orders}
    write_report(tmp_path / "report.html", [run.view for run in comparison.runs])
    assert "mtp_overlap" in (tmp_path / "report.html").read_text()
