"""Every fused kernel against plain torch in float64: random shapes, poisoned outputs, entries that must not be read."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels import TorchKernels
from engine.kernels.base import Activation

pytest.importorskip("triton")
from engine.kernels.triton import TritonKernels, swiglu
from engine.kernels.triton_products import (
    ARRIVALS,
    FEW_ROWS,
    MOST_ROWS,
    Arrivals,
    Tile,
    few_rows,
    few_rows_options,
    few_rows_tile,
    one_row,
    one_row_tile,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {
    # ‖out - reference‖ / ‖reference‖; one rounding of the result is 2^-9 / sqrt(3) = 1.1e-3 in bfloat16.
    ("pointwise", torch.bfloat16): 2.5e-3,  # inputs are exact, the result is rounded once
    ("pointwise", torch.float16): 3.5e-4,
    ("product", torch.bfloat16): 5e-3,  # a normed input or SiLU's factor is rounded before the last rounding
    ("product", torch.float16): 7e-4,
    ("tables", torch.float32): 1e-6,
}
KERNELS, REFERENCE = TritonKernels(), TorchKernels()
HALF = [torch.bfloat16, torch.float16]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * scale).to(dtype)


def norm(size: int, dtype: torch.dtype = torch.bfloat16, eps: float = 1e-6) -> SimpleNamespace:
    return SimpleNamespace(weight=random(size, dtype=dtype) * 0.2 + 1.0, eps=eps)


def projection(outputs: int, inputs: int, *, bias: bool, dtype: torch.dtype = torch.bfloat16) -> SimpleNamespace:
    weight = random(outputs, inputs, dtype=dtype, scale=inputs**-0.5)
    return SimpleNamespace(weight=weight, bias=random(outputs, dtype=dtype) if bias else None)


def wide(thing):
    """The same in float64: tensors, and the parameters of norms and projections."""
    if isinstance(thing, Tensor):
        return thing.double() if thing.is_floating_point() else thing
    if isinstance(thing, tuple):
        return tuple(wide(item) for item in thing)
    if isinstance(thing, SimpleNamespace):
        return SimpleNamespace(**{name: wide(value) for name, value in vars(thing).items()})
    return thing


def check(kind: str, out: Tensor, reference: Tensor) -> None:
    error = float((out.double() - reference.double()).norm() / reference.double().norm())
    assert error < TOLERANCE[kind, out.dtype], f"relative error {error:.2e}"


class TestEmbed:
    @pytest.mark.parametrize(("tokens", "size"), [(1, 64), (7, 3072), (300, 1000)])
    def test_gives_the_rows_that_are_named(self, tokens: int, size: int) -> None:
        table, ids = random(501, size), torch.randint(0, 501, (tokens, 2), device=DEVICE)[:, 1]

        assert torch.equal(KERNELS.embed(ids, table), table[ids])


class TestRmsNorm:
    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize(("rows", "size"), [(1, 64), (17, 1024), (3, 1152), (256, 4096)])
    def test_equals_the_reference(self, rows: int, size: int, dtype: torch.dtype) -> None:
        x, parameters = random(rows, size, dtype=dtype, scale=3.0), norm(size, dtype)

        check("pointwise", KERNELS.rms_norm(x, parameters), REFERENCE.rms_norm(wide(x), wide(parameters)))


class TestSwiglu:
    @pytest.mark.parametrize(("rows", "size"), [(1, 160), (33, 3072), (5, 4096)])
    def test_equals_the_reference(self, rows: int, size: int) -> None:
        gate_up = random(rows, 2 * size)
        gate, up = gate_up.double().chunk(2, dim=-1)

        check("pointwise", swiglu(gate_up), torch.nn.functional.silu(gate) * up)


class TestRelu2:
    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("shape", [(1, 160), (33, 3072), (5, 3, 7), (0, 64)])
    def test_equals_the_reference_in_every_bit(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        x = random(*shape, dtype=dtype, scale=3.0)

        assert torch.equal(KERNELS.activate(x, "relu2"), REFERENCE.activate(x, "relu2"))

    def test_keeps_nan_and_infinity(self) -> None:
        odd = torch.tensor([[float("nan"), float("inf"), -float("inf"), -0.0]], device=DEVICE).bfloat16()

        found = KERNELS.activate(odd, "relu2")

        assert found[0, 0].isnan()
        assert found[0, 1:].tolist() == [float("inf"), 0.0, 0.0]


class TestRotationTables:
    def test_keep_their_accuracy_at_far_positions(self) -> None:
        positions = torch.tensor([0, 1, 77, 4097, 40959], device=DEVICE)
        frequencies = 1_000_000.0 ** -(torch.arange(64, device=DEVICE) / 64)

        found = KERNELS.rotation_tables(positions, frequencies, 1.25)

        for table, expected in zip(found, REFERENCE.rotation_tables(positions, frequencies, 1.25), strict=True):
            assert table.shape == expected.shape
            check("tables", table, expected)


class TestRotateAndAppend:
    @pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 64), (4, 4, 72), (6, 2, 16)])
    @pytest.mark.parametrize("has_norm", [True, False])
    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("turned", [1.0, 0.5, 0.25])
    def test_writes_the_given_slots_and_no_other(
        self, heads: int, kv_heads: int, head_dim: int, has_norm: bool, dtype: torch.dtype, turned: float
    ) -> None:
        tokens, num_slots = 19, 5 * 16
        qkv = random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
        norms = (norm(head_dim, dtype), norm(head_dim, dtype, eps=1e-3)) if has_norm else None
        positions = torch.randint(0, 4000, (tokens,), device=DEVICE)
        half = int(head_dim * turned) // 2
        frequencies = 10_000.0 ** -(torch.arange(half, device=DEVICE) / half)
        slots = torch.randperm(num_slots, device=DEVICE)[:tokens]
        cache = tuple(
            torch.full((5, 16, kv_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2)
        )
        expected_cache = wide(cache)
        tables = REFERENCE.rotation_tables(positions, frequencies.double(), 1.0)

        q = KERNELS.rotate_and_append(qkv, norms, tuple(t.float() for t in tables), cache, slots)

        expected = REFERENCE.rotate_and_append(wide(qkv), wide(norms), tables, expected_cache, slots)
        check("pointwise", q, expected)
        for tensor, reference in zip(cache, expected_cache, strict=True):
            assert torch.equal(tensor.isnan(), reference.isnan())
            check("pointwise", tensor.flatten(0, 1)[slots], reference.flatten(0, 1)[slots])


class TestProducts:
    """One row and a few rows take kernels of our own, more take cuBLAS."""

    ROWS = (1, 2, 17, 32, 65)

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize(
        ("outputs", "inputs", "bias"), [(96, 64, True), (1024, 2048, False), (1000, 1152, True), (8192, 256, True)]
    )
    def test_linear_and_norm_before_it(self, rows: int, outputs: int, inputs: int, bias: bool) -> None:
        x, parameters, p = random(rows, inputs, scale=2.0), norm(inputs), projection(outputs, inputs, bias=bias)

        plain = KERNELS.linear(x, p.weight, p.bias)
        normed = KERNELS.norm_linear(x, parameters, p.weight, p.bias)

        w = wide(p)
        check("product", plain, REFERENCE.linear(wide(x), w.weight, w.bias))
        check("product", normed, REFERENCE.norm_linear(wide(x), wide(parameters), w.weight, w.bias))

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize(("size", "inputs", "bias"), [(160, 64, True), (3072, 1024, False), (1000, 1152, True)])
    def test_swiglu(self, rows: int, size: int, inputs: int, bias: bool) -> None:
        x, parameters, p = random(rows, inputs), norm(inputs), projection(2 * size, inputs, bias=bias)

        check(
            "product",
            KERNELS.norm_activate(x, parameters, p, "swiglu"),
            REFERENCE.norm_activate(wide(x), wide(parameters), wide(p), "swiglu"),
        )

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize(("size", "inputs", "bias"), [(160, 64, True), (12288, 256, False), (1000, 1152, True)])
    def test_relu2(self, rows: int, size: int, inputs: int, bias: bool) -> None:
        """A square doubles the relative error of what is squared: of a product that is rounded before it, too."""
        x, parameters, p = random(rows, inputs), norm(inputs), projection(size, inputs, bias=bias)

        check(
            "product",
            KERNELS.norm_activate(x, parameters, p, "relu2"),
            REFERENCE.norm_activate(wide(x), wide(parameters), wide(p), "relu2"),
        )

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize(("outputs", "inputs", "bias"), [(64, 96, True), (1024, 3072, False), (1152, 1000, True)])
    def test_added_to_the_residual(self, rows: int, outputs: int, inputs: int, bias: bool) -> None:
        x, p, residual = random(rows, inputs), projection(outputs, inputs, bias=bias), random(rows, outputs, scale=4.0)
        expected = REFERENCE.linear_add(wide(x), wide(p), wide(residual))

        check("product", KERNELS.linear_add(x, p, residual), expected)

    @pytest.mark.parametrize(
        "tile", [Tile(4, 64, 4), Tile(16, 128, 8), Tile(1, 1024, 4), Tile(16, 64, 4, prefetch=640)]
    )
    @pytest.mark.parametrize("inputs", [72, 727, 728])
    def test_writes_every_output_and_none_beyond(self, tile: Tile, inputs: int) -> None:
        outputs = 101
        x, p = random(1, inputs), projection(outputs, inputs, bias=False)
        guarded = torch.full((3, outputs), float("nan"), dtype=torch.bfloat16, device=DEVICE)

        one_row(x, p.weight, tile, out=guarded[1:2])

        check("product", guarded[1:2], wide(x) @ wide(p.weight).T)
        assert guarded[[0, 2]].isnan().all()

    def test_tiles_hold_powers_of_two(self) -> None:
        for outputs, inputs in ((4096, 1024), (1024, 3072), (12288, 4096), (151936, 1024), (100, 72)):
            for is_swiglu in (False, True):
                tile = one_row_tile(outputs, inputs, is_swiglu=is_swiglu)
                assert all(size & (size - 1) == 0 for size in (tile.block_n, tile.block_k, tile.num_warps))

    @pytest.mark.parametrize("rows", [1, 8])
    def test_float16_is_computed(self, rows: int) -> None:
        x, parameters = random(rows, 1024, dtype=torch.float16, scale=200.0), norm(1024, torch.float16)
        p = projection(512, 1024, bias=False, dtype=torch.float16)

        out = KERNELS.norm_linear(x, parameters, p.weight)

        check("product", out, REFERENCE.norm_linear(wide(x), wide(parameters), wide(p).weight))


@pytest.mark.skipif(DEVICE == "cpu", reason="Triton's interpreter does not know Gluon")
class TestFewRows:
    """Tiles, rows and sizes that divide each other and that do not."""

    TILES = (
        Tile(32, 256, 4, prefetch=512),
        Tile(16, 512, 8, prefetch=4096),
        Tile(64, 128, 2),
        Tile(16, 256, 8, prefetch=1024),
        Tile(32, 256, 4, prefetch=512, ahead=2),
    )
    SPLIT = (Tile(32, 256, 4, prefetch=512, splits=2), Tile(16, 128, 2, splits=4), Tile(16, 128, 2, splits=4, ahead=2))
    ROWS = (1, 2, 7, 8, 15, 16, 17, 32)
    SIZES = ((1000, 2048), (101, 1536), (64, 512))

    def call(
        self,
        x: Tensor,
        p: SimpleNamespace,
        tile: Tile,
        *,
        parameters: SimpleNamespace | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """The result, whose neighbours in memory stay as they are."""
        size = p.weight.shape[0] // (2 if activation == "swiglu" else 1)
        guarded = torch.full((x.shape[0] + 2, size), float("nan"), dtype=x.dtype, device=DEVICE)
        around: Any = {"norm": parameters, "activation": activation, "residual": residual}
        out = few_rows(x, p.weight, tile, bias=p.bias, out=guarded[1:-1], **around)
        assert guarded[[0, -1]].isnan().all()
        return out

    @pytest.mark.parametrize("dtype", HALF)
    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize(("outputs", "inputs"), SIZES)
    @pytest.mark.parametrize("tile", [*TILES, *SPLIT])
    def test_added_to_the_residual(self, rows: int, outputs: int, inputs: int, tile: Tile, dtype: torch.dtype) -> None:
        x, p = random(rows, inputs, dtype=dtype), projection(outputs, inputs, bias=True, dtype=dtype)
        residual = random(rows, outputs, dtype=dtype, scale=4.0)

        out = self.call(x, p, tile, residual=residual)

        check("product", out, REFERENCE.linear_add(wide(x), wide(p), wide(residual)))

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize(("outputs", "inputs"), SIZES)
    @pytest.mark.parametrize("tile", TILES)
    def test_behind_a_norm(self, rows: int, outputs: int, inputs: int, tile: Tile) -> None:
        x, p, parameters = random(rows, inputs, scale=30.0), projection(outputs, inputs, bias=True), norm(inputs)

        out = self.call(x, p, tile, parameters=parameters)

        w = wide(p)
        check("product", out, REFERENCE.norm_linear(wide(x), wide(parameters), w.weight, w.bias))

    @pytest.mark.parametrize("activation", ["relu2", "swiglu"])
    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize(("outputs", "inputs"), SIZES)
    @pytest.mark.parametrize("tile", TILES[1:2])
    def test_activated(self, rows: int, outputs: int, inputs: int, tile: Tile, activation: Activation) -> None:
        x, parameters = random(rows, inputs), norm(inputs)
        p = projection(outputs * (2 if activation == "swiglu" else 1), inputs, bias=True)

        out = self.call(x, p, tile, parameters=parameters, activation=activation)

        check("product", out, REFERENCE.norm_activate(wide(x), wide(parameters), wide(p), activation))

    @pytest.mark.parametrize("rows", ROWS)
    @pytest.mark.parametrize(
        ("tile", "outputs", "inputs"),
        [
            (Tile(16, 1024, 8, ahead=2), 200, 7168),
            (Tile(16, 1024, 8), 200, 7168),
            (Tile(32, 256, 4), 64, 512),
            (Tile(32, 256, 2, splits=4), 200, 7168),
        ],
    )
    def test_behind_norms_of_parts(self, rows: int, tile: Tile, outputs: int, inputs: int) -> None:
        parts, x, p = tile.num_warps * tile.splits, random(rows, inputs), projection(outputs, inputs, bias=True)
        x *= torch.logspace(-1, 1, parts, device=DEVICE).repeat_interleave(inputs // parts).bfloat16()
        parameters, residual = norm(inputs), random(rows, outputs)
        expected = REFERENCE.parts_norm_linear_add(wide(x), wide(parameters), parts, wide(p), wide(residual))

        out = few_rows(x, p.weight, tile, norm=parameters, num_parts=parts, bias=p.bias, residual=residual)

        check("product", out, expected)

    def test_a_result_may_take_the_place_of_the_residual(self) -> None:
        x, p, residual = random(5, 1024), projection(300, 1024, bias=False), random(5, 300)
        expected = REFERENCE.linear_add(wide(x), wide(p), wide(residual))

        assert few_rows(x, p.weight, self.TILES[0], residual=residual, out=residual) is residual
        check("product", residual, expected)

    @pytest.mark.parametrize("tile", TILES)
    def test_two_runs_agree_in_every_bit(self, tile: Tile) -> None:
        x, p, parameters = random(15, 2048), projection(1000, 2048, bias=True), norm(2048)

        assert torch.equal(*(self.call(x, p, tile, parameters=parameters) for _ in range(2)))

    @pytest.mark.parametrize("tile", TILES)
    def test_a_row_is_the_same_in_every_bit_beside_any_others(self, tile: Tile) -> None:
        x, p, parameters = random(16, 2048), projection(1000, 2048, bias=True), norm(2048)
        others = random(8, 2048, scale=50.0)
        others[5] = x[5]

        alone = self.call(x[:8], p, tile, parameters=parameters)

        assert torch.equal(self.call(others, p, tile, parameters=parameters)[5], alone[5])
        assert torch.equal(self.call(x, p, tile, parameters=parameters)[:8], alone)

    @pytest.mark.parametrize("tile", SPLIT)
    def test_programs_that_share_outputs_give_the_same_in_every_bit_however_often(self, tile: Tile) -> None:
        """Whichever of them comes last; eagerly and in a graph, beside products on another stream."""
        x, p = random(8, 2048), projection(3000, 2048, bias=True)
        expected, other = self.call(x, p, tile), torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = [few_rows(x, p.weight, tile, bias=p.bias) for _ in range(20)]

        found = []
        for _ in range(20):
            with torch.cuda.stream(stream):
                graph.replay()
            with torch.cuda.stream(other):
                found += [few_rows(x, p.weight, tile, bias=p.bias) for _ in range(20)]
            torch.cuda.synchronize()

            assert all(torch.equal(each, expected) for each in captured)
        assert all(torch.equal(each, expected) for each in found)

    def test_a_row_that_is_not_finite_leaves_the_others_alone(self) -> None:
        x, p, parameters = random(8, 1024), projection(256, 1024, bias=False), norm(1024)
        clean = self.call(x, p, self.TILES[0], parameters=parameters)
        x[3] = float("nan")

        found = self.call(x, p, self.TILES[0], parameters=parameters)

        assert found[3].isnan().all()
        assert torch.equal(found[[0, 1, 2, 4, 5, 6, 7]], clean[[0, 1, 2, 4, 5, 6, 7]])

    def test_a_tile_of_the_table_fits_every_product_of_the_shapes_we_time(self) -> None:
        sizes = ((1024, 2048), (4096, 12288), (576, 1536), (12288, 3072), (16496, 3072), (6144, 3072), (3072, 7168))
        splits = set()
        for (outputs, inputs), rows, is_normed in itertools.product(
            (*sizes, (3072, 8192)), (1, 2, 8, 16), (False, True)
        ):
            x, p, parameters = random(rows, inputs), projection(outputs, inputs, bias=False), norm(inputs)
            tile = few_rows_tile(rows, outputs, inputs, is_normed=is_normed)
            assert rows > 8 or tile is not None
            if tile is not None:
                splits.add(tile.splits)
                w, before = wide(p).weight, parameters if is_normed else None
                expected = REFERENCE.norm_linear(wide(x), wide(parameters), w) if is_normed else wide(x) @ w.T
                check("product", self.call(x, p, tile, parameters=before), expected)
        assert splits == {1, 4}

    @pytest.mark.parametrize("inputs", [32, 96, 288, 640, 1056, 20000])
    @pytest.mark.parametrize(("outputs", "is_swiglu"), [(1, False), (64, False), (40000, True), (1 << 22, False)])
    def test_every_tile_of_the_table_has_options(self, inputs: int, outputs: int, is_swiglu: bool) -> None:
        for rows, is_normed in itertools.product((2, 8, 16), (False, True)):
            tile = few_rows_tile(rows, outputs, inputs, is_normed=is_normed, is_swiglu=is_swiglu and is_normed)
            if tile is not None:
                around: dict[str, Any] = {"norm": is_normed, "bias": False, "residual": not is_normed}
                options = few_rows_options(tile, rows, outputs, inputs, activation=None, **around)
                assert inputs % (tile.splits * options["WARPS"] * options["BLOCK_K"]) == 0
                assert options["BLOCK_K"] >= 32

    @pytest.mark.parametrize("rows", [1, 3])
    def test_a_product_of_one_output(self, rows: int) -> None:
        """A gate of all tokens is one."""
        x, p, parameters = random(rows, 512), projection(1, 512, bias=True), norm(512)

        w = wide(p)
        check("product", KERNELS.linear(x, p.weight, p.bias), REFERENCE.linear(wide(x), w.weight, w.bias))
        check(
            "product",
            KERNELS.norm_linear(x, parameters, p.weight, p.bias),
            REFERENCE.norm_linear(wide(x), wide(parameters), w.weight, w.bias),
        )

    def test_counters_belong_to_a_stream_and_are_left_at_nothing(self) -> None:
        counters, device = Arrivals(), torch.device("cuda", torch.cuda.current_device())
        one, other = torch.cuda.Stream(), torch.cuda.Stream()
        found = []
        for stream in (one, other, one):
            with torch.cuda.stream(stream):
                found.append(counters.of_stream(device).data_ptr())

        assert found[0] == found[2] != found[1]
        assert not ARRIVALS.prepare(device).any()

    @pytest.mark.parametrize("inputs", [64, 192, 576, 896, 1152, 1160, 75])
    def test_passes_leave_no_input_over(self, inputs: int) -> None:
        x, p, parameters = random(3, inputs), projection(128, inputs, bias=True), norm(inputs)

        tile = few_rows_tile(3, 128, inputs, is_normed=True)

        w = wide(p)
        assert (tile is None) == (inputs % 64 != 0), "else cuBLAS computes it"
        check(
            "product",
            KERNELS.norm_linear(x, parameters, p.weight, p.bias),
            REFERENCE.norm_linear(wide(x), wide(parameters), w.weight, w.bias),
        )

    @pytest.mark.parametrize(("rows", "inputs", "parts"), [(8, 7168, 8), (2, 4096, 8), (5, 1024, 4)])
    def test_norms_of_parts_are_taken_where_a_warp_has_one(self, rows: int, inputs: int, parts: int) -> None:
        x, p, parameters = random(rows, inputs), projection(256, inputs, bias=False), norm(inputs)
        residual = random(rows, 256)
        expected = REFERENCE.parts_norm_linear_add(wide(x), wide(parameters), parts, wide(p), wide(residual))

        assert KERNELS.norms_parts(rows, p, parts)
        assert not KERNELS.norms_parts(rows, p, 7)
        assert not KERNELS.norms_parts(64, p, parts)
        check("product", KERNELS.parts_norm_linear_add(x, parameters, parts, p, residual), expected)

    def test_no_rows_are_more_than_the_kernel_takes(self) -> None:
        assert FEW_ROWS <= MOST_ROWS
