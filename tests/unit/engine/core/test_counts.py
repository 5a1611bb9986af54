"""Exact numbers of one schedule: 128 requests of 128 tokens, arriving 32 a step."""

from __future__ import annotations

from typing import Any

import pytest

from engine.counters import Counters
from engine.request import SamplingParams
from tests.oracle_world import oracle_engine

PROMPT_LEN = 5
NUM_TOKENS = 128


def run_waves(**options: Any) -> tuple[Counters, list[tuple[int, ...]]]:
    """Groups A, B, C, D of 32 are handed in before iterations 0, 1, 2, 3. Returns counters and ids in order."""
    options.setdefault("overlap_admission", False)  # as upstream, whose numbers these are
    engine = oracle_engine(
        max_requests=128,
        num_blocks=128 * 34,
        max_batch_tokens=512,
        max_sequence_length=NUM_TOKENS + PROMPT_LEN,
        debug_invariants=False,
        **options,
    )
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, seed=0, ignore_eos=True, detokenize=False)
    ids: dict[str, tuple[int, ...]] = {}
    for wave in range(4):
        for k in range(32):
            engine.add_request([wave, k, 7, 8, 9], params, request_id=f"{wave}-{k}")
        ids.update({output.request_id: output.token_ids for output in engine.step()})
    while engine.has_unfinished():
        ids.update({output.request_id: output.token_ids for output in engine.step()})
    return engine.counters, [ids[f"{wave}-{k}"] for wave in range(4) for k in range(32)]


@pytest.fixture(scope="module")
def lean() -> tuple[Counters, list[tuple[int, ...]]]:
    return run_waves(mode="async")


@pytest.fixture(scope="module")
def beside() -> tuple[Counters, list[tuple[int, ...]]]:
    return run_waves(mode="async", overlap_admission=True)


@pytest.fixture(scope="module")
def wasteful() -> tuple[Counters, list[tuple[int, ...]]]:
    return run_waves(mode="async", launch_ending_rows=True)


@pytest.fixture(scope="module")
def legacy() -> tuple[Counters, list[tuple[int, ...]]]:
    return run_waves(mode="legacy")


