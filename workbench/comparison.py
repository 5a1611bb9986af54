"""The same workload through several legs, one engine at a time on shared weights: equal tokens? what differs?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from pathlib import Path
from statistics import median_low
from typing import Any

from engine.config import EngineConfig
from engine.models.loader import LoadedModel
from engine.policy import OrderPolicy, never_overlap, prefer_overlap
from engine.request import RequestOutput, SamplingParams
from tracing.analysis import format_comparison
from tracing.comparison import comparison_notes
from workbench.loading import load_for, session_config
from workbench.runs import Run, document, serve
from workbench.session import Session
from workbench.verdicts import Judge, RequestVerdict, Verdict
from workbench.workloads import Workload, WorkloadError


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One way to run the workload."""

    name: str
    """Heads its column."""
    mode: str
    policy: OrderPolicy = prefer_overlap
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Engine options of this leg alone."""


LEGS: dict[str, Leg] = {
    "legacy": Leg(name="legacy", mode="legacy"),
    "no-overlap": Leg(name="async without overlap", mode="async", policy=never_overlap),
    "async": Leg(name="async", mode="async"),
}
"""Ready-made legs by the name that the command line takes: re-ordering and overlap can be told apart."""

_OF_THE_MODEL = ("device", "dtype", "attention_backend")
"""Options that the loaded model was made for."""

OnRun = Callable[[str, Session], Callable[[RequestOutput], None] | None]
"""Told each leg as it begins; what it returns is called with every output."""


@dataclass(frozen=True)
class Comparison:
    """What came out of the legs."""

    workload: Workload
    runs: tuple[Run, ...]
    """One a leg: of several repeats the one of median throughput."""
    verdicts: tuple[RequestVerdict, ...]
    """One a request, over all legs and repeats."""
    repeats: int = 1

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

    def table(self) -> str:
        """The legs side by side, one row a metric."""
        return format_comparison({run.name: run.summary for run in self.runs})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; each leg with its whole configuration."""
        return document(
            "compare",
            self.workload,
            repeats=self.repeats,
            legs=[run.to_dict() for run in self.runs],
            verdicts=[verdict.to_dict() for verdict in self.verdicts],
            verdict_counts=self.verdict_counts,
            outputs_match=self.outputs_match,
        )

    def __str__(self) -> str:
        notes = comparison_notes({run.name: run.summary for run in self.runs}, repeats=self.repeats)
        lines = [self.table(), "", *notes, self.verdict_text]
        lines += [f"  {one}" for one in self.verdicts if one.verdict is not Verdict.EQUAL]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Comparison {', '.join(run.name for run in self.runs)}: {self.verdict_text}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


def compare(
    workload: Workload,
    legs: Sequence[str | Leg] = ("legacy", "no-overlap", "async"),
    *,
    model: str | Path | LoadedModel | None = None,
    config: EngineConfig | None = None,
    clock: str | None = None,
    repeats: int = 1,
    warmup: int = 1,
    on_run: OnRun | None = None,
    **engine_options: Any,
) -> Comparison:
    """Run ``workload`` in each leg, repeats taking turns; the first leg is the baseline.

    Args:
        workload: The same for all, seeds included.
        legs: Names of :data:`LEGS`, or legs of your own.
        model: As for :class:`~workbench.session.Session`; loaded once.
        config: Options of all legs.
        clock: None: ``iterations``, or ``virtual`` where the workload counts seconds.
        repeats: Measured runs a leg.
        warmup: Runs before them whose times are thrown away; their outputs are not compared.
        on_run: Told each measured run as it begins.
        **engine_options: Fields of the configuration, for all legs.

    Raises:
        WorkloadError: a leg is unknown or wants another model, two share a name, or there are none.
    """
    chosen = [_leg(leg) for leg in legs]
    if not chosen or len({leg.name for leg in chosen}) != len(chosen):
        names = ", ".join(leg.name for leg in chosen) or "none"
        raise WorkloadError(f"legs must be at least one, each with a name of its own; got {names}")
    if repeats < 1 or warmup < 0:
        raise WorkloadError(f"repeats must be at least 1 and warmup at least 0, got {repeats} and {warmup}")
    config = session_config(config, None, engine_options)
    loaded = load_for(config, model)
    clock = clock or ("iterations" if workload.unit == "iterations" else "virtual")
    runs: list[list[Run]] = [[] for _ in chosen]
    params: tuple[SamplingParams, ...] = ()
    for _ in range(repeats):
        for leg, done in zip(chosen, runs, strict=True):
            run, params = _run_leg(leg, workload, loaded, config, clock, warmup, on_run)
            done.append(run)
    return Comparison(
        workload=workload,
        runs=tuple(map(_median_run, runs)),
        verdicts=_verdicts(loaded, config, params, [run for done in runs for run in done]),
        repeats=repeats,
    )


def _leg(leg: str | Leg) -> Leg:
    if isinstance(leg, Leg):
        return leg
    for key, known in LEGS.items():
        if leg in (key, known.name):
            return known
    raise WorkloadError(f"leg {leg!r} is unknown; known are {', '.join(LEGS)}")


def _run_leg(
    leg: Leg,
    workload: Workload,
    loaded: LoadedModel,
    config: EngineConfig,
    clock: str,
    warmup: int,
    on_run: OnRun | None,
) -> tuple[Run, tuple[SamplingParams, ...]]:
    """The run, and the sampling parameters with their seeds settled."""
    leg_config = session_config(config, leg.mode, leg.changes)
    unshared = [name for name in _OF_THE_MODEL if getattr(leg_config, name) != getattr(config, name)]
    if unshared:
        raise WorkloadError(f"leg {leg.name!r} changes {', '.join(unshared)}, but all legs share one loaded model")
    with Session(loaded, config=leg_config, clock=clock, policy=leg.policy, progress=True) as session:
        for _ in range(warmup):
            serve(session, workload, name=leg.name)
            session.reset()
        on_output = on_run(leg.name, session) if on_run is not None else None
        run = serve(session, workload, name=leg.name, on_output=on_output)
        return run, tuple(submission.params for submission in session.submissions)


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
