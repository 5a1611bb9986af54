"""Comparison on a model with weights: exact in float64, judged in float32."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from workbench.comparison import compare
from workbench.workloads import parse_workload

CONFIG = EngineConfig(max_requests=6, max_batch_tokens=192, max_sequence_length=96, num_blocks=40, graphs=(1, 2, 4, 6))


class TestCompareTiny:
    @pytest.mark.parametrize("temperature", [0.0, 0.9])
    def test_float64_is_equal_in_all_legs(self, temperature: float) -> None:
        text = f"fixed:requests=8,input=17,output=20,arrive=2,temperature={temperature}"
        workload = parse_workload(text, vocab_size=512)

        result = compare(workload, model="shape:tiny", config=CONFIG.replace(dtype="float64"), warmup=0)

        assert result.ids_equal, str(result)

    def test_float32_is_equal_or_apart_by_rounding_alone(self) -> None:
        workload = parse_workload("fixed:requests=12,input=9,output=24,arrive=1,temperature=0.7", vocab_size=512)

        result = compare(workload, model="shape:tiny", config=CONFIG, warmup=0)

        assert result.outputs_match, str(result)
        assert result.runs[-1].summary.graphs.hits > 0