class TestWaves:
    def test_take_131_sampled_iterations_and_one_primer(self, lean: tuple[Counters, Any]) -> None:
        """Iteration 0 launches A's prefill and samples nothing: the primer.

        A's token k is sampled in iteration k, since each iteration samples the forward before it. D arrives before
        iteration 3, which launches its prefill, so that D's token k is sampled in iteration k + 3 and its last in 131.
        Iterations 0 to 131 are 132 steps = 1 primer + 131 async.
        """
        counters, _ = lean
        assert (counters.steps, counters.async_steps, counters.primer_steps) == (132, 131, 1)
        assert counters.legacy_steps == 0

    def test_overlap_from_the_first_decode_only_forward_to_the_last_but_one_token(
        self, lean: tuple[Counters, Any]
    ) -> None:
        """Iterations 1 to 4 consume forwards 0 to 3, which hold the prefills of A, B, C, D: no overlap.

        Iterations 5 to 130 consume decode forwards and have rows that go on: 126 overlap. In iteration 131 the
        pending forward holds D's last token, known in advance to be the end of every row: no overlap, nothing launched.
        """
        counters, _ = lean
        assert dict(counters.orders) == {"primer": 1, "no_overlap": 5, "overlap": 126}
        assert dict(counters.reasons) == {
            "no_pending_forward": 1,
            "prefill_pending": 4,
            "steady_decode": 126,
            "all_rows_ending": 1,
        }
        assert counters.overlap_steps == 126

    def test_that_enter_beside_the_pending_forward_overlap_from_iteration_1_on(
        self, beside: tuple[Counters, Any], lean: tuple[Counters, Any]
    ) -> None:
        """Iterations 1 to 3 admit B, C, D while the forward before runs, 4 to 130 overlap; 131 is D's end, as above.

        A forward launched in iteration k holds the same rows either way, so every other number is the same, and so
        are the tokens.
        """
        counters, ids = beside
        assert dict(counters.orders) == {"primer": 1, "overlap_admit": 3, "overlap": 127, "no_overlap": 1}
        assert dict(counters.reasons) == {
            "no_pending_forward": 1,
            "admits_beside": 3,
            "steady_decode": 127,
            "all_rows_ending": 1,
        }
        assert (counters.overlap_steps, counters.steps) == (130, 132)
        for name in ("compaction_steps", "rows_released", "rows_moved", "rows_dropped", "generated_tokens"):
            assert getattr(counters, name) == getattr(lean[0], name), name
        assert ids == lean[1]

    def test_compact_once_a_wave_and_waste_no_row(self, lean: tuple[Counters, Any]) -> None:
        """A, B and C end in iterations 128, 129, 130, which overlap: 3 compactions; D's end in 131 is no overlap.

        Rows 0-127 hold A B C D in this order. A's end leaves 96 survivors: D (rows 96-127) fills A's 32 holes. Then
        D B C stand; B's end leaves 64: C (rows 64-95) fills B's 32 holes. Then D C stand; C's end leaves D in place:
        64 moves. A row that ends by length is known before its last token is sampled, and is not launched again: no
        waste.
        """
        counters, _ = lean
        assert counters.compaction_steps == 3
        assert counters.rows_released == 128
        assert counters.rows_moved == 64
        assert counters.rows_dropped == 0
        assert not counters.wasted

    def test_count_each_token_once(self, lean: tuple[Counters, Any]) -> None:
        counters, _ = lean
        assert counters.prefill_tokens == 128 * PROMPT_LEN
        assert counters.generated_tokens == counters.sampled_rows == 128 * NUM_TOKENS
        assert dict(counters.finished) == {"length": 128}
        assert counters.submitted == 128

    def test_with_ending_rows_launched_waste_one_row_each_and_overlap_to_the_end(
        self, wasteful: tuple[Counters, Any]
    ) -> None:
        """As upstream: the forward after a row's last token holds the row once more, and it is dropped: 128 rows.

        So iteration 131 has rows to launch and overlaps too: 127 overlap, and D's end is the fourth compaction. The
        forward it launched loses all its rows, nothing is pending, and no further iteration is needed.
        """
        counters, _ = wasteful
        assert (counters.steps, counters.async_steps, counters.primer_steps) == (132, 131, 1)
        assert dict(counters.orders) == {"primer": 1, "no_overlap": 4, "overlap": 127}
        assert dict(counters.reasons) == {"no_pending_forward": 1, "prefill_pending": 4, "steady_decode": 127}
        assert counters.compaction_steps == 4
        assert counters.rows_moved == 64
        assert counters.rows_dropped == 128
        assert dict(counters.wasted) == {"length": 128}
        assert counters.generated_tokens == counters.sampled_rows == 128 * NUM_TOKENS

    def test_in_legacy_take_131_iterations(self, legacy: tuple[Counters, Any]) -> None:
        """Token k of A is sampled in iteration k - 1; D arrives before iteration 3 and ends in 3 + 127 = 130."""
        counters, _ = legacy
        assert (counters.steps, counters.legacy_steps, counters.async_steps) == (131, 131, 0)
        assert dict(counters.orders) == {"legacy": 131}
        assert counters.rows_dropped == 0
        assert counters.compaction_steps == 0
        assert counters.rows_moved == 64

    def test_give_the_same_ids_in_every_way(
        self,
        lean: tuple[Any, list[tuple[int, ...]]],
        wasteful: tuple[Any, list[tuple[int, ...]]],
        legacy: tuple[Any, list[tuple[int, ...]]],
    ) -> None:
        assert lean[1] == wasteful[1] == legacy[1]
        assert all(len(ids) == NUM_TOKENS for ids in lean[1])
        assert len(set(lean[1])) == 128
