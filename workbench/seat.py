"""Who drives: one at a time, be it a call in progress or a run in the background."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workbench.peek import SessionError


@dataclass(frozen=True, eq=False)
class Claim:
    """The right to drive."""

    who: str
    is_alive: Callable[[], bool] = lambda: True
    """Whether it can still be released by whoever holds it."""


class Seat:
    """Held by one claim at most."""

    def __init__(self) -> None:
        self._claim: Claim | None = None

    @property
    def is_taken(self) -> bool:
        """Whether somebody drives now."""
        if self._claim is not None and not self._claim.is_alive():
            self._claim = None
        return self._claim is not None

    def claim(self, who: str, is_alive: Callable[[], bool] = lambda: True) -> Claim:
        """Drive alone until the claim is released.

        Args:
            who: For the refusal of others.
            is_alive: False once nothing will release it: its event loop was closed.

        Raises:
            SessionError: somebody drives already.
        """
        self.require_free()
        self._claim = Claim(who, is_alive)
        return self._claim

    def release(self, claim: Claim) -> None:
        """Give a claim back; nothing happens if it was taken away meanwhile."""
        if claim is self._claim:
            self._claim = None

    def take_away(self) -> None:
        """Whoever drives does so no longer."""
        self._claim = None

    def require_free(self) -> None:
        """Refuse to drive from two places.

        Raises:
            SessionError: somebody drives.
        """
        if self.is_taken and self._claim is not None:
            raise SessionError(f"the session is driven by {self._claim.who}; pause() it, or wait until it stops")
