"""Log-probabilities: of chosen tokens, of the n most likely, of prompt tokens; and the rows the caller sees.

Letters: n or L logits rows, V vocabulary, N top entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def token_logprobs(scores_NV: Tensor, ids_N: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax at the given ids and at the ``num`` highest scores. Enqueues work only.

    Args:
        scores_NV: [n, V], floating point, only read; half precision is widened to float32.
        ids_N: [n] int64 within [0, V).
        num: Top entries wanted, 0 or more; more than V gives V.

    Returns:
        Chosen [n] float32; top ids [n, min(num, V)] int64 and their values, float32, by falling score and,
        among equal scores, by rising id. A row with NaN or +inf gives NaN values and some ids.
    """
    if scores_NV.dtype not in (torch.float32, torch.float64):
        scores_NV = scores_NV.to(torch.float32)
    logprobs_NV = scores_NV.log_softmax(-1)
    chosen_N = logprobs_NV.gather(1, ids_N[:, None])[:, 0]
    top_ids = top_ids_of(scores_NV, min(num, scores_NV.shape[1]))
    return chosen_N.float(), top_ids, logprobs_NV.gather(1, top_ids).float()


def top_ids_of(scores_NV: Tensor, num: int) -> Tensor:
    """Ids of the ``num`` highest scores, [n, num] int64, by falling score, then rising id.

    ``torch.topk`` leaves open which of several equal scores it takes, so only its values are used here.
    """
    num_rows, vocab_size = scores_NV.shape
    if num == 0:
        return torch.empty(num_rows, 0, dtype=torch.int64, device=scores_NV.device)
    leading = scores_NV.topk(num).values
    border_N1 = leading[:, -1:]
    is_tied_NV = scores_NV == border_N1
    room_N1 = num - (leading > border_N1).sum(-1, keepdim=True)
    keep_NV = (scores_NV > border_N1) | (is_tied_NV & (is_tied_NV.to(torch.int32).cumsum(-1) <= room_N1))
    # Exactly num are kept: their ids from low to high, then stably by score.
    distance_V = torch.arange(vocab_size, 0, -1, device=scores_NV.device)
    ids = vocab_size - torch.where(keep_NV, distance_V, 0).topk(num).values
    ids = ids.clamp(max=vocab_size - 1)  # a row with NaN keeps fewer
    order = scores_NV.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)


def prompt_logprobs(logits_LV: Tensor, targets_L: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of prompt tokens, always raw.

    Args:
        logits_LV: [L, V], row l being the model's logits after prompt token l.
        targets_L: [L] int64, prompt token l + 1.
        num: Top entries a token.

    Returns:
        As :func:`token_logprobs`: chosen_L, top_ids_LN, top_values_LN. The first prompt token has none: the
        caller puts one leading None before them.
    """
    return token_logprobs(logits_LV, targets_L, num)


def logprob_row(
    token_id: int, chosen: float, top_ids: Sequence[int], top_values: Sequence[float], num: int
) -> dict[int, float]:
    """One row as the caller sees it: the chosen id first, then the ``num`` most likely from high to low.

    Args:
        token_id: The chosen id; stays first also where it is among the most likely.
        chosen: Its log-probability.
        top_ids: At least min(num, V) ids from high to low, as the batch's largest wish had them.
        top_values: Their log-probabilities; -inf stays a float (see :func:`finite_or_none`).
        num: What this request asked for.
    """
    row = {int(token_id): float(chosen)}
    for top_id, value in zip(top_ids[:num], top_values[:num], strict=True):
        row.setdefault(int(top_id), float(value))
    return row


def finite_or_none(value: float) -> float | None:
    """``value`` as JSON can hold it: None for NaN and the infinities."""
    return value if math.isfinite(value) else None
