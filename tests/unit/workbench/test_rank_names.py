"""What a rank's orders, reasons, waits and dummy work are called where a person meets them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.phases import Order, Phase, Reason
from engine.request import SamplingParams
from tests.rank_world import rank_world
from tests.unit.tracing.traces import device, phase, record, wait
from tests.unit.workbench.test_ranges import METRICS
from tests.unit.workbench.test_timeline import seen
from tracing.nvtx_ranges import colour_of
from tracing.records import DUMMY_WORK, PHASE_COLOURS, RANKS_WAIT
from workbench.explain_order import explain_record
from workbench.panel.strip_view import phase_title
from workbench.timeline import timeline_html

GREEDY = SamplingParams(max_tokens=4, temperature=0.0, seed=0, ignore_eos=True)
DUMMIES = [order for order in Order if order.is_dummy]


class TestWords:
    @pytest.mark.parametrize("order", DUMMIES)
    def test_a_dummy_iteration_is_said_to_be_for_others_in_every_phase(self, order: Order) -> None:
        assert all("other ranks" in phase_title(order, one) for one in order.phases)

    @pytest.mark.parametrize("order", [Order.SHARED_DRAIN, Order.MTP_SHARED_DRAIN])
    def test_a_drain_among_ranks_ends_with_a_dummy_forward(self, order: Order) -> None:
        assert "dummy forward" in phase_title(order, Phase.FORWARD)
        assert "tokens" in phase_title(order, Phase.RESOLVE)

    def test_an_idle_rank_says_that_others_need_it(self) -> None:
        told = explain_record(record(4, 0, 9, order="dummy", reason=Reason.OTHERS_WORK.value))
        assert told.startswith("Iteration 4 took dummy (prepare → forward) because this rank had nothing to do")
        assert "if a request were live on this rank" in told

    def test_an_idle_rank_that_switches_does_not_claim_to_drain_a_forward_of_its_own(self) -> None:
        idle = record(4, 0, 9, order="dummy", reason=Reason.MODE_SWITCH.value)
        told = explain_record(idle), explain_record(replace(idle, order="drain"))
        assert "other ranks had a forward pending" in told[0]
        assert "other ranks" not in told[1]

    def test_real_dummy_iterations_are_explained(self) -> None:
        with rank_world(2, device="cpu", debug_invariants=False) as world:
            world.on(0, lambda one: one.submit([1, 2, 3], GREEDY))
            world.drain()
            records = world.worlds[1].engine.recorder.iterations()
        assert records
        assert all("other ranks needed its experts" in explain_record(one) for one in records)


class TestColours:
    def test_the_wait_for_ranks_is_told_from_every_other_colour(self) -> None:
        colour = PHASE_COLOURS[RANKS_WAIT]
        assert list(PHASE_COLOURS.values()).count(colour) == 1
        assert colour_of(RANKS_WAIT, "wait") == colour != colour_of("samples", "wait")
        assert f"| `wait` | push/pop | iteration | {colour} |" in METRICS

    def test_dummy_work_is_told_from_the_work_it_stands_for(self) -> None:
        for name in DUMMY_WORK:
            assert PHASE_COLOURS[name] != PHASE_COLOURS[name.removeprefix("dummy_")]
            assert f"`{name}`" in METRICS


def test_a_snapshot_shows_both() -> None:
    html = timeline_html(
        seen(
            phase("prepare", 0, 1_000),
            wait(200, 800, name="ranks"),
            phase("resolve", 1_000, 2_000),
            wait(1_200, 1_800, name="samples"),
            device("dummy_forward", 1_000, 2_000),
        )
    )
    assert "waits for other ranks, " in html
    assert "host waits for other ranks" in html
    assert "host waits for the device" in html
    assert html.count(f"rgba(0,0,0,.3) 0 1px,{PHASE_COLOURS['dummy_forward']}") == 2  # the bar and the legend
