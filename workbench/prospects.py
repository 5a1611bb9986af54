"""What the next admit would make of each waiting request; asking changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.admission import Capacity, Entry, Refusal, blocks_for, consider
from engine.batch import BatchDimensions
from engine.cache.prefix import Digest
from engine.engine import Engine
from engine.prefix_cache import NO_HIT, Hit
from engine.request import Request


@dataclass(frozen=True, slots=True)
class Prospect:
    """A waiting request as admission sees it."""

    request: Request
    capacity: Capacity
    """What those before it leave."""
    hit: Hit = NO_HIT
    found: Entry | Refusal | None = None
    """None: admission does not look at it, for it was aborted or ``behind`` has to wait."""
    behind: Request | None = None

    @property
    def skipped(self) -> int:
        """Tokens of its prefix that are cached."""
        return self.hit.block_ids.size * self.capacity.block_size

    @property
    def remaining(self) -> int:
        """Tokens it has to read."""
        return self.request.num_tokens - self.skipped


def prospects(engine: Engine, most: int | None = None) -> Iterator[Prospect]:
    """Of the first ``most`` waiting requests, in order of arrival; None: of all.

    First in, first out, the first that has to wait holds up all behind it, but for one whose prefix is being computed.
    Under another admission policy, which is not asked, each is looked at as if it were its turn.
    """
    queue = engine.queue
    capacity = queue.capacity()
    coming = _blocks_of_next_chunk(engine, capacity)
    head: Request | None = None
    num_aside = 0
    for request in queue.waiting[:most]:
        if request.abort_requested or head is not None:
            yield Prospect(request, capacity, behind=None if request.abort_requested else head)
            continue
        hit = queue.hit(request)
        found = consider(request, capacity, hit)
        if isinstance(found, Entry) and _is_coming(engine, request, hit, coming):
            found = Refusal.PREFIX_COMING
        yield Prospect(request, capacity, hit, found)
        if not queue.is_fifo:
            continue
        if isinstance(found, Entry):
            size = capacity.block_size
            coming.update(request.digests[found.done // size : found.end // size])
            capacity = capacity.after(found)
        elif found is Refusal.PREFIX_COMING:
            num_aside += 1  # admission sets so many aside, and no more
            head = request if num_aside > engine.table.max_requests else None
        else:
            head = request


def next_block(engine: Engine, request: Request, hit: Hit) -> Digest | None:
    """Name of the block behind its hit; None: nobody could compute that for it."""
    cache = engine.prefix_cache
    if cache is None or request.owes_prompt_logprobs:
        return None
    names = cache.skippable(request)
    return names[hit.block_ids.size] if hit.block_ids.size < len(names) else None


def _is_coming(engine: Engine, request: Request, hit: Hit, coming: set[Digest]) -> bool:
    """Whether the next block is computed by a row of this round, or by those that the next admit places before it."""
    cache, name = engine.prefix_cache, next_block(engine, request, hit)
    if cache is None or name is None:
        return False
    return name in coming or cache.is_coming(request, hit.block_ids.size)


def _blocks_of_next_chunk(engine: Engine, capacity: Capacity) -> set[Digest]:
    """Names of the blocks that the next chunk of a partial prompt fills: admission places it before all others."""
    table, row = engine.table, engine.table.partial_row
    reading = None if row is None else table.requests[row]
    if engine.prefix_cache is None or row is None or reading is None:
        return set()
    first = int(table.chunk_end[row])
    end = first + capacity.held.num_tokens - capacity.held.num_decode * engine.config.decode_width
    return {*reading.digests[first // capacity.block_size : end // capacity.block_size]}


def computing(engine: Engine, prospect: Prospect) -> str | None:
    """Who computes the next block of its prefix; None: nobody that is known."""
    name = next_block(engine, prospect.request, prospect.hit)
    place = prospect.hit.block_ids.size
    others = [*engine.table.live_requests(), *engine.queue.waiting]
    for other in others[: others.index(prospect.request)] if prospect.request in others else others:
        if place < len(other.digests) and other.digests[place] == name:
            return other.request_id
    return None


def awaited_graph(prospect: Prospect) -> BatchDimensions | None:
    """The captured forward that a request waits for; None: it waits for none, or for a forward of its own."""
    if prospect.found is not Refusal.GRAPH_WAIT or prospect.capacity.gate is None:
        return None
    return prospect.capacity.gate.alone(prospect.remaining).graph


def reason_text(engine: Engine, prospect: Prospect) -> str:
    """Why it waits, in a few words."""
    request, found, capacity = prospect.request, prospect.found, prospect.capacity
    if request.abort_requested:
        return "aborted; its last output comes with the next iteration"
    if prospect.behind is not None:
        return f"behind {prospect.behind.request_id}"
    if isinstance(found, Entry):
        return _entry_text(engine, found)
    if found is Refusal.BATCH_FULL and capacity.free_tokens > 0:
        return f"{found.value}: needs {prospect.remaining}, {capacity.free_tokens} left"
    if found is Refusal.NO_BLOCKS:
        needed, free, kind = blocks_needed(prospect), max(0, capacity.free_blocks), "not reserved"
        return f"{found.value}: needs {needed}, {free} {kind if capacity.reserves else 'free'}"
    if found is Refusal.GRAPH_WAIT:
        graph, steps = awaited_graph(prospect), request.graph_wait_steps
        waited = f"{steps} iteration{'' if steps == 1 else 's'}"
        wanted = f"needs {graph_name(graph)}" if graph is not None else "no graph holds it, so it reads by itself"
        return f"graph wait, {waited}: {wanted}"
    if found is Refusal.PREFIX_COMING:
        by = computing(engine, prospect)
        return found.value if by is None else f"{found.value} by {by}"
    return "" if found is None else found.value


def _entry_text(engine: Engine, entry: Entry) -> str:
    skips = f", {entry.done} of {entry.num_tokens} tokens skipped" if entry.done else ""
    if engine.queue.is_fifo:
        return f"the next admit takes it{skips}"
    return f"fits; the admission policy decides whose turn it is{skips}"


def blocks_needed(prospect: Prospect) -> int:
    """Blocks that it would take of the free ones, as :func:`engine.admission.consider` counts them."""
    request, capacity, hit = prospect.request, prospect.capacity, prospect.hit
    if capacity.reserves:
        return blocks_for(request, capacity.block_size)
    return -(-request.num_tokens // capacity.block_size) - hit.block_ids.size + hit.num_idle


def graph_name(dims: BatchDimensions) -> str:
    """A captured size in words."""
    return f"{dims.num_tokens} tokens, {dims.num_prefill} prefill, {dims.num_decode} decode"
