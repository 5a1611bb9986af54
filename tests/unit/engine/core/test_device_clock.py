"""Device times on the host's clock, with a device that is simulated: its clock drifts, and events take a while."""

from __future__ import annotations

import numpy as np
import pytest

from engine.device_clock import EVERY_NS, PATIENCE_NS, EventClock
from engine.errors import DeviceError

LOOK_NS = 700
"""What reading the host's clock or asking an event takes here."""


class SimulatedDevice:
    """A host clock, a device clock that runs at another pace, and events that pass a little after they are recorded."""

    def __init__(self, rate: float = 1.0, delay_ns: int = 3_000) -> None:
        self.host_ns = 5_000_000
        self.rate = rate
        self.delay_ns = delay_ns

    def now_ns(self) -> int:
        self.host_ns += LOOK_NS
        return self.host_ns

    def record(self) -> SimulatedEvent:
        return SimulatedEvent(self, self.host_ns + self.delay_ns)


class SimulatedEvent:
    def __init__(self, device: SimulatedDevice, host_ns: int) -> None:
        self.device = device
        self.host_ns = host_ns

    def query(self) -> bool:
        self.device.host_ns += LOOK_NS
        return self.device.host_ns >= self.host_ns

    def elapsed_time(self, other: SimulatedEvent) -> float:
        return float(np.float32((other.host_ns - self.host_ns) / self.device.rate / 1e6))


def let_pass(device: SimulatedDevice, clock: EventClock, seconds: int) -> None:
    for _ in range(seconds * 4):
        device.host_ns += EVERY_NS // 4
        clock.keep()


class TestPlacing:
    @pytest.mark.parametrize("rate", [1.0, 1 + 20e-6, 1 - 50e-6])
    @pytest.mark.parametrize("seconds", [0, 1, 10, 1000])
    def test_is_off_by_no_more_than_the_stated_bound(self, rate: float, seconds: int) -> None:
        device = SimulatedDevice(rate)
        clock = EventClock(device.record, device.now_ns)
        let_pass(device, clock, 30)  # until the pace is known
        bound = clock.error_ns
        let_pass(device, clock, seconds)
        anchor = clock.anchor
        device.host_ns += EVERY_NS // 2
        event = device.record()

        off = abs(EventClock.place(anchor, event) - event.host_ns)

        assert off <= max(bound, clock.error_ns)

    def test_without_drift_the_bound_is_the_bracket(self) -> None:
        device = SimulatedDevice()
        clock = EventClock(device.record, device.now_ns)
        let_pass(device, clock, 20)

        assert clock.error_ns <= device.delay_ns + 2 * LOOK_NS

    def test_a_jump_of_the_device_widens_the_bound(self) -> None:
        device = SimulatedDevice()
        clock = EventClock(device.record, device.now_ns)
        let_pass(device, clock, 5)
        quiet = clock.error_ns
        device.rate = 1.001  # a millisecond a second
        let_pass(device, clock, 3)

        assert clock.error_ns > quiet + 500_000


class TestAnchors:
    def test_are_not_taken_more_often_than_told(self) -> None:
        device = SimulatedDevice()
        clock = EventClock(device.record, device.now_ns)
        anchor = clock.anchor
        for _ in range(100):
            clock.keep()

        assert clock.anchor is anchor

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

    def test_a_device_on_which_nothing_passes_is_refused(self) -> None:
        device = SimulatedDevice(delay_ns=100 * PATIENCE_NS)

        with pytest.raises(DeviceError, match="idle stream"):
            EventClock(device.record, device.now_ns)
