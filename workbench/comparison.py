"""The same workload through several legs, one engine at a time on shared weights: equal tokens? what differs?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median_low
from typing import Any

from engine.config import EngineConfig
from engine.models.loader import LoadedModel
from engine.request import RequestOutput, SamplingParams
from tracing.summary import Summary
from tracing.trace import Trace
from workbench.legs import LEGS as LEGS
from workbench.legs import Leg as Leg
from workbench.legs import LegLike, chosen_legs, leg_config
from workbench.loading import load_for, session_config
from workbench.progress import progress_bar
from workbench.repeats import shared
from workbench.runs import OnOutput, Run, document, serve
from workbench.session import Session
from workbench.side_by_side import SideBySide
from workbench.verdicts import Judge, RequestVerdict, Verdict
from workbench.workloads import Workload, WorkloadError, as_workload, check_workload

OnRun = Callable[[str, Session], OnOutput | None]
"""Told each leg as it begins; what it returns is called with every output."""

CLOCKS = {
    "iterations": "iterations of the engine: every leg sees a request before the same forward",
    "virtual": "seconds that the engine ran; idle time and looking take none",
    "wall": "real seconds",
}
"""What arrivals are measured on, by the clock's name."""


@dataclass(frozen=True, repr=False)
class Comparison(SideBySide):
    """What came out of the legs."""

    workload: Workload
    runs: tuple[Run, ...]
    """One a leg: of several repeats the one of median throughput."""
    verdicts: tuple[RequestVerdict, ...]
    """One a request, over all legs and repeats."""
    repeat_summaries: tuple[tuple[Summary, ...], ...]
    """One a leg and repeat, in the order of the repeats."""

    @property
    def summaries(self) -> Sequence[Sequence[Summary]]:
        """One a leg and repeat."""
        return self.repeat_summaries

    @cached_property
    def traces(self) -> tuple[Trace, ...]:
        """One a leg: of several repeats the one of median throughput."""
        return tuple(run.trace for run in self.runs)

    @property
    def clock(self) -> str:
        """The one clock of all legs, by name."""
        return self.runs[0].clock

    @property
    def conditions(self) -> list[str]:
        """Sentences on what was the same for all legs."""
        pools = {
            run.name: f"{run.config['num_blocks']} blocks of {run.config['block_size']} tokens" for run in self.runs
        }
        return [
            f"Clock of arrivals: {self.clock}: {CLOCKS[self.clock]}.",
            f"One engine at a time on one set of weights, each run with an empty KV pool of its own: {shared(pools)}.",
            *(f"Workload: {note}." for note in self._workload_notes),
        ]

    @property
    def _workload_notes(self) -> tuple[str, ...]:
        """What differs from what was asked for, or from the trace it was made from; a leg may cut outputs alone."""
        limits = {run.config["max_sequence_length"] for run in self.runs}
        cut = dict.fromkeys(note for limit in sorted(limits) for note in self.workload.length_notes(limit))
        return (*self.workload.notes, *cut)

    @cached_property
    def verdict_counts(self) -> dict[str, int]:
        """Requests by verdict, all three named."""
        counts = Counter(verdict.verdict for verdict in self.verdicts)
        return {verdict.value: counts[verdict] for verdict in Verdict}

    @property
    def outputs_match(self) -> bool:
        """Whether no request is ``DIFFERENT``."""
        return not any(verdict.verdict is Verdict.DIFFERENT for verdict in self.verdicts)

    @property
    def ids_equal(self) -> bool:
        """Whether every request has the same ids and end in all legs, and log-probabilities but for rounding."""
        return all(verdict.verdict is Verdict.EQUAL for verdict in self.verdicts)

    @property
    def verdict_text(self) -> str:
        """One line on the outputs."""
        counts = ", ".join(f"{count} {name}" for name, count in self.verdict_counts.items() if count)
        deviations = [v.logprob_deviation for v in self.verdicts if v.logprob_deviation is not None]
        logprobs = f"; log-probabilities differ by at most {max(deviations):.2g}" if deviations else ""
        return f"ids and ends of {len(self.verdicts)} requests in {len(self.runs)} legs: {counts}{logprobs}"

    @property
    def verdict_lines(self) -> list[str]:
        """One a request whose outputs are not equal: where they part, and by what margin."""
        return [str(verdict) for verdict in self.verdicts if verdict.verdict is not Verdict.EQUAL]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; each leg with its whole configuration, each metric with every repeat's number."""
        return document(
            "compare",
            self.workload,
            clock=self.clock,
            repeats=self.repeats,
            legs=[run.to_dict() for run in self.runs],
            metrics=[row.to_dict(self.names) for row in self.rows],
            notes=self.notes,
            verdicts=[verdict.to_dict() for verdict in self.verdicts],
            verdict_counts=self.verdict_counts,
            outputs_match=self.outputs_match,
        )


