"""What a sampler is given and gives back, and the flags by which the host picks its work.

Letters: n logits rows (one a token to be drawn, padding included), V vocabulary, K columns of an id list.

Order in which a sampler treats a row; every backend keeps it:

1. float32 logits (float64 stays float64); the tensor it was given is never written to
2. ``logit_bias`` is added
3. repetition penalty, over ids in prompt or output
4. presence and frequency penalties, over ids in the output
5. ids that would end the request are forbidden while ``position < min_tokens``
6. greedy rows (temperature 0 or top_k 1) take the highest score here, the lowest id among equals, and are done
7. scores = (logits - highest) / temperature
8. min_p, then top_k, then top_p on what is left renormalised; among equal scores the lowest ids are kept
9. one uniform u of (seed, position); the token is the first id whose running sum of weights exceeds u * total

So a row's token is a function of its own logits, parameters, seed and position, and of nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from engine.request import SamplingParams


class RowColumns(NamedTuple):
    """Table rows as :class:`engine.columns.DeviceColumns` keeps them: views of both matrices."""

    ints: Tensor
    """[n, 5] int64: last_token, position, seed, top_k, min_tokens."""
    floats: Tensor
    """[n, 6] float32: temperature, top_p, min_p, presence, frequency, repetition."""


class SamplingRows(NamedTuple):
    """Parameters of the rows of one call, all on the logits' device, one entry a logits row.

    A view of the request table where it can be: ``accept`` writes into ``output_counts``.
    """

    temperature: Tensor
    """[n] float32; up to ``GREEDY_TEMPERATURE`` is greedy."""
    top_k: Tensor
    """[n] int64; 0 or below: off; 1: greedy; above V: V."""
    top_p: Tensor
    """[n] float32 in (0, 1]; 1: off."""
    min_p: Tensor
    """[n] float32 in [0, 1]; 0: off."""
    seed: Tensor
    """[n] int64, the bits of a uint64; see :func:`engine.sampling.rng.to_int64`."""
    position: Tensor
    """[n] int64, output position of the token drawn here, 0 for a request's first."""
    min_tokens: Tensor
    """[n] int64, output positions below it take none of ``stop_ids``."""
    presence: Tensor
    """[n] float32, 0: off."""
    frequency: Tensor
    """[n] float32, 0: off."""
    repetition: Tensor
    """[n] float32 above 0, 1: off."""
    stop_ids: Tensor | None = None
    """[n, K] int64 padded with V: every id that would end the request (EOS unless ignore_eos, stop_token_ids)."""
    bias_ids: Tensor | None = None
    """[n, K] int64 padded with V, no id twice in a row."""
    bias_values: Tensor | None = None
    """[n, K] float32."""
    output_counts: Tensor | None = None
    """[n, V] int32, how often the row's output holds each id so far."""
    prompt_mask: Tensor | None = None
    """[n, V] bool, which ids the row's prompt holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingNeeds:
    """Whether any row of this call uses a feature. Known to the host, so that no device value is ever asked."""

    all_greedy: bool
    """No row draws a random number."""
    bias: bool
    """Some row has a logit_bias; ``bias_ids`` and ``bias_values`` are given."""
    penalties: bool
    """Some row has a penalty; ``output_counts`` is given, ``prompt_mask`` too if any repetition is not 1."""
    min_tokens: bool
    """Some row has min_tokens above 0; ``stop_ids`` is given if anything can end the row."""
    top_k: bool
    """Some random row keeps its k best."""
    max_top_k: int
    """The largest such k; 0 without one."""
    top_p: bool
    """Some random row has top_p below 1."""
    min_p: bool
    """Some random row has min_p above 0."""
    num_logprobs: int | None
    """None: nobody wants any; 0: the chosen id's alone; n: the top n as well."""
    processed_logprobs: bool
    """Log-probabilities of the scores drawn from rather than of the model's logits."""

    @property
    def is_plain(self) -> bool:
        """Whether every row is greedy or drawn by temperature alone, and nothing but the token is wanted."""
        extra = self.bias or self.penalties or self.min_tokens or self.top_k or self.top_p or self.min_p
        return not extra and self.num_logprobs is None

    @staticmethod
    def of(params: Iterable[SamplingParams], processed: bool = False) -> SamplingNeeds:
        """The flags of these rows; ``processed`` is the engine's ``logprobs_mode == "processed"``."""
        rows = list(params)
        drawn = [p for p in rows if not p.is_greedy]
        wanted = [p.logprobs for p in rows if p.logprobs is not None]
        return SamplingNeeds(
            all_greedy=not drawn,
            bias=any(p.logit_bias for p in rows),
            penalties=any(p.has_penalties for p in rows),
            min_tokens=any(p.min_tokens > 0 for p in rows),
            top_k=any(p.top_k > 0 for p in drawn),
            max_top_k=max((p.top_k for p in drawn if p.top_k > 0), default=0),
            top_p=any(p.top_p < 1.0 for p in drawn),
            min_p=any(p.min_p > 0.0 for p in drawn),
            num_logprobs=max(wanted, default=None),
            processed_logprobs=processed,
        )


class Sampled(NamedTuple):
    """What was drawn, on the logits' device, one entry a logits row."""

    token_ids: Tensor
    """[n] int64, within [0, V)."""
    bad: Tensor
    """[n] bool: the row held NaN or +inf, or nothing was left to choose from. Its token is 0 and means nothing."""
    chosen_logprob: Tensor | None
    """[n] float32; None unless wanted."""
    top_ids: Tensor | None
    """[n, min(num_logprobs, V)] int64, from high to low, among equals the lowest id first; None unless wanted."""
    top_logprobs: Tensor | None
    """Same shape, float32; -inf for what was filtered out (processed only) or impossible."""
    near_boundary: Tensor
    """[n] bool: a change of rounding size in the scores could have drawn another token. False for greedy rows."""


class Sampler(Protocol):
    """Draws one token a logits row. Every call only enqueues work: nothing waits for the device."""

    name: str
    """What ``EngineConfig.sampling_backend`` calls it."""

    def sample(self, logits_NV: Tensor, rows: SamplingRows, needs: SamplingNeeds) -> Sampled:
        """Draw.

        Args:
            logits_NV: Shape [n, V], floating point, the model's own logits; only read.
            rows: One entry a logits row.
            needs: True wherever some row uses the feature. Too many flags cost time and change nothing.

        Returns:
            New tensors on the same device; a fault of one row (``bad``) leaves the others alone.
        """
        ...

    def draw_in_place(
        self, logits_NV: Tensor, sources_n: Tensor | None, columns: RowColumns, results: Tensor, needs: SamplingNeeds
    ) -> bool:
        """Do all of a sampling at once, if this backend can for such rows: draw, store, advance.

        Args:
            logits_NV: [N, V], only read.
            sources_n: [n] int64, the logits row of each table row; None: the first n, in order.
            columns: The n table rows; ``last_token`` and ``position`` are brought up to date.
            results: [3, R] int64, R >= n: token ids, bad, near boundary are written to the first n columns.
            needs: As for :meth:`sample`.

        Returns:
            Whether it was done; False leaves everything alone, and the caller takes the way over :meth:`sample`.
        """
        ...

    def accept(self, rows: SamplingRows, sampled: Sampled) -> None:
        """Add each row's token to ``rows.output_counts`` in place, if given; bad rows add nothing.

        A row that stands twice in the batch (drafts) is not foreseen here: its counts must be a view of its own.
        """
        ...
