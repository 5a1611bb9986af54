"""A session whose model drafts: everything that a person does with one, in both modes."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest

from engine.phases import Order, Phase
from engine.request import Request
from tests.unit.tracing.traces import device, phase
from tracing.records import Category
from workbench.background import Background
from workbench.comparison import compare
from workbench.panel.commands import Commands
from workbench.panel.strip_view import phase_title
from workbench.panel.views import Views
from workbench.replays import ReplayError
from workbench.report import write_report
from workbench.report_border import border_input, find_borders
from workbench.report_data import ORDER_COLOURS
from workbench.saved_runs import load_run
from workbench.session import Session, SessionError

from .worlds import drafting_oracle, spread_workload, tokens
from .worlds import make_drafting_session as make_session
from .worlds import make_session as make_plain_session

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
            assert load_run(tmp_path / "run").summary == session.summary()
            replay = again.replay(tmp_path / "run")
            while again.step_phase() is not None:
                assert replay.headline
            assert not replay.differing_orders
            assert not replay.notes
            assert tokens(again) == tokens(session)

    def test_delays_of_its_phases_and_of_its_device_work_change_no_token(self, mode: str) -> None:
        delays = dict.fromkeys(("verify", "draft", "rewind"), 0.0001)
        delays |= {f"device {name}": 1e-4 for name in ("verify", "draft", "fetch_accepted")}
        with make_session(mode) as plain, make_session(mode, device="cpu") as slow:
            for one in (plain, slow):
                submit_two(one)
            plain.run()
            with slow.delayed(delays):
                slow.run()
            assert tokens(slow) == tokens(plain)


@pytest.mark.parametrize(("beside", "admits"), [(False, "mtp_no_overlap"), (True, "mtp_overlap_admit")])
def test_switching_modes_on_the_way_loses_nothing(beside: bool, admits: str) -> None:
    options = {"overlap_admission": beside}
    with make_session("async", **options) as plain, make_session("async", **options) as switched:
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
        assert {"mtp_legacy", "mtp_drain", admits} <= orders


def test_what_comes_next_is_told_with_its_drafting_phases() -> None:
    with make_session("async") as session:
        submit_two(session)
        session.run(3)
        assert "mtp_overlap_late (prepare → verify → draft → forward → rewind" in session.explain()
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
    assert "mtp_overlap_late" in {order.order for order in comparison.runs[1].summary.orders}
    assert "drafts accepted" in str(comparison)
    assert all("drafts" in request for leg in comparison.to_dict()["legs"] for request in leg["requests"])
    write_report(tmp_path / "report.html", [run.view for run in comparison.runs], title="drafting")
    assert "mtp_overlap_late" in (tmp_path / "report.html").read_text()


class TestChanges:
    def test_rewind_says_how_many_were_accepted_and_what_it_took_back(self) -> None:
        with make_session("async") as session:
            session.record_changes = True
            submit_two(session)
            session.run(8)
            rejecting = 0
            for past in session.history:
                if "rewind" not in [phase.phase for phase in past.phases]:
                    continue
                rewind = past.phase("rewind")
                told = {one.request_id: one.value for one in rewind.read if one.name == "accepted drafts"}
                for request_id, value in told.items():
                    rejected = DRAFTS - int(str(value).split(" of ")[0])
                    changes = {one.name: one for one in rewind.of(request_id)}
                    assert ("kv_len" in changes) == (rejected > 0)
                    if rejected:
                        rejecting += 1
                        assert changes["kv_len"].old - changes["kv_len"].new == rejected
                        assert changes["kv_len"].note.startswith(f"{rejected} rejected draft")
            assert rejecting

    def test_staged_drafts_are_named_and_not_shown_as_ids(self) -> None:
        with make_session("async") as session:
            session.record_changes = True
            submit_two(session)
            session.run(5)
            read = session.history[-1].phase("forward").read
            staged = [one.value for one in read if one.name.endswith("token_ids")]
        assert staged == ["the id sampled last, draft 1, draft 2, on the device"] * 2

    @pytest.mark.parametrize("mode", MODES)
    def test_the_newest_tokens_of_all_resolves_are_the_request_s_tokens(self, mode: str) -> None:
        with make_session(mode) as session:
            session.record_changes = True
            submit_two(session)
            session.run()
            given: list[int] = []
            for past in session.history:
                for change in (one for phase in past.phases for one in phase.of("a")):
                    if change.name in ("newest token", "newest tokens"):
                        given += change.new if isinstance(change.new, tuple) else [change.new]
            assert tuple(given) == session.outputs["a"].token_ids


class TestExplaining:
    def test_says_how_many_drafts_were_accepted_once_rewind_knows(self) -> None:
        with make_session("async", late_rewind=False) as session:
            submit_two(session)
            session.run(2)
            step_to(session, Phase.DRAFT)
            assert "its 2 drafts verified: rewind learns how many are accepted" in session.explain("a")
            session.step_phase()
            current = session.engine.in_hand
            assert current is not None
            assert current.num_tokens is not None
            accepted = int(current.num_tokens[0]) - 1
            assert f"({accepted} of 2 drafts accepted)" in session.explain("a")

    def test_the_pending_forward_s_token_is_still_to_be_verified(self) -> None:
        with make_session("async") as session:
            submit_two(session)
            session.run(3)
            assert session.explain("a").endswith("once it is verified.")


class TestStopping:
    def test_a_breakpoint_before_verify_is_hit_for_its_request(self) -> None:
        with make_session("async") as session:
            submit_two(session)
            stop = session.break_on("verify", request="b")
            session.run()
            assert stop.hits == 1
            assert session.snapshot().next_phase == "verify"

    @pytest.mark.parametrize("phase", ["draft", "rewind"])
    def test_the_phases_behind_it_concern_the_requests_that_were_verified(self, phase: str) -> None:
        with make_session("async") as session:
            submit_two(session)
            session.break_on(phase, request="b")
            session.run()
            assert session.snapshot().next_phase == phase


class TestTimes:
    def test_every_token_has_a_time_and_accepted_drafts_that_of_the_token_behind_them(self) -> None:
        with make_session("async") as session:
            submit_two(session)
            session.run()
            for record in session.requests():
                times = record.token_times_ns
                assert len(times) == record.num_output_tokens == 20
                assert list(times) == sorted(times)
                verifications = record.drafts_proposed[0] + 1  # and the prompt's
                assert len(set(times)) == verifications

    def test_each_rewind_is_marked_with_what_it_accepted(self) -> None:
        with make_session("async") as session:
            submit_two(session)
            session.run()
            marks = [one.args for one in session.spans() if one.category is Category.INSTANT and one.name == "rewind"]
            counters = session.engine.counters
        assert sum(mark["accepted"] for mark in marks) == counters.drafts_accepted.total()
        assert sum(mark["drafts"] for mark in marks) == counters.drafts_proposed.total()

    def test_what_rewind_waits_for_is_a_wait_and_no_host_work(self) -> None:
        with make_session("async", device="cpu", op_sleep_s=0.01) as session:
            submit_two(session)
            session.run()
            phases = {phase.name: phase for phase in session.summary().host.phases}
        assert phases["rewind"].wait_ns > 5 * phases["rewind"].host.total_ns
        assert phases["resolve"].wait_ns < phases["rewind"].wait_ns

    def test_a_border_lies_behind_verify_so_that_draft_heads_hide_work(self) -> None:
        spans = [
            *(device("forward", 0, 10), device("verify", 10, 12), device("draft", 12, 40)),
            *(phase("rewind", 13, 20), phase("resolve", 20, 30), device("forward", 45, 60, 1)),
        ]
        (border,) = find_borders([border_input(spans, [], None)])

        assert border is not None
        assert (border.at_ns, border.hidden_ns, border.work_ns) == (12, 17, 17)
        assert border.beside == (("draft 0", 17),)


class TestWaitingInTheBackground:
    def test_a_long_wait_for_the_accepted_counts_gives_turns(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With 40 ms a forward a cell would else wait 40 ms for each of its turns, in rewind."""
        waited: list[Phase] = []
        whole = Background._turn_while_waiting

        async def noted(self: Background) -> None:
            assert self._awaited is not None
            waited.append(self._awaited[0].phase)
            await whole(self)

        monkeypatch.setattr(Background, "_turn_while_waiting", noted)
        with make_session("async", device="cpu", op_sleep_s=0.02) as session:
            submit_two(session)
            asyncio.run(session.run_async())
        assert waited.count(Phase.REWIND) > 2


