"""The torch state-space backend against the recurrence, token by token: random packed batches, slots and snapshots."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.ssm import TorchStateSpace
from engine.ssm.base import NO_LIMITS, MixedParts, MixerWeights
from tests.ssm_batches import Layer, Row, Sizes, packed, straight_line

SIZES = Sizes()
TOLERANCE = {
    # Of the largest value; the recurrence is computed in float64 on the same, rounded, inputs.
    torch.float64: 1e-12,
    torch.float32: 2e-6,  # sums of up to 200 terms in another order
    torch.bfloat16: 1.6e-2,  # x, B and C are rounded to 8 bits by the convolution, and what comes of them once more
}


def tokens_for(count: int, dtype: torch.dtype, seed: int, sizes: Sizes = SIZES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_TC = torch.randn(count, sizes.channels, generator=generator, dtype=torch.float64)
    dt_TH = torch.randn(count, sizes.heads, generator=generator, dtype=torch.float64)
    return x_TC.to(dtype), dt_TH.to(dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found.double() / scale, expected.double() / scale, atol=TOLERANCE[dtype], rtol=0.0)


def check(
    rows: list[Row],
    dtype: torch.dtype,
    *,
    seed: int = 0,
    limits: tuple[float, float] = NO_LIMITS,
    sizes: Sizes = SIZES,
    padding: dict[str, int] | None = None,
) -> None:
    """One forward of ``rows``; whatever must not be read is NaN, and what must not be written stays."""
    padding = dict(padding or {})
    layer = Layer.random(sizes, dtype, seed=seed, limits=limits)
    count = sum(row.count for row in rows)
    x_TC, dt_TH = tokens_for(count, dtype, seed + 1, sizes)
    expected = straight_line(layer.to(torch.float64), x_TC.double(), dt_TH.double(), rows)
    for slot in range(sizes.slots + 1):
        if not any(row.source == slot and not row.is_fresh for row in rows):
            layer.conv_state[slot] = torch.nan
            layer.ssm_state[slot] = torch.nan
    before = (layer.conv_state.clone(), layer.ssm_state.clone())

    batch = packed(rows, sizes, **padding)
    num_decode, padded_decode = sum(row.is_decode for row in rows), padding.get("padding_decode", 0)
    place_T = [t if t < num_decode else t + padded_decode for t in range(count)]
    wide_x = torch.full((batch.shape.num_tokens, sizes.channels), torch.nan, dtype=dtype)
    wide_dt = torch.full((batch.shape.num_tokens, sizes.heads), torch.nan, dtype=dtype)
    wide_x[place_T], wide_dt[place_T] = x_TC, dt_TH
    mixed_TC, y_THP = layer.run(TorchStateSpace(), wide_x, wide_dt, batch)

    assert mixed_TC.dtype == y_THP.dtype == dtype
    close(mixed_TC[place_T], expected[0], dtype)
    close(y_THP[place_T], expected[1], dtype)
    for slot in range(sizes.slots):
        if slot in expected[2]:
            close(layer.conv_state[slot], expected[2][slot][0], dtype)
            close(layer.ssm_state[slot], expected[2][slot][1], dtype)
        else:
            for state, old in zip((layer.conv_state, layer.ssm_state), before, strict=True):
                torch.testing.assert_close(state[slot], old[slot], atol=0.0, rtol=0.0, equal_nan=True)


@st.composite
def random_rows(draw: st.DrawFn) -> list[Row]:
    """Rows with slots of their own to write to; some go on from their own, some from one that others may share."""
    targets = draw(st.permutations(range(9)))
    shared = [9, 10, 11]
    rows, taken = [], 0
    for _ in range(draw(st.integers(0, 3))):
        slot = targets[taken]
        taken += 1
        rows.append(Row(1, slot, slot, draw(st.booleans()), is_decode=True))
    for _ in range(draw(st.integers(0 if rows else 1, 3))):
        count = draw(st.sampled_from([1, 2, 3, 7, 8, 9, 31, 64, 65, 130]) | st.integers(1, 90))
        target = targets[taken]
        taken += 1
        source = draw(st.sampled_from([target, *shared]))
        kept = {}
        if taken < 9 and draw(st.booleans()):
            kept[draw(st.integers(1, count))] = targets[taken]
            taken += 1
        rows.append(Row(count, source, target, draw(st.booleans()), snapshots=kept))
    return rows


@settings(max_examples=60, deadline=None)
@given(random_rows(), st.integers(0, 1000), st.sampled_from(list(TOLERANCE)), st.data())
def test_any_packed_batch_equals_the_recurrence(
    rows: list[Row], seed: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    padding = {}
    if data.draw(st.booleans()):
        padding["padding_decode"] = data.draw(st.integers(0, 2))
        padding["padding_prefill"] = data.draw(st.integers(0, 2))
        padding["padding_snapshots"] = data.draw(st.integers(0, 2))
        has_prefill = padding["padding_prefill"] or not all(row.is_decode for row in rows)
        if has_prefill:
            padding["padding_tokens"] = data.draw(st.integers(0, 40))
        if not has_prefill:
            padding["padding_snapshots"] = 0
    check(rows, dtype, seed=seed, padding=padding)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("limits", [(0.05, 0.4), (0.0, 0.1), (0.5, float("inf"))])
def test_time_steps_are_kept_within_the_limits_in_both_forms(dtype: torch.dtype, limits: tuple[float, float]) -> None:
    check([Row(1, 0, 0, is_decode=True), Row(70, 1, 1), Row(5, 2, 2, True)], dtype, limits=limits)


def test_a_snapshot_may_take_the_place_of_the_state_that_its_row_went_on_from() -> None:
    check([Row(9, 0, 1, snapshots={4: 0}), Row(20, 2, 3, snapshots={1: 2})], torch.float64)


def test_several_rows_go_on_from_one_shared_state() -> None:
    check([Row(9, 5, 0), Row(20, 5, 1, snapshots={20: 2, 1: 3, 8: 4}), Row(1, 5, 6)], torch.float64)


@pytest.mark.parametrize("width", [2, 3, 4])
def test_every_width_of_the_convolution(width: int) -> None:
    rows = [Row(1, 0, 0, is_decode=True), Row(1, 1, 1), Row(2, 2, 2, snapshots={1: 5}), Row(3, 3, 3, True)]
    check(rows, torch.float64, sizes=Sizes(width=width))


def test_one_head_a_group_and_one_group_of_all() -> None:
    for groups in (1, 6):
        check([Row(1, 0, 0, is_decode=True), Row(33, 1, 1)], torch.float64, sizes=Sizes(groups=groups))


@pytest.mark.parametrize("cuts", [[1] * 40, [40], [13, 27], [1, 1, 38], [8, 8, 8, 16], [39, 1]])
def test_one_long_forward_equals_several_short_ones(cuts: list[int]) -> None:
    """The state behind n tokens is what a fresh prefill of n tokens leaves, whatever read them."""
    backend, whole, parts = TorchStateSpace(), *(Layer.random(SIZES, torch.float64) for _ in range(2))
    x_TC, dt_TH = tokens_for(40, torch.float64, 3)
    mixed_TC, y_THP = whole.run(backend, x_TC, dt_TH, packed([Row(40, 0, 0, True)], SIZES))

    done, found = 0, []
    for number, count in enumerate(cuts):
        row = Row(count, 0, 0, is_fresh=number == 0, is_decode=count == 1 and number > 0)
        span = slice(done, done + count)
        found.append(parts.run(backend, x_TC[span], dt_TH[span], packed([row], SIZES)))
        done += count

    close(torch.cat([each[0] for each in found]), mixed_TC, torch.float64)
    close(torch.cat([each[1] for each in found]), y_THP, torch.float64)
    close(parts.conv_state[0], whole.conv_state[0], torch.float64)
    close(parts.ssm_state[0], whole.ssm_state[0], torch.float64)


def test_a_snapshot_is_what_a_shorter_forward_leaves() -> None:
    backend, x_TC, dt_TH = TorchStateSpace(), *tokens_for(90, torch.float64, 5)
    kept = Layer.random(SIZES, torch.float64)
    kept.run(backend, x_TC, dt_TH, packed([Row(90, 0, 0, True, snapshots={16: 1, 64: 2, 89: 3, 90: 4})], SIZES))

    for after, slot in ((16, 1), (64, 2), (89, 3), (90, 4)):
        short = Layer.random(SIZES, torch.float64)
        short.run(backend, x_TC[:after], dt_TH[:after], packed([Row(after, 0, 0, True)], SIZES))
        close(kept.conv_state[slot], short.conv_state[0], torch.float64)
        close(kept.ssm_state[slot], short.ssm_state[0], torch.float64)


def test_small_steps_are_not_lost_behind_large_ones() -> None:
    """Running sums of dt * A reach thousands here; their differences in float32 would be off by 1e-4."""
    layer = Layer.random(SIZES, torch.float32)
    layer.weights.a_log_H.fill_(5.0)
    x_TC, dt_TH = tokens_for(60, torch.float32, 8)
    dt_TH[:30], dt_TH[30:] = 8.0, -9.0
    expected = straight_line(layer.to(torch.float64), x_TC.double(), dt_TH.double(), [Row(60, 0, 0, True)])

    _, y_THP = layer.run(TorchStateSpace(), x_TC, dt_TH, packed([Row(60, 0, 0, True)], SIZES))

    close(y_THP[30:], expected[1][30:], torch.float32)


def test_a_batch_that_is_run_again_with_new_contents_is_planned_anew() -> None:
    backend = TorchStateSpace()
    batch = packed([Row(6, 0, 0, True), Row(2, 1, 1, True)], SIZES)
    x_TC, dt_TH = tokens_for(8, torch.float64, 2)
    # Both live to the end: states are told apart by where they lie, and memory that is let go of is given out again.
    first, layer = (Layer.random(SIZES, torch.float64) for _ in range(2))
    for each in (first, layer):
        each.run(backend, x_TC, dt_TH, batch)
    rows = [Row(3, 2, 3), Row(5, 4, 5)]
    for tensor, new in zip(batch[2:8], packed(rows, SIZES)[2:8], strict=True):
        tensor.copy_(new)
    for name in ("state_from_N", "state_to_N"):
        getattr(batch, name).copy_(getattr(packed(rows, SIZES), name))
    expected = straight_line(layer, x_TC, dt_TH, rows)

    _, y_THP = layer.run(backend, x_TC, dt_TH, batch)

    close(y_THP, expected[1], torch.float64)
    close(layer.ssm_state[5], expected[2][5][1], torch.float64)


def test_gated_norm_is_taken_over_each_group() -> None:
    generator = torch.Generator().manual_seed(1)
    y, gate = (torch.randn(3, 12, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.rand(12, generator=generator, dtype=torch.float64)

    found = TorchStateSpace().gated_norm(y, gate, weight, 3, 1e-5)

    for token in range(3):
        for group in range(3):
            span = slice(4 * group, 4 * group + 4)
            part = y[token, span] * gate[token, span] * torch.sigmoid(gate[token, span])
            expected = part / torch.sqrt((part * part).mean() + 1e-5) * weight[span]
            torch.testing.assert_close(found[token, span], expected, atol=1e-14, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_without_the_norms_weights_a_mixer_gives_gated_outputs(dtype: torch.dtype) -> None:
    rows = [Row(1, 0, 0, is_decode=True), Row(7, 2, 3)]
    batch, (x_TC, dt_TH) = packed(rows, SIZES), tokens_for(8, dtype, 1)
    gate_TI = torch.randn(8, SIZES.heads * SIZES.head_dim, dtype=torch.float64).to(dtype)
    layer, plain = Layer.random(SIZES, dtype), Layer.random(SIZES, dtype)
    weights = MixerWeights(layer.conv_weight_CK, layer.conv_bias_C, layer.weights, None, SIZES.groups, 1e-5)
    _, y_THP = plain.run(TorchStateSpace(), x_TC, dt_TH, batch)

    found = TorchStateSpace().mix(MixedParts(gate_TI, x_TC, dt_TH), weights, layer.conv_state, layer.ssm_state, batch)

    gate = gate_TI.double()
    assert found.dtype == dtype
    close(found, y_THP.flatten(1).double() * gate * torch.sigmoid(gate), dtype)
    assert torch.equal(layer.ssm_state[:4], plain.ssm_state[:4])
