"""Graph-aware admission: how much of a prompt enters the next forward so that a captured graph runs it (I50).

With ``graph_all_prefills`` a prompt enters whole or snapped down to what a graph holds, and waits where no graph does;
never does it make a forward eager. A prompt that is being read goes on in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from engine.batch import BatchDimensions
from engine.chunks import chunk_size
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.graphs import fits, match_graph, spare_tokens

NO_ROWS = BatchDimensions(num_tokens=0, num_prefill=0, num_decode=0)
"""An empty forward."""

CONTINUING_CHUNK = "continuing chunk"
"""Why a gated engine reads the next part of a prompt eagerly."""
COMES_BACK = "it comes back with output to read"
"""Why one reads eagerly what a request that lost its row had: a prompt that fitted a graph, and output."""


class Deferral(Enum):
    """Why a prompt has no part in the next forward."""

    BATCH_FULL = "the forward's token budget is used up"
    """No matter which graphs there are."""
    ONE_TOKEN = "the chunk, or what it leaves, would be one token"
    """The guard of ``chunk_size``, at the budget or at the graph's size. Not a wait for a graph."""
    GRAPH_WAIT = "no captured graph holds it beside the rows of this forward"
    """One does with fewer rows, so it enters when some of them end. The only deferral that counts as a graph wait."""
    NO_GRAPH = "no captured graph holds it, even alone"
    """Waiting is of no use: fail it with :meth:`GraphGate.no_graph_message`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What a prompt reads in the next forward."""

    tokens: int = 0
    """0: nothing, and ``deferral`` says why."""
    graph: BatchDimensions | None = None
    """What :func:`match_graph` finds for the forward with this chunk in it; None: nothing read, or read eagerly."""
    deferral: Deferral | None = None
    miss_reason: str | None = None
    """Why the forward is eager; set for continuing chunks only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphGate:
    """Decides chunks by the captured graphs. A value: asking changes nothing (I19), needs no other rank, no device."""

    graphs: tuple[BatchDimensions, ...]
    """All captured sizes, ascending."""
    strict: bool
    """Passed on to :func:`match_graph`: models with recurrent state need enough rows of each kind."""
    chunked: bool
    """Whether a prompt may enter with a part of it."""
    decode_width: int = 1
    """Tokens of a decode row; passed on as well."""
    _largest: tuple[BatchDimensions, ...] = field(init=False, repr=False, compare=False)
    """Of each mix of rows with prefill the graph of most tokens: what a smaller one holds, it holds."""
    _room_alone: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert list(self.graphs) == sorted(self.graphs), "match_graph wants ascending graphs"
        by_rows = {(graph.num_prefill, graph.num_decode): graph for graph in self.graphs if graph.num_prefill}
        object.__setattr__(self, "_largest", tuple(by_rows.values()))
        object.__setattr__(self, "_room_alone", self.room(NO_ROWS))

    def chunk(self, held: BatchDimensions, remaining: int, budget: int) -> Chunk:
        """What a waiting prompt may read beside ``held``.

        Args:
            held: The next forward so far: decode rows, and prefill rows with the tokens they read in it.
            remaining: Prompt tokens that no cached prefix spares, at least 1.
            budget: Tokens the forward has left; may be negative.
        """
        assert remaining > 0, "a prefix hit leaves something to compute"
        if not self.fits_alone(remaining):
            return Chunk(deferral=Deferral.NO_GRAPH)
        if not chunk_size(remaining, budget, chunked=self.chunked):
            return Chunk(deferral=Deferral.ONE_TOKEN if self.chunked and budget > 0 else Deferral.BATCH_FULL)
        room = self.room(held)
        found = self._captured(held, remaining, min(budget, room), chunked=self.chunked)
        return found or Chunk(deferral=Deferral.ONE_TOKEN if self.chunked and room > 0 else Deferral.GRAPH_WAIT)

    def continuing(self, held: BatchDimensions, remaining: int, budget: int) -> Chunk:
        """The next chunk of a prompt that is being read: never nothing, as it bypasses the gate.

        Where a graph has room it is snapped down to it or padded; else the forward is eager. ``held`` is without the
        prompt's own row. A forward made eager admits nobody: more rows never bring a graph back.
        """
        found = self._captured(held, remaining, min(budget, self.room(held)), chunked=True)
        if found:
            return found
        tokens = chunk_size(remaining, budget)
        assert tokens, "max_batch_tokens leaves no chunk beside decode rows"
        return Chunk(tokens=tokens, miss_reason=CONTINUING_CHUNK)

    def fits_alone(self, remaining: int) -> bool:
        """Whether :meth:`chunk` lets ``remaining`` tokens into a forward without other rows, the budget granted."""
        return chunk_size(remaining, self._room_alone, chunked=self.chunked) > 0

    def alone(self, remaining: int) -> Chunk:
        """What the prompt would read without other rows; for a graph wait, ``graph`` is the one it waits for."""
        return self.chunk(NO_ROWS, remaining, remaining)

    def room(self, held: BatchDimensions) -> int:
        """Most prompt tokens that one more row may read beside ``held`` inside a graph; 0: none has room for it."""
        least = joined(held, 1)
        # Only prefill and decode counts filter the graphs: the candidate's tokens are the graph's, less what it pads.
        return max(
            (
                spare_tokens(graph, held, self.decode_width)
                for graph in self._largest
                if fits(least, graph, strict=self.strict, decode_width=self.decode_width)
            ),
            default=0,
        )

    def no_graph_message(self, remaining: int) -> str:
        """The error of a request whose deferral is ``NO_GRAPH``: what is short, and the remedies."""
        short = (
            f"graph_all_prefills: {remaining} prompt tokens to read fit no captured graph, even in a forward of their "
            f"own, where the largest takes {self._room_alone}"
        )
        if self.chunked:
            return (
                f"{short} (chunked_prefill reads at least two tokens and leaves at least two); capture larger graphs "
                "(graphs, max_batch_tokens) or set graph_all_prefills=False"
            )
        return (
            f"{short}; capture larger graphs (graphs, max_batch_tokens), set chunked_prefill=True to read prompts in "
            "parts, or set graph_all_prefills=False"
        )

    def _captured(self, held: BatchDimensions, remaining: int, most: int, *, chunked: bool) -> Chunk | None:
        """The largest chunk of at most ``most`` tokens, the room in the graphs; None: none."""
        # Snapped to a graph first, and only then guarded against a lone last token, which chunk_size does. One token
        # less still fits the same graph: matching is >=, so the one that holds the snapped chunk holds it too.
        tokens = chunk_size(remaining, most, chunked=chunked)
        if not tokens:
            return None
        graph = match_graph(joined(held, tokens), self.graphs, strict=self.strict, decode_width=self.decode_width)
        assert graph is not None, "room and match_graph disagree"
        return Chunk(tokens=tokens, graph=graph)


def is_gated(config: EngineConfig, graphs: Sequence[BatchDimensions]) -> bool:
    """Whether prefill admission asks for graphs: both options are set, and something is captured."""
    return config.graph_all_prefills and config.graph_non_decode and len(graphs) > 0


def graph_gate(config: EngineConfig, graphs: Sequence[BatchDimensions], *, strict: bool) -> GraphGate | None:
    """The gate of an engine that captured ``graphs`` (ascending), None where admission asks for none.

    Raises:
        ConfigError: no prompt could ever be read.
    """
    if not is_gated(config, graphs):
        return None
    gate = GraphGate(
        graphs=tuple(graphs), strict=strict, chunked=config.chunked_prefill, decode_width=config.decode_width
    )
    if gate.room(NO_ROWS) < 3:  # in chunks, none of which is one token or leaves one, three is the least for any prompt
        raise ConfigError(
            f"graph_all_prefills: none of the {len(graphs)} captured forwards holds a prompt of three tokens; name "
            "larger sizes in graphs, or set graph_all_prefills=False"
        )
    return gate


def joined(held: BatchDimensions, chunk: int) -> BatchDimensions:
    """The forward with one more prefill row, which reads ``chunk`` tokens."""
    return BatchDimensions(
        num_tokens=held.num_tokens + chunk, num_prefill=held.num_prefill + 1, num_decode=held.num_decode
    )
