"""CUDA graphs: replay says what eager says, randomness goes on, padding touches nothing, and one capture is enough.

Copied out of this folder and run without a GPU it takes the inline device, whose buckets obey the same sentences (the
memory figure aside, since traces are shared).
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.batch import BatchDimensions
from engine.controller import Border
from engine.device import Device, make_device
from engine.engine import Engine
from engine.invariants import check_device, check_idle
from engine.models.loader import LoadedModel, load_model
from engine.models.oracle import OracleModel
from engine.phases import Phase
from engine.request import RequestOutput
from tests.cache_watch import CacheWatch
from tests.device_worlds import oracle_world
from tests.oracle_reference import VOCAB, reference_tokens
from tests.oracle_world import play

DEVICE = "cuda" if torch.cuda.is_available() else "inline"
TORCH_DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
LIMITS: dict[str, Any] = {"max_requests": 8, "max_batch_tokens": 128, "max_sequence_length": 96, "num_blocks": 48}
PROMPTS = [[1 + (7 * i + j) % 60 for j in range(n)] for i, n in enumerate((1, 2, 15, 16, 17, 33, 60, 5, 9, 3, 30))]
MIX = [
    SamplingParams(
        max_tokens=18 + i,
        temperature=0.0 if i % 3 == 1 else 0.8,
        top_p=0.9 if i % 4 == 2 else 1.0,
        top_k=5 if i % 5 == 2 else 0,
        seed=i,
        ignore_eos=True,
    )
    for i in range(len(PROMPTS))
]
Answers = list[tuple[tuple[int, ...], str | None]]


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("shape:tiny", attention="torch", dtype=torch.float64, device=TORCH_DEVICE)


def engine_on(loaded: LoadedModel, device: Device | None = None, **options: Any) -> Engine:
    config = EngineConfig(**{**LIMITS, "device": DEVICE, **options})
    return Engine(loaded, config, device=device)


def serve(engine: Engine, between: Callable[[int, list[str]], None] = lambda step, ids: None) -> dict[str, Any]:
    """Serve ``PROMPTS``; ``between`` is called before each step. Returns the last outputs by id, in order."""
    ids = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, MIX, strict=True)]
    done: dict[str, RequestOutput] = {}
    step = 0
    while engine.has_unfinished():
        between(step, ids)
        done.update({output.request_id: output for output in engine.step() if output.finished})
        step += 1
    check_device(engine)
    check_idle(engine)
    return {request_id: done.get(request_id) for request_id in ids}


def answers(outputs: dict[str, Any]) -> Answers:
    return [(output.token_ids, output.finish_reason) for output in outputs.values()]


@pytest.fixture(scope="module")
def expected(tiny: LoadedModel) -> Answers:
    """What a fresh engine without graphs says."""
    with engine_on(tiny, mode="legacy") as engine:
        return answers(serve(engine))


class FlatOracle(OracleModel):
    """Every id is as likely as any other, so a token tells the random number it was drawn by, and nothing else."""

    def forward(self, batch: Any, caches: Any) -> torch.Tensor:
        return super().forward(batch, caches) * 0.0


class TestRandomStreams:
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_are_not_frozen_by_replay(self, mode: str) -> None:
        """Logits never change here: a stream that stood still would repeat one token for ever."""
        flat = LoadedModel(
            model=FlatOracle(VOCAB, device=TORCH_DEVICE),
            tokenizer=None,
            name="flat",
            eos_token_ids=(),
            vocab_size=VOCAB,
            architecture="Oracle",
            config={},
        )
        params = [SamplingParams(max_tokens=40, temperature=1.0, seed=seed) for seed in (5, 6, 5)]
        with engine_on(flat, mode=mode, graphs=-1) as engine:
            outputs = engine.generate([[1], [2], [3]], params, progress=False)
            hits, misses = engine.counters.graph_hits, engine.counters.graph_misses

        assert hits >= 40
        assert misses == 0
        streams = [output.token_ids for output in outputs]
        for one, stream in zip(params, streams, strict=True):
            assert one.seed is not None
            for at, token in enumerate(stream):
                assert token in reference_tokens(np.zeros(VOCAB), one, one.seed, [], stream[:at])
        assert streams[0] == streams[2]
        assert streams[0] != streams[1]
        assert len(set(streams[0])) > 10

    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_give_the_tokens_of_the_eager_engine(self, tiny: LoadedModel, expected: Answers, mode: str) -> None:
        with engine_on(tiny, mode=mode, graphs=-1) as engine:
            first, again = (answers(serve(engine)) for _ in range(2))
            hits, misses = engine.counters.graph_hits, engine.counters.graph_misses

        assert first == again == expected
        assert hits > 40
        assert misses == 0


def switch_the_mode(engine: Engine, step: int, ids: list[str]) -> None:
    if step % 3 == 2:
        engine.set_mode("legacy" if engine.mode == "async" else "async")


def abort_three(engine: Engine, step: int, ids: list[str]) -> None:
    if step in (2, 7, 9):
        engine.abort(ids[step])


def reset_everything(engine: Engine, step: int, ids: list[str]) -> None:
    if step == 12:
        assert engine.pending is not None
        engine.reset()


def counting_captures() -> tuple[Device, list[object]]:
    """A device, and a list that grows by one with each capture."""
    device = make_device(DEVICE)
    calls: list[object] = []
    capture = device.capture

    def counted(function: Any, *rest: Any, **named: Any) -> Any:
        calls.append(function)
        return capture(function, *rest, **named)

    device.capture = counted  # type: ignore[method-assign]
    return device, calls


class TestOneCapture:
    @pytest.mark.parametrize("disturb", [switch_the_mode, abort_three, reset_everything])
    def test_outlives_mode_switches_aborts_and_reset(
        self, tiny: LoadedModel, expected: Answers, disturb: Callable[[Engine, int, list[str]], None]
    ) -> None:
        device, calls = counting_captures()
        with engine_on(tiny, device, mode="async", graphs=-1) as engine:
            captured = len(calls)
            disturbed = serve(engine, lambda step, ids: disturb(engine, step, ids))
            afterwards = answers(serve(engine))
            hits, misses = engine.counters.graph_hits, engine.counters.graph_misses

        assert captured > 0
        assert len(calls) == captured, "something was captured again"
        assert afterwards == expected
        for output, (tokens, reason) in zip(disturbed.values(), expected, strict=True):
            if output is None:
                assert disturb is reset_everything
            elif output.finish_reason == "abort":
                assert output.token_ids == tokens[: len(output.token_ids)]
            else:
                assert (output.token_ids, output.finish_reason) == (tokens, reason)
        assert hits > 40
        assert misses == 0

    @pytest.mark.parametrize("seed", range(4))
    def test_serves_any_schedule_of_arrivals_aborts_switches_and_resets(self, seed: int) -> None:
        device, calls = counting_captures()
        world = oracle_world(device, graphs=-1 if DEVICE == "cuda" else (2, 8, 64))
        captured = len(calls)
        with world.engine:
            play(world, random.Random(seed), num_acts=150, text=True)

        assert len(calls) == captured > 0


class TestPadding:
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    @pytest.mark.parametrize("kind", ["float64", "bfloat16", "oracle"])
    def test_writes_the_dummy_block_and_nothing_else(
        self, tiny: LoadedModel, expected: Answers, kind: str, mode: str
    ) -> None:
        if kind == "float64":
            loaded = tiny
        else:  # in bfloat16 fused kernels write the cache
            loaded = load_model(
                "oracle" if kind == "oracle" else "shape:tiny", dtype=torch.bfloat16, device=TORCH_DEVICE
            )
        with engine_on(loaded, mode=mode, graphs=(4, 8, 40, 128)) as engine:
            watch = CacheWatch(engine)
            found = answers(serve(engine))

        assert watch.padded["decode"] > 10
        assert watch.padded["mixed"] >= 2
        assert watch.eager == 0
        assert {reason for _, reason in found} == {"length"}, "a NaN was read that nobody wrote"
        if kind == "float64":
            assert found == expected


SMALL: dict[str, Any] = {**LIMITS, "max_batch_tokens": 48, "max_sequence_length": 48, "num_blocks": 24}


def prompt_lengths(size: BatchDimensions, longest: int) -> list[int]:
    """Lengths of ``size``'s prompts that use up its tokens, as far as one prompt may be long."""
    tokens, count = size.num_tokens - size.num_decode, size.num_prefill
    return [min(longest, tokens // count + (i < tokens % count)) for i in range(count)]


def forward_of(engine: Engine, size: BatchDimensions) -> list[RequestOutput]:
    """Bring about a forward of ``size``: its decode rows are admitted first, its prompts come beside them."""
    rng = random.Random(repr(size))

    def add(length: int, max_tokens: int) -> str:
        seed = rng.randrange(1000)
        params = SamplingParams(max_tokens=max_tokens, temperature=seed % 2 * 0.9, seed=seed, logprobs=2)
        return engine.add_request([rng.randrange(VOCAB) for _ in range(length)], params)

    ids = [add(1, 4) for _ in range(size.num_decode)]
    done = {output.request_id: output for output in engine.step()}
    if size.num_prefill:
        ids += [add(length, 3) for length in prompt_lengths(size, engine.resolved.max_sequence_length - 1)]
    while engine.has_unfinished():
        done.update({output.request_id: output for output in engine.step()})
    return [done[request_id] for request_id in ids]


class TestReplay:
    @pytest.mark.parametrize("distribution", ["exponential", "linear", "hybrid"])
    def test_of_every_graph_in_the_list_equals_eager(self, tiny: LoadedModel, distribution: str) -> None:
        options = {**SMALL, "mode": "legacy"}
        replayed: list[BatchDimensions | None] = []

        def note(border: Border) -> None:
            if border.phase is Phase.FORWARD and border.side == "after" and border.iteration.plan is not None:
                replayed.append(border.iteration.plan.graph)

        with (
            engine_on(tiny, **options) as eager,
            engine_on(tiny, **options, graphs=-1, graph_distribution=distribution) as engine,
        ):
            engine.controller.watch = note
            sizes = list(engine.runner.graphs.sizes)
            for size in sizes:
                replayed.clear()
                outputs = forward_of(engine, size)
                assert size in replayed, f"{size} was not replayed, but {replayed}"
                assert None not in replayed
                for found, wanted in zip(outputs, forward_of(eager, size), strict=True):
                    check_same(found, wanted)

        assert {size.num_prefill > 0 for size in sizes} == {False, True}


def check_same(found: RequestOutput, wanted: RequestOutput) -> None:
    """The same tokens, and log-probabilities of float64 that are the same once they are float32."""
    assert (found.token_ids, found.finish_reason) == (wanted.token_ids, wanted.finish_reason)
    assert found.logprobs is not None
    assert wanted.logprobs is not None
    for row, other in zip(found.logprobs, wanted.logprobs, strict=True):
        assert row == pytest.approx(other, abs=1e-6)


class TestMemory:
    def test_of_graphs_is_told_and_does_not_change_by_running(self, tiny: LoadedModel) -> None:
        with engine_on(tiny, graphs=None) as engine:
            assert engine.graph_memory_bytes == 0
        gc.collect()  # graphs of engines before would be let go of while these are captured
        with engine_on(tiny, graphs=-1) as engine:
            taken = engine.graph_memory_bytes
            serve(engine)
            after_serving = engine.graph_memory_bytes
            engine.reset()
            after_reset = engine.graph_memory_bytes

        assert isinstance(taken, int)
        assert 0 < taken < engine.device.memory_bytes()
        assert after_serving == after_reset == taken
