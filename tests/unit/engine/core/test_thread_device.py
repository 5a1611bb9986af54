"""The schedule on a device that runs beside the host: what is enqueued before what, and what waits for what."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.controller import Border, Iteration
from engine.counters import Counters
from engine.device_host import InlineDevice, ThreadDevice, _HostEvent
from engine.engine import Engine
from engine.errors import DeviceError
from engine.models.loader import LoadedModel, load_model
from engine.phases import Order, Phase, Reason
from engine.request import SamplingParams
from engine.resolution import commit_results
from engine.runner import Runner
from tests.oracle_world import EOS, VOCAB, FaultyOracle, World, oracle_engine, play, random_params, random_prompt

LONG = SamplingParams(max_tokens=30, temperature=1.0, seed=1, ignore_eos=True)


class ScriptedOracle(FaultyOracle):
    """An oracle whose forwards do as a test says."""

    def __init__(self) -> None:
        super().__init__(0, device=torch.device("cpu"))
        self.before: Any = None
        self.num_forwards = 0

    def forward(self, batch: Any, caches: Any) -> Tensor:
        self.num_forwards += 1
        if self.before is not None:
            self.before(self.num_forwards)
        return super().forward(batch, caches)


@pytest.fixture
def script() -> ScriptedOracle:
    return ScriptedOracle()


@pytest.fixture
def world(script: ScriptedOracle, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    loaded = LoadedModel(
        model=script,
        tokenizer=None,
        name="oracle",
        eos_token_ids=(EOS,),
        vocab_size=VOCAB,
        architecture="Oracle",
        config={},
    )
    monkeypatch.setattr("tests.oracle_world.loaded_oracle", lambda *args, **kwargs: loaded)
    engine = oracle_engine(device="cpu")
    yield World(engine)
    script.before = None
    engine.close()


RICH = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "filters": {"top_k": 7, "top_p": 0.5, "min_p": 0.05},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 2.0},
    "bans": {"min_tokens": 9, "stop_token_ids": [1, 2, 3]},
    "bias": {"logit_bias": {5: 3.0}},
    "logprobs": {"logprobs": 3},
}


class TestOverlap:
    @pytest.mark.parametrize("feature", RICH)
    def test_enqueues_the_next_forward_while_the_one_before_it_has_not_ended(
        self, world: World, script: ScriptedOracle, feature: str
    ) -> None:
        """Kind 42, whatever is sampled.

        Each forward stands still until the host, in an overlap iteration, has launched the next one behind it.
        Any wait of the host before that, of whatever kind, would wait for ever; here it fails after ten seconds.
        """
        may_end = threading.Semaphore(0)
        launched = released = overlapped = 0
        late: list[int] = []

        def stand_still(number: int) -> None:
            if not may_end.acquire(timeout=10.0):
                late.append(number)

        def at_border(border: Border) -> None:
            nonlocal launched, released, overlapped
            is_overlap = border.iteration.order.is_overlap
            may_run = released
            if (border.phase, border.side) == (Phase.FORWARD, "after"):
                here = border.iteration.launched is not None
                launched += here
                overlapped += is_overlap and here
                may_run = launched - here if is_overlap else released
            elif (border.phase, border.side) == (Phase.SAMPLE, "before") and not is_overlap:
                may_run = launched
            for _ in range(may_run - released):
                may_end.release()
            released = max(released, may_run)

        script.before = stand_still
        world.on_border = at_border
        for seed in range(3):
            params = LONG.replace(seed=seed, max_tokens=12 + 5 * seed, **RICH[feature])  # type: ignore[arg-type]
            world.submit([seed + 1] * 3, params)
        while world.engine.has_unfinished():
            world.step()
        for _ in range(launched - released):
            may_end.release()  # rows that ended unforeseen have one more forward, which nobody awaits
        world.drain()

        assert not late, f"forwards {late} stood for ten seconds: the host waited for them"
        assert overlapped > (15 if feature != "bans" else 5)

    def test_enqueues_sampling_then_publishing_then_the_forward_and_waits_only_behind_it(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log: list[str] = []
        launch, wait, copy_wait = Runner._launch, _HostEvent.wait, type(world.engine.device.copy).wait_for

        def logged_launch(self: Runner, stream: Any, name: str, *rest: Any) -> Any:
            log.append(f"{stream.name}:{name}")
            return launch(self, stream, name, *rest)

        def logged_wait(self: _HostEvent) -> None:
            log.append("host waits")
            wait(self)

        def logged_copy_wait(self: Any, event: Any) -> None:
            log.append(f"{self.name} waits")
            copy_wait(self, event)

        monkeypatch.setattr(Runner, "_launch", logged_launch)
        monkeypatch.setattr(_HostEvent, "wait", logged_wait)
        monkeypatch.setattr(type(world.engine.device.copy), "wait_for", logged_copy_wait)
        world.submit([1, 2], LONG)
        world.submit([3], LONG.replace(max_tokens=7))
        seen = 0
        while world.engine.has_unfinished():
            log.clear()
            world.step()
            if world.engine.recorder.iterations()[-1].order != "overlap":
                continue
            seen += 1
            steady = ["compute:sample", "copy waits", "copy:fetch", "compute:publish", "compute:forward", "host waits"]
            assert log in (steady, [*steady, "compute:compact"])
        assert seen > 20

    @pytest.mark.parametrize("op_sleep_s", [0.0, 0.001])
    def test_never_waits_for_a_staging_half(self, op_sleep_s: float) -> None:
        engine = oracle_engine(device="cpu", op_sleep_s=op_sleep_s)
        world, rng = World(engine), random.Random(5)
        for _ in range(30):
            for _ in range(2):
                world.submit(random_prompt(rng), random_params(rng).replace(max_tokens=30, ignore_eos=True))
            for _ in range(8):
                world.step()
        world.drain()
        engine.close()
        runner = engine.runner
        assert engine.counters.overlap_steps > 100
        assert engine.counters.rows_moved > 10
        assert [slab.num_waits for slab in (runner.step_slab, runner.samples.index_slab, runner.move_slab)] == [0, 0, 0]

    @pytest.mark.parametrize("seed", range(6))
    def test_with_a_device_of_any_pace_answers_as_alone(self, seed: int) -> None:
        rng = random.Random(seed)
        engine = oracle_engine(
            device="cpu", op_sleep_s=rng.choice([0.0, 0.0005, 0.003]), mode=rng.choice(["async", "legacy"])
        )
        paces = [0.0, 0.0, 0.0004, 0.002]
        launch = engine.runner._launch

        def uneven(stream: Any, name: str, work: Any, sleep_s: float = 0.0) -> Any:
            return launch(stream, name, work, sleep_s + rng.choice(paces))

        engine.runner._launch = uneven  # type: ignore[method-assign]
        play(World(engine), rng, num_acts=40)
        engine.close()


class TestFailedWork:
    @pytest.mark.parametrize("number", [1, 2, 3, 6, 9])
    @pytest.mark.parametrize("mode", ["async", "legacy"])
    def test_reaches_the_host_as_a_failure_and_recover_changes_no_token(
        self, world: World, script: ScriptedOracle, number: int, mode: str
    ) -> None:
        def fail(at: int) -> None:
            if at == number:
                raise RuntimeError("planted on the device")

        script.before = fail
        world.engine.set_mode(mode)
        for seed in range(3):
            world.submit([seed + 1] * 4, LONG.replace(seed=seed))
        with pytest.raises(DeviceError, match="planted on the device"):
            world.drain()
        assert world.engine.failure is not None

        world.engine.recover()
        world.drain()
        assert dict(world.engine.counters.finished) == {"length": 3}

    def test_is_cleared_by_reset(self, world: World, script: ScriptedOracle) -> None:
        def fail(at: int) -> None:
            if at == 4:
                raise RuntimeError("planted on the device")

        script.before = fail
        world.submit([1], LONG)
        with pytest.raises(DeviceError):
            world.drain()
        world.reset()
        world.submit([2], LONG)
        world.drain()


class TestLateResults:
    def test_of_a_row_whose_owner_has_changed_reach_nobody(self) -> None:
        """Sampled for generation 0, resolved when generation 1 owns the row: no token, for neither."""
        engine = oracle_engine(debug_invariants=False, max_requests=1)
        engine.add_request([1, 2, 3], LONG, request_id="old")
        engine.step()
        pending = engine.controller.pending
        assert pending is not None
        late = engine.runner.launch_sample(pending, engine.table)
        engine.abort("old")
        engine.controller.drop_pending()
        engine.step()
        engine.add_request([4], LONG, request_id="new")
        engine.controller.drop_pending()
        engine.queue.admit()
        owner = engine.table.requests[0]
        assert owner is not None
        assert owner.request_id == "new"
        late.wait()
        iteration = Iteration(99, "async", Order.NO_OVERLAP, Reason.PREFILL_PENDING)

        commit_results(late, engine.table, iteration, engine.resolved, Counters(), has_aborts=False)

        assert owner.output_ids == []
        assert iteration.new_tokens == 0
        assert not iteration.advanced


class TestBadLogits:
    @pytest.mark.parametrize("mode", ["async", "legacy"])
    @pytest.mark.parametrize("device", ["inline", "cpu"])
    def test_of_one_row_fail_its_request_alone(self, mode: str, device: str) -> None:
        engine = oracle_engine(mode=mode, device=device, nan_every=23)
        world = World(engine)
        for seed in range(24):
            world.submit([seed, 3 * seed % VOCAB], LONG.replace(seed=seed, logprobs=1))
        world.drain()
        engine.close()

        finished = engine.counters.finished
        assert finished["error"] > 3
        assert finished["length"] > 3
        errors = [one.last for one in world.all if one.last is not None and one.last.finish_reason == "error"]
        assert all("NaN" in str(output.stop_reason) for output in errors)
        assert all(np.isfinite(list(row.values())).all() for output in errors for row in output.logprobs or ())


class TestThreadDevice:
    def test_stops_its_threads_when_closed(self) -> None:
        device = ThreadDevice()
        threads = [device.compute.worker._thread, device.copy.worker._thread]  # type: ignore[attr-defined]
        device.close()
        for thread in threads:
            thread.join(timeout=5.0)
            assert not thread.is_alive()

    @pytest.mark.parametrize("make", [ThreadDevice, InlineDevice])
    def test_can_sleep_in_any_operation(self, make: type[ThreadDevice] | type[InlineDevice]) -> None:
        """A lower bound on a span, so no slow machine can fail it."""
        loaded = load_model("oracle", device=torch.device("cpu"))
        device = make(op_sleep_s={"sample": 0.004, "fetch": 0.002})
        config = EngineConfig(device=device.kind, max_sequence_length=64, max_batch_tokens=64)
        with Engine(loaded, config, device=device) as engine:
            engine.generate([[1, 2]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True), progress=False)
            device.synchronize()
            spans = engine.recorder.spans()

        device_spans = [span for span in spans if span.lane != "host"]
        lengths = {
            name: [span.duration_ns for span in device_spans if span.name == name] for name in ("sample", "fetch")
        }
        assert min(lengths["sample"]) >= 4_000_000
        assert min(lengths["fetch"]) >= 2_000_000
