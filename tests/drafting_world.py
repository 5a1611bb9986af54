"""Worlds on oracle models with draft heads and recurrent states, and what their verifications came to."""

from __future__ import annotations

from collections import Counter
from typing import Any

from engine.controller import Border
from engine.engine import Engine
from engine.models.oracle import Skill
from engine.phases import Phase
from engine.request import Request, SamplingParams
from tests.memory_world import MemoryWorld
from tests.oracle_reference import VOCAB
from tests.oracle_world import Kind, World, oracle_engine

PLAIN = SamplingParams(max_tokens=12, temperature=1.0, seed=11, ignore_eos=True, detokenize=False)
"""Drawn by temperature alone: heads that are right foresee every token."""
GREEDY = PLAIN.replace(temperature=0.0)
RICH = [
    PLAIN.replace(max_tokens=9, logprobs=2, presence_penalty=0.5, repetition_penalty=2.0),
    GREEDY.replace(max_tokens=11, frequency_penalty=1.5, prompt_logprobs=1, logprobs=1),
    PLAIN.replace(max_tokens=8, seed=3, logit_bias={7: 3.0, 9: 3.0}, top_k=10, logprobs=0),
    GREEDY.replace(max_tokens=10, min_tokens=6, stop_token_ids=list(range(40)), ignore_eos=False),
    PLAIN.replace(max_tokens=7, seed=8, temperature=2.0, top_p=0.9, min_p=0.05, logprobs=3),
    PLAIN.replace(max_tokens=12, seed=9, ignore_eos=False, min_tokens=2),
]
"""Parameters of every kind, of requests that run beside each other."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"chunked_prefill": True, "max_batch_tokens": 18},
    "pausing": {"capacity_policy": "max_utilization", "num_blocks": 14, "paused_blocks": 12, "max_sequence_length": 48},
    "prefix": {"prefix_caching": True, "num_blocks": 32, "max_sequence_length": 48},
    "prefix, pausing": {
        "prefix_caching": True,
        "capacity_policy": "max_utilization",
        "num_blocks": 16,
        "max_sequence_length": 48,
    },
    "buckets": {"graphs": (4, 16), "max_sequence_length": 40},
    "gated": {
        "graphs": (4, 16, 32),
        "graph_all_prefills": True,
        "chunked_prefill": True,
        "max_batch_tokens": 32,
        "max_sequence_length": 40,
    },
}
"""What drafts, states and prompts may meet with."""


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * place * place + 3 * place + salt) % VOCAB for place in range(length)]


class DraftingWorld(MemoryWorld):
    """Remembers how verifications came out, of which request; every answer is checked, as ever."""

    def __init__(self, drafts: int = 3, *, skill: Skill = "mixed", kind: Kind = "mtp", **options: Any) -> None:
        super().__init__(oracle_engine(kind=kind, skill=skill, speculative_tokens=drafts, **options))
        self.drafts = drafts
        self.accepted: list[list[int]] = []
        """Of each verification with decode rows, the accepted drafts of those."""
        self.verified_of: Counter[str] = Counter()
        self.accepted_of: Counter[str] = Counter()
        """By request id, drafts verified and accepted."""
        self.requests: dict[str, Request] = {}

    @property
    def counts(self) -> set[int]:
        """Accepted counts that came up."""
        return {count for counts in self.accepted for count in counts}

    def submit(self, *args: Any, **options: Any) -> str:
        given = super().submit(*args, **options)
        self.requests[given] = self.engine._live[given]
        return given

    def _watch(self, border: Border) -> None:
        super()._watch(border)
        verified, iteration = border.iteration.verified, border.iteration
        if border.phase is not Phase.REWIND or border.side != "after" or verified is None:
            return
        assert iteration.num_tokens is not None
        found = []
        for i, (most, tokens) in enumerate(zip(verified.num_drafts, iteration.num_tokens, strict=True)):
            request = self.engine.table.requests[verified.first_row + i]
            assert request is not None
            if most:
                found.append(int(tokens) - 1)
            if most and not request.abort_requested:
                self.verified_of[request.request_id] += int(most)
                self.accepted_of[request.request_id] += int(tokens) - 1
        if found:
            self.accepted.append(found)

    def serve(self, params: list[SamplingParams], length: int = 5) -> list[tuple[Any, ...]]:
        """Requests beside each other, prompts of growing length; ids and log probabilities of each."""
        for number, one in enumerate(params):
            self.submit(prompt_of(length + 3 * number, number % 3), one, stream=number == 2)
        self.drain()
        lasts = [one.last for one in self.all]
        return [(last.token_ids, last.logprobs, last.finish_reason) for last in lasts if last is not None]

    def serve_switching(self, params: list[SamplingParams], every: int) -> None:
        """Requests beside each other, in a mode that is switched after so many steps, again and again."""
        for number, one in enumerate(params):
            self.submit(prompt_of(5 + number), one)
        for step in range(200):
            if step % every == every - 1:
                self.engine.set_mode("legacy" if self.engine.mode == "async" else "async")
            if not self.engine.has_unfinished():
                break
            self.step()
        self.drain()


def stand_still(engine: Engine, how: Any) -> None:
    """Pause, or suspend in the mode ``how``, and go on."""
    if how == "pause":
        engine.pause()
    else:
        engine.suspend(how)
    engine.resume()


def times_met(world: World, setting: str) -> int:
    """How often what a setting of ``SETTINGS`` is there for came about; 1 where there is nothing to count."""
    counters = world.engine.counters
    return {
        "pausing": counters.pauses + counters.evictions,
        "prefix": counters.prefix_hit_tokens,
        "prefix, pausing": (counters.pauses + counters.evictions) * counters.prefix_hit_tokens,
        "buckets": counters.graph_hits,
        "gated": counters.graph_hits,
    }.get(setting, 1)


def all_foreseen(world: DraftingWorld) -> bool:
    """Whether every draft of every verification was accepted, and there were any."""
    return world.counts == {world.drafts}
