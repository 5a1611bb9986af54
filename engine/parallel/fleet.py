"""One engine among those of other ranks: what they agree on, and when.

Twice an iteration, always in this order, whatever each of them has to do:

    iteration   before an order is chosen: who has work, who has a forward pending, which mode is wanted, how many rows
                draft heads will run for. An engine that is to stand still or stop says so here.
    batch       in prepare, before anything is staged: how large each rank's forward is, and so which graph all replay,
                or how many tokens all give their experts.

What the device does together, experts of draft heads and of forwards, comes in the mode's order between and behind:

    async     iteration  DRAFT  batch  FORWARD
    legacy    iteration  batch  FORWARD  DRAFT

so no rank's host ever waits for numbers while another's waits for its device to draft (I54).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from enum import Enum
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from engine.batch import BatchDimensions
from engine.config import MODES, EngineConfig, Mode, ResolvedConfig
from engine.errors import ConfigError, RankError
from engine.graphs import match_graph
from engine.parallel.ranks import NUM_VALUES, Ranks
from tracing.recorder import Recorder

_OWN_OPTIONS = frozenset({"seed", "debug_invariants", "op_sleep_s", "num_blocks", "kv_cache_gb", "mamba_cache_gb"})
"""In which ranks may differ: they change nothing that is done together."""
NONE_HOLDS_ALL = "no graph holds what all ranks have"
"""Why all ranks run eagerly where each alone might not."""
WAIT = "ranks"
"""The name of the span in which a host waits for the others."""


class Intent(Enum):
    """What a rank comes to an iteration's beginning for."""

    STEP = "step"
    PAUSE = "pause"
    RESUME = "resume"
    RESET = "reset"
    PERSIST = "suspend(persist)"
    OFFLOAD = "suspend(offload)"
    RECOMPUTE = "suspend(recompute)"
    LOAD_WEIGHTS = "load_weights"
    CLOSE = "close"


