"""A world that knows which cached blocks a request may find, and what every named block must hold."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from engine.cache.prefix import block_digests, root_digest
from engine.cache.prefix_pool import PrefixPool
from engine.controller import Border
from engine.engine import Engine
from engine.phases import Phase
from engine.request import Request, SamplingParams
from tests.oracle_world import VOCAB, Submitted, World, random_params

SALTS = ("", "", "", "another tenant")
PIECES = [[7 * piece + 3 * place for place in range(4)] for piece in range(3)]
"""Blocks that prompts are made of, so that the same ones stand at many places."""


def pieced_prompt(rng: random.Random, longest: int) -> list[int]:
    """Blocks of few kinds in few orders, up to a place of its own, and a tail that is often none."""
    start = rng.randrange(2)
    blocks = [PIECES[(start + place * place) % 3] for place in range(-(-longest // 4))]
    if rng.random() < 0.25:
        blocks = blocks[1:]  # what stands one block further on in others
    tokens = [token for block in blocks for token in block][: rng.choice([3, 4, 5, 8, 9, 12, 16, 24, longest])]
    return (tokens + [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 0, 1, 3]))])[:longest]


class MemoryWorld(World):
    """Checks at every border what no single answer shows.

    - A hit is no longer than what others of its salt have in common with it, and is told of as it was at first.
    - The queue stands in order of arrival.
    - On the inline device a named block holds the tokens that its name is made of.
    - Paused rows hold no more blocks than they may, and a request that failed left nothing to be found.
    - After a reset of the cache nothing is named that was computed before.
    - Of the cached blocks that nothing follows the one used longest ago gives way.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.salts: list[str] = []
        self.keys: list[int] = []
        """Both as ``all``."""
        self.first_hits: dict[int, int] = {}
        """By request key."""
        self.seen: Counter[str] = Counter()
        """What the checks came upon."""
        self._old: dict[int, Request] = {}
        """Requests whose rows were placed before the last reset of the cache, by key."""
        self._blocks_of: dict[int, list[int]] = {}
        """Before the last resolve, by request key."""
        self._placed: set[int] = set()
        self._failed: set[int] = set()
        """Keys of requests that lived through a failure, which may have placed them before anybody looked."""
        self._right: dict[int, tuple[bytes, bytes]] = {}
        """Name and content of blocks that were found to agree."""
        self._tick = 0
        self._last_held: defaultdict[int, int] = defaultdict(int)
        if isinstance(engine.pool, PrefixPool):
            self._index: Any = engine.pool.index
            self._evict = self._index.evict
            self._index.evict = self._evict_watched

    def submit(self, prompt: Sequence[int], params: SamplingParams, *, cache_salt: str = "", **options: Any) -> str:
        self.salts.append(cache_salt)
        given = super().submit(prompt, params, cache_salt=cache_salt, **options)
        self.keys.append(self.engine._live[given].key)
        return given

    def forget(self) -> None:
        """Reset the prefix cache."""
        self._old = {request.key: request for request in self.engine.table.live_requests()}
        self.engine.reset_prefix_cache()

    def fail_in(self, phase: Phase, *, after: bool) -> bool:
        keys = {request.key for request in self.engine._live.values()}
        has_failed = super().fail_in(phase, after=after)
        self._failed |= keys if has_failed else set()
        return has_failed

    def verify(self, one: Submitted) -> None:
        super().verify(one)
        assert one.last is not None
        key = self.keys[self.all.index(one)]
        if key in self._failed and key not in self.first_hits:
            return  # an admission that failed behind its work may have skipped some, and it ended before the next
        hit = self.first_hits.get(key, 0)
        assert one.last.num_cached_tokens == hit, f"{one.last.num_cached_tokens} told, {hit} skipped"

    def _watch(self, border: Border) -> None:
        super()._watch(border)
        self._tick += 1
        engine = self.engine
        keys = [request.key for request in engine.queue.waiting]
        assert keys == sorted(keys), f"the queue stands in the order {keys} (I47)"
        if border.side == "after" and border.phase is Phase.ADMIT:
            self._check_paused()
        if not isinstance(engine.pool, PrefixPool):
            return
        self._check_forgotten(border)
        for block in engine.pool.ref_counts.nonzero()[0].tolist():
            self._last_held[block] = self._tick
        if border.side == "before" and border.phase is Phase.RESOLVE:
            self._blocks_of = {
                request.key: engine.table.held_blocks(np.array([row])).tolist()
                for row, request in enumerate(engine.table.live_requests())
            }
        if border.side == "after":
            if border.phase is Phase.ADMIT:
                for request in border.iteration.admitted:
                    self._check_hit(request)
            if engine.device.kind == "inline" and border.phase is Phase.FORWARD:
                self._check_named()
            if border.phase is Phase.RESOLVE and len(border.iteration.ended) == 1:
                self._check_disowned(border.iteration.ended[0])

    def _check_paused(self) -> None:
        table, config = self.engine.table, self.engine.config
        if table.num_paused:
            held = set(table.held_blocks(np.arange(table.num_paused)).tolist())
            most = self.engine.pool.num_blocks // 4 if config.paused_blocks is None else config.paused_blocks
            assert len(held) <= most, f"paused rows hold {held}, they may hold {most}"
            self.seen["paused"] += 1

    def _check_disowned(self, request: Request) -> None:
        if request.finish_reason == "error":
            left = [block for block in self._blocks_of.get(request.key, ()) if block in self._index]
            assert not left, f"{request.request_id} failed, and blocks {left} of it can be found"
            self.seen["failed"] += 1

    def _check_hit(self, request: Request) -> None:
        assert request.row is not None
        done, tokens = int(self.engine.table.chunk_done[request.row]), [*request.prompt_ids, *request.output_ids]
        if request.key not in self.first_hits:
            self.first_hits[request.key] = request.num_cached_tokens if request.key in self._failed else done
            assert request.key in self._failed or request.num_cached_tokens == done, (
                f"{done} skipped, {request.num_cached_tokens} told"
            )
        self.seen["hits"] += done > 0
        others = [
            self._tokens(one)
            for one, salt, key in zip(self.all, self.salts, self.keys, strict=True)
            if salt == request.cache_salt and (key != request.key or key in self._placed)
        ]
        self._placed.add(request.key)
        most = max((_in_common(tokens, other) for other in others), default=0)
        assert done <= most, f"{request.request_id} skips {done} tokens, {most} were computed (salt, reset, names)"

    def _tokens(self, one: Submitted) -> list[int]:
        request = self.engine._live.get(one.request_id)
        is_live = one.last is None and request is not None
        output = request.output_ids if is_live and request is not None else one.last.token_ids if one.last else ()
        return [*one.prompt, *output]

    def _check_named(self) -> None:
        """A name is the digest of its parent's name and of what lies in the block."""
        cache, size = self.engine.runner.caches[0][0].numpy(), self.engine.config.block_size
        roots = [root_digest(salt) for salt in set(SALTS)]
        for named in list(self._index._by_block.values()):
            content = named.digest, cache[named.block].tobytes()
            if self._right.get(named.block) == content:
                continue
            entries = cache[named.block]
            first = int(entries[0, 1])
            assert entries[:, 1].tolist() == [*range(first, first + size)], f"block {named.block} has holes (I17)"
            tokens = entries[:, 0].tolist()
            parents = roots if named.parent is None else [named.parent.digest]
            made = [_digest(parent, tokens, size) for parent in parents]
            assert named.digest in made, f"block {named.block} does not hold what it is named by (I15, I17)"
            assert (named.parent is None) == (first == 0), f"block {named.block} is named at a wrong place (I15)"
            self._right[named.block] = content
            self.seen["names"] += 1

    def _check_forgotten(self, border: Border) -> None:
        room = border.iteration.room  # who went back may have a row again by now, with other blocks
        back = [] if room is None else room.evicted
        for key, request in list(self._old.items()):
            if request.row is None or request in back:
                del self._old[key]
                continue
            table = self.engine.table
            held = table.block_ids[request.row, : table.block_count[request.row]].tolist()
            assert not any(block in self._index for block in held), f"{request.request_id} names what was forgotten"

    def _evict_watched(self, count: int) -> list[int] | None:
        before = {named.block: (named.is_idle, set(named.children)) for named in self._index._by_block.values()}
        parents = {named.block: named.parent.block for named in self._index._by_block.values() if named.parent}
        gone: list[int] | None = self._evict(count)
        assert (gone is None) == (count > sum(is_idle for is_idle, _ in before.values()))
        for block in gone or ():
            leaves = [one for one, (is_idle, children) in before.items() if is_idle and not children]
            assert block in leaves, f"block {block} was evicted and is no idle leaf of {leaves} (I16)"
            oldest = min(self._last_held[leaf] for leaf in leaves)
            assert self._last_held[block] == oldest, f"block {block} was evicted before one used earlier (I16)"
            del before[block]
            if block in parents:
                before[parents[block]][1].discard(block)
            self.seen["evictions"] += 1
        return gone


