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
from tests.same_outputs import check_same

FAMILIES = ("mamba2", "bamba", "nemotron", "granite")
MODES = ("legacy", "async")
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
TOLD = [one if one.logprobs is not None else one.replace(logprobs=1) for one in MIX]
"""The same, with log-probabilities of all."""


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
    loaded = tiny_hybrid()
    return tokens(serve_cold(loaded, prompts(loaded.vocab_size), MIX))


def serve_cold(loaded: LoadedModel, requests: list[list[int]], params: Any) -> list[RequestOutput]:
    """One request at a time, each prompt whole, nothing overlapped."""
    return serve(loaded, requests, params, one_by_one=True, mode="legacy", device="inline", dtype="float64")


def serve_told(loaded: LoadedModel, **options: Any) -> list[RequestOutput]:
    """``TOLD``, all together."""
    return serve(loaded, prompts(loaded.vocab_size), TOLD, dtype="float64", **options)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", FEW)
def test_greedy_tokens_and_logprobs_equal_transformers(variant: str, mode: str, tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path, variant)
    loaded = load_model(folder, dtype=torch.float32)
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, logprobs=1, prompt_logprobs=1)

    outputs = serve(loaded, prompts(loaded.vocab_size), params, mode=mode)

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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", FEW)
def test_first_tokens_and_logprobs_equal_transformers_behind_every_length(
    variant: str, mode: str, tmp_path: Path
) -> None:
    """Prompts of 1 to 100 tokens beside each other; what transformers says of the longest tells of all."""
    folder = write_hybrid(tmp_path, variant)
    loaded = load_model(folder, dtype=torch.float32)
    text = prompts(loaded.vocab_size)[-1]
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, logprobs=0)

    outputs = serve(loaded, [text[:length] for length in range(1, 101)], params, mode=mode, device="inline")

    (expected,) = reference_logprobs(folder, [text])
    assert [output.token_ids[0] for output in outputs] == expected.argmax(-1).tolist()
    found = torch.tensor([row[one.token_ids[0]] for one in outputs for row in one.logprobs or ()])
    torch.testing.assert_close(found, expected.amax(-1), atol=1e-4, rtol=0.0)


