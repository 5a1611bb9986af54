"""Packed batches for state-space backends, and the recurrence they must equal, token by token in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import BatchShape, ForwardBatch, Snapshots
from engine.ssm.base import NO_LIMITS, KeptInputs, ScanInputs, ScanWeights, StateSpace


@dataclass(frozen=True)
class Row:
    """One row of a batch."""

    count: int
    """Query tokens."""
    source: int
    """Slot it goes on from."""
    target: int
    """Slot it leaves its state in."""
    is_fresh: bool = False
    is_decode: bool = False
    snapshots: dict[int, int] = field(default_factory=dict)
    """Query tokens behind which a state is kept, and the slot it goes to."""
    replay: int | None = None
    """Tokens of its last forward that it reads once more, as a replayed row; None: it is none."""


@dataclass(frozen=True)
class Sizes:
    """Of one layer. Letters as in ``engine/ssm/base.py``."""

    heads: int = 6
    head_dim: int = 5
    groups: int = 2
    state: int = 7
    width: int = 4
    slots: int = 12
    """Without the dummy."""

    @property
    def channels(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.state


@dataclass
class Layer:
    """Weights and states of one layer, all in one float type."""

    sizes: Sizes
    conv_weight_CK: Tensor
    conv_bias_C: Tensor | None
    weights: ScanWeights
    conv_state: Tensor
    ssm_state: Tensor
    kept: KeptInputs | None = None

    @classmethod
    def random(
        cls,
        sizes: Sizes,
        dtype: torch.dtype,
        *,
        seed: int = 0,
        device: str = "cpu",
        limits: tuple[float, float] = NO_LIMITS,
        bias: bool = True,
        state_dtype: torch.dtype | None = None,
        replay_width: int = 0,
    ) -> Layer:
        """Time steps from 0.01 to 2 and decays from gentle to nearly none left, so that both ends are met."""
        generator = torch.Generator().manual_seed(seed)
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def noise(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        heads = sizes.heads
        weights = ScanWeights(
            (torch.rand(heads, generator=generator, dtype=torch.float64) * 15 + 0.5).log().to(device, wide),
            (1 + 0.3 * noise(heads)).to(device, wide),
            (noise(heads) * 1.5 - 2).to(device, wide),
            limits,
        )
        slots, more = sizes.slots + 1, max(0, replay_width - 1)
        kept = None
        if replay_width:
            shapes = ((heads, sizes.head_dim), (heads,), (sizes.groups, sizes.state))
            kept = KeptInputs(*(noise(slots, replay_width, *shape).to(device, dtype) for shape in shapes))
        return cls(
            sizes,
            (noise(sizes.channels, sizes.width) * 0.5).to(device, dtype),
            noise(sizes.channels).to(device, dtype) if bias else None,
            weights,
            noise(slots, sizes.channels, sizes.width - 1 + more).to(device, dtype),
            noise(slots, heads, sizes.head_dim, sizes.state).to(device, state_dtype or wide),
            kept,
        )

    def to(self, dtype: torch.dtype) -> Layer:
        """A copy in ``dtype``, states and all, on the CPU."""
        bias = self.conv_bias_C
        a_log, d, dt_bias, limits = self.weights
        return Layer(
            self.sizes,
            self.conv_weight_CK.to("cpu", dtype, copy=True),
            None if bias is None else bias.to("cpu", dtype),
            ScanWeights(a_log.to("cpu", dtype), d.to("cpu", dtype), dt_bias.to("cpu", dtype), limits),
            self.conv_state.to("cpu", dtype, copy=True),
            self.ssm_state.to("cpu", dtype, copy=True),
            None if self.kept is None else KeptInputs(*(each.to("cpu", dtype, copy=True) for each in self.kept)),
        )

    def split(self, mixed_TC: Tensor, dt_TH: Tensor) -> ScanInputs:
        """What the convolution gave, as the scan takes it."""
        sizes = self.sizes
        parts = (sizes.heads * sizes.head_dim, sizes.groups * sizes.state, sizes.groups * sizes.state)
        x_TI, B_TI, C_TI = mixed_TC.split(parts, dim=1)
        return ScanInputs(
            x_TI.unflatten(1, (sizes.heads, -1)),
            dt_TH,
            B_TI.unflatten(1, (sizes.groups, -1)),
            C_TI.unflatten(1, (sizes.groups, -1)),
        )

    def run(self, backend: StateSpace, x_TC: Tensor, dt_TH: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Convolution, then scan, as a mixer does; gives what both gave."""
        mixed_TC = backend.conv(x_TC, self.conv_weight_CK, self.conv_bias_C, self.conv_state, batch)
        y_THP = backend.scan(self.split(mixed_TC, dt_TH), self.weights, self.ssm_state, batch, self.kept)
        return mixed_TC, y_THP


