"""Filters and the draw, on integer weights so that every sum is exact.

A score becomes a weight of ``WEIGHT_BITS`` fractional bits. Sums of integers do not depend on their order,
so the running sum, and with it the token, is the same for any batch, device or scan algorithm; and a
histogram built by atomic adds is deterministic. What a weight rounds away is below 2.3e-13 of the most
likely token's. Nothing here branches on a value or asks one of the device.

Letters: n rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

WEIGHT_BITS = 42
MAX_VOCAB = 1 << (62 - WEIGHT_BITS)
"""Largest vocabulary whose weights cannot overflow an int64 sum."""
_WEIGHT_ONE = 2.0**WEIGHT_BITS
_DIGIT_BITS = 11
_NUM_BINS = 1 << _DIGIT_BITS
SHORT_TOP_K = 1024
"""Up to here ``torch.topk`` finds the k-th score faster than a histogram does."""


class Candidates(NamedTuple):
    """What is left of a row while filters are applied; each filter returns a new one."""

    scores_NV: Tensor
    """(logits - highest) / temperature, float32 or float64, at most 0."""
    keys_NV: Tensor
    """int32 or int64 as wide as the scores, ascending where they descend; equal scores have equal keys."""
    weights_NV: Tensor
    """int64, exp(score) in fixed point; 0 where filtered out."""
    kept_NV: Tensor | None
    """bool, what the filters left; None: all."""
    slack_N: Tensor
    """[n] float64, weight that rounding could move over a filter's border."""

    def filtered_scores(self) -> Tensor:
        """The scores, -inf where a filter dropped the id."""
        return self.scores_NV if self.kept_NV is None else torch.where(self.kept_NV, self.scores_NV, -torch.inf)


class Borders(Protocol):
    """Finds the key of the last candidate that a filter keeps, [n, 1] of the keys' dtype; None: not here."""

    def top_k(self, left: Candidates, top_k_N: Tensor) -> Tensor | None:
        """Of the ``top_k`` (int64 [n]; 0: off) most likely."""
        ...

    def top_p(self, left: Candidates, top_p_N: Tensor) -> Tensor | None:
        """Of the fewest whose share of what is left reaches ``top_p`` (float32 [n]; 1: off)."""
        ...


class NoBorders:
    """Leaves it to the reference."""

    def top_k(self, left: Candidates, top_k_N: Tensor) -> Tensor | None:
        """None."""
        return None

    def top_p(self, left: Candidates, top_p_N: Tensor) -> Tensor | None:
        """None."""
        return None


NO_BORDERS: Borders = NoBorders()


def make_candidates(scores_NV: Tensor) -> Candidates:
    """Candidates with nothing filtered; ``scores_NV`` is [n, V], float32 or float64, at most 0."""
    num_rows, vocab_size = scores_NV.shape
    assert vocab_size <= MAX_VOCAB, f"vocabulary of {vocab_size} exceeds {MAX_VOCAB}"
    weights_NV = (scores_NV.exp() * _WEIGHT_ONE).to(torch.int64)
    slack_N = torch.zeros(num_rows, dtype=torch.float64, device=scores_NV.device)
    return Candidates(scores_NV, _keys_of(scores_NV), weights_NV, None, slack_N)


def _keys_of(scores: Tensor) -> Tensor:
    """The bits of a positive float are in the order of its value, and scores are at most 0."""
    return scores.abs().view(torch.int64 if scores.dtype == torch.float64 else torch.int32)


def _drop(left: Candidates, keep_NV: Tensor, slack_N: Tensor) -> Candidates:
    kept_NV = keep_NV if left.kept_NV is None else left.kept_NV & keep_NV
    # Masks multiply here and below: torch.where branches on every entry and is seven times slower on a CPU.
    return left._replace(weights_NV=left.weights_NV * keep_NV, kept_NV=kept_NV, slack_N=left.slack_N + slack_N)


