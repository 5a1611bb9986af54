"""What commands have to say: one line each, numbered, with a traceback where something broke."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Literal

from engine.errors import EngineError
from tracing.run_folder import RunFolderError
from workbench.panel.messages import Notice

if TYPE_CHECKING:
    from workbench.session import Session


_LONGEST = 400
"""Characters of a notice."""


class Notices:
    """Makes the notices of one panel."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._count = 0

    def info(self, text: str, command: str = "") -> Notice:
        """What was done, by a command or else by a run that has ended."""
        return self._notice("info", text, "", command)

    def failure(self, error: BaseException, command: str = "") -> Notice:
        """What a person can mend in a line; what stopped the engine, and what nobody foresaw, with its traceback."""
        failure = self._session.last_failure
        is_failure = failure is not None and failure.error is error
        if isinstance(error, (EngineError, RunFolderError, OSError, UnicodeError)) and not is_failure:
            return self._notice("error", str(error), "", command)
        where = "" if failure is None or failure.phase is None or not is_failure else f" in {failure.phase.value}"
        remedy = "; recover goes on from the tokens there are, reset drops all" if is_failure else ""
        detail = "".join(traceback.format_exception(error))
        return self._notice("error", f"{type(error).__name__}{where}: {error}{remedy}", detail, command)

    def _notice(self, level: Literal["info", "error"], text: str, detail: str, command: str) -> Notice:
        self._count += 1
        return Notice(
            number=self._count,
            level=level,
            text=_line(text),
            detail=detail,
            command=command,
            place=place_of(self._session),
        )


def place_of(session: Session) -> str:
    """Where the session stands, as a value that differs once it has moved on."""
    engine = session.engine
    next_phase = "" if engine.next_phase is None else engine.next_phase.value
    return f"{engine.controller.next_index} {next_phase}".strip()


def _line(text: str) -> str:
    """One line, of which the end is left out where somebody typed a page."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "…"
