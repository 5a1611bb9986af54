"""Pausing and suspending: nobody's answer changes, memory goes and comes back, and every call works in every state.

``World`` compares each answer with its request computed alone, so a test only has to stand still at the right moment.
"""

from __future__ import annotations

import asyncio
import random
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine import runner as runner_module
from engine.device import make_device
from engine.engine import Engine
from engine.errors import (
    ConfigError,
    DeviceError,
    EngineError,
    EnginePausedError,
    IterationFailedError,
    MidIterationError,
)
from engine.invariants import check_device, check_idle
from engine.lifecycle import EngineState, blocks_in_use
from engine.phases import Phase
from engine.request import SamplingParams
from tests.bug_kind_world import DRAWN, GREEDY, MODES, alone
from tests.cache_watch import bytes_of
from tests.oracle_reference import VOCAB
from tests.oracle_world import PlantedError, World, oracle_engine, random_params, shared_prompt

SUSPENSIONS = ["persist", "offload", "recompute"]
STANDSTILLS = ["pause", *SUSPENSIONS]
PARAMS = [
    DRAWN.replace(max_tokens=7, logprobs=2, presence_penalty=0.5, repetition_penalty=2.0),
    GREEDY.replace(max_tokens=9, frequency_penalty=1.5, prompt_logprobs=1),
    DRAWN.replace(max_tokens=5, seed=3, logit_bias={7: 3.0, 9: 3.0}, top_k=10, logprobs=0),
    GREEDY.replace(max_tokens=8, min_tokens=6, stop_token_ids=list(range(40)), ignore_eos=False),
    DRAWN.replace(max_tokens=6, seed=8, temperature=2.0),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"chunked_prefill": True, "max_batch_tokens": 9},
    "pausing": {"capacity_policy": "max_utilization", "num_blocks": 12, "paused_blocks": 12},
    "prefix": {"prefix_caching": True, "num_blocks": 28},
    "buckets": {"graphs": (2, 4, 16)},
    "overlapped": {"overlap_admission": True, "chunked_prefill": True, "max_batch_tokens": 9},
}
"""What a standstill may come in between of."""


def stop(engine: Engine, how: str) -> None:
    if how == "pause":
        engine.pause()
    else:
        engine.suspend(how)


def busy(setting: str = "plain", mode: str = "async", **options: Any) -> World:
    """Five requests of different kinds; one waits for a row, and a pair shares the beginning of its prompt."""
    world = World(oracle_engine(mode=mode, **{**SETTINGS[setting], **options}))
    for number, params in enumerate(PARAMS):
        prompt = [(7 * place + 3 * (number % 3)) % VOCAB for place in range(5 + 3 * number)]
        world.submit(prompt, params, stream=number == 2)
    return world


def standing(world: World) -> set[str]:
    """What is half done between two iterations."""
    engine, table = world.engine, world.engine.table
    found = {
        "pending": engine.pending is not None,
        "first sample to come": engine.pending is not None and engine.pending.has_prefill,
        "chunk": table.partial_row is not None,
        "paused rows": table.num_paused > 0,
        "cached blocks": getattr(engine.pool, "num_cached", 0) > 0,
        "graph's logits": engine.pending is not None and engine.pending.logits.in_graph,
    }
    return {name for name, holds in found.items() if holds}


