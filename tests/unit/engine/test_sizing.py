"""Automatic options are settled by the device they run on."""

from __future__ import annotations

from typing import Any

import pytest

from engine import EngineConfig
from engine.device_host import InlineDevice
from engine.graphs import graph_list
from engine.models.loader import load_model
from engine.sizing import resolve_config


class NamedCuda(InlineDevice):
    """Runs nothing; goes by the name of a GPU."""

    kind: Any = "cuda"


class TestAutomaticGraphs:
    def test_are_none_on_a_cpu_device(self) -> None:
        resolved = resolve_config(EngineConfig(), load_model("shape:tiny"), InlineDevice())

        assert resolved.config.graphs is None
        assert graph_list(resolved.config, 64) == []

    def test_hold_every_decode_batch_on_cuda_and_waste_fewer_than_eight_rows(self) -> None:
        config = EngineConfig(max_requests=256, max_sequence_length=64)
        resolved = resolve_config(config, load_model("shape:tiny"), NamedCuda())

        sizes = [one.num_decode for one in graph_list(resolved.config, 64)]
        assert all(one.num_prefill == 0 for one in graph_list(resolved.config, 64))
        for rows in range(1, 257):
            assert min(size for size in sizes if size >= rows) - rows < 8

    @pytest.mark.parametrize("graphs", [None, 0, -1, (1, 2, 4)])
    def test_give_way_to_what_was_asked_for(self, graphs: Any) -> None:
        resolved = resolve_config(EngineConfig(graphs=graphs), load_model("shape:tiny"), NamedCuda())

        assert resolved.config.graphs == graphs
        assert resolved.config.graph_non_decode
