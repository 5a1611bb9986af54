"""What the CUDA device makes of events, with events, streams and graphs that are simulated."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.device_cuda import BEFORE_RETURN_NS, LONGEST_LAUNCH_NS, CudaDevice, CudaTiming

MS = 1_000_000


class Machine:
    """One clock for host and device. An event that is recorded passes at once, as on an idle device, or later."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.behind_ns = 0
        """How long behind the host the device is."""
        self.events_made = 0

    def perf_counter_ns(self) -> int:
        return self.now_ns


class FakeEvent:
    machine: Machine

    def __init__(self, **_: Any) -> None:
        self.machine.events_made += 1
        self.passed_ns = -1

    def record(self, stream: Any = None) -> None:
        self.passed_ns = self.machine.now_ns + self.machine.behind_ns

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.passed_ns - self.passed_ns) / MS


class FakeStream:
    def __init__(self, *_: Any) -> None:
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    FakeEvent.machine = made
    current: list[Any] = [FakeStream()]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: current[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", current.append)
    monkeypatch.setattr(torch.cuda, "stream", lambda *_: nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda *_: (id(current[-1]),), raising=False)
    monkeypatch.setattr("engine.device_cuda.time.perf_counter_ns", made.perf_counter_ns)
    made.current = current  # type: ignore[attr-defined]
    return made


def make_device(machine: Machine) -> CudaDevice:
    device = CudaDevice()
    device.clock._now_ns = machine.perf_counter_ns
    machine.now_ns += 10 * MS
    device.clock.anchor = device.clock._take(1)
    return device


def working(machine: Machine, duration_ns: int) -> Any:
    def work() -> None:
        machine.now_ns += duration_ns

    return work


class TestTimings:
    @pytest.mark.parametrize("behind_ms", [0, 5])
    def test_work_begins_where_the_work_before_it_ended_but_not_before_its_launch(
        self, machine: Machine, behind_ms: int
    ) -> None:
        device = make_device(machine)
        machine.behind_ns = behind_ms * MS
        first = device.compute.launch(working(machine, 3 * MS), timed=True)
        machine.now_ns += MS
        launched_ns = machine.now_ns
        second = device.compute.launch(working(machine, 2 * MS), timed=True)

        assert first is not None
        assert second is not None
        assert second.start_ns == max(first.end_ns, launched_ns)
        assert second.end_ns - second.start_ns == (3 if behind_ms else 2) * MS

    @pytest.mark.parametrize("between", ["untimed work", "a wait"])
    def test_what_lies_between_is_no_part_of_the_work_behind_it(self, machine: Machine, between: str) -> None:
        device = make_device(machine)
        machine.behind_ns = 5 * MS
        device.compute.launch(working(machine, MS), timed=True)
        if between == "untimed work":
            device.compute.launch(lambda: None)
        else:
            device.compute.wait_for(device.copy.record())
        machine.behind_ns = 9 * MS
        second = device.compute.launch(working(machine, MS), timed=True)

        assert second is not None
        assert second.end_ns - second.start_ns == MS

    def test_events_are_used_again_only_when_nobody_holds_them(self, machine: Machine) -> None:
        device = make_device(machine)
        first = device.compute.launch(working(machine, MS), timed=True)
        ready = device.compute.record()
        second, third = (device.compute.launch(working(machine, MS), timed=True) for _ in range(2))
        made = machine.events_made
        del first, second
        fourth = device.compute.launch(working(machine, MS), timed=True)

        assert machine.events_made == made, "the first start is free, as nobody asks for it any more"
        fifth = device.compute.launch(working(machine, MS), timed=True)
        assert machine.events_made == made + 1, "an event that is waited for was recorded anew"
        del third, fourth, fifth, ready
        device.compute.launch(working(machine, MS), timed=True)
        assert machine.events_made == made + 1

    def test_the_end_of_timed_work_is_the_streams_newest_event(self, machine: Machine) -> None:
        device = make_device(machine)
        timing = device.compute.launch(working(machine, MS), timed=True)
        event = device.compute.record()
        device.copy.wait_for(event)
        after_wait = device.copy.record()

        assert isinstance(timing, CudaTiming)
        assert event.event is timing._end.event  # type: ignore[attr-defined]
        assert after_wait.event is not timing._end.event  # type: ignore[attr-defined]

    @pytest.mark.parametrize(
        ("launch_ns", "work_begins_after_ns"),
        [
            (600_000, 600_000 - BEFORE_RETURN_NS),
            (2_300_000, 2_300_000 - BEFORE_RETURN_NS),  # under a profiler
            (9_000_000, LONGEST_LAUNCH_NS),  # no launch: another thread had the interpreter
        ],
    )
    def test_a_launch_of_many_microseconds_is_no_work_of_an_idle_device(
        self, machine: Machine, launch_ns: int, work_begins_after_ns: int
    ) -> None:
        device = make_device(machine)

        class Graph:
            def replay(self) -> None:
                machine.now_ns += launch_ns

        def replay() -> None:
            called_ns = machine.now_ns
            Graph().replay()
            device._note_launch(called_ns)

        begin_ns = machine.now_ns
        timing = device.compute.launch(replay, timed=True)

        assert timing is not None
        assert timing.start_ns == begin_ns + work_begins_after_ns

    def test_a_short_launch_is_halved_and_only_the_first_counts(self, machine: Machine) -> None:
        device = make_device(machine)

        def two() -> None:
            for _ in range(2):
                called_ns = machine.now_ns
                machine.now_ns += 6_000
                device._note_launch(called_ns)

        begin_ns = machine.now_ns
        timing = device.compute.launch(two, timed=True)
        machine.now_ns += MS
        launched_ns = machine.now_ns
        other = device.compute.launch(working(machine, 5_000), timed=True)

        assert timing is not None
        assert other is not None
        assert timing.start_ns == begin_ns + 3_000
        assert isinstance(other, CudaTiming)
        assert other.start_ns == launched_ns, "a launch of the work before was taken for its own"

    def test_a_copy_by_a_kernel_begins_as_its_launch_returns(self, machine: Machine) -> None:
        device = make_device(machine)

        def work() -> None:
            called_ns = machine.now_ns
            machine.now_ns += 30_000
            device._note_launch(called_ns, before_return_ns=0)
            machine.now_ns += 4_000

        begin_ns = machine.now_ns
        timing = device.compute.launch(work, timed=True)

        assert timing is not None
        assert timing.start_ns == begin_ns + 30_000

    def test_behind_a_new_anchor_work_has_a_start_of_its_own(self, machine: Machine) -> None:
        device = make_device(machine)
        machine.behind_ns = 5 * MS
        first = device.compute.launch(working(machine, MS), timed=True)
        assert first is not None
        placed = first.start_ns, first.end_ns
        device.clock.anchor = replace(device.clock.anchor, host_ns=device.clock.anchor.host_ns - 13_000)

        second = device.compute.launch(working(machine, 5_000), timed=True)

        assert second is not None
        assert second.end_ns - second.start_ns == 5_000
        assert (first.start_ns, first.end_ns) == placed, "marks are placed by the anchor of their time"

    @pytest.mark.parametrize("timed", [True, False])
    def test_work_that_failed_is_no_part_of_the_work_behind_it(self, machine: Machine, timed: bool) -> None:
        device = make_device(machine)
        machine.behind_ns = 5 * MS
        device.compute.launch(working(machine, MS), timed=True)

        def fail() -> None:
            machine.now_ns += MS
            raise ValueError("in launched work")

        with pytest.raises(ValueError, match="in launched work"):
            device.compute.launch(fail, timed=timed)
        behind = device.compute.launch(working(machine, MS), timed=True)

        assert behind is not None
        assert behind.end_ns - behind.start_ns == MS


class TestCurrentStream:
    def test_is_the_users_again_after_an_iteration(self, machine: Machine) -> None:
        device = make_device(machine)
        current: list[Any] = machine.current  # type: ignore[attr-defined]
        users = current[-1]
        with device.active():
            with device.active():
                assert current[-1] is device.compute.stream  # type: ignore[attr-defined]
                device.copy.launch(lambda: None)
                assert current[-1] is device.compute.stream  # type: ignore[attr-defined]
            inner = device.current

        assert inner is device.compute
        assert current[-1] is users
        assert device.current is None
        assert not torch.is_inference_mode_enabled()

    def test_is_the_users_again_after_a_failure(self, machine: Machine) -> None:
        device = make_device(machine)
        current: list[Any] = machine.current  # type: ignore[attr-defined]
        users = current[-1]

        def fail() -> None:
            raise ValueError("in launched work")

        def run() -> None:
            with device.active():
                device.copy.launch(fail)

        with pytest.raises(ValueError, match="in launched work"):
            run()

        assert current[-1] is users
        assert device.current is None
        assert not torch.is_inference_mode_enabled()