class TestReplaying:
    def test_a_draft_that_was_accepted_in_the_record_and_differs_is_found(self, tmp_path: Path) -> None:
        """Only the newest token used to be compared; accepted drafts come before it."""
        with make_session("async") as session:
            submit_two(session)
            session.run()
            trace = session.trace
        place = next(
            at for at, is_draft in enumerate(session._watch.draft_marks(_request(session), 99).accepted) if is_draft
        )
        wrong = [dict(output) for output in trace.outputs]
        ids = list(wrong[0]["output_token_ids"])
        wrong[0]["output_token_ids"] = [*ids[:place], (ids[place] + 1) % 60, *ids[place + 1 :]]
        with make_session("async") as again:
            again.replay(dataclasses.replace(trace, outputs=wrong))
            with pytest.raises(ReplayError, match=f"at place {place}"):
                again.run()

    def test_other_drafts_are_said_to_change_the_schedule(self, tmp_path: Path) -> None:
        with make_session("async") as session, make_session("async", speculative_tokens=1) as other:
            submit_two(session)
            session.run()
            replay = other.replay(session.trace)
            other.run()
            assert "speculative_tokens" in replay.notes[0]
            assert tokens(other) == tokens(session)

    def test_orders_are_compared_by_their_plain_kind(self) -> None:
        with make_session("legacy") as session, make_session("legacy", speculative_tokens=0) as plain:
            session.submit([5, 6], max_tokens=1, ignore_eos=True)
            session.run()
            replay = plain.replay(session.trace)
            plain.run()
            assert [record.order for record in session.iterations()] == ["mtp_legacy"]
            assert replay.differing_orders == []


