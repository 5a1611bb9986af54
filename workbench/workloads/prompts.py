"""Prompts made from a seed: only their description is kept, token ids are made when asked for.

Traces tell lengths and, some of them, which prompts begin alike; none tells text. Twenty thousand such prompts are a
few megabytes as descriptions and a gigabyte as ids.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

FIRST_ORDINARY_ID = 3
"""Made prompts hold no lower id: unknown, begin and end of text stand there in most vocabularies, and a prompt with
such an id in its middle is no traffic. A model's further special ids are not known here and may come up."""


@dataclass(frozen=True, slots=True)
class SyntheticPrompt(Sequence[int]):
    """Token ids that follow from these fields alone, on every machine.

    Equal blocks are equal ids at equal seed and vocabulary, so prompts share what their leading blocks share; what
    follows the blocks belongs to one prompt. Every access makes the ids again: keep a tuple to look often.
    """

    length: int
    """Tokens; may end inside a block."""
    own: int
    """Names the ids that follow the blocks."""
    vocab_size: int
    seed: int = 0
    blocks: tuple[int | str, ...] = ()
    """Names of the stretches that the prompt begins with, as a trace's prefix hashes."""
    block_tokens: int = 512
    """Length of each."""

    def cut(self, length: int) -> SyntheticPrompt:
        """Its first ``length`` tokens."""
        return replace(self, length=min(length, self.length))

    def array(self) -> NDArray[np.int64]:
        """All ids, shape [length], int64."""
        parts, left = [], self.length
        for block in self.blocks:
            if left <= 0:
                break
            parts.append(self._stretch(f"block {block}", min(left, self.block_tokens)))
            left -= self.block_tokens
        if left > 0:
            parts.append(self._stretch(f"request {self.own}", left))
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _stretch(self, name: str, count: int) -> NDArray[np.int64]:
        """The first ``count`` ids of a stretch; a longer one begins with them."""
        low = FIRST_ORDINARY_ID if self.vocab_size > FIRST_ORDINARY_ID else 0
        # An extendable hash and not numpy's generators, whose integers may differ between numpy's versions.
        noise = hashlib.shake_128(f"{self.seed} {name}".encode()).digest(4 * count)
        draws = np.frombuffer(noise, "<u4").astype(np.uint64)
        ids = (draws * np.uint64(self.vocab_size - low)) >> np.uint64(32)
        return ids.astype(np.int64) + low

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        # One int object an id of the vocabulary, shared by all prompts: a tuple then costs 8 bytes a token, not 40.
        objects: list[int] = _id_objects(self.vocab_size)[self.array()].tolist()
        return iter(objects)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return tuple(self)[index]


@lru_cache(maxsize=4)
def _id_objects(vocab_size: int) -> NDArray[Any]:
    return np.arange(vocab_size).astype(object)
