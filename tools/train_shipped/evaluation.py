"""What a trained model is worth: bits a byte on held-out text, and how often its drafts are accepted.

A draft of head k for the token at p + 1 is accepted if the main model, having read the text up to p, finds the same
token likeliest. Letters: B sequences, T tokens.
"""

from __future__ import annotations

import bz2
import itertools
import lzma
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tools.train_shipped.mixers import Memory
from tools.train_shipped.model import ShippedModel
from tools.train_shipped.windows import encode


class Told(NamedTuple):
    """What a model tells of whole sequences, [B, T] on its device; position p tells of token p + 1."""

    nats: Tensor
    """Negative log-likelihood of the next token; the last position's is 0."""
    main: Tensor
    """Likeliest next token by the main model."""
    drafts: tuple[Tensor, ...]
    """By each head; -1 at positions that it lacks."""


@torch.no_grad()
def read(model: ShippedModel, tokens_BT: Tensor) -> Told:
    """One pass over whole sequences, in the model's dtype."""
    hidden = model(tokens_BT)
    logits_BTV = model.logits(hidden.main_BTE)
    drafts = [model.logits(draft).argmax(-1) for draft in hidden.drafts]
    log_BTV = logits_BTV.log_softmax(-1)
    nats = -log_BTV[:, :-1].gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)
    padded = [torch.nn.functional.pad(draft, (tokens_BT.shape[1] - draft.shape[1], 0), value=-1) for draft in drafts]
    return Told(torch.nn.functional.pad(nats, (0, 1)), logits_BTV.argmax(-1), tuple(padded))


class Accepted(NamedTuple):
    """Drafts tried and accepted, by place in the run."""

    tried: list[int]
    taken: list[int]

    def rates(self) -> list[float]:
        """Share accepted at each place, of the runs that came so far."""
        return [taken / max(1, tried) for tried, taken in zip(self.tried, self.taken, strict=True)]

    def tokens_a_step(self) -> float:
        """Mean tokens of a decode step that drafts with all heads."""
        return 1 + sum(taken / max(1, self.tried[0]) for taken in self.taken) if self.tried else 1.0


def count_accepted(told: Told, tokens_BT: Tensor, counts_BT: Tensor) -> Accepted:
    """Accepted drafts by place, of runs that begin at the positions where ``counts_BT`` is true.

    Place j is tried where all drafts before it were accepted and the text goes on as they say; on a model's own greedy
    text the second always holds.
    """
    tried, taken = [], []
    length = tokens_BT.shape[1]
    going = counts_BT.clone()
    for place, draft_BT in enumerate(told.drafts):
        # Head ``place`` stands ``place`` positions behind the run's beginning; positions before have shifted out.
        is_there = draft_BT[:, place:] >= 0
        is_right = draft_BT[:, place:] == told.main[:, place:]
        going = going[:, : length - place] & is_there
        tried.append(int(going.sum()))
        going = going & is_right
        taken.append(int(going.sum()))
        next_token = tokens_BT[:, place + 1 :]
        going = going[:, : next_token.shape[1]] & (draft_BT[:, place : length - 1] == next_token)
    return Accepted(tried, taken)


