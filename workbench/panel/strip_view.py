"""The order of the iteration in hand as a strip of phases, and what would come next."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Literal

from engine.controller import Iteration
from engine.engine import Engine
from engine.phases import Order, Phase
from engine.plan import Plan
from engine.results import PendingForward
from tracing.records import PHASE_COLOURS, UnfinishedWork
from workbench.explain_order import explain_in_hand
from workbench.panel.coming import Coming, coming_iteration
from workbench.panel.messages import BudgetCell, ForwardCell, PhaseCell, StripView
from workbench.report_data import ORDER_COLOURS
from workbench.snapshot import BudgetView, budget_of, failure_text, pending_view
from workbench.timeline import runs

if TYPE_CHECKING:
    from workbench.session import Session

_IN_EVERY_ORDER: dict[Phase, str] = {
    Phase.ADMIT: "Moves the head of the queue into rows and gives it blocks, first in, first out, while it fits.",
    Phase.PREPARE: "Advances each row on the host, takes the blocks it needs, and stages the next forward.",
    Phase.FORWARD: "Enqueues one copy of the staged inputs and the forward behind it, which is then pending.",
    Phase.SAMPLE: "Enqueues the choice of a token for every row of the pending forward, and its copy to the host.",
    Phase.VERIFY: "Enqueues the check of each row's drafts against the pending logits, and the copy of its result.",
    Phase.DRAFT: "Enqueues the draft heads, which foresee what follows the newest tokens; the host knows none yet.",
    Phase.REWIND: "Waits for the counts of accepted drafts, and puts each row back to its last accepted token.",
    Phase.RESOLVE: "Waits for the sampled ids; gives out tokens, finds ends, releases and moves rows.",
    Phase.EMIT: "Makes text, matches stop strings, and makes the outputs.",
}
_IN_ORDER: dict[tuple[Order, Phase], str] = {
    (Order.LEGACY, Phase.RESOLVE): "The device then stands idle until the next forward.",
    (Order.LEGACY, Phase.EMIT): "The device stands idle meanwhile.",
    (Order.NO_OVERLAP, Phase.RESOLVE): "No forward is enqueued behind it, so the device runs empty.",
    (Order.NO_OVERLAP, Phase.ADMIT): "Nothing is pending here, so rows may be taken and moved freely.",
    (Order.NO_OVERLAP, Phase.PREPARE): "The device stands idle meanwhile.",
    (Order.NO_OVERLAP, Phase.EMIT): "The device works on the forward meanwhile.",
    (
        Order.OVERLAP,
        Phase.PREPARE,
    ): "The device still works on the pending forward, so this is hidden; token ids are not "
    "known yet and stay on the device.",
    (Order.OVERLAP, Phase.SAMPLE): "It lines up behind the running forward; nobody waits.",
    (Order.OVERLAP, Phase.FORWARD): "It lines up behind the sampling, before the host has seen a token.",
    (
        Order.OVERLAP,
        Phase.RESOLVE,
    ): "The device works on the next forward meanwhile; a row that ended was computed in it for nothing.",
    (Order.OVERLAP, Phase.EMIT): "The device works on the next forward meanwhile.",
    (Order.OVERLAP_ADMIT, Phase.ADMIT): "A forward is pending, so rows are added and none is moved; this is hidden.",
    (
        Order.OVERLAP_ADMIT,
        Phase.PREPARE,
    ): "The device still works on the pending forward; prompts join the decode rows.",
    (Order.OVERLAP_ADMIT, Phase.SAMPLE): "Of the pending forward's rows; those that have just entered are not in it.",
    (Order.OVERLAP_ADMIT, Phase.FORWARD): "It lines up behind the sampling, before the host has seen a token.",
    (Order.OVERLAP_ADMIT, Phase.RESOLVE): "The device works on the next forward meanwhile, prompts included.",
    (Order.OVERLAP_ADMIT, Phase.EMIT): "The device works on the next forward meanwhile.",
    (Order.MTP_LEGACY, Phase.REWIND): "The device goes on with the draft heads.",
    (Order.MTP_OVERLAP, Phase.VERIFY): "It lines up behind the running forward; nobody waits.",
    (Order.MTP_OVERLAP, Phase.REWIND): "This is the one wait before the next forward: its lengths depend on it. The "
    "device goes on with the draft heads.",
    (Order.MTP_OVERLAP, Phase.PREPARE): "The device works on the draft heads meanwhile, so this is hidden.",
    (Order.MTP_OVERLAP, Phase.FORWARD): "It lines up behind the draft heads, before the host has seen a token.",
    (Order.MTP_OVERLAP, Phase.RESOLVE): "The device works on the next forward meanwhile.",
    (Order.MTP_OVERLAP, Phase.EMIT): "The device works on the next forward meanwhile.",
    (
        Order.MTP_OVERLAP_ADMIT,
        Phase.ADMIT,
    ): "The verified tokens are not resolved, so rows are added and none is moved; the draft heads hide this.",
    (
        Order.MTP_OVERLAP_ADMIT,
        Phase.PREPARE,
    ): "The device works on the draft heads meanwhile; prompts join the decode rows.",
    (Order.MTP_OVERLAP_LATE, Phase.PREPARE): "The device still works on the pending forward, so this is hidden. How "
    "many drafts that accepts is not known: lengths are what they are at most, and the device counts for itself.",
    (Order.MTP_OVERLAP_LATE, Phase.VERIFY): "It lines up behind the running forward; nobody waits.",
    (Order.MTP_OVERLAP_LATE, Phase.DRAFT): "Nobody waits.",
    (Order.MTP_OVERLAP_LATE, Phase.FORWARD): "It lines up behind the draft heads, before the host knows a count or a "
    "token.",
    (Order.MTP_OVERLAP_LATE, Phase.REWIND): "The next forward is enqueued, and runs or waits for its turn meanwhile.",
    (Order.MTP_OVERLAP_LATE, Phase.RESOLVE): "The device works on the draft heads and the next forward meanwhile; a "
    "row that ended was computed in it for nothing.",
    (Order.MTP_OVERLAP_LATE, Phase.EMIT): "The device works on the next forward meanwhile.",
    (Order.PRIMER, Phase.ADMIT): "Nothing is pending yet.",
    (Order.PRIMER, Phase.FORWARD): "The next iteration samples it.",
    (Order.DRAIN, Phase.RESOLVE): "Nothing is launched behind it.",
    (Order.MTP_PRIMER, Phase.DRAFT): "Nothing is verified here: it is dummy work, where other ranks draft.",
    (Order.SHARED_DRAIN, Phase.RESOLVE): "No forward of this rank's own comes behind it.",
}
"""What differs from order to order."""
for _phase in (Phase.VERIFY, Phase.REWIND, Phase.FORWARD):
    _IN_ORDER[Order.MTP_OVERLAP_ADMIT, _phase] = _IN_ORDER[Order.MTP_OVERLAP, _phase]
_IN_PLACE_OF_WORK: dict[Phase, str] = {
    Phase.PREPARE: "Has no rows; waits for the other ranks, settles with them how large all forwards are, and stages "
    "padding of that size.",
    Phase.FORWARD: "Enqueues a dummy forward, for other ranks need this one's experts; it changes nothing here.",
    Phase.DRAFT: "Enqueues dummy draft heads, for other ranks need this one's experts; they change nothing here.",
}
"""In iterations of a rank that has no forward of its own to launch."""
_LACKING: dict[Order, tuple[Phase, ...]] = {
    Order.DUMMY: (Phase.PREPARE, Phase.FORWARD, Phase.DRAFT),
    Order.SHARED_DRAIN: (Phase.PREPARE, Phase.FORWARD),
}

CellState = Literal["done", "last", "next", "coming"]


def strip_view(session: Session) -> StripView:
    """The strip now. Reads the host's state alone, and asks no policy that could tell."""
    engine, last = session.engine, session._watch.last
    current = engine.in_hand
    coming = coming_iteration(session) if current is None or engine.failure is not None else None
    next_phase = engine.next_phase
    if next_phase is None and coming is not None and coming.order is not None:
        next_phase = coming.order.phases[0]
    order = None if last is None else last.order
    return StripView(
        iteration=None if last is None else last.index,
        is_in_hand=current is not None,
        order=None if order is None else order.label,
        colour="" if order is None else ORDER_COLOURS[order.label],
        reason="" if last is None else last.reason.value,
        why=_why(current, coming),
        phases=[] if last is None else _cells(engine, last, session._watch.behind),
        next_phase=None if next_phase is None else next_phase.value,
        next_order=None if coming is None else coming.text,
        forwards=_forwards(engine, last),
    )


