"""Summaries side by side: one row a metric, the same rows for the terminal, the report and JSON readers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tracing.records import COMPUTE_LANE, PHASES
from tracing.summary import HostPhase, OrderRow, Spread, Summary
from tracing.text_table import aligned

NO_SAMPLES = "no samples"
AROUND_WORK = "launch latency, wake-up and the time between phases"
"""What the device's idle time holds besides exposed host work; ``docs/metrics.md`` defines each."""

ADMISSION_CAUSE = (
    "in async a request's first forward stands behind the one that runs when it enters, and with "
    "overlap_admission=False it enters only once that one is resolved"
)
KINDS_NOTE = (
    "A step is filed under the batch it launches; in async it waits for the batch before, so step time by kind does "
    "not compare across modes."
)
"""What a table of both modes must say beside its rows."""

IDLE_SECTION = "idle device: by what"
RANKS_SECTION = "other ranks"

_UNCOMPARABLE = ("queue delay", "step time, decode", "step time, prefill", "step time, mixed")
"""Metrics that mean something else in each mode, so that a ratio would mislead; ``docs/metrics.md`` says why."""

_COUNTS = ("requests", "iterations", "void iterations")
"""What there was, and nothing to be fast or slow at."""


@dataclass(frozen=True, slots=True)
class Row:
    """One metric over all runs."""

    section: str
    label: str
    unit: str
    values: tuple[float | None, ...]
    """One a run; None: no samples."""
    better: str = ""
    """``lower``, ``higher``, or empty where neither is good by itself."""

    @property
    def ratio(self) -> float | None:
        """Last run over first; None for shares, counts, what modes do not share, or without two numbers to divide."""
        first, last = self.values[0], self.values[-1]
        if (
            self.unit == "%"
            or self.label in _COUNTS
            or self.label.removesuffix(" p50").removesuffix(" p99") in _UNCOMPARABLE
        ):
            return None
        return None if len(self.values) < 2 or first is None or last is None or first == 0 else last / first


class ShownNumbers(NamedTuple):
    """What a table shows of its runs, for the sentences below it: they must not say otherwise. One of each a run."""

    speedup: Sequence[float | None]
    """``tokens/s`` over the first run's; None where there is none."""
    ttft: Sequence[float | None]
    queue_delay: Sequence[float | None]
    """Medians, in one unit; None: no samples."""


@dataclass(frozen=True, slots=True)
class _Metric:
    section: str
    label: str
    unit: str
    get: Callable[[Summary], float | None]
    better: str = ""


def comparison_rows(summaries: Sequence[Summary]) -> list[Row]:
    """Every metric of ``docs/metrics.md``, in its order.

    Raises:
        ValueError: there is no summary.
    """
    if not summaries:
        raise ValueError("summaries must hold at least one run, got none")
    metrics = [
        *_METRICS,
        *_rank_metrics(summaries),
        *_idle_metrics(summaries),
        *_BATCH_METRICS,
        *_draft_metrics(summaries),
        *_phase_metrics(summaries),
        *_order_metrics(summaries),
        *_cause_metrics(summaries),
    ]
    return [Row(m.section, m.label, m.unit, tuple(m.get(s) for s in summaries), m.better) for m in metrics]


def comparison_notes(
    summaries: Mapping[str, Summary], *, repeats: int = 1, shown: ShownNumbers | None = None
) -> list[str]:
    """Sentences without which the table misleads; none for a single run.

    Args:
        summaries: As for :func:`format_comparison`.
        repeats: Runs a leg; what is said of noise depends on it.
        shown: Numbers of the table above; None: those of ``summaries``.
    """
    if len(summaries) < 2:
        return []
    shown = shown or _numbers_of(list(summaries.values()))
    notes = []
    limit = saving_note(summaries)
    if limit:
        noise = "One run each: differences above that are this machine's noise." if repeats == 1 else ""
        notes.append(" ".join(filter(None, [limit, noise, excess_note(summaries, shown)])))
    if not _mixes_modes(summaries):
        return notes
    return [*notes, *filter(None, [admission_note(summaries, shown)]), KINDS_NOTE]


def _numbers_of(summaries: Sequence[Summary]) -> ShownNumbers:
    speeds = [summary.tokens_per_s for summary in summaries]
    return ShownNumbers(
        speedup=[speed / speeds[0] if speed is not None and speeds[0] else None for speed in speeds],
        ttft=[_p50(summary.requests.ttft) for summary in summaries],
        queue_delay=[_p50(summary.requests.queue_delay) for summary in summaries],
    )


def _p50(spread: Spread | None) -> float | None:
    return None if spread is None else spread.p50_ns


