"""Which sizes of forward are captured, and the one function that matches a batch to them.

Sizes follow Megatron-LM's rules for dynamic inference, restated in :func:`graph_sizes` and
:func:`graph_list`. Gating, padding and replay all ask :func:`match_graph`, so they cannot disagree (I49).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Protocol

from torch import Tensor

from engine.batch import BatchDimensions, BatchShape
from engine.config import EngineConfig
from engine.errors import ConfigError


def graph_sizes(largest: int, count: int, distribution: str) -> list[int]:
    """Token counts to capture, descending.

    Args:
        largest: Tokens of the largest graph, at least 1.
        count: How many; -1 is automatic: ``max(4, floor(log2(largest)) + 2)`` exponential sizes, or every size of
            the fixed linear ladder 1, 2, 4, 8..248 by 8, 256.. by 16.
        distribution: ``exponential`` halves down to 1; ``linear`` strides evenly; ``hybrid`` is linear here (it
            differs for prefill sizes, see :func:`graph_list`).
    """
    if distribution == "exponential":
        wanted = max(4, int(math.log2(largest)) + 2) if count == -1 else min(count, largest)
        return _exponential_sizes(largest, wanted)
    if count == -1:
        ladder = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
        return sorted({size for size in ladder if size <= largest} | {largest}, reverse=True)
    stride = max(1, largest // min(count, largest))
    sizes = sorted({*range(stride, largest + 1, stride), largest}, reverse=True)
    return sizes[: min(count, largest)]


def _exponential_sizes(largest: int, count: int) -> list[int]:
    sizes = {largest, 1}
    size = largest
    while size > 2:
        size = max(2, size // 2 // 2 * 2)
        sizes.add(size)
    ordered = sorted(sizes, reverse=True)
    while len(ordered) > max(1, count):
        ordered.pop(-2 if len(ordered) > 1 else -1)  # the second smallest goes first; 1 stays longest
        if len(ordered) == 2 and count == 1:
            ordered.pop()
    return ordered


def graph_list(config: EngineConfig, max_sequence_length: int) -> list[BatchDimensions]:
    """Every graph to capture, ascending, empty without graphs.

    Decode graphs hold ``min(size // W, max_requests)`` rows of W tokens, W being ``decode_width``; sizes that a count
    makes are rows. With ``graph_non_decode``, mixed graphs hold P prefill rows for P in 1, 2, 4, .. and the rest of the
    tokens as decode rows, where valid: ``P + d <= max_requests`` and
    ``P + d * W <= tokens <= P * max_sequence_length + d * W``.
    """
    assert config.graphs != "auto", "settled by resolve_config"
    if config.graphs is None or config.graphs == 0:
        return []
    rows, width = config.max_requests, config.decode_width
    if isinstance(config.graphs, int):
        decode_rows = set(graph_sizes(rows, config.graphs, config.graph_distribution))
    else:
        decode_rows = {size // width for size in config.graphs if width <= size <= rows * width}
    dims = {BatchDimensions(num_tokens=row * width, num_prefill=0, num_decode=row) for row in decode_rows}
    if config.graph_non_decode:
        dims |= _mixed_graphs(config, max_sequence_length)
    if not isinstance(config.graphs, int):
        used = {one.num_tokens for one in dims} | {size for size in config.graphs if size // width in decode_rows}
        unused = sorted(set(config.graphs) - used)
        if unused:
            raise ConfigError(
                f"graphs: no forward can have {', '.join(map(str, unused))} tokens with max_requests={rows}, "
                f"max_batch_tokens={config.max_batch_tokens}, graph_non_decode={config.graph_non_decode}"
            )
    return sorted(dims)


def _mixed_graphs(config: EngineConfig, max_sequence_length: int) -> set[BatchDimensions]:
    rows, width = config.max_requests, config.decode_width
    if isinstance(config.graphs, int):
        shape = "linear" if config.graph_distribution == "linear" else "exponential"
        sizes = graph_sizes(config.max_batch_tokens, config.graphs, shape)
    else:
        assert config.graphs is not None
        assert not isinstance(config.graphs, str)
        sizes = [size for size in config.graphs if size <= config.max_batch_tokens]
    dims = set()
    for size in sizes:
        num_prefill = 1
        while num_prefill <= rows:
            num_decode = max(0, min((size - num_prefill) // width, rows - num_prefill))
            for decode in {num_decode, 0}:
                fixed = decode * width
                if size >= 2 and num_prefill + fixed <= size <= num_prefill * max_sequence_length + fixed:
                    dims.add(BatchDimensions(num_tokens=size, num_prefill=num_prefill, num_decode=decode))
            num_prefill *= 2
    return dims


def fits(real: BatchDimensions, graph: BatchDimensions, *, strict: bool, decode_width: int = 1) -> bool:
    """Whether a graph captured at ``graph`` can run ``real``.

    Decode-only batches take decode-only graphs. With prefill rows, a graph's unused decode rows still hold one padding
    token each (with drafts ``decode_width``). ``strict`` (models with recurrent state, and with drafts) asks for enough
    rows of each kind; otherwise a spare prefill row may hold a decode row.
    """
    if real.num_prefill == 0:
        return graph.num_prefill == 0 and real.num_decode <= graph.num_decode
    if real.num_prefill > graph.num_prefill:
        return False
    if spare_tokens(graph, real, decode_width) < 0:
        return False
    return real.num_decode <= graph.num_decode if strict else real.num_rows <= graph.num_rows


class GraphListPolicy(Protocol):
    """Which forwards are captured. A researcher passes their own to the engine."""

    def choose(self, config: EngineConfig, max_sequence_length: int) -> Iterable[BatchDimensions]:
        """Sizes in any order.

        Args:
            config: ``graphs`` settled.
            max_sequence_length: Of one request.
        """
        ...


class CapturedByDefault:
    """As the options ``graphs``, ``graph_distribution`` and ``graph_non_decode`` say; see :func:`graph_list`."""

    def choose(self, config: EngineConfig, max_sequence_length: int) -> Iterable[BatchDimensions]:
        """The default list."""
        return graph_list(config, max_sequence_length)


captured_by_default: GraphListPolicy = CapturedByDefault()


def checked_graphs(policy: GraphListPolicy, config: EngineConfig, max_sequence_length: int) -> list[BatchDimensions]:
    """What a policy wants captured, ascending.

    Raises:
        ConfigError: it is no policy, or a size can never run; the message says which and why (I49).
    """
    if isinstance(policy, type) or not callable(getattr(policy, "choose", None)):
        raise ConfigError(
            f"graph_list must be an object with a method choose(config, max_sequence_length), got {policy!r}"
        )
    who, answer = type(policy).__name__, policy.choose(config, max_sequence_length)
    if not isinstance(answer, Iterable):
        raise ConfigError(f"graph list policy {who} must answer with sizes, got {answer!r}")
    sizes = list(answer)
    for size in sizes:
        if not isinstance(size, BatchDimensions):
            raise ConfigError(f"graph list policy {who}: {size!r} is no BatchDimensions")
        problem = _never_runs(size, config, max_sequence_length)
        if problem is not None:
            raise ConfigError(f"graph list policy {who}: {size} can never run (I49): {problem}")
    return sorted(set(sizes))


def _never_runs(size: BatchDimensions, config: EngineConfig, max_sequence_length: int) -> str | None:
    most = size.num_prefill * max_sequence_length + size.num_decode * config.decode_width
    if min(size.num_tokens, size.num_prefill, size.num_decode) < 0 or size.num_rows < 1:
        return "it holds no row"
    if size.num_rows > config.max_requests:
        return f"{size.num_rows} rows, max_requests={config.max_requests}"
    if size.num_tokens > config.max_batch_tokens:
        return f"{size.num_tokens} tokens, max_batch_tokens={config.max_batch_tokens}"
    least = size.num_prefill + size.num_decode * config.decode_width
    if size.num_tokens < least:
        return f"its rows have {least} tokens at least"
    return f"its rows have {most} tokens at most" if size.num_tokens > most else None


def spare_tokens(graph: BatchDimensions, real: BatchDimensions, decode_width: int = 1) -> int:
    """Tokens of ``graph`` that ``real`` leaves; an unused decode row is full of padding."""
    return graph.num_tokens - real.num_tokens - max(0, graph.num_decode - real.num_decode) * decode_width


def match_graph(
    real: BatchDimensions, graphs: Sequence[BatchDimensions], *, strict: bool = False, decode_width: int = 1
) -> BatchDimensions | None:
    """The smallest of the ascending ``graphs`` that runs ``real``, or None: eager."""
    first = bisect_left(graphs, real.num_tokens, key=attrgetter("num_tokens"))
    for graph in graphs[first:]:
        if fits(real, graph, strict=strict, decode_width=decode_width):
            return graph
    return None


def kv_bucket(num_blocks: int, max_blocks: int) -> int:
    """Columns of the block table a CPU bucket reads: the next power of two from 4 on, at most ``max_blocks``."""
    bucket = 4
    while bucket < num_blocks:
        bucket *= 2
    return min(bucket, max_blocks)


def kv_buckets(max_blocks: int) -> list[int]:
    """Every value :func:`kv_bucket` can take, ascending."""
    found = [kv_bucket(1, max_blocks)]
    while found[-1] < max_blocks:
        found.append(kv_bucket(found[-1] + 1, max_blocks))
    return found


class GraphSet:
    """The captured forwards of one engine.

    On the CPU devices one is captured for each size and each bucket of KV columns; on CUDA lengths live on the device,
    and one a size reads all columns.
    """

    def __init__(
        self,
        sizes: Sequence[BatchDimensions],
        *,
        max_blocks: int,
        buckets_kv: bool,
        strict: bool = False,
        snapshots_per_row: int = 0,
        decode_width: int = 1,
        states_per_row: int = 1,
        is_shared: bool = False,
    ) -> None:
        self.sizes = list(sizes)
        """Ascending."""
        self.strict = strict
        """Whether a graph needs enough rows of each kind; see :func:`fits`."""
        self._max_blocks = max_blocks
        self._snapshots_per_row = snapshots_per_row
        self._decode_width = decode_width
        self._kept_per_decode_row = states_per_row - 1
        self._is_shared = is_shared
        self.buckets_kv = buckets_kv
        self._replays: dict[BatchShape, Callable[[], Tensor]] = {}
        self._matches: dict[BatchDimensions, BatchDimensions | None] = {}
        self._shapes: dict[tuple[BatchDimensions, int], BatchShape] = {}

    def __bool__(self) -> bool:
        return bool(self.sizes)

    def __len__(self) -> int:
        return len(self._replays)

    def match(self, real: BatchDimensions) -> tuple[BatchDimensions | None, str | None]:
        """The size ``real`` runs in, or None and why there is none."""
        if not self.sizes:
            return None, "graphs are off"
        if real.num_prefill:
            graph = self._find(real)
        else:  # at most one decode batch a row count, asked for at every step
            if real not in self._matches:
                self._matches[real] = self._find(real)
            graph = self._matches[real]
        if graph is not None:
            return graph, None
        return None, "prefill not captured" if real.num_prefill else "larger than every graph"

    def _find(self, real: BatchDimensions) -> BatchDimensions | None:
        return match_graph(real, self.sizes, strict=self.strict, decode_width=self._decode_width)

    def shape(self, graph: BatchDimensions, kv_blocks: int) -> BatchShape:
        """The static shape that runs ``graph`` with rows of up to ``kv_blocks`` blocks."""
        columns = kv_bucket(kv_blocks, self._max_blocks) if self.buckets_kv else self._max_blocks
        shape = self._shapes.get((graph, columns))
        if shape is None:
            shape = self._shapes[graph, columns] = BatchShape(
                num_tokens=graph.num_tokens,
                num_decode=graph.num_decode,
                num_prefill=graph.num_prefill,
                max_query_len=graph.num_tokens - graph.num_decode * self._decode_width if graph.num_prefill else 0,
                num_kv_blocks=columns,
                decode_width=self._decode_width,
                expert_tokens=graph.num_tokens if self._is_shared else 0,
                num_snapshots=self._snapshots_per_row * graph.num_prefill
                + self._kept_per_decode_row * graph.num_decode,
            )
        return shape

    def shapes(self) -> list[BatchShape]:
        """Every shape to capture, the largest first, so that later captures find the memory they share."""
        widths = kv_buckets(self._max_blocks) if self.buckets_kv else [self._max_blocks]
        return [self.shape(size, width) for size in reversed(self.sizes) for width in reversed(widths)]

    def add(self, shape: BatchShape, replay: Callable[[], Tensor]) -> None:
        """Keep a captured forward."""
        self._replays[shape] = replay

    def replay(self, shape: BatchShape) -> Callable[[], Tensor]:
        """The captured forward of ``shape``; it returns logits and runs inside launched work only."""
        return self._replays[shape]

    def clear(self) -> None:
        """Forget every captured forward."""
        self.sizes.clear()
        self._replays.clear()
        self._matches.clear()
