"""Rows that read W tokens a step, of which only the first few stand: a layer that goes back, and what it must give."""

from __future__ import annotations

import random
from typing import Literal

import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.ssm.base import StateSpace
from tests.ssm_batches import Layer, Row, Sizes, packed, straight_line

Way = Literal["stored", "replayed"]
Tokens = tuple[Tensor, Tensor]
"""Convolution inputs and time steps of neighbouring tokens."""


class Rewinder:
    """A layer whose row i has slot i, or with stored states slots from i * W on.

    Args:
        way: How it goes back.
        sizes: Of the layer; as many slots are made as ``rows`` need, and two more for snapshots.
        rows: How many.
        width: W.
        dtype: Of activations.
        device: Where.
        state_dtype: Of the SSM state; None: float32 or wider.
    """

    def __init__(
        self,
        way: Way,
        sizes: Sizes,
        *,
        rows: int,
        width: int,
        dtype: torch.dtype,
        device: str = "cpu",
        state_dtype: torch.dtype | None = None,
    ) -> None:
        per_row = 1 if way == "replayed" else width
        self.way, self.width, self.per_row, self.device = way, width, per_row, device
        self.sizes = Sizes(
            sizes.heads, sizes.head_dim, sizes.groups, sizes.state, sizes.width, slots=rows * per_row + 2
        )
        self.layer = Layer.random(
            self.sizes,
            dtype,
            device=device,
            state_dtype=state_dtype,
            replay_width=width if way == "replayed" else 0,
        )
        self.snapshot_slot = rows * per_row

    def prompt(self, row: int, count: int, *, from_snapshot: bool = False, kept_at: int | None = None) -> Row:
        """A row that reads a prompt, perhaps behind the snapshot, and may keep the state behind some of its tokens."""
        slot = row * self.per_row
        source, snapshots = self.snapshot_slot if from_snapshot else slot, {}
        if kept_at is not None:
            snapshots[kept_at] = self.snapshot_slot
        return Row(count, source, slot, not from_snapshot, snapshots=snapshots)

    def step(self, row: int, stands: int) -> Row:
        """A row that reads W tokens; ``stands``: how many of its last forward, 0: it read its prompt."""
        if self.way == "replayed":
            return Row(self.width, row, row, replay=stands)
        first = row * self.width
        states = {i + 1: first + i for i in range(self.width - 1)}
        return Row(self.width, first + max(0, stands - 1), first + self.width - 1, snapshots=states)

    def batch(self, rows: list[Row], stepping: int, padding: int) -> ForwardBatch:
        """The first ``stepping`` rows step, and so do ``padding`` rows of nobody behind them."""
        dummy = self.sizes.slots
        nobody = Row(self.width, dummy, dummy, True, replay=0 if self.way == "replayed" else None)
        rows = [*rows[:stepping], *[nobody] * padding, *rows[stepping:]]
        return packed(rows, self.sizes, device=self.device)

    def spoil(self, stands: list[int]) -> None:
        """NaN in whatever the next forward must not read; ``stands`` as for :meth:`step`, of all rows."""
        layer, remembered = self.layer, self.sizes.width - 1
        layer.conv_state[-1], layer.ssm_state[-1] = torch.nan, torch.nan
        if layer.kept is None:
            return
        for row, count in enumerate(stands):
            for each in layer.kept:
                each[row, count:] = torch.nan
            begin = count - 1 if count else self.width - 1
            layer.conv_state[row, :, :begin] = torch.nan
            layer.conv_state[row, :, begin + remembered :] = torch.nan
        for each in layer.kept:
            each[len(stands) :] = torch.nan


def tokens_of(count: int, sizes: Sizes, generator: torch.Generator) -> Tokens:
    x_TC = torch.randn(count, sizes.channels, generator=generator, dtype=torch.float64)
    return x_TC, torch.randn(count, sizes.heads, generator=generator, dtype=torch.float64)


def outputs_behind(layer: Layer, true: Tokens, own: Tokens) -> tuple[Tensor, Tensor]:
    """What ``own`` tokens must give behind all ``true`` ones of their row, read from the start; in the exact type."""
    x_TC, dt_TH = (torch.cat(pair) for pair in zip(true, own, strict=True))
    count = x_TC.shape[0]
    mixed_TC, y_THP, _ = straight_line(layer, x_TC, dt_TH, [Row(count, 0, 0, True)])
    return mixed_TC[-own[0].shape[0] :], y_THP[-own[0].shape[0] :]


