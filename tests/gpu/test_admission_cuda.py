"""Prefix hits, pausing, gated and overlapped admission on CUDA: the answers of a plain run, and no hidden wait."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.invariants import check_device, check_idle
from engine.models.loader import LoadedModel, load_model
from engine.phases import Order
from engine.request import RequestOutput
from tests.sync_debug import no_hidden_synchronisation
from tests.teacher import engine_says
from tests.tell import tell
from workbench.comparison import compare
from workbench.verdicts import Verdict
from workbench.workloads import RequestSpec, Workload

DEVICE = "cuda" if torch.cuda.is_available() else "inline"
TORCH_DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
LIMITS: dict[str, Any] = {
    "device": DEVICE,
    "max_requests": 6,
    "max_sequence_length": 160,
    "num_blocks": 60,
    "overlap_admission": False,  # unless a case says so
}
COUNT = 24
MODEL = "shape:qwen3-0.6b"
CASES: dict[str, dict[str, Any]] = {
    "prefix": {"prefix_caching": True},
    "prefix, chunks": {"prefix_caching": True, "chunked_prefill": True, "max_batch_tokens": 24},
    "pausing": {"capacity_policy": "max_utilization", "num_blocks": 14, "paused_blocks": 4},
    "evicting": {"capacity_policy": "max_utilization", "num_blocks": 14, "paused_blocks": 0, "prefix_caching": True},
    "beside": {"overlap_admission": True},
    "beside, chunks, prefix": {
        "overlap_admission": True,
        "chunked_prefill": True,
        "max_batch_tokens": 24,
        "prefix_caching": True,
    },
    "gated": {"graph_all_prefills": True, "graphs": -1, "max_batch_tokens": 256},
    "gated, beside, chunks": {
        "graph_all_prefills": True,
        "graphs": (1, 2, 4, 8, 16, 32, 64),
        "overlap_admission": True,
        "chunked_prefill": True,
        "max_batch_tokens": 64,
    },
}


def prompts(vocab_size: int) -> list[list[int]]:
    """Of three beginnings, up to places of their own."""
    rng = random.Random(7)
    bases = [[rng.randrange(3, vocab_size) for _ in range(120)] for _ in range(3)]
    return [bases[i % 3][: rng.randint(1, 110)] + [3 + i] * (i % 4) for i in range(COUNT)]


def params(i: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=4 + (7 * i) % 30,
        temperature=0.8 * (i % 2),
        seed=i,
        ignore_eos=True,
        logprobs=i % 3,
        presence_penalty=0.5 * (i % 7 == 0),
    )


def serve(loaded: LoadedModel, *, checks: bool = True, **options: Any) -> tuple[list[RequestOutput], Engine]:
    """Requests arrive one by one in the midst of running ones."""
    with Engine(loaded, EngineConfig(**{**LIMITS, "max_batch_tokens": 512, **options})) as engine:
        outputs: dict[str, RequestOutput] = {}
        coming = list(enumerate(prompts(loaded.vocab_size)))
        names: list[str] = []
        while coming or engine.has_unfinished():
            if coming and engine.controller.next_index % 2 == 0:
                number, prompt = coming.pop(0)
                names.append(engine.add_request(prompt, params(number)))
            outputs |= {output.request_id: output for output in engine.step()}
            if checks:
                check_device(engine)
        check_idle(engine)
    return [outputs[name] for name in names], engine


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("shape:tiny", dtype=torch.float64, device=TORCH_DEVICE)


@pytest.fixture(scope="module")
def plain(tiny: LoadedModel) -> list[RequestOutput]:
    return serve(tiny, mode="legacy", dtype="float64", graphs=None)[0]


class TestFloat64:
    @pytest.mark.parametrize(
        ("case", "graphs"), [*((case, None) for case in CASES), ("pausing", -1), ("beside, chunks, prefix", -1)]
    )
    def test_tokens_and_log_probabilities_are_those_of_a_plain_run(
        self, case: str, graphs: int | None, tiny: LoadedModel, plain: list[RequestOutput]
    ) -> None:
        options: dict[str, Any] = {"graphs": graphs, "dtype": "float64", "debug_invariants": True, **CASES[case]}
        found, engine = serve(tiny, **options)

        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        for one, other in zip(found, plain, strict=True):
            for part, values in engine_says(one).items():
                assert torch.allclose(values, engine_says(other)[part], atol=1e-6, rtol=0), part
        counters = engine.counters
        if "prefix" in case:
            assert counters.prefix_hit_tokens > 100
        if "beside" in case:
            assert counters.orders["overlap_admit"] > 10
        if "pausing" in case:
            assert counters.pauses > 0
        if "evicting" in case:
            assert counters.evictions > 0
        if "gated" in case:
            assert set(counters.miss_reasons) <= {
                "continuing chunk",
                "prompt log probabilities",
                "larger than every graph",
            }


class TestDrafts:
    @pytest.mark.parametrize("case", ["beside", "beside, chunks, prefix"])
    @pytest.mark.parametrize("graphs", [None, -1])
    def test_beside_prompts_that_enter_change_no_token(self, case: str, graphs: int | None) -> None:
        loaded = load_model("shipped", dtype=torch.float64, device=TORCH_DEVICE)
        plain, _ = serve(loaded, mode="legacy", dtype="float64", graphs=None)

        options: dict[str, Any] = {"speculative_tokens": 2, "graphs": graphs, "dtype": "float64", **CASES[case]}
        found, engine = serve(loaded, debug_invariants=True, **options)

        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        for one, other in zip(found, plain, strict=True):
            for part, values in engine_says(one).items():
                assert torch.allclose(values, engine_says(other)[part], atol=1e-6, rtol=0), part
        assert engine.counters.orders["mtp_overlap_admit"] > 10
        assert engine.counters.drafts_accepted.total() > 0


class TestBfloat16:
    @pytest.mark.parametrize("backend", ["triton", "flashinfer"])
    def test_legs_part_only_where_rounding_decides(self, backend: str, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip(backend)
        loaded = load_model(MODEL, attention=backend, dtype=torch.bfloat16, device=TORCH_DEVICE)
        requests = tuple(
            RequestSpec(prompt=tuple(prompt), params=params(i).replace(logprobs=None, presence_penalty=0.0))
            for i, prompt in enumerate(prompts(loaded.vocab_size))
        )
        found = compare(
            Workload(name="admission", requests=requests),
            [
                "legacy",
                ("prefix", {"mode": "async", "overlap_admission": False, "prefix_caching": True}),
                ("beside", {"mode": "async", "overlap_admission": True, "prefix_caching": True}),
            ],
            model=loaded,
            repeats=1,
            warmup=0,
            device=DEVICE,
            dtype="bfloat16",
            attention_backend=backend,
            max_requests=8,
            max_batch_tokens=512,
            max_sequence_length=300,
            num_blocks=228,
        )
        parted = [one for one in found.verdicts if one.verdict is not Verdict.EQUAL]
        lines = [f"{backend}: {found.verdict_text}", *map(str, parted)]
        tell(capsys, lines)
        assert found.outputs_match, "\n".join(["rounding does not explain what is DIFFERENT", *lines])


class TestWaitsForNothing:
    @pytest.mark.parametrize(
        ("case", "drafts"),
        [
            ("beside", 0),
            ("beside, chunks, prefix", 0),
            ("gated, beside, chunks", 0),
            ("beside", 3),
            ("beside, chunks, prefix", 2),
        ],
    )
    @pytest.mark.parametrize("graphs", [None, -1])
    def test_overlapped_admission_passes_under_the_sync_debug_mode(
        self, case: str, drafts: int, graphs: int | None
    ) -> None:
        """With drafts the accepted counts are waited for, by an event, as resolve waits for tokens."""
        loaded = load_model("oracle-mtp" if drafts else "oracle", device=TORCH_DEVICE)
        checked = 0
        options = {"max_batch_tokens": 512, "graphs": graphs, "speculative_tokens": drafts, **CASES[case]}
        with Engine(loaded, EngineConfig(**{**LIMITS, **options})) as engine:
            coming = list(enumerate(prompts(loaded.vocab_size)))
            while coming or engine.has_unfinished():
                if coming and engine.controller.next_index % 2 == 0:
                    number, prompt = coming.pop(0)
                    engine.add_request(prompt, params(number))
                if not engine.has_unfinished():
                    continue
                engine.step(until=lambda border: True)  # stands before its first phase
                iteration = engine.in_hand
                assert iteration is not None
                if iteration.order.without_drafting is Order.OVERLAP_ADMIT:
                    with no_hidden_synchronisation():
                        engine.step()
                    checked += 1
                else:
                    engine.step()
        assert checked > 5
