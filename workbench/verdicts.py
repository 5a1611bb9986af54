"""Whether two runs gave the same tokens, and if not, whether rounding explains it.

A batch's composition changes a float32 matrix product in its last bits, so two schedules may part where the two best
tokens are nearly equal or a draw falls on a border. That is checked, not assumed: the position where they part is
computed again by itself, and its margin must be under a stated bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.loader import LoadedModel
from engine.phases import Phase
from engine.request import RequestOutput, SamplingParams

MARGIN_BOUND = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference of the two best scores' log-probabilities that rounding may turn round, by dtype: some
hundred roundings of a logit of size 10. In float64, and for models of integers, nothing is excused."""


class Verdict(Enum):
    """How the outputs of one request compare over all runs."""

    EQUAL = "equal"
    NUMERIC = "numeric"
    DIFFERENT = "DIFFERENT"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestVerdict:
    """One request against the first run."""

    index: int
    """Place in the workload."""
    request_id: str
    verdict: Verdict
    run: str | None = None
    """The run that parts from the first."""
    position: int | None = None
    """Output position where they part."""
    tokens: tuple[int | None, int | None] = (None, None)
    """What the first run and that one have there; None: it had ended."""
    margin: float | None = None
    """Difference of the two best log-probabilities there; for draws None."""
    explanation: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "index": self.index,
            "request_id": self.request_id,
            "verdict": self.verdict.value,
            "run": self.run,
            "position": self.position,
            "tokens": list(self.tokens),
            "margin": self.margin,
            "explanation": self.explanation,
        }


class Judge:
    """Compares requests; makes an engine to compute a position again when it first needs one.

    Args:
        loaded: The runs' model.
        config: A run's configuration; dtype, seed and limits are what matters.
        params: Sampling parameters of each request, seeds settled.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, params: Sequence[SamplingParams]) -> None:
        self._loaded = loaded
        self._config = config.replace(
            mode="legacy",
            device="cuda" if config.device == "cuda" else "inline",
            graphs=None,
            op_sleep_s=0.0,
            logprobs_mode="processed",
            debug_invariants=False,
        )
        self._params = params
        self._engine: Engine | None = None

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        if self._engine is not None:
            self._engine.close()

    def judge(self, index: int, first: RequestOutput, others: Sequence[tuple[str, RequestOutput]]) -> RequestVerdict:
        """The worst verdict of ``others`` (name and output) against ``first``."""
        verdicts = [self._pair(index, first, name, other) for name, other in others]
        equal = RequestVerdict(index=index, request_id=first.request_id, verdict=Verdict.EQUAL)
        return max([equal, *verdicts], key=lambda one: list(Verdict).index(one.verdict))

    def _pair(self, index: int, first: RequestOutput, name: str, other: RequestOutput) -> RequestVerdict:
        same_ids = first.token_ids == other.token_ids
        if same_ids and _ending(first) == _ending(other):
            return RequestVerdict(index=index, request_id=first.request_id, verdict=Verdict.EQUAL)
        position = _parting(first.token_ids, other.token_ids)
        tokens = (_token(first, position), _token(other, position))
        verdict, margin, explanation = Verdict.DIFFERENT, None, "the same ids, but another end"
        if not same_ids:
            verdict, margin, explanation = self._explain(index, first, position, tokens)
        return RequestVerdict(
            index=index,
            request_id=first.request_id,
            verdict=verdict,
            run=name,
            position=position,
            tokens=tokens,
            margin=margin,
            explanation=explanation,
        )

    def _explain(
        self, index: int, first: RequestOutput, position: int, tokens: tuple[int | None, int | None]
    ) -> tuple[Verdict, float | None, str]:
        left, right = tokens
        if left is None or right is None:
            return Verdict.DIFFERENT, None, "one of them ended earlier"
        engine = self._checking_engine()
        bound = MARGIN_BOUND.get(engine.resolved.dtype)
        if bound is None or self._loaded.architecture == "Oracle":
            return Verdict.DIFFERENT, None, "this model computes exactly, so rounding is no excuse"
        top, near_boundary = _recompute(engine, first, self._params[index], position)
        if self._params[index].is_greedy:
            margin = abs(top.get(left, float("-inf")) - top.get(right, float("-inf")))
            if margin <= bound:
                return Verdict.NUMERIC, margin, f"the two best tokens are {margin:.2g} apart, bound {bound:g}"
            return Verdict.DIFFERENT, margin if margin < float("inf") else None, f"above the bound of {bound:g}"
        if near_boundary:
            return Verdict.NUMERIC, None, "the draw falls within rounding of a border between tokens"
        return Verdict.DIFFERENT, None, "the draw is not near a border between tokens"

    def _checking_engine(self) -> Engine:
        if self._engine is None:
            self._engine = Engine(self._loaded, self._config)
        return self._engine


def _recompute(
    engine: Engine, output: RequestOutput, params: SamplingParams, position: int
) -> tuple[dict[int, float], bool]:
    """Sample one output position again, alone in its batch, as a recovery does: behind the tokens before it.

    Returns:
        The two best ids with their log-probabilities, and whether the sampler saw a border within rounding.
    """
    alone = params.replace(logprobs=2, prompt_logprobs=None, stop=None, max_tokens=max(params.max_tokens, position + 1))
    request_id = engine.add_request(output.prompt_token_ids, alone)
    request = engine.queue.waiting[-1]
    request.output_ids.extend(output.token_ids[:position])
    before = engine.counters.near_boundary
    while (border := engine.step_phase()) is not None and border.phase is not Phase.RESOLVE:
        pass
    near_boundary = engine.counters.near_boundary > before
    top = request.logprobs[-1] if request.logprobs else {}
    engine.abort(request_id)
    while engine.has_unfinished():
        engine.step()
    return top, near_boundary


def _ending(output: RequestOutput) -> tuple[str | None, str | int | None]:
    return output.finish_reason, output.stop_reason


def _parting(left: Sequence[int], right: Sequence[int]) -> int:
    """The first position where they are not the same."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _token(output: RequestOutput, position: int) -> int | None:
    return output.token_ids[position] if position < len(output.token_ids) else None