@pytest.fixture(params=STANDSTILLS)
def how(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestAnswers:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("setting", SETTINGS)
    @pytest.mark.parametrize("how", ["pause", "offload", "recompute"])
    def test_are_the_same_wherever_the_engine_stood_still(self, setting: str, mode: str, how: str) -> None:
        """Bug kinds 2, 11, 20, 22: at every iteration of a run, so also between a primer and its first sample."""
        seen: Counter[str] = Counter()
        at = 0
        while True:
            world = busy(setting, mode)
            world.step_up_to(at)
            if not world.engine.has_unfinished():
                break
            seen.update(standing(world))
            stop(world.engine, how)
            world.engine.resume()
            world.drain()
            at += 1
        assert at > 8
        wanted = {"chunked": {"chunk"}, "pausing": {"paused rows"}, "prefix": {"cached blocks"}}.get(setting, set())
        if mode == "async":
            wanted |= {"pending", "first sample to come"} | ({"graph's logits"} if setting == "buckets" else set())
        assert wanted <= set(seen), f"never stood in {wanted - set(seen)}"

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("setting", SETTINGS)
    @pytest.mark.parametrize("how", ["persist", "offload"])
    def test_are_the_same_if_it_stands_still_all_the_time(self, setting: str, mode: str, how: str) -> None:
        world = busy(setting, mode)
        while world.engine.has_unfinished():
            stop(world.engine, how)
            world.engine.resume()
            world.step()
        world.drain()

    @pytest.mark.parametrize("setting", SETTINGS)
    def test_are_the_same_after_suspensions_of_every_kind(self, setting: str) -> None:
        world = busy(setting)
        for step in range(200):
            if not world.engine.has_unfinished():
                break
            if step % 3 == 2:  # each recompute drops a forward: two steps lie between
                world.engine.suspend(SUSPENSIONS[step // 3 % 3])
                world.engine.resume()
            world.step()
        world.drain()

    @pytest.mark.parametrize("setting", ["plain", "buckets", "chunked"])
    def test_are_the_same_on_the_thread_device(self, setting: str, how: str) -> None:
        for at in (0, 1, 5):
            world = busy(setting, device="cpu", op_sleep_s=0.001)
            with world.engine:
                for _ in range(at):
                    world.step()
                stop(world.engine, how)
                world.engine.resume()
                world.drain()

    @pytest.mark.parametrize("setting", SETTINGS)
    def test_are_the_same_for_requests_that_come_or_leave_meanwhile(self, setting: str, how: str) -> None:
        for at in (1, 2, 5):
            world = busy(setting)
            for _ in range(at):
                world.step()
            stop(world.engine, how)
            world.submit([4, 5, 6], GREEDY.replace(max_tokens=4))
            assert world.abort(world.live_ids[0])
            assert world.abort(world.live_ids[-2])
            world.engine.set_mode("legacy")
            world.engine.resume()
            world.drain()
            assert world.engine.mode == "legacy"
            assert world.engine.counters.finished["abort"] == 2

    @pytest.mark.parametrize("how", SUSPENSIONS)
    @pytest.mark.parametrize("is_pending", [True, False])
    def test_begin_with_the_right_token_after_the_cache_went(self, how: str, is_pending: bool) -> None:
        """Bug kind 22: the first token after a resume was thrown away, whether a forward had been pending or not."""
        world = World(oracle_engine(mode="async"))
        world.submit([1, 2, 3], GREEDY.replace(max_tokens=20))
        for _ in range(200 if not is_pending else 10):
            world.step()
        assert (world.engine.pending is not None) is is_pending
        world.engine.suspend(how)
        world.engine.resume()
        world.submit([3, 2, 1], DRAWN.replace(max_tokens=20))
        world.drain()
        assert world.all[1].last is not None
        assert world.all[1].last.token_ids == alone([3, 2, 1], DRAWN.replace(max_tokens=20))

    def test_do_not_mix_up_where_blocks_change_hands(self, how: str) -> None:
        """Bug kind 20: resumed requests had each other's blocks. The pool is as full as three long ones make it."""
        world = World(oracle_engine(num_blocks=30, max_requests=3))
        for number in range(6):
            world.submit([number + 1] * 9, DRAWN.replace(seed=number, max_tokens=30))
        for step in range(300):
            if step % 11 == 7:
                stop(world.engine, how)
                world.engine.resume()
            world.step()
        world.drain()
        assert world.engine.counters.finished["length"] == 6

    def test_are_the_same_where_a_prompt_is_one_longer_than_its_chunks(self, how: str) -> None:
        """Bug kind 11."""
        for at in range(1, 8):
            world = World(oracle_engine(chunked_prefill=True, max_batch_tokens=8, max_requests=2))
            world.submit([2] * 4, GREEDY.replace(max_tokens=9))
            world.submit(list(range(25)), GREEDY.replace(max_tokens=3, prompt_logprobs=1))
            for _ in range(at):
                world.step()
            stop(world.engine, how)
            world.engine.resume()
            world.drain()

    @pytest.mark.parametrize("seed", range(12))
    def test_are_the_same_in_any_schedule(self, seed: int) -> None:
        """Aborts, resets and mode switches before, while and after it stands still, in every setting."""
        rng = random.Random(seed)
        setting = list(SETTINGS)[seed % len(SETTINGS)]
        world = World(oracle_engine(has_text=True, **SETTINGS[setting]))
        count: Counter[str] = Counter()
        for _ in range(120):
            act = rng.choice(["submit", "submit", "step", "step", "step", "phase", "abort", "still", "mode", "more"])
            if act == "submit":
                world.submit(
                    shared_prompt(rng, 24), random_params(rng, text=True, max_tokens=20), stream=rng.random() < 0.5
                )
            elif act == "abort" and world.live_ids:
                world.abort(rng.choice(world.live_ids))
            elif act == "mode":
                world.engine.set_mode(rng.choice(MODES))
            elif act == "more" and rng.random() < 0.2:
                world.reset()
            elif act == "still" and world.engine.in_hand is None and world.engine.state is EngineState.RUNNING:
                stop(world.engine, how := rng.choice(STANDSTILLS))
                count[how] += 1
            elif world.engine.state is not EngineState.RUNNING:
                if rng.random() < 0.5:
                    world.engine.resume()
            elif act == "phase":
                world.step_phase()
            else:
                world.step()
        world.engine.resume()
        world.drain()
        assert count.total() > 3


class TestStandingStill:
    def test_refuses_to_step_and_names_the_way_on(self, how: str) -> None:
        world = busy()
        world.step()
        stop(world.engine, how)
        state = "paused" if how == "pause" else rf"suspended \({how}\)"
        for call in (world.engine.step, world.engine.step_phase, lambda: world.engine.generate([[1]], progress=False)):
            with pytest.raises(EnginePausedError, match=rf"the engine is {state}; call resume\(\) first"):
                call()
        assert world.engine.counters.submitted == len(PARAMS), "generate left a request behind"
        world.engine.resume()
        world.drain()

    def test_needs_an_iteration_border(self, how: str) -> None:
        world = busy()
        world.step_phase()
        with pytest.raises(MidIterationError, match=r"needs an iteration border.*before prepare"):
            stop(world.engine, how)
        assert world.engine.state is EngineState.RUNNING
        world.drain()

    def test_twice_is_as_once_and_so_is_going_on(self, how: str) -> None:
        world = busy()
        world.step()
        stop(world.engine, how)
        before = world.engine.suspension
        stop(world.engine, how)
        assert world.engine.suspension is before
        world.engine.resume()
        world.engine.resume()
        assert world.engine.state is EngineState.RUNNING
        world.drain()

    def test_in_one_mode_is_not_changed_to_another(self) -> None:
        world = busy()
        world.step()
        world.engine.pause()
        world.engine.suspend("offload")
        world.engine.pause()
        assert world.engine.state is EngineState.SUSPENDED
        with pytest.raises(EnginePausedError, match=r"suspended \(offload\)"):
            world.engine.suspend("recompute")
        world.engine.resume()
        world.drain()

    def test_takes_the_configured_mode_unless_told(self) -> None:
        assert oracle_engine().suspend().mode == "persist"
        assert oracle_engine(suspend_mode="offload").suspend().mode == "offload"
        assert oracle_engine(suspend_mode="offload").suspend("recompute").mode == "recompute"
        with pytest.raises(ConfigError, match="mode must be one of persist, offload, recompute; got 'drop'"):
            oracle_engine().suspend("drop")

    def test_is_not_for_a_failed_engine(self, how: str) -> None:
        world = busy()
        assert world.fail_in(Phase.FORWARD, after=True)
        with pytest.raises(IterationFailedError, match=r"recover\(\)"):
            stop(world.engine, how)
        world.engine.recover()
        stop(world.engine, how)
        with pytest.raises(EnginePausedError, match="recover"):
            world.engine.recover()
        world.engine.resume()
        world.drain()

    def test_works_with_nothing_to_do(self, how: str) -> None:
        world = World(oracle_engine(prefix_caching=True))
        stop(world.engine, how)
        world.engine.resume()
        assert world.step() == []
        world.submit([1, 2], GREEDY)
        world.drain()

    def test_ends_by_a_reset_with_an_empty_engine(self, how: str) -> None:
        """Bug kind 2: logits of before a reset were sampled after it."""
        for at in range(5):
            world = busy("prefix", graphs=(4,))
            for _ in range(at):
                world.step()
            stop(world.engine, how)
            world.reset()
            assert world.engine.state is EngineState.RUNNING
            assert world.engine.pending is None
            check_device(world.engine)
            world.submit([1, 2, 3], DRAWN)
            world.drain()

    def test_ends_by_closing(self, how: str) -> None:
        world = busy(device="cpu")
        world.step()
        world.step()
        stop(world.engine, how)
        world.engine.close()
        for call in (world.engine.resume, world.engine.pause, world.engine.suspend, world.engine.step):
            with pytest.raises(EngineError, match="closed"):
                call()

    def test_keeps_or_drops_the_pending_forward(self, how: str) -> None:
        world = busy()
        for _ in range(3):
            world.step()
        pending = world.engine.pending
        assert pending is not None
        stop(world.engine, how)
        assert world.engine.pending is (None if how == "recompute" else pending)
        if how == "recompute":
            assert world.engine.table.num_live == 0
            assert world.engine.pool.num_free == world.engine.pool.num_blocks
            assert len(world.engine.queue.waiting) == len(world.live_ids)
        world.engine.resume()
        world.drain()

    def test_voids_the_times_of_what_lives_through_it(self, how: str) -> None:
        engine = oracle_engine(device="cpu", debug_invariants=False)
        world, reason = World(engine), "paused" if how == "pause" else "suspended"
        with engine:
            first = world.submit([1, 2], GREEDY.replace(max_tokens=2))
            world.drain()
            world.submit([1, 2], GREEDY)
            world.step()
            world.step()
            stop(engine, how)
            world.submit([3], GREEDY.replace(max_tokens=1))
            engine.resume()
            through = list(engine._live.values())
            assert first not in {request.request_id for request in through}
            assert [request.void_reasons for request in through] == [{reason}, {reason}]
            index = engine.controller.next_index
            world.drain()
        void = [record.iteration for record in engine.recorder.iterations() if reason in record.void_reasons]
        assert void == [index]


class TestStreams:
    def test_go_on_after_a_pause(self, how: str) -> None:
        engine = oracle_engine()
        params = GREEDY.replace(max_tokens=6)
        stream = engine.stream([1, 2, 3], params)
        first = next(stream)
        stop(engine, how)
        for _ in range(2):
            with pytest.raises(EnginePausedError):
                next(stream)
        engine.resume()
        rest = [output.new_token_ids for output in stream]
        assert sum([first.new_token_ids, *rest], ()) == alone([1, 2, 3], params)
        assert next(stream, None) is None

    def test_on_an_event_loop_wait_for_others_to_resume(self, how: str) -> None:
        engine = oracle_engine()
        params = GREEDY.replace(max_tokens=8)
        stood_still = asyncio.Event()

        async def read(prompt: list[int]) -> tuple[int, ...]:
            tokens: tuple[int, ...] = ()
            async for output in engine.astream(prompt, params):
                tokens = output.token_ids
            return tokens

        async def stand_still() -> None:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            stop(engine, how)
            before = engine.controller.next_index
            await asyncio.sleep(0.02)
            assert engine.controller.next_index == before > 0
            stood_still.set()
            engine.resume()

        async def both() -> list[tuple[int, ...]]:
            reads = [read([1, 2, 3]), read([4])]
            found = await asyncio.gather(*reads, stand_still())
            return [tokens for tokens in found if tokens is not None]

        assert asyncio.run(both()) == [alone([1, 2, 3], params), alone([4], params)]
        assert stood_still.is_set()

    def test_are_told_that_the_engine_was_closed_while_paused(self) -> None:
        engine = oracle_engine()

        async def read() -> None:
            async for _ in engine.astream([1], GREEDY):
                engine.pause()
                engine.close()

        with pytest.raises(EngineError, match="closed"):
            asyncio.run(read())


class TestMemory:
    @pytest.mark.parametrize("setting", ["plain", "buckets", "prefix", "pausing"])
    @pytest.mark.parametrize("mode", ["offload", "recompute"])
    def test_of_caches_logits_and_wide_columns_goes(self, setting: str, mode: str) -> None:
        world = busy(setting)
        for _ in range(3):
            world.step()
        runner, pending = world.engine.runner, world.engine.pending
        assert pending is not None
        held = [*runner.cache_tensors, runner.columns.output_counts, runner.columns.bias_ids, pending.logits.rows]
        watched = [weakref.ref(tensor) for tensor in held if tensor is not None]
        assert len(watched) == len(held)
        del held
        suspension = world.engine.suspend(mode)
        assert [one() for one in watched] == [None] * len(watched)
        assert (suspension.saved_bytes > 0) is (mode == "offload")
        assert suspension.freed_bytes >= 0
        assert runner.cache_tensors == ()
        world.engine.resume()
        world.drain()

    def test_stays_where_it_is_with_persist(self) -> None:
        world = busy()
        world.step()
        before = [tensor.data_ptr() for tensor in world.engine.runner.cache_tensors]
        suspension = world.engine.suspend("persist")
        assert (suspension.freed_bytes, suspension.saved_bytes) == (0, 0)
        world.engine.resume()
        assert [tensor.data_ptr() for tensor in world.engine.runner.cache_tensors] == before
        world.drain()

    @pytest.mark.parametrize("setting", ["plain", "prefix", "pausing", "chunked", "buckets"])
    def test_comes_back_bit_for_bit(self, setting: str) -> None:
        """Blocks that are held or cached, all columns, and the pending logits; other blocks are zero."""
        for at in range(1, 12):
            world = busy(setting)
            for _ in range(at):
                world.step()
            engine = world.engine
            blocks, runner = torch.from_numpy(blocks_in_use(engine.pool)), engine.runner
            pending = engine.pending

            def image(
                runner: Any = runner, blocks: torch.Tensor = blocks, pending: Any = pending
            ) -> list[torch.Tensor | None]:
                logits = [] if pending is None else [pending.logits.rows, pending.logits.prompt]
                columns = [column.clone() for column in runner.columns._all()]
                return [*(tensor[blocks].clone() for tensor in runner.cache_tensors), *columns, *logits]

            before = image()
            engine.suspend("offload")
            engine.resume()
            after = image()
            for one, other in zip(before, after, strict=True):
                assert (one is None) is (other is None)
                if one is not None and other is not None:
                    assert torch.equal(bytes_of(one), bytes_of(other))
            rest = torch.ones(engine.pool.num_blocks + 1, dtype=torch.bool)
            rest[blocks] = False
            for tensor in runner.cache_tensors:
                assert not tensor[rest].any()
            world.drain()

    @pytest.mark.parametrize("setting", ["plain", "pausing", "chunked"])
    def test_of_rows_comes_back_behind_the_captures(self, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """On CUDA they draw into the columns of all rows, and write what padding writes."""
        real = runner_module.Runner.capture

        def capture(self: Any, *args: Any) -> None:
            real(self, *args)
            for column in (self.columns.ints, self.columns.floats, self.columns.block_table[:-1]):
                column.fill_(7)

        for at in range(1, 12):
            world = busy(setting)
            for _ in range(at):
                world.step()
            world.engine.suspend("offload")
            with monkeypatch.context() as patch:
                patch.setattr(runner_module.Runner, "capture", capture)
                world.engine.resume()
            check_device(world.engine)
            world.drain()

    @pytest.mark.parametrize("how", STANDSTILLS)
    def test_of_cached_prefixes_comes_back_unless_all_is_computed_again(self, how: str) -> None:
        world = World(oracle_engine(prefix_caching=True))
        prompt = list(range(17))
        world.submit(prompt, GREEDY)
        world.drain()
        stop(world.engine, how)
        world.engine.resume()
        world.submit(prompt, GREEDY)
        world.drain()
        assert world.all[1].last is not None
        assert world.all[1].last.num_cached_tokens == (0 if how == "recompute" else 16)

    def test_that_cannot_be_had_leaves_the_engine_suspended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for mode in ("offload", "recompute"):
            for call in (Engine.resume, Engine.reset):
                world = busy("buckets")
                for _ in range(3):
                    world.step()
                world.engine.suspend(mode)
                with monkeypatch.context() as patch:
                    patch.setattr(runner_module, "make_caches", _raise_no_memory)
                    with pytest.raises(ConfigError, match="cannot be had"):
                        call(world.engine)
                assert world.engine.state is EngineState.SUSPENDED
                assert world.engine.runner.cache_tensors == ()
                world.engine.resume()
                world.drain()

    def test_is_taken_again_with_the_progress_shown_at_first(self) -> None:
        told: list[tuple[int, int, int]] = []
        plain = oracle_engine(graphs=(2, 4))
        engine = Engine(plain.loaded, plain.config, progress=lambda *numbers: told.append(numbers))
        at_first = [numbers[:2] for numbers in told]
        told.clear()
        engine.suspend("recompute")
        assert told == []
        assert engine.graph_memory_bytes == 0
        engine.resume()
        assert [numbers[:2] for numbers in told] == at_first != []
        engine.generate([[1, 2]], GREEDY, progress=False)
        assert engine.counters.graph_hits > 0


def _raise_no_memory(*_: Any) -> Any:
    raise ConfigError("a KV pool takes memory, which cannot be had here")


class TestPendingLogits:
    def test_that_came_back_are_read_by_no_captured_draw(self) -> None:
        """A captured draw reads the graph's memory, which is another's after a resume."""
        world = World(oracle_engine(graphs=(4,), graph_non_decode=False))
        for number in range(4):
            world.submit([number + 1], GREEDY)
        for _ in range(4):
            world.step()
        engine = world.engine
        assert engine.pending is not None
        assert engine.pending.logits.in_graph
        engine.suspend("offload")
        engine.resume()
        shape, samples = engine.pending.plan.shape, engine.runner.samples
        drawn: list[int] = []

        def captured(number: int) -> Callable[[], None]:
            def draw() -> None:
                drawn.append(number)
                raise PlantedError("a captured draw")

            return draw

        for number in range(2):
            samples._draws[shape, True, number] = captured(number)
        world.step()
        assert drawn == []
        samples._draws.clear()
        world.drain()

    def test_of_a_forward_that_failed_are_no_copy(self) -> None:
        """The failure stays the next step's; with recompute it is forgotten with all that was launched."""
        for mode in ("offload", "recompute"):
            world = busy(device="cpu")
            engine = world.engine
            with engine:
                for _ in range(3):
                    world.step()
                engine.device.compute.launch(_fail)
                if mode == "offload":
                    with pytest.raises(DeviceError, match="planted"):
                        engine.suspend(mode)
                    assert engine.state is EngineState.RUNNING
                    with pytest.raises(DeviceError, match="planted"):
                        world.step()
                    engine.recover()
                else:
                    engine.suspend(mode)
                    engine.resume()
                world.drain()


def _fail() -> None:
    raise PlantedError("planted on the device")


class TestGraphs:
    @pytest.mark.parametrize("mode", MODES)
    def test_captured_again_leave_no_staged_batch_that_lies(self, mode: str) -> None:
        """Capturing stages padding in halves that steady decode would only have advanced."""
        world = World(oracle_engine(graphs=(2, 4), graph_non_decode=False, mode=mode, debug_invariants=False))
        for number in range(3):
            world.submit([number + 1], GREEDY.replace(max_tokens=30))
        for step in range(20):
            if step > 5 and step % 3 == 0:
                world.engine.suspend("offload")
                world.engine.resume()
            world.step()
        world.drain()

    def test_are_traced_once_however_often_the_engine_is_suspended(self) -> None:
        """Torch never gives a trace's memory back."""
        world = busy("buckets")
        count = len(world.engine.loaded.buckets)
        for _ in range(3):
            world.step()
            world.engine.suspend("offload")
            world.engine.resume()
        assert len(world.engine.loaded.buckets) == count > 0
        world.drain()


class TestOfAnEngine:
    def test_on_a_shared_device_others_go_on(self) -> None:
        device = make_device("inline")
        first, second = (World(oracle_engine(device_object=device, graphs=(2, 4))) for _ in range(2))
        for world in (first, second):
            world.submit([1, 2, 3], GREEDY)
            world.step()
        first.engine.suspend("offload")
        second.drain()
        first.engine.resume()
        first.drain()
        check_idle(second.engine)

    def test_without_weights_takes_none(self) -> None:
        engine = oracle_engine()
        with pytest.raises(EngineError, match=r"call pause\(\) or suspend\(\) first"):
            engine.load_weights([])
        engine.pause()
        with pytest.raises(EngineError, match=r"model oracle: FaultyOracle has no weight_targets"):
            engine.load_weights([])
        engine.resume()
        engine.generate([[1]], SamplingParams(max_tokens=2, seed=0, detokenize=False), progress=False)
