"""Errors a caller can cause, each with the field it is about and the remedy."""

from __future__ import annotations


class EngineError(Exception):
    """Base of the errors this package raises on purpose."""


class ConfigError(EngineError, ValueError):
    """A configuration value is not usable; the message names the field, what was expected and what came."""


class CheckpointError(EngineError, ValueError):
    """A checkpoint is missing, damaged, or of a kind this engine does not load."""


class RequestError(EngineError, ValueError):
    """A request cannot be served as given.

    Attributes:
        request_id: The id of the request, or None where it never got one.
        field: The argument at fault, for instance ``"max_tokens"``.
        can_retry: Whether the same request may succeed later.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str,
        request_id: str | None = None,
        can_retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.request_id = request_id
        self.can_retry = can_retry


class PolicyError(EngineError, ValueError):
    """A policy passed to the engine answered with something that cannot be done; the message names what it breaks."""


class MidIterationError(EngineError, RuntimeError):
    """The call needs an iteration border, and an iteration is in hand; the message names its phase."""


class EnginePausedError(EngineError, RuntimeError):
    """The engine is paused or suspended; ``resume()`` lets it go on."""


class IterationFailedError(EngineError, RuntimeError):
    """An exception inside a phase stopped the engine; call ``recover()`` or ``reset()`` to go on."""


class DeviceError(EngineError, RuntimeError):
    """Work enqueued on a device stream raised; the original exception is the cause."""


class RankError(EngineError, RuntimeError):
    """Another rank has gone, does not come, or does something else; what was shared with it cannot go on."""


class InvariantError(EngineError, AssertionError):
    """A check of ``engine/invariants.py`` does not hold: a fault of ours or of a policy passed in."""
