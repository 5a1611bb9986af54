"""The control bar: where the session stands, what each button would do, and what makes times mean nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from workbench.panel.messages import COMMANDS, BadgeView, BarView
from workbench.panel.notices import place_of
from workbench.panel.stops_view import stop_in_hand
from workbench.panel.switch_text import other_mode, switch_text
from workbench.snapshot import failure_text
from workbench.watch import debugger_attached

if TYPE_CHECKING:
    from workbench.session import Session

State = Literal["running", "paused", "finished", "failed", "closed"]
_STATES: dict[str, State] = {"running": "running", "paused": "paused", "finished": "finished", "failed": "failed"}


def bar_view(session: Session) -> BarView:
    """The bar now. Reads the host's state alone, and changes nothing."""
    engine, clock = session.engine, session.clock
    wanted = engine.controller.wanted_mode
    return BarView(
        state=session_state(session),
        headline=place_text(session),
        place=place_of(session),
        stopped=_stopped_text(session),
        model=engine.loaded.name,
        device=engine.device.kind,
        clock=f"{clock.name} {clock.now():.6g} {clock.unit}",
        iterations=engine.controller.next_index,
        mode=engine.mode,
        wanted_mode=wanted,
        other_mode=other_mode(wanted),
        switch_text=switch_text(engine),
        can=_can(session),
        badges=list(_badges(session)),
    )


def session_state(session: Session) -> State:
    """:attr:`Session.state`, and ``closed``."""
    return "closed" if session.engine.is_closed else _STATES[session.state]


def place_text(session: Session) -> str:
    """Where the engine stands, in a line whose end may be cut off."""
    engine, last = session.engine, session._watch.last
    failure, next_phase = failure_text(engine), engine.next_phase
    if failure is not None:
        return f"failed: {failure}"
    if last is not None and engine.in_hand is not None and next_phase is not None:
        behind = session._watch.behind
        after = "" if behind is None else f" (after {behind.value})"
        return f"{last.index} {last.order.label} · before {next_phase.value}{after}"
    num_waiting = engine.queue.num_waiting + len(session._desk.arrivals)
    return f"between iterations · {engine.table.num_live} running, {num_waiting} waiting"


def _stopped_text(session: Session) -> str:
    if session.state == "failed":
        return ""  # the headline says it
    stopped = stop_in_hand(session)
    return "" if stopped is None else stopped.text


def _can(session: Session) -> dict[str, bool]:
    """Whether each command would do something now."""
    engine, state = session.engine, session_state(session)
    is_open, can_go = state != "closed", state == "paused"
    has_requests, has_stops = bool(session._desk.book.submissions), len(session.breakpoints) > 0
    has_run = engine.counters.steps > 0
    can = dict.fromkeys(COMMANDS, is_open)
    can |= dict.fromkeys(("step_phase", "step", "run", "run_to", "run_until"), can_go)
    can |= {
        "pause": state == "running",
        "abort": is_open and (engine.has_unfinished() or len(session._desk.arrivals) > 0),
        "restart": is_open and has_requests,
        "reset": is_open and (has_requests or engine.controller.next_index > 0),
        "recover": state == "failed",
        "enable_stop": has_stops,
        "remove_stop": has_stops,
        "choose": has_run,
        "save": has_run and engine.next_phase is None,
    }
    return can


def _badges(session: Session) -> Iterator[BadgeView]:
    if debugger_attached():
        yield _badge(
            "debugger",
            "A debugger or trace function is attached: it triples the time Python takes, so times are void. Detach it "
            "to measure.",
        )
    if session.config.device == "inline":
        yield _badge(
            "inline device",
            "The device computes on the host's own thread, so no overlap can be seen and times are void. Make the "
            "session with device='cpu' or 'cuda' to measure.",
        )
    if session.record_changes:
        yield _badge(
            "changes recorded",
            "What each phase reads and writes is recorded, which takes time: times are void. Switch it off to measure.",
        )
    if session.pace_s:
        yield _badge(
            "paced",
            f"A run rests {session.pace_s:.3g} s behind each iteration, and the device with it: times are void. Set "
            "the pace to 0 to measure.",
        )
    if session._delays.recorded_s:
        told = ", ".join(f"{name} {delay_s * 1e3:.3g} ms" for name, delay_s in session._delays.recorded_s.items())
        yield _badge("delayed", f"Some work was made longer on purpose ({told}): times show that. reset() forgets it.")
    if session.config.debug_invariants:
        yield _badge(
            "invariants",
            "The engine checks itself at every border: times are void. Make the session without debug_invariants to "
            "measure.",
        )
    if not session.recorder.enabled:
        yield _badge(
            "recorder off",
            "Nothing is recorded: timeline, history and figures stand still. session.recorder.enabled = True goes on.",
        )


def _badge(text: str, title: str) -> BadgeView:
    return BadgeView(text=text, title=title)