def apply_min_p(left: Candidates, min_p_N: Tensor, tolerance: float) -> Candidates:
    """Drop tokens less likely than ``min_p`` (float32 [n]; 0: off) times the most likely one."""
    floor_N1 = min_p_N.to(left.scores_NV.dtype).log()[:, None]
    at_border_NV = (left.scores_NV - floor_N1).abs() <= tolerance
    slack_N = (left.weights_NV * at_border_NV).sum(-1)
    return _drop(left, left.scores_NV >= floor_N1, slack_N)


def apply_top_k(
    left: Candidates, top_k_N: Tensor, max_top_k: int, tolerance: float, border_N1: Tensor | None = None
) -> Candidates:
    """Keep exactly the ``top_k`` (int64 [n]; 0: off) most likely tokens, the lowest ids among equals.

    ``border_N1`` is the key of the k-th where a kernel has found it already; anything in rows without top_k.
    """
    vocab_size = left.scores_NV.shape[1]
    is_on_N1 = ((top_k_N > 0) & (top_k_N < vocab_size))[:, None]
    bound_N1 = top_k_N.clamp(1, min(max_top_k, vocab_size))[:, None]
    if border_N1 is not None:
        before_N1 = (left.keys_NV < border_N1).sum(-1, keepdim=True)
    elif max_top_k <= SHORT_TOP_K:
        leading = _keys_of(left.scores_NV.topk(min(max_top_k, vocab_size)).values)
        border_N1 = leading.gather(1, bound_N1 - 1)
        before_N1 = (leading < border_N1).sum(-1, keepdim=True)
    else:
        border_N1, before_N1 = _find_border(left.keys_NV, torch.ones_like(left.weights_NV), bound_N1)
    is_tied_NV = left.keys_NV == border_N1
    tied_NV = is_tied_NV.to(torch.int64)
    keep_NV = (left.keys_NV < border_N1) | (is_tied_NV & _fits(tied_NV, bound_N1 - before_N1)) | ~is_on_N1
    num_rivals_N, last_N = _rivals_at(left, keep_NV, border_N1, tolerance)
    return _drop(left, keep_NV, last_N * num_rivals_N * is_on_N1[:, 0])


def apply_top_p(left: Candidates, top_p_N: Tensor, tolerance: float, border_N1: Tensor | None = None) -> Candidates:
    """Keep the fewest most likely tokens whose share of what is left reaches ``top_p`` (float32 [n]; 1: off).

    ``border_N1`` is the key of the last kept where a kernel has found it already; anything in rows without top_p.
    """
    is_on_N = top_p_N < 1.0
    total_N = left.weights_NV.sum(-1)
    # At least 1, as a tiny p keeps one token; at most the total, as a rounded-up bound would never be reached.
    bound_N = (top_p_N.to(torch.float64) * total_N).ceil().to(torch.int64).clamp(min=1).minimum(total_N)
    if border_N1 is None:
        border_N1, before_N1 = _find_border(left.keys_NV, left.weights_NV, bound_N[:, None])
    else:
        before_N1 = (left.weights_NV * (left.keys_NV < border_N1)).sum(-1, keepdim=True)
    is_tied_NV = left.keys_NV == border_N1
    tied_NV = left.weights_NV * is_tied_NV
    keep_NV = (left.keys_NV < border_N1) | (is_tied_NV & _fits(tied_NV, bound_N[:, None] - before_N1))
    num_rivals_N, last_N = _rivals_at(left, keep_NV, border_N1, tolerance)
    kept = _drop(left, keep_NV | ~is_on_N[:, None], torch.zeros_like(left.slack_N))
    over_N = kept.weights_NV.sum(-1) - bound_N  # by this much the last one kept reaches p
    is_tight_N = torch.minimum(over_N, last_N - over_N) <= tolerance * total_N + left.slack_N
    return kept._replace(slack_N=left.slack_N + last_N * (num_rivals_N + is_tight_N) * is_on_N)


