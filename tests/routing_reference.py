"""Which experts tokens go to, and what follows when they are told to go elsewhere, without an engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.models.moe import MoE
from tests.forward_driver import Text
from tests.slot_driver import SlotDriver

Choices = NDArray[np.int16]
_EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""The others know no float64."""


class Teacher:
    """transformers on a checkpoint in float64; softmax routers, renormalised if ``norm_topk_prob`` or Mixtral."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **_EAGER)
        self.model.eval()
        config = self.model.config
        self.renormalises = config.model_type == "mixtral" or config.norm_topk_prob
        self.routers = [one for name, one in self.model.named_modules() if type(one).__name__.endswith("TopKRouter")]

    def read(self, tokens: list[int], given: Choices | None = None) -> tuple[Choices, Tensor]:
        """Choices [n, L, K] of ``tokens``, and log probabilities [n, V] behind each.

        ``given`` [m, L, K], m at most n: what the first m tokens are told.
        """
        with self._watched(given) as chosen, torch.inference_mode():
            logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0]
        return torch.stack(chosen, dim=1).numpy().astype(np.int16), logits.log_softmax(-1)

    @contextmanager
    def _watched(self, given: Choices | None) -> Iterator[list[Tensor]]:
        chosen: list[Tensor] = []

        def watch(router: nn.Module, _: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
            logits_TX, weights_TK, ids_TK = out
            if given is not None:
                ids_TK, weights_TK = ids_TK.clone(), weights_TK.clone()
                for token in range(given.shape[0]):
                    ids = torch.from_numpy(given[token, len(chosen)].astype(np.int64))
                    weights = torch.tensor([logits_TX[token].exp()[i] / logits_TX[token].exp().sum() for i in ids])
                    ids_TK[token] = ids
                    weights_TK[token] = weights / weights.sum() if self.renormalises else weights
            chosen.append(ids_TK)
            return logits_TX, weights_TK, ids_TK

        handles = [router.register_forward_hook(watch) for router in self.routers]
        try:
            yield chosen
        finally:
            for handle in handles:
                handle.remove()


def choices_of(model: Any, tokens: list[int]) -> Choices:
    """[n, L, K] what the routers of one of our models choose in a forward over ``tokens`` alone."""
    chosen: list[Tensor] = []
    layers = [one for one in model.modules() if isinstance(one, MoE) and one.number is not None]
    handles = [layer.router.register_forward_hook(lambda *call: chosen.append(call[2][0])) for layer in layers]
    try:
        SlotDriver(model).forward([Text(list(tokens))])
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(chosen, dim=1).numpy().astype(np.int16)


def other_choices(made: Choices, num_experts: int, seed: int = 0) -> Choices:
    """As many, at random, none twice."""
    draws = np.random.default_rng(seed).random((*made.shape[:2], num_experts))
    return draws.argsort(axis=2)[:, :, : made.shape[2]].astype(np.int16)
