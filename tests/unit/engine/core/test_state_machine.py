"""Random schedules against the reference: whatever is asked of the engine, in whatever order, at whatever phase."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from engine.controller import Border
from engine.errors import EnginePausedError, MidIterationError, RequestError
from engine.invariants import check_device
from engine.lifecycle import EngineState
from engine.phases import VERIFICATION, Phase
from engine.policy import never_overlap, prefer_overlap
from tests.drafting_world import stand_still
from tests.oracle_world import VOCAB, World, oracle_engine, random_params, random_prompt, shared_prompt
from tests.random_schedules import MOST_DRAFTS, PHASES, STANDSTILLS, SUSPENSIONS

SEEDS = st.integers(0, 1 << 20)
WORLDS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["async", "async", "legacy"]),
        "has_text": st.booleans(),
        "nan_every": st.sampled_from([0, 0, 53]),
        "num_blocks": st.sampled_from([25, 40, 80]),
        "max_requests": st.sampled_from([1, 2, 3, 4, 6]),
        "launch_ending_rows": st.sampled_from([False, False, True]),
        "policy": st.sampled_from([prefer_overlap, prefer_overlap, never_overlap]),
        "overlap_admission": st.booleans(),
        "prefix_caching": st.booleans(),
        "eviction_policy": st.sampled_from(["lru", "lru", "ref_zero"]),
        "capacity_policy": st.sampled_from(["guaranteed_no_evict", "max_utilization"]),
        "paused_blocks": st.sampled_from([None, 0, 5, 20]),
        # The checks read what requests have, and reading may mend what the engine left half done.
        "debug_invariants": st.sampled_from([True, True, False]),
        "chunk_budget": st.sampled_from([None, None, 8, 8, 11, 30]),
    }
)


def stateful_model(seed: int) -> dict[str, Any]:
    """A model with recurrent states, mostly one with draft heads, and options that matter to it.

    Out of one seed: hypothesis draws again what it drew before, and so would leave most combinations out.
    """
    rng = random.Random(seed)
    options: dict[str, Any] = {
        "kind": rng.choice(["hybrid", "mtp", "mtp"]),
        "mode": rng.choice(["async", "async", "legacy"]),
        "max_requests": rng.randint(2, 4),
        "num_blocks": rng.choice([28, 40]),
        "capacity_policy": rng.choice(["guaranteed_no_evict", "max_utilization"]),
        "prefix_caching": rng.random() < 0.7,
    }
    if options["prefix_caching"]:
        options["mamba_cache_gb"] = rng.choice([None, None, None, 0.0])
    if options["kind"] == "mtp":
        options |= {"speculative_tokens": rng.randint(1, MOST_DRAFTS), "late_rewind": rng.random() < 0.5}
        options["state_rewind"] = rng.choice(["stored", "replayed"])
    return options


class Lifecycle(RuleBasedStateMachine):
    """A caller who submits, aborts, steps, stops in mid iteration, stands still, switches, resets, and meets failures.

    An engine that stands still lets nobody step: who wants to, is refused, and has it run again.
    """

    overrides: dict[str, Any] = {}  # noqa: RUF012 (a constant of the class)
    least_budget = 0

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[tuple[int, Callable[[], object]]] = []

    @initialize(options=WORLDS)
    def start(self, options: dict[str, Any]) -> None:
        self.has_text = options["has_text"]
        budget = options.pop("chunk_budget")
        if budget is not None:
            of_rows = options["max_requests"] * (1 + options.get("speculative_tokens", 0)) + 2
            options |= {"chunked_prefill": True, "max_batch_tokens": max(budget, self.least_budget, of_rows)}
        if options["capacity_policy"] == "guaranteed_no_evict":
            options["paused_blocks"] = None
        self.world = World(oracle_engine(**{**options, **self.overrides}))
        self.world.on_border = self._at_border

    def _at_border(self, border: Border) -> None:
        due = [act for wait, act in self.planned if wait == 0]
        self.planned = [(wait - 1, act) for wait, act in self.planned if wait > 0]
        for act in due:
            act()

    def _submit(self, seed: int) -> None:
        rng = random.Random(seed)
        prompt = shared_prompt(rng) if rng.random() < 0.6 else random_prompt(rng)
        params = random_params(rng, text=self.has_text)
        if rng.random() < 0.4:  # long enough to use the blocks up
            params = params.replace(max_tokens=rng.randint(30, 90), min_tokens=0, ignore_eos=True, stop_token_ids=None)
        salt = rng.choice(["", "", "another tenant"])
        self.world.submit(prompt, params, stream=rng.random() < 0.3, cache_salt=salt)

    def _abort(self, seed: int) -> None:
        if self.world.all:
            self.world.abort(random.Random(seed).choice(self.world.all).request_id)

    @rule(seed=SEEDS)
    def submit(self, seed: int) -> None:
        self._submit(seed)

    @rule(seed=SEEDS)
    def submit_several(self, seed: int) -> None:
        for i in range(4):
            self._submit(seed + i)

    def _serve(self, seed: int) -> None:
        """Requests that come one after another, so that later ones find what earlier ones left."""
        rng = random.Random(seed)
        for number in range(4):
            self._submit(seed + number)
            for _ in range(rng.randint(1, 4)):
                self.world.step()

    @rule(seed=SEEDS)
    def reuse_an_id(self, seed: int) -> None:
        ended = [one.request_id for one in self.world.all if one.last is not None]
        free = [name for name in ended if name not in self.world.live_ids]
        if free:
            rng = random.Random(seed)
            self.world.submit(random_prompt(rng), random_params(rng), request_id=rng.choice(free))

    @rule(seed=SEEDS)
    def abort(self, seed: int) -> None:
        self._abort(seed)

    @rule()
    def abort_nobody(self) -> None:
        assert not self.world.abort("nobody of this name")

    @rule(wait=st.integers(0, 14), seed=SEEDS, kind=st.sampled_from(["submit", "abort", "async", "legacy"]))
    def plan_for_a_border(self, wait: int, seed: int, kind: str) -> None:
        acts: dict[str, Callable[[], object]] = {
            "submit": lambda: self._submit(seed),
            "abort": lambda: self._abort(seed),
        }
        self.planned.append((wait, acts.get(kind, lambda: self.world.engine.set_mode(kind))))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        self._run_again()
        for _ in range(count):
            self.world.step()

    @rule()
    def step_phase(self) -> None:
        self._run_again()
        self.world.step_phase()

    @rule(seed=SEEDS)
    def pause(self, seed: int) -> None:
        self._be_busy(seed)
        if self.world.engine.in_hand is None:
            self.world.engine.pause()
            assert self.world.engine.state is not EngineState.RUNNING
        else:
            with pytest.raises(MidIterationError):
                self.world.engine.pause()

    @rule(seed=SEEDS, how=st.sampled_from(SUSPENSIONS))
    def suspend(self, seed: int, how: str) -> None:
        self._be_busy(seed)
        engine = self.world.engine
        if engine.in_hand is not None:
            refusal: type[Exception] = MidIterationError
        elif engine.suspension is not None and engine.suspension.mode != how:
            refusal = EnginePausedError
        else:
            assert engine.suspend(how).mode == how
            assert engine.state is EngineState.SUSPENDED
            return
        before = engine.suspension
        with pytest.raises(refusal):
            engine.suspend(how)
        assert engine.suspension is before

    @precondition(lambda self: self.world.engine.state is not EngineState.RUNNING)
    @rule()
    def resume(self) -> None:
        self._run_again()

    def _be_busy(self, seed: int) -> None:
        """Most of the time nobody is served, and then there is little to lose."""
        engine = self.world.engine
        if engine.state is EngineState.RUNNING and engine.in_hand is None and not engine.has_unfinished():
            self._serve(seed)

    def _run_again(self) -> None:
        """Where it stands still: look, be refused, and resume."""
        engine = self.world.engine
        if engine.state is EngineState.RUNNING:
            return
        calls = (engine.step, engine.step_phase, engine.recover, lambda: engine.generate([[1]], progress=False))
        before = engine.counters.to_dict()
        for call in calls:
            with pytest.raises(EnginePausedError):
                call()
        assert engine.counters.to_dict() == before
        engine.resume()
        assert engine.suspension is None

    @rule(mode=st.sampled_from(["async", "legacy"]))
    def set_mode(self, mode: str) -> None:
        self.world.engine.set_mode(mode)

    @rule()
    def read_everything(self) -> None:
        engine = self.world.engine
        engine.controller.order_state()
        assert engine.counters.to_dict()["submitted"] == engine.counters.submitted
        if engine.in_hand is None and engine.suspension is None:
            check_device(engine)

    @rule()
    def refuse_a_bad_request(self) -> None:
        before = self.world.engine.counters.submitted
        with pytest.raises(RequestError):
            self.world.engine.add_request([VOCAB])
        assert self.world.engine.counters.submitted == before

    @precondition(lambda self: self.world.engine.in_hand is not None)
    @rule()
    def need_a_border_in_mid_iteration(self) -> None:
        with pytest.raises(MidIterationError):
            self.world.engine.require_border("saving")

    @rule(phase=st.sampled_from(PHASES), after=st.booleans())
    def fail_and_recover(self, phase: Phase, after: bool) -> None:
        self._fail_and_recover(phase, after=after)

    def _fail_and_recover(self, phase: Phase, *, after: bool) -> None:
        self._run_again()
        if self.world.fail_in(phase, after=after):
            self.world.engine.recover()

    @rule()
    def forget_prefixes(self) -> None:
        freed = self.world.engine.reset_prefix_cache()
        assert 0 <= freed <= self.world.engine.pool.num_blocks

    @rule()
    def recover_without_a_failure(self) -> None:
        self._run_again()
        self.world.engine.recover()

    @rule()
    def reset(self) -> None:
        self.world.reset()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.planned.clear()
            self.world.engine.resume()
            try:
                self.world.drain()
            finally:
                self.world.engine.close()


class LifecycleInBuckets(Lifecycle):
    """The same with forwards that are padded and replayed."""

    overrides = {"graphs": (2, 4, 16), "max_requests": 4, "block_size": 16, "num_blocks": 12}  # noqa: RUF012
    least_budget = 16  # below, a graph of 16 tokens would be refused


class LifecycleOnThreads(Lifecycle):
    """The same with a device that runs beside the host."""

    overrides = {"device": "cpu"}  # noqa: RUF012


class LifecycleWithStates(Lifecycle):
    """The same with recurrent states, of which prefixes are snapshots, and mostly with drafts, behind which they go."""

    @initialize(options=st.builds(lambda options, seed: options | stateful_model(seed), WORLDS, SEEDS))
    def start(self, options: dict[str, Any]) -> None:
        super().start(options)

    @rule(seed=SEEDS)
    def serve_and_stand_still_meanwhile(self, seed: int) -> None:
        """With states that are in use, and snapshots that are found afterwards."""
        self._run_again()
        self._serve(seed)
        while self.world.engine.in_hand is not None:
            self.world.step_phase()
        stand_still(self.world.engine, random.Random(seed).choice(["offload", *STANDSTILLS]))
        self._serve(seed + 4)

    @precondition(lambda self: self.world.engine.config.speculative_tokens > 0)
    @rule(phase=st.sampled_from(VERIFICATION), after=st.booleans())
    def fail_in_verification(self, phase: Phase, after: bool) -> None:
        self._fail_and_recover(phase, after=after)


TestLifecycle = pytest.mark.timeout(1200)(Lifecycle.TestCase)
TestLifecycle.settings = settings(max_examples=60, stateful_step_count=40)
TestLifecycleInBuckets = LifecycleInBuckets.TestCase
TestLifecycleInBuckets.settings = settings(max_examples=20, stateful_step_count=30)
TestLifecycleWithStates = LifecycleWithStates.TestCase
TestLifecycleWithStates.settings = settings(max_examples=25, stateful_step_count=30)
TestLifecycleOnThreads = LifecycleOnThreads.TestCase
TestLifecycleOnThreads.settings = settings(max_examples=30, stateful_step_count=30)