def _find_border(keys_NV: Tensor, weights_NV: Tensor, bound_N1: Tensor) -> tuple[Tensor, Tensor]:
    """The key at which weights, summed from the smallest key up, reach ``bound``; and the sum below that key.

    A radix search: each round puts the entries that share the digits found so far into bins by their next
    digit. Three rounds (float32) or six (float64) over the row, where a sort would take six times as long.
    """
    key_bits = 63 if keys_NV.dtype == torch.int64 else 31
    found_N1, before_N1 = torch.zeros_like(bound_N1), torch.zeros_like(bound_N1)
    open_NV = weights_NV
    for shift in range((key_bits - 1) // _DIGIT_BITS * _DIGIT_BITS, -1, -_DIGIT_BITS):
        prefixes_NV = keys_NV >> shift
        bins = weights_NV.new_zeros(keys_NV.shape[0], _NUM_BINS)
        bins = bins.scatter_add(1, (prefixes_NV & (_NUM_BINS - 1)).to(torch.int64), open_NV)
        reached = bins.cumsum(-1)
        digit_N1 = torch.searchsorted(reached, bound_N1 - before_N1).clamp(max=_NUM_BINS - 1)
        before_N1 = before_N1 + reached.gather(1, digit_N1) - bins.gather(1, digit_N1)
        found_N1 = (found_N1 << _DIGIT_BITS) | digit_N1
        open_NV = weights_NV * (prefixes_NV == found_N1.to(keys_NV.dtype))
    return found_N1.to(keys_NV.dtype), before_N1


def _fits(tied_NV: Tensor, room_N1: Tensor) -> Tensor:
    """Whether the entries before this one leave some of ``room``; among equal scores this keeps the lowest ids."""
    return tied_NV.cumsum(-1) - tied_NV < room_N1


def _rivals_at(left: Candidates, keep_NV: Tensor, border_N1: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """How many kept ids could change places with dropped ones of a score within ``tolerance`` of the last kept.

    Returns:
        That number, [n] int64, and the weight of the last kept id, [n] float64.
    """
    last_N1 = -border_N1.view(left.scores_NV.dtype)
    num_kept_N = keep_NV.sum(-1)
    num_sure_N = (left.scores_NV > last_N1 + tolerance).sum(-1)
    num_possible_N = (left.scores_NV >= last_N1 - tolerance).sum(-1)
    num_rivals_N = torch.minimum(num_kept_N - num_sure_N, num_possible_N - num_kept_N)
    return num_rivals_N, last_N1[:, 0].to(torch.float64).exp() * _WEIGHT_ONE


def draw(left: Candidates, uniform_N: Tensor, tolerance: float) -> tuple[Tensor, Tensor]:
    """Inverse of the distribution function in vocabulary order.

    Args:
        left: What the filters left.
        uniform_N: [n] float64 in [0, 1).
        tolerance: Share of the total by which a border between two tokens may be off.

    Returns:
        Token ids, [n] int64, never one of weight 0 (garbage within [0, V) for rows without any weight); and
        whether a border between tokens lies within ``tolerance`` plus the filters' slack, [n] bool.
    """
    reached_NV = left.weights_NV.cumsum(-1)
    total_N1 = reached_NV[:, -1:]
    # Below the total also for the largest u, 1 - 2**-53: there the product rounds to a whole ulp less.
    target_N1 = (uniform_N[:, None] * total_N1).to(torch.int64)
    token_N1 = torch.searchsorted(reached_NV, target_N1, right=True).clamp(max=reached_NV.shape[1] - 1)
    upper_N1 = reached_NV.gather(1, token_N1)
    lower_N1 = upper_N1 - left.weights_NV.gather(1, token_N1)
    slack_N1 = left.slack_N[:, None]
    margin_N1 = tolerance * total_N1 + slack_N1
    # 0 and the total are no borders between tokens, unless a filter might have let another one in there.
    is_near_N1 = ((target_N1 - lower_N1 <= margin_N1) & ((lower_N1 > 0) | (slack_N1 > 0))) | (
        (upper_N1 - target_N1 <= margin_N1) & ((upper_N1 < total_N1) | (slack_N1 > 0))
    )
    return token_N1[:, 0], is_near_N1[:, 0]
