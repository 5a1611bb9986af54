"""Runs benchmarks by name: prints their lines, writes one JSON file with hardware, versions, seed and legs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from workbench.bench.decode import measure_decode
from workbench.bench.mix import measure_mix
from workbench.bench.options import SEED, BenchError, BenchOptions
from workbench.bench.recording import measure_recorder
from workbench.bench.results import Result
from workbench.bench.small import measure_hidden, measure_host, measure_steady
from workbench.bench.what_if import measure_what_if
from workbench.bench.workplace import Workplace
from workbench.documents import jsonable
from workbench.environment import environment

Say = Callable[[str], None]
Benchmark = Callable[[Workplace], Iterator[Result | str]]
"""Yields what it found as it is found; a string is a line to print and nothing more."""

BENCHMARKS: dict[str, Benchmark] = {
    "host": measure_host,
    "hidden": measure_hidden,
    "recorder": measure_recorder,
    "steady": measure_steady,
    "decode": measure_decode,
    "mix": measure_mix,
    "whatif": measure_what_if,
}


def run_benchmarks(names: Sequence[str] | None, options: BenchOptions, *, out: Path, say: Say) -> Path:
    """Run some or all, print tables, write ``out/bench-TIME.json``; returns its path.

    Raises:
        BenchError: a name is unknown.
        EngineError: a model or the device is not there, or a size does not fit them.
    """
    chosen = list(dict.fromkeys(BENCHMARKS if names is None else names))
    unknown = [name for name in chosen if name not in BENCHMARKS]
    if unknown:
        raise BenchError(f"benchmark {unknown[0]!r} is unknown; known are {', '.join(BENCHMARKS)}")
    workplace = Workplace(options)
    _make_folder(out)
    results: list[Result] = []
    for name in chosen:
        for found in BENCHMARKS[name](workplace):
            say(str(found))
            if isinstance(found, Result):
                results.append(found)
    path = _write(_document(workplace, results), out)
    say(f"written: {path}")
    return path


def _document(workplace: Workplace, results: Sequence[Result]) -> dict[str, Any]:
    legs = {result.leg.name: result.leg.to_dict() for result in results}
    has_floor = "bandwidth" in vars(workplace)
    return {
        "command": "bench",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "environment": environment(),
        "device": workplace.options.device,
        "quick": workplace.options.quick,
        "seed": SEED,
        "copy_bytes_per_s": workplace.bandwidth if has_floor else None,
        "legs": list(legs.values()),
        "results": [one.to_dict() for one in results],
    }


def _make_folder(out: Path) -> None:
    """Refuse one that cannot be written in, before the run and not after it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BenchError(f"folder {out} cannot be made: {error.strerror or error}") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise BenchError(f"folder {out} cannot be written in")


def _write(document: dict[str, Any], out: Path) -> Path:
    path = out / time.strftime("bench-%Y%m%d-%H%M%S.json")
    path.write_text(json.dumps(jsonable(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return path
