"""Choices of experts that are recorded are those that were made; those that are replayed are obeyed. Legacy mode."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine import ConfigError, EngineConfig, RequestError, SamplingParams
from engine.batch import BatchDimensions
from engine.engine import Engine
from engine.errors import DeviceError, IterationFailedError
from engine.invariants import check_idle
from engine.models.loader import LoadedModel, load_model
from engine.parallel.local import LocalRanks
from engine.parallel.shard import Shard
from engine.phases import Phase
from engine.request import RequestOutput
from tests.cpu.models.test_moe_families import write
from tests.routing_reference import Choices, Teacher, choices_of, other_choices
from tests.teacher import text_of

LIMITS: dict[str, Any] = {
    "mode": "legacy",
    "device": "inline",
    "max_requests": 4,
    "max_batch_tokens": 256,
    "max_sequence_length": 96,
    "num_blocks": 60,
    "block_size": 4,
    "debug_invariants": True,
}
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=0)
DRAWN = SamplingParams(max_tokens=12, seed=5, ignore_eos=True, logprobs=0)
LENGTHS = (1, 5, 16, 37)
FAMILIES = ("mixtral", "qwen3", "qwen3-renormalised", "qwen3-dense-layer")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp(request.param), request.param)


@cache
def loaded_from(folder: Path) -> LoadedModel:
    return load_model(folder, dtype=torch.float64, device=torch.device("cpu"))


@cache
def teacher_of(folder: Path) -> Teacher:
    return Teacher(folder)


@cache
def tiny_moe() -> LoadedModel:
    return load_model("shape:tiny-moe", dtype=torch.float64)


@cache
def shipped() -> LoadedModel:
    return load_model("shipped", dtype=torch.float64)


def prompts(loaded: LoadedModel, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, loaded.vocab_size, (n,), generator=generator).tolist() for n in lengths]


def engine_on(loaded: LoadedModel, routing_replay: Any = "record", **options: Any) -> Engine:
    return Engine(loaded, EngineConfig(**{**LIMITS, "routing_replay": routing_replay, **options}))


def drain(engine: Engine) -> dict[str, RequestOutput]:
    ended = {}
    while engine.has_unfinished():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    return ended


def record(loaded: LoadedModel, params: Any = GREEDY, texts: Any = None, **options: Any) -> list[RequestOutput]:
    with engine_on(loaded, **options) as engine:
        outputs = engine.generate(texts or prompts(loaded), params, progress=False)
        check_idle(engine)
    return outputs


def replay(
    loaded: LoadedModel, given: list[Choices], params: Any = GREEDY, texts: Any = None, **options: Any
) -> list[RequestOutput]:
    with engine_on(loaded, "replay", **options) as engine:
        names = [
            engine.add_request(prompt, params, routing=one)
            for prompt, one in zip(texts or prompts(loaded), given, strict=True)
        ]
        ended = drain(engine)
        check_idle(engine)
    return [ended[name] for name in names]


def routing_of(output: RequestOutput) -> Choices:
    """One row for each token that a forward has read."""
    assert output.routing is not None
    assert output.routing.dtype == np.int16
    assert output.routing.shape[0] == len(text_of(output)) - 1
    return output.routing


def said(output: RequestOutput) -> tuple[Any, ...]:
    return output.token_ids, output.logprobs


def check_same_routing(outputs: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for one, other in zip(outputs, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert np.array_equal(routing_of(one), routing_of(other))


class TwoBuckets:
    """One of decode rows, and one with a chunk beside them: few, for a trace takes seconds."""

    def choose(self, config: EngineConfig, max_sequence_length: int) -> list[BatchDimensions]:
        return [
            BatchDimensions(num_tokens=4, num_prefill=0, num_decode=4),
            BatchDimensions(num_tokens=8, num_prefill=4, num_decode=0),
        ]


class TestAgainstTransformers:
    def test_what_is_recorded_is_what_its_routers_choose(self, folder: Path) -> None:
        for output in record(loaded_from(folder)):
            chosen, _ = teacher_of(folder).read(text_of(output)[:-1])

            assert np.array_equal(routing_of(output), chosen)

    @pytest.mark.parametrize("reach", [1.0, 0.4])
    def test_other_choices_are_obeyed_as_far_as_they_reach(self, folder: Path, reach: float) -> None:
        """Behind them the router chooses, of what the told tokens have become."""
        loaded, teacher = loaded_from(folder), teacher_of(folder)
        plain = record(loaded)
        given = [other_choices(routing_of(one), 6)[: int(reach * routing_of(one).shape[0])] for one in plain]

        outputs = replay(loaded, given)

        assert [one.token_ids for one in outputs] != [one.token_ids for one in plain]
        for output, told in zip(outputs, given, strict=True):
            chosen, logprobs = teacher.read(text_of(output)[:-1], told)
            assert np.array_equal(routing_of(output), chosen)
            assert np.array_equal(chosen[: told.shape[0]], told)
            assert output.logprobs is not None
            behind = logprobs[-len(output.token_ids) :]
            assert list(output.token_ids) == behind.argmax(-1).tolist()
            found = [row[token] for token, row in zip(output.token_ids, output.logprobs, strict=True)]
            assert found == pytest.approx([float(p.max()) for p in behind], abs=1e-5)

    @pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
    def test_a_replayed_recording_says_the_same_to_the_last_bit(self, folder: Path, params: SamplingParams) -> None:
        loaded = loaded_from(folder)
        plain = record(loaded, params)

        outputs = replay(loaded, [routing_of(one) for one in plain], params)

        assert [said(one) for one in outputs] == [said(one) for one in plain]
        check_same_routing(outputs, plain)


class TestSchedules:
    def test_chunks_of_any_size_record_and_replay_the_same(self) -> None:
        loaded = tiny_moe()
        texts = prompts(loaded, (33,))
        (whole,) = record(loaded, texts=texts)
        told = other_choices(routing_of(whole), 8)
        (forced,) = replay(loaded, [told], texts=texts)
        assert forced.token_ids != whole.token_ids

        for tokens in range(3, 35):
            chunks: dict[str, Any] = {"chunked_prefill": True, "max_requests": 1, "max_batch_tokens": tokens}
            check_same_routing(record(loaded, texts=texts, **chunks), [whole])
            if tokens in (3, 4, 8, 17, 34):
                check_same_routing(replay(loaded, [told], texts=texts, **chunks), [forced])

    def test_padding_in_buckets_changes_nothing(self) -> None:
        loaded = tiny_moe()
        texts, chunks = prompts(loaded, (1, 5, 16)), {"chunked_prefill": True, "max_batch_tokens": 8}
        buckets: dict[str, Any] = {"graphs": (4, 8), "max_sequence_length": 32, "block_size": 32, **chunks}
        plain = record(loaded, texts=texts)
        told = [other_choices(routing_of(one), 8) for one in plain]
        forced = replay(loaded, told, texts=texts)

        found: list[list[RequestOutput]] = []
        for mode, routing in (("record", [None] * 3), ("replay", told)):
            config = EngineConfig(**{**LIMITS, "routing_replay": mode, **buckets})
            with Engine(loaded, config, graph_list=TwoBuckets()) as engine:
                pairs = zip(texts, routing, strict=True)
                names = [engine.add_request(prompt, GREEDY, routing=one) for prompt, one in pairs]
                ended = drain(engine)
                found.append([ended[name] for name in names])
                assert engine.counters.graph_misses == 0

        check_same_routing(found[0], plain)
        check_same_routing(found[1], forced)

    def test_rows_that_go_back_for_want_of_blocks_are_recorded_whole(self) -> None:
        loaded = tiny_moe()
        plain = record(loaded)
        told = [other_choices(routing_of(one), 8) for one in plain]
        forced, scarce = replay(loaded, told), {"capacity_policy": "max_utilization", "num_blocks": 17}

        with engine_on(loaded, **scarce) as engine:
            outputs = engine.generate(prompts(loaded), GREEDY, progress=False)
            assert engine.counters.evictions > 0

        check_same_routing(outputs, plain)
        check_same_routing(replay(loaded, told, **scarce), forced)

    def test_a_request_aborted_while_it_waits_to_come_back_keeps_its_record(self) -> None:
        loaded = tiny_moe()
        with engine_on(loaded, capacity_policy="max_utilization", num_blocks=17) as engine:
            for number, prompt in enumerate(prompts(loaded)):
                engine.add_request(prompt, GREEDY, request_id=str(number))
            while not engine.counters.evictions:
                engine.step()
            back = next(one for one in engine.queue.waiting if one.output_ids)
            engine.abort(back.request_id)
            output = drain(engine)[back.request_id]

        assert output.finish_reason == "abort"
        assert np.array_equal(routing_of(output), choices_of(loaded.model, text_of(output)[:-1]))

    @pytest.mark.parametrize("how", ["persist", "offload", "recompute"])
    def test_no_suspension_changes_a_record(self, how: Any) -> None:
        loaded = tiny_moe()
        plain = record(loaded)
        with engine_on(loaded) as engine:
            names, ended = [engine.add_request(prompt, GREEDY) for prompt in prompts(loaded)], {}
            for step in range(40):
                if step in (1, 4):
                    engine.suspend(how)
                    engine.resume()
                ended |= {output.request_id: output for output in engine.step()}

        check_same_routing([ended[name] for name in names], plain)

    def test_an_iteration_that_failed_changes_no_record(self) -> None:
        loaded = tiny_moe()
        plain = record(loaded)
        with engine_on(loaded) as engine:
            names = [engine.add_request(prompt, GREEDY) for prompt in prompts(loaded)]
            engine.step()
            engine.step()
            phases, forward = engine.controller.phase_functions, engine.controller.phase_functions[Phase.FORWARD]
            phases[Phase.FORWARD] = lambda iteration: 1 // 0
            with pytest.raises(ZeroDivisionError):
                engine.step()
            with pytest.raises(IterationFailedError):
                engine.step()
            phases[Phase.FORWARD] = forward
            engine.recover()
            ended = drain(engine)

        check_same_routing([ended[name] for name in names], plain)

    def test_work_that_failed_on_the_device_spoils_no_record(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loaded: Any = tiny_moe()
        forward, calls = loaded.model.forward, iter([False, False, True])

        def failing(*inputs: Any) -> Any:
            return 1 // 0 if next(calls, False) else forward(*inputs)

        with engine_on(loaded, device="cpu") as engine:
            monkeypatch.setattr(loaded.model, "forward", failing)
            for prompt in prompts(loaded):
                engine.add_request(prompt, GREEDY)
            with pytest.raises(DeviceError):
                drain(engine)
            outputs = engine.reset()

        for output, length in zip(outputs, LENGTHS, strict=True):
            assert routing_of(output).shape[0] == length + 1
            assert np.array_equal(routing_of(output), choices_of(loaded.model, text_of(output)[:-1]))

    def test_ranks_that_share_experts_record_and_replay_as_one_that_has_all(self) -> None:
        plain = record(tiny_moe())
        told = [other_choices(routing_of(one), 8) for one in plain]
        forced, ranks = replay(tiny_moe(), told), LocalRanks.make(2, timeout_s=20.0)

        def serve(rank: int) -> list[RequestOutput]:
            loaded = load_model("shape:tiny-moe", dtype=torch.float64, shard=Shard(rank, 2))
            config = EngineConfig(**{**LIMITS, "routing_replay": "replay", "expert_parallel": 2})
            with Engine(loaded, config, ranks=ranks[rank]) as engine:
                own = list(zip(prompts(loaded), told, strict=True))[rank::2]
                names = [engine.add_request(prompt, GREEDY, routing=one) for prompt, one in own]
                ended = drain(engine)
            return [ended[name] for name in names]

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(serve, range(2)))

        for rank in range(2):
            check_same_routing(found[rank], forced[rank::2])


class TestPrefixes:
    def test_a_hit_returns_what_is_stored(self) -> None:
        loaded = tiny_moe()
        prompt = prompts(loaded)[-1]
        with engine_on(loaded, prefix_caching=True) as engine:
            (first,) = engine.generate([prompt], GREEDY, progress=False)
            (again,) = engine.generate([prompt], GREEDY, progress=False)
            check_same_routing([again], [first])
            assert again.num_cached_tokens == 36

            kept = engine.runner.kept_routing
            assert kept is not None
            kept.fill_(5)
            (marked,) = engine.generate([prompt], GREEDY, progress=False)

        assert (routing_of(marked)[:36] == 5).all()
        assert np.array_equal(routing_of(marked)[36:], routing_of(first)[36:])

    def test_blocks_of_other_choices_are_not_shared(self) -> None:
        loaded = tiny_moe()
        texts = prompts(loaded)[-1:]
        (plain,) = record(loaded, texts=texts)
        told = other_choices(routing_of(plain), 8)
        with engine_on(loaded, "replay", prefix_caching=True) as engine:

            def serve(routing: Choices | None) -> RequestOutput:
                name = engine.add_request(texts[0], GREEDY, routing=routing)
                return drain(engine)[name]

            found = [serve(routing) for routing in (None, told, told, None, other_choices(told, 8, seed=1))]

        assert [one.num_cached_tokens for one in found] == [0, 0, 36, 36, 0]
        check_same_routing([found[0], found[3]], [plain, plain])
        check_same_routing([found[2]], [found[1]])
        assert np.array_equal(routing_of(found[1]), told)
        assert np.array_equal(routing_of(found[4]), other_choices(told, 8, seed=1))


class TestDrafts:
    """The shipped model: Mamba2 layers, attention, experts and draft heads that are right often enough."""

    TEXTS = ("def add(a, b):\n", "import os\n\n\ndef read(path):\n")

    @pytest.mark.parametrize("drafts", [0, 1, 2])
    def test_choices_of_accepted_tokens_are_recorded_and_replayed(self, drafts: int) -> None:
        loaded, texts = shipped(), list(self.TEXTS)
        options: dict[str, Any] = {"speculative_tokens": drafts, "prefix_caching": True, "block_size": 8}
        params = GREEDY.replace(max_tokens=15)
        with engine_on(loaded, **options) as engine:
            plain = engine.generate(texts, params, progress=False)
            again = engine.generate(texts, params, progress=False)
            assert engine.counters.prefix_hit_tokens > 0
            assert (engine.counters.drafts_accepted.total() > 0) is (drafts > 0)
        for one in plain:
            assert np.array_equal(routing_of(one), choices_of(loaded.model, text_of(one)[:-1]))
        check_same_routing(again, plain)

        told = [other_choices(routing_of(one), 8) for one in plain]
        same = replay(loaded, [routing_of(one) for one in plain], params, texts, **options)
        forced = replay(loaded, told, params, texts, **options)

        check_same_routing(same, plain)
        if drafts == 2:
            check_same_routing(forced, replay(loaded, told, params, texts, **{**options, "speculative_tokens": 0}))
        assert [one.token_ids for one in forced] != [one.token_ids for one in plain]

    @pytest.mark.parametrize("device", ["cpu", "inline"])
    def test_an_end_found_in_its_text_is_recorded_up_to_there(self, device: str) -> None:
        loaded = shipped()
        (long,) = record(loaded, GREEDY.replace(max_tokens=30), texts=[self.TEXTS[0]])
        stop = long.text[4:9]

        (short,) = record(
            loaded,
            GREEDY.replace(max_tokens=30, stop=stop),
            texts=[self.TEXTS[0]],
            speculative_tokens=2,
            device=device,
        )

        assert short.stop_reason == stop
        assert len(short.token_ids) < len(long.token_ids)
        assert np.array_equal(routing_of(short), routing_of(long)[: len(text_of(short)) - 1])


class TestEnds:
    def test_only_the_last_output_tells(self) -> None:
        with engine_on(tiny_moe()) as engine:
            outputs = list(engine.stream([5, 6, 7], GREEDY))

        assert [one.routing is None for one in outputs] == [True] * (len(outputs) - 1) + [False]
        assert routing_of(outputs[-1]).shape == (12, 2, 2)

    def test_a_request_aborted_between_chunks_tells_of_those_that_were_read(self) -> None:
        loaded, prompt = tiny_moe(), prompts(tiny_moe())[-1]
        with engine_on(loaded, chunked_prefill=True, max_batch_tokens=16) as engine:
            name = engine.add_request(prompt, GREEDY)
            engine.step()
            engine.step()
            engine.abort(name)
            output = drain(engine)[name]

        assert output.routing is not None
        assert np.array_equal(output.routing, choices_of(loaded.model, prompt)[:32])

    def test_a_request_aborted_before_it_ran_tells_of_nothing(self) -> None:
        with engine_on(tiny_moe()) as engine:
            name = engine.add_request([5, 6], GREEDY)
            engine.abort(name)
            output = drain(engine)[name]

        assert output.routing is not None
        assert output.routing.shape == (0, 2, 2)

    @pytest.mark.parametrize("how", [None, "persist", "offload", "recompute"])
    def test_a_reset_tells_of_what_was_read(self, how: str | None) -> None:
        loaded = tiny_moe()
        with engine_on(loaded) as engine:
            for prompt in prompts(loaded):
                engine.add_request(prompt, GREEDY)
            for _ in range(3):
                engine.step()
            if how is not None:
                engine.suspend(how)
            outputs = engine.reset()

        for output in outputs:
            assert np.array_equal(routing_of(output), choices_of(loaded.model, text_of(output)[:-1]))

    @pytest.mark.parametrize("num_phases", [1, 2, 3, 4])
    def test_a_reset_in_mid_iteration_tells_only_of_chunks_that_certainly_ran(self, num_phases: int) -> None:
        loaded, prompt = tiny_moe(), prompts(tiny_moe())[-1]
        with engine_on(loaded, chunked_prefill=True, max_batch_tokens=16) as engine:
            engine.add_request(prompt, GREEDY)
            engine.step()
            for _ in range(num_phases):
                engine.step_phase()
            (output,) = engine.reset()

        assert output.routing is not None
        assert np.array_equal(output.routing, choices_of(loaded.model, prompt)[:16])

    def test_nothing_is_told_unless_asked_for(self) -> None:
        (output,) = record(tiny_moe(), routing_replay=None, texts=[[5, 6, 7]])

        assert output.routing is None


class TestRefusals:
    @pytest.mark.parametrize("what", ["record", "replay"])
    def test_asynchronous_scheduling_is_refused_and_the_mode_to_use_named(self, what: Any) -> None:
        with pytest.raises(ConfigError, match="needs mode='legacy', got mode='async'"):
            EngineConfig(routing_replay=what)
        with pytest.raises(ConfigError, match="mode='legacy'"):
            EngineConfig(routing_replay=what, mode="legacy").replace(mode="async")
        with engine_on(tiny_moe(), what) as engine:
            with pytest.raises(ConfigError, match="mode='legacy'"):
                engine.set_mode("async")
            assert engine.controller.wanted_mode == "legacy"
            engine.set_mode("legacy")

    @pytest.mark.parametrize("name", ["shape:tiny", "oracle"])
    def test_a_model_without_experts_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigError, match="routing_replay: the model has no layers with experts"):
            engine_on(load_model(name))

    def test_choices_are_refused_by_an_engine_that_only_records(self) -> None:
        with engine_on(tiny_moe()) as engine:
            refuse = partial(engine.add_request, [5, 6], GREEDY, routing=np.zeros((1, 2, 2), dtype=np.int64))
            with pytest.raises(RequestError, match="routing needs an engine with routing_replay='replay'") as caught:
                refuse()

            assert caught.value.field == "routing"
            assert not engine.has_unfinished()

    def test_what_is_kept_counts_as_memory(self) -> None:
        loaded = tiny_moe()
        with (
            engine_on(loaded, None, num_blocks=None, kv_cache_gb=0.001) as without,
            engine_on(loaded, num_blocks=None, kv_cache_gb=0.001) as engine,
        ):
            kept = engine.runner.kept_routing
            assert kept is not None
            assert kept.shape == (engine.resolved.num_blocks + 1, 4, 2, 2)
            assert engine.resolved.num_blocks < without.resolved.num_blocks
