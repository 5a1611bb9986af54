"""Prompts read in chunks on CUDA: the answers of prompts read in one go, and no hidden wait beside them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.invariants import check_device, check_idle
from engine.models.loader import LoadedModel, load_model
from engine.phases import Order, Reason
from engine.request import RequestOutput
from tests.sync_debug import no_hidden_synchronisation
from tests.teacher import engine_says
from tests.tell import tell
from workbench.comparison import compare
from workbench.verdicts import Verdict
from workbench.workloads import RequestSpec, Workload

DEVICE = "cuda" if torch.cuda.is_available() else "inline"
TORCH_DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
LENGTHS = (1, 2, 15, 16, 17, 33, 70, 100, 5, 49, 64, 31)
LIMITS: dict[str, Any] = {"device": DEVICE, "max_requests": 6, "max_sequence_length": 160, "num_blocks": 60}
CHUNKS: dict[str, Any] = {"chunked_prefill": True, "max_batch_tokens": 24, "overlap_admission": False}
"""As upstream; test_admission_cuda.py has chunks that are read beside the pending forward."""
MODEL = "shape:qwen3-0.6b"


def prompts(vocab_size: int) -> list[list[int]]:
    return [[3 + (11 * i + 7 * place) % (vocab_size - 3) for place in range(n)] for i, n in enumerate(LENGTHS)]


def mix(*, is_plain: bool = False) -> list[SamplingParams]:
    plain = [SamplingParams(max_tokens=16 + i, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(12)]
    if is_plain:
        return plain
    return [
        one.replace(
            logprobs=2, prompt_logprobs=1 if i % 2 else None, presence_penalty=0.5 * (i % 3 == 0), min_tokens=i % 4
        )
        for i, one in enumerate(plain)
    ]


def serve(loaded: LoadedModel, **options: Any) -> tuple[list[RequestOutput], Engine]:
    """Every request to its end; the device's columns are compared with the table at every iteration border."""
    with Engine(loaded, EngineConfig(**{**LIMITS, **options})) as engine:
        outputs: dict[str, RequestOutput] = {}
        names = [
            engine.add_request(prompt, params) for prompt, params in zip(prompts(loaded.vocab_size), mix(), strict=True)
        ]
        while engine.has_unfinished():
            outputs |= {output.request_id: output for output in engine.step()}
            check_device(engine)
        check_idle(engine)
    return [outputs[name] for name in names], engine


class TestFloat64:
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    @pytest.mark.parametrize("graphs", [None, -1])
    def test_tokens_and_log_probabilities_are_those_of_prompts_read_in_one_go(
        self, mode: str, graphs: int | None
    ) -> None:
        """Rows move over each other on the device as the partial one stays the last."""
        loaded = load_model("shape:tiny", dtype=torch.float64, device=TORCH_DEVICE)
        whole, _ = serve(loaded, mode="legacy", max_batch_tokens=512, dtype="float64", graphs=None)

        chunked, engine = serve(loaded, mode=mode, graphs=graphs, dtype="float64", debug_invariants=True, **CHUNKS)

        assert [one.token_ids for one in chunked] == [one.token_ids for one in whole]
        for one, other in zip(chunked, whole, strict=True):
            for part, found in engine_says(one).items():
                assert torch.allclose(found, engine_says(other)[part], atol=1e-6, rtol=0), part
        assert engine.counters.prefill_tokens == sum(LENGTHS)
        if mode == "async":
            assert engine.counters.reasons[Reason.CHUNK_IN_PROGRESS.name.lower()] > 10


class TestBfloat16:
    @pytest.mark.parametrize("backend", ["triton", "flashinfer"])
    def test_chunked_and_whole_part_only_where_rounding_decides(
        self, backend: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Prefill kernels read keys that earlier forwards wrote; decode kernels go on from them, in graphs."""
        pytest.importorskip(backend)
        loaded = load_model(MODEL, attention=backend, dtype=torch.bfloat16, device=TORCH_DEVICE)
        rng = random.Random(11)
        requests = tuple(
            RequestSpec(
                prompt=tuple(rng.randrange(loaded.vocab_size) for _ in range(rng.randint(1, 200))),
                params=SamplingParams(
                    max_tokens=rng.randint(16, 48), temperature=(0.0, 0.8)[seed % 2], seed=seed, ignore_eos=True
                ),
            )
            for seed in range(24)
        )
        chunks = {"chunked_prefill": True, "max_batch_tokens": 64, "overlap_admission": False}

        found = compare(
            Workload(name="chunks", requests=requests),
            [
                "legacy",
                ("chunked legacy", {"mode": "legacy", **chunks}),
                ("chunked async", {"mode": "async", **chunks}),
            ],
            model=loaded,
            repeats=1,
            warmup=0,
            device=DEVICE,
            dtype="bfloat16",
            attention_backend=backend,
            max_requests=12,
            max_batch_tokens=512,
            max_sequence_length=300,
            num_blocks=228,
            graphs=-1,
        )

        parted = [one for one in found.verdicts if one.verdict is not Verdict.EQUAL]
        tell(capsys, [f"{backend}: {found.verdict_text}", *map(str, parted)])
        assert found.runs[2].counters["reasons"]["chunk_in_progress"] > 10
        assert found.outputs_match, "rounding does not explain what is DIFFERENT above"


class TestWaitsForNothing:
    @pytest.mark.parametrize("graphs", [None, -1])
    def test_chunks_and_the_overlap_behind_them_pass_under_the_sync_debug_mode(self, graphs: int | None) -> None:
        loaded = load_model("oracle", device=TORCH_DEVICE)
        checked = {Order.OVERLAP: 0, Order.NO_OVERLAP: 0}
        with Engine(loaded, EngineConfig(**{**LIMITS, **CHUNKS, "graphs": graphs})) as engine:
            for prompt, params in zip(prompts(loaded.vocab_size), mix(is_plain=True), strict=True):
                engine.add_request(prompt, params)
            while engine.has_unfinished():
                engine.step(until=lambda border: True)  # stands before its first phase
                iteration = engine.in_hand
                assert iteration is not None
                if iteration.order is Order.OVERLAP or iteration.reason is Reason.CHUNK_IN_PROGRESS:
                    with no_hidden_synchronisation():
                        engine.step()
                    checked[iteration.order] += 1
                else:
                    engine.step()

        assert min(checked.values()) > 5, checked
