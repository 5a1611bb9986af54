from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tracing.any_trace import Trace, any_trace
from tests.unit.tracing.simulated import DEVICE, HOST, Lengths, simulate
from tests.unit.tracing.traces import batch, device, phase, record, wait
from tracing.summary import Spread
from tracing.what_if import WhatIf, what_if


def check_predicts(found: WhatIf, real: Trace) -> None:
    """The prediction is the trace that the changed lengths really make, to the nanosecond."""
    records = real[1]
    assert found.after == Spread.of(one.duration_ns for one in records)
    assert found.makespan_after_ns == records[-1].end_ns - records[0].begin_ns
    for order in found.orders:
        assert order.after == Spread.of(one.duration_ns for one in records if one.order == order.order)


class TestNothingChanged:
    @given(any_trace(knows_enqueues=True))
    def test_replays_every_trace_as_it_was(self, trace: Trace) -> None:
        found = what_if(*trace)
        assert found.residual_ns == 0
        assert found.before == found.after
        assert found.makespan_before_ns == found.makespan_after_ns

    @pytest.mark.parametrize("mode", ["legacy", "async"])
    def test_a_factor_of_one_is_no_change(self, mode: str) -> None:
        trace = simulate(mode, 5, Lengths(launch=5, wake=7))
        found = what_if(*trace, scale={"resolve": 1, "device forward": 1.0}, add_ns={"wake-up": 0})
        check_predicts(found, trace)

    def test_an_empty_trace_has_no_samples(self) -> None:
        found = what_if([], [])
        assert (found.num_iterations, found.before, found.after, found.orders) == (0, None, None, ())
        assert (found.makespan_after_ns, found.makespan_ratio, found.residual_ns) == (0, None, 0)

    def test_void_iterations_are_left_out(self) -> None:
        records = [record(0, 0, 10), record(1, 10, 900, void_reasons=("debugger",)), record(2, 900, 930)]
        found = what_if([phase("prepare", 2, 6, 0), phase("prepare", 910, 920, 2)], records, scale={"prepare": 3})
        assert (found.num_iterations, found.makespan_before_ns, found.makespan_after_ns) == (2, 40, 40 + 8 + 20)
        assert found.num_void == 1
        assert str(found).startswith("if prepare × 3: mean step over 2 iterations (1 void ones left out)\n")

    def test_says_by_how_much_each_order_changes(self) -> None:
        records = [record(0, 0, 10**6, order="a"), record(1, 10**6, 4 * 10**6, order="b")]
        found = what_if([phase("prepare", 2 * 10**6, 3 * 10**6, 1)], records, scale={"prepare": 0.5})
        rows = [line.split() for line in str(found).splitlines()[2:]]
        assert rows == [
            ["all", "2", "2.000", "1.750", "-0.250", "-12.5"],
            ["a", "1", "1.000", "1.000", "+0.000", "+0.0"],
            ["b", "1", "3.000", "2.500", "-0.500", "-16.7"],
            ["makespan", "4.000", "3.500", "-0.500", "-12.5"],
        ]
        assert str(found).endswith("\n"), "printed twice, an empty line stands between them"
        assert "void" not in str(found)


class TestLegacy:
    def test_every_phase_and_all_work_of_the_step_count_in_full(self) -> None:
        trace = simulate("legacy", 4, Lengths())
        for name, added in (("prepare", 100), ("resolve", 80), ("emit", 60), ("device forward", 1000), ("fetch", 10)):
            found = what_if(*trace, scale={name: 2})
            assert found.before is not None
            assert found.after is not None
            assert found.after.p50_ns == found.before.p50_ns + added, name

    def test_the_caller_between_steps_is_in_the_makespan_alone(self) -> None:
        found = what_if(*simulate("legacy", 4, Lengths()), add_ns={"outside iterations": 500})
        assert found.before == found.after
        assert found.makespan_after_ns == found.makespan_before_ns + 3 * 500


