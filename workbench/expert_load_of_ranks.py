"""Expert load of several ranks on one axis; ``docs/metrics.md`` (Experts) defines the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
from numpy.typing import NDArray

from workbench.display import text_table
from workbench.expert_load import ExpertLoad, load_colour


@dataclass(frozen=True, slots=True)
class RanksExpertLoad:
    """Tokens by layer and expert, whichever rank sent them. A prompt shows loads of ranks, a notebook a heat map."""

    load: ExpertLoad
    """Of all ranks together."""
    num_ranks: int

    @property
    def experts_per_rank(self) -> int:
        """Rank 0 holds the first so many, rank 1 the next."""
        return len(self.load.counts[0]) // self.num_ranks

    @property
    def rank_loads(self) -> NDArray[np.int64]:
        """[layers, ranks] tokens that the experts of each rank were sent."""
        counts = self.load.counts
        loads: NDArray[np.int64] = counts.reshape(counts.shape[0], self.num_ranks, -1).sum(axis=2)
        return loads

    @property
    def rank_imbalances(self) -> NDArray[np.float64]:
        """[layers] largest load of a rank over the mean of ranks; 0 in a layer that has seen no token."""
        imbalances: NDArray[np.float64] = ExpertLoad(self.rank_loads, self.load.layers).imbalances
        return imbalances

    def __str__(self) -> str:
        if not self.load.counts.any():
            return str(self.load)
        head = ("layer", "imbalance of ranks", "of experts", *map(self._rank_name, range(self.num_ranks)))
        rows = [
            (str(layer), f"{of_ranks:.2f}", f"{of_experts:.2f}", *(f"{load:,}" for load in loads))
            for layer, of_ranks, of_experts, loads in zip(
                self.load.layers, self.rank_imbalances, self.load.imbalances, self.rank_loads.tolist(), strict=True
            )
        ]
        return "\n".join(text_table(head, rows))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        if not self.load.counts.any():
            return f"<div>{escape(str(self))}</div>"
        style = f"{_border(True)}font-size:11px;white-space:nowrap;text-align:center"
        head = "<td></td>" + "".join(
            f"<td colspan='{self.experts_per_rank}' style='{style}'>{self._rank_name(rank)}</td>"
            for rank in range(self.num_ranks)
        )
        lines = "".join(self._html_line(at) for at in range(len(self.load.layers)))
        foot = (
            f"a row a layer, a square an expert; the darkest has {self.load.shares.max():.2f} times the mean load of "
            "its layer; lines stand between ranks; a token counts once for each of its experts"
        )
        return (
            "<div style='font-family:sans-serif;line-height:1.5'><table style='border-collapse:separate;"
            f"border-spacing:1px'><tr>{head}</tr>{lines}</table>"
            f"<div style='font-size:11px;opacity:.8'>{foot}</div></div>"
        )

    def _rank_name(self, rank: int) -> str:
        each = self.experts_per_rank
        return f"rank {rank}: experts {rank * each} to {(rank + 1) * each - 1}" if each > 1 else f"rank {rank}"

    def _html_line(self, at: int) -> str:
        layer, most = self.load.layers[at], float(self.load.shares.max())
        cells = "".join(
            self._html_cell(layer, expert, count, share / most)
            for expert, (count, share) in enumerate(
                zip(self.load.counts[at].tolist(), self.load.shares[at].tolist(), strict=True)
            )
        )
        loads = " · ".join(f"{load:,}" for load in self.rank_loads[at].tolist())
        told = f"tokens by rank {loads}, imbalance {self.rank_imbalances[at]:.2f}"
        style = "padding:0 6px;font-size:11px;text-align:right;white-space:nowrap"
        return f"<tr><td style='{style}'>layer {layer}</td>{cells}<td style='{style}'>{told}</td></tr>"

    def _html_cell(self, layer: int, expert: int, count: int, level: float) -> str:
        rank, place = divmod(expert, self.experts_per_rank)
        title = f"layer {layer}, expert {expert} of rank {rank}: {count:,} tokens"
        style = f"width:14px;height:14px;padding:0;{_border(place == 0)}background:{load_colour(level)}"
        return f"<td title='{title}' style='{style}'></td>"


def _border(is_first: bool) -> str:
    """A rank's experts begin."""
    return "border-left:2px solid #D55E00;" if is_first else ""


def ranks_expert_load(loads: Sequence[ExpertLoad]) -> RanksExpertLoad:
    """Add up what each rank's own router sent to all experts.

    Args:
        loads: A rank each, rank 0's first; each with all experts, those of others included.

    Raises:
        ValueError: there is none, they are of different models, or the experts cannot be shared out evenly.
    """
    shapes = {(one.layers, one.counts.shape) for one in loads}
    if len(shapes) != 1:
        raise ValueError(
            f"loads must be of one model on every rank, got {len(shapes)} different shapes of {len(loads)}"
        )
    total = ExpertLoad(sum((one.counts for one in loads[1:]), start=loads[0].counts), loads[0].layers)
    if total.counts.shape[1] % len(loads):
        raise ValueError(f"loads must be a rank each, got {len(loads)} for {total.counts.shape[1]} experts")
    return RanksExpertLoad(total, len(loads))
