"""The whole engine on small torch models: against transformers, and one schedule against another."""

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
from tests.checkpoints import write_checkpoint

LENGTHS = (1, 2, 15, 16, 17, 33, 100)
LIMITS: dict[str, Any] = {"max_requests": 8, "max_batch_tokens": 512, "max_sequence_length": 192, "num_blocks": 60}
GRAPHS = (2, 8, 200)
"""Few rows, all rows, and the prompts together; three times as many sizes say the same."""


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def serve(
    loaded: LoadedModel, requests: list[list[int]], params: Any, *, one_by_one: bool = False, **options: Any
) -> list[RequestOutput]:
    with Engine(loaded, EngineConfig(**LIMITS, debug_invariants=True, **options)) as engine:
        if one_by_one:
            each = params if isinstance(params, list) else [params] * len(requests)
            outputs = [engine.generate([r], p, progress=False)[0] for r, p in zip(requests, each, strict=True)]
        else:
            outputs = engine.generate(requests, params, progress=False)
        check_idle(engine)
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[tuple[tuple[int, ...], str | None]]:
    return [(output.token_ids, output.finish_reason) for output in outputs]


@pytest.fixture(scope="module")
def float64_model() -> LoadedModel:
    return load_model("shape:tiny", dtype=torch.float64, device=torch.device("cpu"))


MIX = [
    SamplingParams(max_tokens=24, temperature=0),
    SamplingParams(max_tokens=20, seed=11, temperature=1.3),
    SamplingParams(max_tokens=17, seed=12, top_p=0.8, logprobs=3),
    SamplingParams(max_tokens=28, seed=13, top_k=7, presence_penalty=0.7, frequency_penalty=0.2),
    SamplingParams(max_tokens=1, seed=14),
    SamplingParams(max_tokens=22, seed=15, min_p=0.05, repetition_penalty=1.3, min_tokens=5),
    SamplingParams(max_tokens=9, temperature=0, logprobs=0, prompt_logprobs=2, logit_bias={5: 3.0}),
]


@pytest.fixture(scope="module")
def alone(float64_model: LoadedModel) -> list[RequestOutput]:
    """What each request of the mix says when it is served by itself."""
    requests = prompts(float64_model.vocab_size)
    return serve(float64_model, requests, MIX, one_by_one=True, mode="legacy", device="inline", dtype="float64")


class TestAgainstTransformers:
    @pytest.mark.parametrize("graphs", [None, (1, 4, 8)])
    @pytest.mark.parametrize(
        "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
    )
    def test_greedy_tokens_and_logprobs_are_equal(self, architecture: str, graphs: Any, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        folder = write_checkpoint(tmp_path / "model", architecture)
        reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        loaded = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
        params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=1)

        outputs = serve(loaded, prompts(loaded.vocab_size), params, graphs=graphs, graph_non_decode=False)

        for output in outputs:
            ids = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
            with torch.no_grad():
                expected = reference(ids, use_cache=False).logits[0].log_softmax(-1)
            assert output.prompt_logprobs is not None
            assert output.logprobs is not None
            found = [*output.prompt_logprobs[1:], *output.logprobs]
            for position, (row, token) in enumerate(zip(found, ids[0, 1:].tolist(), strict=True)):
                assert row is not None
                assert row[token] == pytest.approx(float(expected[position, token]), abs=1e-4)
            first = len(output.prompt_token_ids) - 1
            assert list(output.token_ids) == expected[first:-1].argmax(-1).tolist()


class TestOneScheduleAgainstAnother:
    """In float64, where a changed batch moves logits by 1e-14 and no draw is that close to a border."""

    @pytest.mark.parametrize("device", ["inline", "cpu"])
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    @pytest.mark.parametrize("graphs", [None, GRAPHS])
    def test_batched_equals_one_by_one(
        self, float64_model: LoadedModel, alone: list[RequestOutput], device: Any, mode: Any, graphs: Any
    ) -> None:
        requests = prompts(float64_model.vocab_size)

        together = serve(float64_model, requests, MIX, mode=mode, device=device, graphs=graphs, dtype="float64")

        assert tokens(together) == tokens(alone)
        for one, other in zip(alone, together, strict=True):
            for row, expected in zip(other.logprobs or (), one.logprobs or (), strict=True):
                assert row == pytest.approx(expected, abs=1e-6)

    def test_the_order_of_requests_changes_no_tokens(self, float64_model: LoadedModel) -> None:
        requests = prompts(float64_model.vocab_size)
        forward = serve(float64_model, requests, MIX, dtype="float64")

        backward = serve(float64_model, requests[::-1], MIX[::-1], dtype="float64")

        assert tokens(backward[::-1]) == tokens(forward)

    @pytest.mark.parametrize("period", [1, 2, 3])
    def test_switching_the_mode_in_mid_run_changes_no_tokens(self, float64_model: LoadedModel, period: int) -> None:
        requests = prompts(float64_model.vocab_size)
        expected = tokens(serve(float64_model, requests, MIX, dtype="float64"))
        config = EngineConfig(**LIMITS, debug_invariants=True, dtype="float64")

        with Engine(float64_model, config) as engine:
            ids = [engine.add_request(r, p) for r, p in zip(requests, MIX, strict=True)]
            done: dict[str, RequestOutput] = {}
            step = 0
            while engine.has_unfinished():
                step += 1
                if step % period == 0:
                    engine.set_mode("legacy" if engine.mode == "async" else "async")
                done.update({output.request_id: output for output in engine.step() if output.finished})
            check_idle(engine)

        assert tokens([done[request_id] for request_id in ids]) == expected

    def test_float32_differs_only_by_rounding(self) -> None:
        loaded = load_model("shape:tiny", dtype=torch.float32, device=torch.device("cpu"))
        requests = prompts(loaded.vocab_size)
        params = SamplingParams(max_tokens=30, temperature=0, logprobs=2)
        legacy = serve(loaded, requests, params, mode="legacy")

        for one, other in zip(legacy, serve(loaded, requests, params, mode="async", graphs=GRAPHS), strict=True):
            assert one.logprobs is not None
            for token, twin, row in zip(one.token_ids, other.token_ids, one.logprobs, strict=False):
                if token != twin:
                    top = sorted(row.values(), reverse=True)
                    assert top[0] - top[1] < 1e-3
                    break
