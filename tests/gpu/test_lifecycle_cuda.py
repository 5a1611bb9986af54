"""Suspending on a GPU: memory really falls, graphs are captured again and good, new weights reach the graphs.

Copied out of this folder and run without a GPU it takes the inline device; the memory figures are then left out.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.invariants import check_device, check_idle
from engine.models.loader import LoadedModel, load_model
from engine.models.weights import Refillable

HAS_GPU = torch.cuda.is_available()
TORCH_DEVICE = torch.device("cuda", 0) if HAS_GPU else torch.device("cpu")
LIMITS: dict[str, Any] = {
    "device": "cuda" if HAS_GPU else "inline",
    "max_requests": 8,
    "max_batch_tokens": 128,
    "max_sequence_length": 96,
    "num_blocks": 4096,
    "graphs": (1, 2, 4, 8, 64) if HAS_GPU else (8,),
    "graph_non_decode": HAS_GPU,
}
PROMPTS = [[1 + (7 * i + j) % 60 for j in range(n)] for i, n in enumerate((1, 2, 15, 16, 17, 33, 60, 5, 9, 3, 30))]
PARAMS = [
    SamplingParams(
        max_tokens=18 + i,
        temperature=0.0 if i % 3 == 1 else 0.8,
        presence_penalty=0.5 if i % 4 == 3 else 0.0,
        logprobs=2 if i % 5 == 4 else None,
        seed=i,
        ignore_eos=True,
    )
    for i in range(len(PROMPTS))
]
PLAIN = [SamplingParams(max_tokens=18 + i, temperature=i % 2 * 0.8, seed=i, ignore_eos=True) for i in range(8)]
"""Drawn by captured draws, where there are any."""
Answers = list[tuple[int, ...]]


def loaded_tiny(dtype: torch.dtype, attention: str = "torch") -> LoadedModel:
    return load_model("shape:tiny", attention=attention, dtype=dtype, device=TORCH_DEVICE)


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return loaded_tiny(torch.float64)


def engine_on(loaded: LoadedModel, **options: Any) -> Engine:
    return Engine(loaded, EngineConfig(**{**LIMITS, **options}))


def serve(engine: Engine, params: list[SamplingParams], *, suspend: str | None = None, every: int = 1) -> Answers:
    """Tokens of ``PROMPTS``; suspended and resumed before each ``every``-th step."""
    ids = [engine.add_request(prompt, one) for prompt, one in zip(PROMPTS, params, strict=False)]
    done: dict[str, tuple[int, ...]] = {}
    step = 0
    while engine.has_unfinished():
        if suspend is not None and step % every == every - 1:
            engine.suspend(suspend)
            engine.resume()
        done.update({output.request_id: output.token_ids for output in engine.step() if output.finished})
        step += 1
    check_device(engine)
    check_idle(engine)
    return [done[request_id] for request_id in ids]


class TestAnswers:
    @pytest.mark.parametrize("params", [PARAMS, PLAIN], ids=["mixed", "plain"])
    @pytest.mark.parametrize("mode", ["async", "legacy"])
    @pytest.mark.parametrize(("how", "every"), [("persist", 1), ("offload", 4), ("recompute", 5)])
    def test_are_the_same_with_graphs_captured_again(
        self, tiny: LoadedModel, how: str, every: int, mode: str, params: list[SamplingParams]
    ) -> None:
        with engine_on(tiny, graphs=None, mode="legacy") as engine:
            expected = serve(engine, params)
        with engine_on(tiny, mode=mode) as engine:
            assert serve(engine, params, suspend=how, every=every) == expected
            assert engine.counters.graph_hits > 10
            assert serve(engine, params) == expected

    @pytest.mark.parametrize("attention", ["torch", "triton", "flashinfer"] if HAS_GPU else ["torch"])
    def test_are_the_same_in_half_precision(self, attention: str) -> None:
        """Offloading changes no batch, so every product is the same."""
        loaded = loaded_tiny(torch.bfloat16, attention)
        with engine_on(loaded, attention_backend=attention) as engine:
            expected = serve(engine, PARAMS)
            assert serve(engine, PARAMS, suspend="offload", every=6) == expected


class TestMemory:
    @pytest.mark.parametrize("how", ["offload", "recompute"])
    @pytest.mark.parametrize("attention", ["torch", "triton", "flashinfer"] if HAS_GPU else ["torch"])
    def test_falls_and_comes_back(self, how: str, attention: str) -> None:
        """The pool alone is 4097 blocks of 16 tokens, two layers, keys and values of 2 heads of 16 in bfloat16."""
        loaded = loaded_tiny(torch.bfloat16, attention)
        pool_bytes = 4097 * 16 * 2 * 2 * 2 * 16 * 2
        with engine_on(loaded, attention_backend=attention) as engine:
            for prompt, params in zip(PROMPTS, PARAMS, strict=True):
                engine.add_request(prompt, params)
            for _ in range(6):
                engine.step()
            gc.collect()
            before = allocated()
            suspension = engine.suspend(how)
            if HAS_GPU:
                assert before - allocated() >= pool_bytes
                assert suspension.freed_bytes >= pool_bytes
                assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 64 << 20
            assert suspension.saved_bytes < pool_bytes // 4
            engine.resume()
            gc.collect()
            if HAS_GPU:
                assert abs(allocated() - before) < pool_bytes // 2
            while engine.has_unfinished():
                engine.step()
            after_first = allocated()
            for _ in range(3):
                engine.suspend(how)
                engine.resume()
            gc.collect()
            assert allocated() <= after_first + (8 << 20), "every suspension leaves something behind"


def allocated() -> int:
    return torch.cuda.memory_allocated() if HAS_GPU else 0


def other_weights(loaded: LoadedModel) -> list[tuple[str, torch.Tensor]]:
    """Of the same names and shapes, by another seed."""
    model = loaded.model
    assert isinstance(model, Refillable)
    generator = torch.Generator().manual_seed(7)
    return [
        (name, torch.randn(target.shape, generator=generator) * (target.shape[-1] ** -0.5 if target.dim() > 1 else 1.0))
        for name, target in model.weight_targets().targets.items()
    ]


class TestNewWeights:
    @pytest.mark.parametrize("how", ["pause", "persist", "offload", "recompute"])
    def test_are_those_the_graphs_compute_with(self, how: str) -> None:
        loaded, fresh = loaded_tiny(torch.float64), loaded_tiny(torch.float64)
        weights = other_weights(loaded)
        assert isinstance(fresh.model, Refillable)
        fresh.model.load_weights(weights)
        with engine_on(fresh, graphs=None) as engine:
            expected = serve(engine, PARAMS)
        with engine_on(loaded) as engine:
            before = serve(engine, PARAMS)
            engine.add_request(PROMPTS[3], PARAMS[3])
            engine.step()
            engine.step()
            engine.pause() if how == "pause" else engine.suspend(how)
            engine.load_weights(weights)
            engine.resume()
            while engine.has_unfinished():
                engine.step()
            hits = engine.counters.graph_hits
            found = serve(engine, PARAMS)
            assert engine.counters.graph_hits > hits
        assert found == expected != before
