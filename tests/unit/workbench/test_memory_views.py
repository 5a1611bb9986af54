"""Waiting, pausing, eviction, prefix hits and the token budget, as snapshots, explanations and events tell them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.admission import Capacity
from engine.phases import Order
from engine.policy import never_overlap
from engine.request import Request
from tests.unit.workbench.worlds import make_session, spread_workload
from workbench.panel.requests_view import RequestRows
from workbench.panel.strip_view import strip_view
from workbench.session import Session
from workbench.snapshot import BudgetView

HEAD = list(range(12))
"""Three blocks of four tokens."""


def why(session: Session) -> dict[str, str]:
    return {one.request_id: one.why for one in session.snapshot().queue}


def pane_rows(session: Session) -> dict[str, Any]:
    return {row["request_id"]: row for row in RequestRows(session).view()["rows"]}


def tight(mode: str = "async", **options: Any) -> Session:
    """Two rows that need more blocks than there are: one pauses, goes on, and one goes back to the queue."""
    wanted: dict[str, Any] = {"num_blocks": 9, "capacity_policy": "max_utilization", "paused_blocks": 4}
    session = make_session(mode, **{"block_size": 4, **wanted, **options})
    session.submit([1] * 6, max_tokens=20, ignore_eos=True, request_id="old")
    session.submit([2] * 5, max_tokens=20, ignore_eos=True, request_id="young")
    return session


def run_until_event(session: Session, kind: str) -> None:
    session.run_until(lambda one: any(event.kind == kind for event in one.events))


class TestWaitingReasons:
    def test_name_the_tokens_that_are_left(self) -> None:
        with make_session(max_batch_tokens=96) as session:
            session.submit([[1] * 60, [2] * 50], max_tokens=4)

            assert why(session)["request-1"] == "the forward's token budget is used up: needs 50, 36 left"

    def test_count_blocks_under_each_capacity_policy(self) -> None:
        told = {}
        for policy in ("guaranteed_no_evict", "max_utilization"):
            with make_session(num_blocks=5, block_size=8, capacity_policy=policy) as session:
                session.submit([1] * 24, max_tokens=9, ignore_eos=True)
                session.run(1)
                session.submit([1] * 20, max_tokens=9, request_id="b")
                told[policy] = why(session)["b"]

        assert told == {
            "guaranteed_no_evict": "not enough blocks: needs 4, 1 not reserved",
            "max_utilization": "not enough blocks: needs 3, 1 free",
        }

    def test_of_a_prefix_hit_count_what_is_left_to_read(self) -> None:
        with make_session(
            prefix_caching=True, block_size=4, max_batch_tokens=20, max_sequence_length=20, num_blocks=40
        ) as session:
            session.submit([*HEAD, 1, 2], max_tokens=2, ignore_eos=True)
            session.run()
            session.submit([9] * 15, request_id="first", max_tokens=2)
            session.submit([*HEAD, 3, 4, 5, 6, 7, 8], request_id="second", max_tokens=2)

            assert why(session)["second"] == "the forward's token budget is used up: needs 6, 5 left"
            assert "it needs 6 tokens of the next forward and 5 of" in session.explain("second")

    def test_name_paused_rows(self) -> None:
        with tight() as session:
            run_until_event(session, "paused")
            session.submit([3], request_id="new", max_tokens=2)

            assert why(session)["new"] == "paused rows go on first"
            assert session.explain("new") == (
                "new waits: a row is paused for want of blocks and goes on first; nobody is admitted meanwhile."
            )

    def test_name_who_computes_a_prefix_before_and_behind_the_admit(self) -> None:
        with make_session(prefix_caching=True, block_size=4, num_blocks=40) as session:
            session.submit([[*HEAD, 1], [*HEAD, 2], [7]], max_tokens=5, ignore_eos=True)
            before = why(session)
            session.step_phase()
            behind, told = why(session), session.explain("request-1")
            admitted = [row.request_id for row in session.snapshot().rows]
            session.step()
            after = why(session)

        coming = {"request-1": "its prefix is being computed by request-0"}
        assert before == {
            "request-0": "the next admit takes it",
            **coming,
            "request-2": "the next admit takes it",  # it is not held up by one that is set aside
        }
        assert admitted == ["request-0", "request-2"]
        assert behind == coming
        assert after == {"request-1": "the next admit takes it, 12 of 13 tokens skipped"}
        assert told == (
            "request-1 waits: request-0 computes the block of its prefix that begins with token 1, in the same round; "
            "the admit after that skips what is there then."
        )

    def test_under_another_policy_are_each_ones_own(self) -> None:
        class Shortest:
            def choose(self, waiting: Any, capacity: Capacity) -> Request | None:
                raise AssertionError("a view asks no policy")

        with make_session(num_blocks=6) as session:
            session.engine.queue._policy = Shortest()
            session.submit([[1] * 90, [2]], max_tokens=5)
            session.submit([3], request_id="small", max_tokens=90)

            assert why(session) == {
                "request-0": "fits; the admission policy decides whose turn it is",
                "request-1": "fits; the admission policy decides whose turn it is",
                "small": "fits; the admission policy decides whose turn it is",
            }
            assert session.explain("small") == (
                "small waits: it fits once the admission policy chooses it, and the next iteration admits it."
            )

    def test_foretell_whom_each_admit_takes(self) -> None:
        """Of every request of which it is said that the next admit takes it, and of no other."""
        options: dict[str, Any] = {"prefix_caching": True, "chunked_prefill": True, "block_size": 4, "num_blocks": 60}
        with make_session("legacy", max_batch_tokens=16, clock="iterations", **options) as session:
            session.submit([[*HEAD, index] for index in range(4)], max_tokens=4, ignore_eos=True)
            session.submit_workload(spread_workload())
            num_told = 0
            while not session.finished:
                expected = [name for name, text in why(session).items() if text.startswith("the next admit takes")]
                session.step_phase()
                current = session.engine.in_hand
                if current is not None:
                    assert [request.request_id for request in current.admitted] == expected
                num_told += len(expected)
                session.step()

            assert num_told == len(session.submissions)


class TestGraphWaits:
    @pytest.fixture
    def gated(self) -> Iterator[Session]:
        sizes: dict[str, Any] = {"graphs": [1, 2, 4, 8, 16], "max_batch_tokens": 32, "max_sequence_length": 32}
        with make_session(graph_all_prefills=True, **sizes) as session:
            session.submit([[1, 2, 3], [4, 5]], max_tokens=9, ignore_eos=True)
            session.run(3)
            session.submit([7] * 15, max_tokens=4, ignore_eos=True, request_id="long")
            session.run(3)
            yield session

    def test_name_the_graph_and_count_iterations(self, gated: Session) -> None:
        (queued,) = gated.snapshot().queue

        assert queued.graph_wait_steps == 3
        assert queued.why == "graph wait, 3 iterations: needs 16 tokens, 1 prefill, 0 decode"
        assert gated.explain("long") == (
            "long waits: no captured forward holds it beside 2 decode and 0 prefill rows; alone it would run in the "
            "graph of 16 tokens, 1 prefill, 0 decode. It has waited 3 iterations and enters when enough of those rows "
            "have ended."
        )
        assert pane_rows(gated)["long"]["why"] == queued.why

    def test_end_with_the_admission(self, gated: Session) -> None:
        gated.run_until(lambda one: not one.snapshot().queue)

        assert gated.snapshot().rows[-1].request_id == "long"


class TestPausing:
    @pytest.mark.parametrize("options", [{}, {"overlap_admission": True}, {"mode": "legacy"}])
    def test_is_told_of_the_row_and_explained(self, options: dict[str, Any]) -> None:
        with tight(**options) as session:
            run_until_event(session, "paused")
            paused = next(row for row in session.snapshot().rows if row.state == "paused")
            name = paused.request_id or ""
            free = session.engine.pool.num_free

            blocks = f"{free} block{'s' if free != 1 else ''} {'is' if free == 1 else 'are'} free"
            assert session.explain(name) == (
                f"{name} has row 0 and is paused: its next token needs a block, {blocks}; it keeps its "
                f"{len(paused.blocks)} blocks and runs nothing until an admit finds it one, or sends it back to the "
                "queue."
            )
            assert (pane_rows(session)[name]["state"], pane_rows(session)[name]["why"]) == (
                "paused",
                f"its next token needs a block, {free} free",
            )
            assert f"{session.engine.counters.pauses} paused" in str(session.snapshot())

    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_and_eviction_are_events_as_the_recorders_instants_are(self, mode: str) -> None:
        with tight(mode) as session:
            session.run()
            events = [(one.kind, one.text.split(":")[0]) for one in session.events]
            instants = [
                ({"pause": "paused", "resume": "resumed", "evict": "evicted"}[span.name], span.args["request_id"])
                for span in session.spans()
                if span.name in ("pause", "resume", "evict")
            ]
            counters = session.engine.counters

        told = [(kind, name) for kind, names in events for name in names.split(", ") if kind in dict(instants)]
        assert told == instants
        assert (counters.pauses > 0, counters.evictions > 0) == (True, True)
        assert len(told) == counters.pauses + counters.resumes + counters.evictions

    def test_is_told_as_soon_as_the_admit_has_run(self) -> None:
        with tight("legacy") as session:
            while not session.engine.counters.pauses:
                if session.step_phase() is None:
                    pytest.fail("no row paused")
                if any(row.state == "paused" for row in session.snapshot().rows):
                    assert session.events[-1].kind == "paused"
                    break

    def test_shows_nothing_where_no_row_can_pause(self) -> None:
        with make_session() as session:
            session.submit([1] * 9, max_tokens=9, ignore_eos=True)
            session.run(3)

            assert "room " not in str(session.snapshot())
            assert "prefix" not in str(session.snapshot())
            assert "want of blocks" not in session.snapshot()._repr_html_()


class TestEviction:
    @pytest.fixture
    def evicted(self) -> Iterator[Session]:
        with tight() as session:
            run_until_event(session, "evicted")
            yield session

    def test_is_told_of_a_request_that_waits_again(self, evicted: Session) -> None:
        (queued,) = evicted.snapshot().queue
        index, name = evicted.engine.controller.next_index - 1, queued.request_id
        count = queued.output_tokens

        assert queued.evicted_in == index
        assert count > 0
        assert queued.why.endswith(f" · evicted in iteration {index}")
        assert evicted.explain(name).startswith(
            f"{name} waits again since iteration {index} took its row for want of blocks, with the {count} tokens it "
            "has to be computed anew: "
        )
        assert pane_rows(evicted)[name]["why"] == queued.why

    def test_is_told_while_it_is_computed_again_and_when_it_decodes(self, evicted: Session) -> None:
        (queued,) = evicted.snapshot().queue
        name, index = queued.request_id, queued.evicted_in
        evicted.run_until(lambda one: not one.snapshot().queue)
        row = next(row for row in evicted.snapshot().rows if row.request_id == name)

        assert (row.state, row.evicted_in, row.standing) == ("prefill", index, "prefill again")
        assert evicted.explain(name).startswith(
            f"{name} has row {row.row} and reads again its prompt of {row.prompt_tokens} tokens and the "
            f"{queued.output_tokens} tokens it has, as iteration {index} evicted it: its next token comes "
            "from the forward that iteration "
        )
        assert pane_rows(evicted)[name]["why"] == f"computed again, evicted in iteration {index}"
        evicted.run(2)
        assert f"decodes again, behind its eviction in iteration {index}: " in evicted.explain(name)
        assert pane_rows(evicted)[name]["why"] == ""

    def test_is_not_told_of_one_that_a_recovery_sent_back(self, evicted: Session) -> None:
        (queued,) = evicted.snapshot().queue
        evicted.run_until(lambda one: not one.snapshot().queue)
        evicted.suspend("recompute")
        evicted.resume()
        taken = next(one for one in evicted.snapshot().queue if one.request_id == queued.request_id)

        evicted.run_until(lambda one: queued.request_id in [row.request_id for row in one.snapshot().rows])
        row = next(row for row in evicted.snapshot().rows if row.request_id == queued.request_id)

        assert (taken.evicted_in, "evicted" in taken.why, row.evicted_in) == (None, False, None)

    def test_is_forgotten_by_a_reset(self, evicted: Session) -> None:
        evicted.reset()

        assert not evicted._desk.admissions._evicted


class TestPrefixHits:
    @pytest.fixture
    def session(self) -> Iterator[Session]:
        with make_session(
            prefix_caching=True, chunked_prefill=True, block_size=4, max_batch_tokens=8, num_blocks=60
        ) as made:
            made.submit([*HEAD, 1], max_tokens=2, ignore_eos=True)
            made.run()
            yield made

    def test_read_in_one_go_are_no_chunks(self, session: Session) -> None:
        """What was skipped was told as a chunk that had been read."""
        session.submit([*HEAD, 5, 6], max_tokens=4, ignore_eos=True, request_id="hit")
        session.run(1)
        (row,) = session.snapshot().rows

        assert (row.num_cached_tokens, row.progress) == (12, "")
        assert session.explain("hit") == (
            "hit has row 0 and reads its prompt of 14 tokens, of which the first 12 are cached and skipped: its first "
            f"token comes from the forward that iteration {session.engine.controller.next_index - 1} launched, once it "
            "is sampled."
        )
        assert (pane_rows(session)["hit"]["cached_tokens"], pane_rows(session)["hit"]["why"]) == (12, "")

    def test_before_chunks_are_told_apart_from_them(self, session: Session) -> None:
        session.submit([*HEAD, *[50] * 12], max_tokens=4, ignore_eos=True, request_id="hit")
        assert why(session)["hit"] == "the next admit takes it, 12 of 24 tokens skipped"
        assert session.explain("hit") == (
            "hit waits: a chunk of 8 of its 24 tokens fits, 12 tokens of its prefix are cached, and the next iteration "
            "admits it."
        )
        session.run(1)
        first = session.snapshot().rows[0].progress, session.explain("hit")
        session.run(1)

        assert first[0] == "20 of 24"
        assert first[1].startswith(
            "hit has row 0 and reads its prompt of 24 tokens, of which the first 12 are cached and skipped in chunks: "
        )
        assert "in chunks, the last from token 21 on: its first token" in session.explain("hit")

    def test_are_in_history_as_they_are_in_a_snapshot(self, session: Session) -> None:
        session.record_changes = True
        session.submit([*HEAD, 5, 6], max_tokens=4, ignore_eos=True, request_id="hit")
        session.run(2)

        assert "prefill 14 of 14" not in str(session.history[-2])

    def test_are_a_rate_in_the_snapshot(self, session: Session) -> None:
        session.submit([*HEAD, 5, 6], max_tokens=2, ignore_eos=True)
        session.run()
        prefix = session.snapshot().prefix
        assert prefix is not None

        assert (prefix.query_tokens, prefix.hit_tokens, prefix.hit_rate) == (27, 12, 12 / 27)
        assert "44 % of 27 tokens hit" in str(session.snapshot())
        assert "44 % of 27 tokens hit" in session.snapshot()._repr_html_()

    def test_have_a_column_only_where_prefixes_are_cached(self, session: Session) -> None:
        session.submit([*HEAD, 5, 6], max_tokens=4, ignore_eos=True)
        session.run(1)
        with make_session() as plain:
            plain.submit([1], max_tokens=4)
            plain.run(1)

            assert "skipped" in str(session.snapshot())
            assert "skipped" not in str(plain.snapshot())
            assert pane_rows(plain)["request-0"]["cached_tokens"] is None

    def test_of_a_request_that_came_back_are_those_of_its_last_admission(self) -> None:
        with tight(prefix_caching=True, num_blocks=9) as session:
            run_until_event(session, "evicted")
            name = session.snapshot().queue[0].request_id
            session.run_until(lambda one: not one.snapshot().queue)
            row = next(row for row in session.snapshot().rows if row.request_id == name)

            request = session._desk.book.request(name)
            assert request is not None
            assert request.num_cached_tokens == 0
            assert row.num_cached_tokens == session.engine.table.chunk_done[row.row]
            assert row.progress == ""


class TestOverlappedAdmission:
    def waiting(self, **options: Any) -> str:
        with make_session(overlap_admission=True, **options) as session:
            session.submit([1], max_tokens=20, ignore_eos=True)
            session.run(3)
            session.submit([2], request_id="b")
            told = session.explain("b")
            session.run(1)
            orders = [record.order for record in session.iterations()]
            assert (orders[-1] == Order.OVERLAP_ADMIT.label) == ("while the forward" in told)
            return told

    def test_admits_beside_the_pending_forward(self) -> None:
        assert self.waiting() == (
            "b waits: it fits, and the next iteration admits it while the forward of iteration 2 runs."
        )

    def test_tells_a_policy_that_refuses(self) -> None:
        assert self.waiting(policy=never_overlap) == (
            "b waits: it fits, and the order policy refuses every overlap: the next iteration samples the forward of "
            "iteration 2 and then admits it."
        )

    def test_of_a_mode_that_is_about_to_change_waits_for_the_drain(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=20, ignore_eos=True)
            session.run(3)
            session.submit([2], request_id="b")
            session.mode = "legacy"

            assert session.explain("b") == (
                "b waits: it fits, and the next iteration drains the forward of iteration 2 for the switch to legacy: "
                "the one behind it admits it."
            )

    def test_of_chunks_tells_at_each_border_which_forward_reads_what(self) -> None:
        """The pending forward holds the chunk before, and was said to read the one just placed."""
        with make_session(overlap_admission=True, chunked_prefill=True, max_batch_tokens=8, max_requests=3) as session:
            session.submit(list(range(14)), max_tokens=4, ignore_eos=True, request_id="long")
            session.run(1)
            session.submit([1, 2, 3], max_tokens=4, ignore_eos=True, request_id="behind")
            told = []
            for _ in range(6):
                session.step_phase()
                told.append(session.explain("long").split("from token 9 on: its first token ")[-1])

        assert told == [
            "comes from the next forward, which holds it.",  # admit
            "comes from the forward that is prepared and not launched yet.",
            "comes from the forward that is prepared and not launched yet.",  # sample: of the chunk before
            "comes from the forward that iteration 1 launched, once it is sampled.",
            "comes from the forward that iteration 1 launched, once it is sampled.",  # resolve
            "comes from the forward that iteration 1 launched, once it is sampled.",
        ]


class TestBudget:
    def test_is_of_the_prepared_forward_and_then_of_the_launched_one(self) -> None:
        with make_session(max_batch_tokens=96) as session:
            assert session.snapshot().budget is None
            session.submit([[1, 2, 3], [4] * 9], max_tokens=4, ignore_eos=True)
            session.step_phase()
            session.step_phase()
            prepared = session.snapshot().budget
            session.step_phase()
            launched = session.snapshot().budget
            session.run(1)
            decoding = session.snapshot().budget

        parts: dict[str, Any] = {
            "limit": 96,
            "prompt": 12,
            "num_prompts": 2,
            "decode": 0,
            "num_decode": 0,
            "padding": 0,
        }
        assert prepared == BudgetView(iteration=0, is_launched=False, **parts)
        assert launched == BudgetView(iteration=0, is_launched=True, **parts)
        assert decoding is not None
        assert (decoding.decode, decoding.prompt, decoding.unused) == (2, 0, 94)

    def test_counts_decode_chunk_and_padding(self) -> None:
        sizes: dict[str, Any] = {"graphs": [1, 2, 4, 8, 16], "max_batch_tokens": 24, "max_sequence_length": 24}
        with make_session(**sizes) as session:
            session.submit([1], max_tokens=9, ignore_eos=True)
            session.run(2)
            session.submit([3] * 10, max_tokens=4, ignore_eos=True)
            session.run(1)
            text, (cell,) = str(session.snapshot()), strip_view(session)["forwards"]

        assert "1 decode + 10 prompt + 5 padding of 24 tokens" in text
        assert cell["budget"] == {"limit": 24, "decode": 1, "prompt": 10, "padding": 5}

    def test_of_legacy_is_that_of_the_last_forward(self) -> None:
        with make_session("legacy") as session:
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            session.run(1)
            (cell,) = strip_view(session)["forwards"]

        assert (cell["role"], cell["iteration"], cell["budget"]["prompt"]) == ("last", 0, 2)

    def test_of_a_prepared_forward_is_in_the_strip(self) -> None:
        with make_session() as session:
            session.submit([1, 2], max_tokens=9, ignore_eos=True)
            session.run(2)
            session.run_to("forward")
            cells = {cell["role"]: cell["budget"]["decode"] for cell in strip_view(session)["forwards"]}

        assert cells == {"sampled": 1, "prepared": 1}


class TestLookingChangesNothing:
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_in_a_run_that_pauses_evicts_and_hits(self, mode: str) -> None:
        options: dict[str, Any] = {"prefix_caching": True, "overlap_admission": mode == "async", "num_blocks": 11}
        with tight(mode, **options) as plain, tight(mode, **options) as looked:
            for session in (plain, looked):
                session.submit([[1] * 6, [1] * 9], max_tokens=9, ignore_eos=True)
            plain.run()
            while looked.step_phase() is not None:
                looked.snapshot()
                pane_rows(looked)
                for submission in looked.submissions:
                    assert looked.explain(submission.request_id).endswith(".")

            assert looked.engine.counters.to_dict() == plain.engine.counters.to_dict()
            assert plain.engine.counters.evictions > 0
            assert {name: one.token_ids for name, one in looked.outputs.items()} == {
                name: one.token_ids for name, one in plain.outputs.items()
            }
