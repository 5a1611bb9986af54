"""What is asked of an engine, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine.errors import EngineError
from engine.request import SamplingParams
from workbench.clock import Unit

if TYPE_CHECKING:
    from workbench.workloads.shaping import Shaping

Prompt = str | Sequence[int]


class WorkloadError(EngineError, ValueError):
    """A workload's description or file is not usable; the message names the part and what is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request to come."""

    prompt: Prompt
    """Text, or token ids."""
    params: SamplingParams
    arrival: float = 0.0
    """After the workload's start, in the workload's unit."""
    chat: bool = False
    """``prompt`` is what a user says: put it into the model's chat template."""
    stream: bool = False
    """Make an output at every token."""
    cache_salt: str = ""
    """Only requests of one salt share cached prefixes."""

    def after(self, start: float) -> RequestSpec:
        """The same, arriving that much later."""
        return replace(self, arrival=start + self.arrival)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Workload:
    """Requests in the order they are handed in."""

    name: str
    """What it was made from."""
    requests: tuple[RequestSpec, ...]
    unit: Unit = "iterations"
    """What arrivals count."""
    concurrency: int | None = None
    """Closed loop: the next enters when fewer than so many of these are live. None: each enters when it arrives."""
    notes: tuple[str, ...] = ()
    """What differs from the file it was made from: rows left out with their line numbers, lengths cut."""

    def __post_init__(self) -> None:
        if self.concurrency is None:
            return
        if self.concurrency < 1:
            raise WorkloadError(f"workload {self.name!r}: concurrency must be at least 1, got {self.concurrency}")
        if not self.is_closed:
            raise WorkloadError(
                f"workload {self.name!r}: with concurrency requests enter as others end, so none has an arrival"
            )

    @classmethod
    def from_records(
        cls,
        rows: Any,
        *,
        input: str,
        output: str,
        vocab_size: int,
        arrival: str | None = None,
        prefix: str | None = None,
        prefix_tokens: int = 512,
        unit: str | None = None,
        shaping: Shaping | None = None,
        params: SamplingParams | None = None,
        name: str = "records",
    ) -> Workload:
        """Requests of the lengths, and at the times, that a table tells; their prompts are made from the seed.

        Args:
            rows: Mappings, a pandas or polars DataFrame, or a pyarrow Table.
            input: Column of prompt lengths, tokens.
            output: Column of output lengths, tokens.
            vocab_size: Ids that the prompts may hold.
            arrival: Column of arrivals, numbers or timestamps; the first request that is taken arrives at 0. None: all
                arrive at the start.
            prefix: Column of lists of ids: each names the next ``prefix_tokens`` tokens of the prompt, equal for equal
                ids. What they leave of the prompt is the request's own.
            prefix_tokens: Tokens an id stands for; the last one's may be cut by the prompt's end.
            unit: What numbers in ``arrival`` count: ``s``, ``ms``, ``us``, ``ns`` or ``iterations``; None: seconds.
            shaping: Excerpt, time scale, limits, arrival process.
            params: Of every request; its ``max_tokens`` is the row's output, and seeds count on from its seed. None:
                greedy, and EOS is passed over so that the lengths come true.
            name: What tables and messages call it.

        Raises:
            WorkloadError: no row is usable, or an argument does not fit. Single rows that are not usable are left out
                and told in ``notes``.
        """
        from workbench.workloads.columns import Columns
        from workbench.workloads.records import make_workload
        from workbench.workloads.rows import record_rows

        columns = Columns(
            arrival=arrival, input=input, output=output, prefix=prefix, prefix_tokens=prefix_tokens, unit=unit
        )
        return make_workload(
            record_rows(rows), columns, name=name, source=name, vocab_size=vocab_size, shaping=shaping, params=params
        )

    @property
    def is_closed(self) -> bool:
        """Whether everything arrives at the start, so that any clock will do."""
        return all(spec.arrival == 0 for spec in self.requests)

    @property
    def num_prompt_tokens(self) -> int | None:
        """Of all requests; None where a prompt is text."""
        if any(isinstance(spec.prompt, str) for spec in self.requests):
            return None
        return sum(len(spec.prompt) for spec in self.requests)

    def prefix_share(self, block_size: int) -> float:
        """Share of prompt tokens that an endless prefix cache of such blocks would spare; see docs/workloads.md.

        Makes every token id once: a second for each ten million, at 16 tokens a block.

        Raises:
            WorkloadError: a prompt is text, or ``block_size`` is below 1.
        """
        from workbench.workloads.sharing import prefix_share

        return prefix_share(self, block_size)

    def length_notes(self, max_sequence_length: int) -> tuple[str, ...]:
        """Says how many outputs an engine will cut because prompt and output exceed its limit.

        Raises:
            WorkloadError: a prompt leaves no room for any output.
        """
        from workbench.workloads.fitting import length_notes

        return length_notes(self, max_sequence_length)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the requests are told with a run's results."""
        told: Mapping[str, Any] = {
            "name": self.name,
            "requests": len(self.requests),
            "unit": self.unit,
            "closed": self.is_closed,
            "concurrency": self.concurrency,
            "notes": list(self.notes),
        }
        return dict(told)

    def __repr__(self) -> str:
        loop = "all at the start" if self.is_closed else f"over {self._span:.6g} {self.unit}"
        if self.concurrency is not None:
            loop = f"at most {self.concurrency} live"
        tokens = "" if self.num_prompt_tokens is None else f", {self.num_prompt_tokens:,} prompt tokens"
        lines = [f"{self.name}: {len(self.requests):,} requests{tokens}, {loop}", *self.notes]
        return "\n".join(lines)

    @property
    def _span(self) -> float:
        return max(spec.arrival for spec in self.requests)