def excess_note(summaries: Mapping[str, Summary], shown: ShownNumbers) -> str | None:
    """Names the run that gained most, if that is more than the first run's idle device leaves to be gained.

    Compared as the table prints it, to two decimals. Only after a :func:`saving_note`.
    """
    first = next(iter(summaries.values()))
    assert first.step is not None
    assert first.device.bubble_ns is not None
    step_ns, idle_ns = first.step.mean_ns, first.device.bubble_ns / first.num_timed
    name, speedup = max(zip(summaries, shown.speedup, strict=True), key=lambda one: one[1] or 0.0)
    if idle_ns >= step_ns or speedup is None or round(speedup, 2) <= round(step_ns / (step_ns - idle_ns), 2):
        return None
    return (
        f"{name} has {speedup:.2f}x the tokens/s, where that idle time allows {step_ns / (step_ns - idle_ns):.2f}x: "
        "more than overlap can give, so the rest has other causes or is noise."
    )


def admission_note(summaries: Mapping[str, Summary], shown: ShownNumbers) -> str | None:
    """Why requests wait longer in async, if they do: of the last async run against the first legacy one."""
    is_legacy = [_is_legacy(summary) for summary in summaries.values()]
    legacy, other = is_legacy.index(True), len(is_legacy) - 1 - is_legacy[::-1].index(False)
    longer = []
    for label, values in (("TTFT", shown.ttft), ("queue delay", shown.queue_delay)):
        before, after = values[legacy], values[other]
        if before is not None and after is not None and after > before:
            longer.append(label)
    if not longer:
        return None
    return f"Longer in {list(summaries)[other]}: {' and '.join(longer)}; {ADMISSION_CAUSE}."


def saving_note(summaries: Mapping[str, Summary]) -> str | None:
    """How much overlap can save of the first run's step; None unless that run is legacy and has device times.

    The bound is the device's idle time, not the exposed work alone: overlap also hides what lies around that work,
    which is launch latency, the host's wake-up from a wait, and the time between phases and iterations.
    """
    name, first = next(iter(summaries.items()))
    if not _is_legacy(first) or first.step is None or first.host.exposed_ns is None or first.device.bubble_ns is None:
        return None
    step_us = first.step.mean_ns / 1e3
    exposed_us, idle_us = (total / first.num_timed / 1e3 for total in (first.host.exposed_ns, first.device.bubble_ns))
    exposed, idle = (f"{part:,.0f} µs ({100 * part / step_us:.1f} %)" for part in (exposed_us, idle_us))
    return (
        f"Of a mean {name} step of {step_us / 1e3:.1f} ms the host exposes {exposed}; with {AROUND_WORK} the device "
        f"idles {idle}: more than that overlap cannot save here."
    )


def _is_legacy(summary: Summary) -> bool:
    names = {order.order for order in summary.orders} - _EITHER
    return bool(names) and names <= _LEGACY


def _mixes_modes(summaries: Mapping[str, Summary]) -> bool:
    return len({_is_legacy(summary) for summary in summaries.values()}) > 1


def format_comparison(summaries: Mapping[str, Summary]) -> str:
    """A table for a terminal: name, unit, one column a run, and the last run over the first.

    Args:
        summaries: By the name its column gets; the first is the baseline.
    """
    names = list(summaries)
    rows = comparison_rows(list(summaries.values()))
    head = ["", "unit", *names]
    if len(names) > 1:
        head.append(f"{names[-1]}/{names[0]}")
    cells = [head]
    for row in rows:
        line = [f"  {row.label}", row.unit, *(format_value(value, row.unit) for value in row.values)]
        if len(names) > 1:
            line.append("" if row.ratio is None else f"{row.ratio:.2f}x")
        cells.append(line)
    top, *rest = aligned(cells)
    lines = [top]
    section = None
    for row, text in zip(rows, rest, strict=True):
        if row.section != section:
            lines += ["", row.section]
            section = row.section
        lines.append(text)
    lines += ["", "orders and reasons", *reason_lines(summaries)]
    return "\n".join(lines)


def format_value(value: float | None, unit: str) -> str:
    """A number as tables show it; ``no samples`` for None."""
    if value is None:
        return NO_SAMPLES
    if unit == "":
        return f"{value:,.0f}"
    if unit == "%":
        return f"{value:.1f}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def reason_lines(summaries: Mapping[str, Summary]) -> list[str]:
    """How often each run took which order, and why; one line an order."""
    lines = []
    for name, summary in summaries.items():
        for order in summary.orders:
            reasons = ", ".join(f"{reason} {count}" for reason, count in order.reasons.items())
            lines.append(f"  {name}: {order.order} {order.count} ({100 * order.share:.1f} %): {reasons}")
    return lines


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


