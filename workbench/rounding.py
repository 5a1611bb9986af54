"""How far a token is from being chosen, and how much of that rounding can explain.

Two runs that batch requests differently get logits that differ by rounding, and part where a choice hangs on it. How
much rounding that is was measured; what it can do to a choice follows from the distribution: a near tie of thousands
of unlikely tokens averages it out, one of two likely tokens does not.
Letters: V vocabulary. Arrays are float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.request import SamplingParams

Values = NDArray[np.float64]
Mask = NDArray[np.bool_]

LOGIT_NOISE = {"float32": 2.0**-22, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Deviation of a logit from exact arithmetic on the same weights, as a share of the largest logit, by dtype.

Measured on a CPU against float64, median and largest over the positions of a text, in these units: 0.95 and 1.1
(bfloat16, random weights of qwen3-0.6b), 0.5 and 1.0 (bfloat16, SmolLM2), 1.0 and 1.1 (float16, 583m), 0.6 and 2.4
(float16, SmolLM2), 1.1 and 1.4 (float32, 583m and qwen3-0.6b), 0.8 and 1.4 (float32, SmolLM2). On an H200 qwen3-0.6b
in bfloat16 deviates by 0.015, which is 0.9. In float64, and for models of integers, nothing is excused."""

NUM_DEVIATIONS = 4.0
"""So many deviations rounding may explain. Runs are judged by thousands of positions, and of those the ones that part
are the extreme: of single errors the largest seen were 3 to 6 deviations."""

LOGPROB_TOLERANCE = {"float64": 1e-5, "float32": 1.5e-4, "float16": 0.2, "bfloat16": 1.2}
"""Largest difference of two runs' log-probabilities of one token, by dtype: twice the largest error against float64
of any token at any position of a text (SmolLM2, logits up to 35). In float64: values are kept in float32."""


class Miss(NamedTuple):
    """How far a token is from being chosen."""

    distance: float
    """Greedy: how far its logit lies below the best. Else: by how much of all probability the random number misses
    its share; infinite where a filter drops it."""
    tolerance: float
    """What rounding explains of it, in the same unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """All that one token is chosen by."""

    scores_V: Values
    """Logits after bias, penalties and forbidden ends, before the temperature."""
    noise: float
    """Deviation of a logit by rounding; 0: computed exactly."""
    params: SamplingParams
    uniform: float
    """The random number of this request and position; a greedy choice ignores it."""

    def miss(self, token: int) -> Miss:
        """How far ``token`` is from being chosen here."""
        if self.params.is_greedy:
            return Miss(float(self.scores_V.max() - self.scores_V[token]), self._rank_tolerance)
        return self._miss_of_draw(token)

    @property
    def _rank_tolerance(self) -> float:
        """By how much two logits may change places: four errors, one of each in a run and in this computation."""
        return NUM_DEVIATIONS * math.sqrt(4.0) * self.noise

    def _miss_of_draw(self, token: int) -> Miss:
        """Its share is taken as wide as filters might make it by what they keep at their edge."""
        scaled_V = (self.scores_V - self.scores_V.max()) / self.params.temperature
        weights_V = np.exp(scaled_V)
        sure_V, possible_V = (np.where(self._kept(scaled_V, side), weights_V, 0.0) for side in (-1, 1))
        if possible_V[token] == 0.0:
            return Miss(math.inf, 0.0)
        low = _share(sure_V[:token], possible_V[token:])
        high = _share(possible_V[: token + 1], sure_V[token + 1 :])
        border = token - 1 if self.uniform < low else token
        tolerance = self._sum_tolerances(possible_V / possible_V.sum())[border]
        return Miss(max(low - self.uniform, self.uniform - high, 0.0), float(tolerance))

    def _sum_tolerances(self, shares_V: Values) -> Values:
        """[V] by how much each running sum of ``shares_V`` may move: two errors, a run's and this computation's.

        With errors e of the logits the sum F up to t moves by (1 - F) Σ p e over those up to t, less F Σ p e over the
        others; independent errors add up as squares.
        """
        sums_V, squares_V = np.cumsum(shares_V), np.cumsum(shares_V**2)
        variances_V = (1.0 - sums_V) ** 2 * squares_V + sums_V**2 * (squares_V[-1] - squares_V)
        unit = NUM_DEVIATIONS * math.sqrt(2.0) * self.noise / self.params.temperature
        tolerances: Values = unit * np.sqrt(variances_V)
        return tolerances

    def _kept(self, scaled_V: Values, side: int) -> Mask:
        """What min_p, top_k and top_p keep; rounding lets each token pass (side 1), or stops each (side -1).

        Each filter keeps the most likely tokens down to some rank, so together they keep what the strictest does.
        """
        params, slack = self.params, side * self._rank_tolerance / self.params.temperature
        kept_V = np.ones(scaled_V.shape, dtype=np.bool_)
        if params.min_p > 0.0:
            kept_V &= scaled_V >= math.log(params.min_p) - slack
        if 0 < params.top_k < scaled_V.size:
            rank = params.top_k + (slack < 0.0)  # the last to be kept, or the first rival to be kept out by
            kept_V &= scaled_V >= np.partition(scaled_V, -rank)[-rank] - slack
        if params.top_p < 1.0:
            kept_V &= self._kept_by_top_p(scaled_V, kept_V, slack, side)
        kept_V |= scaled_V == 0.0  # the best token passes every filter
        return kept_V

    def _kept_by_top_p(self, scaled_V: Values, left_V: Mask, slack: float, side: int) -> Mask:
        """Those before which, in order of probability, less than top_p of what is ``left`` has passed."""
        shares_V = np.where(left_V, np.exp(scaled_V), 0.0)
        shares_V /= shares_V.sum()
        order_V = np.argsort(-scaled_V)
        ranked_V = shares_V[order_V]
        sums_V, moved_V = np.cumsum(ranked_V), side * self._sum_tolerances(ranked_V)
        num_ahead_V = np.searchsorted(-scaled_V[order_V], -(scaled_V + slack))
        last_V = np.maximum(num_ahead_V - 1, 0)
        ahead_V = np.where(num_ahead_V > 0, sums_V[last_V] - moved_V[last_V], 0.0)
        if slack < 0.0:
            ahead_V -= shares_V  # counted among its own rivals
        kept_V: Mask = ahead_V < self.params.top_p
        return kept_V


def _share(before: Values, behind: Values) -> float:
    low = before.sum()
    return float(low / (low + behind.sum()))
