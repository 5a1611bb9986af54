"""Ten thousand iterations under changing load: nothing grows, nothing leaks, no answer changes."""

from __future__ import annotations

import random

import pytest

from engine.invariants import check_device, check_idle
from engine.request import SamplingParams
from tests.oracle_world import oracle_engine
from tracing.recorder import Recorder

NUM_ITERATIONS = 10_000
PERIOD = 1000


class TestSoak:
    @pytest.mark.slow
    def test_of_ten_thousand_iterations_keeps_blocks_and_answers_steady(self) -> None:
        engine = oracle_engine(max_requests=4, num_blocks=40, debug_invariants=False)
        engine.recorder.enabled = False
        rng = random.Random(1)
        answers: dict[tuple[int, int], tuple[int, ...]] = {}
        asked: dict[str, tuple[int, int]] = {}
        idle_sizes = set()
        while engine.counters.steps < NUM_ITERATIONS:
            until = engine.counters.steps + PERIOD
            while engine.counters.steps < until or engine.has_unfinished():
                if engine.counters.steps < until and len(engine._live) < 6:
                    kind = (rng.randrange(8), rng.choice([3, 9, 30]))
                    params = SamplingParams(
                        max_tokens=kind[1], temperature=1.0, seed=kind[0], ignore_eos=True, detokenize=False
                    )
                    asked[engine.add_request([kind[0] + 1] * 5, params)] = kind
                if rng.random() < 0.01:
                    engine.abort(next(iter(engine._live)))
                for output in engine.step():
                    kind = asked.pop(output.request_id)
                    if output.finish_reason == "length":
                        assert answers.setdefault(kind, output.token_ids) == output.token_ids
            check_idle(engine)
            check_device(engine)
            queue, controller = engine.queue, engine.controller
            idle_sizes.add(
                (
                    engine.pool.num_free,
                    len(queue.waiting),
                    len(controller.unemitted),
                    len(controller.undelivered),
                    len(engine._boxes),
                    len(engine.recorder.spans()),
                )
            )
        assert len(answers) == 24
        assert len(idle_sizes) == 1, f"what an idle engine holds changes: {idle_sizes}"
        assert engine.counters.finished["abort"] > 50
        assert engine.counters.overlap_steps > NUM_ITERATIONS // 10

    def test_with_the_recorder_on_keeps_no_more_than_its_capacity(self) -> None:
        engine = oracle_engine(debug_invariants=False)
        engine.recorder = engine.runner.recorder = engine.controller.recorder = Recorder(capacity=500)
        for seed in range(40):
            engine.add_request([1], SamplingParams(max_tokens=20, seed=seed, ignore_eos=True))
        while engine.has_unfinished():
            engine.step()
        assert len(engine.recorder.spans()) <= 500
        assert len(engine.recorder.iterations()) <= 500
        assert engine.recorder.lost_iterations > 0
