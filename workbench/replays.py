"""A recorded run, stepped again: the same requests, arrivals, aborts, mode switches and orders, and the same tokens.

The true times are those of the record; a person who steps voids the new ones. A request comes before the iteration it
came before then, so the schedule does not depend on any clock. What the record does not hold is where in an iteration
somebody submitted or aborted: a request that came in mid iteration comes before the next one, and an abort comes before
the iteration that made its last output; the schedule may then differ by an iteration (``differing_orders``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.controller import Iteration
from engine.errors import EngineError
from engine.phases import Order, Reason
from engine.policy import OrderState
from engine.request import Request
from tracing.records import Category, IterationRecord
from tracing.trace import Trace
from workbench.arrivals import Submission
from workbench.desk import NEVER
from workbench.display import html_table, text_table
from workbench.documents import asked_params
from workbench.driver import Script
from workbench.peek import SessionError
from workbench.policies import DEFAULTS
from workbench.saved_runs import load_run

if TYPE_CHECKING:
    from workbench.session import Session

_MUST_AGREE = ("model", "dtype", "vocab_size")
_SHOULD_AGREE = ("block_size", "num_blocks", "max_requests", "max_batch_tokens", "max_sequence_length", "graphs",
                 "chunked_prefill", "launch_ending_rows", "sampling_backend", "attention_backend", "graph_distribution",
                 "graph_non_decode", "graph_all_prefills", "prefix_caching", "eviction_policy", "capacity_policy",
                 "paused_blocks", "overlap_admission", "speculative_tokens", "late_rewind",
                 "mamba_cache_gb")  # fmt: skip
_DEFAULTS_THEN = {"overlap_admission": False, "late_rewind": False}
"""Of options whose default has changed since there are any, or that came later."""
_POLICIES = {"admission_policy": "admission", "graph_list_policy": "graph list"}
"""Those that a replay takes from its session; the order of each iteration is the record's."""
_HEAD = ("phase", "recorded work µs", "recorded wait µs", "")


class ReplayError(SessionError):
    """A run cannot be replayed, or the replay went another way than the record."""


@dataclass(frozen=True, slots=True)
class _Expected:
    """What one request got in the record."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    finished_iteration: int | None


@dataclass(frozen=True, kw_only=True)
class RecordedScript:
    """A run as a replay reads it."""

    run: Trace
    submissions: tuple[Submission, ...]
    """Each arrives by iteration; numbered in the order in which they came."""
    expected: Mapping[str, _Expected]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Host times of one phase in the record, nanoseconds."""

    phase: str
    work_ns: int
    wait_ns: int


class RecordedOrders:
    """The policy of a replay: where overlap is legal it is taken if the record took it."""

    def __init__(self, records: Mapping[int, IterationRecord], next_index: Callable[[], int]) -> None:
        self._records = records
        self._next_index = next_index

    def choose(self, state: OrderState) -> tuple[Order, Reason]:
        """As recorded; overlap behind the record's end."""
        record = self._records.get(self._next_index())
        if record is not None and record.reason == Reason.POLICY.value:
            return Order.NO_OVERLAP, Reason.POLICY
        return Order.OVERLAP, Reason.STEADY_DECODE