@torch.no_grad()
def generate(model: ShippedModel, prompts_BT: Tensor, count: int) -> Tensor:
    """Greedy continuations, [B, T + count], by single steps in the model's dtype."""
    memories: list[Memory] = []
    tokens = list(prompts_BT.unbind(1))
    for place in range(prompts_BT.shape[1] + count - 1):
        logits, memories = model.step(tokens[place], memories)
        if place + 1 == len(tokens):
            tokens.append(logits.argmax(-1))
    return torch.stack(tokens, dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All numbers of the model card."""

    held_out_bytes: int
    bits_a_byte: float
    bits_by_position: tuple[tuple[int, float], ...]
    """(first position of a range, bits a byte in it), of windows as long as the longest trained on."""
    compressors: dict[str, float]
    """Bits a byte of the same bytes."""
    on_text: Accepted
    on_own: Accepted
    own_is_varied: float
    """Share of the 24-byte strings in the model's own texts that occur once in their text; low: it goes in circles."""
    sample: str
    """The beginning of one of its own texts, after its prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOptions:
    """How much to measure."""

    max_bytes: int | None = None
    """Of held-out text; None: all."""
    window: int = 4096
    overlap: int = 3072
    """Tokens at a window's beginning that are only read, where the text before them was measured already."""
    num_texts: int = 64
    """Own texts."""
    prompt: int = 256
    new_tokens: int = 512


def measure(model: ShippedModel, held_out: Sequence[bytes], options: EvaluationOptions) -> Measured:
    """Measure a model in evaluation mode on its device."""
    contents = _first_bytes(held_out, options.max_bytes)
    text = b"".join(contents)
    tokens_N = encode(contents).long().to(model.lm_head.weight.device)
    window = min(options.window, len(tokens_N))
    nats, tried = 0.0, Accepted([0] * model.arch.num_draft_heads, [0] * model.arch.num_draft_heads)
    by_position = torch.zeros(2, window, dtype=torch.float64)
    for tokens_BT, counts_BT in _windows(tokens_N, window, min(options.overlap, 3 * window // 4)):
        told = read(model, tokens_BT)
        nats += float((told.nats * counts_BT).sum(dtype=torch.float64))
        tried = _add(tried, count_accepted(told, tokens_BT, counts_BT))
        by_position[0] += told.nats.sum(0, dtype=torch.float64).cpu()
        by_position[1] += len(tokens_BT)
    own, own_counts = _own_texts(model, tokens_N, options)
    return Measured(
        held_out_bytes=len(text),
        bits_a_byte=nats / math.log(2) / len(text),
        bits_by_position=_by_position(by_position),
        compressors={
            "xz -9": 8 * len(lzma.compress(text, preset=9)) / len(text),
            "xz -9e": 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text),
            "bzip2 -9": 8 * len(bz2.compress(text, 9)) / len(text),
        },
        on_text=tried,
        on_own=count_accepted(read(model, own), own, own_counts),
        own_is_varied=_varied(own[:, options.prompt :]),
        sample=bytes(token for token in own[0, : options.prompt + 256].tolist() if token < 256).decode(
            errors="replace"
        ),
    )


def _first_bytes(contents: Sequence[bytes], limit: int | None) -> list[bytes]:
    """The first files up to ``limit`` bytes, the last of them cut."""
    found, left = [], sum(map(len, contents)) if limit is None else limit
    for content in contents:
        if left > 0:
            found.append(content[:left])
            left -= len(content)
    return found


def _windows(tokens_N: Tensor, window: int, overlap: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of windows, and which of their positions count: each next token once, but the text's first separator."""
    last = len(tokens_N) - window
    starts = [*range(0, last, window - overlap), last]
    # Where each window's own part begins: behind what the one before has told.
    begins = [0] + [before + window - 1 - start for before, start in itertools.pairwise(starts)]
    start_N, begin_N = (torch.tensor(numbers, device=tokens_N.device) for numbers in (starts, begins))
    place_T = torch.arange(window, device=tokens_N.device)
    batch = 8 if tokens_N.is_cuda else 2
    for here_B, begin_B in zip(start_N.split(batch), begin_N.split(batch), strict=True):
        yield tokens_N[here_B[:, None] + place_T], (place_T >= begin_B[:, None]) & (place_T < window - 1)


def _add(one: Accepted, other: Accepted) -> Accepted:
    tried = [a + b for a, b in zip(one.tried, other.tried, strict=True)]
    return Accepted(tried, [a + b for a, b in zip(one.taken, other.taken, strict=True)])


def _by_position(sums: Tensor) -> tuple[tuple[int, float], ...]:
    """Means over ranges that double."""
    found, first = [], 0
    length = sums.shape[1] - 1
    while first < length:
        end = min(length, max(64, 2 * first))
        part = sums[:, first:end]
        found.append((first, float(part[0].sum() / part[1].sum()) / math.log(2)))
        first = end
    return tuple(found)


def _own_texts(model: ShippedModel, tokens_N: Tensor, options: EvaluationOptions) -> tuple[Tensor, Tensor]:
    """Greedy continuations of evenly spaced pieces of the text, and the positions that drafts begin at."""
    starts = torch.linspace(0, len(tokens_N) - options.prompt, options.num_texts, device=tokens_N.device).long()
    prompts = tokens_N[starts[:, None] + torch.arange(options.prompt, device=tokens_N.device)]
    own = generate(model, prompts, options.new_tokens)
    place = torch.arange(own.shape[1], device=own.device)
    counts = (place >= options.prompt) & (place < own.shape[1] - model.arch.num_draft_heads)
    return own, counts.expand(own.shape)


def _varied(texts_BT: Tensor, size: int = 24) -> float:
    if texts_BT.shape[1] <= size:
        return 1.0
    grams = texts_BT.cpu().unfold(1, size, 1)
    return sum(len(torch.unique(text, dim=0)) for text in grams) / (grams.shape[0] * grams.shape[1])
