"""Device times on the host's clock, with a device that is simulated: its clock drifts, and events take a while."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import cos, pi, sin

import numpy as np
import pytest

from engine.device_clock import DRIFT, EVERY_NS, FIRST_NS, PATIENCE_NS, Anchor, EventClock
from engine.errors import DeviceError

LOOK_NS = 700
"""What reading the host's clock or asking an event takes here."""
Law = Callable[[int], float]
"""The device's time at a host time, both in nanoseconds."""


def steady(rate: float) -> Law:
    return lambda host_ns: host_ns / rate


def wandering(swing: float, period_ns: int) -> Law:
    """A pace that goes up and down by ``swing`` around an offset of as much, as a crystal that warms and cools."""
    turn = 2 * pi / period_ns

    def law(host_ns: int) -> float:
        return host_ns * (1 + swing) + swing / turn * (1 - cos(turn * host_ns)) + swing / turn * sin(turn * host_ns)

    return law


class SimulatedDevice:
    """A host clock, a device clock with a law of its own, and events that pass a little after they are recorded.

    Args:
        law: None: the two clocks agree.
        delay_ns: From recording to passing, at most.
        seed: Draws delays up to that; None: each takes all of it.
    """

    def __init__(self, law: Law | None = None, delay_ns: int = 3_000, seed: int | None = None) -> None:
        self.host_ns = 5_000_000
        self.law = law or steady(1.0)
        self.delay_ns = delay_ns
        self._random = None if seed is None else random.Random(seed)

    def now_ns(self) -> int:
        self.host_ns += LOOK_NS
        return self.host_ns

    def record(self) -> SimulatedEvent:
        delay_ns = self.delay_ns if self._random is None else self._random.randrange(self.delay_ns)
        return SimulatedEvent(self, self.host_ns + delay_ns)

    def event_at(self, host_ns: int) -> SimulatedEvent:
        return SimulatedEvent(self, host_ns)


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice, host_ns: int) -> None:
        self.device = device
        self.host_ns = host_ns

    def query(self) -> bool:
        self.device.host_ns += LOOK_NS
        return self.device.host_ns >= self.host_ns

    def elapsed_time(self, other: SimulatedEvent) -> float:
        law = self.device.law
        return float(np.float32((law(other.host_ns) - law(self.host_ns)) / 1e6))


def let_pass(device: SimulatedDevice, clock: EventClock, seconds: int) -> None:
    for _ in range(seconds * 4):
        device.host_ns += EVERY_NS // 4
        clock.keep()


def off_by(clock: EventClock, event: SimulatedEvent) -> int:
    return abs(clock.place(clock.anchor, event) - event.host_ns)


