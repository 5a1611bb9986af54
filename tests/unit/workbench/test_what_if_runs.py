"""What-if beside runs that really have the delay, on a device that sleeps: nothing here computes for long.

Lengths are compared by the benchmark ``whatif``, and exactly by ``tests/unit/tracing`` with a simulated clock: here the
machine has other jobs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from functools import cache
from statistics import median
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.controller import Border
from engine.device_host import ThreadDevice
from engine.engine import Engine
from engine.request import SamplingParams
from tests.unit.workbench.worlds import oracle
from tracing.records import IterationRecord, Span
from tracing.what_if import what_if

DEVICE_S = {"forward": 0.020, "sample": 0.004}
SMALL = {"max_requests": 4, "max_batch_tokens": 64, "max_sequence_length": 64, "num_blocks": 64}
NO_DELAY: dict[str, float] = {}


def serve(mode: str, *, device_s: Mapping[str, float] = NO_DELAY, host_s: Mapping[str, float] = NO_DELAY) -> Any:
    """Three requests of eight tokens, with each phase and each piece of device work so many seconds longer."""
    sleeps = {name: DEVICE_S.get(name, 0.0) + device_s.get(name, 0.0) for name in {*DEVICE_S, *device_s}}
    config = EngineConfig.from_mapping({"device": "cpu", "mode": mode, **SMALL})

    def watch(border: Border) -> None:
        if border.side == "after" and border.phase.value in host_s:
            time.sleep(host_s[border.phase.value])

    with Engine(oracle(), config, device=ThreadDevice(op_sleep_s=sleeps)) as engine:
        engine.controller.watch = watch
        for num_tokens in (2, 8):  # what the first use of anything takes is nobody's delay
            engine.recorder.clear()
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=0)
            engine.generate([[1, 2, 3]] * 3, params, progress=False)
            engine.device.synchronize()
        return engine.recorder.spans(), engine.recorder.iterations()


@cache
def undelayed(mode: str) -> tuple[list[Span], list[IterationRecord]]:
    found: tuple[list[Span], list[IterationRecord]] = serve(mode)
    return found


def median_steps_ns(records: list[IterationRecord]) -> dict[str, float]:
    """By order."""
    return {
        order: median(record.duration_ns for record in records if record.order == order)
        for order in Counter(record.order for record in records)
    }


CASES = [
    ("prepare", 0.060, True),
    ("resolve", 0.012, False),
    ("emit", 0.012, False),
    ("device forward", 0.020, True),
    ("device sample", 0.030, True),
]
"""Work, delay in seconds, and whether the overlap order feels it. In legacy all are felt in full."""


def least_step_ns(mode: str, work: str, delay_s: float) -> float:
    """What a step takes at least, whatever else the machine does: a sleep is never cut short."""
    device_s, host_s = sum(DEVICE_S.values()), 0.0
    if work.startswith("device "):
        device_s += delay_s
    else:
        host_s = delay_s
    return (device_s + host_s if mode == "legacy" else max(device_s, host_s)) * 1e9


@pytest.mark.parametrize("mode", ["legacy", "async"])
@pytest.mark.parametrize(("work", "delay_s", "is_felt"), CASES, ids=[case[0] for case in CASES])
def test_prediction_holds_what_a_run_with_the_delay_cannot_do_without(
    mode: str, work: str, delay_s: float, is_felt: bool
) -> None:
    spans, records = undelayed(mode)
    found = what_if(spans, records, add_ns={work: round(delay_s * 1e9)})
    side, _, name = work.rpartition(" ")
    delayed = serve(mode, **{"device_s" if side else "host_s": {name: delay_s}})[1]

    assert found.residual_ns == 0
    assert [record.order for record in delayed] == [record.order for record in records]
    main = "legacy" if mode == "legacy" else "overlap"
    (order,) = [order for order in found.orders if order.order == main]
    least_ns = least_step_ns(mode, work, delay_s)
    assert order.after.p50_ns >= least_ns
    assert median_steps_ns(delayed)[main] >= 0.98 * least_ns  # by the host's clock, which sees the end of a sleep late
    is_long = is_felt or mode == "legacy"
    assert (order.after.p50_ns - order.before.p50_ns > 0.4 * delay_s * 1e9) == is_long


def test_a_device_without_times_of_its_own_has_nothing_to_replay() -> None:
    config = EngineConfig.from_mapping({"device": "inline", **SMALL})
    with Engine(oracle(), config) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True, seed=0), progress=False)
        found = what_if(engine.recorder.spans(), engine.recorder.iterations())
    assert (found.num_iterations, found.before) == (0, None)
