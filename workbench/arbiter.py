"""Computes by what one output token of a run was chosen, alone in its batch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.loader import LoadedModel
from engine.phases import Phase
from engine.request import SamplingParams
from engine.sampling.base import Sampled, SamplingNeeds, SamplingRows
from engine.sampling.rng import DrawKind, uniform_host
from engine.sampling.torch import TorchSampler, adjust_logits
from workbench.rounding import Choice, Values


class Arbiter:
    """Has the model read a text alone, eagerly, in one forward, and looks at what the sampler is given.

    Args:
        loaded: The runs' model.
        config: A run's configuration; dtype, backends and limits are what matters.
        noise: Deviation of a logit by rounding, as a share of the largest one.
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, noise: float) -> None:
        self._noise = noise
        self._witness = _Witness()
        alone = config.replace(
            mode="legacy",
            device="cuda" if config.device == "cuda" else "inline",
            graphs=None,
            op_sleep_s=0.0,
            debug_invariants=False,
        )
        self.engine = Engine(loaded, alone, sampler=self._witness)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()

    def choice_after(self, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> Choice:
        """By what the token behind ``output`` is chosen; the prompt and it are computed together, as in a recovery.

        Args:
            prompt: The request's prompt.
            output: Its tokens so far.
            params: Its parameters, the seed settled.
        """
        engine = self.engine
        longer = max(params.max_tokens, len(output) + 1)
        plain = params.replace(logprobs=None, prompt_logprobs=None, stop=None, max_tokens=longer)
        request_id = engine.add_request(prompt, plain)
        request = engine.queue.newest
        assert request is not None
        request.output_ids.extend(output)
        while (border := engine.step_phase()) is not None and border.phase is not Phase.RESOLVE:
            pass
        engine.abort(request_id)
        while engine.has_unfinished():
            engine.step()
        engine.device.synchronize()
        scores_V, largest = self._witness.seen()
        number = uniform_host(request.seed, len(output), DrawKind.TARGET)
        return Choice(scores_V=scores_V, noise=self._noise * largest, params=plain, uniform=number)


class _Witness(TorchSampler):
    """The reference sampler, which remembers the first row it was last asked to choose from."""

    _logits_V: Tensor
    _scores_V: Tensor

    def sample(self, logits_NV: Tensor, rows: SamplingRows, needs: SamplingNeeds) -> Sampled:
        """See :meth:`engine.sampling.base.Sampler.sample`."""
        self._logits_V = logits_NV[0].double()
        self._scores_V = adjust_logits(logits_NV.double(), rows, needs)[0]
        return super().sample(logits_NV, rows, needs)

    def seen(self) -> tuple[Values, float]:
        """Adjusted logits [V], float64, and the largest magnitude of the model's own; the device must be at rest."""
        logits_V = self._logits_V[self._logits_V.isfinite()]
        return self._scores_V.cpu().numpy(), float(logits_V.abs().max()) if logits_V.numel() else 0.0