def _us(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e3


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _us_each(total_ns: float | None, count: int) -> float | None:
    return None if total_ns is None or not count else total_ns / count / 1e3


def _spread(section: str, label: str, get: Callable[[Summary], Spread | None]) -> list[_Metric]:
    """Median and 99th percentile of one set of durations, in milliseconds; the shorter the better."""

    def p50(summary: Summary) -> float | None:
        spread = get(summary)
        return None if spread is None else _ms(spread.p50_ns)

    def p99(summary: Summary) -> float | None:
        spread = get(summary)
        return None if spread is None else _ms(spread.p99_ns)

    percentiles = (("p50", p50), ("p99", p99))
    return [_Metric(section, f"{label} {name}", "ms", get, "lower") for name, get in percentiles]


_LEGACY = frozenset({"legacy", "mtp_legacy", "mtp_legacy_dummy"})
_EITHER = frozenset({"dummy"})
"""Orders of both modes."""
_REQUESTS, _STEPS, _HOST, _DEVICE, _WORK, _DRAFTS = "requests", "iterations", "host", "device", "batches", "drafts"

_METRICS: tuple[_Metric, ...] = (
    _Metric(_REQUESTS, "tokens/s", "1/s", lambda s: s.tokens_per_s, "higher"),
    _Metric(_REQUESTS, "requests", "", lambda s: s.requests.count),
    *_spread(_REQUESTS, "queue delay", lambda s: s.requests.queue_delay),
    *_spread(_REQUESTS, "TTFT", lambda s: s.requests.ttft),
    *_spread(_REQUESTS, "TPOT", lambda s: s.requests.tpot),
    *_spread(_REQUESTS, "ITL", lambda s: s.requests.itl),
    *_spread(_REQUESTS, "end to end", lambda s: s.requests.e2e),
    _Metric(_STEPS, "iterations", "", lambda s: s.num_iterations),
    _Metric(_STEPS, "void iterations", "", lambda s: s.num_void),
    _Metric(_STEPS, "measured time", "s", lambda s: s.measured_ns / 1e9),
    *_spread(_STEPS, "step time", lambda s: s.step),
    *_spread(_STEPS, "step time, decode", lambda s: s.step_by_batch["decode"]),
    *_spread(_STEPS, "step time, prefill", lambda s: s.step_by_batch["prefill"]),
    *_spread(_STEPS, "step time, mixed", lambda s: s.step_by_batch["mixed"]),
    _Metric(_HOST, "host work / iteration", "µs", lambda s: _us_each(s.host.work_ns, s.num_timed), "lower"),
    _Metric(_HOST, "hidden / iteration", "µs", lambda s: _us_each(s.host.hidden_ns, s.num_timed)),
    _Metric(_HOST, "exposed / iteration", "µs", lambda s: _us_each(s.host.exposed_ns, s.num_timed), "lower"),
    _Metric(_HOST, "hidden share", "%", lambda s: _percent(s.host.hidden_share)),
    _Metric(_HOST, "wait / iteration", "µs", lambda s: _us_each(s.host.wait_ns, s.num_timed)),
    _Metric(_HOST, "other / iteration", "µs", lambda s: _us_each(s.host.other_ns, s.num_timed), "lower"),
    _Metric(_HOST, "between / iteration", "µs", lambda s: _us_each(s.host.between_ns, s.num_timed), "lower"),
    _Metric(_DEVICE, "device busy", "%", lambda s: _percent(s.device.busy_share)),
    _Metric(_DEVICE, "bubbles", "%", lambda s: _percent(s.device.bubble_share)),
    _Metric(_DEVICE, "bubble / iteration", "µs", lambda s: _us_each(s.device.bubble_ns, s.num_timed), "lower"),
)

_BATCH_METRICS: tuple[_Metric, ...] = (
    _Metric(_WORK, "graph hit rate", "%", lambda s: _percent(s.graphs.hit_rate)),
    _Metric(_WORK, "padding tokens", "", lambda s: s.graphs.padding_tokens, "lower"),
    _Metric(_WORK, "padding share", "%", lambda s: _percent(s.graphs.padding_share)),
    _Metric(_WORK, "wasted rows", "", lambda s: s.wasted_rows.total, "lower"),
    _Metric(_WORK, "wasted row share", "%", lambda s: _percent(s.wasted_rows.share)),
)


def _rank_metrics(summaries: Sequence[Summary]) -> list[_Metric]:
    """What other ranks cost this one; no rows where there are none."""
    if not any(summary.host.ranks_ns or summary.device.dummy_ns for summary in summaries):
        return []
    return [
        _Metric(RANKS_SECTION, "wait for ranks / iteration", "µs", _ranks_each, "lower"),
        _Metric(RANKS_SECTION, "dummy work", "%", lambda s: _percent(s.device.dummy_share), "lower"),
    ]


def _ranks_each(summary: Summary) -> float | None:
    return _us_each(summary.host.ranks_ns, summary.num_timed)


def _draft_metrics(summaries: Sequence[Summary]) -> list[_Metric]:
    """Acceptance by place and together, and tokens a row; no rows where nobody drafted."""
    places = max((len(summary.drafts.acceptance) for summary in summaries if summary.drafts is not None), default=0)
    if not places:
        return []
    return [
        _Metric(_DRAFTS, "drafts accepted", "%", _acceptance_rate, "higher"),
        *(
            _Metric(_DRAFTS, f"draft {p + 1} accepted", "%", partial(_acceptance, place=p), "higher")
            for p in range(places)
        ),
        _Metric(_DRAFTS, "tokens / verified row", "tokens", _tokens_per_row, "higher"),
    ]


def _acceptance_rate(summary: Summary) -> float | None:
    return None if summary.drafts is None else 100 * summary.drafts.acceptance_rate


def _acceptance(summary: Summary, *, place: int) -> float | None:
    by_place = () if summary.drafts is None else summary.drafts.acceptance
    return 100 * by_place[place] if place < len(by_place) else None


def _tokens_per_row(summary: Summary) -> float | None:
    return None if summary.drafts is None else summary.drafts.tokens_per_row


def _idle_metrics(summaries: Sequence[Summary]) -> list[_Metric]:
    """What the bubbles of a mean iteration are made of: launch latency, and by cause what is left; largest first.

    The rows of a run sum to its ``bubble / iteration``.
    """
    most: dict[str, float] = {}
    for summary in summaries:
        for label in {} if summary.blame is None else summary.blame.parts:
            most[label] = max(most.get(label, 0.0), _idle(summary, label=label) or 0.0)
    labels = sorted(most, key=lambda label: (-most[label], label))
    return [_Metric(IDLE_SECTION, label, "µs", partial(_idle, label=label), "lower") for label in labels]


def _idle(summary: Summary, *, label: str) -> float | None:
    if summary.blame is None:
        return None
    return _us_each(summary.blame.parts.get(label, 0), summary.num_timed)


def _phase_metrics(summaries: Sequence[Summary]) -> list[_Metric]:
    """Host and device time of each phase that any run had, median of the iterations that had it."""
    present = {phase.name for summary in summaries for phase in summary.host.phases}
    names = [*(name for name in PHASES if name in present), *sorted(present - set(PHASES))]
    keys = dict.fromkeys((p.lane, p.name, p.batch) for summary in summaries for p in summary.device.phases)
    host = [_Metric("host phases, median", name, "µs", partial(_host_median, name=name)) for name in names]
    device = [
        _Metric(
            f"device {lane}, median", _device_label(name, batch), "µs", partial(_device_median, key=(lane, name, batch))
        )
        for lane, name, batch in sorted(keys, key=lambda key: key[0] != COMPUTE_LANE)
    ]
    return host + device


def _order_metrics(summaries: Sequence[Summary]) -> list[_Metric]:
    names = dict.fromkeys(order.order for summary in summaries for order in summary.orders)
    metrics = []
    for name in names:
        metrics.append(_Metric("orders", f"{name} share", "%", partial(_order_share, name=name)))
        metrics += _spread("orders", f"{name} step", partial(_order_step, name=name))
    return metrics


def _cause_metrics(summaries: Sequence[Summary]) -> list[_Metric]:
    causes = dict.fromkeys(cause for summary in summaries for cause in summary.wasted_rows.by_cause)
    reasons = dict.fromkeys(reason for summary in summaries for reason in summary.graphs.misses)
    return [
        *(_Metric("wasted rows by cause", cause, "", partial(_wasted, cause=cause)) for cause in causes),
        *(_Metric("graph misses by reason", reason, "", partial(_missed, reason=reason)) for reason in reasons),
    ]


def _device_label(name: str, batch: str) -> str:
    return name if batch == "-" else f"{name}, {batch}"


def _wasted(summary: Summary, *, cause: str) -> float:
    return summary.wasted_rows.by_cause.get(cause, 0)


def _missed(summary: Summary, *, reason: str) -> float:
    return summary.graphs.misses.get(reason, 0)


def _host_median(summary: Summary, *, name: str) -> float | None:
    found: list[HostPhase] = [phase for phase in summary.host.phases if phase.name == name]
    return _us(found[0].host.p50_ns) if found else None


def _device_median(summary: Summary, *, key: tuple[str, str, str]) -> float | None:
    found = [phase for phase in summary.device.phases if (phase.lane, phase.name, phase.batch) == key]
    return _us(found[0].time.p50_ns) if found else None


def _order(summary: Summary, name: str) -> OrderRow | None:
    return next((order for order in summary.orders if order.order == name), None)


def _order_share(summary: Summary, *, name: str) -> float:
    order = _order(summary, name)
    return 0.0 if order is None else 100 * order.share


def _order_step(summary: Summary, *, name: str) -> Spread | None:
    order = _order(summary, name)
    return None if order is None else order.step
