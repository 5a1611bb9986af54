"""The whole engine on models with Mamba2 layers: against transformers, and one schedule against another."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.invariants import check_idle
from engine.models.loader import LoadedModel, load_model
from engine.request import RequestOutput
from tests.changed_shapes import TWO_LAYERS, changed_shape
from tests.cpu.models.test_hybrid_families import FEW, reference_logprobs, write_hybrid

LENGTHS = (1, 2, 15, 16, 17, 33, 100)
LIMITS: dict[str, Any] = {"max_requests": 8, "max_batch_tokens": 512, "max_sequence_length": 192, "num_blocks": 60}
MIX = [
    SamplingParams(max_tokens=24, temperature=0),
    SamplingParams(max_tokens=20, seed=11, temperature=1.3),
    SamplingParams(max_tokens=17, seed=12, top_p=0.8, logprobs=3),
    SamplingParams(max_tokens=28, seed=13, top_k=7, presence_penalty=0.7),
    SamplingParams(max_tokens=1, seed=14),
    SamplingParams(max_tokens=22, seed=15, min_p=0.05, min_tokens=5),
    SamplingParams(max_tokens=9, temperature=0, logprobs=0, prompt_logprobs=2),
]


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def serve(
    loaded: LoadedModel, requests: list[list[int]], params: Any, *, one_by_one: bool = False, **options: Any
) -> list[RequestOutput]:
    with Engine(loaded, EngineConfig(**{**LIMITS, **options}, debug_invariants=True)) as engine:
        if one_by_one:
            outputs = [engine.generate([r], p, progress=False)[0] for r, p in zip(requests, params, strict=True)]
        else:
            outputs = engine.generate(requests, params, progress=False)
        check_idle(engine)
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[tuple[tuple[int, ...], str | None]]:
    return [(output.token_ids, output.finish_reason) for output in outputs]


@cache
def tiny_hybrid() -> LoadedModel:
    return load_model("shape:tiny-hybrid", dtype=torch.float64)


@cache
def expected_mix() -> list[tuple[tuple[int, ...], str | None]]:
    """One request at a time, each prompt whole, nothing overlapped."""
    loaded = tiny_hybrid()
    return tokens(
        serve(loaded, prompts(loaded.vocab_size), MIX, one_by_one=True, mode="legacy", device="inline", dtype="float64")
    )


@pytest.mark.parametrize("variant", FEW)
def test_greedy_tokens_and_logprobs_equal_transformers(variant: str, tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path, variant)
    loaded = load_model(folder, dtype=torch.float32)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=1)

    outputs = serve(loaded, prompts(loaded.vocab_size), params)

    whole = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
    for output, ids, expected in zip(outputs, whole, reference_logprobs(folder, whole), strict=True):
        assert output.prompt_logprobs is not None
        assert output.logprobs is not None
        found = [*output.prompt_logprobs[1:], *output.logprobs]
        for position, (row, token) in enumerate(zip(found, ids[1:], strict=True)):
            assert row is not None
            assert row[token] == pytest.approx(float(expected[position, token]), abs=1e-4)
        first = len(output.prompt_token_ids) - 1
        assert list(output.token_ids) == expected[first:-1].argmax(-1).tolist()


class TestOneScheduleAgainstAnother:
    """In float64, where a changed batch moves logits by 1e-13 and no draw is that close to a border."""

    @pytest.mark.parametrize(
        ("device", "mode", "graphs"),
        [
            ("inline", "legacy", (8,)),
            ("inline", "async", None),
            ("cpu", "legacy", None),
            ("cpu", "async", (8,)),
        ],
    )
    def test_batched_equals_one_by_one(self, device: Any, mode: Any, graphs: Any) -> None:
        loaded = tiny_hybrid()

        together = serve(
            loaded, prompts(loaded.vocab_size), MIX, mode=mode, device=device, graphs=graphs, dtype="float64"
        )

        assert tokens(together) == expected_mix()

    @pytest.mark.parametrize(
        "options",
        [
            {"speculative_tokens": 2},
            {"speculative_tokens": 1, "device": "cpu", "graphs": (8,), "graph_non_decode": False},
            {"speculative_tokens": 2, "state_rewind": "replayed", "prefix_caching": True},
        ],
        ids=["2", "1, buckets", "2, replayed"],
    )
    def test_drafts_whose_counts_are_waited_for_late_give_the_same_tokens(self, options: dict[str, Any]) -> None:
        loaded = tiny_hybrid()

        late = serve(
            loaded,
            prompts(loaded.vocab_size),
            MIX,
            late_rewind=True,
            **{"device": "inline", **options},
            dtype="float64",
        )

        assert tokens(late) == expected_mix()

    @pytest.mark.parametrize("late", [False, True])
    def test_log_probabilities_behind_filters_are_those_of_no_drafts(self, late: bool) -> None:
        """Upstream refuses the two together: each token's filters must know the accepted drafts before it."""
        loaded = changed_shape("tiny-hybrid", torch.float64, **TWO_LAYERS, vocab_size=8)
        params = [one.replace(logprobs=2, prompt_logprobs=None) for one in MIX]
        options: dict[str, Any] = {"device": "inline", "dtype": "float64", "logprobs_mode": "processed"}
        plain = serve(loaded, prompts(8), params, **options)

        drafted = serve(loaded, prompts(8), params, speculative_tokens=2, late_rewind=late, **options)

        assert tokens(drafted) == tokens(plain)
        for one, other in zip(drafted, plain, strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            for found, expected in zip(one.logprobs, other.logprobs, strict=True):
                assert found == pytest.approx(expected, abs=1e-9)
        raw = serve(loaded, prompts(8), params, device="inline", dtype="float64")
        assert tokens(raw) == tokens(plain)
        assert any(one.logprobs != other.logprobs for one, other in zip(raw, plain, strict=True))

    @pytest.mark.parametrize("budget", [10, 17, 64])
    def test_prompts_read_in_chunks_give_the_same_tokens(self, budget: int) -> None:
        loaded = tiny_hybrid()

        chunked = serve(
            loaded,
            prompts(loaded.vocab_size),
            [*MIX[:-1], SamplingParams(max_tokens=9, temperature=0, logprobs=0)],
            chunked_prefill=True,
            max_batch_tokens=budget,
            dtype="float64",
        )

        assert tokens(chunked) == expected_mix()

    def test_rows_that_were_taken_back_and_computed_again_give_the_same_tokens(self) -> None:
        loaded = tiny_hybrid()
        squeezed: dict[str, Any] = {"num_blocks": 9, "capacity_policy": "max_utilization", "max_sequence_length": 144}

        with Engine(loaded, EngineConfig(**{**LIMITS, **squeezed}, dtype="float64", debug_invariants=True)) as engine:
            outputs = engine.generate(prompts(loaded.vocab_size), MIX, progress=False)
            check_idle(engine)

        assert engine.counters.evictions > 0
        assert tokens(outputs) == expected_mix()

    @pytest.mark.parametrize("length", [16, 32, 70])
    def test_prefixes_out_of_the_cache_give_the_same_tokens(self, length: int) -> None:
        loaded = tiny_hybrid()
        base = prompts(loaded.vocab_size)[-1]
        requests = [[*base[:length], *tail] for tail in ([5, 6, 7], [9], [11] * 20, [5, 6, 8])]
        params = [SamplingParams(max_tokens=12, seed=number) for number in range(len(requests))]
        cold = serve(loaded, requests, params, one_by_one=True, dtype="float64")

        warm = serve(loaded, requests, params, one_by_one=True, prefix_caching=True, dtype="float64")

        assert tokens(warm) == tokens(cold)
        assert sum(output.num_cached_tokens for output in warm[1:]) >= 3 * (length // 16 * 16)


@pytest.mark.parametrize("graphs", [None, (8,)])
def test_a_model_without_attention_is_served(graphs: Any, tmp_path: Path) -> None:
    loaded = load_model(write_hybrid(tmp_path, "mamba2"), dtype=torch.float64)
    params = [SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)] * len(LENGTHS)
    requests = prompts(loaded.vocab_size)
    alone = serve(loaded, requests, params, one_by_one=True, mode="legacy", dtype="float64")

    together = serve(loaded, requests, params, graphs=graphs, dtype="float64")

    assert tokens(together) == tokens(alone)
