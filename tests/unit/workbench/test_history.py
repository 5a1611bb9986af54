"""Past iterations: tables before and after, and what each phase read and wrote, by request."""

from __future__ import annotations

from typing import Any

import pytest

from engine.phases import Order, Phase
from tests.unit.workbench.test_snapshot import Tags
from tests.unit.workbench.worlds import make_session, spread_workload, tokens, what_happened
from workbench import history as history_module
from workbench.changes import Change, PhaseChanges
from workbench.session import Session, SessionError


def recorded(mode: str = "async", **options: Any) -> Session:
    """A session that ran ``spread_workload`` to its end, every change recorded."""
    session = make_session(mode, clock="iterations", **options)
    session.record_changes = True
    session.submit_workload(spread_workload())
    session.run()
    return session


def wrote(changes: PhaseChanges, name: str) -> dict[str | None, tuple[Any, Any]]:
    """Old and new of one name, by request."""
    return {one.request_id: (one.old, one.new) for one in changes.wrote if one.name == name}


def read(changes: PhaseChanges, name: str) -> dict[str | None, Any]:
    return {one.request_id: one.value for one in changes.read if one.name == name}


class TestRecording:
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_changes_no_token_and_no_record(self, mode: str) -> None:
        with make_session(mode, clock="iterations") as plain, recorded(mode) as session:
            plain.submit_workload(spread_workload())
            plain.run()

            assert tokens(session) == tokens(plain)
            assert list(map(what_happened, session.iterations())) == list(map(what_happened, plain.iterations()))

    def test_voids_the_times_it_disturbs(self) -> None:
        with make_session(device="cpu") as session:
            session.submit([1], max_tokens=8, ignore_eos=True)
            session.run(2)
            session.record_changes = True
            session.run(1)
            session.record_changes = False
            session.run(1)

            voids = [record.void_reasons for record in session.iterations()]
            assert voids == [(), (), ("changes_recorded",), ()]
            assert [past.has_changes for past in session.history] == [False, False, True, False]

    def test_begun_in_mid_iteration_waits_for_the_next_one(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=8, ignore_eos=True)
            session.run(2)
            session.step_phase()
            session.record_changes = True
            session.run(2)

            assert [past.has_changes for past in session.history] == [False, False, False, True]

    def test_keeps_the_newest_iterations(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(history_module, "CAPACITY", 3)
        with make_session() as session:
            session.record_changes = True
            session.submit([1], max_tokens=8, ignore_eos=True)
            session.run()

            assert [past.has_changes for past in session.history] == [False] * 6 + [True] * 3

    def test_sees_what_the_debug_mode_poisons_afterwards(self) -> None:
        with recorded(debug_invariants=True) as session:
            given = {
                one.request_id: one.new
                for past in session.history
                for phase in past.phases
                for one in phase.wrote
                if one.name == "newest token"
            }

            assert given == {name: ids[-1] for name, ids in tokens(session).items()}


class TestWhatPhasesWrote:
    def test_every_token_of_every_request_comes_from_one_resolve(self) -> None:
        with recorded() as session:
            given: dict[str, list[int]] = {}
            for past in session.history:
                for phase in past.phases:
                    for one in phase.wrote:
                        if one.name == "newest token":
                            assert phase.phase == "resolve"
                            assert one.request_id is not None
                            given.setdefault(one.request_id, []).append(one.new)

            assert {name: tuple(ids) for name, ids in given.items()} == tokens(session)

    def test_admit_gives_row_blocks_and_state(self) -> None:
        with make_session(block_size=4) as session:
            session.record_changes = True
            session.submit([[1, 2, 3], [4] * 9], max_tokens=5, ignore_eos=True)
            session.run(1)
            admit = session.history.diff(0, "admit")

        assert wrote(admit, "row") == {"request-0": (None, 0), "request-1": (None, 1)}
        assert wrote(admit, "state") == {"request-0": (None, "prefill"), "request-1": (None, "prefill")}
        assert wrote(admit, "blocks") == {"request-0": ((), (0,)), "request-1": ((), (1, 2, 3))}
        assert wrote(admit, "waiting") == {None: (2, 0)}
        assert wrote(admit, "free blocks") == {None: (24, 20)}
        assert read(admit, "waiting") == {None: 2}

    def test_prepare_advances_lengths_and_stages_over_what_is_stale(self) -> None:
        with make_session() as session:
            session.record_changes = True
            session.submit([1, 2, 3], max_tokens=9, ignore_eos=True)
            session.run(5)
            prepare = session.history.diff(4, Phase.PREPARE)

        assert wrote(prepare, "kv_len") == {"request-0": (6, 7)}
        assert next(one.note for one in prepare.wrote if one.name == "kv_len").startswith("counts tokens")
        staged = {one.name: one for one in prepare.wrote if one.name.startswith("staged")}
        assert set(staged) == {"staged[0].kv_len", "staged[0].positions"}  # steady decode: nothing else moves
        assert (staged["staged[0].kv_len"].old, staged["staged[0].kv_len"].new) == (5, 7)  # two forwards old
        assert staged["staged[0].positions"].new == (6,)
        assert all(one.old_is_stale for one in staged.values())

    def test_the_two_halves_take_turns(self) -> None:
        with make_session() as session:
            session.record_changes = True
            session.submit([1, 2, 3], max_tokens=9, ignore_eos=True)
            session.run(6)
            halves = [
                {one.name.split(".")[0] for one in past.phase("prepare").wrote if one.name.startswith("staged")}
                for past in session.history
            ]

        assert halves == [{"staged[0]"}, {"staged[1]"}] * 3

    def test_sample_and_forward_hand_over_the_pending_record(self) -> None:
        with make_session() as session:
            session.record_changes = True
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(3)
            sample, forward = session.history.diff(2, "sample"), session.history.diff(2, "forward")

        assert wrote(sample, "pending") == {None: ("forward of iteration 1", None)}
        assert read(sample, "pending row") == {"request-0": 0}
        assert [line.split(":")[0] for line in sample.enqueued] == ["sample", "fetch"]
        assert wrote(forward, "pending") == {None: (None, "forward of iteration 2")}
        assert read(forward, "staged[0].token_ids") == {"request-0": "the id sampled last, on the device"}
        assert [line.split(":")[0] for line in forward.enqueued] == ["publish", "forward"]

    def test_a_block_is_taken_when_a_row_grows_and_given_back_at_its_end(self) -> None:
        with make_session(block_size=4, num_blocks=8) as session:
            session.record_changes = True
            session.submit([1, 2, 3], max_tokens=4, ignore_eos=True)
            session.run()
            blocks = [
                (past.index, phase.phase, *wrote(phase, "blocks")["request-0"])
                for past in session.history
                for phase in past.phases
                if wrote(phase, "blocks")
            ]

        assert blocks == [
            (0, "admit", (), (0,)),
            (2, "prepare", (0,), (0, 1)),
            (4, "resolve", (0, 1), ()),
        ]

    def test_rows_that_move_keep_their_values_and_drop_nothing_of_their_own(self) -> None:
        with make_session() as session:
            session.record_changes = True
            session.submit([1], max_tokens=3, ignore_eos=True, request_id="short")
            session.submit([2], max_tokens=9, ignore_eos=True, request_id="long")
            session.run()
            resolves = [past.phase("resolve") for past in session.history if past.index]
            moving = next(one for one in resolves if wrote(one, "row"))

        assert wrote(moving, "row") == {"short": (0, None), "long": (1, 0)}
        assert wrote(moving, "finish reason") == {"short": (None, "length")}
        assert "kv_len" not in {one.name for one in moving.of("long")}
        assert moving.enqueued == ("compact: device columns follow the rows that moved",)

    def test_a_row_computed_for_nothing_is_stale(self) -> None:
        with make_session() as session:
            session.record_changes = True
            session.submit([1], max_tokens=30, ignore_eos=True, request_id="a")
            session.submit([2], max_tokens=30, ignore_eos=True, request_id="b")
            session.run(3)
            session.run_to("resolve")
            session.abort("a")
            session.run(2)
            resolve, sample = session.history.diff(3, "resolve"), session.history.diff(4, "sample")

        assert wrote(resolve, "pending row") == {"a": (0, -1), "b": (1, 0)}
        assert next((one.value, one.is_stale) for one in resolve.read if one.request_id == "a") == (None, True)
        assert [one.is_stale for one in sample.read if one.name == "pending row"] == [True, False]

    def test_an_output_is_written_by_emit(self) -> None:
        with make_session("legacy") as session:
            session.record_changes = True
            session.submit([1], max_tokens=2, ignore_eos=True, stream=True)
            session.run()

        assert [wrote(session.history.diff(index, "emit"), "output") for index in (0, 1)] == [
            {"request-0": (None, "progress")},
            {"request-0": (None, "last")},
        ]

    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_the_phases_of_an_iteration_add_up_to_its_table(self, mode: str) -> None:
        with recorded(mode, block_size=4) as session:
            for past in session.history:
                assert _applied(past.phases) == _ends(past.changed), past.index


_TABLE = ("row", "blocks", "kv_len")


def _applied(phases: tuple[PhaseChanges, ...]) -> dict[tuple[str | None, str], Any]:
    """The newest value of every table fact that some phase wrote, where it differs from the first old one."""
    first: dict[tuple[str | None, str], Any] = {}
    last: dict[tuple[str | None, str], Any] = {}
    for one in (one for phase in phases for one in phase.wrote if one.name in _TABLE):
        first.setdefault((one.request_id, one.name), one.old)
        last[one.request_id, one.name] = one.new
    left = {name for (name, fact), new in last.items() if fact == "row" and new is None}
    return {
        (name, fact): new
        for (name, fact), new in last.items()
        if new != first[name, fact] and not (name in left and fact == "kv_len")
    }


def _ends(changed: tuple[Change, ...]) -> dict[tuple[str | None, str], Any]:
    return {(one.request_id, one.name): one.new for one in changed if one.name in _TABLE}


class TestLookingBack:
    def test_an_iteration_has_its_table_before_and_after(self) -> None:
        with make_session() as session:
            session.record_changes = True
            session.submit([1, 2], max_tokens=5, ignore_eos=True)
            session.run(3)
            past = session.history[2]

        assert (past.before.request_ids, past.before.state(0)) == (("request-0",), "decode")
        assert [table.rows[0].output_tokens for table in (past.before, past.after)] == [1, 2]
        assert [table.rows[0].kv_len for table in (past.before, past.after)] == [3, 4]

    def test_stays_as_it_was_while_the_session_goes_on(self) -> None:
        with make_session() as session:
            session.record_changes = True
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            session.run(3)
            past = session.history[2]
            before = str(past)
            session.run()

            assert str(past) == before
            assert str(session.history[2]) == before

    def test_negative_numbers_count_from_the_newest(self) -> None:
        with recorded() as session:
            newest = session.iterations()[-1].iteration

            assert session.history[-1].index == newest
            assert session.history[-3].index == newest - 2
            assert len(session.history) == newest + 1

    def test_watched_values_stand_in_it(self) -> None:
        with make_session() as session:
            session.watch("free blocks", lambda s: s.engine.pool.num_free)
            session.watch("fails", lambda s: 1 // 0)
            session.submit([1, 2], max_tokens=5, ignore_eos=True)
            session.run(2)

            assert session.history[1].watched["free blocks"] == 23
            assert (
                repr(session.history[1].watched["fails"]) == "<ZeroDivisionError: integer division or modulo by zero>"
            )

    def test_without_changes_it_tells_how_to_have_them(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=3)
            session.run(1)

            assert "session.record_changes = True before it runs" in str(session.history[0])
            with pytest.raises(SessionError, match=r"session\.record_changes = True"):
                session.history.diff(0, "admit")

    def test_what_never_was_is_refused(self) -> None:
        with make_session() as session:
            session.record_changes = True
            session.submit([1], max_tokens=3, ignore_eos=True)
            with pytest.raises(SessionError, match="iteration 0 is not in the history; none is"):
                session.history[0]
            session.run(2)
            with pytest.raises(SessionError, match="iteration 7 is not in the history; 0 to 1 are"):
                session.history[7]
            with pytest.raises(SessionError, match="iteration 0 ran no sample; its phases are admit, prepare"):
                session.history.diff(0, "sample")
            with pytest.raises(SessionError, match="takes an iteration's number, got 'x'"):
                session.history["x"]  # type: ignore[index]

    def test_the_iteration_in_hand_can_be_looked_at(self) -> None:
        with make_session() as session:
            session.record_changes = True
            session.submit([1], max_tokens=3, ignore_eos=True)
            session.step_phase()

            past = session.history[0]

            assert past.record is None
            assert [one.phase for one in past.phases] == ["admit"]
            assert past.after.request_ids == ("request-0",)

    def test_a_reset_forgets_it(self) -> None:
        with recorded() as session:
            session.reset()

            assert len(session.history) == 0
            assert repr(session.history) == "<History: no iteration yet>"


class TestShowing:
    def test_text_names_phase_values_and_stale_ones_in_brackets(self) -> None:
        with make_session() as session:
            session.record_changes = True
            session.submit([1, 2, 3], max_tokens=9, ignore_eos=True)
            session.run(5)
            text = str(session.history.diff(4, "prepare"))

        assert text.startswith("iteration 4 overlap: prepare")
        assert "(5)" in text
        assert "staged[0].kv_len" in text

    def test_html_closes_every_tag_and_greys_what_is_stale(self) -> None:
        with make_session() as session:
            session.record_changes = True
            session.watch("a<b", lambda s: "<i>")
            session.submit([1, 2, 3], max_tokens=9, ignore_eos=True, request_id="<b>")
            session.run(5)
            page = session.history[4]._repr_html_()
            shown = Tags(page)

        assert shown.open == []
        assert "opacity:.5" in page
        assert "<b>: " not in page.replace("<b>iteration", "")
        assert Order.OVERLAP.label in shown.text

    def test_history_says_what_it_holds(self) -> None:
        with recorded() as session:
            last = session.iterations()[-1].iteration

            assert repr(session.history) == f"<History: iterations 0 to {last}, changes of {last + 1} recorded>"
