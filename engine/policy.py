"""Which order an iteration takes: facts in, order and reason out, no side effects.

``choose_order`` holds the rules; an :class:`OrderPolicy` may prefer
no-overlap where overlap is legal, and is not asked where it is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.config import Mode
from engine.errors import ConfigError
from engine.phases import Order, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderState:
    """What the choice depends on, read at an iteration border."""

    mode: Mode
    """In force now."""
    wanted_mode: Mode
    """Asked for; differs until the border where the switch takes effect."""
    has_pending: bool
    """A launched forward waits to be sampled."""
    pending_has_prefill: bool
    chunk_in_progress: bool
    num_paused: int
    num_active: int
    """Live rows that run."""
    num_continuing: int
    """Of those, the rows not known to end with the pending forward."""
    blocks_needed: int
    """New blocks the continuing rows take next."""
    blocks_available: int
    has_waiting: bool
    """Something waits that was not aborted."""
    head_admissible: bool
    """The head of the queue could be admitted now."""
    overlap_admission: bool = False
    """Prompts may be read beside the pending forward."""
    late_rewind: bool = False
    """The device counts lengths, so that accepted counts need not be known before the next forward."""
    has_others: bool = False
    """Other ranks hold experts of the model, and some rank has work."""
    others_pending: bool = False
    """One of them has a forward pending."""
    owes_outputs: bool = True
    """With ``has_others``: some request of this rank still owes its last output."""
    num_lasting: int = 0
    """With ``late_rewind``, of the continuing rows those that go on however many of their drafts are accepted."""

    @property
    def admits_beside(self) -> bool:
        """Whether an overlapping iteration would have prompts to read."""
        return self.overlap_admission and (self.chunk_in_progress or self.head_admissible)

    @property
    def rewinds_late(self) -> bool:
        """Whether an overlapping iteration would wait for accepted counts only behind its forward.

        Not if every row might end within its drafts: the forward would then be for nothing.
        """
        return self.late_rewind and self.num_lasting > 0


class OrderPolicy(Protocol):
    """Asked each time overlap is legal. A researcher passes their own to the engine."""

    def choose(self, state: OrderState) -> tuple[Order, Reason]:
        """``(Order.OVERLAP, Reason.STEADY_DECODE)`` or ``(Order.NO_OVERLAP, Reason.POLICY)``."""
        ...


class PreferOverlap:
    """Overlap whenever it is legal."""

    def choose(self, state: OrderState) -> tuple[Order, Reason]:
        """Always overlap."""
        return Order.OVERLAP, Reason.STEADY_DECODE


class NeverOverlap:
    """The async orders without overlap: tells re-ordering and overlap apart without a third mode."""

    def choose(self, state: OrderState) -> tuple[Order, Reason]:
        """Never overlap."""
        return Order.NO_OVERLAP, Reason.POLICY


prefer_overlap: OrderPolicy = PreferOverlap()
never_overlap: OrderPolicy = NeverOverlap()


def overlap_refusal(state: OrderState) -> Reason | None:
    """Why an iteration with a pending forward may not overlap; None if it may."""
    beside = state.overlap_admission
    if state.chunk_in_progress and not beside:
        return Reason.CHUNK_IN_PROGRESS
    if state.pending_has_prefill and not beside:
        return Reason.PREFILL_PENDING
    if state.num_paused:
        return Reason.PAUSED_ROWS
    if state.head_admissible and not beside:
        return Reason.HEAD_ADMISSIBLE
    if state.num_continuing == 0 and not state.admits_beside:
        return Reason.ALL_ROWS_ENDING
    if state.blocks_needed > state.blocks_available:
        return Reason.NOT_ENOUGH_BLOCKS
    return None


def choose_order(state: OrderState, policy: OrderPolicy) -> tuple[Order, Reason]:
    """The order of the next iteration and why.

    Raises:
        ConfigError: the policy answered with an order other than the two it may choose between.
    """
    if state.wanted_mode != state.mode and (state.has_pending or state.others_pending):
        return (Order.DRAIN if state.has_pending else Order.DUMMY), Reason.MODE_SWITCH
    if not state.has_pending and state.num_active + state.num_paused == 0 and not state.has_waiting:
        if state.has_others and not state.owes_outputs:
            return Order.DUMMY, Reason.OTHERS_WORK
        if state.has_others and state.mode == "legacy":
            return Order.LEGACY, Reason.NOTHING_TO_RUN
        return Order.DRAIN, Reason.NOTHING_TO_RUN
    if state.mode == "legacy":
        return Order.LEGACY, Reason.LEGACY_MODE
    if not state.has_pending:
        return Order.PRIMER, Reason.NO_PENDING_FORWARD
    refusal = overlap_refusal(state)
    if refusal is not None:
        return Order.NO_OVERLAP, refusal
    order, reason = _checked(policy.choose(state))
    if order is Order.OVERLAP and state.admits_beside:
        return Order.OVERLAP_ADMIT, Reason.ADMITS_BESIDE
    if order is Order.OVERLAP and state.rewinds_late:
        return Order.MTP_OVERLAP_LATE, Reason.COUNTS_LATER
    return order, reason


def _checked(answer: object) -> tuple[Order, Reason]:
    if isinstance(answer, tuple) and len(answer) == 2:
        order, reason = answer
        if order in (Order.OVERLAP, Order.NO_OVERLAP) and isinstance(reason, Reason):
            return order, reason
    raise ConfigError(
        "an order policy answers (Order.OVERLAP, Reason.STEADY_DECODE) or (Order.NO_OVERLAP, Reason.POLICY), "
        f"got {answer!r}"
    )


def check_policy(policy: object, option: str = "policy", arguments: str = "state") -> None:
    """Refuse what is no policy before it is asked.

    Args:
        policy: What was passed.
        option: As which argument.
        arguments: What its ``choose`` takes.

    Raises:
        ConfigError: it has no ``choose``, or is a class rather than an instance.
    """
    if isinstance(policy, type):
        raise ConfigError(f"{option} must be an instance, got the class {policy.__name__}; write {policy.__name__}()")
    if not callable(getattr(policy, "choose", None)):
        raise ConfigError(f"{option} must have a method choose({arguments}), got {policy!r}")
