"""Paged attention on CUDA against a loop in float64: lengths around block borders, NaN wherever nothing was written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.attention import TorchAttention
from engine.batch import BatchShape, ForwardBatch
from engine.errors import ConfigError

pytest.importorskip("triton")
from engine.attention.triton import DecodeTile, TritonAttention, decode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {
    # ‖out - reference‖ / ‖reference‖. The result is rounded once; weights are rounded before they meet the values.
    torch.bfloat16: 4e-3,
    torch.float16: 6e-4,
}
BLOCK_SIZE = 16
LENGTHS = (1, 15, 16, 17, 600, 33, 64, 65, 128)
TILES = [None, DecodeTile(64, 4, 3, programs=1), DecodeTile(16, 4, 3, programs=10_000, max_splits=7)]


class World:
    """Rows of cached keys and values in shuffled blocks. Unwritten entries, the dummy block's too, are NaN."""

    def __init__(
        self,
        rows: list[tuple[int, int]],
        *,
        num_decode: int,
        heads: tuple[int, int] = (8, 4),
        head_dim: int = 128,
        dtype: torch.dtype = torch.bfloat16,
        padding: int = 0,
        columns: int = 45,
    ) -> None:
        """``rows``: (length, queries) of each, decode rows first; ``padding`` tokens behind them."""
        self.rows, self.num_decode, self.dtype = rows, num_decode, dtype
        num_heads, kv_heads = heads
        num_blocks = sum(-(-length // BLOCK_SIZE) for length, _ in rows)
        free = iter(torch.randperm(num_blocks).tolist())
        table = torch.full((len(rows), columns), num_blocks)
        self.cache = tuple(
            torch.full((num_blocks + 1, BLOCK_SIZE, kv_heads, head_dim), float("nan"), dtype=dtype, device=DEVICE)
            for _ in range(2)
        )
        self.keys, self.values, slots = [], [], []
        for number, (length, queries) in enumerate(rows):
            blocks = torch.tensor([next(free) for _ in range(-(-length // BLOCK_SIZE))])
            table[number, : len(blocks)] = blocks
            slot = (blocks[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten()[:length]
            for tensor, kept in zip(self.cache, (self.keys, self.values), strict=True):
                kept.append(torch.randn(length, kv_heads, head_dim, device=DEVICE).to(dtype))
                tensor.view(-1, kv_heads, head_dim)[slot.to(DEVICE)] = kept[-1]
            slots.append(slot[length - queries :])
        lengths, counts = (torch.tensor(column) for column in zip(*rows, strict=True))
        tokens = int(counts.sum())
        slots.append(torch.full((padding,), (num_blocks + 1) * BLOCK_SIZE - 1))
        self.q = torch.randn(tokens + padding, num_heads, head_dim, device=DEVICE).to(dtype)
        self.batch = ForwardBatch(
            token_ids_T=torch.zeros(0),
            positions_T=torch.zeros(0),
            row_T=torch.zeros(0),
            slots_T=torch.cat(slots).to(DEVICE),
            block_table_NK=table.to(DEVICE),
            query_start_N=(counts.cumsum(0) - counts).to(DEVICE),
            query_len_N=counts.to(DEVICE),
            kv_len_N=lengths.to(DEVICE),
            logits_idx_L=torch.zeros(0),
            shape=BatchShape(
                num_tokens=tokens + padding,
                num_decode=num_decode,
                num_prefill=len(rows) - num_decode,
                max_query_len=max((q for _, q in rows[num_decode:]), default=0),
                num_kv_blocks=columns,
            ),
        )

    def expected(self, window: int | None, scale: float) -> Tensor:
        """[T without padding, H, D] float64, one query at a time."""
        found, token = [], 0
        for (length, queries), keys, values in zip(self.rows, self.keys, self.values, strict=True):
            group = self.q.shape[1] // keys.shape[1]
            for position in range(length - queries, length):
                seen = slice(0 if window is None else max(0, position + 1 - window), position + 1)
                k, v = (x[seen].double().repeat_interleave(group, 1) for x in (keys, values))
                weight = torch.einsum("hd,shd->hs", self.q[token].double(), k).mul(scale).softmax(-1)
                found.append(torch.einsum("hs,shd->hd", weight, v))
                token += 1
        return torch.stack(found)

    def check(self, out: Tensor, window: int | None, scale: float) -> None:
        expected = self.expected(window, scale)
        real = out[: expected.shape[0]].double()
        error = float((real - expected).norm() / expected.norm())
        assert error < TOLERANCE[self.dtype], f"relative error {error:.2e}"
        assert out.isfinite().all(), "padding rows must be finite"


class TestDecode:
    @pytest.mark.parametrize("heads", [(16, 8), (32, 8), (4, 4), (6, 2)])
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_equals_the_loop(self, heads: tuple[int, int], head_dim: int) -> None:
        rows = [(length, 1) for length in LENGTHS]
        world = World(rows, num_decode=len(rows), heads=heads, head_dim=head_dim)

        out = TritonAttention().attend(world.q, world.cache, world.batch, scale=0.1)

        world.check(out, None, 0.1)

    @pytest.mark.parametrize("window", [None, 1, 16, 50, 1000])
    @pytest.mark.parametrize("tile", TILES)
    def test_sees_its_window_only(self, window: int | None, tile: DecodeTile | None) -> None:
        rows = [(length, 1) for length in LENGTHS]
        world = World(rows, num_decode=len(rows))

        out = TritonAttention(tile).attend(world.q, world.cache, world.batch, scale=0.1, window=window)

        world.check(out, window, 0.1)

    @pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 128), (torch.bfloat16, 72), (torch.bfloat16, 16)])
    def test_other_types_and_sizes(self, dtype: torch.dtype, head_dim: int) -> None:
        world = World([(40, 1), (7, 1)], num_decode=2, dtype=dtype, head_dim=head_dim)

        world.check(TritonAttention().attend(world.q, world.cache, world.batch, scale=0.1), None, 0.1)

    @pytest.mark.parametrize("queries", [2, 5])
    @pytest.mark.parametrize("window", [None, 20])
    @pytest.mark.parametrize("tile", TILES[1:])
    def test_takes_several_query_tokens_a_row(self, queries: int, window: int | None, tile: DecodeTile | None) -> None:
        rows = [(length, queries) for length in LENGTHS if length >= queries]
        world = World(rows, num_decode=0)
        batch = world.batch._replace(shape=replace(world.batch.shape, num_wide=len(rows)))
        out = torch.full_like(world.q, float("nan"))

        decode(world.q, world.cache, batch, out, scale=0.1, window=window, tile=tile, queries=queries)

        world.check(out, window, 0.1)

    @pytest.mark.parametrize("queries", [2, 4])
    @pytest.mark.parametrize("window", [None, 20])
    @pytest.mark.parametrize("padding", [0, 3])
    def test_takes_wide_rows_beside_prompts(self, queries: int, window: int | None, padding: int) -> None:
        wide = [(length, queries) for length in LENGTHS if length >= queries]
        prompts = [(5, 5), (130, 100), (65, 1)] if padding else []
        world = World([*wide, *prompts], num_decode=0, padding=padding)
        shape = replace(world.batch.shape, num_wide=len(wide), wide_width=queries)

        out = TritonAttention().attend(
            world.q, world.cache, world.batch._replace(shape=shape), scale=0.1, window=window
        )

        world.check(out, window, 0.1)

    def test_the_same_bits_every_time(self) -> None:
        """A kernel that starts before the one ahead of it has written would now and then read old partial results."""
        worlds = [World([(600, 1)] * 24, num_decode=24) for _ in range(2)]
        attention = TritonAttention(DecodeTile(16, 4, 3, programs=10_000, max_splits=32))
        first = [attention.attend(world.q, world.cache, world.batch, scale=0.1) for world in worlds]

        for world, expected in zip(worlds * 100, first * 100, strict=True):
            assert torch.equal(attention.attend(world.q, world.cache, world.batch, scale=0.1), expected)

        worlds[0].check(first[0], None, 0.1)

    def test_a_padding_row_reads_what_it_wrote(self) -> None:
        world = World([(20, 1)], num_decode=1)
        dummy = world.cache[0].shape[0] - 1
        slot = (dummy + 1) * BLOCK_SIZE - 1
        for tensor in world.cache:
            tensor[dummy, BLOCK_SIZE - 1] = 1.0
        batch = world.batch._replace(
            slots_T=torch.tensor([int(world.batch.slots_T[0]), slot], device=DEVICE),
            block_table_NK=torch.cat((world.batch.block_table_NK, torch.full((1, 45), dummy, device=DEVICE))),
            kv_len_N=torch.tensor([20, 1], device=DEVICE),
            shape=BatchShape(num_tokens=2, num_decode=2, num_prefill=0, max_query_len=0, num_kv_blocks=45),
        )

        out = TritonAttention().attend(torch.cat((world.q, world.q)), world.cache, batch, scale=0.1)

        world.check(out, None, 0.1)


class TestPrefill:
    @pytest.mark.parametrize("heads", [(16, 8), (4, 4)])
    @pytest.mark.parametrize("head_dim", [64, 128, 72])
    @pytest.mark.parametrize("window", [None, 40])
    def test_equals_the_loop(self, heads: tuple[int, int], head_dim: int, window: int | None) -> None:
        rows = [(1, 1), (15, 15), (16, 16), (17, 17), (200, 200), (129, 100), (65, 2)]
        world = World(rows, num_decode=0, heads=heads, head_dim=head_dim, padding=9)

        out = TritonAttention().attend(world.q, world.cache, world.batch, scale=0.1, window=window)

        world.check(out, window, 0.1)

    def test_many_rows_and_room_for_more(self) -> None:
        rows = [(1 + 7 * number % 300, 1 + 7 * number % 300) for number in range(40)]
        world = World(rows, num_decode=0, padding=700)

        world.check(TritonAttention().attend(world.q, world.cache, world.batch, scale=0.1), None, 0.1)

    def test_mixed_with_decode_rows(self) -> None:
        rows = [*((length, 1) for length in LENGTHS), (70, 70), (33, 20), (5, 5)]
        world = World(rows, num_decode=len(LENGTHS), padding=4)

        out = TritonAttention().attend(world.q, world.cache, world.batch, scale=0.1)

        world.check(out, None, 0.1)


class TestGraphs:
    def test_a_replay_reads_new_lengths_and_tables(self) -> None:
        first = World([(600, 1), (5, 1), (64, 1)], num_decode=3)
        second = World([(17, 1), (512, 1), (140, 1)], num_decode=3)
        q, cache = first.q.clone(), tuple(torch.empty_like(t) for t in first.cache)
        batch = first.batch._replace(
            **{name: getattr(first.batch, name).clone() for name in ("slots_T", "block_table_NK", "kv_len_N")}
        )
        attention = TritonAttention()
        attention.attend(q, first.cache, batch, scale=0.1)
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = attention.attend(q, cache, batch, scale=0.1)
        for world in (second, first, second):
            q.copy_(world.q)
            for fixed, source in zip(cache, world.cache, strict=True):
                fixed[: source.shape[0]].copy_(source[: fixed.shape[0]])
            for name in ("slots_T", "block_table_NK", "kv_len_N"):
                getattr(batch, name).copy_(getattr(world.batch, name))
            out.fill_(float("nan"))
            torch.cuda.synchronize()

            graph.replay()

            torch.cuda.synchronize()
            world.check(out, None, 0.1)


class TestFlashInfer:
    """XQA compiles for each combination, so these are few."""

    @pytest.fixture(scope="class")
    def attention(self) -> TritonAttention:
        pytest.importorskip("flashinfer")
        from engine.attention.flashinfer import FlashInferAttention

        return FlashInferAttention()

    @pytest.mark.parametrize("window", [None, 16, 50])
    def test_equals_the_loop_beside_prefill_rows(self, attention: TritonAttention, window: int | None) -> None:
        rows = [*((length, 1) for length in LENGTHS), (70, 70), (33, 20)]
        world = World(rows, num_decode=len(LENGTHS), padding=3)

        world.check(attention.attend(world.q, world.cache, world.batch, scale=0.1, window=window), window, 0.1)

    def test_many_rows_split_over_the_device(self, attention: TritonAttention) -> None:
        for count in (1, 3, 64):
            world = World([(600 - 7 * number, 1) for number in range(count)], num_decode=count)

            world.check(attention.attend(world.q, world.cache, world.batch, scale=0.1), None, 0.1)

    @pytest.mark.parametrize("kv_heads", [1, 2, 8])
    def test_no_row_and_head_has_several_programs(
        self, attention: TritonAttention, kv_heads: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """XQA's host code: multiprocessors over rows and heads, rounded down, are programs for each."""
        import engine.attention.flashinfer as backend

        asked: list[int] = []
        monkeypatch.setattr(backend, "xqa_batch_decode_with_kv_cache", lambda q, *_, **__: asked.append(q.shape[0]))
        multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        for count in range(1, 140):
            world = World([(33, 1)] * count, num_decode=count, heads=(8, kv_heads))
            attention.attend(world.q, world.cache, world.batch, scale=0.1)

        assert asked == [count for count in range(1, 140) if multiprocessors // (count * kv_heads) <= 1]

    def test_refuses_a_block_size_that_it_cannot_read(self, attention: TritonAttention) -> None:
        world = World([(20, 1)], num_decode=1)
        cache = tuple(tensor.view(-1, 4, *tensor.shape[2:]) for tensor in world.cache)

        with pytest.raises(ConfigError, match="needs block_size in 16, 32, 64, 128, got 4"):
            attention.attend(world.q, cache, world.batch, scale=0.1)


class TestTorchBackend:
    def test_agrees_with_the_loop_too(self) -> None:
        rows = [*((length, 1) for length in LENGTHS), (70, 70), (33, 20)]
        world = World(rows, num_decode=len(LENGTHS))
        batch = world.batch._replace(
            positions_T=torch.cat([torch.arange(n - q, n) for n, q in rows]).to(DEVICE),
            row_T=torch.repeat_interleave(torch.arange(len(rows)), torch.tensor([q for _, q in rows])).to(DEVICE),
        )

        world.check(TorchAttention().attend(world.q, world.cache, batch, scale=0.1), None, 0.1)