def packed(
    rows: Sequence[Row],
    sizes: Sizes,
    *,
    padding_tokens: int = 0,
    padding_decode: int = 0,
    padding_replayed: int = 0,
    padding_prefill: int = 0,
    padding_snapshots: int = 0,
    longest: int | None = None,
    device: str = "cpu",
) -> ForwardBatch:
    """The batch of ``rows``, decode rows first, or replayed ones, all of as many tokens.

    Padding as the engine pads: decode and replayed rows of all their tokens, others of none. Padding tokens need a
    prefill row, real or not, to belong to.
    """
    dummy = sizes.slots
    decode = [row for row in rows if row.is_decode] + [Row(1, dummy, dummy, True, True)] * padding_decode
    replayed = [row for row in rows if row.replay is not None]
    width = replayed[0].count if replayed else 0
    replayed += [Row(width, dummy, dummy, True, replay=0)] * padding_replayed
    prefill = [row for row in rows if not row.is_decode and row.replay is None] + [
        Row(0, dummy, dummy)
    ] * padding_prefill
    prefill = [*replayed, *prefill]
    all_rows = [*decode, *prefill]
    counts = [row.count for row in all_rows]
    starts = [sum(counts[:number]) for number in range(len(counts))]
    row_of = [number for number, count in enumerate(counts) for _ in range(count)]
    kept = [(number, after, slot) for number, row in enumerate(all_rows) for after, slot in row.snapshots.items()]
    kept += [(len(all_rows) - 1, 0, dummy)] * padding_snapshots
    num_tokens = sum(counts) + padding_tokens

    def tensor(values: Sequence[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)

    shape = BatchShape(
        num_tokens=num_tokens,
        num_decode=len(decode),
        num_prefill=len(prefill),
        max_query_len=longest or max((row.count for row in prefill), default=0),
        num_kv_blocks=1,
        num_snapshots=len(kept),
        num_wide=len(replayed),
        wide_width=width,
        replays=bool(replayed),
    )
    return ForwardBatch(
        token_ids_T=tensor([0] * num_tokens),
        positions_T=tensor([0] * num_tokens),
        row_T=tensor([*row_of, *[len(all_rows) - 1] * padding_tokens]),
        slots_T=tensor([0] * num_tokens),
        block_table_NK=tensor([0] * len(all_rows))[:, None],
        query_start_N=tensor(starts),
        query_len_N=tensor(counts),
        kv_len_N=tensor([row.count if row.is_fresh else row.count + 3 for row in all_rows]),
        logits_idx_L=tensor([0]),
        shape=shape,
        state_from_N=tensor([row.source for row in all_rows]),
        state_to_N=tensor([row.target for row in all_rows]),
        snapshots=Snapshots(*map(tensor, zip(*kept, strict=True))) if kept else None,
        replayed_V=tensor([row.replay or 0 for row in replayed]) if replayed else None,
    )


def straight_line(
    layer: Layer, x_TC: Tensor, dt_TH: Tensor, rows: Sequence[Row]
) -> tuple[Tensor, Tensor, dict[int, tuple[Tensor, Tensor]]]:
    """What :meth:`Layer.run` must give for ``rows``, decode rows first, and what slots must hold then.

    One token at a time, one head at a time, in the layer's own type; the layer is only read.
    """
    mixed, outputs, found = [], [], {}
    token = 0
    for row in [*(r for r in rows if r.is_decode), *(r for r in rows if not r.is_decode)]:
        history = layer.conv_state[row.source][:, 1 - layer.sizes.width :].clone()
        state = layer.ssm_state[row.source].clone()
        if row.is_fresh:
            history, state = torch.zeros_like(history), torch.zeros_like(state)
        for done in range(1, row.count + 1):
            mixed_C, history = _conv_step(layer, x_TC[token], history)
            y_HP, state = _scan_step(layer, layer.split(mixed_C[None], dt_TH[token][None]), state)
            mixed.append(mixed_C)
            outputs.append(y_HP)
            token += 1
            if done in row.snapshots:
                found[row.snapshots[done]] = (history, state)
        found[row.target] = (history, state)
    return torch.stack(mixed), torch.stack(outputs), found


def _conv_step(layer: Layer, x_C: Tensor, history_Ck: Tensor) -> tuple[Tensor, Tensor]:
    window_CK = torch.cat((history_Ck, x_C[:, None]), dim=1)
    total_C = (window_CK * layer.conv_weight_CK).sum(1)
    if layer.conv_bias_C is not None:
        total_C = total_C + layer.conv_bias_C
    return functional.silu(total_C), window_CK[:, 1:]


def _scan_step(layer: Layer, inputs: ScanInputs, state_HPS: Tensor) -> tuple[Tensor, Tensor]:
    a_log, d, dt_bias, (least, most) = layer.weights
    x_HP, dt_H, B_GS, C_GS = (each[0] for each in inputs)
    new, outputs = [], []
    for head in range(x_HP.shape[0]):
        group = head // (x_HP.shape[0] // B_GS.shape[0])
        dt = torch.log1p(torch.exp(dt_H[head] + dt_bias[head])).clamp(least, most)
        state_PS = state_HPS[head] * torch.exp(-dt * torch.exp(a_log[head]))
        state_PS = state_PS + dt * x_HP[head][:, None] * B_GS[group]
        new.append(state_PS)
        outputs.append(state_PS @ C_GS[group] + d[head] * x_HP[head])
    return torch.stack(outputs), torch.stack(new)
