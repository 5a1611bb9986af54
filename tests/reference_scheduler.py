"""Which requests enter, pause, go on and go back in which iteration, worked out from the rules with lists and dicts.

The rules are those of ``../reference/megatron-behaviour.md`` §1.7, §1.10, §2.1, §3 and of the decisions 0003, 0013 and
0014.
No code of the engine is called. Outputs are known beforehand: requests end by length alone, nobody aborts.

Where the rules leave a choice (of two cached leaves that were let go of at once, which is forgotten first), the
prediction says so in ``is_open`` and means nothing from there on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Prefix = tuple[object, ...]
"""A salt and all tokens up to a block's end: what a cached block is known by."""


@dataclass(eq=False)
class Job:
    """A request and how far it is."""

    number: int
    """In order of arrival."""
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    """All that it will say."""
    salt: str = ""
    given: int = 0
    """Output tokens that are known."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.output[: self.given]


@dataclass(eq=False)
class Block:
    """Nobody's, held by rows, or kept for its name."""

    holders: int = 0
    name: Prefix | None = None
    let_go: int = 0
    """When its last holder went."""


@dataclass(eq=False)
class Row:
    """A request that holds blocks."""

    job: Job
    blocks: list[Block]
    target: int
    """Tokens to read before it decodes."""
    done: int
    """Of those, read before the present chunk."""
    end: int
    """Of those, read once the present chunk has run."""
    most_blocks: int
    cached: int = 0
    """Tokens in the cache, or on their way there."""
    decodes: bool = False
    is_paused: bool = False

    @property
    def is_partial(self) -> bool:
        return not self.decodes and self.end < self.target


@dataclass
class Happened:
    """One iteration."""

    order: str
    admitted: list[tuple[int, int, int]] = field(default_factory=list)
    """Number, first and last token (exclusive) of the chunk it begins with."""
    chunk: tuple[int, int, int] | None = None
    """The same of the prompt that goes on."""
    paused: list[int] = field(default_factory=list)
    resumed: list[int] = field(default_factory=list)
    evicted: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    """Who waits when it is over, in order."""
    held: int = 0
    """Blocks that rows hold when it is over."""


@dataclass(kw_only=True)
class Rules:
    """The options that matter."""

    legacy: bool
    overlaps: bool = True
    beside: bool = True
    """Prompts may enter while a forward is pending."""
    block_size: int
    num_blocks: int
    max_rows: int
    budget: int
    chunked: bool
    caches: bool
    keeps_idle: bool = True
    """Cached blocks outlive their holders."""
    evicts: bool
    """Requests enter with room for their prompts alone."""
    paused_blocks: int = 0


