"""Requests written out one by one: text or ids, parameters, arrivals."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from engine.errors import EngineError
from engine.request import SamplingParams
from workbench.clock import Unit
from workbench.workloads.kinds import PATH, WorkloadKind, WorkloadOptions, register_workload
from workbench.workloads.workload import RequestSpec, Workload, WorkloadError


def _file(options: WorkloadOptions) -> Workload:
    """One JSON object a line: ``prompt`` (text) or ``prompt_ids``, and what else is wanted of ``_FILE_KEYS``.

    A line ``{"unit": "s"}`` says that arrivals are seconds; without one they are iteration numbers.
    """
    path = Path(options.values[PATH]).expanduser()
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


_FILE_KEYS = ("prompt", "prompt_ids", "params", "arrival", "chat", "cache_salt")


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
    arrival, params, salt = entry.get("arrival", 0), entry.get("params", {}), entry.get("cache_salt", "")
    if isinstance(arrival, bool) or not isinstance(arrival, (int, float)) or not 0 <= arrival < float("inf"):
        raise WorkloadError(f"{where}: arrival must be a number of at least 0, got {arrival!r}")
    if not isinstance(params, dict):
        raise WorkloadError(f"{where}: params must be an object of sampling parameters, got {params!r}")
    if not isinstance(salt, str):
        raise WorkloadError(f"{where}: cache_salt must be a string, got {salt!r}")
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
        cache_salt=salt,
    )


register_workload("file", WorkloadKind(_file, (), "file:PATH.jsonl"))
