"""A prompt that is read in chunks, as each view shows it: progress, explanations, and what phases read and wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.phases import Phase
from tests.unit.workbench.worlds import make_session
from workbench.changes import PhaseChanges
from workbench.panel.requests_view import RequestRows
from workbench.session import Session


def chunk_session(mode: str = "async", **options: Any) -> Session:
    """One row decodes and one prompt of 20 waits, of which 7 tokens fit beside it; then another request."""
    session = make_session(mode, **{"chunked_prefill": True, "max_batch_tokens": 8, "max_requests": 3, **options})
    session.submit([1, 2], max_tokens=40, ignore_eos=True, request_id="decoding")
    session.run(2)
    session.submit(list(range(20)), max_tokens=4, ignore_eos=True, request_id="long")
    session.submit([5, 6, 7], max_tokens=4, ignore_eos=True, request_id="behind")
    return session


def standing(session: Session) -> dict[str, str]:
    return {row.request_id or "": row.standing for row in session.snapshot().rows}


class TestProgress:
    def test_goes_up_chunk_by_chunk_and_ends_with_the_prompt(self) -> None:
        with chunk_session() as session:
            seen = []
            for _ in range(4):
                session.run(1)
                seen.append(standing(session)["long"])

        assert seen == ["prefill 7 of 20", "prefill 14 of 20", "prefill 20 of 20", "decode"]

    def test_is_not_told_of_a_prompt_read_in_one_go(self) -> None:
        with chunk_session() as session:
            session.run(4)
            session.submit([1, 2, 3], request_id="short")
            session.run(1)

            assert session.snapshot().rows[-1].progress == ""

    def test_is_in_the_text_the_html_and_the_panel(self) -> None:
        with chunk_session() as session:
            session.run(2)
            snapshot = session.snapshot()
            rows = {row["request_id"]: row for row in RequestRows(session).view()["rows"]}

            assert "prefill 14 of 20" in str(snapshot)
            assert "prefill 14 of 20" in snapshot._repr_html_()
            assert (rows["long"]["state"], rows["long"]["why"]) == ("prefill", "prefill 14 of 20")
            assert rows["decoding"]["why"] == ""

    def test_gives_way_to_an_abort(self) -> None:
        with chunk_session() as session:
            session.run(1)
            session.abort("long")
            rows = {row["request_id"]: row for row in RequestRows(session).view()["rows"]}

            assert rows["long"]["why"] == "aborted; the next admit or resolve ends it"


class TestExplain:
    def test_says_where_a_chunk_is_at_each_border(self) -> None:
        with chunk_session(overlap_admission=False) as session:
            session.run(1)
            told = [session.explain("long")]
            for _ in range(5):
                session.step_phase()
                told.append(session.explain("long"))

        begin = "long has row 1 and reads its prompt of 20 tokens in chunks: "
        end = ", and the next admit goes on with it before all else."
        launched = "the forward that iteration 2 launched reads up to token 7"
        read = "it is read up to token 7, of which nothing is sampled"
        assert told == [
            f"{begin}{launched}{end}",
            f"{begin}{read}{end}",  # sample
            f"{begin}{read}{end}",  # resolve
            f"{begin}the next forward reads up to token 14{end}",  # admit
            f"{begin}the forward that is prepared and not launched yet reads up to token 14{end}",
            f"{begin}the forward that iteration 3 launched reads up to token 14{end}",
        ]

    def test_says_of_the_last_chunk_where_the_first_token_comes_from(self) -> None:
        with chunk_session() as session:
            session.run(3)

            assert session.explain("long") == (
                "long has row 1 and reads its prompt of 20 tokens in chunks, the last from token 15 on: its first "
                "token comes from the forward that iteration 4 launched, once it is sampled."
            )

    def test_says_how_much_of_a_waiting_prompt_fits(self) -> None:
        with chunk_session(overlap_admission=False) as session:
            session.step_phase()

            assert session.explain("long") == (
                "long waits: a chunk of 7 of its 20 tokens fits, and the admit of iteration 2 takes it."
            )
            assert session.explain("behind") == (
                "behind waits: 0 of max_batch_tokens=8 are left in the next forward, too few for a chunk of its 3; a "
                "later admit has room."
            )

    def test_says_whose_chunks_a_request_waits_behind(self) -> None:
        with chunk_session() as session:
            session.run(1)

            assert session.explain("behind") == (
                "behind waits: the prompt of long is read in chunks, 7 of 20 tokens, and goes before it."
            )

    def test_without_chunking_counts_the_whole_prompt(self) -> None:
        with make_session(max_batch_tokens=24, max_sequence_length=24) as session:
            session.submit([1] * 20, request_id="first")
            session.submit([2] * 9, request_id="second")

            assert session.explain("second") == (
                "second waits: it needs 9 tokens of the next forward and 4 of max_batch_tokens=24 are left; the admit "
                "after that has room."
            )


class TestChanges:
    @pytest.fixture
    def past(self) -> Iterator[Session]:
        with chunk_session() as session:
            session.record_changes = True
            session.run(5)
            yield session

    def test_of_admit_are_the_next_chunk(self, past: Session) -> None:
        wrote = of(past.history.diff(3, Phase.ADMIT.value), "long")
        assert {name: wrote[name] for name in ("chunk_done", "chunk_end")} == {
            "chunk_done": (0, 7),
            "chunk_end": (7, 14),
        }

    def test_of_prepare_are_the_chunks_own_tokens_and_positions(self, past: Session) -> None:
        changes = past.history.diff(3, Phase.PREPARE.value)
        assert ("chunk_done", 7) in [(one.name, one.value) for one in changes.read if one.request_id == "long"]
        staged = {name.split(".")[-1]: new for name, (_, new) in of(changes, "long").items() if "." in name}
        assert staged["positions"] == tuple(range(7, 14))
        assert of(changes, "long")["kv_len"] == (7, 14)

    def test_of_sample_and_resolve_leave_a_partial_chunk_out(self, past: Session) -> None:
        """It was listed as sampled, and its id as given to nobody."""
        sample = past.history.diff(3, Phase.SAMPLE.value)
        notes = {one.request_id: one.note for one in sample.read if one.name == "pending row"}
        assert notes == {
            "decoding": "",
            "long": "a chunk, and not its prompt's last: nothing is sampled of it",
        }
        assert "ids of 1 rows, on their way" in [one.new for one in sample.wrote]
        resolve = past.history.diff(3, Phase.RESOLVE.value)
        assert [one.request_id for one in resolve.read if one.name == "sampled id"] == ["decoding"]

    def test_of_the_tables_before_and_after_show_progress(self, past: Session) -> None:
        text = str(past.history[3])
        assert "prefill 7 of 20" in text
        assert "prefill 14 of 20" in text


def of(changes: PhaseChanges, request_id: str) -> dict[str, tuple[Any, Any]]:
    return {one.name: (one.old, one.new) for one in changes.of(request_id)}
