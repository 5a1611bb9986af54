"""What one request must answer on the oracle model, worked out alone and straight ahead.

Written from the oracle's and the sampler's documents in plain numpy and Python: no code of the engine is called.
Logits, biases and penalties used with it are multiples of 2**-13, so that greedy choices are exact in float32 and
float64 alike; of a random draw that falls within ``NEAR`` of a border between two tokens either side is taken for
right, and such draws are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.request import SamplingParams

VOCAB = 64
EOS = VOCAB - 1
NEAR = 1e-5
"""Share of the total weight by which float32 may move a border between two tokens."""
PIECES = [*"abcdefghijklmnopqrstuvwxyz", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ", "ab", "cd", "xyz", " ", "\n", "é"]
PIECES += [f"<{i}>" for i in range(VOCAB - len(PIECES))]
"""The text of each id."""

_I64 = np.int64
_LOW_31 = (1 << 31) - 1
_LOW_64 = (1 << 64) - 1


def _scramble(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        for _ in range(2):
            x = (x ^ ((x >> 16) & _LOW_31)) * _I64(73244475)
    return (x ^ ((x >> 16) & _LOW_31)) & _LOW_31


def reference_logits(tokens: Sequence[int], first: int = 0) -> np.ndarray:
    """float64 [len(tokens) - first, VOCAB]: row i is what the oracle says after reading ``tokens[: first + i + 1]``."""
    with np.errstate(over="ignore"):
        place = np.arange(len(tokens), dtype=_I64)
        entry = np.asarray(tokens, dtype=_I64) * _I64(2654435761) + place * _I64(40503) + 1
        read = np.cumsum(_scramble(_scramble(entry) + place * _I64(2246822519)))[first:]
        vocab = np.arange(VOCAB, dtype=_I64) * _I64(3266489917)
        mixed = _scramble(_scramble(read)[:, None] + vocab)
    return (mixed % 65536) * (8.0 / 65536)


def reference_uniform(seed: int, position: int) -> float:
    """splitmix64 from a state hashed of (seed, kind 1); the top 53 bits of draw number ``position``."""
    golden = 0x9E3779B97F4A7C15

    def finalise(z: int) -> int:
        z &= _LOW_64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _LOW_64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _LOW_64
        return z ^ (z >> 31)

    return (finalise(finalise(seed + golden) + (position + 1) * golden) >> 11) * 2.0**-53


def ending_ids(params: SamplingParams) -> set[int]:
    """Every id that ends the request."""
    return set(params.stop_token_ids or ()) | (set() if params.ignore_eos else {EOS})


def _adjust(logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    x = logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    if params.repetition_penalty != 1.0:
        seen = list({*prompt, *output})
        x[seen] = np.where(x[seen] > 0, x[seen] / params.repetition_penalty, x[seen] * params.repetition_penalty)
    if output and (params.presence_penalty or params.frequency_penalty):
        made, counts = np.unique(np.asarray(output), return_counts=True)
        x[made] -= params.presence_penalty + params.frequency_penalty * counts
    if len(output) < params.min_tokens:
        x[list(ending_ids(params))] = -np.inf
    return x


def _filtered(x: np.ndarray, params: SamplingParams, nudge: float) -> np.ndarray:
    """Weights of the ids that min_p, top_k and top_p leave, in this order; ``nudge`` moves their borders."""
    weights = np.exp((x - x.max()) / float(np.float32(params.temperature)))
    if params.top_k <= 0 and not _has_borders(params):
        return weights
    order = np.argsort(-x, kind="stable")
    order = order[weights[order] > 0]
    order = order[weights[order] >= float(np.float32(params.min_p)) * (1 + nudge)]
    order = order[: params.top_k] if params.top_k > 0 else order
    if params.top_p < 1.0:
        reached = np.cumsum(weights[order])
        wanted = float(np.float32(params.top_p)) * reached[-1] * (1 + nudge)
        order = order[: int(np.searchsorted(reached, wanted)) + 1]
    kept = np.zeros_like(weights)
    kept[order] = weights[order]
    return kept


def _has_borders(params: SamplingParams) -> bool:
    """Whether some filter compares weights, so that rounding may decide who passes."""
    return params.min_p > 0.0 or params.top_p < 1.0


def reference_tokens(
    logits: np.ndarray, params: SamplingParams, seed: int, prompt: Sequence[int], output: Sequence[int]
) -> list[int]:
    """The right next token, first; more follow where rounding may decide between them."""
    x = _adjust(logits, params, prompt, output)
    if params.is_greedy:
        return [int(np.argmax(x))]
    u, found = reference_uniform(seed, len(output)), []
    for nudge in (0.0, NEAR, -NEAR) if _has_borders(params) else (0.0,):
        reached = np.cumsum(_filtered(x, params, nudge))
        shifts = (0.0, -NEAR, NEAR) if nudge == 0.0 else (0.0,)
        targets = [min(max(u + shift, 0.0), 1.0 - 2**-53) * reached[-1] for shift in shifts]
        found += np.searchsorted(reached, targets, side="right").tolist()
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Expected:
    """What one request must answer, whatever else runs."""

    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[dict[int, float], ...]
    text: str
    num_near: int
    """Draws so near to a border that the engine's own token was followed."""


