"""Workloads from one line of text: the kinds there are, and how their options are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from urllib.parse import unquote

from engine.request import SamplingParams
from workbench.workloads.workload import Workload, WorkloadError

SAMPLING_KEYS = ("temperature", "top_k", "top_p", "seed", "ignore_eos")
PATH = ""
"""Names the file among a kind's values; the whole argument where a kind knows no keys."""


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """``key=value`` pairs after the colon, taken out one by one with their types checked."""

    kind: str
    text: str
    vocab_size: int
    """Random prompts draw from it."""
    values: dict[str, str] = field(default_factory=dict)

    def whole(self, key: str, default: int | None = None, *, low: int = 0) -> int:
        """A whole number of at least ``low``."""
        value = self._number(key, default, int, "a whole number")
        if value < low:
            raise WorkloadError(f"workload {self.text!r}: {key} must be at least {low}, got {value}")
        return int(value)

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = float(self._number(key, default, float, "a number"))
        if not abs(value) < float("inf"):
            raise WorkloadError(f"workload {self.text!r}: {key} must be finite, got {value}")
        return value

    def needed(self, key: str) -> str:
        """The text of a value that must be given."""
        text = self.values.get(key)
        if text is None:
            raise WorkloadError(f"workload {self.text!r}: {self.kind} needs {key}=")
        return text

    def sampling(self) -> SamplingParams:
        """What all its requests share; a fixed output length is promised, so EOS is passed over unless asked for."""
        return SamplingParams(
            temperature=self.real("temperature", 0.0),
            top_k=self.whole("top_k", 0),
            top_p=self.real("top_p", 1.0),
            seed=self.whole("seed", 0),
            ignore_eos=bool(self.whole("ignore_eos", 1)),
        )

    def _number(self, key: str, default: float | None, read: Callable[[str], float], what: str) -> float:
        if key not in self.values and default is not None:
            return default
        text = self.needed(key)
        try:
            return read(text)
        except ValueError:
            raise WorkloadError(f"workload {self.text!r}: {key} must be {what}, got {text!r}") from None


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """A way to make workloads. ``keys`` empty: all after the colon is one argument, kept as ``values['']``."""

    make: Callable[[WorkloadOptions], Workload]
    keys: tuple[str, ...]
    example: str
    has_file: bool = False
    """``KIND:FILE?KEY=VALUE&...``; the file is ``values['']``. False: ``KIND:KEY=VALUE,...``."""


_kinds: dict[str, WorkloadKind] = {}


def register_workload(name: str, kind: WorkloadKind) -> None:
    """Let :func:`parse_workload` make ``name:...``; a name registered again is replaced."""
    _kinds[name] = kind


def as_workload(workload: Workload | str, *, vocab_size: int) -> Workload:
    """A workload as it is, or the one that a line of text describes.

    Raises:
        WorkloadError: it is neither, or the text does not fit.
    """
    check_workload(workload)
    return parse_workload(workload, vocab_size=vocab_size) if isinstance(workload, str) else workload


def check_workload(workload: object) -> None:
    """Refuse what is neither a workload nor text, before a model is loaded for it.

    Raises:
        WorkloadError: it is neither.
    """
    if not isinstance(workload, Workload | str):
        raise WorkloadError(
            f"workload must be a Workload, or text as on the command line, such as {_first_example()!r}; "
            f"got {type(workload).__name__}"
        )


def parse_workload(text: str, *, vocab_size: int | None = None) -> Workload:
    """Make the workload that ``text`` describes; the same text and vocabulary give the same requests.

    Args:
        text: ``KIND:KEY=VALUE,...``, ``KIND:FILE?KEY=VALUE&...`` or ``file:PATH``; docs/workloads.md has them all. In
            values behind a file ``%26`` is an ampersand and ``%25`` a per cent sign.
        vocab_size: Ids that random prompts may hold; a session's model has ``session.engine.loaded.vocab_size``.

    Raises:
        WorkloadError: ``vocab_size`` is missing, the kind or a key is unknown, or a value does not fit.
    """
    if vocab_size is None:
        raise WorkloadError(
            "parse_workload needs vocab_size=, the model's: session.engine.loaded.vocab_size; or give the text itself "
            "to compare() or session.submit_workload(), which know their model"
        )
    name, _, rest = text.partition(":")
    kind = _kinds.get(name)
    if kind is None:
        raise WorkloadError(f"workload kind {name!r} is unknown; known: {known_workloads()}")
    if not kind.keys:
        return kind.make(WorkloadOptions(name, text, vocab_size, {PATH: rest}))
    if not kind.has_file:
        return kind.make(WorkloadOptions(name, text, vocab_size, _pairs(text, name, kind, rest.split(","))))
    path, _, query = rest.partition("?")
    if not path:
        raise WorkloadError(f"workload {text!r}: {name} needs a file, as in {kind.example}")
    pairs = {key: unquote(value) for key, value in _pairs(text, name, kind, query.split("&")).items()}
    return kind.make(WorkloadOptions(name, text, vocab_size, {**pairs, PATH: path}))


def _pairs(text: str, name: str, kind: WorkloadKind, parts: list[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    for part in filter(None, parts):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or key not in kind.keys or key in values:
            problem = "is given twice" if key in values else "is not KEY=VALUE" if not equals else "is unknown"
            near = get_close_matches(key, kind.keys, n=1) if problem == "is unknown" else []
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise WorkloadError(f"workload {text!r}: {part!r} {problem}; {name} knows {', '.join(kind.keys)}{hint}")
        values[key] = value.strip()
    return values


def known_workloads() -> str:
    """One example of each kind, for help and errors."""
    return " | ".join(kind.example for kind in _kinds.values())


def _first_example() -> str:
    return next(iter(_kinds.values())).example
