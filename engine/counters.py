"""What an engine has counted since it was made or reset."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Counters:
    """Iterations, rows and graphs; docs/from-megatron.md gives upstream's counterparts."""

    steps: int = 0
    """Iterations of every order."""
    async_steps: int = 0
    """Async iterations that sampled a forward, overlapping or not; in async steps = async_steps + primer_steps."""
    overlap_steps: int = 0
    """Iterations that took the overlap order."""
    primer_steps: int = 0
    """First forwards with nothing to sample."""
    legacy_steps: int = 0
    """Iterations in legacy mode."""
    compaction_steps: int = 0
    """Overlap iterations in which at least one row was released (upstream's meaning)."""
    rows_released: int = 0
    """Rows whose request ended."""
    rows_dropped: int = 0
    """Rows of launched forwards that nobody sampled: the waste of speculating that rows are alive."""
    rows_moved: int = 0
    """Rows that changed place to fill holes."""
    dummy_steps: int = 0
    """Forwards of a rank without work."""
    graph_hits: int = 0
    """Forwards that replayed a captured size."""
    graph_misses: int = 0
    """Forwards that ran eagerly although graphs were captured."""
    graph_wait_steps: int = 0
    """Iterations in which the head of the queue waited for a captured graph that holds it."""
    prefill_tokens: int = 0
    """Prompt tokens computed."""
    prefix_query_tokens: int = 0
    """Tokens that requests had to have in the cache when they were admitted; with prefix caching only."""
    prefix_hit_tokens: int = 0
    """Of those, the ones that were there already: their computation was skipped."""
    snapshots_taken: int = 0
    """Recurrent states kept at block borders, for prefixes to go on from."""
    prefix_waits: int = 0
    """How often a request waited a round for a prefix that another one was computing."""
    pauses: int = 0
    """Rows that paused for want of a block."""
    resumes: int = 0
    """Paused rows that went on."""
    evictions: int = 0
    """Requests that went back to the queue for want of blocks, to be computed again."""
    generated_tokens: int = 0
    """Tokens given to requests."""
    drafts_proposed: Counter[int] = field(default_factory=Counter)
    """Draft tokens verified, by their place behind the newest token, from 0."""
    drafts_accepted: Counter[int] = field(default_factory=Counter)
    """Of those, the accepted ones."""
    sampled_rows: int = 0
    """Logits rows sampled; generated_tokens plus those whose request had been aborted or failed, and those behind a
    stop string that was only sure later."""
    near_boundary: int = 0
    """Draws or filters within numeric error of a boundary."""
    submitted: int = 0
    """Requests accepted."""
    finished: Counter[str] = field(default_factory=Counter)
    """Requests ended, by finish reason."""
    orders: Counter[str] = field(default_factory=Counter)
    """Iterations by order."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Iterations by reason."""
    wasted: Counter[str] = field(default_factory=Counter)
    """rows_dropped by what ended the request."""
    miss_reasons: Counter[str] = field(default_factory=Counter)
    """graph_misses by reason."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            name: dict(value) if isinstance(value := getattr(self, name), Counter) else value for name in self.__slots__
        }

    def reset(self) -> None:
        """Start over in place: the controller and the caller hold the same object."""
        fresh = Counters()
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))
