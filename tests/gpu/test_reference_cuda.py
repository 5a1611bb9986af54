"""The engine on CUDA against the CPU and against transformers: float32 agrees, bfloat16 errs no more than theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.invariants import check_idle
from engine.request import RequestOutput
from tests.checkpoints import write_checkpoint
from tests.teacher import engine_says, said_of, text_of, transformers_says, write_half_checkpoint
from tests.tell import tell

DEVICE = "cuda" if torch.cuda.is_available() else "inline"
TORCH_DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
LIMITS: dict[str, Any] = {"max_requests": 8, "max_batch_tokens": 1024, "max_sequence_length": 512, "num_blocks": 256}
FAMILIES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
LENGTHS = (1, 2, 15, 16, 17, 33, 100)
FLOAT32_TOLERANCE = 1e-4
"""On log-probabilities. On the CPU they differ by 1e-5 from transformers; TF32 would differ by 1e-3."""
WORST_RATIO = 1.5
"""Error of a backend in bfloat16 over that of transformers in bfloat16, each against transformers in float32."""
HALF: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
"""Qwen3-0.6B with fewer layers and a smaller vocabulary."""
HALF_LENGTHS = (2, 16, 33, 64, 100, 200, 255, 400)


@pytest.fixture(autouse=True)
def _no_tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def prompts(vocab_size: int, lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def serve(folder: Path, params: list[SamplingParams], lengths: tuple[int, ...], **options: Any) -> list[RequestOutput]:
    config = EngineConfig(**{**LIMITS, **options})
    with Engine.from_pretrained(folder, config, progress=False) as engine:
        requests = prompts(engine.resolved.vocab_size, lengths)
        outputs = engine.generate(requests, params, progress=False)
        check_idle(engine)
        if engine.runner.graphs:
            assert engine.counters.graph_hits > 20
            assert engine.counters.graph_misses == 0
    return outputs


Said = dict[str, Tensor]
"""Log-probabilities of one text, by part: "prompt" and "output"."""


def differences(found: list[Said], wanted: list[Said]) -> Said:
    """Distance of each token's log-probability in all texts, for the parts that ``found`` has."""
    pairs = list(zip(found, wanted, strict=True))
    return {part: torch.cat([(a[part] - b[part]).abs() for a, b in pairs]) for part in found[0]}


def largest(found: list[Said], wanted: list[Said]) -> float:
    return max(float(values.max()) for values in differences(found, wanted).values())


def asked(graphs: int | None) -> dict[str, Any]:
    """A forward with prompt log-probabilities runs eagerly, so they are asked for only where there are no graphs."""
    return {"ignore_eos": True, "logprobs": 0, "prompt_logprobs": None if graphs else 0}


class TestFloat32:
    @pytest.mark.parametrize("graphs", [None, -1])
    @pytest.mark.parametrize("family", FAMILIES)
    def test_equals_the_cpu_and_transformers(
        self, family: str, graphs: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = write_checkpoint(tmp_path / "model", family)
        params = [SamplingParams(max_tokens=40, temperature=0.0, **asked(graphs))] * len(LENGTHS)
        options = {"dtype": "float32", "attention_backend": "torch"}

        found = serve(folder, params, LENGTHS, device=DEVICE, graphs=graphs, **options)
        on_cpu = serve(folder, params, LENGTHS, device="inline", mode="legacy", **options)
        texts = [text_of(output) for output in found]
        reference = transformers_says(folder, texts, dtype=torch.float32, device=TORCH_DEVICE, attention="eager")

        assert [output.token_ids for output in found] == [output.token_ids for output in on_cpu]
        for output, said in zip(found, reference, strict=True):
            assert list(output.token_ids) == said.best[len(output.prompt_token_ids) - 1 :].tolist()
        ours = [engine_says(output) for output in found]
        to_cpu = largest(ours, [engine_says(output) for output in on_cpu])
        to_reference = largest(ours, [said_of(output, said) for output, said in zip(found, reference, strict=True)])
        tell(capsys, [f"{family}, graphs {graphs}: {to_cpu:.1e} from the CPU, {to_reference:.1e} from transformers"])
        assert max(to_cpu, to_reference) < FLOAT32_TOLERANCE


@pytest.fixture(scope="module")
def half_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("half") / "model"
    return write_half_checkpoint(folder, "Qwen3ForCausalLM", device=TORCH_DEVICE, **HALF)


class TestBfloat16:
    @pytest.mark.parametrize("graphs", [None, -1])
    @pytest.mark.parametrize("backend", ["triton", "flashinfer"])
    def test_errs_no_more_than_transformers(
        self, half_checkpoint: Path, backend: str, graphs: int | None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Outputs are drawn, so that tokens of every likelihood are looked at."""
        pytest.importorskip(backend)
        params = [SamplingParams(max_tokens=64, seed=seed, **asked(graphs)) for seed in range(len(HALF_LENGTHS))]
        options = {"dtype": "bfloat16", "attention_backend": backend, "graphs": graphs}

        outputs = serve(half_checkpoint, params, HALF_LENGTHS, device=DEVICE, **options)
        texts = [text_of(output) for output in outputs]
        exact = transformers_says(half_checkpoint, texts, dtype=torch.float32, device=TORCH_DEVICE, attention="eager")
        half = transformers_says(half_checkpoint, texts, dtype=torch.bfloat16, device=TORCH_DEVICE, attention="sdpa")

        wanted = [said_of(output, said) for output, said in zip(outputs, exact, strict=True)]
        theirs = differences([said_of(output, said) for output, said in zip(outputs, half, strict=True)], wanted)
        ratios = {}
        for part, ours in differences([engine_says(output) for output in outputs], wanted).items():
            errors = float(ours.mean()), float(theirs[part].mean())
            ratios[part] = errors[0] / errors[1]
            tell(
                capsys,
                [f"{backend}, graphs {graphs}, {part}: mean error {errors[0]:.2e}, transformers {errors[1]:.2e}"],
            )
        assert max(ratios.values()) < WORST_RATIO, f"error over that of transformers: {ratios}"