def _why(current: Iteration | None, coming: Coming | None) -> str:
    if coming is not None:
        return coming.why
    assert current is not None
    return explain_in_hand(current.index, current.order, current.reason)


def _cells(engine: Engine, last: Iteration, behind: Phase | None) -> list[PhaseCell]:
    phases = last.order.phases
    failure = engine.failure
    ran_last = behind if failure is None else failure.phase
    return [
        PhaseCell(name=phase.value, colour=PHASE_COLOURS[phase.value], state=state, title=_title(engine, last, phase))
        for phase, state in zip(phases, _states(phases, ran_last, engine.next_phase), strict=True)
    ]


def _states(phases: tuple[Phase, ...], ran_last: Phase | None, next_phase: Phase | None) -> list[CellState]:
    """A phase that raised ran last: its title says so. Behind recover(), what did not run is not said to have."""
    last = -1 if ran_last is None else phases.index(ran_last)
    states: list[CellState] = []
    for at, phase in enumerate(phases):
        if at <= last:
            states.append("last" if at == last else "done")
        else:
            states.append("next" if phase is next_phase else "coming")
    return states


def _title(engine: Engine, last: Iteration, phase: Phase) -> str:
    if engine.failure is not None and engine.failure.phase is phase:
        return f"{failure_text(engine)}."
    return phase_title(last.order, phase)


