"""The FlashInfer backend: kernels against plain torch, planned prefill against a loop, engines that plan as they go."""

from __future__ import annotations

import random as python_random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine import EngineConfig, SamplingParams
from engine.attention.base import HeadSizes, PlannerLimits, PrefillRows
from engine.batch import BatchShape, ForwardBatch
from engine.engine import Engine
from engine.errors import ConfigError
from engine.models.base import LayerCache, Model
from engine.models.loader import LoadedModel, load_model
from engine.models.shapes import SHAPES

pytest.importorskip("flashinfer")
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.flashinfer_prefill import FlashInferPlanner
from engine.device_cuda import CudaDevice
from engine.kernels import TorchKernels
from engine.kernels.flashinfer import FlashInferKernels
from tests.gpu.test_attention_cuda import BLOCK_SIZE, LENGTHS, World
from tests.gpu.test_kernels import norm, projection, random, wide
from tests.gpu.test_model_cuda import teacher_forced
from tests.same_outputs import check_parted_by_near_ties

TOLERANCE = {
    # ‖out - reference‖ / ‖reference‖; one rounding to bfloat16 is about 1.6e-3.
    "norm": 2.5e-3,  # inputs are exact, the result is rounded once
    "rotation": 3.5e-3,  # after a head norm the result is rounded twice
    "product": 7e-3,  # the normed input, gate and up, and the result are rounded
}
WORST_RATIO = 1.15
"""Error against float32 over that of plain torch in bfloat16, which rounds about as often."""
SCALE = 0.1
SLEEP_CYCLES = 200_000_000
"""About 0.1 s of an H200."""
KERNELS, REFERENCE = FlashInferKernels(), TorchKernels()


def check(kind: str, out: Tensor, reference: Tensor) -> None:
    error = float((out.double() - reference.double()).norm() / reference.double().norm())
    assert error < TOLERANCE[kind], f"relative error {error:.2e}"


