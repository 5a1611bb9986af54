"""The engine on CUDA: equal to the CPU devices, graphs equal to eager, and no host wait in an overlap iteration."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.device_cuda import CudaDevice
from engine.engine import Engine
from engine.invariants import check_device, check_idle
from engine.phases import Order
from tests.sync_debug import no_hidden_synchronisation

PROMPTS = [[1 + (7 * i + j) % 60 for j in range(n)] for i, n in enumerate((1, 2, 15, 16, 17, 33, 60, 5, 9, 3, 30))]
MIX = [
    SamplingParams(
        max_tokens=20 + i,
        temperature=0.0 if i % 2 else 0.7,
        top_p=0.9 if i % 4 == 2 else 1.0,
        top_k=5 if i % 3 == 2 else 0,
        seed=i,
        logprobs=2 if i % 3 == 0 else None,
        presence_penalty=0.5 if i % 5 == 0 else 0.0,
        min_tokens=4 if i % 4 == 1 else 0,
        logit_bias={3: 2.0} if i % 6 == 3 else None,
    )
    for i in range(len(PROMPTS))
]
LIMITS: dict[str, Any] = {"max_requests": 8, "max_batch_tokens": 256, "max_sequence_length": 128, "num_blocks": 40}


def run(model: str, **options: Any) -> list[tuple[Any, ...]]:
    with Engine.from_pretrained(model, EngineConfig(**LIMITS, **options), progress=False) as engine:
        outputs = engine.generate(PROMPTS, MIX, progress=False)
        check_device(engine)
        check_idle(engine)
    return [(o.token_ids, o.finish_reason) for o in outputs]


class TestSameTokens:
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    @pytest.mark.parametrize("graphs", [None, -1])
    def test_oracle_on_cuda_equals_inline(self, mode: str, graphs: int | None) -> None:
        expected = run("oracle", device="inline", mode="legacy")

        assert run("oracle", device="cuda", mode=mode, graphs=graphs, debug_invariants=True) == expected

    @pytest.mark.parametrize("graphs", [None, -1])
    def test_float64_model_gives_the_same_tokens_in_both_modes(self, graphs: int | None) -> None:
        expected = run("shape:tiny", device="cuda", mode="legacy", dtype="float64")

        assert run("shape:tiny", device="cuda", mode="async", dtype="float64", graphs=graphs) == expected


class TestOverlapWaitsForNothing:
    @pytest.mark.parametrize("graphs", [None, -1])
    def test_overlap_iterations_pass_under_the_sync_debug_mode(self, graphs: int | None) -> None:
        config = EngineConfig(device="cuda", mode="async", graphs=graphs, **LIMITS)
        with Engine.from_pretrained("oracle", config, progress=False) as engine:
            for prompt, params in zip(PROMPTS, MIX, strict=True):
                engine.add_request(prompt, params)
            checked = 0
            while engine.has_unfinished():
                border = engine._start() and engine.controller.current
                assert border
                if border.order is Order.OVERLAP:
                    with no_hidden_synchronisation():
                        engine.step()
                    checked += 1
                else:
                    engine.step()

        assert checked > 20


class TestDeviceTimes:
    def test_a_piece_begins_where_the_one_before_it_ended(self) -> None:
        device = CudaDevice()

        first, second = (device.compute.launch(lambda: torch.cuda._sleep(2_000_000), timed=True) for _ in range(2))

        device.synchronize()
        assert first is not None
        assert second is not None
        assert second.start_ns == first.end_ns
        assert first.start_ns < second.start_ns < second.end_ns

    def test_a_pause_of_the_device_belongs_to_no_piece(self) -> None:
        device = CudaDevice()
        device.compute.launch(lambda: torch.cuda._sleep(1000), timed=True)
        device.synchronize()
        time.sleep(0.02)
        launched_ns = time.perf_counter_ns()

        piece = device.compute.launch(lambda: torch.cuda._sleep(1000), timed=True)

        device.synchronize()
        assert piece is not None
        assert launched_ns <= piece.start_ns < piece.end_ns

    @pytest.mark.parametrize("stream", ["compute", "copy"])
    def test_nor_does_untimed_work_or_a_wait(self, stream: str) -> None:
        device = CudaDevice()
        device.compute.launch(lambda: torch.cuda._sleep(1000), timed=True)
        other = getattr(device, stream)
        launched_ns = time.perf_counter_ns()
        other.launch(lambda: torch.cuda._sleep(50_000_000))
        device.compute.wait_for(other.record())

        piece = device.compute.launch(lambda: torch.cuda._sleep(1000), timed=True)

        device.synchronize()
        assert piece is not None
        assert piece.start_ns - launched_ns > piece.end_ns - piece.start_ns

    def test_device_spans_lie_on_the_host_clock(self) -> None:
        run("shape:tiny", device="cuda")  # kernels are compiled then: it takes seconds, and distance makes a bound wide
        with Engine.from_pretrained("shape:tiny", EngineConfig(device="cuda", **LIMITS), progress=False) as engine:
            engine.generate(PROMPTS, MIX, progress=False)
            engine.device.synchronize()
            spans = [span for span in engine.recorder.spans() if span.category.value == "device"]
            records = engine.recorder.iterations()
            begins = {record.iteration: record.begin_ns for record in records}

            bound_ns = engine.device.clock_error_ns

        assert spans
        assert bound_ns is not None
        assert 0 < bound_ns < median(record.duration_ns for record in records), "it does not tell iterations apart"
        for span in spans:
            assert span.end_ns > span.start_ns
            assert span.start_ns > begins[span.iteration] - bound_ns
