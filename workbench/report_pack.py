"""A run's part of the page in fewer bytes; ``report_unpack.js`` gives it back to the page as it was.

Moments that follow each other are sent as the distance from the one before, columns of one value as that value, and
texts that come again and again once. A page of 100,000 spans then stays under 5 MB (7.5 MB without).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_STRETCHES = ("hidden", "exposed", "bubbles")
_RISING = ("start", "iteration")
"""Columns of a lane that grow along it, or nearly so."""
_MOMENTS = ("n", "start")
_TEXTS = ("order", "reason", "consumed", "launched", "graph", "wasted", "void")


def packed(run: Mapping[str, Any]) -> dict[str, Any]:
    """What :func:`~workbench.report_data.run_data` gives, packed; an equal run is unpacked from it."""
    return {
        **run,
        "lanes": {lane: _lane(columns) for lane, columns in run["lanes"].items()},
        "iterations": _iterations(run["iterations"]),
        **{name: _stretches(run[name]) for name in _STRETCHES},
    }


def _lane(columns: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    found: dict[str, Any] = dict(columns)
    for name in _RISING:
        found[name] = _differences(columns[name])
    if "enqueued" in columns:
        moments = zip(columns["start"], columns["enqueued"], strict=True)
        found["enqueued"] = [None if noted is None else start - noted for start, noted in moments]
    return {name: column if name == "start" else _one_or_all(column) for name, column in found.items()}


def _iterations(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Columns; a text is its number in ``texts``, and a batch's iteration how far it lies back."""
    texts: dict[str, int] = {}

    def of(name: str) -> list[Any]:
        return [entry[name] for entry in entries]

    return {
        **{name: _differences(of(name)) for name in _MOMENTS},
        **{name: _one_or_all(of(name)) for name in ("length", "tokens")},
        **{
            name: _one_or_all([None if entry[name] is None else entry["n"] - entry[name] for entry in entries])
            for name in ("consumedFrom", "launchedFrom")
        },
        **{name: _one_or_all([texts.setdefault(text, len(texts)) for text in of(name)]) for name in _TEXTS},
        "texts": list(texts),
    }


def _stretches(flat: Sequence[int]) -> list[int]:
    """[start, length, ..] as [distance from the end before, length, ..]."""
    found, behind = [], 0
    for start, length in zip(flat[::2], flat[1::2], strict=True):
        found += [start - behind, length]
        behind = start + length
    return found


def _differences(numbers: Iterable[int]) -> list[int]:
    found, before = [], 0
    for number in numbers:
        found.append(number - before)
        before = number
    return found


def _one_or_all(column: Sequence[Any]) -> Any:
    """The value that all have, where there is one: no column holds lists, so that the page can tell."""
    is_one = len(column) > 0 and all(value == column[0] for value in column)
    return column[0] if is_one else list(column)