class TestKernels:
    @pytest.mark.parametrize(("rows", "size"), [(1, 64), (17, 1024), (3, 1152), (256, 4096)])
    def test_norm(self, rows: int, size: int) -> None:
        x, parameters = random(rows, size, scale=3.0), norm(size)

        check("norm", KERNELS.rms_norm(x, parameters), REFERENCE.rms_norm(wide(x), wide(parameters)))

    @pytest.mark.parametrize("rows", [1, 17])
    @pytest.mark.parametrize(
        ("size", "inputs", "bias"), [(160, 64, True), (12288, 256, False), (1000, 1152, True), (100, 72, True)]
    )
    def test_swiglu_with_the_norm_before_it(self, rows: int, size: int, inputs: int, bias: bool) -> None:
        x, parameters, p = random(rows, inputs), norm(inputs), projection(2 * size, inputs, bias=bias)

        found = KERNELS.norm_activate(x, parameters, p, "swiglu")

        check("product", found, REFERENCE.norm_activate(wide(x), wide(parameters), wide(p), "swiglu"))

    @pytest.mark.parametrize("bias", [True, False])
    def test_product_added_to_the_residual(self, bias: bool) -> None:
        x, p, residual = random(17, 3072), projection(1024, 3072, bias=bias), random(17, 1024, scale=4.0)
        expected = REFERENCE.linear_add(wide(x), wide(p), wide(residual))

        check("product", KERNELS.linear_add(x, p, residual), expected)

    @pytest.mark.parametrize("tokens", [1, 19, 3000])
    @pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 64), (4, 4, 72), (6, 2, 16)])
    @pytest.mark.parametrize("has_norm", [True, False])
    def test_rotation_and_append_write_the_given_slots_and_no_other(
        self, tokens: int, heads: int, kv_heads: int, head_dim: int, has_norm: bool
    ) -> None:
        num_blocks = 200
        qkv = random(tokens, heads + 2 * kv_heads, head_dim)
        before = qkv.clone()
        norms = (norm(head_dim), norm(head_dim, eps=1e-3)) if has_norm else None
        positions = torch.randint(0, 4000, (tokens,), device="cuda")
        frequencies = 10_000.0 ** -(torch.arange(head_dim // 2, device="cuda") / (head_dim // 2))
        slots = torch.randperm(num_blocks * 16, device="cuda")[:tokens]
        shape = (num_blocks, 16, kv_heads, head_dim)
        cache = tuple(torch.full(shape, float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2))
        expected_cache = wide(cache)

        q = KERNELS.rotate_and_append(qkv, norms, KERNELS.rotation_tables(positions, frequencies, 1.25), cache, slots)

        tables = REFERENCE.rotation_tables(positions, frequencies.double(), 1.25)
        expected = REFERENCE.rotate_and_append(wide(qkv), wide(norms), tables, expected_cache, slots)
        check("rotation", q, expected)
        assert torch.equal(qkv, before), "the projection is only read"
        for tensor, reference in zip(cache, expected_cache, strict=True):
            assert torch.equal(tensor.isnan(), reference.isnan())
            check("rotation", tensor.flatten(0, 1)[slots], reference.flatten(0, 1)[slots])

    def test_new_contents_of_the_same_slots_are_seen_in_a_replay(self) -> None:
        qkv, slots = random(5, 8, 64), torch.arange(5, device="cuda")
        tables = KERNELS.rotation_tables(slots, torch.ones(32, device="cuda"), 1.0)
        cache = tuple(torch.zeros((4, 16, 2, 64), dtype=torch.bfloat16, device="cuda") for _ in range(2))
        KERNELS.rotate_and_append(qkv, None, tables, cache, slots)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            KERNELS.rotate_and_append(qkv, None, tables, cache, slots)
        for tensor in cache:
            tensor.zero_()
        slots.add_(40)

        graph.replay()

        values = cache[1].flatten(0, 1)
        assert torch.equal(values[40:45], qkv[:, 6:])
        assert not values[:40].any()


def rows_of(batch: ForwardBatch) -> PrefillRows:
    """What an engine's host knows of the prefill rows."""
    first = batch.shape.num_decode
    lengths, kv_lengths = (tensor[first:].cpu().numpy() for tensor in (batch.query_len_N, batch.kv_len_N))
    table = batch.block_table_NK[first:].cpu().numpy().astype(np.int32)
    return PrefillRows(lengths, kv_lengths, np.arange(batch.shape.num_prefill), table)


class Setup:
    """A backend with a planner, on the compute stream of a device of its own."""

    def __init__(self, heads: tuple[int, int] = (8, 4), head_dim: int = 128) -> None:
        self.device = CudaDevice()
        self.attention = FlashInferAttention()
        limits = PlannerLimits(block_size=BLOCK_SIZE, max_rows=64, max_blocks_per_row=45)
        planner = self.attention.make_planner(self.device, limits, HeadSizes(*heads, head_dim, torch.bfloat16))
        assert isinstance(planner, FlashInferPlanner), "an H200 plans"
        self.planner = planner

    @contextmanager
    def active(self) -> Iterator[None]:
        """Everything made before is there, and everything launched has run afterwards."""
        torch.cuda.synchronize()
        with self.device.active():
            yield
        self.device.synchronize()

    def launch(self, world: World, window: int | None = None) -> Tensor:
        """Plan and attend, in :meth:`active`."""
        plan = self.planner.plan(world.batch.shape, rows_of(world.batch), is_captured=False)
        batch = world.batch._replace(prefill_plan=plan)
        return self.attention.attend(world.q, world.cache, batch, scale=SCALE, window=window)

    def run(self, world: World, window: int | None = None) -> Tensor:
        with self.active():
            return self.launch(world, window)


class TestPrefill:
    @pytest.mark.parametrize("heads", [(16, 8), (4, 4), (8, 1)])
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_equals_the_loop_at_lengths_around_tiles_and_behind_a_prefix(
        self, heads: tuple[int, int], head_dim: int
    ) -> None:
        rows = [(1, 1), (16, 16), (95, 95), (97, 97), (128, 128), (129, 129), (193, 193), (300, 100), (700, 3), (65, 1)]
        world = World(rows, num_decode=0, heads=heads, head_dim=head_dim)

        world.check(Setup(heads, head_dim).run(world), None, SCALE)

    @pytest.mark.parametrize("rows", [[(1, 1)], [(40, 1)], [(720, 720)], [(17, 1)] * 64])
    def test_equals_the_loop_for_few_and_many_rows(self, rows: list[tuple[int, int]]) -> None:
        world = World(rows, num_decode=0)

        world.check(Setup().run(world), None, SCALE)

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_stands_beside_decode_rows(self, head_dim: int) -> None:
        rows = [*((length, 1) for length in LENGTHS), (70, 70), (33, 20), (5, 5)]
        world = World(rows, num_decode=len(LENGTHS), head_dim=head_dim)

        world.check(Setup(head_dim=head_dim).run(world), None, SCALE)

    def test_a_layer_with_a_window_needs_no_plan(self) -> None:
        world = World([(33, 1), (200, 200), (90, 40)], num_decode=1)

        world.check(Setup().run(world, window=50), 50, SCALE)

    def test_an_unplannable_head_size_has_no_planner(self) -> None:
        limits = PlannerLimits(block_size=16, max_rows=4, max_blocks_per_row=4)

        assert FlashInferAttention().make_planner(CudaDevice(), limits, HeadSizes(4, 2, 80, torch.bfloat16)) is None


class TestPlanningAhead:
    def test_plans_wait_for_nothing_and_leave_queued_forwards_alone(self) -> None:
        setup = Setup()
        worlds = [World([(count, count), (60, 7)], num_decode=0) for count in (200, 31)]
        for world in worlds:
            setup.run(world)  # loads the kernel
        rows = [rows_of(world.batch) for world in worlds]
        with setup.active():
            torch.cuda._sleep(SLEEP_CYCLES)
            asleep = setup.device.compute.record()
            outs = []
            torch.cuda.set_sync_debug_mode("error")
            try:
                for world, known in zip(worlds, rows, strict=True):
                    plan = setup.planner.plan(world.batch.shape, known, is_captured=False)
                    batch = world.batch._replace(prefill_plan=plan)
                    outs.append(setup.attention.attend(world.q, world.cache, batch, scale=SCALE))
            finally:
                torch.cuda.set_sync_debug_mode("default")
            ran_ahead = not asleep.done()

        assert ran_ahead, "the host waited for the device"
        assert setup.planner.num_waits == 0
        for world, out in zip(worlds, outs, strict=True):
            world.check(out, None, SCALE)

    def test_a_third_plan_waits_for_the_copies_of_the_first(self) -> None:
        setup, world = Setup(), World([(50, 50)], num_decode=0)
        rows = rows_of(world.batch)
        setup.run(world)
        with setup.active():
            torch.cuda._sleep(SLEEP_CYCLES)
            for _ in range(3):
                setup.planner.plan(world.batch.shape, rows, is_captured=False)

        assert setup.planner.num_waits == 1


GRAPH = BatchShape(num_tokens=303, num_decode=3, num_prefill=8, max_query_len=300, num_kv_blocks=45)


class Captured:
    """Attention of one shape in a graph, whose inputs and plan change between replays."""

    def __init__(self, setup: Setup, worlds: Sequence[World]) -> None:
        self.setup = setup
        self.q = torch.zeros_like(worlds[0].q[:1]).repeat(GRAPH.num_tokens, 1, 1)
        blocks = max(world.cache[0].shape[0] for world in worlds)
        self.cache = tuple(tensor[:1].clone().zero_().repeat(blocks, 1, 1, 1) for tensor in worlds[0].cache)
        rows, none = GRAPH.num_rows, torch.zeros(0)
        ints = {"dtype": torch.int64, "device": "cuda"}
        self.batch = ForwardBatch(
            token_ids_T=none,
            positions_T=none,
            row_T=none,
            slots_T=torch.zeros(GRAPH.num_tokens, **ints),
            block_table_NK=torch.zeros((rows, GRAPH.num_kv_blocks), **ints),
            query_start_N=torch.zeros(rows, **ints),
            query_len_N=torch.zeros(rows, **ints),
            kv_len_N=torch.ones(rows, **ints),
            logits_idx_L=none,
            shape=GRAPH,
        )
        self.batch.query_len_N[3] = self.batch.kv_len_N[3] = 300  # all tokens to the first row, as an engine's padding
        plan = self._plan()
        batch = self.batch._replace(prefill_plan=plan)
        torch.cuda.synchronize()
        self.replay = setup.device.capture(
            lambda: setup.attention.attend(self.q, self.cache, batch, scale=SCALE), (), {}
        )

    def _plan(self) -> Any:
        return self.setup.planner.plan(GRAPH, rows_of(self.batch), is_captured=True)

    def run(self, world: World) -> Tensor:
        """Its tokens come first, then padding tokens; its rows come first, then padding rows."""
        rows, tokens = len(world.rows), world.q.shape[0]
        self.q.fill_(float("nan"))[:tokens] = world.q
        for fixed, source in zip(self.cache, world.cache, strict=True):
            fixed[: source.shape[0]] = source
        filling = {"query_start_N": tokens, "query_len_N": 0, "kv_len_N": 1, "block_table_NK": 0}
        for name, value in filling.items():
            getattr(self.batch, name).fill_(value)[:rows] = getattr(world.batch, name)
        self.batch.slots_T[:tokens] = world.batch.slots_T
        with self.setup.active():
            self._plan()
            out = self.replay()
        return out.clone()


class TestGraphs:
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_a_replay_reads_the_plan_made_last(self, head_dim: int) -> None:
        decode = [(600, 1), (5, 1), (64, 1)]
        worlds = [
            World([*decode, *prefill], num_decode=3, head_dim=head_dim)
            for prefill in ([(200, 200)], [(17, 17), (300, 40), (1, 1)], [(33, 30)] * 8, [(250, 3)])
        ]
        setup = Setup(head_dim=head_dim)
        expected = [setup.run(world) for world in worlds]
        captured = Captured(setup, worlds)

        for world, eager in [*zip(worlds, expected, strict=True), (worlds[0], expected[0])]:
            out = captured.run(world)

            world.check(out, None, SCALE)
            assert torch.equal(out[3 : eager.shape[0]], eager[3:]), "a graph computes prefill rows as eager does"
            setup.run(worlds[2])  # an eager forward in between plans in the same memory


# -- models and engines ------------------------------------------------------------------------------------------------


SMALL = {
    "small-64": {**SHAPES["tiny"], "hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
    "small-128": {
        **SHAPES["tiny"],
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 128,
    },
}
"""Two layers, two query heads to a key head; the second norms its heads."""
LIMITS: dict[str, Any] = {"max_requests": 8, "max_batch_tokens": 256, "max_sequence_length": 128, "num_blocks": 64}
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.fixture(params=SMALL)
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(SHAPES, request.param, SMALL[request.param])
    return f"shape:{request.param}"


def prompts(seed: int = 1) -> list[list[int]]:
    rng = python_random.Random(seed)
    return [[rng.randrange(512) for _ in range(count)] for count in (1, 2, 15, 16, 17, 33, 60, 5, 9, 3, 30)]


def engine_on(model: str | LoadedModel, backend: str = "flashinfer", **options: Any) -> Engine:
    config = EngineConfig(device="cuda", dtype="bfloat16", attention_backend=backend, **{**LIMITS, **options})
    if isinstance(model, LoadedModel):
        return Engine(model, config)
    return Engine.from_pretrained(model, config, progress=False)


class Planning:
    """A model whose forwards are planned by reading lengths back, for the driver that has no engine."""

    def __init__(self, model: Any, device: CudaDevice) -> None:
        self.model, self.vocab_size, self.max_position = model, model.vocab_size, model.max_position
        self.cache_layout = model.cache_layout
        self.planner = model.make_planner(device, PlannerLimits(block_size=16, max_rows=8, max_blocks_per_row=32))

    def __call__(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        if batch.shape.num_prefill:
            plan = self.planner.plan(batch.shape, rows_of(batch), is_captured=False)
            batch = batch._replace(prefill_plan=plan)
        return self.model(batch, caches)


class TestModels:
    @pytest.mark.parametrize("shape", ["qwen3-0.6b", "llama-3.2-1b"])
    def test_error_against_float32_is_that_of_bfloat16(self, shape: str) -> None:
        device = CudaDevice()
        load = {"device": device.torch_device}
        planned = load_model(f"shape:{shape}", attention="flashinfer", dtype=torch.bfloat16, **load).model
        plain = load_model(f"shape:{shape}", attention="torch", dtype=torch.bfloat16, **load).model
        exact = load_model(f"shape:{shape}", attention="torch", dtype=torch.float32, **load).model
        for model in (plain, exact):
            model.load_state_dict(planned.state_dict())  # type: ignore[attr-defined]
        torch.cuda.synchronize()

        with device.active():
            models: list[Model] = [exact, Planning(planned, device), plain]  # type: ignore[list-item]
            expected, *found = (teacher_forced(model) for model in models)
        errors = [float((one - expected).abs().mean()) for one in found]

        assert errors[0] < WORST_RATIO * errors[1], f"planned {errors[0]:.2e}, plain {errors[1]:.2e}"


class TestEngines:
    def test_one_option_names_kernels_attention_and_planner(self, small: str) -> None:
        with engine_on(small) as engine:
            assert engine.resolved.attention_backend == "flashinfer"
            assert isinstance(engine.runner.planner, FlashInferPlanner)
            assert isinstance(engine.loaded.model.kernels, FlashInferKernels)  # type: ignore[attr-defined]

    @pytest.mark.parametrize("mode", ["legacy", "async"])
    @pytest.mark.parametrize("graphs", [None, -1])
    def test_give_the_tokens_of_the_triton_backend(self, small: str, mode: str, graphs: int | None) -> None:
        found = []
        for backend in ("triton", "flashinfer"):
            with engine_on(small, backend, mode=mode, graphs=graphs) as engine:
                found.append(engine.generate(prompts(), GREEDY, progress=False))

        check_parted_by_near_ties(*found)

    def test_mixed_graphs_agree_with_eager_iterations(self, small: str) -> None:
        found = []
        for options in ({"mode": "legacy"}, {"mode": "async", "graphs": -1}):
            with engine_on(small, **options) as engine:
                found.append(engine.generate(prompts(), GREEDY, progress=False))
                if options.get("graphs"):
                    assert any(shape.num_prefill for shape in engine.runner.graphs.shapes())

        check_parted_by_near_ties(*found)

    @pytest.mark.parametrize("graphs", [None, -1])
    def test_prepare_waits_for_nothing(self, small: str, graphs: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        planned = 0
        with engine_on(small, mode="async", graphs=graphs) as engine:
            planner, plan = engine.runner.planner, engine.runner.plan
            assert isinstance(planner, FlashInferPlanner)

            def watched(*args: Any) -> Any:
                nonlocal planned
                torch.cuda.set_sync_debug_mode("error")
                try:
                    made = plan(*args)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
                planned += made.prefill_plan is not None
                return made

            monkeypatch.setattr(engine.runner, "plan", watched)
            engine.generate(prompts(), GREEDY, progress=False)

            assert planned
            assert planner.num_waits == 0

    @pytest.mark.parametrize("graphs", [None, -1])
    def test_two_on_one_model_at_once_give_what_each_gives_alone(self, small: str, graphs: int | None) -> None:
        loaded = load_model(small, attention="flashinfer", dtype=torch.bfloat16, device=torch.device("cuda", 0))
        seeds = (1, 2)

        alone = [step_in_turns(loaded, [seed], graphs)[0] for seed in seeds]

        assert step_in_turns(loaded, seeds, graphs) == alone

    def test_a_block_size_that_cannot_be_read_is_refused_at_once(self, small: str) -> None:
        with pytest.raises(
            ConfigError, match="attention_backend='flashinfer' needs block_size in 16, 32, 64, 128, got 8"
        ):
            engine_on(small, block_size=8)


def step_in_turns(loaded: LoadedModel, seeds: Sequence[int], graphs: int | None) -> list[dict[str, tuple[int, ...]]]:
    """Tokens by request of an engine for each seed, all on one model, each a step at a time."""
    engines = [engine_on(loaded, mode="async", graphs=graphs) for _ in seeds]
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in seeds]
    for engine, seed in zip(engines, seeds, strict=True):
        for number, prompt in enumerate(prompts(seed)):
            engine.add_request(prompt, GREEDY, request_id=str(number))
    while any(engine.has_unfinished() for engine in engines):
        for engine, tokens in zip(engines, found, strict=True):
            tokens.update({output.request_id: output.token_ids for output in engine.step()})
    for engine in engines:
        engine.close()
    return found
