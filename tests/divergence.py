"""Where two runs of a request part, and how near to a tie the model stands there by itself.

``workbench.verdicts`` looks at the two best tokens only. Of a vocabulary of 150,000, half precision often leaves three
within rounding, and gives a random draw a dozen tokens to fall on; here the model's whole distribution is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.loader import LoadedModel
from engine.request import RequestOutput, SamplingParams
from tests.oracle_reference import reference_uniform

Logits = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first position at which two outputs of one request differ."""

    index: int
    """The request's place in the workload."""
    position: int
    """Output tokens before it, which are the same."""
    tokens: tuple[int | None, int | None]
    """What the two runs have there; None: it had ended."""
    is_greedy: bool
    distance: float
    """How far rounding must have moved something for both tokens to be right; infinite where one run had ended.

    Greedy: how far the worse token's logit lies below the best. Else: by how much of all probability the random
    number misses the farther token's share of it.
    """

    def __str__(self) -> str:
        kind = "logit margin" if self.is_greedy else "draw distance"
        left, right = self.tokens
        return f"request {self.index} parts at output {self.position}: {left} or {right}, {kind} {self.distance:.2g}"


class Arbiter:
    """Has the model read a text alone, eagerly, in one forward, and keeps the logits behind it."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        assert isinstance(loaded.model, torch.nn.Module)
        self._engine = Engine(loaded, config.replace(mode="legacy", graphs=None, debug_invariants=False))
        self._seen: list[torch.Tensor] = []
        self._hook = loaded.model.register_forward_hook(self._keep)

    def _keep(self, model: torch.nn.Module, inputs: Any, logits: torch.Tensor) -> None:
        self._seen.append(logits)

    def __enter__(self) -> Arbiter:
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()
        self._engine.close()

    def logits_after(self, tokens: Sequence[int]) -> Logits:
        """float64 [V]: what the model says after reading ``tokens``."""
        self._seen.clear()
        self._engine.generate([list(tokens)], SamplingParams(max_tokens=1, temperature=0.0), progress=False)
        self._engine.device.synchronize()
        (logits,) = self._seen
        found: Logits = logits[0].double().cpu().numpy()
        return found

    def first_divergence(
        self, index: int, params: SamplingParams, left: RequestOutput, right: RequestOutput
    ) -> Divergence | None:
        """Compare two outputs of a request that uses a temperature and no filters or penalties; None: equal."""
        if (left.token_ids, left.finish_reason) == (right.token_ids, right.finish_reason):
            return None
        position = _parting(left.token_ids, right.token_ids)
        tokens = (_token(left, position), _token(right, position))
        distance = float("inf")
        if None not in tokens:
            logits = self.logits_after([*left.prompt_token_ids, *left.token_ids[:position]])
            distance = max(_distance(logits, params, position, token) for token in tokens if token is not None)
        return Divergence(index=index, position=position, tokens=tokens, is_greedy=params.is_greedy, distance=distance)


def _parting(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _token(output: RequestOutput, position: int) -> int | None:
    return output.token_ids[position] if position < len(output.token_ids) else None


def _distance(logits: Logits, params: SamplingParams, position: int, token: int) -> float:
    if params.is_greedy:
        return float(logits.max() - logits[token])
    assert params.seed is not None
    reached = np.cumsum(np.exp((logits - logits.max()) / params.temperature))
    reached /= reached[-1]
    number, low = reference_uniform(params.seed, position), reached[token - 1] if token else 0.0
    return float(max(low - number, number - reached[token], 0.0))
