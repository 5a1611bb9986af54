"""Why an iteration took its order, and what would have to change, in two sentences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from engine.engine import Engine
from engine.phases import Order, Reason
from engine.policy import OrderState
from tracing.records import IterationRecord
from workbench.history import History
from workbench.peek import SessionError, coming_order


@dataclass(frozen=True, slots=True)
class Explanation:
    """A reason in words."""

    because: str
    """Ends the sentence that begins with the order."""
    change: str
    """A whole sentence: what would have to change for another order."""
    now: str = ""
    """``because`` of an iteration that has not begun; empty where it is said in the same words."""

    @property
    def because_now(self) -> str:
        """Ends the sentence on an iteration to come."""
        return self.now or self.because


_OVERLAP_NEEDS = "An overlap admits nothing and moves no row before its forward is enqueued"

REASONS: dict[Reason, Explanation] = {
    Reason.LEGACY_MODE: Explanation(
        "the mode is legacy: each iteration waits for the tokens of its own forward",
        "In async the next forward would be launched first: session.mode = 'async'.",
    ),
    Reason.STEADY_DECODE: Explanation(
        "all rows of the next forward decode and nothing could be admitted",
        "It loses the overlap once blocks run out or every row ends; with overlap_admission=False also for a waiting "
        "request that fits, and while the pending forward holds a prompt.",
        now="all rows of the next forward decode and nothing can be admitted",
    ),
    Reason.COUNTS_LATER: Explanation(
        "all rows of the pending forward decode, nothing could be admitted, and the device counts lengths itself: the "
        "next forward need not wait until it is known how many drafts were accepted",
        "With late_rewind=False it would have waited for the accepted counts before prepare; it does so too once every "
        "row might end within its drafts.",
        now="all rows of the pending forward decode, nothing can be admitted, and the device counts lengths itself: "
        "the next forward need not wait until it is known how many drafts are accepted",
    ),
    Reason.ADMITS_BESIDE: Explanation(
        "a prompt could enter the next forward while the pending one ran",
        "With overlap_admission=False it would have been a no_overlap: sample and resolve first, then admit.",
        now="a prompt can enter the next forward while the pending one runs",
    ),
    Reason.NO_PENDING_FORWARD: Explanation(
        "no forward was pending, so there was nothing to sample: the first iteration, or one behind a drain or a pause",
        "It launches the forward that the next iteration finds pending.",
        now="no forward is pending, so there is nothing to sample: it is the first, or comes behind a drain or a pause",
    ),
    Reason.PREFILL_PENDING: Explanation(
        "the pending forward held prompts, and their rows decode only once it is resolved",
        "It would overlap if the pending forward held decode rows only, as the one it launched now does unless a "
        "request was admitted; or with overlap_admission=True.",
        now="the pending forward holds prompts, and their rows decode only once it is resolved",
    ),
    Reason.CHUNK_IN_PROGRESS: Explanation(
        "a prompt is being read in chunks, and its next chunk has to be placed first",
        "It would overlap behind the prompt's last chunk, or with overlap_admission=True.",
    ),
    Reason.PAUSED_ROWS: Explanation(
        "rows are paused, and resuming one moves rows",
        "It would overlap with blocks enough for all rows: more num_blocks, or fewer max_requests.",
    ),
    Reason.NOT_ENOUGH_BLOCKS: Explanation(
        "the free blocks did not suffice for the next token of every row",
        "It would overlap with more num_blocks, or once a row has ended and given its blocks back.",
        now="the free blocks do not suffice for the next token of every row",
    ),
    Reason.HEAD_ADMISSIBLE: Explanation(
        "the head of the queue could be admitted, and without overlap_admission only when no forward is pending",
        f"{_OVERLAP_NEEDS}: it would overlap with an empty queue, a head that has to wait, or overlap_admission=True.",
        now="the head of the queue can be admitted, and without overlap_admission only when no forward is pending",
    ),
    Reason.ALL_ROWS_ENDING: Explanation(
        "every row ends by length with the pending forward, so there was no next forward to launch",
        "It would overlap if one row had a token to come behind the pending one, or with launch_ending_rows=True.",
        now="every row ends by length with the pending forward, so there is no next forward to launch",
    ),
    Reason.POLICY: Explanation(
        "the order policy refused an overlap that was legal",
        "It would overlap under another policy: Session(policy=engine.policy.prefer_overlap) is the default.",
        now="the order policy refuses an overlap that is legal",
    ),
    Reason.MODE_SWITCH: Explanation(
        "the mode was about to change, and the pending forward is drained first",
        "The iteration behind it runs in the new mode.",
        now="the mode is about to change, and the pending forward is drained first",
    ),
    Reason.NOTHING_TO_RUN: Explanation(
        "only requests that were aborted were left, and nothing was pending",
        "It would launch a forward if a request were live.",
        now="only requests that were aborted are left, and nothing is pending",
    ),
    Reason.OTHERS_WORK: Explanation(
        "this rank had nothing to do, and other ranks needed its experts: it ran dummy work as large as theirs, which "
        "changed nothing here",
        "It would launch a forward of its own if a request were live on this rank.",
        now="this rank has nothing to do, and other ranks need its experts: it runs dummy work as large as theirs, "
        "which changes nothing here",
    ),
}
_DUMMY_SWITCH = Explanation(
    "the mode was about to change, other ranks had a forward pending, which is drained first, and needed this rank's "
    "experts meanwhile",
    REASONS[Reason.MODE_SWITCH].change,
    now="the mode is about to change, other ranks have a forward pending, which is drained first, and need this rank's "
    "experts meanwhile",
)


def explanation_of(label: str, reason: Reason) -> Explanation:
    """A reason in words, for the order that was taken.

    Args:
        label: The order's.
        reason: Why it was taken.
    """
    is_dummy = any(one.label == label and one.is_dummy for one in Order)
    return _DUMMY_SWITCH if reason is Reason.MODE_SWITCH and is_dummy else REASONS[reason]


def explain_iteration(engine: Engine, history: History, index: int | None) -> str:
    """Two sentences on an iteration by its number; None: the one in hand, or the one that would come next.

    Raises:
        SessionError: nothing is known of it.
    """
    current = engine.in_hand
    if current is not None and index in (None, current.index):
        return explain_in_hand(current.index, current.order, current.reason)
    if index is None:
        return explain_next(engine)
    past = history[index]
    if past.record is None:
        raise SessionError(f"iteration {index} left no record: the recorder was off")
    return explain_record(past.record)


def explain_record(record: IterationRecord) -> str:
    """Of a past iteration."""
    reason = Reason(record.reason)
    facts = _facts(record, reason)
    told = explanation_of(record.order, reason)
    return f"Iteration {record.iteration} took {_order_text(record.order)} because {told.because}{facts}. {told.change}"


def explain_in_hand(index: int, order: Order, reason: Reason) -> str:
    """Of the iteration in hand."""
    told = explanation_of(order.label, reason)
    return f"Iteration {index} takes {_order_text(order.label)} because {told.because}. {told.change}"


def explain_next(engine: Engine) -> str:
    """Of the iteration that would come next; asks the order policy once more than a run does."""
    if not engine.has_unfinished():
        return "No iteration would come next: no request is live. Submit one, or let the next arrival come."
    return explain_coming(engine.controller.next_index, *coming_order(engine))


def explain_coming(index: int, order: Order, reason: Reason, state: OrderState) -> str:
    """Of the iteration that would come next, its order known."""
    told = explanation_of(order.label, reason)
    numbers = _numbers(state, reason)
    return f"Iteration {index} would take {_order_text(order.label)} because {told.because_now}{numbers}. {told.change}"


@cache
def _order_text(label: str) -> str:
    order = next(one for one in Order if one.label == label)
    return f"{label} ({' → '.join(phase.value for phase in order.phases)})"


def _facts(record: IterationRecord, reason: Reason) -> str:
    """What the record knows beyond the reason."""
    if reason is Reason.PREFILL_PENDING and record.consumed is not None:
        return f" ({record.consumed.num_prefill} of its {record.consumed.num_rows} rows)"
    if reason is Reason.HEAD_ADMISSIBLE and record.launched is not None:
        return f" (it admitted {record.launched.num_prefill})"
    return ""


def _numbers(state: OrderState, reason: Reason) -> str:
    """What the state knows beyond the reason."""
    if reason is Reason.NOT_ENOUGH_BLOCKS:
        return f" ({state.blocks_needed} needed, {state.blocks_available} free)"
    if reason is Reason.PAUSED_ROWS:
        return f" ({state.num_paused} of them)"
    return ""
