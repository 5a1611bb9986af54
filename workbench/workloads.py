"""Workloads: what is asked of the engine and when, made from one line of text or read from a file.

``fixed:requests=16,input=64,output=32``, ``poisson:rate=4,requests=32,input=64,output=32``, ``file:PATH.jsonl``.
A further kind is one function given to :func:`register_workload`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.request import SamplingParams
from workbench.clock import Unit

Prompt = str | Sequence[int]


class WorkloadError(EngineError, ValueError):
    """A workload's description or file is not usable; the message names the part and what is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request to come."""

    prompt: Prompt
    """Text, or token ids."""
    params: SamplingParams
    arrival: float = 0.0
    """After the workload's start, in the workload's unit."""
    chat: bool = False
    """``prompt`` is what a user says: put it into the model's chat template."""
    stream: bool = False
    """Make an output at every token."""

    def after(self, start: float) -> RequestSpec:
        """The same, arriving that much later."""
        return replace(self, arrival=start + self.arrival)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests in the order they are handed in."""

    name: str
    """What it was made from."""
    requests: tuple[RequestSpec, ...]
    unit: Unit = "iterations"
    """What arrivals count."""

    @property
    def is_closed(self) -> bool:
        """Whether everything arrives at the start, so that any clock will do."""
        return all(spec.arrival == 0 for spec in self.requests)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; the requests are told with a run's results."""
        return {"name": self.name, "requests": len(self.requests), "unit": self.unit, "closed": self.is_closed}


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

    def _number(self, key: str, default: float | None, read: Callable[[str], float], what: str) -> float:
        text = self.values.get(key)
        if text is None:
            if default is None:
                raise WorkloadError(f"workload {self.text!r}: {self.kind} needs {key}=")
            return default
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


_kinds: dict[str, WorkloadKind] = {}


def register_workload(name: str, kind: WorkloadKind) -> None:
    """Let :func:`parse_workload` make ``name:...``; a name registered again is replaced."""
    _kinds[name] = kind


def parse_workload(text: str, *, vocab_size: int) -> Workload:
    """Make the workload that ``text`` describes; the same text and vocabulary give the same requests.

    Args:
        text: ``KIND:KEY=VALUE,...`` or ``file:PATH``.
        vocab_size: Ids that random prompts may hold.

    Raises:
        WorkloadError: the kind or a key is unknown, or a value does not fit.
    """
    name, _, rest = text.partition(":")
    kind = _kinds.get(name)
    if kind is None:
        raise WorkloadError(f"workload kind {name!r} is unknown; known: {known_workloads()}")
    if not kind.keys:
        return kind.make(WorkloadOptions(name, text, vocab_size, {"": rest}))
    values: dict[str, str] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or key not in kind.keys or key in values:
            problem = "is given twice" if key in values else "is not KEY=VALUE" if not equals else "is unknown"
            raise WorkloadError(f"workload {text!r}: {part!r} {problem}; {name} knows {', '.join(kind.keys)}")
        values[key] = value.strip()
    return kind.make(WorkloadOptions(name, text, vocab_size, values))


def known_workloads() -> str:
    """One example of each kind, for help and errors."""
    return " | ".join(kind.example for kind in _kinds.values())


_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "seed", "ignore_eos")


