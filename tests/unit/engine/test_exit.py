"""A program that ends with work in flight ends cleanly: its worker threads are waited for."""

from __future__ import annotations

import subprocess
import sys

import pytest

LEAVES_A_FORWARD_RUNNING = """
from engine import Engine, EngineConfig, SamplingParams
engine = Engine.from_pretrained("shape:tiny", EngineConfig(max_sequence_length=64, op_sleep_s=0.2), progress=False)
engine.add_request([1, 2, 3], SamplingParams(max_tokens=20, temperature=0))
for _ in range({steps}):
    engine.step()
for _ in range({phases}):
    engine.step_phase()
"""


class TestExit:
    @pytest.mark.parametrize(("steps", "phases"), [(1, 0), (1, 1), (2, 3)])
    def test_with_a_forward_in_flight_is_clean(self, steps: int, phases: int) -> None:
        code = LEAVES_A_FORWARD_RUNNING.format(steps=steps, phases=phases)

        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)

        assert (done.returncode, done.stderr) == (0, "")
