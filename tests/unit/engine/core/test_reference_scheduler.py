"""The engine's own admissions, pauses and evictions beside those that plain Python works out from the rules."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.admission import RequestQueue
from engine.cache.prefix import PrefixIndex
from engine.controller import Border
from engine.pausing import RoomKeeper
from engine.phases import Phase
from engine.policy import never_overlap, prefer_overlap
from engine.prefix_cache import PrefixCache
from engine.request import SamplingParams
from tests.memory_world import pieced_prompt
from tests.oracle_reference import expected_output
from tests.oracle_world import World, oracle_engine
from tests.planted_faults import Patch, wrap
from tests.reference_scheduler import Happened, Job, ReferenceScheduler, Rules

BLOCK, LONGEST = 4, 52


class Scheduling:
    """One stream of requests, through the engine and through the reference."""

    def __init__(self, seed: int, **changes: Any) -> None:
        rng = random.Random(seed)
        self.rng = rng
        chunk_budget = rng.choice([None, None, 6, 8, 11])
        options: dict[str, Any] = {
            "mode": rng.choice(["async", "async", "legacy"]),
            "block_size": BLOCK,
            "max_sequence_length": LONGEST,
            "max_requests": rng.choice([2, 3, 4]),
            "num_blocks": rng.choice([13, 14, 17, 22, 40]),
            "max_batch_tokens": chunk_budget or rng.choice([LONGEST, 70]),
            "chunked_prefill": chunk_budget is not None,
            "prefix_caching": rng.random() < 0.6,
            "eviction_policy": rng.choice(["lru", "lru", "ref_zero"]),
            "capacity_policy": rng.choice(["guaranteed_no_evict", "max_utilization", "max_utilization"]),
        }
        paused_blocks = rng.choice([0, 3, 7, 20])
        options |= changes
        if options["capacity_policy"] == "max_utilization":
            options.setdefault("paused_blocks", paused_blocks)
        policy = never_overlap if rng.random() < 0.25 else prefer_overlap
        options.setdefault("overlap_admission", (seed // 4) % 2 == 0)
        self.world = World(oracle_engine(**options, policy=policy, debug_invariants=False))
        self.world.on_border = self._look
        self.reference = ReferenceScheduler(
            Rules(
                legacy=options["mode"] == "legacy",
                overlaps=policy is prefer_overlap,
                beside=options["overlap_admission"],
                block_size=BLOCK,
                num_blocks=options["num_blocks"],
                max_rows=options["max_requests"],
                budget=options["max_batch_tokens"],
                chunked=options["chunked_prefill"],
                caches=options["prefix_caching"],
                keeps_idle=options["eviction_policy"] == "lru",
                evicts=options["capacity_policy"] == "max_utilization",
                paused_blocks=options.get("paused_blocks", 0),
            )
        )
        self.seen: Counter[str] = Counter()
        self.num_jobs = 0
        self._prompt: list[int] = []
        self._now = Happened("none")
        self._half_read: str | None = None
        """Whose prompt is read in part, when admit begins."""

    def _arrival(self) -> Job:
        if not self._prompt or self.rng.random() < 0.6:  # else the one before asks again
            self._prompt = pieced_prompt(self.rng, self.rng.choice([8, 20, 40]))
        prompt = self._prompt
        wanted = min(self.rng.choice([1, 2, 3, 8, 20, 30]), LONGEST - len(prompt))
        params = SamplingParams(
            max_tokens=wanted, temperature=0.0, seed=self.num_jobs, ignore_eos=True, detokenize=False
        )
        salt = self.rng.choice(["", "", "x"])
        output = expected_output(prompt, params, 0, max_length=LONGEST).token_ids
        self.world.submit(prompt, params, request_id=str(self.num_jobs), cache_salt=salt)
        self.num_jobs += 1
        return Job(self.num_jobs - 1, tuple(prompt), output, salt)

    def _look(self, border: Border) -> None:
        iteration, table = border.iteration, self.world.engine.table
        if border.side == "before" and border.phase is iteration.order.phases[0]:
            self._now = Happened(iteration.order.label)
        if border.side == "before" and border.phase is Phase.ADMIT:
            partial = None if table.partial_row is None else table.requests[table.partial_row]
            self._half_read = None if partial is None else partial.request_id
        if border.side != "after":
            return
        if border.phase is Phase.ADMIT:
            numbers = [int(request.request_id) for request in iteration.admitted]
            rows = [request.row for request in iteration.admitted]
            spans = [(int(table.chunk_done[row]), int(table.chunk_end[row])) for row in rows if row is not None]
            self._now.admitted = [(number, *span) for number, span in zip(numbers, spans, strict=True)]
            for row in range(table.num_live):
                request = table.requests[row]
                assert request is not None
                if request.request_id == self._half_read:
                    place = int(table.chunk_done[row]), int(table.chunk_end[row])
                    self._now.chunk = (int(request.request_id), *place)
            if iteration.room is not None:
                for name in ("paused", "resumed", "evicted"):
                    setattr(self._now, name, [int(one.request_id) for one in getattr(iteration.room, name)])
        if border.phase is Phase.RESOLVE:
            self._now.ended = [int(request.request_id) for request in iteration.ended]

    def step(self, arrivals: int) -> bool:
        """One iteration of both; False once the rules leave more than one way to go on."""
        jobs = [self._arrival() for _ in range(arrivals)]
        if not self.reference.is_busy and not jobs:
            return True
        wanted = self.reference.step(jobs)
        self.world.step()
        engine = self.world.engine
        self._now.waiting = [int(request.request_id) for request in engine.queue.waiting]
        self._now.held = engine.pool.num_blocks - engine.pool.num_free
        if self.reference.is_open:
            self.seen["open"] += 1
            return False
        assert self._now == wanted, f"iteration {engine.controller.next_index - 1}"
        assert engine.counters.prefix_waits == self.reference.num_waits
        self._count(wanted)
        return True

    def _count(self, now: Happened) -> None:
        self.seen["iterations"] += 1
        self.seen[now.order] += 1
        self.seen["hits"] += sum(done > 0 for _, done, _ in now.admitted)
        self.seen["chunks"] += now.chunk is not None
        for name in ("admitted", "paused", "resumed", "evicted", "ended"):
            self.seen[name] += len(getattr(now, name))

    def run(self) -> Counter[str]:
        """A stream of requests, some at a time, to the end of the last one."""
        try:
            for _ in range(self.rng.randint(4, 30)):
                if not self.step(self.rng.choice([0, 0, 0, 1, 1, 2, 5])):
                    return self.seen
            while self.reference.is_busy:
                if not self.step(0):
                    return self.seen
            assert not self.world.live_ids, "the reference is through, the engine is not"
            self.seen["waits"] += self.reference.num_waits
            return self.seen
        finally:
            self.world.engine.close()


@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 30))
def test_admissions_pauses_and_evictions_are_those_of_the_rules(seed: int) -> None:
    Scheduling(seed).run()


def test_a_fixed_set_of_streams_reaches_everything_and_is_seldom_cut_short() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        seen += Scheduling(seed, num_blocks=14 + seed % 4).run()
    for name in (
        "paused",
        "resumed",
        "evicted",
        "hits",
        "chunks",
        "waits",
        "overlap",
        "overlap_admit",
        "no_overlap",
        "legacy",
        "primer",
    ):
        assert seen[name] >= 10, f"{name}: {seen}"
    assert seen["open"] < 10


# -- faults that only a prediction finds -------------------------------------------------------------------------------


def resumes_from_the_left(patch: Patch) -> None:
    def resume(real: Any, self: RoomKeeper, left: Any, already: int = 0) -> int:
        while left and already < self._pool.num_free:
            del left[0]
            already += 1
        return already

    wrap(patch, RoomKeeper, "_resume", resume)


def one_block_more_for_paused_rows(patch: Patch) -> None:
    def too_much(real: Any, self: RoomKeeper, rows: Any) -> bool:
        self._paused_blocks += 1
        try:
            return bool(real(self, rows))
        finally:
            self._paused_blocks -= 1

    wrap(patch, RoomKeeper, "_is_too_much", too_much)


def pauses_a_token_early(patch: Patch) -> None:
    def needing(real: Any, self: RoomKeeper) -> Any:
        self._table.kv_len += 1
        try:
            return real(self)
        finally:
            self._table.kv_len -= 1

    wrap(patch, RoomKeeper, "needing", needing)


def last_row_never_given_away(patch: Patch) -> None:
    wrap(patch, RequestQueue, "capacity", lambda real, self: replace(real(self), free_rows=self._table.num_free - 1))


def a_hit_for_half_of_the_blocks(patch: Patch) -> None:
    def skippable(real: Any, self: PrefixCache, request: Any) -> Any:
        names = real(self, request)
        return names[: -(-len(names) // 2)]

    wrap(patch, PrefixCache, "skippable", skippable)


def hits_forgotten_at_the_end_of_a_request(patch: Patch) -> None:
    wrap(patch, PrefixCache, "name_written", lambda real, self, request: None)


def nobody_waits_for_a_prefix(patch: Patch) -> None:
    patch.setattr(PrefixCache, "is_coming", lambda self, request, num_shared: False)


def newest_cached_block_goes_first(patch: Patch) -> None:
    def let_go(real: Any, self: PrefixIndex, blocks: Any) -> None:
        clock, self._clock = self._clock, -self._clock - 2
        real(self, blocks)
        self._clock = clock + 1

    wrap(patch, PrefixIndex, "let_go", let_go)


def _run_some(options: dict[str, Any]) -> None:
    for seed in range(40):
        Scheduling(seed, **options).run()


RULE_FAULTS = [
    (resumes_from_the_left, {"capacity_policy": "max_utilization", "num_blocks": 18, "paused_blocks": 20}),
    (one_block_more_for_paused_rows, {"capacity_policy": "max_utilization", "num_blocks": 18, "paused_blocks": 7}),
    (pauses_a_token_early, {"capacity_policy": "max_utilization", "num_blocks": 18, "paused_blocks": 20}),
    (last_row_never_given_away, {}),
    (a_hit_for_half_of_the_blocks, {"prefix_caching": True}),
    (hits_forgotten_at_the_end_of_a_request, {"prefix_caching": True}),
    (nobody_waits_for_a_prefix, {"prefix_caching": True, "num_blocks": 40}),
    (newest_cached_block_goes_first, {"prefix_caching": True, "eviction_policy": "lru", "num_blocks": 17}),
]


@pytest.mark.parametrize(("plant", "options"), RULE_FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_in_the_rules_is_noticed(
    plant: Callable[[Patch], None], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="iteration"):
        _run_some({"capacity_policy": "guaranteed_no_evict", **options})
