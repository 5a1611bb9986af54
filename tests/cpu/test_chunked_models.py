"""Prompts read in chunks on small torch models: against transformers, and against the same prompts read in one go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.invariants import check_idle
from engine.models.loader import LoadedModel, load_model
from engine.request import RequestOutput
from tests.cache_watch import CacheWatch
from tests.checkpoints import write_checkpoint
from tests.teacher import check_against_transformers, engine_says

LENGTHS = (1, 2, 15, 16, 17, 33, 70, 100)
LIMITS: dict[str, Any] = {"max_requests": 4, "max_sequence_length": 128, "num_blocks": 32, "device": "inline"}
CHUNKED_BECAUSE = [(False, "chunk_in_progress"), (True, "admits_beside")]
"""``overlap_admission``, and the reason of iterations that go on with a chunk."""
CHUNKS: dict[str, Any] = {"chunked_prefill": True, "max_batch_tokens": 13}


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def serve(
    loaded: LoadedModel, params: SamplingParams | list[SamplingParams], **options: Any
) -> tuple[list[RequestOutput], Engine]:
    with Engine(loaded, EngineConfig(**{**LIMITS, "debug_invariants": True, **options})) as engine:
        outputs = engine.generate(prompts(loaded.vocab_size), params, progress=False)
        check_idle(engine)
    return outputs, engine


class TestAgainstTransformers:
    @pytest.mark.parametrize(("beside", "reason"), CHUNKED_BECAUSE)
    def test_tokens_and_the_log_probabilities_of_prompt_and_output_are_equal(
        self, beside: bool, reason: str, tmp_path: Path
    ) -> None:
        """Chunks of up to 13 tokens, so that seams fall within blocks, on their borders, and beside decode rows."""
        folder = write_checkpoint(tmp_path / "model", "Qwen3ForCausalLM")
        loaded = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=1)

        outputs, engine = serve(loaded, params, overlap_admission=beside, **CHUNKS)

        assert engine.counters.prefill_tokens == sum(LENGTHS)
        assert engine.counters.reasons[reason] > 10
        check_against_transformers(folder, outputs)


class TestAgainstOneGo:
    """In float64, where another cut of the batch moves logits by 1e-14 and no draw is that close to a border."""

    @pytest.mark.parametrize("mode", ["legacy", "async"])
    @pytest.mark.parametrize("graphs", [None, (4, 16)])
    def test_tokens_and_log_probabilities_are_equal(self, mode: str, graphs: tuple[int, ...] | None) -> None:
        loaded = load_model("shape:tiny", dtype=torch.float64, device=torch.device("cpu"))
        params = [
            SamplingParams(
                max_tokens=9 + i,
                seed=i,
                temperature=0.9 * (i % 2),
                logprobs=2,
                prompt_logprobs=1 if i % 3 == 0 else None,
                presence_penalty=0.5 * (i % 2),
                ignore_eos=True,
            )
            for i in range(len(LENGTHS))
        ]
        whole, _ = serve(loaded, params, mode="legacy", max_batch_tokens=512)

        chunked, engine = serve(loaded, params, mode=mode, graphs=graphs, **{**CHUNKS, "max_batch_tokens": 16})

        assert [one.token_ids for one in chunked] == [one.token_ids for one in whole]
        for one, other in zip(chunked, whole, strict=True):
            for part, found in engine_says(one).items():
                assert torch.allclose(found, engine_says(other)[part], atol=1e-6, rtol=0), part
        if graphs is not None:
            records = engine.recorder.iterations()
            mixed = [one.graph for one in records if one.launched is not None and one.launched.num_prefill]
            assert sum(graph is not None and graph.hit for graph in mixed) > 3


class TestCache:
    @pytest.mark.parametrize("graphs", [None, (4, 16)])
    @pytest.mark.parametrize(("beside", "reason"), CHUNKED_BECAUSE)
    def test_gets_each_token_of_a_chunk_once_and_nothing_else(
        self, beside: bool, reason: str, graphs: tuple[int, ...] | None
    ) -> None:
        """Byte for byte around every forward: the first chunk's entries stay as they are when the second is read."""
        loaded = load_model("shape:tiny", dtype=torch.float32, device=torch.device("cpu"))
        options = {**LIMITS, **CHUNKS, "max_batch_tokens": 16, "graphs": graphs, "overlap_admission": beside}
        with Engine(loaded, EngineConfig(**options)) as engine:
            watch = CacheWatch(engine)
            params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
            engine.generate(prompts(loaded.vocab_size), params, progress=False)

            assert engine.counters.reasons[reason] > 10
            assert (watch.padded["mixed"] > 0) == (graphs is not None)
            assert (watch.eager > 20) == (graphs is None)