class Replay(Script):
    """A recorded run beside the session that repeats it; drive the session as ever. ``session.replay`` makes it."""

    def __init__(self, session: Session, script: RecordedScript) -> None:
        self._session = session
        self._expected = script.expected
        self._aborts = _aborts_by_iteration(script.expected)
        self._times = _phase_times(script.run)
        self._told: set[str] = set()
        """Requests of which a difference was told."""
        self.run = script.run
        self.notes = script.notes
        """What may make the schedule differ from the record."""
        self.records: dict[int, IterationRecord] = {one.iteration: one for one in self.run.records.iterations}
        self.policy = RecordedOrders(self.records, lambda: session.engine.controller.next_index)
        self.differing_orders: list[int] = []
        """Iterations that took another order than in the record."""

    # -- the script ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The requests are entered: take the record's mode."""
        self._told.clear()
        self.differing_orders.clear()
        first = self.records.get(0)
        if first is not None:
            self._session.engine.set_mode(first.mode)

    def before(self, index: int) -> None:
        """Switch modes and abort where the record did."""
        engine, record = self._session.engine, self.records.get(index)
        if record is not None and record.reason == Reason.MODE_SWITCH.value:
            engine.set_mode("legacy" if record.mode == "async" else "async")
        elif record is not None and record.mode != engine.controller.wanted_mode and engine.pending is None:
            engine.set_mode(record.mode)
        for request_id in self._aborts.get(index, ()):
            self._session.abort(request_id)

    def after(self, iteration: Iteration) -> None:
        """Compare what the iteration gave with the record.

        Raises:
            ReplayError: a token differs, or an end.
        """
        record = self.records.get(iteration.index)
        if record is not None and _plain_order(record.order) != iteration.order.without_drafting.label:
            self.differing_orders.append(iteration.index)
        for request in (*iteration.advanced, *iteration.ended):
            expected = self._expected.get(request.request_id)
            if expected is not None and request.request_id not in self._told:
                self._compare(request, expected)

    def _compare(self, request: Request, expected: _Expected) -> None:
        """The newest tokens, and an end; earlier ones were compared when they were the newest."""
        tokens, then = request.output_ids, expected.token_ids
        newest = range(max(0, len(tokens) - self._session.config.decode_width), min(len(tokens), len(then)))
        at = next((place for place in newest if tokens[place] != then[place]), None)
        is_whole = request.finish_reason is not None and expected.finish_reason is not None
        problem = None
        if at is not None:
            problem = f"got token {tokens[at]} at place {at}, the record has {then[at]}"
        elif is_whole and (tuple(tokens), request.finish_reason) != (then, expected.finish_reason):
            problem = (
                f"ended by {request.finish_reason} with {len(tokens)} tokens, in the record by "
                f"{expected.finish_reason} with {len(then)}"
            )
        if problem is not None:
            self._told.add(request.request_id)
            raise ReplayError(f"{request.request_id} {problem}: other weights or rounding, or a fault")

    # -- looking ---------------------------------------------------------------------------------------------------

    @property
    def index(self) -> int:
        """The iteration in hand, or else the one that ended last; -1 before the first."""
        current = self._session.engine.in_hand
        return current.index if current is not None else self._session.engine.controller.next_index - 1

    @property
    def record(self) -> IterationRecord | None:
        """What was recorded of :attr:`index`."""
        return self.records.get(self.index)

    def times(self, index: int | None = None) -> tuple[PhaseTimes, ...]:
        """True host times of an iteration's phases, in order; None: of :attr:`index`."""
        return tuple(self._times.get(self.index if index is None else index, ()))

    @property
    def headline(self) -> str:
        """Where the replay stands, in one line."""
        record, total = self.record, len(self.records)
        if record is None:
            return f"replay of {self.run.name}: {total} iterations recorded, none of them stepped yet"
        order = "" if self.index not in self.differing_orders else ", which took another order now"
        return (
            f"replay of {self.run.name}: iteration {record.iteration} of {total} ({record.order}{order}) took "
            f"{record.duration_ns / 1e6:.3f} ms in the record"
        )

    def _cells(self) -> list[list[str]]:
        engine = self._session.engine
        at = engine.next_phase.value if engine.in_hand is not None and engine.next_phase is not None else None
        return [
            [one.phase, f"{one.work_ns / 1e3:.1f}", f"{one.wait_ns / 1e3:.1f}", "next" if one.phase == at else ""]
            for one in self.times()
        ]

    def __str__(self) -> str:
        lines = [self.headline, *self.notes]
        return "\n".join(lines + text_table(_HEAD, self._cells())) if self.times() else "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        lines = "".join(f"<div>{escape(line)}</div>" for line in (self.headline, *self.notes))
        return f"<div style='font-family:sans-serif'>{lines}{html_table(_HEAD, self._cells())}</div>"


# -- reading a record --------------------------------------------------------------------------------------------------