class TestAsync:
    def test_host_work_that_hides_may_grow_for_nothing(self) -> None:
        trace = simulate("async", 8, Lengths())
        for name in ("prepare", "resolve", "emit"):
            found = what_if(*trace, scale={name: 3})
            (overlap,) = [order for order in found.orders if order.order == "overlap"]
            assert overlap.after.p50_ns == overlap.before.p50_ns, name

    def test_host_work_longer_than_the_forward_bounds_the_step(self) -> None:
        trace = simulate("async", 8, Lengths())
        found = what_if(*trace, add_ns={"resolve": 3000})
        check_predicts(found, simulate("async", 8, Lengths().with_host(resolve=3080)))
        (overlap,) = [order for order in found.orders if order.order == "overlap"]
        assert overlap.after.p50_ns > overlap.before.p50_ns + 1500

    def test_a_step_that_the_host_bounds_gains_nothing_by_a_faster_forward(self) -> None:
        trace = simulate("async", 8, Lengths().with_host(resolve=3000))
        found = what_if(*trace, scale={"device forward": 0.5})
        (overlap,) = [order for order in found.orders if order.order == "overlap"]
        assert overlap.after.p50_ns == overlap.before.p50_ns

    def test_orders_are_told_apart(self) -> None:
        found = what_if(*simulate("async", 8, Lengths()), scale={"device forward": 2})
        changes = {order.order: order.after.p50_ns - order.before.p50_ns for order in found.orders}
        assert [order.order for order in found.orders] == ["overlap", "drain", "primer"]
        assert (changes["overlap"], changes["primer"]) == (1000, 0)


class TestLatencies:
    def test_launches_that_take_no_time(self) -> None:
        for mode in ("legacy", "async"):
            found = what_if(*simulate(mode, 5, Lengths(launch=6)), scale={"launch latency": 0})
            check_predicts(found, simulate(mode, 5, Lengths()))

    def test_a_host_that_wakes_at_once(self) -> None:
        found = what_if(*simulate("legacy", 5, Lengths(launch=6, wake=9)), scale={"wake-up": 0})
        check_predicts(found, simulate("legacy", 5, Lengths(launch=6)))

    def test_a_wait_that_blocks_no_more_costs_the_usual_call(self) -> None:
        trace = simulate("legacy", 3, Lengths(wake=9))
        found = what_if(*trace, scale={"device forward": 0, "device sample": 0, "fetch": 0, "publish": 0})
        check_predicts(found, simulate("legacy", 3, Lengths(device=dict.fromkeys(DEVICE, 0))))

    def test_work_held_up_by_another_thing_takes_the_usual_time_to_begin(self) -> None:
        """The stream's gap is 1, a launch from idle takes 20; late, the second forward begins from idle."""
        spans = [
            device("forward", 20, 120, 0, enqueued=0),
            device("forward", 121, 221, 1, enqueued=60),
            device("fetch", 222, 223, 1, lane="copy", enqueued=65),
            phase("prepare", 50, 59, 1),
            phase("resolve", 70, 260, 1),
            wait(70, 230, 1),
        ]
        found = what_if(spans, [record(0, 0, 10), record(1, 50, 300)], add_ns={"prepare": 100})
        shift = (60 + 100 + 20) - 121  # enqueued at 160, begun at 180
        assert (found.residual_ns, found.makespan_after_ns) == (0, 300 + shift)

    def two_waits(self) -> Trace:
        """The first blocks and wakes 7 behind its copy; the second is 2 long, and its copy was there 20 before."""
        spans = [
            device("fetch", 10, 30, 0, lane="copy", enqueued=5),
            phase("resolve", 6, 50, 0),
            wait(6, 37, 0),
            device("fetch", 60, 80, 1, lane="copy", enqueued=55),
            phase("resolve", 100, 120, 1),
            wait(100, 102, 1),
        ]
        return spans, [record(0, 0, 50), record(1, 50, 120)]

    def test_a_wait_that_blocks_now_ends_with_the_usual_wake_up(self) -> None:
        spans, records = self.two_waits()
        found = what_if(spans, records, add_ns={"fetch": 100})
        # the first ends at 130 and 137; the second's copy is enqueued at 155, takes 5 to begin and 120
        assert found.makespan_after_ns == (155 + 5 + 120 + 7) + 18

    def test_a_wait_that_blocks_no_more_takes_what_a_call_takes(self) -> None:
        spans, records = self.two_waits()
        found = what_if(spans, records, scale={"fetch": 0, "launch latency": 0})
        assert found.makespan_after_ns == (6 + 2 + 13) + 50 + 2 + 18

    def test_a_wait_never_ends_before_it_began_whatever_the_devices_clock_says(self) -> None:
        spans = [device("fetch", 10, 30, lane="copy", enqueued=5), phase("resolve", 12, 40), wait(12, 20)]
        found = what_if(spans, [record(0, 0, 40)], add_ns={"between phases": 14})
        assert found.residual_ns == 0
        assert found.makespan_after_ns == 26 + 20