@pytest.fixture(scope="module", params=FAMILIES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model of each family."""
    return load_model(write_hybrid(tmp_path_factory.mktemp("family"), request.param), dtype=torch.float64)


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> list[RequestOutput]:
    """Of ``TOLD``."""
    return serve_cold(loaded, prompts(loaded.vocab_size), TOLD)


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
    def test_batched_equals_one_by_one(
        self, loaded: LoadedModel, expected: list[RequestOutput], device: str, mode: str, graphs: tuple[int, ...] | None
    ) -> None:
        options: dict[str, Any] = {"graph_non_decode": False} if graphs else {}

        check_same(serve_told(loaded, mode=mode, device=device, graphs=graphs, **options), expected)

    @pytest.mark.parametrize(("budget", "mode"), [(10, "legacy"), (10, "async"), (17, "async"), (64, "legacy")])
    def test_prompts_read_in_chunks_give_the_same_tokens(
        self, loaded: LoadedModel, expected: list[RequestOutput], budget: int, mode: str
    ) -> None:
        chunks: dict[str, Any] = {"chunked_prefill": True, "max_batch_tokens": budget}

        check_same(serve_told(loaded, mode=mode, device="inline", **chunks), expected)

    @pytest.mark.parametrize("mode", MODES)
    def test_a_prompt_read_in_chunks_of_every_size_gives_the_same_tokens(self, loaded: LoadedModel, mode: str) -> None:
        """With snapshots behind chunks and inside of them; what is left over is read too, so a size of 2 as well."""
        prompt = prompts(loaded.vocab_size)[-1][:18]
        requests = [prompt, [*prompt[:8], 5, 6, 7], [*prompt[:8], 9], prompt]
        params = [SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprobs=1)] * len(requests)
        cold = serve_cold(loaded, requests, params)
        options: dict[str, Any] = {"prefix_caching": True, "mamba_cache_gb": 0.002, "block_size": 4, "max_requests": 1}
        options |= {"chunked_prefill": True, "mode": mode, "device": "inline", "dtype": "float64"}
        hits: set[int] = set()

        for budget in range(3, 17):
            config = EngineConfig(**{**LIMITS, **options, "max_batch_tokens": budget})
            with Engine(loaded, config) as engine:
                warm = [engine.generate([r], p, progress=False)[0] for r, p in zip(requests, params, strict=True)]
                check_idle(engine)
                launched = [one.launched for one in engine.recorder.iterations() if one.launched is not None]
            check_same(warm, cold)
            assert max(one.num_tokens for one in launched) == budget
            cached = [output.num_cached_tokens for output in warm]
            assert cached == [0, cached[1], 8, 16]
            hits.add(cached[1])
        assert hits == {0, 4, 8}, "each is a state behind a chunk, which ended there or did not"

    @pytest.mark.parametrize("mode", MODES)
    def test_rows_that_were_taken_back_and_computed_again_give_the_same_tokens(
        self, loaded: LoadedModel, expected: list[RequestOutput], mode: str
    ) -> None:
        squeezed: dict[str, Any] = {"block_size": 4, "num_blocks": 30, "max_sequence_length": 112}
        squeezed |= {"capacity_policy": "max_utilization", "paused_blocks": 0}
        config = {**LIMITS, **squeezed, "mode": mode, "device": "inline", "dtype": "float64", "debug_invariants": True}

        with Engine(loaded, EngineConfig(**config)) as engine:
            outputs = engine.generate(prompts(loaded.vocab_size), TOLD, progress=False)
            check_idle(engine)

        assert engine.counters.evictions > 0
        check_same(outputs, expected)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("how", ["persist", "offload", "recompute"])
    def test_an_engine_that_was_suspended_gives_the_same_tokens(
        self, loaded: LoadedModel, expected: list[RequestOutput], how: str, mode: str
    ) -> None:
        """In the midst of a prompt that is read in chunks beside rows that decode, and when all decode."""
        options: dict[str, Any] = {"chunked_prefill": True, "max_batch_tokens": 24, "mode": mode, "device": "inline"}
        ended: dict[str, RequestOutput] = {}
        half_read: set[bool] = set()
        with Engine(loaded, EngineConfig(**{**LIMITS, **options}, dtype="float64", debug_invariants=True)) as engine:
            names = [engine.add_request(*one) for one in zip(prompts(loaded.vocab_size), TOLD, strict=True)]
            for step in range(100):
                if step in (2, 5, 18):
                    assert engine.table.num_live > 0
                    half_read.add(engine.table.partial_row is not None)
                    engine.suspend(how)
                    engine.resume()
                ended |= {output.request_id: output for output in engine.step()}
            check_idle(engine)

        assert half_read == {False, True}
        check_same([ended[name] for name in names], expected)

    @pytest.mark.parametrize("length", [16, 32, 70])
    def test_prefixes_out_of_the_cache_give_the_same_tokens(self, loaded: LoadedModel, length: int) -> None:
        base = prompts(loaded.vocab_size)[-1]
        requests = [[*base[:length], *tail] for tail in ([5, 6, 7], [9], [11] * 20, [5, 6, 8])]
        params = [SamplingParams(max_tokens=6, seed=number, logprobs=1) for number in range(len(requests))]
        cold = serve_cold(loaded, requests, params)
        options: dict[str, Any] = {"prefix_caching": True, "device": "inline", "dtype": "float64"}

        for mode in MODES:
            warm = serve(loaded, requests, params, one_by_one=True, mode=mode, **options)

            check_same(warm, cold)
            assert sum(output.num_cached_tokens for output in warm[1:]) >= 3 * (length // 16 * 16)


class TestShapeWithDraftHeads:
    """In float64 as well."""

    @pytest.mark.parametrize(("device", "mode"), [("inline", "legacy"), ("cpu", "async")])
    def test_padded_forwards_that_hold_prompts_give_the_same_tokens(self, device: Any, mode: Any) -> None:
        loaded = tiny_hybrid()

        together = serve(
            loaded, prompts(loaded.vocab_size), MIX, mode=mode, device=device, graphs=(8,), dtype="float64"
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


def test_a_model_without_attention_is_served_in_buckets_that_hold_prompts(tmp_path: Path) -> None:
    loaded = load_model(write_hybrid(tmp_path, "mamba2"), dtype=torch.float64)
    params = [SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)] * len(LENGTHS)
    requests = prompts(loaded.vocab_size)
    alone = serve(loaded, requests, params, one_by_one=True, mode="legacy", dtype="float64")

    together = serve(loaded, requests, params, graphs=(8,), dtype="float64")

    assert tokens(together) == tokens(alone)
