"""Drives a model without an engine: block tables, batches of any mix, and greedy decoding, straight-line.

Blocks are handed out in shuffled order and the whole cache starts as NaN, so whatever is read without having been
written shows in the logits.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.batch import BatchShape, ForwardBatch
from engine.models.base import LayerCache, Model


@dataclass(eq=False)
class Text:
    """One sequence: its tokens so far, how many of them are cached, and the blocks it holds."""

    tokens: list[int]
    cached: int = 0
    blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """``count`` tokens of ``text`` after the cached ones, in one forward."""

    text: Text
    count: int

    @property
    def end(self) -> int:
        return self.text.cached + self.count


class ForwardDriver:
    """A model with its own cache pool. Block ``num_blocks`` is the dummy block."""

    def __init__(self, model: Model, *, num_blocks: int = 128, block_size: int = 16, seed: int = 0) -> None:
        self.model = model
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))
        random.Random(seed).shuffle(self.free)
        self.caches: list[LayerCache] = [
            tuple(
                torch.full((num_blocks + 1, block_size, *shape), float("nan"), dtype=dtype)
                for shape, dtype in zip(layer.shapes, layer.dtypes, strict=True)
            )
            for layer in model.cache_layout()
        ]

    def forward(self, texts: Sequence[Text], *, every: bool = False, chunk: int | None = None) -> list[Tensor]:
        """Run the tokens of ``texts`` that are not cached yet, at most ``chunk`` of each.

        Returns:
            For each text its logits, [1, V] of the last token that ran, or [count, V] with ``every``.
        """
        return self.forward_chunks(texts, [chunk or len(text.tokens) for text in texts], every=every)

    def forward_chunks(self, texts: Sequence[Text], most: Sequence[int], *, every: bool = False) -> list[Tensor]:
        """The same with at most ``most[i]`` tokens of each text."""
        parts = [Part(t, min(len(t.tokens) - t.cached, limit)) for t, limit in zip(texts, most, strict=True)]
        decode, prefill = split(parts)
        ordered = [*decode, *prefill]
        batch = self.batch(ordered, every=every)
        with torch.inference_mode():
            logits = self.model(batch, self.caches)
        found = dict(zip(map(id, ordered), logits.split([p.count if every else 1 for p in ordered]), strict=True))
        for part in parts:
            part.text.cached = part.end
        return [found[id(part)] for part in parts]

    def batch(self, parts: Sequence[Part], *, every: bool = False, shape: BatchShape | None = None) -> ForwardBatch:
        """The inputs for ``parts``, decode rows first; padded to ``shape`` if one is given."""
        for part in parts:
            while len(part.text.blocks) * self.block_size < part.end:
                part.text.blocks.append(self.free.pop())
        shape = shape or self.shape(parts)
        decode, prefill = split(parts)
        rows: list[Part | None] = [*decode, *[None] * (shape.num_decode - len(decode))]
        rows += [*prefill, *[None] * (shape.num_prefill - len(prefill))]
        return self._packed(rows, shape, every)

    def shape(self, parts: Sequence[Part]) -> BatchShape:
        """The tightest shape."""
        decode, prefill = split(parts)
        return BatchShape(
            num_tokens=sum(part.count for part in parts),
            num_decode=len(decode),
            num_prefill=len(prefill),
            max_query_len=max((part.count for part in prefill), default=0),
            num_kv_blocks=max(len(part.text.blocks) for part in parts),
        )

    def _packed(self, rows: Sequence[Part | None], shape: BatchShape, every: bool) -> ForwardBatch:
        dummy_slot = (self.num_blocks + 1) * self.block_size - 1  # not where padding rows look: that stays NaN
        ids, positions, row_of, slots, starts, lengths, kv_lens, wanted = ([] for _ in range(8))
        table = torch.full((shape.num_rows, shape.num_kv_blocks), self.num_blocks)
        for number, part in enumerate(rows):
            starts.append(len(ids))
            if part is None:
                count = 1 if number < shape.num_decode else 0
                places, blocks = [0] * count, [self.num_blocks]
                ids += [0] * count
            else:
                count, blocks = part.count, part.text.blocks
                places = list(range(part.text.cached, part.end))
                ids += part.text.tokens[part.text.cached : part.end]
                wanted += range(len(ids) - count, len(ids)) if every else [len(ids) - 1]
            positions += places
            slots += [
                dummy_slot if part is None else blocks[p // self.block_size] * self.block_size + p % self.block_size
                for p in places
            ]
            row_of += [number] * count
            lengths.append(count)
            kv_lens.append(1 if part is None else part.end)
            table[number, : len(blocks)] = torch.tensor(blocks)
        padding = shape.num_tokens - len(ids)
        return ForwardBatch(
            token_ids_T=torch.tensor(ids + [0] * padding),
            positions_T=torch.tensor(positions + [0] * padding),
            row_T=torch.tensor(row_of + [shape.num_rows - 1] * padding),
            slots_T=torch.tensor(slots + [dummy_slot] * padding),
            block_table_NK=table,
            query_start_N=torch.tensor(starts),
            query_len_N=torch.tensor(lengths),
            kv_len_N=torch.tensor(kv_lens),
            logits_idx_L=torch.tensor(wanted),
            shape=shape,
        )


def split(parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """Decode rows (one token over something cached) and prefill rows."""
    decode = [part for part in parts if part.count == 1 and part.text.cached]
    return decode, [part for part in parts if part not in decode]


def greedy(driver: ForwardDriver, prompts: Sequence[Sequence[int]], count: int, *, stagger: int = 0) -> list[list[int]]:
    """``count`` tokens after each prompt; with ``stagger``, each prompt joins that many steps after the one before.

    So prompts are read in the same forwards in which earlier ones decode.
    """
    texts = [Text(list(prompt)) for prompt in prompts]
    starts = [number * stagger for number in range(len(texts))]
    for step in range(starts[-1] + count):
        running = [t for t, start in zip(texts, starts, strict=True) if start <= step < start + count]
        for text, logits in zip(running, driver.forward(running), strict=True):
            text.tokens.append(int(logits[-1].argmax()))
    return [text.tokens[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