_INTENTS = tuple(Intent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """What one rank says at the beginning of an iteration."""

    intent: Intent = Intent.STEP
    has_work: bool = False
    """A request of its own owes its last output."""
    has_pending: bool = False
    mode: Mode = "async"
    wanted: Mode = "async"
    switches: int = 0
    """How many switches of mode it has heard of, its own included."""
    draft_rows: int = 0
    """Of its pending forward, in async mode with drafts: for how many rows its draft heads will run."""

    def to_values(self) -> list[int]:
        """As whole numbers."""
        modes = MODES.index(self.mode), MODES.index(self.wanted)
        work = int(self.has_work), int(self.has_pending)
        return [_INTENTS.index(self.intent), *work, *modes, self.switches, self.draft_rows]

    @classmethod
    def from_values(cls, values: Sequence[int]) -> Vote:
        """What :meth:`to_values` made."""
        intent, work, pending, mode, wanted, switches, rows = (int(value) for value in values)
        return cls(
            intent=_INTENTS[intent],
            has_work=bool(work),
            has_pending=bool(pending),
            mode=MODES[mode],  # type: ignore[arg-type]
            wanted=MODES[wanted],  # type: ignore[arg-type]
            switches=switches,
            draft_rows=rows,
        )


_VOTE_SIZE = len(Vote().to_values())


@dataclass(frozen=True, slots=True)
class Outlook:
    """All ranks' votes, and what follows from them: the same on every rank."""

    votes: tuple[Vote, ...]

    @property
    def has_work(self) -> bool:
        """Whether anybody has."""
        return any(vote.has_work for vote in self.votes)

    @property
    def has_pending(self) -> bool:
        """Whether anybody has a forward pending."""
        return any(vote.has_pending for vote in self.votes)

    @property
    def draft_rows(self) -> int:
        """For how many rows every rank runs its draft heads before its forward, padding included; 0: not at all."""
        return max(vote.draft_rows for vote in self.votes)

    @property
    def intents(self) -> tuple[Intent, ...]:
        """Why each of them came."""
        return tuple(vote.intent for vote in self.votes)

    @property
    def is_torn(self) -> bool:
        """Whether some came for different things: these refuse them, and nobody begins an iteration."""
        return len(set(self.intents) - {Intent.STEP}) > 1

    @property
    def newest(self) -> Vote:
        """Of those who have heard of most switches of mode, the first."""
        return max(self.votes, key=lambda vote: vote.switches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How large a rank's next forward is; no tokens: it has none."""

    dims: BatchDimensions
    must_be_eager: bool = False
    draft_rows: int = 0
    """In legacy mode: for how many rows its draft heads will run behind it."""


NO_LOAD = Load(dims=BatchDimensions(num_tokens=0, num_prefill=0, num_decode=0))


@dataclass(frozen=True, slots=True)
class Agreed:
    """The forward that all ranks run: the same on every rank."""

    num_tokens: int
    """That each gives its experts, padding included; 0: nobody has a forward, and none is launched."""
    graph: BatchDimensions | None
    """The captured size that all replay; None: all run eagerly."""
    miss_reason: str | None
    draft_rows: int
    """In legacy mode: for how many rows every rank runs its draft heads behind it."""


def agreed_batch(
    loads: Sequence[Load], graphs: Sequence[BatchDimensions], *, strict: bool, decode_width: int
) -> Agreed:
    """What follows from all ranks' loads (I55).

    The graph is the smallest that holds the most decode rows, prefill rows and prompt tokens that any rank has, so that
    it holds each rank's forward; one rank with a prompt sends all of them to a graph with prefill rows. Where there is
    none, or a rank wants prompt log probabilities, all run eagerly and pad what they give their experts.
    """
    working = [load for load in loads if load.dims.num_tokens]
    draft_rows = max(load.draft_rows for load in loads)
    if not working:
        return Agreed(0, None, None, draft_rows)
    num_decode = max(load.dims.num_decode for load in working)
    read = max(load.dims.num_tokens - load.dims.num_decode * decode_width for load in working)
    num_prefill = max(load.dims.num_prefill for load in working)
    widest = BatchDimensions(
        num_tokens=read + num_decode * decode_width, num_prefill=num_prefill, num_decode=num_decode
    )
    most = max(decode_width, *(load.dims.num_tokens for load in working))
    if any(load.must_be_eager for load in working):
        return Agreed(most, None, "prompt log probabilities", draft_rows)
    if not graphs:
        return Agreed(most, None, "graphs are off", draft_rows)
    graph = match_graph(widest, graphs, strict=strict, decode_width=decode_width)
    if graph is not None:
        return Agreed(graph.num_tokens, graph, None, _drafted_in(graph, draft_rows))
    return Agreed(most, None, NONE_HOLDS_ALL, draft_rows)


def _drafted_in(graph: BatchDimensions, draft_rows: int) -> int:
    """Behind a captured decode forward the captured draft heads run, which have as many rows as it."""
    return graph.num_decode if draft_rows and not graph.num_prefill else draft_rows


def by_rank(words: Iterable[str]) -> str:
    """What each rank said, for messages."""
    return ", ".join(f"rank {rank}: {word}" for rank, word in enumerate(words))


class Fleet:
    """This engine's part in it.

    Args:
        ranks: The connection.
        recorder: Gets the waits.
    """

    def __init__(self, ranks: Ranks, recorder: Recorder) -> None:
        self.ranks = ranks
        self._recorder = recorder
        self.outlook = Outlook(tuple(Vote() for _ in range(ranks.size)))
        """Of the iteration in hand, or the last one."""
        self.agreed = Agreed(0, None, None, 0)
        self._is_awake = True
        self.switches = 0
        self.naps = 0
        """How often all ranks fell asleep."""

    # -- at the start ----------------------------------------------------------------------------------------------

    def check_alike(self, resolved: ResolvedConfig, graphs: Sequence[BatchDimensions]) -> None:
        """Refuse engines that cannot work together; all of them do.

        Raises:
            ConfigError: naming the first option that differs.
        """
        config = resolved.config
        facts = {f.name: getattr(config, f.name) for f in fields(EngineConfig) if f.name not in _OWN_OPTIONS}
        facts |= {"model": resolved.model, "dtype": resolved.dtype, "graphs that were captured": tuple(graphs)}
        facts["vocab_size"] = resolved.vocab_size
        names, size = list(facts), NUM_VALUES - 2
        sums = [crc32(repr(facts[name]).encode()) for name in names]
        for begin in range(0, len(sums), size):
            theirs = self.ranks.agree("options", begin, sums[begin : begin + size])
            for rank, row in enumerate(theirs):
                for name, own, other in zip(names[begin:], sums[begin : begin + size], row.tolist(), strict=False):
                    if own != other:
                        raise ConfigError(
                            f"expert_parallel: rank {rank} differs from rank {self.ranks.rank} in {name} (here "
                            f"{facts[name]!r}); start all ranks with the same"
                        )

    # -- each iteration --------------------------------------------------------------------------------------------

    def begin(self, vote: Vote, iteration: int) -> Outlook:
        """Hear what all ranks have to say before an iteration; blocks.

        Raises:
            RankError: as :meth:`Ranks.agree`; also where modes are mixed.
        """
        with self._waiting():
            rows = self.ranks.agree("iteration", iteration, vote.to_values())
        self.outlook = outlook = Outlook(tuple(Vote.from_values(row) for row in rows))
        modes = {vote.mode for vote in outlook.votes}
        if len(modes) > 1:
            there = by_rank(vote.mode for vote in outlook.votes)
            raise RankError(f"mixed modes in iteration {iteration} ({there}): all ranks schedule alike, or none can")
        newest = outlook.newest
        rivals = {vote.wanted for vote in outlook.votes if vote.switches == newest.switches}
        if len(rivals) > 1:
            there = by_rank(vote.wanted for vote in outlook.votes)
            raise RankError(f"ranks ask for different modes at once ({there}); switch on one of them, or alike on all")
        self.switches = newest.switches
        self.naps += not outlook.has_work  # first: who hands in a request meanwhile wakes the new nap
        self._is_awake = outlook.has_work
        self.agreed = Agreed(0, None, None, 0)
        return outlook

    def settle(
        self, load: Load, iteration: int, graphs: Sequence[BatchDimensions], *, strict: bool, decode_width: int
    ) -> Agreed:
        """Hear how large all ranks' forwards are, and settle on one; blocks.

        Raises:
            RankError: as :meth:`Ranks.agree`.
        """
        dims = load.dims
        values = [dims.num_tokens, dims.num_prefill, dims.num_decode, int(load.must_be_eager), load.draft_rows]
        with self._waiting():
            rows = self.ranks.agree("batch", iteration, values)
        loads = [
            Load(
                dims=BatchDimensions(num_tokens=int(tokens), num_prefill=int(prefill), num_decode=int(decode)),
                must_be_eager=bool(eager),
                draft_rows=int(draft),
            )
            for tokens, prefill, decode, eager, draft in rows
        ]
        self.agreed = agreed_batch(loads, graphs, strict=strict, decode_width=decode_width)
        return self.agreed

    def hear_outcome(self, iteration: int, *, could: bool) -> NDArray[np.bool_]:
        """[ranks] who could do what all have just done; blocks."""
        with self._waiting():
            rows = self.ranks.agree("outcome", iteration, [int(could)])
        return np.asarray(rows[:, 0] != 0)

    def _waiting(self) -> AbstractContextManager[None]:
        return self._recorder.wait(WAIT)

    @property
    def is_awake(self) -> bool:
        """Whether somebody may have work: until all have said that they have none, and again once one is woken."""
        return self._is_awake or self.sleep(0.0)

    # -- between ---------------------------------------------------------------------------------------------------

    def sleep(self, timeout_s: float | None) -> bool:
        """Wait for a request at any rank; whether there is one."""
        if not self._is_awake:
            self._is_awake = self.ranks.sleep(self.naps, timeout_s)
        return self._is_awake

    def wake(self) -> None:
        """There is work here: let sleeping ranks come to the next iteration."""
        if not self._is_awake:
            self.ranks.wake(self.naps)
            self._is_awake = True