class TestBound:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize(
        "law",
        [
            steady(1.0),
            steady(1 + 20e-6),
            steady(1 - 50e-6),
            steady(1 + 0.99 * DRIFT),
            steady(1 - 0.99 * DRIFT),
            wandering(5e-6, 60 * EVERY_NS),
        ],
        ids=["none", "+20 ppm", "-50 ppm", "fastest", "slowest", "wandering"],
    )
    def test_holds_at_any_time_before_and_after_renewals(self, law: Law, seed: int) -> None:
        device = SimulatedDevice(law, seed=seed)
        clock = EventClock(device.record, device.now_ns)
        steps = random.Random(seed)
        for _ in range(400):
            device.host_ns += round(10 ** steps.uniform(4, 9))  # 10 µs to 1 s
            event = device.record()

            assert off_by(clock, event) <= clock.error_ns
            clock.keep()

    @pytest.mark.parametrize("way_ns", [FIRST_NS // 2, EVERY_NS, 100 * EVERY_NS])
    def test_counts_drift_from_the_first_anchor_on(self, way_ns: int) -> None:
        device = SimulatedDevice(steady(1 - DRIFT))
        clock = EventClock(device.record, device.now_ns)
        off_ns = off_by(clock, device.event_at(clock.anchor.host_ns + way_ns))

        assert off_ns > 0.9 * DRIFT * way_ns - device.delay_ns, "the device does drift"
        assert off_ns <= clock.error_ns

    def test_is_what_was_measured_once_there_is_a_second_anchor(self) -> None:
        device = SimulatedDevice()
        clock = EventClock(device.record, device.now_ns)
        off_by(clock, device.event_at(clock.anchor.host_ns + FIRST_NS))
        assumed_ns = clock.error_ns
        device.host_ns += FIRST_NS
        clock.keep()

        assert assumed_ns > DRIFT * FIRST_NS
        assert clock.error_ns <= device.delay_ns + 2 * LOOK_NS

    def test_without_drift_is_little_more_than_the_bracket(self) -> None:
        device = SimulatedDevice()
        clock = EventClock(device.record, device.now_ns)
        for _ in range(40):
            off_by(clock, device.event_at(clock.anchor.host_ns + EVERY_NS // 5))
            let_pass(device, clock, 1)

        assert clock.error_ns <= device.delay_ns + 2 * LOOK_NS

    def test_a_jump_of_the_device_widens_it(self) -> None:
        device = SimulatedDevice()
        clock = EventClock(device.record, device.now_ns)
        let_pass(device, clock, 5)
        quiet_ns = clock.error_ns
        jump_ns = device.host_ns
        device.law = lambda host_ns: host_ns + max(0, host_ns - jump_ns) / 1000  # a millisecond a second
        off_by(clock, device.event_at(clock.anchor.host_ns + EVERY_NS))
        let_pass(device, clock, 3)

        assert clock.error_ns > quiet_ns + 500_000

    def test_counts_no_drift_over_a_time_in_which_nothing_was_placed(self) -> None:
        """An engine that stands still for minutes between two iterations: 20 ppm are 6 ms by then, for nobody."""
        device = SimulatedDevice(steady(1 + 20e-6))
        clock = EventClock(device.record, device.now_ns)
        off_by(clock, device.event_at(clock.anchor.host_ns + FIRST_NS))
        device.host_ns += 300 * EVERY_NS
        clock.keep()

        assert clock.anchor.host_ns > 300 * EVERY_NS, "the anchor was renewed"
        assert clock.error_ns <= device.delay_ns + 2 * LOOK_NS + 20e-6 * FIRST_NS

    def test_grows_with_the_share_of_the_way_that_was_used(self) -> None:
        """Half a second of 100 ppm is 50 µs, and read late, when the next anchor is long there, no less."""
        bounds = []
        for share in (0.0, 0.5, 1.0, 2.0):
            device = SimulatedDevice(steady(1 + 100e-6))
            clock = EventClock(device.record, device.now_ns)
            first = clock.anchor
            device.host_ns += EVERY_NS
            clock.keep()
            event = device.event_at(first.host_ns + round(share * EVERY_NS))
            assert abs(clock.place(first, event) - event.host_ns) <= clock.error_ns
            bounds.append(clock.error_ns)

        assert np.diff(bounds) == pytest.approx([50_000, 50_000, 100_000], abs=2 * device.delay_ns)

    def test_has_room_for_the_rounding_of_long_distances(self) -> None:
        """float32 milliseconds are 62 µs apart after a thousand seconds."""
        anchor = Anchor(event=None, host_ns=0, half_width_ns=1_000, rate=1.0, doubt=0.0, reach_ns=1000 * EVERY_NS)

        assert anchor.error_ns - anchor.half_width_ns >= np.spacing(np.float32(1e6)) * 1e6

    def test_of_what_was_placed_at_once_is_the_bracket_whatever_the_next_anchor_shows(self) -> None:
        anchor = Anchor(None, 0, half_width_ns=1_000, rate=1.0, doubt=0.0, lasted_ns=EVERY_NS, end_error_ns=80_000)

        assert anchor.error_ns == 1_000


class TestPlacing:
    @pytest.mark.parametrize("rate", [1 + 20e-6, 1 - 50e-6])
    def test_follows_the_pace_of_the_device_once_it_is_known(self, rate: float) -> None:
        device = SimulatedDevice(steady(rate))
        clock = EventClock(device.record, device.now_ns)
        let_pass(device, clock, 30)

        assert off_by(clock, device.event_at(clock.anchor.host_ns + EVERY_NS)) <= 2 * device.delay_ns


class TestAnchors:
    def test_are_not_taken_more_often_than_told(self) -> None:
        device = SimulatedDevice()
        clock = EventClock(device.record, device.now_ns)
        anchor = clock.anchor
        for _ in range(100):
            clock.keep()

        assert clock.anchor is anchor

    def test_come_soon_at_first_and_then_every_second(self) -> None:
        device = SimulatedDevice()
        clock = EventClock(device.record, device.now_ns)
        taken = [clock.anchor]
        while device.host_ns < 10 * EVERY_NS:
            device.host_ns += FIRST_NS // 10
            clock.keep()
            if clock.anchor is not taken[-1]:
                taken.append(clock.anchor)
        apart = np.diff([anchor.host_ns for anchor in taken]) / FIRST_NS

        assert apart == pytest.approx([1, 1, 2, 4, 8, 16, 32, 64, *[100] * (len(apart) - 8)], rel=0.2)
        assert len(apart) > 12

    def test_let_go_of_their_events_once_nothing_is_placed_by_them(self) -> None:
        device = SimulatedDevice()
        clock = EventClock(device.record, device.now_ns)
        let_pass(device, clock, 3)

        held = [value for value in vars(clock).values() if isinstance(value, type(clock.anchor))]
        assert {id(anchor) for anchor in held} == {id(clock._first), id(clock.anchor)}
        assert not any(isinstance(getattr(one, name), type(one)) for one in held for name in one.__slots__)

    def test_one_that_does_not_pass_is_not_waited_for(self) -> None:
        device = SimulatedDevice()
        clock = EventClock(device.record, device.now_ns)
        anchor = clock.anchor
        device.delay_ns = 100 * PATIENCE_NS
        device.host_ns += 2 * EVERY_NS
        begin_ns = device.host_ns
        clock.keep()

        assert clock.anchor is anchor
        assert device.host_ns - begin_ns < 5 * PATIENCE_NS

    def test_a_device_that_serves_others_first_is_waited_for(self) -> None:
        """Events that were recorded in the meantime pass late; the first one behind that is quick."""
        device = SimulatedDevice()
        free_ns = device.host_ns + 30 * PATIENCE_NS

        clock = EventClock(lambda: device.event_at(max(free_ns, device.host_ns + 3_000)), device.now_ns)

        assert clock.anchor.host_ns >= free_ns
        assert clock.error_ns < PATIENCE_NS / 100

    def test_a_device_on_which_nothing_passes_is_refused(self) -> None:
        device = SimulatedDevice(delay_ns=100 * PATIENCE_NS)

        with pytest.raises(DeviceError, match="busy with other processes"):
            EventClock(device.record, device.now_ns)