def expected_output(
    prompt: Sequence[int],
    params: SamplingParams,
    seed: int,
    *,
    max_length: int,
    follow: Sequence[int] = (),
    nan_every: int = 0,
    at_most: int | None = None,
) -> Expected:
    """Run one request alone, straight ahead.

    Args:
        prompt: Its token ids.
        params: Its parameters.
        seed: Its random stream.
        max_length: Longest prompt plus output.
        follow: The engine's answer; only where a draw is too near to a border its token is taken.
        nan_every: As :class:`FaultyOracle`.
        at_most: Tokens after which it was aborted; how it would have gone on is not worked out.
    """
    output: list[int] = []
    logprobs: list[dict[int, float]] = []
    num_near = 0
    budget = min(params.max_tokens, max_length - len(prompt))
    told = reference_logits([*prompt, *follow], len(prompt) - 1)  # right as long as the answer is
    while at_most is None or len(output) < at_most:
        is_told = len(output) < len(told) and output == list(follow[: len(output)])
        logits = (
            told[len(output)] if is_told else reference_logits([*prompt, *output], len(prompt) + len(output) - 1)[0]
        )
        if is_faulty(logits, nan_every):
            text = "".join(PIECES[i] for i in output) if params.detokenize else ""
            return Expected(tuple(output), "error", None, tuple(logprobs), text, num_near)
        choices = reference_tokens(logits, params, seed, prompt, output)
        num_near += len(choices) > 1
        engines = follow[len(output)] if len(output) < len(follow) else choices[0]
        output.append(engines if engines in choices else choices[0])
        logprobs.append(_logprob_row(logits, output[-1], params.logprobs))
        end = _end(output, params, budget)
        if end is not None:
            reason, stop, text = end
            return Expected(tuple(output), reason, stop, tuple(logprobs), text, num_near)
    return Expected(tuple(output), "abort", None, tuple(logprobs), "", num_near)


def _end(output: list[int], params: SamplingParams, budget: int) -> tuple[str, str | int | None, str] | None:
    """Stop strings come before stop ids where the text holds them, ids before length."""
    is_allowed = len(output) > params.min_tokens
    by_id = is_allowed and output[-1] in ending_ids(params)
    spoken = output if not by_id or params.include_stop_str_in_output else output[:-1]
    text = "".join(PIECES[i] for i in spoken) if params.detokenize else ""
    before = len("".join(PIECES[i] for i in output[:-1]))
    hits = [
        (at, stop)
        for stop in params.stop_strings
        for at in range(max(0, before - len(stop) + 1), len(text))
        if text.startswith(stop, at)
    ]
    if is_allowed and hits:
        at, stop = min(hits, key=lambda hit: (hit[0], -len(hit[1])))
        return "stop", stop, text[: at + len(stop)] if params.include_stop_str_in_output else text[:at]
    if by_id:
        explicit = output[-1] in (params.stop_token_ids or ())
        return "stop", output[-1] if explicit else None, text
    return ("length", None, text) if len(output) >= budget else None


def _logprob_row(logits: np.ndarray, token: int, count: int | None) -> dict[int, float]:
    if count is None:
        return {}
    values = logits - logits.max()
    values = values - np.log(np.exp(values).sum())
    top = np.argsort(-logits, kind="stable")[:count].tolist()
    return {i: float(values[i]) for i in dict.fromkeys([token, *top])}


def is_faulty(logits: np.ndarray, nan_every: int) -> bool:
    """Whether a :class:`FaultyOracle` says NaN here."""
    return bool(nan_every) and int(logits[0] * 8192) % nan_every == 1


def expected_prompt_logprobs(prompt: Sequence[int], count: int, nan_every: int = 0) -> list[dict[int, float] | None]:
    """None for the first token, a row for each other; None too where the model says NaN."""
    logits = reference_logits(prompt)
    rows = [
        None if is_faulty(logits[i], nan_every) else _logprob_row(logits[i], token, count)
        for i, token in enumerate(prompt[1:])
    ]
    return [None, *rows]
