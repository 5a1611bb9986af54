"""Snapshots: what is seen at a border, and that it stays as it was."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, replace
from html.parser import HTMLParser

import pytest

from engine.phases import Order
from tests.unit.workbench.worlds import make_session
from tracing.records import Category
from workbench.session import Session
from workbench.snapshot import Snapshot


class Tags(HTMLParser):
    """Checks that every element that is opened is closed, and keeps the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def snapshots_of(session: Session, phases: int) -> list[Snapshot]:
    taken = []
    for _ in range(phases):
        session.step_phase()
        taken.append(session.snapshot())
    return taken


class TestAtEachBorder:
    def test_a_primer_admits_prepares_and_leaves_a_forward_pending(self) -> None:
        with make_session(overlap_admission=False) as session:
            session.submit([[1, 2, 3], [4] * 20], max_tokens=5)
            queued = session.snapshot()
            admitted, prepared, launched = snapshots_of(session, 3)

        assert (queued.iteration, queued.phase, queued.pending, queued.rows) == (None, None, None, ())
        assert [one.why for one in queued.queue] == ["the next admit takes it"] * 2
        assert (admitted.phase, admitted.next_phase, admitted.order) == ("admit", "prepare", Order.PRIMER.label)
        assert admitted.reason == "no forward is pending"
        assert [row.kv_len for row in admitted.rows] == [0, 0]
        assert [row.kv_len for row in prepared.rows] == [3, 20]
        assert launched.iteration is None
        assert launched.pending is not None
        assert launched.pending.iteration == 0
        assert (launched.pending.num_prefill, launched.pending.num_tokens) == (2, 23)
        assert all(row.in_pending for row in launched.rows)
        assert launched.no_overlap_because == "the pending forward holds prefill rows"

    def test_an_overlap_has_one_forward_sampled_and_the_next_one_launched(self) -> None:
        with make_session() as session:
            session.submit([[1, 2, 3]], max_tokens=9, ignore_eos=True)
            session.run(2)
            assert session.snapshot().no_overlap_because is None
            prepared, sampled, launched, resolved, emitted = snapshots_of(session, 5)

        assert prepared.pending is not None
        assert prepared.pending.iteration == 1
        assert sampled.pending is None
        assert sampled.consumed is not None
        assert sampled.consumed.iteration == 1
        assert launched.pending is not None
        assert (launched.pending.iteration, launched.next_phase) == (2, "resolve")
        assert [one.rows[0].output_tokens for one in (launched, resolved)] == [1, 2]
        assert resolved.rows[0].newest_token is not None
        assert (emitted.iteration, emitted.consumed, emitted.iterations_begun) == (None, None, 3)

    def test_legacy_leaves_nothing_pending(self) -> None:
        with make_session("legacy") as session:
            session.submit([[1, 2, 3]], max_tokens=9, ignore_eos=True)
            session.run(3)
            taken = session.snapshot()

        assert taken.pending is None
        assert taken.order == Order.LEGACY.label
        assert taken.phases == ("admit", "prepare", "forward", "sample", "resolve", "emit")


class TestQueue:
    def test_says_why_each_request_waits(self) -> None:
        with make_session(max_requests=1, clock="iterations") as session:
            session.submit([1], max_tokens=9, ignore_eos=True, request_id="runs")
            session.submit([[1], [2]], max_tokens=9)
            session.submit([3], max_tokens=9, arrival=40, request_id="later")
            session.run(3)

            why = {one.request_id: one.why for one in session.snapshot().queue}

        assert why == {
            "request-1": "no free row",
            "request-2": "behind request-1",
            "later": "arrives at 40 iterations",
        }

    def test_names_blocks_as_the_reason_where_they_are(self) -> None:
        with make_session(num_blocks=4) as session:
            session.submit([1] * 30, max_tokens=20, ignore_eos=True)
            session.submit([1] * 30, max_tokens=20)
            session.run(2)

            assert session.snapshot().queue[0].why.startswith("not enough blocks")

    def test_shows_an_abort_on_its_way(self) -> None:
        with make_session() as session:
            name = session.submit([1], max_tokens=3)
            session.abort(name)

            assert session.snapshot().queue[0].why.startswith("aborted")


class TestBlocks:
    def test_every_held_block_names_its_holder(self) -> None:
        with make_session() as session:
            session.submit([[1] * 20, [2] * 3], max_tokens=5)
            session.run(1)
            taken = session.snapshot()

        assert [len(row.blocks) for row in taken.rows] == [2, 1]
        for row in taken.rows:
            assert row.request_id is not None
            assert taken.blocks.held_by(row.request_id) == tuple(sorted(row.blocks))
        assert taken.blocks.num_free == 24 - 3

    def test_all_blocks_are_free_in_the_end(self) -> None:
        with make_session() as session:
            session.submit([[1] * 20, [2] * 3], max_tokens=5)
            session.run()

            assert session.snapshot().blocks.num_free == 24


