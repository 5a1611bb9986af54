"""Whether two runs gave the same tokens, and if not, whether rounding explains it.

A batch's composition changes a matrix product in its last bits, so two schedules may part where tokens are nearly
equal or a draw falls near a border. That is checked, not assumed: the position where they part is computed again by
itself, and both tokens must be within what rounding moves there (:mod:`workbench.rounding`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from engine.config import EngineConfig
from engine.models.loader import LoadedModel
from engine.request import RequestOutput, SamplingParams
from workbench.arbiter import Arbiter
from workbench.logprob_deviation import Deviation, largest_deviation
from workbench.rounding import LOGIT_NOISE, LOGPROB_TOLERANCE, Miss


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
    dtype: str
    """What the runs computed in; tolerances depend on it."""
    run: str | None = None
    """The run that parts from the first."""
    position: int | None = None
    """Output position where they part."""
    tokens: tuple[int | None, int | None] = (None, None)
    """What the first run and that one have there; None: it had ended."""
    measure: str | None = None
    """What ``distance`` is: ``logit margin`` or ``draw distance``."""
    distance: float | None = None
    """Of the token that is harder to explain, from being chosen there; see :class:`workbench.rounding.Miss`."""
    tolerance: float | None = None
    """What rounding explains of it."""
    logprob_deviation: float | None = None
    """Largest difference of a log-probability before that; None: none were asked for."""
    explanation: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "verdict": self.verdict.value, "tokens": list(self.tokens)}

    def __str__(self) -> str:
        where = "" if self.position is None else f" parts at output position {self.position} ({self._tokens_text})"
        return f"{self.request_id} in {self.run}{where}: {self.explanation}"

    @property
    def _tokens_text(self) -> str:
        left, right = ("its end" if token is None else str(token) for token in self.tokens)
        return f"{left} or {right}"


class Judge:
    """Compares requests; makes an engine to compute a position again when it first needs one.

    Args:
        loaded: The runs' model.
        config: A run's configuration, the dtype settled.
        params: Sampling parameters of each request, seeds settled.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, params: Sequence[SamplingParams]) -> None:
        self._loaded = loaded
        self._config = config
        self._params = params
        self._arbiter: Arbiter | None = None
        is_of_integers = loaded.architecture == "Oracle"
        self._noise = 0.0 if is_of_integers else LOGIT_NOISE.get(config.dtype, 0.0)

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        if self._arbiter is not None:
            self._arbiter.close()

    def judge(self, index: int, first: RequestOutput, others: Sequence[tuple[str, RequestOutput]]) -> RequestVerdict:
        """The worst verdict of ``others`` (name and output) against ``first``."""
        verdicts = [self._pair(index, first, name, other) for name, other in others]
        return max(verdicts, key=_badness, default=self._equal(index, first))

    def _equal(self, index: int, first: RequestOutput) -> RequestVerdict:
        return RequestVerdict(index=index, request_id=first.request_id, verdict=Verdict.EQUAL, dtype=self._config.dtype)

    def _pair(self, index: int, first: RequestOutput, name: str, other: RequestOutput) -> RequestVerdict:
        position = _parting(first.token_ids, other.token_ids)
        are_filtered = self._config.logprobs_mode == "processed"
        deviation = largest_deviation(first, other, position, are_filtered=are_filtered)
        found = self._equal(index, first)
        if first.token_ids != other.token_ids or _ending(first) != _ending(other):
            tokens = (_token(first, position), _token(other, position))
            found = self._explain(replace(found, run=name, position=position, tokens=tokens), first)
        if deviation is not None:
            found = self._with_logprobs(replace(found, logprob_deviation=deviation.value), name, deviation)
        return found

    def _explain(self, parted: RequestVerdict, first: RequestOutput) -> RequestVerdict:
        tokens = [token for token in parted.tokens if token is not None]
        if len(tokens) < 2:
            why = "one of them ended earlier" if tokens else "the same ids, but another end"
            return replace(parted, verdict=Verdict.DIFFERENT, explanation=why)
        params, position = self._params[parted.index], parted.position
        choice = self._checked_by().choice_after(first.prompt_token_ids, first.token_ids[:position], params)
        worst = max(map(choice.miss, tokens), key=lambda miss: miss.distance - miss.tolerance)
        measure = "logit margin" if params.is_greedy else "draw distance"
        return replace(
            parted,
            verdict=Verdict.NUMERIC if self._noise and worst.distance <= worst.tolerance else Verdict.DIFFERENT,
            measure=measure,
            distance=worst.distance,
            tolerance=worst.tolerance,
            explanation=f"{measure} {worst.distance:.2g}, {self._reason(worst)}",
        )

    def _reason(self, miss: Miss) -> str:
        if not self._noise:
            return "and this model computes exactly, so rounding is no excuse"
        within = "within" if miss.distance <= miss.tolerance else "above"
        return f"{within} the {miss.tolerance:.2g} that rounding in {self._config.dtype} explains"

    def _with_logprobs(self, found: RequestVerdict, name: str, deviation: Deviation) -> RequestVerdict:
        tolerance = LOGPROB_TOLERANCE[self._config.dtype]
        if found.verdict is Verdict.DIFFERENT or deviation.value <= tolerance:
            return found
        what = f"log-probabilities of {deviation.part} position {deviation.position}"
        why = f"{what} differ by {deviation.value:.2g}, above the {tolerance:g} allowed in {found.dtype}"
        return replace(found, verdict=Verdict.DIFFERENT, run=name, explanation=why)

    def _checked_by(self) -> Arbiter:
        if self._arbiter is None:
            self._arbiter = Arbiter(self._loaded, self._config, self._noise)
        return self._arbiter


def _badness(found: RequestVerdict) -> tuple[int, float]:
    return list(Verdict).index(found.verdict), found.logprob_deviation or 0.0


def _ending(output: RequestOutput) -> tuple[str | None, str | int | None]:
    return output.finish_reason, output.stop_reason


def _parting(left: Sequence[int], right: Sequence[int]) -> int:
    """The first position where they are not the same."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _token(output: RequestOutput, position: int) -> int | None:
    return output.token_ids[position] if position < len(output.token_ids) else None
