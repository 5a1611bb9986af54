"""What the engine hands a planner in ``prepare``, and that the forward gets what the planner made of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.attention.base import PlannerLimits, PrefillRows
from engine.attention.block_lists import BlockLists, block_lists
from engine.batch import BatchShape, ForwardBatch
from engine.config import EngineConfig
from engine.device import Device
from engine.engine import Engine
from engine.models.base import LayerCache
from engine.models.loader import LoadedModel
from engine.models.oracle import OracleModel
from engine.request import SamplingParams

PROMPTS = [[1 + (3 * i + j) % 60 for j in range(count)] for i, count in enumerate((1, 4, 5, 17, 30, 2, 9))]
BLOCK_SIZE = 4


class Planned(NamedTuple):
    """One call, and what stands in for a plan."""

    shape: BatchShape
    lists: BlockLists
    is_captured: bool


class Planner:
    """Implements ``AttentionPlanner`` by keeping what it is told."""

    def __init__(self, limits: PlannerLimits) -> None:
        self.limits = limits
        self.calls: list[Planned] = []

    def plan(self, shape: BatchShape, rows: PrefillRows, *, is_captured: bool) -> Any:
        self.calls.append(Planned(shape, block_lists(rows, self.limits.block_size), is_captured))
        return self.calls[-1]


class PlanningOracle(OracleModel):
    """Checks every forward that is run eagerly against its plan."""

    def __init__(self) -> None:
        super().__init__(device=torch.device("cpu"))
        self.planners: list[Planner] = []
        self.eager: list[Planned] = []

    def make_planner(self, device: Device, limits: PlannerLimits) -> Planner:
        self.planners.append(Planner(limits))
        return self.planners[-1]

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        if not torch.jit.is_tracing() and batch.prefill_plan is not None:
            check_agreement(batch, batch.prefill_plan)  # type: ignore[arg-type]
            self.eager.append(batch.prefill_plan)  # type: ignore[arg-type]
        else:
            assert batch.prefill_plan is not None or not batch.shape.num_prefill
        return super().forward(batch, caches)


def check_agreement(batch: ForwardBatch, plan: Planned) -> None:
    first, lists = batch.shape.num_decode, plan.lists
    assert plan.shape == batch.shape
    for row in range(batch.shape.num_prefill):
        at, ids = first + row, lists.block_ids[lists.block_indptr[row] : lists.block_indptr[row + 1]]
        assert lists.query_indptr[row] == batch.query_start_N[at] - first
        assert lists.query_indptr[row + 1] - lists.query_indptr[row] == batch.query_len_N[at]
        if batch.query_len_N[at]:
            assert lists.kv_len[row] == batch.kv_len_N[at]
            assert ids.tolist() == batch.block_table_NK[at, : len(ids)].tolist()


def run(**options: Any) -> tuple[PlanningOracle, list[tuple[int, ...]]]:
    """Engine on a planning oracle, and the tokens it gave."""
    model = PlanningOracle()
    loaded = LoadedModel(
        model=model,
        tokenizer=None,
        name="planning oracle",
        eos_token_ids=(),
        vocab_size=model.vocab_size,
        architecture="Oracle",
        config={},
    )
    limits = {"max_requests": 4, "max_batch_tokens": 64, "max_sequence_length": 48, "block_size": BLOCK_SIZE}
    config = EngineConfig(device="inline", num_blocks=60, debug_invariants=True, **limits, **options)
    with Engine(loaded, config) as engine:
        params = SamplingParams(max_tokens=9, temperature=0.0)
        outputs = engine.generate(PROMPTS, params, progress=False)
    return model, [output.token_ids for output in outputs]


@pytest.mark.parametrize("mode", ["legacy", "async"])
class TestPlansOfAnEngine:
    def test_eager_forwards_get_a_plan_of_their_own_rows(self, mode: str) -> None:
        model, _ = run(mode=mode)
        (planner,) = model.planners

        assert planner.limits == PlannerLimits(block_size=BLOCK_SIZE, max_rows=4, max_blocks_per_row=12)
        # One each, in order, and none for forwards without prefill rows.
        assert [id(call) for call in model.eager] == [id(call) for call in planner.calls]
        assert not any(call.is_captured for call in planner.calls)
        assert sum(int(call.lists.kv_len.sum()) for call in planner.calls) == sum(map(len, PROMPTS))

    def test_graphs_are_planned_with_all_their_tokens_before_capture(self, mode: str) -> None:
        model, tokens = run(mode=mode, graphs=[8, 32, 64])
        (planner,) = model.planners
        captures = {call.shape: call for call in reversed(planner.calls) if call.is_captured}

        assert captures
        for shape, call in captures.items():
            assert call.lists.query_indptr[-1] == shape.num_tokens - shape.num_decode
            assert set(call.lists.block_ids.tolist()) == {60}, "the dummy block alone"
            assert call.lists.block_ids.size <= planner.limits.max_rows * planner.limits.max_blocks_per_row
        assert tokens == run(mode=mode)[1]

    def test_every_prompt_in_a_graph_is_planned_once(self, mode: str) -> None:
        model, _ = run(mode=mode, graphs=[64])
        (planner,) = model.planners
        requests = [call for call in planner.calls if 60 not in call.lists.block_ids]

        assert {call.is_captured for call in requests} == {True}
        assert sum(int(call.lists.kv_len.sum()) for call in requests) >= sum(map(len, PROMPTS))
        assert all(call.lists.query_indptr[-1] <= call.shape.num_tokens - call.shape.num_decode for call in requests)


class TestModelsWithoutAPlanner:
    def test_run_unplanned(self) -> None:
        with Engine.from_pretrained(
            "oracle", EngineConfig(device="inline", max_sequence_length=64), progress=False
        ) as engine:
            assert engine.runner.planner is None
            assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3), progress=False)