class TestHandMade:
    def test_a_group_does_not_end_before_its_last_kernel_is_enqueued(self) -> None:
        """An eager forward of many kernels: the host notes it at 100, and enqueues what follows only then."""
        spans = [
            phase("forward", 0, 100),
            device("forward", 10, 105, enqueued=100),
            device("fetch", 105, 106, lane="copy", enqueued=100),
            phase("resolve", 100, 120),
            wait(100, 110),
        ]
        found = what_if(spans, [record(0, 0, 120)], scale={"host forward": 3, "device forward": 0})
        assert found.makespan_after_ns == 300 + 1 + 4 + 10

    def test_work_begun_before_it_was_noted_was_enqueued_by_then(self) -> None:
        spans = [
            phase("forward", 0, 100),
            device("forward", 10, 500, enqueued=100),
            device("fetch", 500, 501, lane="copy", enqueued=100),
            phase("resolve", 100, 520),
            wait(100, 510),
        ]
        found = what_if(spans, [record(0, 0, 520)], scale={"host forward": 3})
        assert found.makespan_after_ns == 520 + (3 * 10 - 10)

    def test_what_changes_shares_in_proportion_before_and_behind_a_wait(self) -> None:
        spans = [
            device("fetch", 10, 40, lane="copy", enqueued=1),
            phase("resolve", 10, 60),
            wait(20, 40, name="resolve"),
            phase("emit", 60, 60),
        ]
        records = [record(0, 0, 60)]
        assert what_if(spans, records, add_ns={"resolve": 30}).makespan_after_ns == 40 + 2 * 20, "10 of 30 are hidden"
        assert what_if(spans, records, add_ns={"emit": 9}).makespan_after_ns == 69

    def test_no_work_becomes_shorter_than_nothing(self) -> None:
        spans = [phase("prepare", 2, 6)]
        assert what_if(spans, [record(0, 0, 10)], add_ns={"prepare": -50}).makespan_after_ns == 6

    def test_iterations_without_the_phase_are_left_as_they_are(self) -> None:
        records = [record(0, 0, 10), record(1, 10, 20)]
        found = what_if([phase("admit", 2, 6, 0)], records, add_ns={"admit": 7})
        assert found.after == Spread.of([17, 10])

    def test_work_from_before_the_stretch_stays_where_it_was(self) -> None:
        spans = [
            device("forward", 50, 120, 0, enqueued=40),
            device("sample", 120, 130, 1, enqueued=105),
            device("fetch", 130, 135, 1, lane="copy", enqueued=106),
            phase("resolve", 107, 150, 1),
            wait(108, 140, 1),
        ]
        found = what_if(spans, [record(1, 100, 150)], scale={"forward": 9, "sample": 2})
        assert (found.residual_ns, found.makespan_after_ns) == (0, 60)

    @pytest.mark.parametrize("launched", [batch(0, prefill=1, decode=0), batch(0), None])
    def test_needs_no_class_of_batch(self, launched: Any) -> None:
        spans = [device("forward", 1, 4, enqueued=1), phase("emit", 4, 6)]
        assert what_if(spans, [record(0, 0, 9, launched=launched)], scale={"emit": 2}).makespan_after_ns == 11


