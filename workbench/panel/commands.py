"""What clicks and keys do: one function a command, each of which ends in a notice and never in an exception."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.phases import Phase
from workbench.background import BackgroundRun
from workbench.breakpoints import Breakpoint, Condition
from workbench.panel.arguments import Arguments, CommandError
from workbench.panel.messages import Notice
from workbench.panel.notices import Notices
from workbench.panel.prompts import read_prompt
from workbench.panel.switch_text import other_mode, switch_text
from workbench.panel.typed_conditions import typed_condition
from workbench.peek import as_phase, coming_phases
from workbench.stops import RunOutcome

if TYPE_CHECKING:
    from workbench.session import Session

MOST_PER_S = 1_000.0
LEAST_PER_S = 0.01
_WHEN_CLOSED = ("choose", "save", "pause", "enable_stop", "remove_stop")
"""What still means something: what was recorded can be read."""
_SHOWN_VALUES = 400
"""Of a device value, before numpy leaves out its middle."""


class Commands:
    """The commands of one panel.

    Args:
        session: What they act on.
        tell: Called with a notice that comes later than its command: a run in the background ended. None: nobody is.
    """

    def __init__(self, session: Session, tell: Callable[[Notice], None] | None = None) -> None:
        self._session = session
        self._tell = tell
        self._notices = Notices(session)
        self.chosen: int | None = None
        """The iteration chosen to be looked at; None: the newest, whatever that is."""
        self.device_value = ""
        """The value read from the device last, as text."""
        self._does: dict[str, Callable[[Arguments], str]] = {
            "step_phase": self._step_phase,
            "step": self._step,
            "run": self._run,
            "run_to": self._run_to,
            "run_until": self._run_until,
            "pause": self._pause,
            "set_mode": self._set_mode,
            "set_pace": self._set_pace,
            "submit": self._submit,
            "abort": self._abort,
            "restart": self._restart,
            "reset": self._reset,
            "recover": self._recover,
            "record_changes": self._record_changes,
            "read_device": self._read_device,
            "break_on": self._break_on,
            "enable_stop": self._enable_stop,
            "remove_stop": self._remove_stop,
            "choose": self._choose,
            "save": self._save,
        }

    @property
    def pace_per_s(self) -> float:
        """Iterations a second at most, of runs in the background; 0: as fast as they go."""
        pace_s = self._session.pace_s
        return 1 / pace_s if pace_s else 0.0

    def run(self, name: str, args: object = None) -> Notice:
        """Do what was asked for. What goes wrong is told in the notice, whatever it is.

        Args:
            name: One of :data:`workbench.panel.messages.COMMANDS`.
            args: Its arguments by name; those that are left out are None.
        """
        try:
            given = Arguments(name, args)
            if self._session.engine.is_closed and given.command not in _WHEN_CLOSED:
                raise CommandError(f"{given.command}: the session is closed; make a new one")
            return self._notices.info(self._does[given.command](given), given.command)
        except Exception as error:
            return self._notices.failure(error, name)

    def _ended(self, result: RunOutcome | BaseException) -> None:
        """A run in the background ended."""
        if self._tell is None:
            return
        if isinstance(result, RunOutcome):
            if result.stopped is not None:  # else a reset took the engine away from the run, and said so itself
                self._tell(self._notices.info(result.stopped.text))
        elif not isinstance(result, asyncio.CancelledError):
            self._tell(self._notices.failure(result))
        elif self._session.stopped is not None:
            self._tell(self._notices.info(self._session.stopped.text))

    # -- driving ---------------------------------------------------------------------------------------------------

    def _step_phase(self, given: Arguments) -> str:
        border = self._session.step_phase()
        if border is None:
            return _NOTHING_LEFT
        if border.side == "before" and self._session.stopped is not None:
            return self._session.stopped.text
        return f"{border.phase.value} of iteration {border.iteration.index} ran"

    def _step(self, given: Arguments) -> str:
        session, begun = self._session, self._session.engine.controller.next_index
        was_in_hand = session.engine.in_hand
        session.step()
        if session.stopped is not None:
            return session.stopped.text
        if was_in_hand is None and session.engine.controller.next_index == begun:
            return _NOTHING_LEFT
        return f"iteration {session.engine.controller.next_index - 1} ran"

    def _run(self, given: Arguments) -> str:
        n = given.whole("n", low=1)
        self._start(n)
        return "runs until nothing is left to do" if n is None else f"runs {n} iteration{'' if n == 1 else 's'}"

    def _run_until(self, given: Arguments) -> str:
        source = given.required_text("expression", "s.row(0).output_tokens >= 8")
        self._start(None, until=typed_condition(self._session, source))
        return f"runs until {source.strip()}"

    def _run_to(self, given: Arguments) -> str:
        session, phase = self._session, as_phase(given.required_text("phase", "resolve"))
        if session.state != "paused":
            session.run_to(phase)  # says why it cannot
        elif phase in coming_phases(session.engine):
            session.run_to(phase)
            return "" if session.stopped is None else session.stopped.text
        else:
            self._run_far(phase)
        return f"runs to the next {phase.value}"

    def _run_far(self, phase: Phase) -> None:
        """Over any number of iterations that do not have the phase, so on the loop."""
        once = self._session.break_on(phase)
        try:
            self._start(None, once=once)
        except BaseException:
            once.remove()
            raise

    def _start(self, n: int | None, *, until: Condition | None = None, once: Breakpoint | None = None) -> None:
        run: BackgroundRun = self._session.start(n, until=until)

        def ended(result: RunOutcome | BaseException) -> None:
            if once is not None:
                once.remove()
            self._ended(result)

        run.when_done(ended)

    def _pause(self, given: Arguments) -> str:
        if self._session.state != "running":
            return "nothing runs"
        self._session.pause()
        return "pauses behind the iteration in hand"

    def _set_pace(self, given: Arguments) -> str:
        per_s = given.number("per_s")
        if per_s is None or not (per_s == 0 or LEAST_PER_S <= per_s <= MOST_PER_S):
            raise CommandError(
                f"set_pace: per_s must be 0 (as fast as they go) or within [{LEAST_PER_S:g}, {MOST_PER_S:g}], "
                f"got {per_s!r}"
            )
        self._session.pace_s = 1 / per_s if per_s else 0.0
        return f"at most {per_s:g} iterations a second; their times are void" if per_s else "as fast as they go"

    def _set_mode(self, given: Arguments) -> str:
        """None: the other one."""
        engine = self._session.engine
        wanted, mode = engine.controller.wanted_mode, given.text("mode")
        if mode is None:
            mode = other_mode(wanted)
        if mode == wanted:
            return f"the mode is {mode} already" if mode == engine.mode else f"{mode} is asked for already"
        told = switch_text(engine)
        self._session.mode = mode
        return f"{mode}: {told}"

    # -- requests --------------------------------------------------------------------------------------------------

    def _submit(self, given: Arguments) -> str:
        asked = {
            "max_tokens": given.whole("max_tokens"),
            "temperature": given.number("temperature"),
            "stop": given.texts("stop"),
            "seed": given.whole("seed"),
        }
        sampling: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
        prompt = read_prompt(self._session.engine.loaded, given.required_text("prompt", "Once upon a time"))
        return f"submitted {self._session.submit(prompt, **sampling)}"

    def _abort(self, given: Arguments) -> str:
        request_id = given.required_text("request_id", "request-0")
        if not self._session.abort(request_id):
            raise CommandError(f"{request_id} is not live: it has ended, or never was")
        return f"{request_id} is aborted; no token is given to it any more"

    def _restart(self, given: Arguments) -> str:
        self._session.restart()
        self._forget()
        count = len(self._session.submissions)
        return f"starts over with the same {count} request{'' if count == 1 else 's'} and seeds"

    def _reset(self, given: Arguments) -> str:
        dropped = len(self._session.reset())
        self._forget()
        return f"all is dropped; {dropped} request{' was' if dropped == 1 else 's were'} live"

    def _forget(self) -> None:
        self.chosen, self.device_value = None, ""

    def _recover(self, given: Arguments) -> str:
        self._session.recover()
        return "every row is computed again from its tokens; no token changes"

    # -- looking ---------------------------------------------------------------------------------------------------

    def _record_changes(self, given: Arguments) -> str:
        wanted = given.required_flag("wanted")
        self._session.record_changes = wanted
        if not wanted:
            return "changes are recorded no longer; what was recorded stays"
        return "changes are recorded from the next iteration on; its times are void"

    def _read_device(self, given: Arguments) -> str:
        name = given.required_text("name", "last_token")
        value = self._session.read_device(name)
        shape = " × ".join(map(str, value.shape))
        with np.printoptions(threshold=_SHOWN_VALUES, precision=4, suppress=True, linewidth=100):
            self.device_value = f"{name} [{shape}] {value.dtype}\n{value}"
        return f"{name} was read; the iteration it was read in, or the next one, is void"

    def _choose(self, given: Arguments) -> str:
        index = given.whole("iteration", low=0)
        if index is not None:
            self._session.history[index]  # says why it is not there
        self.chosen = index
        return ""  # every view shows it

    def _save(self, given: Arguments) -> str:
        folder = given.required_text("folder", "runs/mine")
        saved = self._session.save(folder.strip()).resolve()
        return f"saved; in a terminal: workbench report {shlex.quote(str(saved))}"

    # -- breakpoints -----------------------------------------------------------------------------------------------

    def _break_on(self, given: Arguments) -> str:
        session, source = self._session, given.text("when")
        made = session.break_on(
            given.text("phase"),
            when=None if source is None else typed_condition(session, source),
            request=given.text("request"),
            reason=given.text("reason"),
            graph_miss=bool(given.flag("graph_miss")),
            bubble_longer_than_us=given.number("bubble_us"),
        )
        return f"{made} is set"

    def _enable_stop(self, given: Arguments) -> str:
        stop, enabled = self._stop(given), given.required_flag("enabled")
        stop.enabled = enabled
        return f"{stop} {'stops runs again' if enabled else 'stops nothing until it is enabled'}"

    def _remove_stop(self, given: Arguments) -> str:
        stop = self._stop(given)
        stop.remove()
        return f"{stop} is removed"

    def _stop(self, given: Arguments) -> Breakpoint:
        number = given.required_whole("id")
        for stop in self._session.breakpoints:
            if stop.id == number:
                return stop
        raise CommandError(f"{given.command}: there is no breakpoint {number}")


_NOTHING_LEFT = "nothing is left to do: submit a request, or restart"
