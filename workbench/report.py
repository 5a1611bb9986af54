"""One HTML file that shows runs side by side: numbers, timeline, requests. Opens offline, asks for nothing.

The page is ``report_template.html`` with ``report.css`` and the scripts ``report*.js`` put inside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2

from tracing.analysis import disturbed_times, is_void_request, summarise
from tracing.comparison import NO_SAMPLES, Row, comparison_notes, comparison_rows, format_value
from tracing.records import PHASE_COLOURS, IterationRecord, RequestRecord, Span
from tracing.summary import Summary
from tracing.trace import Trace
from tracing.void_words import void_words
from workbench.documents import jsonable
from workbench.report_border import border_input, find_borders, why_no_border
from workbench.report_data import ORDER_COLOURS, initial_views, run_data
from workbench.report_idle import idle_groups
from workbench.report_pack import packed

_ASSETS = Path(__file__).parent
_SCRIPTS = ("report_unpack.js", "report_draw.js", "report.js")
_HEADLINES = ("tokens/s", "step time p50", "hidden share", "device busy")


@dataclass(frozen=True)
class RunView:
    """One run as the report shows it."""

    name: str
    """Heads its column and lanes: "legacy", "async"."""
    spans: Sequence[Span]
    iterations: Sequence[IterationRecord]
    requests: Sequence[RequestRecord] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    """The whole resolved configuration."""
    environment: Mapping[str, Any] = field(default_factory=dict)
    """What its numbers depend on, where that may not be the same for all runs of a page."""

    @classmethod
    def of(cls, trace: Trace, name: str | None = None) -> RunView:
        """A trace, under another name if one is given."""
        error_ns = trace.device_clock_error_ns
        bound = "on the host's clock" if error_ns is None else f"within {error_ns / 1e3:.1f} µs"
        return cls(
            name=name or trace.name,
            spans=trace.records.spans,
            iterations=trace.records.iterations,
            requests=trace.records.requests,
            config=trace.config,
            environment={**trace.environment, "device times": bound},
        )

    @cached_property
    def summary(self) -> Summary:
        """Its numbers."""
        return summarise(self.spans, self.iterations, self.requests)


def write_report(
    path: str | Path,
    runs: Sequence[RunView],
    *,
    title: str,
    environment: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    repeats: int = 1,
) -> Path:
    """Write the report of one run, or of several side by side; folders on the way are made.

    Args:
        path: The file to write; an existing one is replaced.
        runs: The first is the baseline of ratios.
        title: Heading.
        environment: What the numbers of all runs depend on: hardware, versions, seed. Shown as given.
        notes: Sentences under the heading, such as the verdict of an output check.
        repeats: Runs that each of ``runs`` was chosen from; what the page says of noise depends on it.

    Returns:
        The path written.

    Raises:
        ValueError: ``runs`` is empty, or two runs share a name.
    """
    names = [run.name for run in runs]
    if not names or len(set(names)) != len(names):
        raise ValueError(f"runs must be at least one run, each with a name of its own, got names {names}")
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    page = render_report(runs, title=title, environment=environment, notes=notes, repeats=repeats)
    target.write_text(page, encoding="utf-8")
    return target


def render_report(
    runs: Sequence[RunView],
    *,
    title: str,
    environment: Mapping[str, Any] | None = None,
    notes: Sequence[str] = (),
    repeats: int = 1,
) -> str:
    """The report as text; arguments as for :func:`write_report`."""
    rows = comparison_rows([run.summary for run in runs])
    loader = jinja2.FileSystemLoader(_ASSETS)
    page = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)
    page.filters["duration"] = _duration
    page.filters["count"] = lambda value: f"{value:,}"
    return page.get_template("report_template.html").render(
        title=title,
        notes=notes,
        facts=[*_given_facts(environment or {}), *_run_facts(runs)],
        runs=runs,
        voids=[_why_void(run) for run in runs],
        headlines=[_cells(row) for row in rows if row.label in _HEADLINES],
        sections=_sections(rows),
        idle=[idle_groups(run.summary) for run in runs],
        remarks=comparison_notes({run.name: run.summary for run in runs}, repeats=repeats),
        differing=differing_fields([run.config for run in runs]),
        order_colours=ORDER_COLOURS,
        style=_asset("report.css"),
        script="".join(map(_asset, _SCRIPTS)),
        data=_embedded(_page_data(runs)),
    )


def differing_fields(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the fields whose values are not the same in all runs, in order of appearance."""
    names = dict.fromkeys(name for config in configs for name in config)
    return [name for name in names if len({repr(config.get(name)) for config in configs}) > 1]


@dataclass(frozen=True, slots=True)
class _Fact:
    """Something that numbers depend on."""

    name: str
    values: tuple[str, ...]
    """One, or one a run where they differ."""

    @property
    def differs(self) -> bool:
        return len(self.values) > 1


def _given_facts(environment: Mapping[str, Any]) -> list[_Fact]:
    return [_Fact(name, (str(value),)) for name, value in environment.items()]


def _run_facts(runs: Sequence[RunView]) -> list[_Fact]:
    """What is known of at least one run."""
    facts = []
    for name in dict.fromkeys(name for run in runs for name in run.environment):
        values = [run.environment.get(name) for run in runs]
        if any(value is not None for value in values):
            texts = tuple("none" if value is None else str(value) for value in values)
            facts.append(_Fact(name, texts if len(set(texts)) > 1 else texts[:1]))
    return facts


def _page_data(runs: Sequence[RunView]) -> dict[str, Any]:
    views = initial_views([run.iterations for run in runs])
    inputs = [border_input(run.spans, run.iterations, view.stretch) for run, view in zip(runs, views, strict=True)]
    borders = find_borders(inputs)
    return {
        "phaseColours": PHASE_COLOURS,
        "orderColours": ORDER_COLOURS,
        "runs": [
            {
                "name": run.name,
                **packed(run_data(run.spans, run.iterations, view, border)),
                "noBorder": "" if border is not None else why_no_border(trace),
            }
            for run, view, trace, border in zip(runs, views, inputs, borders, strict=True)
        ],
    }


def _why_void(run: RunView) -> list[str]:
    """In words, one a request; empty where its times count. The same rule as in the summary."""
    disturbed = disturbed_times(run.iterations)
    return [
        (void_words(request.void_reasons) or "a void iteration ran while it lived")
        if is_void_request(request, disturbed)
        else ""
        for request in run.requests
    ]


def _embedded(data: Mapping[str, Any]) -> str:
    """JSON that may stand inside a script element: no ``<`` is left to end it early."""
    text = json.dumps(jsonable(data), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _sections(rows: Sequence[Row]) -> list[tuple[str, list[dict[str, Any]]]]:
    sections: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        sections.setdefault(row.section, []).append(_cells(row))
    return list(sections.items())


def _cells(row: Row) -> dict[str, Any]:
    return {
        "label": row.label,
        "unit": row.unit,
        "values": [format_value(value, row.unit) for value in row.values],
        "missing": [value is None for value in row.values],
        "ratio": "" if row.ratio is None else f"{row.ratio:.2f}×",
        "better": "" if row.ratio is None or not row.better else f"{row.better} is better",
    }


def _duration(start_ns: int | None, end_ns: int | None) -> str:
    """Milliseconds between two moments."""
    if start_ns is None or end_ns is None:
        return NO_SAMPLES
    return format_value((end_ns - start_ns) / 1e6, "ms")
