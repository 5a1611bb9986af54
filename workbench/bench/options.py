"""What a run of benchmarks is asked for; what is left open depends on the device. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import MODES
from engine.errors import EngineError

SEED = 0
"""Of prompts and draws."""

_GRAPHS = {"on": (True,), "off": (False,), "both": (True, False)}


class BenchError(EngineError, ValueError):
    """Benchmarks cannot be run or compared as asked; the message names what is at fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of all benchmarks; each takes those that mean something to it.

    Raises:
        BenchError: a value cannot be.
    """

    device: str = "cpu"
    model: str | None = None
    """Of decode, mix and recorder. None: a Qwen3-0.6B shape on CUDA, the tiny shape elsewhere."""
    batches: tuple[int, ...] | None = None
    """Rows of decode and recorder."""
    modes: tuple[str, ...] = ("legacy", "async")
    """Of decode and mix."""
    graphs: str = "both"
    """Of decode and mix: ``on``, ``off`` or ``both``."""
    repeats: int | None = None
    """Measured runs a cell after the warm-up; for recorder, pairs."""
    attention: str = "auto"
    prompt_len: int | None = None
    """Tokens of a prompt in decode."""
    output_len: int | None = None
    """Decode steps that TPOT counts."""
    quick: bool = False

    def __post_init__(self) -> None:
        for name in ("repeats", "prompt_len", "output_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BenchError(f"{name} must be at least 1, got {value}")
        if self.batches is not None and (not self.batches or min(self.batches) < 1):
            raise BenchError(f"batches must be numbers of rows, at least 1 each; got {list(self.batches)}")
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown or not self.modes:
            raise BenchError(f"modes are {' and '.join(MODES)}; got {', '.join(unknown) or 'none'}")
        if self.graphs not in _GRAPHS:
            raise BenchError(f"graphs must be one of {', '.join(_GRAPHS)}; got {self.graphs!r}")

    @property
    def is_cuda(self) -> bool:
        """Whether it runs on a GPU."""
        return self.device == "cuda"

    @property
    def model_name(self) -> str:
        """The model of decode, mix and recorder."""
        return self.model or ("shape:qwen3-0.6b" if self.is_cuda else "shape:tiny")

    @property
    def legs(self) -> list[tuple[str, bool]]:
        """(mode, graphs) of decode and mix, in the order they run."""
        return [(mode, graphs) for graphs in _GRAPHS[self.graphs] for mode in dict.fromkeys(self.modes)]
