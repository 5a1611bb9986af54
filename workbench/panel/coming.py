"""The iteration that would come next, told without asking an order policy more often than a run does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from engine.phases import Order
from engine.policy import NeverOverlap, OrderPolicy, OrderState, PreferOverlap
from workbench.explain_order import explain_coming
from workbench.peek import coming_order
from workbench.replays import RecordedOrders

if TYPE_CHECKING:
    from workbench.session import Session

_ASKABLE = (PreferOverlap, NeverOverlap, RecordedOrders)
"""Policies that answer the same however often they are asked; one of somebody's own may count."""


@dataclass(frozen=True, slots=True)
class Coming:
    """What is known of the next iteration."""

    order: Order | None
    """None: none comes, or it is not known yet."""
    text: str
    """The order with its reason, or why there is none."""
    why: str
    """In sentences, with what would change it."""


class _AskedError(Exception):
    """The order depends on the policy."""


class _Unasked:
    """Stands in for a policy that is not to be asked."""

    def choose(self, state: OrderState) -> NoReturn:
        raise _AskedError


def coming_iteration(session: Session) -> Coming:
    """Of a session that stands between iterations. Changes nothing, whatever the policy."""
    engine = session.engine
    none = _why_none(session)
    if none is not None:
        return Coming(None, none, none)
    index = engine.controller.next_index
    policy = engine.controller.policy
    asked: OrderPolicy = policy if isinstance(policy, _ASKABLE) else _Unasked()
    try:
        order, reason, state = coming_order(engine, asked)
    except _AskedError:
        text = f"overlap is legal, {type(policy).__name__} decides"
        return Coming(None, text, f"Iteration {index} may overlap; the policy {type(policy).__name__} decides.")
    return Coming(order, f"{order.label}: {reason.value}", explain_coming(index, order, reason, state))


def _why_none(session: Session) -> str | None:
    """Why no order can be told; None if one can."""
    engine, desk = session.engine, session._desk
    if engine.is_closed:
        return "The session is closed: make a new one."
    if engine.failure is not None:
        return "An iteration has failed: recover() computes every row again from its tokens, reset() drops all."
    first = desk.arrivals.first
    if first is not None and (not engine.has_unfinished() or first.arrival <= desk.clock.now()):
        if first.loop is not None:
            return f"{first.request_id} is let in first, by its closed loop."
        return f"{first.request_id} arrives first, at {first.arrival:.6g} {desk.clock.unit}."
    return None if engine.has_unfinished() else "No request is live: submit one."
