"""One trace of a forward holds for every batch of its shape: what static-shape buckets rest on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine.batch import BatchShape, ForwardBatch
from engine.models.loader import load_model
from tests.checkpoints import write_checkpoint
from tests.forward_driver import ForwardDriver, Part, Text

SHAPES = {
    "decode": BatchShape(num_tokens=6, num_decode=6, num_prefill=0, max_query_len=0, num_kv_blocks=5),
    "prefill": BatchShape(num_tokens=64, num_decode=0, num_prefill=3, max_query_len=64, num_kv_blocks=5),
    "mixed": BatchShape(num_tokens=96, num_decode=4, num_prefill=4, max_query_len=92, num_kv_blocks=8),
}


class Flat(nn.Module):
    """The model with tensors for arguments, which is what a trace takes."""

    def __init__(self, model: nn.Module, shape: BatchShape) -> None:
        super().__init__()
        self.model = model
        self.shape = shape

    def forward(self, *tensors: Tensor) -> Tensor:
        inputs, caches = tensors[:9], tensors[9:]
        return self.model(ForwardBatch(*inputs, self.shape), list(zip(caches[::2], caches[1::2], strict=True)))


def random_parts(generator: random.Random, driver: ForwardDriver, shape: BatchShape) -> list[Part]:
    """Rows that fit ``shape``; decode and continued rows have read something before."""
    parts = []
    budget = shape.num_tokens - shape.num_decode
    for _ in range(generator.randint(0 if shape.num_prefill else 1, shape.num_decode)):
        parts.append((generator.randint(1, shape.num_kv_blocks * 16 - 1), 1))
    for _ in range(generator.randint(1, shape.num_prefill) if shape.num_prefill else 0):
        count = generator.randint(2, max(2, budget // shape.num_prefill))
        parts.append((generator.choice([0, 0, 5, 16]), count))
    texts = [Text([generator.randrange(199) for _ in range(cached + count)]) for cached, count in parts]
    for text, (cached, _) in zip(texts, parts, strict=True):
        if cached:
            whole, text.tokens = text.tokens, text.tokens[:cached]
            driver.forward([text])
            text.tokens = whole
    return [Part(text, count) for text, (_, count) in zip(texts, parts, strict=True)]


def padded_batch(driver: ForwardDriver, parts: list[Part], shape: BatchShape) -> ForwardBatch:
    """One logits row a batch row, as the engine pads them."""
    batch = driver.batch(parts, shape=shape)
    padding = torch.zeros(shape.num_rows - batch.logits_idx_L.shape[0], dtype=torch.int64)
    return batch._replace(logits_idx_L=torch.cat((batch.logits_idx_L, padding)))


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_one_trace_equals_eager_for_twenty_contents(architecture: str, shape: BatchShape, tmp_path: Path) -> None:
    tied = architecture.startswith("Qwen")
    folder = write_checkpoint(tmp_path, architecture, head_dim=16, sliding_window=20, tie_word_embeddings=tied)
    model = load_model(folder, dtype=torch.float32).model
    generator = random.Random(7)
    frozen = None
    for _ in range(20):
        driver = ForwardDriver(model, num_blocks=100, seed=generator.randrange(1000))
        parts = random_parts(generator, driver, shape)
        batch = padded_batch(driver, parts, shape)
        eager_caches, frozen_caches = ([(k.clone(), v.clone()) for k, v in driver.caches] for _ in range(2))
        with torch.no_grad():
            if frozen is None:
                warm = [cache.clone() for layer in driver.caches for cache in layer]
                frozen = torch.jit.freeze(torch.jit.trace(Flat(model, shape).eval(), (*batch[:9], *warm)))
            expected = model(batch, eager_caches)
            got = frozen(*batch[:9], *(cache for layer in frozen_caches for cache in layer))

        assert torch.isfinite(expected).all()
        torch.testing.assert_close(got, expected, atol=0.0, rtol=0.0)
        for eager_layer, frozen_layer in zip(eager_caches, frozen_caches, strict=True):
            for eager_cache, frozen_cache in zip(eager_layer, frozen_layer, strict=True):
                # The dummy block takes every padding token; which one stays is not defined.
                torch.testing.assert_close(frozen_cache[:-1], eager_cache[:-1], atol=0.0, rtol=0.0, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_padded_batch_gives_the_logits_of_the_tight_one(shape: BatchShape, tmp_path: Path) -> None:
    model = load_model(write_checkpoint(tmp_path, "Qwen3ForCausalLM", head_dim=16), dtype=torch.float64).model
    generator = random.Random(3)
    for _ in range(10):
        driver = ForwardDriver(model, num_blocks=100, seed=generator.randrange(1000))
        parts = random_parts(generator, driver, shape)
        caches = [(k.clone(), v.clone()) for k, v in driver.caches]
        with torch.no_grad():
            padded = model(padded_batch(driver, parts, shape), caches)
        texts = [part.text for part in parts]
        tight = driver.forward(texts)

        order = sorted(range(len(parts)), key=lambda i: not (parts[i].count == 1 and parts[i].end > 1))
        for row, place in enumerate(order):
            torch.testing.assert_close(padded[row], tight[place][0], atol=1e-11, rtol=0.0)