class Story:
    """Prompts, then steps with random counts, rows in random order, padding and prompts beside them.

    :meth:`run` gives, of each forward, outputs found and expected of all real tokens.
    """

    def __init__(self, rewinder: Rewinder, backend: StateSpace, *, rows: int, seed: int) -> None:
        self.rewinder, self.backend, self.rows = rewinder, backend, rows
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.exact = rewinder.layer.to(torch.float64)
        self.true: list[Tokens] = []
        """Of each row, all tokens that stand."""
        self.kept: Tokens | None = None
        """Those that the snapshot tells of."""
        self.stands = [0] * rows

    def draw(self, count: int) -> Tokens:
        """Values as the activations' type holds them."""
        dtype = self.rewinder.layer.conv_weight_CK.dtype
        x_TC, dt_TH = tokens_of(count, self.rewinder.sizes, self.generator)
        return x_TC.to(dtype).double(), dt_TH.to(dtype).double()

    def forward(self, rows: list[Row], own: list[Tokens], stepping: int, padding: int) -> tuple[Tensor, Tensor]:
        """Outputs of convolution and scan of the real tokens.

        Rows of nobody read NaN; as prefill rows, which share a product with others, they read finite numbers as ever.
        """
        layer, width, batch = self.rewinder.layer, self.rewinder.width, self.rewinder.batch(rows, stepping, padding)
        dtype, device = layer.conv_weight_CK.dtype, layer.conv_weight_CK.device
        place = torch.arange(batch.shape.num_tokens - padding * width, device=device)
        place[stepping * width :] += padding * width
        shapes = [(batch.shape.num_tokens, each.shape[1]) for each in own[0]]
        filler = torch.nan if self.rewinder.way == "replayed" else 0.0
        wide = [torch.full(shape, filler, dtype=dtype, device=device) for shape in shapes]
        for whole, parts in zip(wide, zip(*own, strict=True), strict=True):
            whole[place] = torch.cat(parts).to(device, dtype)
        mixed_TC, y_THP = layer.run(self.backend, wide[0], wide[1], batch)
        return mixed_TC[place], y_THP[place]

    def run(self, num_steps: int, *, spoils: bool = True) -> list[tuple[Tensor, Tensor]]:
        """(found, expected) of convolutions and scans, in turn."""
        pairs: list[tuple[Tensor, Tensor]] = []
        lengths = [self.rng.choice([1, 2, 5, 19]) for _ in range(self.rows)]
        own = [self.draw(count) for count in lengths]
        empty = self.draw(0)
        self._add(pairs, [self.rewinder.prompt(i, n) for i, n in enumerate(lengths)], own, [empty] * self.rows, 0, 0)
        self.true = own
        for _ in range(num_steps):
            self._step(pairs, spoils=spoils)
        return pairs

    def _step(self, pairs: list[tuple[Tensor, Tensor]], *, spoils: bool) -> None:
        rewinder, rng = self.rewinder, self.rng
        if spoils:
            rewinder.spoil(self.stands)
        order = rng.sample(range(self.rows), self.rows)
        late = order.pop() if len(order) > 1 and rng.random() < 0.3 else None
        rows = [rewinder.step(i, self.stands[i]) for i in order]
        own, true = [self.draw(rewinder.width) for _ in order], [self.true[i] for i in order]
        if late is not None:  # its request ended; another one's prompt has its slot
            count = rng.randint(1, 6)
            kept_at, goes_on = rng.randint(1, count), self.kept is not None and rng.random() < 0.5
            rows.append(rewinder.prompt(late, count, from_snapshot=goes_on, kept_at=kept_at))
            own.append(self.draw(count))
            true.append(self.kept if self.kept is not None and goes_on else self.draw(0))
        self._add(pairs, rows, own, true, len(order), rng.choice([0, 0, 1, 3]))
        for i, (x_WC, dt_WH) in zip(order, own, strict=False):
            stands = self.stands[i] = rng.randint(1, rewinder.width)
            before_x, before_dt = self.true[i]
            self.true[i] = torch.cat((before_x, x_WC[:stands])), torch.cat((before_dt, dt_WH[:stands]))
        if late is not None:
            self.stands[late] = 0
            self.true[late], self.kept = (
                (torch.cat((true[-1][0], own[-1][0][:end])), torch.cat((true[-1][1], own[-1][1][:end])))
                for end in (count, kept_at)
            )

    def _add(
        self,
        pairs: list[tuple[Tensor, Tensor]],
        rows: list[Row],
        own: list[Tokens],
        true: list[Tokens],
        stepping: int,
        padding: int,
    ) -> None:
        found = self.forward(rows, own, stepping, padding)
        expected = [outputs_behind(self.exact, before, one) for before, one in zip(true, own, strict=True)]
        for number in range(2):
            pairs.append((found[number], torch.cat([each[number] for each in expected])))
