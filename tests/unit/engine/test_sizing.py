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


class SmallCuda(NamedCuda):
    """A GPU of 8 MiB, of which 4 are taken."""

    def memory_bytes(self) -> int:
        return 8 << 20

    def used_bytes(self) -> int:
        return 4 << 20


class TestAutomaticPool:
    def test_holds_every_request_at_its_longest_where_there_is_room(self) -> None:
        config = EngineConfig(max_requests=4, max_sequence_length=64)

        assert resolve_config(config, load_model("shape:tiny"), InlineDevice()).num_blocks == 4 * 64 // 16

    def test_takes_half_of_what_is_free_on_cuda(self) -> None:
        """A GPU of 139 GiB once held 11 requests, because the pool stopped at the CPU's 1 GiB."""
        loaded = load_model("shape:tiny")
        block_bytes = 16 * sum(state.bytes_per_token() for state in loaded.model.cache_layout())
        config = EngineConfig(max_requests=2048, max_sequence_length=2048)

        assert resolve_config(config, loaded, SmallCuda()).num_blocks == (2 << 20) // block_bytes
