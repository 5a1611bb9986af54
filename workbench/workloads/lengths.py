"""Laws that lengths of made requests follow."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from math import exp, isfinite, log

_FORMS = "N, LOW..HIGH (each as likely), or MEDIAN~SIGMA (log-normal)"


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """Tokens: always ``low``, evenly from ``low`` to ``high``, or log-normal around the median ``low``."""

    low: int
    high: int
    sigma: float = 0.0
    """Standard deviation of the logarithm; 0: no log-normal. 1 is about what production traces have."""

    def draw(self, draws: random.Random) -> int:
        """One length, at least 1."""
        if self.sigma:
            return max(1, round(exp(draws.gauss(log(self.low), self.sigma))))
        return self.low if self.low == self.high else draws.randint(self.low, self.high)


def parse_lengths(text: str) -> LengthLaw:
    """``64``, ``16..256`` or ``200~0.8``.

    Raises:
        ValueError: it is none of them; the message goes behind the option's name.
    """
    if re.fullmatch(r"[+-]?\d+", text):
        return _checked(LengthLaw(int(text), int(text)), text)
    if found := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        low, high = int(found[1]), int(found[2])
        if low > high:
            raise ValueError(f"must not fall from {low} to {high}")
        return _checked(LengthLaw(low, high), text)
    if found := re.fullmatch(r"(\d+)~(\d+(?:\.\d*)?)", text):
        sigma = float(found[2])
        if not 0 < sigma <= _MOST_SIGMA or not isfinite(sigma):
            raise ValueError(f"must have a sigma above 0 and up to {_MOST_SIGMA}, got {text!r}")
        return _checked(LengthLaw(int(found[1]), int(found[1]), sigma), text)
    raise ValueError(f"must be a whole number or a law: {_FORMS}; got {text!r}")


_MOST_SIGMA = 4.0
"""One in a thousand is then 200,000 times the median: no length of a prompt."""


def _checked(law: LengthLaw, text: str) -> LengthLaw:
    if law.low < 1:
        raise ValueError(f"must be at least 1, got {text}")
    return law
