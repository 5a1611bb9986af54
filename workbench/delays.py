"""Work made longer on purpose, to see what a slower scheduler or device would cost: phases, and device work by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from engine.engine import Engine
from workbench.peek import SessionError, as_phase

if TYPE_CHECKING:
    from engine.controller import Iteration

PhaseFunction = Callable[["Iteration"], None]
DEVICE_WORK = ("publish", "forward", "sample", "verify", "draft", "fetch_accepted", "fetch", "compact")
"""What a CPU device can be made to take longer for; said with ``device`` before it."""
_DEVICE = "device "


class Delays:
    """Those of one session: which are in force, and which some of the recorded iterations had."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._active: dict[str, float] = {}
        self.recorded_s: dict[str, float] = {}
        """Seconds by name; of several that a name had the largest."""

    @contextmanager
    def delayed(self, delays_s: Mapping[str, float]) -> Iterator[None]:
        """See :meth:`workbench.session.Session.delayed`."""
        with delayed(self._engine, delays_s):
            outer = self._active
            self._active = {**outer, **{name: outer.get(name, 0.0) + s for name, s in delays_s.items()}}
            for name, delay_s in self._active.items():
                self.recorded_s[name] = max(delay_s, self.recorded_s.get(name, 0.0))
            try:
                yield
            finally:
                self._active = outer

    def clear(self) -> None:
        """What was recorded is forgotten; what is in force stays."""
        self.recorded_s = dict(self._active)


@contextmanager
def delayed(engine: Engine, delays_s: Mapping[str, float]) -> Iterator[None]:
    """See :meth:`workbench.session.Session.delayed`."""
    for name, delay_s in delays_s.items():
        if not 0 <= delay_s < float("inf"):
            raise SessionError(f"the delay of {name!r} must be a number of seconds of 0 or more, got {delay_s!r}")
    with ExitStack() as stack:
        for name, delay_s in delays_s.items():
            one = _device_work(engine, name, delay_s) if name.startswith(_DEVICE) else _phase(engine, name, delay_s)
            stack.enter_context(one)
        yield


@contextmanager
def _phase(engine: Engine, name: str, delay_s: float) -> Iterator[None]:
    """The delay is the phase's first work, inside its span."""
    phase = as_phase(name)
    phases = engine.controller.phase_functions
    plain: PhaseFunction = phases[phase]
    pause = host_pause(engine)
    is_on = True

    def slow(iteration: Iteration) -> None:
        if is_on:
            pause(delay_s)
        plain(iteration)

    phases[phase] = slow
    try:
        yield
    finally:
        is_on = False  # where another delay was laid over this one and ends later, that one still calls it
        if phases[phase] is slow:
            phases[phase] = plain


def host_pause(engine: Engine) -> Callable[[float], None]:
    """What takes the host so many seconds: work on CUDA, a sleep beside the thread device.

    Spinning there would take the interpreter from the device.
    """
    return _spin if engine.device.kind == "cuda" else time.sleep


def _spin(delay_s: float) -> None:
    until_ns = time.perf_counter_ns() + round(delay_s * 1e9)
    while time.perf_counter_ns() < until_ns:
        pass


@contextmanager
def _device_work(engine: Engine, name: str, delay_s: float) -> Iterator[None]:
    device = engine.device
    if device.kind == "cuda":
        raise SessionError(f"{name!r} cannot be delayed on cuda; delay a phase, or use device='cpu'")
    work, before = name.removeprefix(_DEVICE), device.op_sleep_s
    if work not in DEVICE_WORK:
        raise SessionError(f"device work is one of {', '.join(DEVICE_WORK)}; got {work!r}")
    device.op_sleep_s = {**before, work: before.get(work, 0.0) + delay_s}
    try:
        yield
    finally:
        left_s = round(device.op_sleep_s.get(work, 0.0) - delay_s, 9)  # others may have come or gone meanwhile
        others = {name: seconds for name, seconds in device.op_sleep_s.items() if name != work}
        device.op_sleep_s = {**others, work: left_s} if left_s > 0 else others
