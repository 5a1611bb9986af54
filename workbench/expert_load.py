"""How many tokens each expert of each layer was sent; ``docs/metrics.md`` (Experts) defines the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from engine.models.loader import LoadedModel
from workbench.display import text_table
from workbench.peek import SessionError

if TYPE_CHECKING:
    from torch import Tensor, nn

_MOST_LISTED = 12
"""Experts a layer that a prompt lists."""
_LOW, _HIGH = (0xF2, 0xF5, 0xF9), (0x0B, 0x3C, 0x6E)
_counted: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""Models that count, and where: their captured forwards write to that tensor for as long as they live."""


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Tokens by layer and expert. A prompt shows it as text, a notebook as a heat map."""

    counts: NDArray[np.int64]
    """[layers with experts, experts]"""
    layers: tuple[int, ...]
    """Number of each of those layers in the model."""

    @property
    def shares(self) -> NDArray[np.float64]:
        """Load over the mean load of the layer's experts; 0 in a layer that has seen no token."""
        means = self.counts.mean(axis=1, keepdims=True)
        shares: NDArray[np.float64] = np.divide(self.counts, means, out=np.zeros(self.counts.shape), where=means > 0)
        return shares

    @property
    def imbalances(self) -> NDArray[np.float64]:
        """[layers] largest load over mean load; 0 in a layer that has seen no token."""
        largest: NDArray[np.float64] = self.shares.max(axis=1)
        return largest

    @property
    def num_unused(self) -> NDArray[np.int64]:
        """[layers] experts that no token was sent to."""
        unused: NDArray[np.int64] = np.count_nonzero(self.counts == 0, axis=1)
        return unused

    def __str__(self) -> str:
        if not self.counts.any():
            return "no token was sent to an expert yet: run the session"
        shown = min(self.counts.shape[1], _MOST_LISTED)
        head = ("layer", "imbalance", "unused", *(f"expert {number}" for number in range(shown)))
        rows = [
            (str(layer), f"{imbalance:.2f}", str(unused), *map(str, counts[:shown]))
            for layer, imbalance, unused, counts in zip(
                self.layers, self.imbalances, self.num_unused, self.counts, strict=True
            )
        ]
        hidden = self.counts.shape[1] - shown
        return "\n".join([*text_table(head, rows), *([f"and {hidden} more experts a layer"] if hidden else [])])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        most = float(self.shares.max(initial=0.0))
        if not most:
            return f"<div>{escape(str(self))}</div>"
        rows = zip(self.layers, self.counts, self.shares, self.imbalances, strict=True)
        lines = "".join(
            _html_line(layer, counts, shares / most, imbalance) for layer, counts, shares, imbalance in rows
        )
        foot = f"a row a layer, a square an expert; the darkest has {most:.2f} times the mean load of its layer"
        return (
            "<div style='font-family:sans-serif;line-height:1.5'><table style='border-collapse:separate;"
            f"border-spacing:1px'>{lines}</table><div style='font-size:11px;opacity:.8'>{foot}</div></div>"
        )


def _html_line(layer: int, counts: NDArray[np.int64], levels: NDArray[np.float64], imbalance: float) -> str:
    cells = "".join(
        f"<td title='layer {layer}, expert {expert}: {count:,} tokens' style='width:14px;height:14px;padding:0;"
        f"background:{load_colour(level)}'></td>"
        for expert, (count, level) in enumerate(zip(counts.tolist(), levels.tolist(), strict=True))
    )
    style = "padding:0 6px;font-size:11px;text-align:right"
    return f"<tr><td style='{style}'>layer {layer}</td>{cells}<td style='{style}'>imbalance {imbalance:.2f}</td></tr>"


def load_colour(level: float) -> str:
    """From nearly the page's white to dark blue."""
    return "#" + "".join(f"{round(low + (high - low) * level):02x}" for low, high in zip(_LOW, _HIGH, strict=True))


class ExpertCounter:
    """Counts for one session, from its engine's first forward on.

    Sessions that share a model share its counts: any of them that counts starts them from zero.

    Args:
        loaded: The model; to be called before an engine is built on it.
        wanted: Whether to count.

    Raises:
        SessionError: it is wanted of a model without experts.
    """

    def __init__(self, loaded: LoadedModel, *, wanted: bool) -> None:
        self.layers = expert_layers(_module(loaded))
        """Numbers of the layers with experts; empty: the model has none."""
        self._loads = _counting(loaded) if wanted else None
        if wanted and self._loads is None:
            raise SessionError(f"expert_load: {loaded.name} has no experts to count")

    @property
    def is_counting(self) -> bool:
        """Whether it counts."""
        return self._loads is not None

    def read(self) -> ExpertLoad | None:
        """What was counted so far, as far as the device has come; None if nothing is counted.

        On CUDA a copy on the default stream, which waits for none of the engine's.
        """
        if self._loads is None:
            return None
        return ExpertLoad(self._loads.detach().cpu().numpy().copy(), self.layers)

    def clear(self) -> None:
        """From zero again; the device must have nothing to do."""
        if self._loads is not None:
            self._loads.zero_()
            if self._loads.is_cuda:
                import torch

                torch.cuda.current_stream(self._loads.device).synchronize()


def not_counting_text(counter: ExpertCounter, model: str) -> str:
    """Why there are no counts, and what to do."""
    if not counter.layers:
        return f"{model} has no experts"
    return (
        "tokens are not counted by expert: make the session with expert_load=True, for forwards that are captured "
        "before count nothing"
    )


def expert_layers(model: nn.Module) -> tuple[int, ...]:
    """Numbers of the layers with experts, in order: the first number in each module's name."""
    return tuple(_first_number(name, otherwise=place) for place, (name, _) in enumerate(_own_experts(model)))


def _own_experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers with experts by name, those of draft heads left out.

    Heads run over prompts and over newest tokens in passes of their own, padded as rows are: their counts would add up
    to something else than those of the model's layers.
    """
    from engine.models.moe import MoE

    heads = getattr(model, "heads", None)
    of_heads = set(heads.modules()) if heads is not None and hasattr(model, "num_draft_heads") else set()
    return [(name, one) for name, one in model.named_modules() if isinstance(one, MoE) and one not in of_heads]


def _first_number(name: str, *, otherwise: int) -> int:
    numbers: Sequence[str] = [part for part in name.split(".") if part.isdigit()]
    return int(numbers[0]) if numbers else otherwise


def _counting(loaded: LoadedModel) -> Tensor | None:
    """Where the model counts. Forwards that were captured before it did so are forgotten: they count nothing."""
    from torch import nn

    from engine.models.moe import count_expert_load

    model = _module(loaded)
    loads = _counted.get(model)
    if loads is None:
        loads = count_expert_load(nn.ModuleList(one for _, one in _own_experts(model)))
        if loads is None:
            return None
        loaded.buckets.clear()
        _counted[model] = loads
    return loads


def _module(loaded: LoadedModel) -> nn.Module:
    model: Any = loaded.model
    return cast("nn.Module", model)