class TestRow:
    def test_a_free_row_is_free_and_a_wrong_number_is_refused(self) -> None:
        with make_session() as session:
            assert session.row(3).state == "free"
            assert session.row(3).request_id is None
            assert not session.row(3).finished
            with pytest.raises(IndexError, match=r"row must be within \[0, 4\), got 4"):
                session.row(4)

    def test_tells_the_end_of_a_request_between_resolve_and_emit(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=3)

            states = {row.state for one in snapshots_of(session, 7) for row in one.rows}

        assert states == {"prefill", "decode"}


class TestSpans:
    def test_are_those_of_the_iteration_in_hand_or_the_last_one(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(4)
            between = session.snapshot()
            session.step_phase()
            inside = session.snapshot()

        phases = [span.name for span in between.spans if span.category is Category.PHASE]
        assert phases == list(between.phases)
        assert {span.iteration for span in between.spans} == {3}
        assert {span.iteration for span in inside.spans} == {4}


class TestAsAValue:
    def test_stays_as_it_was_while_the_engine_goes_on(self) -> None:
        with make_session() as session:
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            session.run(3)
            taken = session.snapshot()
            rows, counters = taken.rows, dict(taken.counters)
            text = str(taken)

            session.run()

            assert (taken.rows, taken.counters, str(taken)) == (rows, counters, text)
            with pytest.raises(FrozenInstanceError):
                taken.mode = "legacy"  # type: ignore[misc]

    def test_taking_one_changes_nothing(self) -> None:
        with make_session(clock="iterations") as looked, make_session(clock="iterations") as plain:
            for session in (looked, plain):
                session.submit([[1, 2], [3]], max_tokens=9)
            while looked.step_phase() is not None:
                looked.snapshot()
                repr(looked)
            plain.run()

            assert looked.outputs.keys() == plain.outputs.keys()
            assert looked.engine.counters.to_dict() == plain.engine.counters.to_dict()
            assert all(looked.outputs[name].token_ids == plain.outputs[name].token_ids for name in plain.outputs)


class TestShown:
    def test_text_and_html_tell_order_reason_rows_queue_and_blocks(self) -> None:
        with make_session(max_requests=1) as session:
            session.submit([[1, 2], [3]], max_tokens=9, ignore_eos=True)
            session.run(2)
            session.step_phase()
            taken = session.snapshot()

        page = Tags(taken._repr_html_())
        assert page.open == []
        for shown in (str(taken), page.text):
            for part in ("overlap", "decode rows only", "request-0", "no free row", "23 of 24 free", "oracle", "async"):
                assert part in shown, part
        assert "prepare ✓ → [sample] → forward" in str(taken)
        assert "✓ prepare▸ sampleforward" in page.text
        assert "✓ done · ▸ next · to come" in page.text
        assert repr(taken) == str(taken)

    def test_every_phase_is_done_between_iterations(self) -> None:
        with make_session() as session:
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            session.run(1)

            assert "admit ✓ → prepare ✓ → forward ✓" in str(session.snapshot())

    def test_the_newest_id_and_the_text_have_columns_of_their_own(self) -> None:
        with make_session() as session:
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            session.run(3)
            taken = session.snapshot()
        long = replace(taken.rows[0], newest_token=17, newest_text="a text that is longer than the column is wide")

        shown = str(replace(taken, rows=(long,)))

        assert re.search(r"newest  text +pending", shown)
        assert re.search(r"  17      …'nger than the column is wide'", shown)

    def test_a_block_names_its_row_in_grey(self) -> None:
        with make_session() as session:
            session.submit([[1, 2], [3] * 20], max_tokens=9, ignore_eos=True)
            session.run(2)
            page = session.snapshot()._repr_html_()

        cells = re.findall(r"title='block \d+: request-(\d)'[^>]*background:rgba\(128,128,128,[\d.]+\);'>(\d)<", page)
        assert cells == [("0", "0"), ("1", "1"), ("1", "1")]

    def test_a_request_cannot_write_html(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=3, request_id="<script>alert(1)</script>")
            session.run(1)

            page = Tags(session._repr_html_())

        assert "script" not in page.tags
        assert "<script>" in page.text

    def test_a_session_that_did_nothing_shows_that(self) -> None:
        with make_session() as session:
            page = Tags(session._repr_html_())

            assert "between iterations, 0 begun: 0 running, 0 waiting" in page.text
            assert "between iterations" in repr(session)

    def test_a_long_queue_is_cut_and_counted(self) -> None:
        with make_session() as session:
            session.submit([[1]] * 12, max_tokens=2)

            assert "and 4 more waiting" in str(session.snapshot())