class TestEveryOrder:
    @pytest.mark.parametrize("order", list(Order))
    def test_has_a_colour_and_a_title_for_each_phase(self, order: Order) -> None:
        assert order.label in ORDER_COLOURS
        assert all(phase_title(order, phase) for phase in order.phases)

    @pytest.mark.parametrize("mode", MODES)
    def test_the_strip_is_drawn_at_every_border(self, mode: str) -> None:
        with make_session(mode) as session:
            views = Views(session, Commands(session, lambda notice: None))
            submit_two(session, max_tokens=9)
            while session.step_phase() is not None:
                strip, bar = views.strip(), views.bar()
                assert strip["order"] is not None
                assert strip["order"].startswith(("mtp_", "primer"))
                assert bar["headline"]

    def test_a_decode_row_takes_its_newest_token_and_its_drafts_of_the_budget(self) -> None:
        with make_session("async") as session:
            submit_two(session)
            session.run(3)
            budget = session.snapshot().budget
        assert budget is not None
        assert (budget.num_decode, budget.decode, budget.prompt) == (2, 6, 0)


def test_drafts_can_be_read_from_the_device_where_there_are_any() -> None:
    with make_session("async") as session, make_plain_session() as plain:
        submit_two(session)
        session.run(3)
        assert session.read_device("drafts").shape == (4, DRAFTS)
        with pytest.raises(SessionError, match="speculative_tokens is 0"):
            plain.read_device("drafts")


def _request(session: Session) -> Request:
    request = session._desk.book.request("a")
    assert request is not None
    return request