def _in_common(tokens: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, other, strict=False)))


def _digest(parent: bytes, tokens: list[int], size: int) -> bytes:
    return block_digests([*[0] * size, *tokens], size, known=[parent])[1]


def play_memory(world: MemoryWorld, rng: random.Random, *, num_acts: int = 30, text: bool = False) -> None:
    """A schedule of requests that share beginnings and outgrow the pool; ends drained and checked."""
    longest = world.engine.resolved.max_sequence_length - 1

    def at_border(_: Border) -> None:
        if world.live_ids and rng.random() < 0.01:
            world.abort(rng.choice(world.live_ids))

    world.on_border = at_border
    for _ in range(num_acts):
        act = rng.random()
        if act < 0.4:
            for _ in range(rng.choice([1, 1, 3])):
                submit_memory(world, rng, longest, text=text)
        elif act < 0.85:
            for _ in range(rng.randint(1, 4)):
                world.step()
        elif act < 0.92:
            world.step_phase()
        elif act < 0.95:
            world.engine.set_mode(rng.choice(["async", "async", "legacy"]))
        elif act < 0.97:
            world.forget()
        elif act < 0.98:
            world.reset()
    world.on_border = None  # an abort would help a request that waits for ever
    world.drain(600)


def submit_memory(world: MemoryWorld, rng: random.Random, longest: int, *, text: bool = False) -> None:
    """A request that shares its beginning with others and mostly runs for long."""
    params = random_params(rng, text=text, max_tokens=30)
    if rng.random() < 0.6:
        tokens = rng.randint(8, 40)
        params = params.replace(max_tokens=tokens, min_tokens=0, ignore_eos=True, stop_token_ids=None)
    prompt = pieced_prompt(rng, longest)
    world.submit(prompt, params, stream=rng.random() < 0.3, cache_salt=rng.choice(SALTS))
