"""What the engine would do next, told without doing it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from engine.engine import Engine
from engine.errors import EngineError
from engine.phases import Order, Phase, Reason
from engine.policy import OrderPolicy, OrderState, choose_order


class SessionError(EngineError, RuntimeError):
    """A session cannot do what it was asked; the message says why and what would help."""


def coming_phases(engine: Engine) -> tuple[Phase, ...]:
    """Phases still to run in the iteration in hand; between iterations those of the next one.

    Asks the engine's order policy once more than a run does.
    """
    next_phase = engine.next_phase
    if engine.in_hand is not None and next_phase is not None:
        phases = engine.in_hand.order.phases
        return phases[phases.index(next_phase) :]
    return coming_order(engine).order.phases


class ComingOrder(NamedTuple):
    """What an iteration that began now would take, and why."""

    order: Order
    reason: Reason
    state: OrderState


def coming_order(engine: Engine, policy: OrderPolicy | None = None) -> ComingOrder:
    """Between iterations: of the next one. Asks ``policy``, or else the engine's once more than a run does."""
    state = engine.controller.order_state()
    if not state.has_pending:  # a switch of mode takes effect as the iteration begins
        state = replace(state, mode=state.wanted_mode)
    order, reason = choose_order(state, policy or engine.controller.policy)
    # Among other ranks by what this one knows of them, which is what they said last.
    return ComingOrder(engine.controller.order_here(order, state.mode), reason, state)


def as_phase(phase: Phase | str) -> Phase:
    """A phase by its name.

    Raises:
        SessionError: no phase has it.
    """
    try:
        return Phase(phase)
    except ValueError:
        raise SessionError(f"phase must be one of {', '.join(one.value for one in Phase)}; got {phase!r}") from None


def as_reason(reason: Reason | str) -> Reason:
    """A reason by itself, by its name in any case, or by its words.

    Raises:
        SessionError: there is no such reason.
    """
    for known in Reason:
        if reason is known or str(reason).upper() == known.name or reason == known.value:
            return known
    raise SessionError(f"reason must be one of {', '.join(known.name for known in Reason)}; got {reason!r}")