def compare(
    workload: Workload | str,
    legs: Sequence[LegLike] | Mapping[str, EngineConfig | Mapping[str, Any]] = ("legacy", "no-overlap", "async"),
    *,
    model: str | Path | LoadedModel | None = None,
    config: EngineConfig | None = None,
    clock: str | None = None,
    repeats: int = 5,
    warmup: int = 1,
    progress: bool = True,
    on_run: OnRun | None = None,
    **engine_options: Any,
) -> Comparison:
    """Run ``workload`` in each leg, repeats taking turns; the first leg is the baseline.

    Every repeat runs each leg once, and begins one leg further on than the last: what drifts while they run then falls
    on all legs alike, and not always on the one that comes second.

    Args:
        workload: The same for all, seeds included. Text is taken as on the command line, with the model's vocabulary.
        legs: Names of :data:`LEGS`, legs of your own, or names with a configuration or the options that it changes.
        model: As for :class:`~workbench.session.Session`; loaded once.
        config: Options of all legs.
        clock: None: ``iterations``, or ``virtual`` where the workload counts seconds.
        repeats: Measured runs a leg. Fewer than five give no interval worth the name, one gives none at all.
        warmup: Runs before each of them, in its engine, whose times are thrown away; their outputs are not compared.
        progress: Show a bar, in a notebook or on a terminal.
        on_run: Told each measured run as it begins.
        **engine_options: Fields of the configuration, for all legs.

    Raises:
        WorkloadError: the workload is none, a leg is unknown or wants another model, two share a name, or there are no
            legs.
    """
    check_workload(workload)
    if repeats < 1 or warmup < 0:
        raise WorkloadError(f"repeats must be at least 1 and warmup at least 0, got {repeats} and {warmup}")
    config = session_config(config, None, engine_options)
    chosen = chosen_legs(legs, config)
    for leg in chosen:  # what does not fit is refused before anything is loaded or runs
        leg_config(leg, config, None)
    loaded = load_for(config, model, progress=progress)
    workload = as_workload(workload, vocab_size=loaded.vocab_size)
    clock = clock or ("iterations" if workload.unit == "iterations" else "virtual")
    runs: dict[str, list[Run]] = {leg.name: [] for leg in chosen}
    total = len(workload.requests) * len(chosen) * repeats * (1 + warmup)
    with progress_bar(total, wanted=progress) as bar:
        bench = _Bench(workload, loaded, clock, warmup, bar, progress, on_run)
        params: tuple[SamplingParams, ...] = ()
        num_blocks: int | None = None
        for repeat in range(repeats):
            for place in range(len(chosen)):
                leg = chosen[(place + repeat) % len(chosen)]
                bar.set_postfix_str(f"repeat {repeat + 1} of {repeats}, {leg.name}")
                run, params = bench.run(leg, leg_config(leg, config, num_blocks))
                num_blocks = num_blocks or run.config["num_blocks"]
                runs[leg.name].append(run)
    return Comparison(
        workload=workload,
        runs=tuple(map(_median_run, runs.values())),
        verdicts=_verdicts(loaded, config, params, [run for done in runs.values() for run in done]),
        repeat_summaries=tuple(tuple(run.summary for run in done) for done in runs.values()),
    )


@dataclass(frozen=True, slots=True)
class _Bench:
    """What all runs share."""

    workload: Workload
    loaded: LoadedModel
    clock: str
    warmup: int
    bar: Any
    shows: bool
    """Whether an engine that captures graphs may show a bar of its own."""
    on_run: OnRun | None

    def run(self, leg: Leg, config: EngineConfig) -> tuple[Run, tuple[SamplingParams, ...]]:
        """One measured run in an engine of its own, and the sampling parameters with their seeds settled."""
        with Session(
            self.loaded,
            config=config,
            clock=self.clock,
            policy=leg.policy,
            admission=leg.admission,
            graph_list=leg.graph_list,
            progress=self.shows,
        ) as session:
            for _ in range(self.warmup):
                serve(session, self.workload, name=leg.name, on_output=self._counting(None))
                session.reset()
            pool = session.engine.pool
            assert pool.num_free == pool.num_blocks, "a run must begin with an empty pool"
            on_output = self.on_run(leg.name, session) if self.on_run is not None else None
            run = serve(session, self.workload, name=leg.name, on_output=self._counting(on_output))
            return run, tuple(submission.params for submission in session.submissions)

    def _counting(self, on_output: OnOutput | None) -> OnOutput:
        def told(output: RequestOutput) -> None:
            if output.finished:
                self.bar.update()
            if on_output is not None:
                on_output(output)

        return told


def _median_run(runs: Sequence[Run]) -> Run:
    speeds = [run.summary.tokens_per_s or 0.0 for run in runs]
    return runs[speeds.index(median_low(speeds))]


def _verdicts(
    loaded: LoadedModel, config: EngineConfig, params: Sequence[SamplingParams], runs: Sequence[Run]
) -> tuple[RequestVerdict, ...]:
    first = runs[0]
    with Judge(loaded, config.replace(dtype=first.config["dtype"]), params) as judge:
        return tuple(
            judge.judge(index, output, [(run.name, run.outputs[index]) for run in runs[1:]])
            for index, output in enumerate(first.outputs)
        )
