"""Rows that end beside others: for every set of survivors each answers as if it were alone."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from engine.policy import never_overlap, prefer_overlap
from engine.request import SamplingParams
from tests.oracle_world import World, expected_output, oracle_engine

MAX_LENGTH = 100
WAYS: dict[str, dict[str, Any]] = {
    "legacy": {"mode": "legacy"},
    "no_overlap": {"mode": "async", "policy": never_overlap},
    "overlap": {"mode": "async", "policy": prefer_overlap},
}
NUM_MASKS = sum(1 << rows for rows in range(1, 7))

ROWS = [
    SamplingParams(max_tokens=8, temperature=0.0, seed=1, logprobs=None),
    SamplingParams(max_tokens=8, temperature=1.0, seed=22, logprobs=0, stop_token_ids=[60]),
    SamplingParams(max_tokens=8, temperature=2.0, seed=333, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=8, temperature=0.5, seed=4444, logprobs=1, top_k=5, stop_token_ids=[1, 2]),
    SamplingParams(max_tokens=8, temperature=1.0, seed=55555, logprobs=7, presence_penalty=2.0, min_tokens=8),
    SamplingParams(max_tokens=8, temperature=0.0, seed=6, logprobs=2, logit_bias={9: 3.0}, repetition_penalty=2.0),
]
"""Every row with parameters of its own, so that a mix-up shows."""


def prompt_of(row: int) -> list[int]:
    return [10 + row] * (row + 1)


def ended_early(row: int) -> SamplingParams:
    """Row ``row`` made to end with its third token: by length, or, where its ids allow it, by a stop id."""
    params = ROWS[row].replace(min_tokens=0)
    assert params.seed is not None
    ids = expected_output(prompt_of(row), params, params.seed, max_length=MAX_LENGTH).token_ids
    if row % 2 and len(ids) > 2 and ids[2] not in ids[:2]:
        return params.replace(stop_token_ids=[ids[2]])
    return params.replace(max_tokens=3)


EARLY = [ended_early(row) for row in range(6)]


class TestEverySurvivorMask:
    @pytest.mark.parametrize("way", WAYS)
    def test_up_to_six_rows_answers_one_by_one(self, way: str) -> None:
        """Rows outside the mask end with their third token (every third one is aborted then), all others go on."""
        engine = oracle_engine(max_requests=6, debug_invariants=way == "overlap", **WAYS[way])
        checked = 0
        for num_rows in range(1, 7):
            for mask in product([False, True], repeat=num_rows):
                world = World(engine)
                ids = []
                for row, survives in enumerate(mask):
                    aborted = not survives and row % 3 == 2
                    params = ROWS[row] if survives or aborted else EARLY[row]
                    ids.append(world.submit(prompt_of(row), params))
                for _ in range(3 if way == "legacy" else 4):
                    world.step()
                for row, survives in enumerate(mask):
                    if not survives and row % 3 == 2:
                        world.abort(ids[row])
                world.drain()
                checked += 1
                for one, survives in zip(world.all, mask, strict=True):
                    assert one.last is not None
                    assert survives or len(one.last.token_ids) <= 3
        assert checked == NUM_MASKS
        assert (engine.counters.overlap_steps > 0) == (way == "overlap")
        assert engine.counters.rows_moved > 0
