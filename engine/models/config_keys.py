"""Reading a parsed ``config.json``: what is there, of the right type, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import CheckpointError
from engine.models.decoder_config import architecture_of
from engine.ssm.base import NO_LIMITS


class Keys:
    """The keys of a file that are there and not null."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of ``names`` that is there: a family's own name and the one it had before."""
        return next((self.values[name] for name in names if name in self.values), default)

    def size(self, *names: str, default: int | None = None) -> int:
        value = self.get(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: {names[0]} must be a positive whole number, got {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default=default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise CheckpointError(f"config.json: {name} must be a number, got {value!r}")
        return float(value)

    def is_on(self, *names: str, default: bool = False) -> bool:
        return bool(self.get(*names, default=default))

    def need(self, name: str, known: tuple[str, ...]) -> None:
        """Refuse any other value; the first of ``known`` is what a missing key means."""
        value = self.get(name, default=known[0])
        if value not in known:
            raise CheckpointError(f"config.json: {name} must be {' or '.join(map(repr, known))}, got {value!r}")

    def architecture(self) -> str:
        return architecture_of(self.values)

    def limits(self) -> tuple[float, float]:
        """Least and greatest time step; transformers 4 wrote a bare Infinity, which Python reads."""
        values = self.get("time_step_limit", "mamba_dt_limit", default=NO_LIMITS)
        if len(values) != 2 or not all(isinstance(value, (int, float)) for value in values) or values[0] > values[1]:
            raise CheckpointError(f"config.json: time_step_limit must be two numbers in order, got {values!r}")
        return float(values[0]), float(values[1])
