"""A whole model on the fused kernels: as near to float32 as plain torch in bfloat16 is, and driven by the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import EngineConfig, SamplingParams
from engine.batch import ForwardBatch
from engine.engine import Engine
from engine.models.base import LayerCache, Model
from engine.models.loader import load_model
from engine.phases import Order
from tests.forward_driver import ForwardDriver, Text

PROMPTS = (1, 15, 16, 17, 200)
DECODED = 24
LIMITS: dict[str, Any] = {"max_requests": 8, "max_batch_tokens": 256, "max_sequence_length": 128, "num_blocks": 64}
WORST_RATIO = 1.1
"""Error of the fused kernels over that of plain torch in bfloat16. They round less often, so it should be below 1."""


class OnCuda:
    """A model for the driver, whose batches are made on the CPU."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.cache_layout = model.cache_layout

    def __call__(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        moved: dict[str, Any] = {
            name: value.cuda() for name, value in batch._asdict().items() if isinstance(value, Tensor)
        }
        return self.model(batch._replace(**moved), caches)


def teacher_forced(model: Model) -> Tensor:
    """Log-probabilities of every token after the first: prompts read at once, the rest one token at a time."""
    rng = random.Random(0)
    driver = ForwardDriver(OnCuda(model))  # type: ignore[arg-type]
    driver.caches = [tuple(tensor.cuda() for tensor in layer) for layer in driver.caches]
    texts = [Text([rng.randrange(model.vocab_size) for _ in range(count)]) for count in PROMPTS]
    found = driver.forward(texts, every=True)
    for _ in range(DECODED):
        for text in texts:
            text.tokens.append(rng.randrange(model.vocab_size))
        found += driver.forward(texts)
    return torch.cat(found).float().log_softmax(-1)


class TestAccuracy:
    @pytest.mark.parametrize("shape", ["qwen3-0.6b", "llama-3.2-1b"])
    def test_error_against_float32_is_that_of_bfloat16(self, shape: str) -> None:
        device = torch.device("cuda")
        load = {"device": device, "dtype": torch.bfloat16}
        fused = load_model(f"shape:{shape}", attention="triton", **load).model
        plain = load_model(f"shape:{shape}", attention="torch", **load).model
        exact = load_model(f"shape:{shape}", attention="torch", device=device, dtype=torch.float32).model
        for model in (plain, exact):
            model.load_state_dict(fused.state_dict())  # type: ignore[attr-defined]

        expected = teacher_forced(exact)
        errors = [float((teacher_forced(model) - expected).abs().mean()) for model in (fused, plain)]

        assert errors[0] < WORST_RATIO * errors[1], f"fused {errors[0]:.2e}, plain {errors[1]:.2e}"


class TestEngine:
    def engine(self, **options: Any) -> Engine:
        config = EngineConfig(device="cuda", dtype="bfloat16", **LIMITS, **options)
        return Engine.from_pretrained("shape:tiny", config, progress=False)

    def prompts(self) -> list[list[int]]:
        rng = random.Random(1)
        return [[rng.randrange(512) for _ in range(count)] for count in (1, 2, 15, 16, 17, 33, 60, 5, 9, 3, 30)]

    def test_the_resolved_configuration_names_the_backend(self) -> None:
        with self.engine() as engine:
            assert engine.resolved.attention_backend == "triton"

    def test_mixed_graphs_agree_with_eager_iterations(self) -> None:
        params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
        tokens = []
        for options in ({"mode": "legacy"}, {"mode": "async", "graphs": -1}):
            with self.engine(**options) as engine:
                tokens.append([output.token_ids for output in engine.generate(self.prompts(), params, progress=False)])

        # A padded product may round otherwise, so near ties may part ways; a wrong row or block parts all of them.
        same = sum(a == b for left, right in zip(*tokens, strict=True) for a, b in zip(left, right, strict=True))
        assert same >= 0.8 * 24 * len(tokens[0])

    def test_overlap_iterations_wait_for_nothing(self) -> None:
        checked = 0
        with self.engine(mode="async", graphs=-1) as engine:
            for prompt in self.prompts():
                engine.add_request(prompt, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
            while engine.has_unfinished():
                assert engine._start()
                assert engine.controller.current is not None
                if engine.controller.current.order is Order.OVERLAP:
                    torch.cuda.set_sync_debug_mode("error")
                    checked += 1
                try:
                    engine.step()
                finally:
                    torch.cuda.set_sync_debug_mode("default")

        assert checked > 20
