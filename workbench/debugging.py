"""Debuggers at phases: the right one for where the session runs, and ``breakpoint()`` that works in a notebook."""

from __future__ import annotations

import os
import pdb
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from engine.controller import Border, Iteration
from engine.engine import Engine
from engine.phases import Phase
from workbench.peek import as_phase
from workbench.stops import StopCause

if TYPE_CHECKING:
    from workbench.session import Session

PhaseFunction = Callable[[Iteration], None]


def debug_phase(session: Session, phase: Phase | str, limit: int) -> Border | None:
    """See :meth:`workbench.session.Session.pdb`."""
    session.run_to(phase, limit=limit)
    if session.stopped is not None and session.stopped.cause is not StopCause.CONDITION:
        return None
    return run_phase_under(make_debugger(), session.engine, as_phase(phase), session.step_phase)


def make_debugger() -> pdb.Pdb:
    """IPython's debugger inside IPython, ``pdb`` elsewhere. Its ``q`` goes on: half a phase would be worse."""
    base: type[pdb.Pdb] = pdb.Pdb
    if _shell() is not None:
        from IPython.core.debugger import Pdb

        base = Pdb

    class PhaseDebugger(base):  # type: ignore[misc, valid-type]
        """Leaves a phase by finishing it."""

        def set_quit(self) -> None:
            self.set_continue()
            sys.settrace(None)

    return PhaseDebugger()


def run_phase_under(
    debugger: pdb.Pdb, engine: Engine, phase: Phase, advance: Callable[[], Border | None]
) -> Border | None:
    """Call ``advance``, which runs ``phase``, with the debugger stopped at the phase's first line.

    The frame is the controller's method of that name, ``_resolve`` for resolve: nothing stands between the prompt and
    the phase. On the inline device what the phase launches runs in it, on this thread.
    """
    phases = engine.controller.phase_functions
    plain: PhaseFunction = phases[phase]

    def stopped(iteration: Iteration) -> None:
        iteration.void_reasons.add("debugger")
        debugger.runcall(plain, iteration)

    phases[phase] = stopped
    try:
        return advance()
    finally:
        phases[phase] = plain


def revive_breakpoint() -> bool:
    """Make ``breakpoint()`` open IPython's prompt in a notebook kernel, whose own hook does nothing without a client.

    An attached debugpy client keeps its hook, and ``PYTHONBREAKPOINT`` its meaning. Outside a kernel nothing changes.

    Returns:
        Whether the hook is ours now.
    """
    if os.environ.get("PYTHONBREAKPOINT") is not None or not hasattr(_shell(), "kernel"):
        return False
    former = sys.breakpointhook
    if getattr(former, "is_workbench", False):
        return True

    def hook(*args: Any, **kwargs: Any) -> Any:
        if _has_client():
            return former(*args, **kwargs)
        from IPython.core.debugger import Pdb

        debugger: Any = Pdb()
        return debugger.set_trace(sys._getframe(1))

    hook.is_workbench = True  # type: ignore[attr-defined]
    sys.breakpointhook = hook
    return True


def _shell() -> Any:
    """IPython's shell if this code runs in one; IPython is never imported for the question."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return None if get_shell is None else get_shell()


def _has_client() -> bool:
    is_connected = getattr(sys.modules.get("debugpy"), "is_client_connected", None)
    return bool(is_connected is not None and is_connected())
