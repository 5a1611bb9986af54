"""A sampler for one row in plain numpy and float64, written from the documented order, not from the engine's code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.request import SamplingParams
from engine.sampling import SamplingRows
from engine.sampling.rng import DrawKind, to_int64, uniform_host


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a call: what a request is and where it stands."""

    params: SamplingParams
    seed: int = 0
    position: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    eos: Sequence[int] = ()

    @property
    def ending_ids(self) -> list[int]:
        eos = [] if self.params.ignore_eos else list(self.eos)
        return [*eos, *(self.params.stop_token_ids or ())]


def make_rows(rows: Sequence[Row], vocab_size: int, *, with_lists: bool = True) -> SamplingRows:
    """Device columns for these rows; ``with_lists=False`` leaves the optional tensors out."""

    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype)

    def padded(lists: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> torch.Tensor:
        width = max(1, *(len(x) for x in lists)) + 1
        return torch.tensor([[*x, *[fill] * (width - len(x))] for x in lists], dtype=dtype)

    params = [row.params for row in rows]
    biases = [dict(p.logit_bias or {}) for p in params]
    counts = torch.zeros(len(rows), vocab_size, dtype=torch.int32)
    mask = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for i, row in enumerate(rows):
        for token in row.output:
            counts[i, token] += 1
        mask[i, list(row.prompt)] = True
    return SamplingRows(
        temperature=column([p.temperature for p in params], torch.float32),
        top_k=column([p.top_k for p in params], torch.int64),
        top_p=column([p.top_p for p in params], torch.float32),
        min_p=column([p.min_p for p in params], torch.float32),
        seed=column([to_int64(row.seed) for row in rows], torch.int64),
        position=column([row.position for row in rows], torch.int64),
        min_tokens=column([p.min_tokens for p in params], torch.int64),
        presence=column([p.presence_penalty for p in params], torch.float32),
        frequency=column([p.frequency_penalty for p in params], torch.float32),
        repetition=column([p.repetition_penalty for p in params], torch.float32),
        stop_ids=padded([row.ending_ids for row in rows], vocab_size, torch.int64) if with_lists else None,
        bias_ids=padded([list(b) for b in biases], vocab_size, torch.int64) if with_lists else None,
        bias_values=padded([list(b.values()) for b in biases], 0.0, torch.float32) if with_lists else None,
        output_counts=counts if with_lists else None,
        prompt_mask=mask if with_lists else None,
    )


def adjusted(logits: np.ndarray, row: Row) -> np.ndarray:
    """Bias, penalties, ban; float64 [V]."""
    x = logits.astype(np.float64).copy()
    p = row.params
    for token, value in (p.logit_bias or {}).items():
        x[token] += np.float32(value)
    for token in set(row.prompt) | set(row.output):
        factor = float(np.float32(p.repetition_penalty))
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token in set(row.output):
        x[token] -= float(np.float32(p.presence_penalty))
        x[token] -= float(np.float32(p.frequency_penalty)) * list(row.output).count(token)
    if row.position < p.min_tokens:
        for token in row.ending_ids:
            x[token] = -np.inf
    return x


def kept_ids(x: np.ndarray, params: SamplingParams) -> list[int]:
    """Ids the filters leave, best first, for a random row whose adjusted logits are ``x``."""
    z = (x - x.max()) / float(np.float32(params.temperature))
    order = sorted((i for i in range(len(z)) if z[i] > -np.inf), key=lambda i: (-z[i], i))
    weight = np.exp(z)
    order = [i for i in order if weight[i] >= float(np.float32(params.min_p)) * (1 - 1e-9)]
    if params.top_k > 0:
        order = order[: params.top_k]
    total, before, kept = weight[order].sum(), 0.0, []
    for i in order:
        if params.top_p < 1.0 and kept and before >= float(np.float32(params.top_p)) * total:
            break
        kept.append(i)
        before += weight[i]
    return kept


def distribution(logits: np.ndarray, row: Row) -> np.ndarray:
    """Probability of each id, float64 [V]; one id has 1 for a greedy row."""
    x = adjusted(logits, row)
    probabilities = np.zeros(len(x))
    if row.params.is_greedy:
        probabilities[int(np.argmax(x))] = 1.0
        return probabilities
    kept = kept_ids(x, row.params)
    z = (x - x.max()) / float(np.float32(row.params.temperature))
    probabilities[kept] = np.exp(z[kept])
    return probabilities / probabilities.sum()


def token(logits: np.ndarray, row: Row) -> int:
    """The id that the documented draw gives."""
    probabilities = distribution(logits, row)
    u = uniform_host(row.seed, row.position, DrawKind.TARGET)
    reached = 0.0
    for i, probability in enumerate(probabilities):
        reached += probability
        if reached > u and probability > 0:
            return i
    return int(np.flatnonzero(probabilities)[-1])


def chi_square_limit(freedom: int) -> float:
    """The value exceeded once in 100,000 draws, by Wilson and Hilferty's approximation."""
    spread = 2.0 / (9.0 * freedom)
    return freedom * (1.0 - spread + 4.265 * spread**0.5) ** 3