def _fixed(options: WorkloadOptions) -> Workload:
    """Equal requests; with ``arrive=K``, K of them at each iteration, else all at the start."""
    count, arrive = options.whole("requests", low=1), options.whole("arrive", 0)
    arrivals = [index // arrive if arrive else 0 for index in range(count)]
    return Workload(name=options.text, requests=_random_requests(options, arrivals), unit="iterations")


def _poisson(options: WorkloadOptions) -> Workload:
    """Equal requests at random moments, ``rate`` a second on average."""
    rate = options.real("rate")
    if rate <= 0:
        raise WorkloadError(f"workload {options.text!r}: rate must be above 0 requests a second, got {rate}")
    draws = random.Random(f"arrivals {options.whole('seed', 0)}")
    now, arrivals = 0.0, []
    for _ in range(options.whole("requests", low=1)):
        now += draws.expovariate(rate)
        arrivals.append(now)
    return Workload(name=options.text, requests=_random_requests(options, arrivals), unit="s")


def _random_requests(options: WorkloadOptions, arrivals: Sequence[float]) -> tuple[RequestSpec, ...]:
    seed = options.whole("seed", 0)
    draws = random.Random(f"prompts {seed}")
    length, output = options.whole("input", low=1), options.whole("output", low=1)
    return tuple(
        RequestSpec(
            prompt=tuple(draws.randrange(options.vocab_size) for _ in range(length)),
            params=_params(options, output, seed + index),
            arrival=arrival,
        )
        for index, arrival in enumerate(arrivals)
    )


def _params(options: WorkloadOptions, output: int, seed: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=output,
        temperature=options.real("temperature", 0.0),
        top_k=options.whole("top_k", 0),
        top_p=options.real("top_p", 1.0),
        seed=seed,
        # A fixed output length is what such a workload promises, so EOS is passed over unless asked for.
        ignore_eos=bool(options.whole("ignore_eos", 1)),
    )


def _file(options: WorkloadOptions) -> Workload:
    """One JSON object a line: ``prompt`` (text) or ``prompt_ids``; ``params``, ``arrival`` and ``chat`` if wanted.

    A line ``{"unit": "s"}`` says that arrivals are seconds; without one they are iteration numbers.
    """
    path = Path(options.values[""]).expanduser()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"workload file {path} cannot be read: {error}") from error
    unit: Unit = "iterations"
    specs = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        entry = _entry(line, f"{path}:{number}")
        if "unit" in entry:
            unit = _unit(entry, f"{path}:{number}")
        else:
            specs.append(_spec(entry, f"{path}:{number}"))
    if not specs:
        raise WorkloadError(f"workload file {path} holds no request")
    return Workload(name=options.text, requests=tuple(specs), unit=unit)


_FILE_KEYS = ("prompt", "prompt_ids", "params", "arrival", "chat")


def _entry(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"{where}: not a JSON object: {error}") from error
    if not isinstance(entry, dict):
        raise WorkloadError(f"{where}: expected a JSON object with prompt or prompt_ids, got {type(entry).__name__}")
    return entry


def _unit(entry: dict[str, Any], where: str) -> Unit:
    if entry["unit"] == "s":
        return "s"
    if entry["unit"] == "iterations":
        return "iterations"
    raise WorkloadError(f"{where}: unit must be 's' or 'iterations', got {entry['unit']!r}")


def _spec(entry: dict[str, Any], where: str) -> RequestSpec:
    unknown = [key for key in entry if key not in _FILE_KEYS]
    if unknown and unknown[0] in {one.name for one in fields(SamplingParams)}:
        raise WorkloadError(f"{where}: {unknown[0]!r} is a sampling parameter: put it under params")
    if unknown:
        raise WorkloadError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(_FILE_KEYS)}")
    prompt = entry.get("prompt", entry.get("prompt_ids"))
    if ("prompt" in entry) == ("prompt_ids" in entry) or not isinstance(prompt, (str, list)):
        raise WorkloadError(f"{where}: expected one of prompt (text) and prompt_ids (a list of token ids)")
    arrival, params = entry.get("arrival", 0), entry.get("params", {})
    if isinstance(arrival, bool) or not isinstance(arrival, (int, float)) or not 0 <= arrival < float("inf"):
        raise WorkloadError(f"{where}: arrival must be a number of at least 0, got {arrival!r}")
    if not isinstance(params, dict):
        raise WorkloadError(f"{where}: params must be an object of sampling parameters, got {params!r}")
    bias = params.get("logit_bias")
    if isinstance(bias, dict):  # JSON knows no keys but strings
        params = {**params, "logit_bias": {int(key) if key.isdecimal() else key: value for key, value in bias.items()}}
    try:
        sampling = SamplingParams(**params)
    except (TypeError, EngineError) as error:
        raise WorkloadError(f"{where}: params: {error}") from error
    return RequestSpec(
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        params=sampling,
        arrival=float(arrival),
        chat=bool(entry.get("chat", False)),
    )


register_workload(
    "fixed",
    WorkloadKind(
        _fixed, ("requests", "input", "output", "arrive", *_SAMPLING_KEYS), "fixed:requests=16,input=64,output=32"
    ),
)
register_workload(
    "poisson",
    WorkloadKind(
        _poisson,
        ("rate", "requests", "input", "output", *_SAMPLING_KEYS),
        "poisson:rate=4,requests=32,input=64,output=32",
    ),
)
register_workload("file", WorkloadKind(_file, (), "file:PATH.jsonl"))
