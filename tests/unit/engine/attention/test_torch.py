"""The torch backend against a loop over rows and queries, on caches whose unwritten entries are all NaN."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.attention import TorchAttention, kv_state, make_attention
from engine.attention.torch import tile_size
from engine.batch import BatchShape, ForwardBatch
from engine.errors import ConfigError
from tests.forward_driver import ForwardDriver, Part, Text

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8


class OneLayer:
    """Just a cache layout, for the driver that builds batches."""

    vocab_size, max_position = 1, 1 << 20

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def cache_layout(self):
        return [kv_state(KV_HEADS, HEAD_DIM, self.dtype)]

    def __call__(self, batch, caches):
        raise NotImplementedError


class World:
    """Rows with random cached keys and values, new queries, and what attention over them must give."""

    def __init__(self, rows: list[tuple[int, int]], *, block_size: int = 4, dtype=torch.float64, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.driver = ForwardDriver(OneLayer(dtype), num_blocks=64, block_size=block_size, seed=seed)
        self.dtype = dtype
        texts = [Text([0] * (cached + count), cached=cached) for cached, count in rows]
        self.parts = [Part(text, count) for text, (_, count) in zip(texts, rows, strict=True)]
        self.parts.sort(key=lambda part: not (part.count == 1 and part.text.cached))
        self.keys = [self.random(part.end, KV_HEADS) for part in self.parts]
        self.values = [self.random(part.end, KV_HEADS) for part in self.parts]

    def random(self, count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, HEAD_DIM, generator=self.generator, dtype=self.dtype)

    def batch(self, shape: BatchShape | None = None) -> ForwardBatch:
        """The batch, with every part's cached entries written to its blocks."""
        batch = self.driver.batch(self.parts, shape=shape)
        for number, part in enumerate(self.parts):
            slots = [self.slot(part.text, position) for position in range(part.text.cached)]
            for cache, source in zip(self.driver.caches[0], (self.keys, self.values), strict=True):
                cache.flatten(0, 1)[slots] = source[number][: part.text.cached]
        return batch

    def slot(self, text: Text, position: int) -> int:
        size = self.driver.block_size
        return text.blocks[position // size] * size + position % size

    def tokens(self, batch: ForwardBatch) -> list[list[int]]:
        """Token indices of each part."""
        first = batch.shape.num_decode
        prefill = [part for part in self.parts if part.count > 1 or not part.text.cached]
        rows = [*range(len(self.parts) - len(prefill)), *range(first, first + len(prefill))]
        starts = batch.query_start_N[rows].tolist()
        return [list(range(start, start + part.count)) for start, part in zip(starts, self.parts, strict=True)]

    def new(self, batch: ForwardBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the batch's tokens; those of padding tokens are random too."""
        q, k, v = (self.random(batch.shape.num_tokens, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
        for number, (part, tokens) in enumerate(zip(self.parts, self.tokens(batch), strict=True)):
            k[tokens] = self.keys[number][part.text.cached :]
            v[tokens] = self.values[number][part.text.cached :]
        return q, k, v

    def check(self, out: Tensor, q: Tensor, batch: ForwardBatch, scale: float, window: int | None, atol: float) -> None:
        """Every real token's output equals a loop over queries and heads."""
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        assert torch.isfinite(out).all()
        for number, (part, tokens) in enumerate(zip(self.parts, self.tokens(batch), strict=True)):
            for offset, token in enumerate(tokens):
                last = part.text.cached + offset
                seen = slice(0 if window is None else max(0, last + 1 - window), last + 1)
                for head in range(HEADS):
                    group = head // (HEADS // KV_HEADS)
                    key, value = self.keys[number][seen, group].double(), self.values[number][seen, group].double()
                    weights = (key @ q[token, head].double() * scale).softmax(0)
                    torch.testing.assert_close(out[token, head].double(), weights @ value, atol=atol, rtol=0.0)


def run(world: World, *, shape: BatchShape | None = None, window: int | None = None, atol: float = 1e-12) -> None:
    batch = world.batch(shape)
    q, k, v = world.new(batch)
    out = TorchAttention()(q, k, v, world.driver.caches[0], batch, scale=0.3, window=window)
    world.check(out, q, batch, 0.3, window, atol)


ROWS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40)), min_size=1, max_size=5)


class TestAgainstALoop:
    @given(rows=ROWS, window=st.none() | st.integers(1, 30), block_size=st.sampled_from([1, 4, 16]))
    @settings(max_examples=30)
    def test_any_mix_of_rows(self, rows: list[tuple[int, int]], window: int | None, block_size: int) -> None:
        if block_size == 1:  # keeps the rows within the pool
            rows = [(cached % 5, 1 + count % 5) for cached, count in rows]
        run(World(rows, block_size=block_size), window=window)

    @given(
        rows=ROWS,
        decode=st.integers(0, 3),
        prefill=st.integers(0, 3),
        tokens=st.integers(0, 50),
        longest=st.integers(0, 200),
        blocks=st.integers(0, 9),
    )
    @settings(max_examples=30)
    def test_padding_changes_nothing(
        self, rows: list[tuple[int, int]], decode: int, prefill: int, tokens: int, longest: int, blocks: int
    ) -> None:
        world = World(rows)
        world.driver.batch(world.parts)  # takes the blocks that the tightest shape counts
        tight = world.driver.shape(world.parts)
        if tight.num_prefill + prefill == 0:
            tokens = 0  # without prefill rows every token is a decode row's
        shape = BatchShape(
            num_tokens=tight.num_tokens + decode + tokens,
            num_decode=tight.num_decode + decode,
            num_prefill=tight.num_prefill + prefill,
            max_query_len=tight.max_query_len + longest if tight.num_prefill + prefill else 0,
            num_kv_blocks=tight.num_kv_blocks + blocks,
        )
        if shape.num_prefill and not shape.max_query_len:
            shape = BatchShape(**{name: getattr(shape, name) for name in shape.__slots__} | {"max_query_len": 1})
        run(world, shape=shape)

    @pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
    def test_smaller_float_types(self, dtype: torch.dtype, atol: float) -> None:
        run(World([(9, 1), (0, 33), (5, 4), (1, 1)], dtype=dtype), atol=atol)


class TestTheSameBatchAgain:
    def test_new_contents_in_the_same_tensors_are_seen(self) -> None:
        attention = TorchAttention()
        first, second = World([(5, 1), (0, 7)], seed=1), World([(11, 1), (0, 5)], seed=2)
        shape = BatchShape(num_tokens=8, num_decode=1, num_prefill=1, max_query_len=7, num_kv_blocks=4)
        held, other = first.batch(shape), second.batch(shape)
        q, k, v = first.new(held)
        attention(q, k, v, first.driver.caches[0], held, scale=0.3)
        for mine, new in zip(held, other, strict=True):
            if isinstance(mine, Tensor) and mine.shape == new.shape:
                mine.copy_(new)
        first.driver.caches[0][0].copy_(second.driver.caches[0][0])
        first.driver.caches[0][1].copy_(second.driver.caches[0][1])
        q, k, v = second.new(held)

        out = attention(q, k, v, first.driver.caches[0], held, scale=0.3)

        second.check(out, q, held, 0.3, None, 1e-12)

    def test_layers_of_one_forward_share_their_indices_but_not_their_windows(self) -> None:
        world, attention = World([(9, 1), (0, 12)]), TorchAttention()
        batch = world.batch()
        q, k, v = world.new(batch)
        layers = [world.driver.caches[0], tuple(cache.clone() for cache in world.driver.caches[0])]
        for cache, window in zip(layers, (None, 3), strict=True):
            world.check(attention(q, k, v, cache, batch, scale=0.3, window=window), q, batch, 0.3, window, 1e-12)


class TestTileSize:
    def test_one_row_is_one_tile(self) -> None:
        assert tile_size(shape_of(tokens=500, rows=1, longest=500)) == (500, 1)

    def test_short_rows_do_not_pay_for_a_long_bound(self) -> None:
        size, count = tile_size(shape_of(tokens=512, rows=16, longest=496))

        assert size * count < 2 * 512

    @given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=12), padding=st.integers(0, 40))
    def test_there_are_tiles_for_every_row(self, lengths: list[int], padding: int) -> None:
        tokens = sum(lengths) + padding
        size, count = tile_size(shape_of(tokens=max(tokens, 1), rows=len(lengths), longest=max(1, *lengths)))

        assert sum(-(-length // size) for length in lengths) <= count


def shape_of(*, tokens: int, rows: int, longest: int) -> BatchShape:
    return BatchShape(num_tokens=tokens, num_decode=0, num_prefill=rows, max_query_len=longest, num_kv_blocks=1)


class TestMakeAttention:
    @pytest.mark.parametrize("name", ["auto", "torch"])
    def test_gives_the_torch_backend(self, name: str) -> None:
        assert make_attention(name, "cpu").name == "torch"

    def test_refuses_an_unknown_name(self) -> None:
        with pytest.raises(ConfigError, match=r"attention_backend must be one of auto, torch .*'flash'"):
            make_attention("flash", "cpu")


def test_a_cache_that_is_no_plain_memory_is_refused() -> None:
    world = World([(3, 1)])
    batch = world.batch()
    cache = tuple(tensor.transpose(0, 1) for tensor in world.driver.caches[0])

    with pytest.raises(AssertionError, match="contiguous"):
        TorchAttention()(*world.new(batch), cache, batch, scale=1.0)