def read_script(run: Trace | str | Path, config: Mapping[str, Any]) -> RecordedScript:
    """What a replay needs of a run, on a session of that configuration.

    Raises:
        ReplayError: the run does not say what was asked for, is not whole, or does not fit.
        RunFolderError: the folder is no run.
    """
    trace = run if isinstance(run, Trace) else load_run(run)
    _check_fits(config, trace)
    if trace.lost_iterations:
        raise ReplayError(f"{trace.name} lacks its first {trace.lost_iterations} iterations; record with a larger ring")
    if not trace.outputs:
        raise ReplayError(f"{trace.name} was saved without its requests")
    places = range(len(trace.outputs))
    by_arrival = sorted(places, key=lambda place: trace.outputs[place]["timings"]["arrival_ns"])
    numbers = {place: number for number, place in enumerate(by_arrival)}
    return RecordedScript(
        run=trace,
        submissions=tuple(_submission(numbers[place], trace.outputs[place]) for place in places),
        expected={output["request_id"]: _expected(output) for output in trace.outputs},
        notes=_configuration_notes(config, trace),
    )


def _submission(number: int, output: Mapping[str, Any]) -> Submission:
    asked, name = output.get("asked"), output["request_id"]
    if asked is None:
        raise ReplayError(
            f"{name} was saved without its sampling parameters, by an earlier version; save the run again"
        )
    try:
        params = asked_params(asked["params"])
    except (TypeError, EngineError) as error:
        raise ReplayError(f"{name}: its sampling parameters cannot be read: {error}") from error
    timings = output["timings"]
    has_arrived = output["finish_reason"] is None or timings["finished_iteration"] is not None
    return Submission(
        number=number,
        request_id=name,
        prompt_ids=tuple(output["prompt_token_ids"]),
        params=params,
        arrival=float(timings["arrival_iteration"]) if has_arrived else NEVER,
        stream=bool(asked["stream"]),
        cache_salt=asked.get("cache_salt", ""),  # runs of earlier versions say nothing of it
    )


def _check_fits(config: Mapping[str, Any], run: Trace) -> None:
    """Refuse a session on which the run could not give the same tokens.

    Raises:
        ReplayError: it has another model, dtype or vocabulary.
    """
    for name in _MUST_AGREE:
        if config.get(name) != run.config.get(name):
            raise ReplayError(
                f"the run was recorded with {name}={run.config.get(name)!r}, this session has {config.get(name)!r}"
            )


def _configuration_notes(config: Mapping[str, Any], run: Trace) -> tuple[str, ...]:
    # An option that a run does not name came after it, and had its default then: that of then.
    then = {**EngineConfig().to_dict(), **_DEFAULTS_THEN, **DEFAULTS, **run.config}
    now = {**DEFAULTS, **config}
    notes = []
    differing = [name for name in _SHOULD_AGREE if now.get(name) != then.get(name)]
    if differing:
        notes.append(f"The schedule may differ from the record, for these options do: {', '.join(differing)}.")
    notes += [
        f"The schedule may differ from the record: its {what} policy was {then[name]}, this session's is {now[name]}."
        for name, what in _POLICIES.items()
        if now[name] != then[name]
    ]
    return tuple(notes)


def _expected(output: Mapping[str, Any]) -> _Expected:
    return _Expected(
        tuple(output["output_token_ids"]), output["finish_reason"], output["timings"]["finished_iteration"]
    )


def _plain_order(label: str) -> str:
    """Of an order by its label: the one that it takes the place of where drafts are verified."""
    return next((order.without_drafting.label for order in Order if order.label == label), label)


def _aborts_by_iteration(expected: Mapping[str, _Expected]) -> dict[int, list[str]]:
    """Requests that were aborted, by the iteration that made their last output."""
    found: dict[int, list[str]] = defaultdict(list)
    for request_id, one in expected.items():
        if one.finish_reason == "abort" and one.finished_iteration is not None:
            found[one.finished_iteration].append(request_id)
    return found


def _phase_times(run: Trace) -> dict[int, list[PhaseTimes]]:
    phases: dict[int, dict[str, int]] = defaultdict(dict)
    waits: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for span in run.records.spans:
        if span.category is Category.PHASE and span.depth == 0:
            phases[span.iteration][span.name] = span.duration_ns
        elif span.category is Category.WAIT and span.phase is not None:
            waits[span.iteration][span.phase] += span.duration_ns
    return {
        index: [PhaseTimes(name, length - waits[index][name], waits[index][name]) for name, length in of.items()]
        for index, of in phases.items()
    }
