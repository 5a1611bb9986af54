"""Two hundred switches of mode at random borders, with 32 requests in flight."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from engine.request import SamplingParams
from tests.unit.workbench.worlds import make_session, tokens
from workbench import background
from workbench.session import Session
from workbench.workloads import RequestSpec, Workload

SWITCHES = 200
REQUESTS = 32


def long_workload() -> Workload:
    """Greedy and drawn requests of different lengths, two every third iteration."""
    specs = tuple(
        RequestSpec(
            prompt=tuple((7 * index + place) % 60 for place in range(1 + index % 9)),
            params=SamplingParams(
                max_tokens=20 + 7 * (index % 5),
                temperature=0.9 * (index % 2),
                seed=index,
                ignore_eos=index % 4 > 0,
                logprobs=2 if index % 8 == 3 else None,
            ),
            arrival=3 * (index // 2),
            stream=index % 3 == 0,
        )
        for index in range(REQUESTS)
    )
    return Workload(name="long", requests=specs, unit="iterations")


def long_session(**options: Any) -> Session:
    session = make_session(clock="iterations", max_requests=6, num_blocks=40, **options)
    session.submit_workload(long_workload())
    return session


def ends(session: Session) -> dict[str, str | None]:
    return {name: output.finish_reason for name, output in session.outputs.items()}


def other(session: Session) -> str:
    wanted = session.engine.controller.wanted_mode
    return "legacy" if wanted == "async" else "async"


@pytest.fixture(scope="module")
def unswitched() -> dict[str, tuple[int, ...]]:
    """Outputs of the two modes, which are equal."""
    found = []
    for mode in ("legacy", "async"):
        with long_session(mode=mode) as session:
            session.run()
            found.append((tokens(session), ends(session)))
    assert found[0] == found[1]
    return found[0][0]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("options", [{"device": "inline", "debug_invariants": True}, {"device": "cpu"}])
def test_at_random_phase_borders_changes_no_token(
    seed: int, options: dict[str, Any], unswitched: dict[str, tuple[int, ...]]
) -> None:
    draws, switched, in_mid = random.Random(seed), 0, 0
    with long_session(**options) as session:
        while session.step_phase() is not None:
            if switched < SWITCHES and draws.random() < 0.35:
                in_mid += session.engine.in_hand is not None
                session.mode = other(session)
                switched += 1
        drained = sum(record.order == "drain" for record in session.iterations())

        assert switched == SWITCHES  # all of them while requests were live
        assert in_mid > SWITCHES // 2
        assert drained > 20
        assert tokens(session) == unswitched
        assert {record.mode for record in session.iterations()} == {"legacy", "async"}


def test_from_the_loop_during_a_run_in_the_background_changes_no_token(
    unswitched: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "SLICE_NS", 0)
    monkeypatch.setattr(background, "_LONGEST_SLICE_NS", 0)
    draws = random.Random(5)

    async def work() -> int:
        run, switched = session.start(), 0
        while not run.done:
            if switched < SWITCHES and draws.random() < 0.9:
                session.mode = other(session)
                switched += 1
            await asyncio.sleep(0)
        await run
        return switched

    with long_session() as session:
        switched = asyncio.run(work())

        assert switched == SWITCHES
        assert tokens(session) == unswitched