class Cache:
    """Blocks, and what is known of them."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.known: dict[Prefix, Block] = {}
        self.num_held = 0
        self.clock = 0
        self.is_open = False

    @property
    def free(self) -> int:
        """Blocks that can be taken: kept ones give way."""
        return self.rules.num_blocks - self.num_held

    def hold(self, block: Block) -> None:
        self.num_held += block.holders == 0
        block.holders += 1

    def take(self, count: int) -> list[Block]:
        assert count <= self.free, "the prediction itself is short of blocks"
        kept = sum(block.holders == 0 for block in self.known.values())
        for _ in range(count - (self.free - kept)):
            self._forget_one()
        blocks = [Block() for _ in range(count)]
        for block in blocks:
            self.hold(block)
        return blocks

    def _forget_one(self) -> None:
        parents = {name[:1] + name[1 : -self.rules.block_size] for name in self.known}
        leaves = [
            (block.let_go, name) for name, block in self.known.items() if not block.holders and name not in parents
        ]
        oldest = min(when for when, _ in leaves)
        names = [name for when, name in leaves if when == oldest]
        self.is_open |= len(names) > 1
        del self.known[names[0]]

    def release(self, blocks: Iterable[Block]) -> None:
        """At one moment."""
        self.clock += 1
        for block in blocks:
            block.holders -= 1
            if block.holders == 0:
                self.num_held -= 1
                block.let_go = self.clock
                if not self.rules.keeps_idle and block.name is not None:
                    del self.known[block.name]

    def prefixes(self, job: Job, num_tokens: int) -> Iterator[Prefix]:
        size = self.rules.block_size
        return ((job.salt, *job.tokens[:end]) for end in range(size, num_tokens + 1, size))

    def name(self, row: Row, num_tokens: int) -> None:
        """Its first blocks are known from now on, up to where another block is known by the same name."""
        if self.rules.caches:
            for prefix, block in zip(self.prefixes(row.job, num_tokens), row.blocks, strict=False):
                if self.known.setdefault(prefix, block) is not block:
                    return
                block.name = prefix

    def hit(self, job: Job) -> list[Block]:
        """The longest known beginning that leaves a token to read."""
        found: list[Block] = []
        if self.rules.caches:
            for prefix in self.prefixes(job, len(job.tokens) - 1):
                if prefix not in self.known:
                    break
                found.append(self.known[prefix])
        return found


class ReferenceScheduler:
    """Rows in their order: paused ones, those that decode, those that read."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.cache = Cache(rules)
        self.waiting: list[Job] = []
        self.rows: list[Row] = []
        self.pending: list[Row] | None = None
        self.half_read: Row | None = None
        """Of the pending rows, the one whose prompt it reads in part."""
        self.num_waits = 0
        """How often somebody waited a round for a prefix in the making."""
        self._coming: set[Prefix] = set()

    @property
    def is_open(self) -> bool:
        return self.cache.is_open

    @property
    def is_busy(self) -> bool:
        return bool(self.rows or self.waiting)

    def step(self, arrived: Iterable[Job]) -> Happened:
        """One iteration, with who arrived before it."""
        self.waiting += arrived
        if self.rules.beside and not self.rules.legacy:
            for row in self.pending or ():
                row.decodes |= row is not self.half_read  # its token 1 is on the device, if not known
        now = Happened(self._order())
        if now.order in ("overlap", "overlap_admit"):
            rows = self._going_on()
            if now.order == "overlap_admit":
                there = list(self.rows)
                self._admit(now)
                rows += [row for row in self.rows if row not in there]
            launched, half_read = self._launch(rows), self._partial()
            self._resolve(now)
            self.pending = [row for row in launched if row in self.rows] or None
            self.half_read = half_read
        else:
            if now.order == "no_overlap":
                self._resolve(now)
            self._admit(now)
            self.pending, self.half_read = self._launch(self._active()) or None, self._partial()
            if now.order == "legacy":
                self._resolve(now)
        now.waiting = [job.number for job in self.waiting]
        now.held = self.cache.num_held
        return now

    def _active(self) -> list[Row]:
        return [row for row in self.rows if not row.is_paused]

    def _going_on(self) -> list[Row]:
        """Active rows that do not end with the forward that is pending."""
        return [row for row in self._active() if row.is_partial or row.job.given + 1 < len(row.job.output)]

    def _needs_block(self, row: Row) -> bool:
        return row.cached >= len(row.blocks) * self.rules.block_size

    def _order(self) -> str:
        if self.rules.legacy:
            return "legacy"
        if self.pending is None:
            return "primer"
        going_on, beside = self._going_on(), self.rules.beside
        brings = self._partial() is not None or self._head_can_enter()
        needed = sum(self._needs_block(row) for row in going_on if not row.is_partial) + self._next_chunk()[1]
        is_steady = beside or (all(row.decodes for row in self.pending) and not brings)
        is_legal = is_steady and not any(row.is_paused for row in self.rows) and needed <= self.cache.free
        if not self.rules.overlaps or not is_legal or not (going_on or brings):
            return "no_overlap"
        return "overlap_admit" if brings else "overlap"

    # -- forwards

    def _launch(self, rows: list[Row]) -> list[Row]:
        for row in rows:
            if row.decodes:
                row.cached += 1
                if row.cached > len(row.blocks) * self.rules.block_size:
                    row.blocks += self.cache.take(1)
            else:
                row.cached = row.end
        for row in rows:
            if not row.decodes:
                self.cache.name(row, row.end)
        self._coming.clear()
        return rows

    def _resolve(self, now: Happened) -> None:
        ended = []
        for row in self.rows:
            if row not in (self.pending or ()) or row is self.half_read:
                continue
            row.decodes = True
            row.job.given += 1
            if row.job.given == len(row.job.output):
                ended.append(row)
        self.pending = None
        for row in ended:
            self.cache.name(row, len(row.job.tokens) - 1)
        if ended:
            self.cache.release(block for row in ended for block in row.blocks)
            self._close_holes(ended)
        now.ended = [row.job.number for row in ended]

    def _close_holes(self, gone: list[Row]) -> None:
        """Survivors at the end fill the holes, in order; a partial row stays the last."""
        parts = []
        for part in ([row for row in self.rows if row.is_paused], self._active()):
            left = [row for row in part if row not in gone]
            staying = [row if row in left else None for row in part[: len(left)]]
            movers = iter([row for row in part[len(left) :] if row in left])
            parts.append([row or next(movers) for row in staying])
        paused, active = parts
        partial = next((i for i, row in enumerate(active) if row.is_partial), None)
        if partial is not None:
            active[partial], active[-1] = active[-1], active[partial]
        self.rows = paused + active

    # -- admission

    def _partial(self) -> Row | None:
        return next((row for row in self.rows if row.is_partial), None)

    def _chunk(self, remaining: int, budget: int) -> int:
        """All that is left, or as much as there is room for; never one token, and never one token left."""
        if remaining <= budget:
            return remaining
        chunk = budget - 1 if remaining == budget + 1 else budget
        return chunk if self.rules.chunked and chunk >= 2 else 0

    def _next_chunk(self) -> tuple[int, int]:
        """Of the partial row: its next tokens, and the blocks these take."""
        row = self._partial()
        if row is None:
            return 0, 0
        tokens = self._chunk(row.target - row.end, self.rules.budget - (len(self._active()) - 1))
        return tokens, -(-(row.end + tokens) // self.rules.block_size) - len(row.blocks)

    def _room(self) -> tuple[int, int]:
        """Tokens and blocks for newcomers."""
        tokens, blocks = self._next_chunk()
        partial, active = self._partial(), self._active()
        free_tokens = self.rules.budget - len(active)
        if partial is not None:
            free_tokens = free_tokens + 1 - tokens if partial.end + tokens == partial.target else 0
        if self.rules.evicts:
            needing = sum(row.decodes and self._needs_block(row) for row in active)
            return free_tokens, self.cache.free - needing - blocks
        return free_tokens, self.rules.num_blocks - sum(row.most_blocks for row in self.rows)

    def _most_blocks(self, job: Job) -> int:
        return -(-(len(job.prompt) + len(job.output) - 1) // self.rules.block_size)

    def _entry(self, job: Job, tokens: int, blocks: int) -> tuple[int, int] | None:
        """How many tokens it would read and how many of ``blocks`` it takes; None if it has to wait."""
        if len(self.rows) == self.rules.max_rows or any(row.is_paused for row in self.rows):
            return None
        hit, size = self.cache.hit(job), self.rules.block_size
        chunk = self._chunk(len(job.tokens) - len(hit) * size, tokens)
        needed = self._most_blocks(job)
        if self.rules.evicts:
            needed = -(-len(job.tokens) // size) - sum(block.holders > 0 for block in hit)
        return (chunk, needed) if chunk and needed <= blocks else None

    def _head_can_enter(self) -> bool:
        return bool(self.waiting) and self._entry(self.waiting[0], *self._room()) is not None

    def _admit(self, now: Happened) -> None:
        if self.rules.evicts and now.order != "overlap_admit":  # there rows are added, and nothing else
            self._make_room(now)
        tokens, blocks = self._room()
        self._continue_chunk(now)
        aside: list[Job] = []
        while self.waiting and len(aside) <= self.rules.max_rows:
            job = self.waiting[0]
            entry = self._entry(job, tokens, blocks)
            if entry is None:
                break
            del self.waiting[0]
            if self._is_coming(job):
                self.num_waits += 1
                aside.append(job)
                continue
            chunk, needed = entry
            row = self._place(job, chunk)
            now.admitted.append((job.number, row.done, row.end))
            blocks -= needed
            tokens = 0 if row.is_partial else tokens - chunk
        self.waiting = aside + self.waiting

    def _is_coming(self, job: Job) -> bool:
        names, hit = list(self.cache.prefixes(job, len(job.tokens) - 1)), self.cache.hit(job)
        return self.rules.caches and len(hit) < len(names) and names[len(hit)] in self._coming

    def _reads(self, row: Row) -> None:
        names = list(self.cache.prefixes(row.job, row.end))
        self._coming |= set(names[row.done // self.rules.block_size :])

    def _place(self, job: Job, chunk: int) -> Row:
        hit, size = self.cache.hit(job), self.rules.block_size
        for block in hit:
            self.cache.hold(block)
        done = len(hit) * size
        blocks = hit + self.cache.take(-(-(done + chunk) // size) - len(hit))
        row = Row(job, blocks, len(job.tokens), done, done + chunk, self._most_blocks(job))
        self.rows.append(row)
        self._reads(row)
        return row

    def _continue_chunk(self, now: Happened) -> None:
        row = self._partial()
        if row is not None:
            tokens, blocks = self._next_chunk()
            row.blocks += self.cache.take(blocks)
            row.done, row.end = row.end, row.end + tokens
            self._reads(row)
            now.chunk = (row.job.number, row.done, row.end)

    # -- when blocks run out

    def _make_room(self, now: Happened) -> None:
        paused = [row for row in self.rows if row.is_paused]
        needing = [row for row in self._active() if row.decodes and self._needs_block(row)]
        wanted = len(paused) + len(needing) + self._next_chunk()[1]
        if not paused and wanted <= self.cache.free:
            return
        back: list[Row] = []
        partial = self._partial()
        if partial is not None and wanted > self.cache.free:
            self._send_back(partial, back)
        standing = paused + needing
        num_running = len(self._active()) - len(needing) - len(back)
        going_on: list[Row] = []
        while True:
            while standing and len(going_on) < self.cache.free:
                going_on.append(standing.pop())
            held = {id(block) for row in standing for block in row.blocks}
            if not standing or (len(held) <= self.rules.paused_blocks and num_running + len(going_on) > 0):
                break
            self._send_back(standing.pop(), back)
        now.paused = [row.job.number for row in needing if row in standing]
        now.resumed = [row.job.number for row in paused if row in going_on]
        now.evicted = [row.job.number for row in back]
        for row in paused + needing:
            row.is_paused = row in standing
        left = [row for row in self.rows if row not in back and row not in standing]
        self.rows = standing + left
        self.waiting = sorted([*self.waiting, *(row.job for row in back)], key=lambda job: job.number)

    def _send_back(self, row: Row, back: list[Row]) -> None:
        self.cache.name(row, len(row.job.tokens) - 1 if row.decodes else row.cached)
        self.cache.release(row.blocks)
        back.append(row)
