"""What decode derives: the floor of a step, and what async makes of legacy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from engine.batch import ForwardBatch
from engine.kernels import make_kernels
from engine.models.base import LayerCache, PagedState
from engine.models.moe import MoE, MoEConfig
from tests.unit.tracing.traces import batch, device, phase, record, wait
from workbench.bench import floor
from workbench.bench.breakdown import Breakdown, steady_summary
from workbench.bench.floor import copy_bandwidth, floor_ms, kv_bytes, unread_expert_bytes, weight_bytes
from workbench.bench.pairs import DecodeCell, Pair, pairs_of
from workbench.bench.results import Leg


class Small(nn.Module):
    """10 ids, 4 inputs: 160 bytes of embedding, 160 of head unless it is tied, 64 between; 2 layers of cache."""

    vocab_size, max_position = 10, 64

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.zeros(10, 4))
        self.between = nn.Parameter(torch.zeros(4, 4))
        self.head = None if is_tied else nn.Parameter(torch.zeros(10, 4))

    def cache_layout(self) -> Sequence[PagedState]:
        return [PagedState(shapes=((2, 4), (2, 4)), dtypes=(torch.float32, torch.bfloat16))] * 2

    def forward(self, batch: ForwardBatch, caches: Sequence[LayerCache]) -> Tensor:
        raise NotImplementedError


class TestFloor:
    def test_an_embedding_counts_only_where_it_is_the_head(self) -> None:
        assert weight_bytes(Small(is_tied=False)) == 64 + 160
        assert weight_bytes(Small(is_tied=True)) == 64 + 160

    def test_a_parameter_with_two_names_is_read_once(self) -> None:
        model = Small(is_tied=False)
        model.head = model.embedding

        assert weight_bytes(model) == 64 + 160

    def test_the_cache_counts_by_its_layout(self) -> None:
        assert kv_bytes(Small(is_tied=True), 10) == 10 * 2 * (8 * 4 + 8 * 2)

    def test_is_all_bytes_over_the_bandwidth(self) -> None:
        model = Small(is_tied=True)

        assert floor_ms(model, rows=3, cached=5.0, bandwidth=1000) == pytest.approx(224 + 3 * 5 * 96)

    def test_few_tokens_leave_most_experts_unread(self) -> None:
        model = Small(is_tied=True)
        sizes = MoEConfig(hidden_size=4, num_experts=8, top_k=2, expert_size=3)
        drafting, layer = (
            MoE(sizes, make_kernels("torch"), device=torch.device("cpu"), dtype=torch.float32) for _ in range(2)
        )
        model.heads = nn.ModuleList([drafting])
        assert unread_expert_bytes(model, 1) == 0

        model.layer = layer
        own = 8 * (2 * 3 * 4 + 4 * 3) * 4
        assert unread_expert_bytes(model, 1) == pytest.approx(own * 6 / 8)
        assert unread_expert_bytes(model, 2) == pytest.approx(own * 36 / 64)
        read = 160 + 64 + sum(one.numel() for one in layer.parameters()) * 4 - own * 36 / 64
        assert floor_ms(model, rows=2, cached=0.0, bandwidth=1000) == pytest.approx(read)

    def test_a_copy_reads_and_writes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(floor, "_copy_seconds", lambda target, source: 0.5)

        assert copy_bandwidth(torch.device("cpu"), buffer_bytes=1000) == 2 * 1000 / 0.5

    def test_a_bandwidth_is_measured(self) -> None:
        assert copy_bandwidth(torch.device("cpu"), buffer_bytes=1 << 16) > 0


class TestBreakdown:
    def test_leaves_out_iterations_beside_a_prefill(self) -> None:
        prompts, rows = batch(prefill=1, decode=0), batch(decode=2)
        records = [
            record(0, 0, 1_000, launched=prompts),
            record(1, 1_000, 9_000, consumed=prompts, launched=rows),
            record(2, 9_000, 11_000, consumed=rows, launched=rows),
            record(3, 11_000, 15_000, consumed=rows, launched=rows),
            record(4, 15_000, 30_000, consumed=rows),
        ]

        assert Breakdown.of(steady_summary([], records)).num_iterations == 2
        assert Breakdown.of(steady_summary([], records)).step_ms == pytest.approx(0.003)

    def test_sums_host_work_without_waits_and_compute_without_copies(self) -> None:
        rows = batch(decode=2)
        spans = [
            phase("prepare", 0, 200),
            phase("resolve", 200, 900),
            wait(300, 700),
            device("forward", 100, 500),
            device("sample", 600, 900),
            device("fetch", 0, 1_000, lane="copy"),
        ]

        found = Breakdown.of(steady_summary(spans, [record(0, 0, 1_000, consumed=rows, launched=rows)]))

        assert found.host_us == {"prepare": 0.2, "resolve": 0.3}
        assert found.host_sum_us == pytest.approx(0.5)
        assert found.device_ms == {"forward": 0.0004, "sample": 0.0003}
        assert found.device_sum_ms == pytest.approx(0.0007)
        assert found.busy_share == pytest.approx(0.9)  # the gap from 500 to 600 is the one bubble
        assert found.exposed_us == pytest.approx(0.1)  # prepare before 100; 200-300 and 700-900 lie under the device
        assert found.to_dict()["host_sum_us"] == found.host_sum_us

    def test_without_iterations_there_are_no_samples(self) -> None:
        found = Breakdown.of(steady_summary([], []))

        assert (found.step_ms, found.host_sum_us, found.device_sum_ms, found.exposed_us) == (None,) * 4


def made_leg(mode: str, *, graphs: bool = True) -> Leg:
    return Leg(name=f"{mode} {graphs}", model="small", mode=mode, graphs=graphs, config={})


def made_cell(rows: int, *, step_ms: float, exposed_us: float | None = 100.0) -> DecodeCell:
    return DecodeCell(
        batch=rows,
        tpot_ms=step_ms,
        prefill_ms=1.0,
        tokens_per_s=1.0,
        floor_ms=0.5,
        lost_iterations=0,
        breakdown=Breakdown(
            num_iterations=9,
            step_ms=step_ms,
            device_ms={"forward": 1.5, "sample": 0.5},
            host_us={"prepare": 300.0, "resolve": 200.0},
            exposed_us=exposed_us,
            hidden_share=0.5,
            busy_share=0.9,
            graph_hit_rate=1.0,
        ),
    )


class TestPairs:
    def test_sets_async_beside_what_legacy_shows_to_be_possible(self) -> None:
        legacy, overlapped = made_cell(8, step_ms=2.8, exposed_us=400.0), made_cell(8, step_ms=2.1, exposed_us=20.0)

        pair = Pair.of(legacy, overlapped)

        assert pair.gain == pytest.approx(2.8 / 2.1)
        assert pair.predicted_gain == pytest.approx((0.5 + 2.0) / 2.0)
        assert pair.step_over_longer == pytest.approx(2.1 / 2.0)
        assert pair.hidden_of_legacy == pytest.approx(0.95)

    def test_joins_equal_batches_and_graphs_only(self) -> None:
        cells = [
            (made_leg("async"), made_cell(1, step_ms=1.0)),
            (made_leg("async"), made_cell(8, step_ms=1.0)),
            (made_leg("legacy"), made_cell(8, step_ms=3.0)),
            (made_leg("legacy", graphs=False), made_cell(1, step_ms=5.0)),
        ]

        assert [(leg.name, pair.batch, pair.gain) for leg, pair in pairs_of(cells)] == [("async True", 8, 3.0)]

    def test_nothing_exposed_in_legacy_leaves_nothing_to_hide(self) -> None:
        legacy, overlapped = made_cell(8, step_ms=2.0, exposed_us=0.0), made_cell(8, step_ms=2.0, exposed_us=None)

        assert Pair.of(legacy, overlapped).hidden_of_legacy is None
        assert Pair.of(overlapped, legacy).hidden_of_legacy is None
