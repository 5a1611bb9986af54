"""Conditions that a person typed: compiled once, tried once, and refused in one line where they cannot be meant."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.breakpoints import Condition
from workbench.panel.arguments import CommandError

if TYPE_CHECKING:
    from workbench.session import Session


def typed_condition(session: Session, source: str) -> Condition:
    """An expression of ``s`` (or ``session``) as a function of the session, whose name is the expression.

    It is tried once, on the session as it is: a name or an attribute that does not exist is told now. What may become
    true later (a row, a request or a forward that is not there yet) is not.

    Raises:
        CommandError: it is no expression, or names what does not exist.
    """
    text = source.strip()
    try:
        code = compile(text, "<condition>", "eval")
    except (SyntaxError, ValueError) as error:  # ValueError: a NUL character
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise CommandError(f"{text!r} is no expression of s: {reason}") from None

    def condition(session: Session) -> object:
        return eval(code, {"s": session, "session": session})

    condition.__name__ = text
    _try(condition, session, text)
    return condition


def _try(condition: Condition, session: Session, text: str) -> None:
    try:
        condition(session)
    except AttributeError as error:
        if error.obj is not None:  # of None: what is not there yet may come
            raise CommandError(f"{text!r}: {_line(error)}") from None
    except NameError as error:
        raise CommandError(f"{text!r}: {_line(error)}; the session is called s") from None
    except (TypeError, SyntaxError) as error:
        raise CommandError(f"{text!r}: {_line(error)}") from None
    except Exception:
        return  # an index or a key that is not there yet


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
