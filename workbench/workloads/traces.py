"""Recorded traffic: CSV files of any kind, and public traces as their authors publish them.

None holds text, so prompts are made from the seed, to the recorded lengths. docs/workloads.md says what each format
holds and whom to cite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from workbench.workloads.columns import Columns, find_column
from workbench.workloads.kinds import PATH, SAMPLING_KEYS, WorkloadKind, WorkloadOptions, register_workload
from workbench.workloads.records import make_workload
from workbench.workloads.rows import Row, csv_columns, csv_rows, json_rows
from workbench.workloads.shaping import SHAPING_KEYS, Shaping
from workbench.workloads.workload import Workload, WorkloadError

_NEEDED = ("input", "output")
_COLUMNS = ("arrival", "input", "output", "prefix")
_REAL = ("scale", "spread", "rate")


def _csv(options: WorkloadOptions) -> Workload:
    """Any table with a head; columns that are not named are found by the names that public traces use."""
    named = {role: options.values.get(role) for role in _COLUMNS}
    return _from_csv(options, named, unit=options.values.get("unit"))


def _lengths(options: WorkloadOptions) -> Workload:
    """A table of lengths: whatever it tells of arrivals is passed over."""
    return _from_csv(options, {role: options.values.get(role) for role in _NEEDED})


def _azure(options: WorkloadOptions) -> Workload:
    """Azure's LLM inference traces of 2023: moments of arrival, and lengths."""
    return _from_csv(options, {"arrival": "TIMESTAMP", "input": "ContextTokens", "output": "GeneratedTokens"})


def _burstgpt(options: WorkloadOptions) -> Workload:
    """BurstGPT: seconds, and lengths; a row without output is a request that failed."""
    named = {"arrival": "Timestamp", "input": "Request tokens", "output": "Response tokens"}
    return _from_csv(options, named, has_failures=True)


def _from_csv(
    options: WorkloadOptions,
    named: Mapping[str, str | None],
    *,
    unit: str | None = None,
    has_failures: bool = False,
) -> Workload:
    """``named``: the column of each role; None: the one with a usual name."""
    path = _path(options)
    head = csv_columns(path)
    found = {role: find_column(role, name, head, str(path), is_needed=role in _NEEDED) for role, name in named.items()}
    assert found["input"] is not None
    assert found["output"] is not None
    columns = Columns(
        arrival=found.get("arrival"),
        input=found["input"],
        output=found["output"],
        prefix=found.get("prefix"),
        prefix_tokens=options.whole("prefix_tokens", 512, low=1),
        unit=unit,
        has_failures=has_failures,
    )
    return _make(options, csv_rows(path), columns)


def _mooncake(options: WorkloadOptions) -> Workload:
    """Mooncake: milliseconds, lengths, and an id for each 512 tokens of the prompt, equal where prefixes are."""
    columns = Columns(
        arrival="timestamp",
        input="input_length",
        output="output_length",
        prefix="hash_ids",
        unit="ms",
        is_whole_prefix=True,
    )
    return _make(options, json_rows(_path(options)), columns)


def _path(options: WorkloadOptions) -> Path:
    return Path(options.values[PATH]).expanduser()


def _make(options: WorkloadOptions, rows: Iterable[Row], columns: Columns) -> Workload:
    return make_workload(
        rows,
        columns,
        name=options.text,
        source=str(_path(options)),
        vocab_size=options.vocab_size,
        shaping=_shaping(options),
        params=options.sampling(),
    )


def _shaping(options: WorkloadOptions) -> Shaping:
    given = [key for key in SHAPING_KEYS if key in options.values]
    whole = {key: options.whole(key) for key in given if key not in _REAL}
    real = {key: options.real(key) for key in given if key in _REAL}
    try:
        return Shaping(**whole, **real)  # type: ignore[arg-type]
    except WorkloadError as error:
        raise WorkloadError(f"workload {options.text!r}: {error}") from error


def _register(name: str, make: Callable[[WorkloadOptions], Workload], keys: tuple[str, ...], query: str) -> None:
    # The seed shapes and samples alike.
    known = tuple(dict.fromkeys((*keys, *SHAPING_KEYS, *SAMPLING_KEYS)))
    register_workload(name, WorkloadKind(make, known, f"{name}:FILE?{query}", has_file=True))


_register("csv", _csv, (*_COLUMNS, "prefix_tokens", "unit"), "arrival=COLUMN&input=COLUMN&output=COLUMN")
_register("azure", _azure, (), "requests=1000&scale=0.5")
_register("burstgpt", _burstgpt, (), "requests=300&scale=0.01")
_register("mooncake", _mooncake, (), "requests=1000&spread=3")
_register("lengths", _lengths, _NEEDED, "concurrency=8")
