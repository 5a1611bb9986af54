"""Every state-space kernel against the torch reference in float64: packed batches, slots, padding, graphs."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from engine.batch import ForwardBatch
from engine.ssm import TorchStateSpace
from engine.ssm.base import NO_LIMITS, MixedParts, MixerWeights, StateSpace
from tests.ssm_batches import Layer, Row, Sizes, packed
from tests.ssm_rewinds import Rewinder, Story, Way

pytest.importorskip("triton")
from engine.ssm.triton import Tiles, TritonStateSpace

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
TOLERANCE = {
    # ‖found - reference‖ / ‖reference‖, the reference in float64 on the same, rounded, inputs.
    ("conv", torch.float32): 1e-6,
    ("conv", torch.bfloat16): 2.5e-3,  # exact inputs, float32 inside, rounded once
    ("scan", torch.float32): 5e-6,  # sums over a row's tokens in another order; exp and log of the hardware
    ("scan", torch.bfloat16): 6e-3,  # reads x, B and C as the convolution rounded them, and is rounded once itself
    ("state", torch.float32): 5e-6,
    ("state", torch.bfloat16): 6e-3,  # in float32, of inputs that the convolution rounded
    ("mamba-scan", torch.float32): 2e-3,  # its products run in TF32
    ("mamba-scan", torch.bfloat16): 2e-2,  # takes states between chunks, and decayed scores, in bfloat16
    ("mamba-state", torch.float32): 2e-3,
    ("mamba-state", torch.bfloat16): 1e-2,
    ("mix", torch.float32): 5e-6,  # as the scan, whose errors the norm keeps
    ("mix", torch.bfloat16): 8e-3,  # as the scan, which may be rounded before the gate, and rounded behind the norm
    ("norm", torch.float32): 1e-6,
    ("norm", torch.bfloat16): 2.5e-3,
    # By the type of the stored state, besides the above: rounded to 8 and 11 bits once a forward, mostly decayed since.
    ("kept", torch.bfloat16): 2.5e-3,
    ("kept", torch.float16): 3e-4,
}
TYPES = [torch.float32, torch.bfloat16]
SIZES = [
    Sizes(),
    Sizes(heads=8, head_dim=64, groups=2, state=128),
    Sizes(heads=4, head_dim=20, groups=1, state=16, width=3),
]
MIXED = [
    Row(1, 0, 0, is_decode=True),
    Row(1, 1, 1, is_decode=True),
    Row(1, 2, 2, is_fresh=True, is_decode=True),
    Row(70, 5, 3, snapshots={1: 6, 64: 7, 65: 8}),
    Row(2, 9, 9, is_fresh=True, snapshots={2: 10}),
    Row(1, 4, 4),
]
DECODE = [Row(1, slot, slot, is_fresh=slot == 3, is_decode=True) for slot in range(7)]
PREFILL = [Row(130, 0, 1, True), Row(257, 2, 2), Row(3, 4, 5), Row(64, 6, 6)]
SHORT = [
    Row(1, 0, 0, is_decode=True),
    Row(2, 1, 1, snapshots={1: 2}),
    Row(5, 3, 4, snapshots={1: 3, 2: 5, 4: 6}),
    Row(1, 7, 7),
    Row(8, 8, 8, is_fresh=True, snapshots={8: 9}),
]
BATCHES = {"mixed": MIXED, "decode": DECODE, "prefill": PREFILL, "short": SHORT}
PADDING = {
    "mixed": {"padding_decode": 3, "padding_prefill": 2, "padding_tokens": 20, "padding_snapshots": 2},
    "decode": {"padding_decode": 9},
    "prefill": {"padding_prefill": 1, "padding_tokens": 33},
    "short": {"padding_decode": 2, "padding_prefill": 2, "padding_tokens": 5, "padding_snapshots": 3},
}


def backends() -> list[str]:
    return ["triton", "mamba_ssm"]


def backend_of(name: str) -> StateSpace:
    if name == "triton":
        return TritonStateSpace()
    if DEVICE == "cpu":
        pytest.skip("mamba-ssm's kernels need a CUDA device")
    if find_spec("mamba_ssm") is None:
        pytest.skip("mamba-ssm is not installed")
    from engine.ssm.mamba_ssm import MambaSsmStateSpace

    return MambaSsmStateSpace()


def inputs_for(batch: ForwardBatch, layer: Layer, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """One wide projection, its part for the convolution and its part for the time steps, as a mixer cuts them."""
    generator = torch.Generator().manual_seed(seed)
    sizes, tokens = layer.sizes, batch.shape.num_tokens
    wide = torch.randn(tokens, sizes.channels + 16 + sizes.heads, generator=generator).to(DEVICE, dtype)
    return wide, wide[:, 8 : 8 + sizes.channels], wide[:, -sizes.heads :]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double().cpu() - expected.double().cpu()).norm() / expected.double().cpu().norm())


def check_batch(
    backend: StateSpace,
    rows: list[Row],
    sizes: Sizes,
    dtype: torch.dtype,
    *,
    limits: tuple[float, float] = NO_LIMITS,
    padding: dict[str, int] | None = None,
) -> None:
    layer = Layer.random(sizes, dtype, device=DEVICE, limits=limits)
    exact = layer.to(torch.float64)
    for number in range(sizes.slots + 1):  # what no row may read
        if not any(row.source == number and not row.is_fresh for row in rows):
            layer.conv_state[number] = torch.nan
            layer.ssm_state[number] = torch.nan
    untouched = layer.ssm_state.clone(), layer.conv_state.clone()
    batch = packed(rows, sizes, **(padding or {}), device=DEVICE)
    _, x, dt = inputs_for(batch, layer, dtype)
    plain = packed(rows, sizes, **(padding or {}))
    expected_mixed, expected_y = exact.run(TorchStateSpace(), x.double().cpu(), dt.double().cpu(), plain)

    mixed, y = layer.run(backend, x, dt, batch)

    real = (torch.arange(batch.shape.num_tokens) - plain.query_start_N[plain.row_T]) < plain.query_len_N[plain.row_T]
    real &= plain.state_to_N[plain.row_T] != sizes.slots  # type: ignore[index]
    prefix = "mamba-" if backend.name == "mamba_ssm" else ""
    assert mixed.dtype == y.dtype == dtype
    assert error(mixed[real], expected_mixed[real]) < TOLERANCE["conv", dtype]
    assert error(y[real], expected_y[real]) < TOLERANCE[f"{prefix}scan", dtype]
    assert torch.isfinite(mixed).all()
    assert torch.isfinite(y).all()
    written = {row.target for row in rows} | {slot for row in rows for slot in row.snapshots.values()}
    for slot in range(sizes.slots):
        if slot in written:
            torch.testing.assert_close(
                layer.conv_state[slot].cpu().double(), exact.conv_state[slot], atol=0.0, rtol=0.0
            )
            assert error(layer.ssm_state[slot], exact.ssm_state[slot]) < TOLERANCE[f"{prefix}state", dtype]
        else:
            for state, before in zip((layer.ssm_state, layer.conv_state), untouched, strict=True):
                torch.testing.assert_close(state[slot], before[slot], atol=0.0, rtol=0.0, equal_nan=True)


@pytest.mark.parametrize("name", backends())
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=["odd", "released", "narrow"])
@pytest.mark.parametrize("rows", BATCHES)
def test_a_packed_batch_equals_the_reference(name: str, dtype: torch.dtype, sizes: Sizes, rows: str) -> None:
    check_batch(backend_of(name), BATCHES[rows], sizes, dtype)


@pytest.mark.parametrize("name", backends())
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", BATCHES)
def test_padding_enters_no_state_and_comes_out_finite(name: str, dtype: torch.dtype, rows: str) -> None:
    check_batch(backend_of(name), BATCHES[rows], SIZES[0], dtype, padding=PADDING[rows])


@pytest.mark.parametrize("name", backends())
@pytest.mark.parametrize("rows", BATCHES)
def test_time_steps_are_kept_within_the_limits(name: str, rows: str) -> None:
    check_batch(backend_of(name), BATCHES[rows], SIZES[0], torch.float32, limits=(0.05, 0.4))


@pytest.mark.parametrize(
    "tiles",
    [
        Tiles(block_p=4, chunk=16),
        Tiles(block_p=8, num_warps=1, chunk=32, chunk_warps=8),
        Tiles(block_p=32, num_warps=8, walk_limit=0),
        Tiles(block_p=64, walk_limit=1000),
        Tiles(chunk_block_p=16, chunk_warps=2),
        Tiles(chunk=64, chunk_block_p=64),
    ],
)
@pytest.mark.parametrize("rows", ["decode", "mixed", "short"])
def test_every_tile_gives_the_same_states(tiles: Tiles, rows: str) -> None:
    check_batch(TritonStateSpace(tiles), BATCHES[rows], SIZES[1], torch.float32)


@pytest.mark.parametrize("way", ["stored", "replayed"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=["odd", "released", "narrow"])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_rows_that_go_back_read_on_as_if_what_was_rejected_had_never_been(
    way: Way, dtype: torch.dtype, sizes: Sizes, width: int
) -> None:
    """Random counts of tokens that stand, rows in any order, prompts and snapshots beside them; NaN elsewhere."""
    rewinder = Rewinder(way, sizes, rows=4, width=width, dtype=dtype, device=DEVICE)
    for number, (found, expected) in enumerate(Story(rewinder, TritonStateSpace(), rows=4, seed=width).run(6)):
        assert error(found, expected) < TOLERANCE["scan" if number % 2 else "conv", dtype]


@pytest.mark.parametrize("tiles", [Tiles(block_p=4, num_warps=1), Tiles(block_p=32, num_warps=8), Tiles(block_p=64)])
def test_every_tile_replays_alike(tiles: Tiles) -> None:
    rewinder = Rewinder("replayed", SIZES[1], rows=3, width=3, dtype=torch.float32, device=DEVICE)
    for found, expected in Story(rewinder, TritonStateSpace(tiles), rows=3, seed=0).run(3):
        assert error(found, expected) < TOLERANCE["scan", torch.float32]


@pytest.mark.parametrize("way", ["stored", "replayed"])
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
def test_states_of_half_the_size_are_rounded_once_a_forward(way: Way, kept: torch.dtype) -> None:
    rewinder = Rewinder(way, SIZES[1], rows=3, width=3, dtype=torch.float32, device=DEVICE, state_dtype=kept)
    pairs = Story(rewinder, TritonStateSpace(), rows=3, seed=1).run(8)
    for found, expected in pairs[1::2]:
        assert error(found, expected) < TOLERANCE["scan", torch.float32] + TOLERANCE["kept", kept]
    assert rewinder.layer.ssm_state.dtype == kept


@pytest.mark.parametrize("name", backends())
@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", BATCHES)
def test_every_kind_of_row_takes_states_of_half_the_size(name: str, kept: torch.dtype, rows: str) -> None:
    backend, sizes = backend_of(name), SIZES[1]
    layer = Layer.random(sizes, torch.float32, device=DEVICE, state_dtype=kept)
    exact, batch = layer.to(torch.float64), packed(BATCHES[rows], sizes, device=DEVICE)
    _, x, dt = inputs_for(batch, layer, torch.float32)
    plain = packed(BATCHES[rows], sizes)
    _, expected = exact.run(TorchStateSpace(), x.double().cpu(), dt.double().cpu(), plain)

    _, y = layer.run(backend, x, dt, batch)

    prefix = "mamba-" if name == "mamba_ssm" else ""
    assert error(y, expected) < TOLERANCE[f"{prefix}scan", torch.float32]
    for row in BATCHES[rows]:
        for slot in (row.target, *row.snapshots.values()):
            limit = TOLERANCE[f"{prefix}state", torch.float32] + TOLERANCE["kept", kept]
            assert error(layer.ssm_state[slot], exact.ssm_state[slot]) < limit


def test_states_may_be_kept_in_bfloat16() -> None:
    layer = Layer.random(SIZES[1], torch.bfloat16, device=DEVICE, state_dtype=torch.bfloat16)
    exact, batch = layer.to(torch.float64), packed(DECODE, SIZES[1], device=DEVICE)
    _, x, dt = inputs_for(batch, layer, torch.bfloat16)
    _, expected = exact.run(TorchStateSpace(), x.double().cpu(), dt.double().cpu(), packed(DECODE, SIZES[1]))

    _, y = layer.run(TritonStateSpace(), x, dt, batch)

    assert layer.ssm_state.dtype == torch.bfloat16
    assert error(y, expected) < TOLERANCE["scan", torch.bfloat16]
    assert error(layer.ssm_state[:7], exact.ssm_state[:7]) < TOLERANCE["state", torch.bfloat16]


def test_small_time_steps_keep_their_digits() -> None:
    """log(1 + exp(x)) as it stands is off by 1e-4 where the step is 1e-3, the smallest that training starts with."""
    sizes = SIZES[1]
    layer = Layer.random(sizes, torch.float32, device=DEVICE)
    layer.weights.dt_bias_H.fill_(-9.0)
    layer.weights.d_H.zero_()
    rows = [Row(1, 0, 0, True, True)]
    exact, batch = layer.to(torch.float64), packed(rows, sizes, device=DEVICE)
    _, x, dt = inputs_for(batch, layer, torch.float32)
    _, expected = exact.run(TorchStateSpace(), x.double().cpu(), dt.double().cpu(), packed(rows, sizes))

    _, y = layer.run(TritonStateSpace(), x, dt, batch)

    assert error(y, expected) < TOLERANCE["scan", torch.float32]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("groups", "size"), [(1, 96), (8, 896), (3, 20)])
def test_gated_norm_equals_the_reference(dtype: torch.dtype, groups: int, size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(19, 2 * groups * size + 7, generator=generator).to(DEVICE, dtype)
    gate, y = wide[:, : groups * size], wide[:, -groups * size :].contiguous()
    weight = torch.randn(groups * size, generator=generator).to(DEVICE, dtype)
    expected = TorchStateSpace().gated_norm(y.double(), gate.double(), weight.double(), groups, 1e-5)

    found = TritonStateSpace().gated_norm(y, gate, weight, groups, 1e-5)

    assert found.dtype == dtype
    assert error(found, expected) < TOLERANCE["norm", dtype]


def mixer(layer: Layer, dtype: torch.dtype, *, tokens: int) -> tuple[MixerWeights, MixedParts]:
    """What a mixer between its projections has of a layer, and one wide projection of ``tokens`` tokens as it cuts it.

    Where ``layer`` is on the CPU in float64, the same numbers.
    """
    generator = torch.Generator().manual_seed(1)
    sizes, device = layer.sizes, layer.conv_state.device
    inner = sizes.heads * sizes.head_dim
    gain = torch.randn(inner, generator=generator).to(dtype)
    wide = torch.randn(tokens, inner + sizes.channels + sizes.heads, generator=generator).to(dtype)
    wide, gain = (each.to(device, layer.conv_state.dtype) for each in (wide, gain))
    weights = MixerWeights(layer.conv_weight_CK, layer.conv_bias_C, layer.weights, gain, sizes.groups, 1e-5)
    return weights, MixedParts(*wide.split((inner, sizes.channels, sizes.heads), dim=1))


@pytest.mark.parametrize("name", backends())
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=["odd", "released", "narrow"])
@pytest.mark.parametrize("rows", ["decode", "moving", "alone", "many", "mixed"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_mixer_between_its_projections_equals_the_reference(
    name: str, dtype: torch.dtype, sizes: Sizes, rows: str, bias: bool
) -> None:
    """A few decode rows in one pass, in place and from slot to slot, padding beside them; others by parts."""
    if (name, rows) == ("mamba_ssm", "moving"):
        pytest.skip("mamba-ssm updates a state where it lies, and decode rows of the engine always do")
    backend, dummy = TritonStateSpace(Tiles(step_limit=8)) if name == "triton" else backend_of(name), sizes.slots
    batches = {
        "decode": DECODE,
        "moving": [Row(1, slot, slot + 6, is_fresh=slot == 2, is_decode=True) for slot in range(4)],
        "alone": [Row(1, 5, 5, is_decode=True)],
        "many": [Row(1, slot, slot, is_decode=True) for slot in range(11)],
        "mixed": MIXED,
    }
    layer = Layer.random(sizes, dtype, device=DEVICE, bias=bias)
    exact = layer.to(torch.float64)
    chosen = batches[rows]
    read = {row.source for row in chosen if not row.is_fresh}
    for number in range(sizes.slots + 1):
        if number not in read:
            layer.conv_state[number] = torch.nan
            layer.ssm_state[number] = torch.nan
    untouched = layer.ssm_state.clone(), layer.conv_state.clone()
    padding = {"padding_decode": 1} if rows in ("decode", "moving") else {}
    batch, plain = packed(chosen, sizes, **padding, device=DEVICE), packed(chosen, sizes, **padding)
    weights, parts = mixer(layer, dtype, tokens=batch.shape.num_tokens)
    wide_weights, wide_parts = mixer(exact, dtype, tokens=batch.shape.num_tokens)
    expected = TorchStateSpace().mix(wide_parts, wide_weights, exact.conv_state, exact.ssm_state, plain)

    found = backend.mix(parts, weights, layer.conv_state, layer.ssm_state, batch)

    real = plain.state_to_N[plain.row_T] != dummy  # type: ignore[index]
    prefix = "mamba-" if name == "mamba_ssm" else ""
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert torch.isfinite(found).all()
    assert error(found[real], expected[real]) < TOLERANCE["mamba-scan" if prefix else "mix", dtype]
    written = {row.target for row in chosen} | {slot for row in chosen for slot in row.snapshots.values()}
    for slot in range(sizes.slots):
        if slot in written:
            assert torch.equal(layer.conv_state[slot].cpu().double(), exact.conv_state[slot])
            assert error(layer.ssm_state[slot], exact.ssm_state[slot]) < TOLERANCE[f"{prefix}state", dtype]
        else:
            for state, before in zip((layer.ssm_state, layer.conv_state), untouched, strict=True):
                torch.testing.assert_close(state[slot], before[slot], atol=0.0, rtol=0.0, equal_nan=True)


@pytest.mark.parametrize("name", backends())
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_without_its_norm_a_mixer_gives_gated_outputs(name: str, dtype: torch.dtype, rows: list[Row]) -> None:
    sizes, backend = SIZES[1], backend_of(name)
    layer = Layer.random(sizes, dtype, device=DEVICE)
    exact, batch, plain = layer.to(torch.float64), packed(rows, sizes, device=DEVICE), packed(rows, sizes)
    weights, parts = mixer(layer, dtype, tokens=batch.shape.num_tokens)
    wide_weights, wide_parts = mixer(exact, dtype, tokens=batch.shape.num_tokens)
    weights, wide_weights = (each._replace(norm_weight_I=None) for each in (weights, wide_weights))
    expected = TorchStateSpace().mix(wide_parts, wide_weights, exact.conv_state, exact.ssm_state, plain)

    found = backend.mix(parts, weights, layer.conv_state, layer.ssm_state, batch)

    real = plain.state_to_N[plain.row_T] != sizes.slots  # type: ignore[index]
    kind = "mamba-" if name == "mamba_ssm" else ""
    assert found.dtype == dtype
    assert error(found[real], expected[real]) < TOLERANCE[f"{kind}scan", dtype]
    assert error(layer.ssm_state[:7], exact.ssm_state[:7]) < TOLERANCE[f"{kind}state", dtype]


@pytest.mark.parametrize("kept", [torch.bfloat16, torch.float16])
def test_one_pass_takes_states_of_half_the_size_and_limits_of_time_steps(kept: torch.dtype) -> None:
    sizes = SIZES[1]
    layer = Layer.random(sizes, torch.float32, device=DEVICE, state_dtype=kept, limits=(0.05, 0.4))
    exact = layer.to(torch.float64)
    weights, parts = mixer(layer, torch.float32, tokens=7)
    wide_weights, wide_parts = mixer(exact, torch.float32, tokens=7)
    plain = packed(DECODE, sizes)
    expected = TorchStateSpace().mix(wide_parts, wide_weights, exact.conv_state, exact.ssm_state, plain)

    batch = packed(DECODE, sizes, device=DEVICE)
    found = TritonStateSpace(Tiles(step_limit=7)).mix(parts, weights, layer.conv_state, layer.ssm_state, batch)

    assert error(found, expected) < TOLERANCE["mix", torch.float32]
    assert error(layer.ssm_state[:7], exact.ssm_state[:7]) < TOLERANCE["state", torch.float32] + TOLERANCE["kept", kept]


@pytest.mark.parametrize(("block_p", "programs"), [(4, 1000), (16, 1000), (16, 1), (64, 1)])
def test_one_pass_gives_what_the_parts_give(block_p: int, programs: int) -> None:
    """Token after token in the same slots, as decoding does."""
    sizes, batch = SIZES[1], packed(DECODE, SIZES[1], device=DEVICE)
    layers = [Layer.random(sizes, torch.float32, device=DEVICE) for _ in range(2)]
    tiles = (Tiles(block_p=block_p, step_limit=7, step_programs=programs), Tiles(step_limit=0))
    backends = [TritonStateSpace(each) for each in tiles]
    for _ in range(4):
        pair = []
        for layer, backend in zip(layers, backends, strict=True):
            weights, parts = mixer(layer, torch.float32, tokens=7)
            pair.append(backend.mix(parts, weights, layer.conv_state, layer.ssm_state, batch))
        assert error(*pair) < TOLERANCE["mix", torch.float32]
    assert torch.equal(layers[0].conv_state[:7], layers[1].conv_state[:7])
    assert error(layers[0].ssm_state[:7], layers[1].ssm_state[:7]) < TOLERANCE["state", torch.float32]


@on_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("limit", [0, 8])
def test_states_read_early_are_those_of_the_token_before(limit: int) -> None:
    """Many tokens in one graph, each begun by an ordinary kernel as forwards are, and nothing to wait for between."""
    sizes, rows, count, dtype = SIZES[1], [Row(1, slot, slot, is_decode=True) for slot in range(2)], 40, torch.bfloat16
    layer = Layer.random(sizes, dtype, device=DEVICE)
    exact = layer.to(torch.float64)
    batch, plain = packed(rows, sizes, device=DEVICE), packed(rows, sizes)
    weights, parts = mixer(layer, dtype, tokens=2 * count)
    wide_weights, wide_parts = mixer(exact, dtype, tokens=2 * count)
    backend, places = TritonStateSpace(Tiles(step_limit=limit)), [slice(at, at + 2) for at in range(0, 2 * count, 2)]
    expected = [
        TorchStateSpace().mix(
            MixedParts(*(each[at] for each in wide_parts)), wide_weights, exact.conv_state, exact.ssm_state, plain
        )
        for at in places
    ]
    begun = [each[:2].clone() for each in parts]
    kept = layer.conv_state.clone(), layer.ssm_state.clone()

    def run() -> list[Tensor]:
        found = []
        for at in places:
            for held, each in zip(begun, parts, strict=True):
                held.copy_(each[at])
            found.append(backend.mix(MixedParts(*begun), weights, layer.conv_state, layer.ssm_state, batch))
        return found

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(5):
        layer.conv_state.copy_(kept[0])
        layer.ssm_state.copy_(kept[1])
        graph.replay()
        torch.cuda.synchronize()

        for one, other in zip(found, expected, strict=True):
            assert error(one, other) < TOLERANCE["mix", dtype]
        assert torch.equal(layer.conv_state[:2].cpu().double(), exact.conv_state[:2])
        assert error(layer.ssm_state[:2], exact.ssm_state[:2]) < TOLERANCE["state", dtype]


@on_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("name", backends())
@pytest.mark.parametrize("rows", BATCHES)
def test_a_captured_graph_reads_the_slots_of_its_replay(name: str, rows: str) -> None:
    """Captured on one batch, replayed on another of the same shape: other slots, lengths and contents."""
    backend, sizes, dtype = backend_of(name), SIZES[1], torch.bfloat16
    longest = max(row.count for row in BATCHES[rows])
    batch = packed(BATCHES[rows], sizes, longest=longest, **PADDING[rows], device=DEVICE)
    layer = Layer.random(sizes, dtype, device=DEVICE)
    kept = layer.conv_state.clone(), layer.ssm_state.clone()
    wide, x, dt = inputs_for(batch, layer, dtype)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        layer.run(backend, x, dt, batch)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            _, y = layer.run(backend, x, dt, batch)
    torch.cuda.synchronize()

    changed = []
    for row in BATCHES[rows]:
        less = int(row.count > 1 and all(after > 1 for after in row.snapshots))  # no two snapshots at one place
        snapshots = {after - less: (slot + 1) % 12 for after, slot in row.snapshots.items()}
        slots = (row.source + 1) % 12, (row.target + 1) % 12
        changed.append(Row(row.count - less, *slots, row.is_fresh, row.is_decode, snapshots))
    fewer = sum(row.count for row in BATCHES[rows]) - sum(row.count for row in changed)
    padding = {**PADDING[rows], "padding_tokens": PADDING[rows].get("padding_tokens", 0) + fewer}
    new = packed(changed, sizes, longest=longest, **padding, device=DEVICE)
    assert new.shape == batch.shape
    for old_tensor, new_tensor in zip(batch, new, strict=True):
        if isinstance(old_tensor, Tensor):
            old_tensor.copy_(new_tensor)
        elif isinstance(old_tensor, tuple):
            for old_part, new_part in zip(old_tensor, new_tensor, strict=True):
                old_part.copy_(new_part)
    wide.copy_(inputs_for(new, layer, dtype, seed=9)[0])
    expected = Layer.random(sizes, dtype, device=DEVICE)
    for state, before in zip((expected.conv_state, expected.ssm_state), kept, strict=True):
        state.copy_(before)
    layer.conv_state.copy_(kept[0])
    layer.ssm_state.copy_(kept[1])

    graph.replay()
    _, eager = expected.run(backend, x, dt, new)
    torch.cuda.synchronize()

    real = (torch.arange(new.shape.num_tokens, device=DEVICE) - new.query_start_N[new.row_T]) < new.query_len_N[
        new.row_T
    ]
    torch.testing.assert_close(y[real], eager[real], atol=0.0, rtol=0.0)
    torch.testing.assert_close(layer.conv_state[:-1], expected.conv_state[:-1], atol=0.0, rtol=0.0)
    torch.testing.assert_close(layer.ssm_state[:-1], expected.ssm_state[:-1], atol=0.0, rtol=0.0)


@on_cuda
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("width", [2, 4])
def test_a_captured_graph_replays_as_many_tokens_as_the_device_says(dtype: torch.dtype, width: int) -> None:
    """Captured once; before each replay other counts, slots and contents: bit for bit what an eager forward gives."""
    rows, backend = 5, TritonStateSpace()
    captured = Rewinder("replayed", SIZES[1], rows=rows, width=width, dtype=dtype, device=DEVICE)
    eager = Rewinder("replayed", SIZES[1], rows=rows, width=width, dtype=dtype, device=DEVICE)
    batch = captured.batch([captured.step(i, 0) for i in range(rows - 1)], rows - 1, 1)
    wide, x, dt = inputs_for(batch, captured.layer, dtype)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        captured.layer.run(backend, x, dt, batch)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            mixed, y = captured.layer.run(backend, x, dt, batch)
    torch.cuda.synchronize()
    for mine, theirs in zip(states_of(captured.layer), states_of(eager.layer), strict=True):
        mine.copy_(theirs)

    for number in range(6):
        slots = [(3 * number + i) % rows for i in range(rows - 1)]
        new = captured.batch([captured.step(slot, (number + slot) % (width + 1)) for slot in slots], rows - 1, 1)
        assert new.shape == batch.shape
        for old_tensor, new_tensor in zip(batch, new, strict=True):
            if isinstance(old_tensor, Tensor):
                old_tensor.copy_(new_tensor)
        wide.copy_(inputs_for(new, captured.layer, dtype, seed=number)[0])
        graph.replay()
        expected_mixed, expected_y = eager.layer.run(backend, x, dt, new)
        torch.cuda.synchronize()

        torch.testing.assert_close(mixed, expected_mixed, atol=0.0, rtol=0.0)
        torch.testing.assert_close(y, expected_y, atol=0.0, rtol=0.0)
        for mine, theirs in zip(states_of(captured.layer), states_of(eager.layer), strict=True):
            torch.testing.assert_close(mine[:-1], theirs[:-1], atol=0.0, rtol=0.0)


def states_of(layer: Layer) -> tuple[Tensor, ...]:
    """Whatever a slot holds."""
    assert layer.kept is not None
    return layer.conv_state, layer.ssm_state, *layer.kept
