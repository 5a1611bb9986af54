"""Blocks whose keys and values are known by what they were computed from, so that equal prefixes are computed once.

A full block is named by the digest of all tokens up to its end: sha256 of the parent's digest and the block's own
tokens, so equal names mean equal prefixes, and a block's place in its sequence is part of its name. A *salt* stands
before the first block and keeps tenants apart. The blocks form a forest: a block's parent is the one before it.

Only the host's books, like :class:`engine.cache.blocks.BlockPool`: a block may be named once the forward that fills it
is launched, for whoever reads it is launched behind that.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from engine.cache.blocks import BlockIds

Digest = bytes
_TOKEN = np.dtype("<i8")


class EvictionPolicy(Enum):
    """What becomes of a named block that no row holds any more."""

    LRU = "lru"  # it stays until its place is needed; the least recently used leaf goes first
    REF_ZERO = "ref_zero"  # it is forgotten and free at once


def block_digests(
    token_ids: Sequence[int] | NDArray[np.int64], block_size: int, *, salt: str = "", known: Sequence[Digest] = ()
) -> list[Digest]:
    """One digest for each full block of a sequence.

    Args:
        token_ids: From the sequence's first token on.
        block_size: Tokens of a block.
        salt: Sequences of different salts have no digest in common.
        known: Digests of the first blocks, from an earlier call with the same salt; they are not made again.

    Returns:
        32 bytes each, ``len(token_ids) // block_size`` of them.
    """
    tokens = np.asarray(token_ids, dtype=_TOKEN)
    digests = list(known[: tokens.size // block_size])
    parent = digests[-1] if digests else root_digest(salt)
    for first in range(len(digests) * block_size, tokens.size - block_size + 1, block_size):
        parent = hashlib.sha256(parent + tokens[first : first + block_size].tobytes()).digest()
        digests.append(parent)
    return digests


def root_digest(salt: str) -> Digest:
    """The parent of first blocks."""
    return hashlib.sha256(b"root" + salt.encode()).digest()


@dataclass(slots=True)
class _Named:
    """A block with a name."""

    digest: Digest
    block: int
    parent: _Named | None
    children: set[int] = field(default_factory=set)
    """Blocks whose parent it is."""
    is_idle: bool = False
    """Nobody holds it."""
    used: int = 0
    """When it was last named, held or let go of; a count, not a time."""


class PrefixIndex:
    """Which block holds which prefix, and which of them nobody holds: those may be forgotten, leaves first.

    A block that somebody holds has holders for all blocks before it, so every idle block can be forgotten in time.
    """

    def __init__(self) -> None:
        self._by_digest: dict[Digest, _Named] = {}
        self._by_block: dict[int, _Named] = {}
        self._clock = 0
        self.version = 0
        """Changes whenever a block gets or loses a name; between changes every match stays as it is."""
        self._leaves: list[tuple[int, int]] = []
        """Heap of (when it was used last, block). Holds every idle leaf, and entries that are true no more."""
        self.num_idle = 0
        self.on_forget: Callable[[Digest], None] | None = None
        """Called with every name that is forgotten: what else was kept under it goes too."""

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block: int) -> bool:
        return block in self._by_block

    @property
    def idle(self) -> list[int]:
        """Those that nobody holds."""
        return [named.block for named in self._by_block.values() if named.is_idle]

    def knows(self, digest: Digest) -> bool:
        """Whether a block has this name."""
        return digest in self._by_digest

    def is_held(self, digest: Digest) -> bool:
        """Whether somebody holds the block of that name; one without a block is held by nobody."""
        named = self._by_digest.get(digest)
        return named is not None and not named.is_idle

    def match(self, digests: Sequence[Digest]) -> list[int]:
        """Blocks of the longest known prefix, first block first. Changes nothing (I19)."""
        found: list[int] = []
        for digest in digests:
            named = self._by_digest.get(digest)
            if named is None:
                break
            found.append(named.block)
        return found

    def name(self, digests: Sequence[Digest], block_ids: Sequence[int] | BlockIds) -> int:
        """Name the blocks of a sequence, first block first, up to where a prefix has another block already.

        Behind such a block none is named: nobody might hold it, and what follows it would keep it from being forgotten.

        Args:
            digests: Of the sequence's full blocks, from the first one on.
            block_ids: The blocks that hold them, as many; somebody holds each.

        Returns:
            How many got a name.

        Raises:
            ValueError: a block holds another prefix already; nothing has changed.
        """
        pairs = list(zip(digests, map(int, block_ids), strict=True))
        for digest, block in pairs:
            if digest not in self._by_digest and block in self._by_block:
                raise ValueError(f"block {block} holds another prefix already")
        self._clock += 1
        parent: _Named | None = None
        made = 0
        for digest, block in pairs:
            named = self._by_digest.get(digest)
            if named is not None and named.block != block:
                break
            if named is None:
                named = self._by_digest[digest] = self._by_block[block] = _Named(digest, block, parent)
                made += 1
                self.version += 1
                if parent is not None:
                    parent.children.add(block)
            named.used = self._clock
            parent = named
        return made

    def hold(self, blocks: Iterable[int]) -> None:
        """Somebody holds them from now on; those without a name are passed over."""
        self._clock += 1
        for named in self._named(blocks):
            self.num_idle -= named.is_idle
            named.is_idle, named.used = False, self._clock

    def let_go(self, blocks: Iterable[int]) -> None:
        """Nobody holds them any more; those without a name are passed over."""
        self._clock += 1
        for named in self._named(blocks):
            self.num_idle += not named.is_idle
            named.is_idle, named.used = True, self._clock
            if not named.children:
                heapq.heappush(self._leaves, (named.used, named.block))
        if len(self._leaves) > 2 * len(self._by_block) + 64:
            self._renew_leaves()

    def _renew_leaves(self) -> None:
        """Leave out entries that are true no more: else a prefix that is used again and again adds one each time."""
        idle = [named for named in self._by_block.values() if named.is_idle and not named.children]
        self._leaves = [(named.used, named.block) for named in idle]
        heapq.heapify(self._leaves)

    def evict(self, count: int) -> list[int] | None:
        """Forget ``count`` idle blocks, always one that no named block follows, the least recently used first (I16).

        Returns:
            The blocks, in the order they were forgotten; None if fewer are idle, with nothing changed.
        """
        if count > self.num_idle:
            return None
        gone: list[int] = []
        while len(gone) < count:
            used, block = heapq.heappop(self._leaves)
            named = self._by_block.get(block)
            if named is not None and named.is_idle and named.used == used and not named.children:
                self._forget(named)
                gone.append(block)
        return gone

    def forget_idle(self) -> list[int]:
        """Forget every block that nobody holds, leaves first; returns them."""
        gone = self.evict(self.num_idle)
        assert gone is not None
        return gone

    def disown(self, blocks: Iterable[int]) -> list[int]:
        """Forget blocks, held or not, and all that follow them; returns those of them that nobody held."""
        freed: list[int] = []
        pile = [named.block for named in self._named(blocks)]
        while pile:
            named = self._by_block.get(pile[-1])
            if named is None:
                pile.pop()
            elif named.children:
                pile.extend(named.children)
            else:
                pile.pop()
                if named.is_idle:
                    freed.append(named.block)
                self._forget(named)
        return freed

    def clear(self) -> None:
        """No block has a name."""
        if self.on_forget is not None:
            for digest in self._by_digest:
                self.on_forget(digest)
        self._by_digest.clear()
        self._by_block.clear()
        self._leaves.clear()
        self.version += 1
        self.num_idle = 0

    def _named(self, blocks: Iterable[int]) -> Iterator[_Named]:
        for block in blocks:
            named = self._by_block.get(int(block))
            if named is not None:
                yield named

    def _forget(self, named: _Named) -> None:
        del self._by_digest[named.digest], self._by_block[named.block]
        if self.on_forget is not None:
            self.on_forget(named.digest)
        self.version += 1
        self.num_idle -= named.is_idle
        parent = named.parent
        if parent is not None:
            parent.children.remove(named.block)
            if parent.is_idle and not parent.children:
                heapq.heappush(self._leaves, (parent.used, parent.block))

    def check(self) -> None:
        """The books agree (I15, I16).

        Raises:
            AssertionError: they do not; it says how.
        """
        assert len(self._by_digest) == len(self._by_block), "a prefix has two blocks, or a block two prefixes"
        children: dict[int, set[int]] = {}
        for digest, named in self._by_digest.items():
            assert named.digest == digest, "a prefix is filed under another"
            assert self._by_block.get(named.block) is named, f"block {named.block} is filed under another"
            parent = named.parent
            if parent is not None:
                assert self._by_digest.get(parent.digest) is parent, f"block {named.block} is an orphan"
                assert named.is_idle or not parent.is_idle, f"block {named.block} is held, its parent is idle"
                children.setdefault(parent.block, set()).add(named.block)
        for named in self._by_block.values():
            assert named.children == children.get(named.block, set()), f"block {named.block} has other children"
            if named.is_idle and not named.children:
                assert (named.used, named.block) in self._leaves, f"block {named.block} would never be forgotten"
        assert self.num_idle == len(self.idle), "idle blocks are counted wrong"