@cache
def phase_title(order: Order, phase: Phase) -> str:
    """What a phase does in an order, in a sentence or two."""
    plain = order.without_drafting
    if phase in _LACKING.get(plain, ()):
        return _IN_PLACE_OF_WORK[phase]
    more = _IN_ORDER.get((order, phase)) or _IN_ORDER.get((plain, phase))
    return _IN_EVERY_ORDER[phase] if more is None else f"{_IN_EVERY_ORDER[phase]} {more}"


def _forwards(engine: Engine, last: Iteration | None) -> list[ForwardCell]:
    """Those in hand and the pending one; where there are none, the one launched last."""
    current, cells = engine.in_hand, []
    unfinished = engine.recorder.running() if engine.recorder.enabled else None
    if current is not None and current.consumed is not None:
        cells.append(_launched(engine, "sampled", current.consumed, unfinished))
    if current is not None and current.plan is not None and current.launched is None:
        cells.append(_prepared(engine, current.plan, current.index))
    if engine.pending is not None:
        cells.append(_launched(engine, "pending", engine.pending, unfinished))
    if not cells and last is not None and last.launched is not None:
        cells.append(_launched(engine, "last", last.launched, unfinished))
    return cells


def _launched(
    engine: Engine,
    role: Literal["sampled", "pending", "last"],
    forward: PendingForward,
    unfinished: Sequence[UnfinishedWork] | None,
) -> ForwardCell:
    view = pending_view(engine, forward)
    assert view is not None
    dropped = view.table_rows.count(-1) if role != "last" else 0  # of the last one all rows may be gone
    wasted = f", {dropped} for nothing" if dropped else ""
    budget = budget_of(engine, forward.plan, forward.iteration, is_launched=True)
    text = f"{_rows_text(budget)}{wasted}, {view.ran_as}"
    state = _on_device(forward.iteration, unfinished)
    return ForwardCell(role=role, iteration=forward.iteration, on_device=state, text=text, budget=_budget_cell(budget))


def _on_device(
    iteration: int, unfinished: Sequence[UnfinishedWork] | None
) -> Literal["runs", "in line", "has run", ""]:
    """Of the forward of an iteration; ``unfinished``: device work that has not ended, None where none is recorded."""
    if unfinished is None:
        return ""
    for work in unfinished:
        if (work.name, work.iteration) == (Phase.FORWARD.value, iteration):
            return "runs" if runs(work, unfinished) else "in line"
    return "has run"


def _prepared(engine: Engine, plan: Plan, iteration: int) -> ForwardCell:
    budget = budget_of(engine, plan, iteration, is_launched=False)
    text = _rows_text(budget)
    return ForwardCell(role="prepared", iteration=iteration, on_device="", text=text, budget=_budget_cell(budget))


def _rows_text(budget: BudgetView) -> str:
    kinds = [
        f"{count} {kind}" for count, kind in ((budget.num_prompts, "prefill"), (budget.num_decode, "decode")) if count
    ]
    num_tokens = budget.decode + budget.prompt
    rows = "row" if budget.num_prompts + budget.num_decode == 1 else "rows"
    padding = f" and {budget.padding} of padding" if budget.padding else ""
    return f"{' and '.join(kinds)} {rows}, {num_tokens} {'token' if num_tokens == 1 else 'tokens'}{padding}"


def _budget_cell(budget: BudgetView) -> BudgetCell:
    return BudgetCell(limit=budget.limit, decode=budget.decode, prompt=budget.prompt, padding=budget.padding)
