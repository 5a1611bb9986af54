"""What there is to see of drafts, recurrent states and experts; the front-end's side is in tests/ui."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models.loader import load_model
from tests.changed_shapes import TWO_LAYERS, changed_shape
from tracing.analysis import draft_table
from workbench.cli import main
from workbench.figures import make_figure
from workbench.panel.blocks_view import BlockMap
from workbench.panel.experts_view import experts_view
from workbench.panel.panel import Panel
from workbench.panel.requests_view import RequestRows
from workbench.saved_runs import load_run
from workbench.session import Session, SessionError
from workbench.states import bytes_text, states_text

from .worlds import make_drafting_session, make_session, spread_workload

MOE: dict[str, Any] = {"max_requests": 4, "max_batch_tokens": 64, "max_sequence_length": 64, "num_blocks": 16}


def make_hybrid(**options: Any) -> Session:
    defaults = {"device": "inline", "max_requests": 4, "max_batch_tokens": 128, "max_sequence_length": 96}
    defaults |= {"num_blocks": 40, "block_size": 8, "prefix_caching": True, "progress": False}
    return Session("oracle-hybrid", **{**defaults, **options})


class TestAcceptance:
    def test_by_place_is_what_the_engine_counted(self) -> None:
        with make_drafting_session(speculative_tokens=3) as session:
            session.submit_workload(spread_workload())
            session.run()
            counters, drafts = session.engine.counters, session.summary().drafts
            by_request = {one.request_id: one for one in session.requests()}
            known = {one.request_id: one for one in session._desk.book.known_requests()}
        assert drafts is not None
        assert dict(enumerate(drafts.proposed)) == counters.drafts_proposed
        assert dict(enumerate(drafts.accepted)) == counters.drafts_accepted
        assert drafts.acceptance_rate == counters.drafts_accepted.total() / counters.drafts_proposed.total()
        for name, request in known.items():
            assert sum(by_request[name].drafts_proposed) == request.num_drafted
            assert sum(by_request[name].drafts_accepted) == request.num_accepted

    def test_tokens_a_row_times_rows_are_the_tokens_given_by_verified_rows(self) -> None:
        with make_drafting_session() as session:
            session.submit([5, 6, 7], max_tokens=20, ignore_eos=True)
            session.run()
            drafts = session.summary().drafts
            (request,) = session.requests()
        assert drafts is not None
        given = drafts.tokens_per_row * drafts.verified_rows
        assert request.num_output_tokens - 1 <= given <= request.num_output_tokens - 1 + 2  # drawn behind its end

    def test_nothing_is_told_where_nothing_was_drafted(self) -> None:
        with make_session() as session:
            session.submit([5, 6, 7], max_tokens=4, ignore_eos=True)
            session.run()
            assert session.summary().drafts is None
            assert "draft" not in str(session.summary())
            assert "drafts" not in str(session.snapshot())

    def test_is_a_line_of_the_snapshot(self) -> None:
        with make_drafting_session() as session:
            session.submit([5, 6, 7], max_tokens=20, ignore_eos=True)
            session.run(6)
            counters, text = session.engine.counters, str(session.snapshot())
        total = counters.drafts_proposed.total()
        assert f"drafts  {counters.drafts_accepted.total()} of {total} accepted (draft 1 " in text

    def test_stands_in_the_json_of_a_run(self, capsys: pytest.CaptureFixture[str]) -> None:
        call = "run --model oracle-mtp --speculative-tokens 2 --device cpu --num-blocks 64 --json "
        assert main((call + "--workload fixed:requests=2,input=6,output=8").split()) == 0
        told = json.loads(capsys.readouterr().out)
        assert len(told["metrics"]["drafts"]["acceptance"]) == 2
        assert all(len(one["drafts"]["proposed"]) == 2 for one in told["requests"])

    def test_is_drawn_by_place(self) -> None:
        with make_drafting_session() as session:
            session.submit([5, 6, 7], max_tokens=20, ignore_eos=True)
            session.run()
            figure, table = make_figure("drafts", session), draft_table(session.requests())
        accepted, rejected = figure.chart.axes[0].series
        assert table is not None
        assert accepted.x == ("draft 1", "draft 2")
        assert accepted.y == pytest.approx([100 * share for share in table.acceptance])
        assert [a + r for a, r in zip(accepted.y, rejected.y, strict=True)] == pytest.approx([100, 100])

    def test_without_drafts_the_figure_says_what_brings_some(self) -> None:
        with make_session() as session:
            session.submit([5, 6, 7], max_tokens=4, ignore_eos=True)
            session.run()
            assert "speculative_tokens=1 or more" in make_figure("drafts", session).chart.hint


class TestTokens:
    def test_accepted_drafts_are_marked_and_rejected_ones_told(self) -> None:
        with make_drafting_session() as session:
            session.submit([5, 6, 7], max_tokens=24, ignore_eos=True)
            pane, places = RequestRows(session), []
            before = 0
            for _ in range(9):
                session.step()
                (row,) = pane.view()["rows"]
                gained = row["output_tokens"] - before
                before = row["output_tokens"]
                if not gained or not row["drafts"]:
                    continue
                newest = [at for at in row["accepted"] if at >= len(row["tokens"]) - gained]
                assert row["num_new"] == gained
                assert newest == list(range(len(row["tokens"]) - gained, len(row["tokens"]) - 1))
                told = [one for one in row["rejected"] if one["at"] == len(row["tokens"]) - 1]
                assert [(one["place"], len(one["tokens"])) for one in told] == [(gained, 3 - gained)] * (gained < 3)
                places.append(gained)
            assert set(places) >= {1, 2} or 3 in places

    def test_of_an_ended_request_no_token_behind_its_end_is_marked(self) -> None:
        cut = 0
        for max_tokens in range(2, 12):
            with make_drafting_session() as session:
                session.submit([5, 6, 7], max_tokens=max_tokens, ignore_eos=True)
                pane, before = RequestRows(session), 0
                while session.engine.has_unfinished():
                    session.step()
                    (row,) = pane.view()["rows"]
                    if row["output_tokens"] > before:
                        assert row["num_new"] == row["output_tokens"] - before
                        before = row["output_tokens"]
                assert len(row["tokens"]) == row["output_tokens"] == max_tokens
                assert all(at < max_tokens for at in row["accepted"])
                cut += session.engine.counters.sampled_rows > max_tokens
        assert cut > 0

    def test_a_verification_of_prompts_alone_leaves_no_mark_on_the_timeline(self) -> None:
        with make_drafting_session() as session:
            session.submit([5, 6, 7], max_tokens=20, ignore_eos=True)
            session.run()
            marks = [one.args for one in session.engine.recorder.spans() if one.name == "rewind" and one.args]
            counters = session.engine.counters
        assert all(mark["drafts"] == 2 for mark in marks)
        assert sum(mark["drafts"] for mark in marks) == counters.drafts_proposed.total()
        assert sum(mark["accepted"] for mark in marks) == counters.drafts_accepted.total()

    def test_without_drafting_nothing_is_marked(self) -> None:
        with make_session() as session:
            session.submit([5, 6, 7], max_tokens=4, ignore_eos=True)
            session.run()
            (row,) = RequestRows(session).view()["rows"]
        assert (row["accepted"], row["rejected"], row["drafts"]) == ([], [], "")


class TestStates:
    def test_slots_are_shown_with_their_requests_and_free_ones(self) -> None:
        with make_hybrid() as session:
            session.submit([[1] * 9, [2] * 9], max_tokens=9, ignore_eos=True)
            session.run(2)
            states, cell = session.snapshot().states, BlockMap(session).view()["states"]
        assert states is not None
        assert cell is not None
        assert states.num_live == 2
        assert sorted(states.slots) == ["", "", "request-0", "request-1"]
        assert sum(slot["hue"] >= 0 for slot in cell["slots"]) == 2
        assert states_text(states).startswith("2 of 4 slots live, 8 B a state")

    def test_a_row_that_drafts_has_a_state_behind_every_draft(self) -> None:
        with make_drafting_session(state_rewind="stored") as session:
            states = session.snapshot().states
        assert states is not None
        assert states.states_per_slot == 3
        assert states.snapshots is None

    def test_a_row_whose_drafts_are_replayed_has_one_state_and_tokens_beside_it(self) -> None:
        with make_drafting_session(state_rewind="replayed") as session:
            states, cell = session.snapshot().states, BlockMap(session).view()["states"]
        assert states is not None
        assert cell is not None
        assert (states.states_per_slot, states.replayed_tokens, states.state_bytes) == (1, 3, 8 + 3 * 8)
        assert "32 B a state with inputs of 3 tokens to replay" in states_text(states)
        assert "inputs of 3 tokens" in cell["text"]

    def test_a_snapshot_stands_with_its_block_its_prefix_and_its_holders(self) -> None:
        with make_hybrid() as session:
            session.submit([3] * 20, request_id="first", max_tokens=6, ignore_eos=True)
            session.run(2)
            states = session.snapshot().states
            assert states is not None
            assert states.snapshots is not None
            (kept,) = states.snapshots.kept
            row = session.row(0)
            assert (kept.num_tokens, kept.begins, kept.holders) == (16, "first", ("first",))
            assert kept.block == row.blocks[1]
            session.run()
            ended = session.snapshot().states
            assert ended is not None
            assert ended.snapshots is not None
            assert [(one.block, one.holders, one.begins) for one in ended.snapshots.kept] == [(kept.block, (), "first")]
            (cell,) = BlockMap(session).view()["states"]["snapshots"]  # type: ignore[index, misc]
        assert cell["hue"] == -1
        assert cell["text"] == "the first 16 tokens of first, cached: may give way"

    def test_what_is_kept_and_free_is_the_budget(self) -> None:
        with make_hybrid(max_requests=2) as session:
            for number in range(5):
                session.submit([number] * 10, max_tokens=3, ignore_eos=True)
            session.run()
            states = session.snapshot().states
        assert states is not None
        assert states.snapshots is not None
        kept = states.snapshots
        assert len(kept.kept) + kept.num_free == kept.num_slots == 2
        assert kept.num_evicted == 3

    def test_a_model_without_recurrent_layers_has_none(self) -> None:
        with make_session() as session:
            assert session.snapshot().states is None
            assert BlockMap(session).view()["states"] is None

    @pytest.mark.parametrize(("count", "text"), [(8, "8 B"), (2048, "2 KiB"), (3 << 19, "1.5 MiB"), (1 << 30, "1 GiB")])
    def test_sizes_have_a_unit_that_suits_them(self, count: int, text: str) -> None:
        assert bytes_text(count) == text


def launched(session: Session) -> list[Any]:
    return [one.launched for one in session.iterations() if one.launched is not None]


@pytest.fixture
def moe() -> Session:
    model = load_model("shape:tiny-moe", attention="torch", dtype=torch.float32, device=torch.device("cpu"))
    with Session(model, device="cpu", expert_load=True, progress=False, **MOE) as session:
        yield session


class TestExperts:
    def test_every_token_of_every_forward_goes_to_so_many_experts_a_layer(self, moe: Session) -> None:
        moe.submit([1, 2, 3, 4, 5], max_tokens=4, ignore_eos=True)
        moe.run()
        moe.engine.device.synchronize()
        computed = sum(one.num_tokens for one in launched(moe))
        load = moe.expert_load()
        assert len(set(load.counts.sum(axis=1).tolist())) == 1
        assert load.counts[0].sum() % computed == 0
        assert load.counts[0].sum() > 0
        assert load.shares.mean(axis=1) == pytest.approx([1.0] * len(load.layers))
        assert load.imbalances == pytest.approx(load.counts.max(axis=1) / load.counts.mean(axis=1))
        assert "imbalance" in load._repr_html_()

    def test_counts_of_captured_forwards_too_and_padding_of_none(self) -> None:
        model = load_model("shape:tiny-moe", attention="torch", dtype=torch.float32, device=torch.device("cpu"))
        found = []
        for graphs in (None, [4]):
            with Session(model, device="cpu", expert_load=True, progress=False, graphs=graphs, **MOE) as session:
                assert not session.expert_load().counts.any()
                session.submit([[1, 2, 3], [4, 5]], max_tokens=6, temperature=0, ignore_eos=True)
                session.run()
                session.engine.device.synchronize()
                found.append(session.expert_load().counts)
                assert bool(session.engine.counters.graph_hits) == (graphs is not None)
        assert np.array_equal(found[0], found[1])

    def test_of_draft_heads_are_not_among_the_model_s(self) -> None:
        """They have layers of their own, run over other tokens, and a trace leaves out what of them nobody reads."""
        layers = {"hybrid_override_pattern": "M*E", "num_hidden_layers": 3, "mtp_hybrid_override_pattern": "*E"}
        model = changed_shape("tiny-hybrid", torch.float64, **{**TWO_LAYERS, **layers}, vocab_size=8)
        assert model.model.num_draft_heads == 2  # type: ignore[attr-defined]
        found = []
        for graphs in (None, [4]):
            more = {**MOE, "graphs": graphs, "graph_non_decode": False}
            with Session(model, device="inline", expert_load=True, speculative_tokens=1, progress=False, **more) as one:
                one.submit([[1, 2, 3], [4, 5]], max_tokens=6, temperature=0, ignore_eos=True)
                one.run()
                load, computed = one.expert_load(), sum(each.num_tokens for each in launched(one))
                assert bool(one.engine.counters.graph_hits) == (graphs is not None)
            assert load.layers == (2,)
            assert load.counts.sum() == 2 * computed  # of eight, two are chosen
            found.append(load.counts)
        assert np.array_equal(found[0], found[1])

    def test_a_reset_counts_from_zero(self, moe: Session) -> None:
        moe.submit([1, 2, 3], max_tokens=2, ignore_eos=True)
        moe.run()
        moe.reset()
        assert not moe.expert_load().counts.any()
        assert "run the session" in str(moe.expert_load())

    def test_who_did_not_ask_is_told_what_to_do(self) -> None:
        with Session("shape:tiny-moe", device="inline", progress=False, **MOE) as session:
            with pytest.raises(SessionError, match="expert_load=True"):
                session.expert_load()
            pane = experts_view(session)
            assert pane["counts"] == ""
            assert "expert_load=True" in pane["hint"]

    def test_a_model_without_experts_cannot_be_asked_for_any(self) -> None:
        with pytest.raises(SessionError, match="oracle has no experts"):
            make_session(expert_load=True)

    def test_the_pane_holds_the_counts(self, moe: Session) -> None:
        moe.submit([1, 2, 3, 4, 5], max_tokens=4, ignore_eos=True)
        moe.run()
        moe.engine.device.synchronize()
        pane, load = experts_view(moe), moe.expert_load()
        counts = np.frombuffer(b64decode(pane["counts"]), dtype="<u8").reshape(len(pane["layers"]), pane["num_experts"])
        assert np.array_equal(counts, load.counts)
        assert f"layer {load.layers[int(np.argmax(load.imbalances))]} is the most uneven" in pane["summary"]

    def test_only_a_model_with_experts_has_the_tab(self, moe: Session) -> None:
        with make_session() as plain:
            assert "experts" not in Panel(plain).panes.tabs
        panel = Panel(moe)
        panel.panes.tab = "experts"
        assert panel.panes.experts["hint"].startswith("No token")
        panel.close()


def test_a_saved_run_keeps_its_drafts(tmp_path: Path) -> None:
    with make_drafting_session() as session:
        session.submit([5, 6, 7], max_tokens=9, ignore_eos=True)
        session.run()
        session.save(tmp_path / "run")
        assert load_run(tmp_path / "run").summary.drafts == session.summary().drafts
