"""The drawing kernel against the reference sampler on the same CUDA logits."""

from __future__ import annotations

import pytest
import torch

from engine import SamplingParams
from engine.sampling.base import RowColumns, Sampled, SamplingNeeds, SamplingRows
from engine.sampling.flashinfer import FlashInferSampler
from engine.sampling.rng import DrawKind, uniform, uniform_host
from engine.sampling.torch import TorchSampler
from engine.sampling.triton import TritonSampler

CUDA = "cuda"


def make_columns(rows: int, temperatures: list[float], seed: int = 0) -> RowColumns:
    generator = torch.Generator().manual_seed(seed)
    ints = torch.zeros(rows, 5, dtype=torch.int64)
    ints[:, 1] = torch.randint(0, 500, (rows,), generator=generator)
    ints[:, 2] = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    floats = torch.zeros(rows, 6)
    floats[:, 0] = torch.tensor([temperatures[i % len(temperatures)] for i in range(rows)])
    floats[:, 1] = floats[:, 5] = 1.0
    return RowColumns(ints.to(CUDA), floats.to(CUDA))


def reference(logits: torch.Tensor, columns: RowColumns, needs: SamplingNeeds) -> Sampled:
    return sample_with(TorchSampler(), logits, columns, needs)


def sample_with(sampler: TorchSampler, logits: torch.Tensor, columns: RowColumns, needs: SamplingNeeds) -> Sampled:
    ints, floats = columns
    rows = SamplingRows(
        temperature=floats[:, 0],
        top_k=ints[:, 3],
        top_p=floats[:, 1],
        min_p=floats[:, 2],
        seed=ints[:, 2],
        position=ints[:, 1],
        min_tokens=ints[:, 4],
        presence=floats[:, 3],
        frequency=floats[:, 4],
        repetition=floats[:, 5],
    )
    return sampler.sample(logits, rows, needs)


def needs_for(temperatures: list[float]) -> SamplingNeeds:
    return SamplingNeeds.of([SamplingParams(temperature=t) for t in temperatures])


class TestDrawKernel:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("temperatures", [[0.0], [0.6], [0.0, 0.7, 1.3, 40.0, 1e-4]])
    @pytest.mark.parametrize(("rows", "vocab"), [(1, 151_936), (7, 49_152), (256, 151_936), (5, 33), (2, 300_001)])
    def test_draws_what_the_reference_draws(
        self, rows: int, vocab: int, temperatures: list[float], dtype: torch.dtype
    ) -> None:
        generator = torch.Generator(CUDA).manual_seed(rows)
        logits = (4 * torch.randn(rows + 3, vocab, device=CUDA, generator=generator)).to(dtype)
        columns, needs = make_columns(rows, temperatures), needs_for(temperatures)
        sources = torch.randperm(rows + 3, device=CUDA)[:rows]
        expected = reference(logits[sources], columns, needs)
        positions = columns.ints[:, 1].clone()
        results = torch.full((3, rows + 2), -7, dtype=torch.int64, device=CUDA)

        assert TritonSampler().draw_in_place(logits, sources, columns, results, needs)

        differ = (results[0, :rows] != expected.token_ids) & ~expected.near_boundary & (results[2, :rows] == 0)
        assert not differ.any()
        assert (results[0, :rows] != expected.token_ids).sum() <= 1
        assert (results[1, :rows] == expected.bad).all()
        assert (results[:, rows:] == -7).all()
        assert (columns.ints[:, 0] == results[0, :rows]).all()
        assert (columns.ints[:, 1] == positions + 1).all()

    def test_greedy_takes_the_lowest_id_of_equals(self) -> None:
        logits = torch.zeros(5, 20_000, device=CUDA, dtype=torch.bfloat16)
        logits[0, [9_000, 18_000]] = logits[1, [19_999, 3]] = 5.0
        logits[3] = logits[4] = -1.0
        logits[3, [100, 15_000]] = torch.tensor([-0.0, 0.0], device=CUDA, dtype=torch.bfloat16)
        logits[4, [7, 16_000]] = -0.5  # a part each
        results = torch.zeros(3, 5, dtype=torch.int64, device=CUDA)

        TritonSampler().draw_in_place(logits, None, make_columns(5, [0.0]), results, needs_for([0.0]))

        assert results[0].tolist() == [9_000, 3, 0, 100, 7]

    @pytest.mark.parametrize("place", [5, 99_999])
    def test_a_bad_row_is_flagged_alone(self, place: int) -> None:
        logits = torch.randn(4, 100_000, device=CUDA)
        logits[0, place], logits[1, place] = float("nan"), float("inf")
        logits[2] = float("-inf")
        results = torch.zeros(3, 4, dtype=torch.int64, device=CUDA)

        TritonSampler().draw_in_place(logits, None, make_columns(4, [1.0]), results, needs_for([1.0]))

        assert results[1].tolist() == [1, 1, 1, 0]
        assert results[0, :3].tolist() == [0, 0, 0]

    def test_what_needs_more_is_left_to_the_reference(self) -> None:
        needs = SamplingNeeds.of([SamplingParams(top_p=0.5)])
        results = torch.zeros(3, 1, dtype=torch.int64, device=CUDA)

        assert not TritonSampler().draw_in_place(
            torch.zeros(1, 9, device=CUDA), None, make_columns(1, [1.0]), results, needs
        )


class TestRandomStream:
    def test_cuda_gives_the_bits_of_the_host(self) -> None:
        seeds = [0, 1, -1, 2**62, -(2**63)]
        position = torch.arange(5, device=CUDA)

        found = uniform(torch.tensor(seeds, device=CUDA), position, DrawKind.TARGET).tolist()

        assert found == [uniform_host(seed, i, DrawKind.TARGET) for i, seed in enumerate(seeds)]


FILTERED = [
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=1.0, top_k=5),
    SamplingParams(temperature=1.5, top_k=50, top_p=0.95),
    SamplingParams(temperature=0),
    SamplingParams(temperature=1.0, top_k=1, top_p=0.5),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=2.0, min_p=0.02, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=100_000),
]


class TestFlashInferFilters:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    @pytest.mark.parametrize(("rows", "vocab"), [(8, 151_936), (64, 49_152), (16, 33)])
    def test_keep_and_draw_what_the_reference_does(self, rows: int, vocab: int, dtype: torch.dtype) -> None:
        params = [FILTERED[i % len(FILTERED)] for i in range(rows)]
        generator = torch.Generator(CUDA).manual_seed(rows)
        logits = (3 * torch.randn(rows, vocab, device=CUDA, generator=generator)).to(dtype)
        ints, floats = make_columns(rows, [1.0])
        for i, one in enumerate(params):
            ints[i, 3] = one.top_k
            floats[i, 0], floats[i, 1], floats[i, 2] = one.temperature, one.top_p, one.min_p
        columns, needs = RowColumns(ints, floats), SamplingNeeds.of(params)
        expected = reference(logits, columns, needs)

        found = sample_with(FlashInferSampler(), logits, columns, needs)

        assert not ((found.token_ids != expected.token_ids) & ~found.near_boundary & ~expected.near_boundary).any()
        assert (found.token_ids != expected.token_ids).sum() <= max(1, rows // 16)

    def test_run_without_a_host_wait(self) -> None:
        params = FILTERED
        logits = torch.randn(len(params), 1000, device=CUDA)
        columns, needs = make_columns(len(params), [1.0]), SamplingNeeds.of(params)
        sample_with(FlashInferSampler(), logits, columns, needs)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            sample_with(FlashInferSampler(), logits, columns, needs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
