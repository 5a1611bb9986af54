"""What a switch of mode would do now, in a sentence."""

from __future__ import annotations

from engine.engine import Engine
from engine.phases import Phase

_DRAINS = "sample → resolve → emit, nothing is launched"


def other_mode(mode: str) -> str:
    """The mode that a toggle would ask for."""
    return "legacy" if mode == "async" else "async"


def switch_text(engine: Engine) -> str:
    """What asking for the other mode than the one wanted now would do; no switch changes a token."""
    if engine.is_closed:
        return "The session is closed: no mode can be switched."
    now, wanted = engine.mode, engine.controller.wanted_mode
    if now != wanted:
        return f"Takes the switch to {wanted} back, which has not taken effect: it stays {now}."
    to = other_mode(wanted)
    current, pending, index = engine.in_hand, engine.pending, engine.controller.next_index
    if engine.failure is not None:
        return f"Behind recover() or reset(), which drop what was launched, the next iteration is {to}."
    if current is not None:
        goes_on = f"Iteration {current.index} goes on to its end in {now}"
        if now == "async" and Phase.FORWARD in current.order.phases:
            return (
                f"{goes_on}; what it leaves pending is drained by iteration {index} ({_DRAINS}), and the iteration "
                f"behind that is {to}."
            )
        return f"{goes_on} and leaves nothing pending; iteration {index} is {to}."
    if pending is not None:
        return (
            f"Iteration {index} drains the forward of iteration {pending.iteration} ({_DRAINS}); iteration {index + 1} "
            f"is the first in {to}."
        )
    return f"At once, for no forward is pending: iteration {index} is the first in {to}."