class TestNames:
    @pytest.mark.parametrize(
        ("scale", "message"),
        [
            ({"forward": 2}, "'forward' is a host phase and device work: say 'host forward' or 'device forward'"),
            ({"forwards": 2}, "'forwards' is not in the trace; known are host admit, host between phases"),
            ({"device prepare": 2}, "'device prepare' is not in the trace"),
            ({"results": 2}, "'results' is a wait: its length follows from what it waits for"),
            ({"prepare": -1}, r"scale\['prepare'\] must be a number of 0 or more, got -1"),
            ({"prepare": float("nan")}, "must be a number of 0 or more, got nan"),
            ({"prepare": 2, "host prepare": 3}, "'host prepare' is named twice"),
        ],
    )
    def test_that_cannot_be_are_refused(self, scale: dict[str, float], message: str) -> None:
        spans = [
            *(phase(name, at, at + 5) for at, name in ((0, "admit"), (5, "prepare"), (10, "forward"), (20, "resolve"))),
            wait(20, 22),
            device("forward", 16, 19, enqueued=15),
        ]
        with pytest.raises(ValueError, match=message):
            what_if(spans, [record(0, 0, 30)], scale=scale)

    def test_traces_without_enqueue_times_are_refused(self) -> None:
        with pytest.raises(ValueError, match="must say when device work was enqueued"):
            what_if([device("forward", 0, 5)], [record(0, 0, 9)])

    def test_are_shown_with_what_was_found(self) -> None:
        found = what_if(*simulate("legacy", 2, Lengths()), scale={"resolve": 2}, add_ns={"emit": 1500})
        lines = str(found).splitlines()
        assert lines[0] == "if resolve × 2, emit +1.5 µs: mean step over 2 iterations"
        assert [line.split()[0] for line in lines[1:]] == ["iterations", "all", "legacy", "makespan"]


def halves(low: int, high: int) -> st.SearchStrategy[int]:
    """Even, so that what is halfway through it stays whole."""
    return st.integers(low, high).map(lambda half: 2 * half)


class TestAnyLengths:
    @given(
        mode=st.sampled_from(["legacy", "async"]),
        host=st.fixed_dictionaries({name: halves(1, 400) for name in HOST}),
        device_ns=st.fixed_dictionaries({name: halves(0, 400) for name in DEVICE}),
        work=st.sampled_from([*(("host", name) for name in HOST), *(("device", name) for name in DEVICE)]),
        factor=st.integers(0, 6),
        added=halves(0, 500),
    )
    def test_prediction_is_what_the_changed_engine_does(
        self,
        mode: str,
        host: dict[str, int],
        device_ns: dict[str, int],
        work: tuple[str, str],
        factor: int,
        added: int,
    ) -> None:
        before = Lengths(host=host, device=device_ns)
        side, name = work
        longer = factor * (host if side == "host" else device_ns)[name] + added
        after = before.with_host(**{name: longer}) if side == "host" else before.with_device(**{name: longer})
        found = what_if(*simulate(mode, 4, before), scale={f"{side} {name}": factor}, add_ns={f"{side} {name}": added})
        assert found.residual_ns == 0
        check_predicts(found, simulate(mode, 4, after))

    @given(any_trace(knows_enqueues=True), st.randoms(use_true_random=False))
    def test_the_order_of_records_does_not_matter(self, trace: Trace, shuffle: random.Random) -> None:
        changes: dict[str, Any] = {"scale": {"device launch latency": 2}} if trace[0] else {}
        changes = changes if any(span.lane == "compute" for span in trace[0]) else {}
        expected = what_if(*trace, **changes)
        spans, records = list(trace[0]), list(trace[1])
        shuffle.shuffle(spans)
        shuffle.shuffle(records)
        assert what_if(spans, records, **changes) == expected
