"""The soak's body on the CPU devices, for a few hundred iterations; ten thousand run on CUDA."""

from __future__ import annotations

from typing import Any

import pytest

from tests.soak import soak

KINDS: dict[str, dict[str, Any]] = {
    "eager": {},
    "buckets": {"graphs": (2, 8), "graph_non_decode": False},
    "chunks": {"chunked_prefill": True, "max_batch_tokens": 12},
}


class TestSoak:
    @pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
    @pytest.mark.parametrize("device", ["inline", "cpu"])
    def test_of_three_hundred_iterations_gives_back_every_block_and_hardly_waits_for_staging(
        self, device: str, options: dict[str, Any]
    ) -> None:
        report = soak(device, 300, seed=3, **options)

        # A forward that only reads a part of a prompt, or whose rows have all been aborted, brings back nothing that
        # the host waits for. Behind two of them both halves are in use if others keep the device from running.
        assert sum(report.num_waits) <= 5, report.num_waits
        assert {"overlap", "overlap_admit", "no_overlap", "legacy", "primer", "drain"} <= set(report.orders)
        assert {"length", "stop", "abort"} <= set(report.finished)
        assert (report.graph_hits > 0) == ("graphs" in options)

    def test_is_the_same_life_on_both_devices(self) -> None:
        assert soak("inline", 100, seed=5) == soak("cpu", 100, seed=5)

    def test_measures_once_a_tenth_with_nothing_live(self) -> None:
        taken = iter(range(100))

        report = soak("inline", 60, seed=6, measure=lambda: next(taken))

        assert report.memory == list(range(10))
