"""What commands have to say: one line each, numbered, with a traceback where something broke."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from engine.errors import EngineError
from tracing.run_folder import RunFolderError
from workbench.panel.messages import Notice

if TYPE_CHECKING:
    from workbench.session import Session


class Notices:
    """Makes the notices of one panel."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._count = 0

    def info(self, text: str) -> Notice:
        """What was done."""
        self._count += 1
        return Notice(number=self._count, level="info", text=_line(text), detail="")

    def failure(self, error: BaseException) -> Notice:
        """What a person can mend in a line; what stopped the engine, and what nobody foresaw, with its traceback."""
        failure = self._session.last_failure
        is_failure = failure is not None and failure.error is error
        if isinstance(error, (EngineError, RunFolderError)) and not is_failure:
            return self._error(str(error), "")
        where = "" if failure is None or failure.phase is None or not is_failure else f" in {failure.phase.value}"
        remedy = "; recover goes on from the tokens there are, reset drops all" if is_failure else ""
        detail = "".join(traceback.format_exception(error))
        return self._error(f"{type(error).__name__}{where}: {error}{remedy}", detail)

    def _error(self, text: str, detail: str) -> Notice:
        self._count += 1
        return Notice(number=self._count, level="error", text=_line(text), detail=detail)


def _line(text: str) -> str:
    return " ".join(text.split())
