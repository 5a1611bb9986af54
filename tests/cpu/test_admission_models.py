"""Prefix hits, pausing, gated and overlapped admission on small torch models: against transformers and a plain run."""

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

LIMITS: dict[str, Any] = {
    "max_requests": 4,
    "max_sequence_length": 128,
    "max_batch_tokens": 512,
    "num_blocks": 32,
    "device": "inline",
    "debug_invariants": True,
    "overlap_admission": False,  # unless a case says so
}
CASES: dict[str, dict[str, Any]] = {
    "prefix": {"prefix_caching": True},
    "prefix in chunks": {"prefix_caching": True, "chunked_prefill": True, "max_batch_tokens": 24},
    "pausing": {"capacity_policy": "max_utilization", "num_blocks": 10, "paused_blocks": 3},
    "evicting": {
        "capacity_policy": "max_utilization",
        "num_blocks": 10,
        "paused_blocks": 0,
        "prefix_caching": True,
    },
    "gated": {"graph_all_prefills": True, "graphs": (1, 2, 4, 128)},
    "beside": {"overlap_admission": True},
    "beside, all of it": {
        "overlap_admission": True,
        "chunked_prefill": True,
        "max_batch_tokens": 24,
        "prefix_caching": True,
        "capacity_policy": "max_utilization",
        "num_blocks": 9,
        "paused_blocks": 2,
    },
}


def prompts(vocab_size: int) -> list[list[int]]:
    """Lengths about a block's border, each twice, and extended by one, and parting within a block."""
    generator = torch.Generator().manual_seed(5)
    base = torch.randint(3, vocab_size, (70,), generator=generator).tolist()
    cut = [base[:n] for n in (15, 16, 17, 32, 70)]
    parted = [*base[:20], 3, *base[21:40]]
    return [*cut, *cut, base[:33], parted, base[:1]]


def params(i: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=6 + (5 * i) % 11,
        seed=i,
        temperature=0.9 * (i % 2),
        logprobs=1,
        presence_penalty=0.5 * (i % 3 == 0),
        ignore_eos=True,
    )


def serve(loaded: LoadedModel, *, greedy: bool = False, **options: Any) -> tuple[list[RequestOutput], Engine]:
    """Requests come while others run."""
    with Engine(loaded, EngineConfig(**{**LIMITS, **options})) as engine:
        outputs: dict[str, RequestOutput] = {}
        names = []
        for i, prompt in enumerate(prompts(loaded.vocab_size)):
            wanted = params(i).replace(temperature=0.0, presence_penalty=0.0) if greedy else params(i)
            names.append(engine.add_request(prompt, wanted))
            for _ in range(2):
                outputs |= {output.request_id: output for output in engine.step()}
        while engine.has_unfinished():
            outputs |= {output.request_id: output for output in engine.step()}
        check_idle(engine)
    return [outputs[name] for name in names], engine


class TestAgainstTransformers:
    @pytest.mark.parametrize("case", ["prefix", "evicting", "beside, all of it"])
    def test_greedy_tokens_and_log_probabilities_are_equal(self, case: str, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path / "model", "Qwen3ForCausalLM")
        loaded = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))

        outputs, engine = serve(loaded, greedy=True, **CASES[case])

        assert engine.counters.prefix_hit_tokens > 50
        check_against_transformers(folder, outputs)


class TestAgainstAPlainRun:
    """In float64, where another cut of the batch moves logits by 1e-14 and no draw is that close to a border."""

    @pytest.mark.parametrize("mode", ["legacy", "async"])
    @pytest.mark.parametrize("case", CASES)
    def test_tokens_and_log_probabilities_are_equal(self, case: str, mode: str) -> None:
        loaded = load_model("shape:tiny", dtype=torch.float64, device=torch.device("cpu"))
        plain, _ = serve(loaded, mode="legacy")

        found, engine = serve(loaded, mode=mode, **CASES[case])

        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        for one, other in zip(found, plain, strict=True):
            for part, values in engine_says(one).items():
                assert torch.allclose(values, engine_says(other)[part], atol=1e-6, rtol=0), part
        counters = engine.counters
        assert (counters.prefix_hit_tokens > 0) == ("prefix_caching" in CASES[case])
        assert (counters.pauses + counters.evictions > 0) == (case in ("pausing", "evicting", "beside, all of it"))
        assert (counters.orders["overlap_admit"] > 0) == (mode == "async" and "beside" in case)


class TestDrafts:
    @pytest.mark.parametrize("case", ["beside", "beside, all of it"])
    def test_beside_prompts_that_enter_change_no_token(self, case: str) -> None:
        """On the shipped hybrid, whose heads foresee something; against a run without drafts."""
        loaded = load_model("shipped", dtype=torch.float64, device=torch.device("cpu"))
        plain, _ = serve(loaded, mode="legacy")

        found, engine = serve(loaded, speculative_tokens=2, **CASES[case])

        assert [one.token_ids for one in found] == [one.token_ids for one in plain]
        for one, other in zip(found, plain, strict=True):
            for part, values in engine_says(one).items():
                assert torch.allclose(values, engine_says(other)[part], atol=1e-6, rtol=0), part
        assert engine.counters.orders["mtp_overlap_admit"] > 2
        assert engine.counters.drafts_accepted.total() > 0


class TestCache:
    @pytest.mark.parametrize("case", ["prefix in chunks", "evicting", "beside, all of it"])
    def test_shared_blocks_are_never_written_again(self, case: str) -> None:
        """Byte for byte around every forward."""
        loaded = load_model("shape:tiny", dtype=torch.float32, device=torch.device("cpu"))
        with Engine(loaded, EngineConfig(**{**LIMITS, "debug_invariants": False, **CASES[case]})) as engine:
            watch = CacheWatch(engine)
            for i, prompt in enumerate(prompts(loaded.vocab_size)):
                engine.add_request(prompt, params(i))
                engine.step()
            while engine.has_unfinished():
                engine.step()
            assert engine.counters.prefix_hit_tokens > 50
            assert watch.eager > 20
