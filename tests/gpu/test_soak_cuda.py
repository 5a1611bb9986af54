"""Ten thousand random iterations on CUDA under invariants: every answer right, every block back, memory steady."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.soak import soak

NUM_ITERATIONS = 10_000
STEADY_BYTES = 1 << 20
"""Memory may differ by this between the first tenth's end and the last's: all but the widest columns exist by then.
One tensor kept an iteration, 512 bytes at least, would be four times as much."""


class TestSoak:
    @pytest.mark.timeout(400)
    def test_of_ten_thousand_iterations_with_graphs_answers_as_alone_and_keeps_nothing(self) -> None:
        gc.collect()  # what earlier tests have left is none of its memory
        report = soak("cuda", NUM_ITERATIONS, seed=1, graphs=-1, measure=torch.cuda.memory_allocated)

        assert report.iterations >= NUM_ITERATIONS
        assert report.num_waits == [0, 0, 0]
        assert abs(report.memory[-1] - report.memory[0]) < STEADY_BYTES, f"bytes held: {report.memory}"
        assert report.orders["overlap"] > NUM_ITERATIONS // 10
        assert report.orders["legacy"] > NUM_ITERATIONS // 10
        assert report.switches > 100
        assert report.resets > 3
        assert min(report.finished[reason] for reason in ("length", "stop", "abort")) > 100
        assert report.graph_hits > NUM_ITERATIONS // 2
