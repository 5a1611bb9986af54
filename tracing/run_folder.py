"""A trace as a folder: ``config.json``, ``spans.parquet``, ``iterations.parquet``, ``requests.parquet``.

The Parquet files are the tables of those names, so that other programs read them as they are; the JSON file says what
the run depended on. A trace with outputs has an ``outputs.json`` as well. Reading gives back an equal trace.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tracing.trace import Trace

FORMAT = "inference-workbench run"
REMEDY = "take the whole folder from where it was copied, or make the run again"
VERSION = 1
"""Raised when an older reader would misunderstand the files; columns and keys that are added do not raise it."""

_CONFIG, OUTPUTS = "config.json", "outputs.json"
_TABLES = ("spans", "iterations", "requests")
_FILES = frozenset({_CONFIG, OUTPUTS, *(f"{name}.parquet" for name in _TABLES)})
_KINDS: dict[str, tuple[type, ...]] = {
    "name": (str,),
    "rank": (int,),
    "device_clock_error_ns": (int, type(None)),
    "lost_iterations": (int,),
    "workload": (dict,),
    "config": (dict,),
    "counters": (dict,),
    "environment": (dict,),
}
"""Fields of a trace that stand in ``config.json`` under their own names."""
_MISSING = object()
_DEEPEST = 64
"""Nesting of JSON; what is read here is 5 deep, and Python's own functions give up at some hundreds."""


class RunFolderError(ValueError):
    """A folder is no run, is damaged, or must not be written; one line that names the file."""


def write_run(trace: Trace, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write ``trace`` as a run folder: whole, or not at all. Folders on the way are made.

    Args:
        trace: Its mappings, and the args of its instants, hold what JSON holds; a tuple comes back as a list.
        folder: Where. It may exist if it is empty.
        overwrite: It may also be a run, which is replaced.

    Returns:
        The folder.

    Raises:
        RunFolderError: the folder is in use, or the trace holds what cannot be written.
        OSError: the disk refuses.
    """
    check_target(folder, overwrite=overwrite)
    target = Path(folder).resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that renaming puts it in place at once.
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as scratch:
        made = Path(scratch) / "new"
        made.mkdir()
        try:
            _write_files(trace, made)
        except (TypeError, ValueError, OverflowError) as error:  # Arrow's own errors are among them
            raise RunFolderError(f"trace {trace.name!r} cannot be written: {_one_line(error)}") from error
        check_target(folder, overwrite=overwrite)
        _put_in_place(made, target, aside=Path(scratch) / "old")
    return Path(folder)


def is_run(folder: Path) -> bool:
    """Whether a folder looks like a run: its head and its tables are there, whatever they hold."""
    return (folder / _CONFIG).is_file() and all((folder / f"{name}.parquet").is_file() for name in _TABLES)


def check_target(folder: str | Path, *, overwrite: bool = False) -> None:
    """Refuse what :func:`write_run` would refuse; to be asked before a long run.

    Raises:
        RunFolderError: ``folder`` is a file, a run while ``overwrite`` is off, or a folder that holds anything else.
    """
    target = Path(folder)
    if not target.exists():
        return
    if not target.is_dir():
        raise RunFolderError(f"{target} is a file; a run is written as a folder")
    inside = {path.name for path in target.iterdir()}
    if not inside:
        return
    strange = sorted(inside - _FILES)
    if strange or not _is_run(target):
        raise RunFolderError(f"{target} holds {strange[0] if strange else 'no run'}: it is left alone; choose another")
    if not overwrite:
        raise RunFolderError(f"{target} holds a run already; choose another folder, or ask to overwrite it")


def read_run(folder: str | Path) -> Trace:
    """The trace that :func:`write_run` wrote.

    Raises:
        RunFolderError: a file is missing, damaged, foreign, or of a newer format.
    """
    from tracing.trace import Records, Trace

    source = Path(folder)
    if not source.is_dir():
        raise RunFolderError(f"{source} is no run: there is no such folder")
    head = _read_head(source / _CONFIG)
    records = {name: _read_records(source / f"{name}.parquet", name, head["rows"][name]) for name in _TABLES}
    outputs = _read_json(source / OUTPUTS) if (source / OUTPUTS).exists() else []
    if not isinstance(outputs, list) or not all(isinstance(output, dict) for output in outputs):
        raise _damaged(source / OUTPUTS, "it holds no list of outputs")
    return Trace(records=Records(**records), outputs=outputs, **{name: head[name] for name in _KINDS})


def _write_files(trace: Trace, folder: Path) -> None:
    import pyarrow.parquet as parquet

    tables = {name: getattr(trace, name) for name in _TABLES}
    for name, table in tables.items():
        parquet.write_table(table, folder / f"{name}.parquet", compression="zstd", write_page_checksum=True)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "rows": {name: table.num_rows for name, table in tables.items()},
        **{name: getattr(trace, name) for name in _KINDS},
    }
    _write_json(folder / _CONFIG, head)
    if trace.outputs:
        _write_json(folder / OUTPUTS, list(trace.outputs))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")


def _put_in_place(made: Path, target: Path, *, aside: Path) -> None:
    """Rename; what stood there goes aside, and comes back if that fails."""
    is_there = target.exists()
    if is_there:
        target.rename(aside)
    try:
        made.rename(target)
    except OSError:
        if is_there:
            aside.rename(target)
        raise


def _is_run(folder: Path) -> bool:
    try:
        head = _read_json(folder / _CONFIG)
    except RunFolderError:
        return False
    return isinstance(head, dict) and head.get("format") == FORMAT


def _read_head(path: Path) -> dict[str, Any]:
    head = _read_json(path)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise RunFolderError(f"{path} is not the head of a run: format is not {FORMAT!r}; {REMEDY}")
    version = head.get("version")
    if not isinstance(version, int) or version < 1:
        raise _damaged(path, f"version is {version!r}")
    if version > VERSION:
        raise RunFolderError(f"{path} has format version {version}; this workbench reads up to {VERSION}: update it")
    for name, kinds in {**_KINDS, "rows": (dict,)}.items():
        if not isinstance(head.get(name, _MISSING), kinds):
            raise _damaged(path, f"{name} is missing or of another kind")
    for name in _TABLES:
        if not isinstance(head["rows"].get(name), int):
            raise _damaged(path, f"rows does not say how many {name} has")
    return head


def _read_json(path: Path) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing; it is part of every run: {REMEDY}") from None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read: {error.strerror or error}") from error
    except RecursionError:
        raise _damaged(path, "it is nested too deeply") from None
    except ValueError as error:  # also bytes that are no UTF-8
        raise _damaged(path, _one_line(error)) from error
    if _is_deeper(value, _DEEPEST):
        raise _damaged(path, "it is nested too deeply")
    return value


def _is_deeper(value: Any, most: int) -> bool:
    layer = [value]
    for _ in range(most):
        layer = [
            inner
            for outer in layer
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(layer)


def _damaged(path: Path, why: str) -> RunFolderError:
    return RunFolderError(f"{path} is damaged: {why}; {REMEDY}")


def _read_records(path: Path, name: str, num_rows: int) -> list[Any]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from tracing.from_tables import READERS

    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            records = READERS[name](file.read())
    except FileNotFoundError:
        raise RunFolderError(f"{path} is missing; it is part of every run: {REMEDY}") from None
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise RunFolderError(f"{path} is damaged, or not of a run: {_one_line(error)}; {REMEDY}") from error
    if len(records) != num_rows:
        raise RunFolderError(
            f"{path} holds {len(records)} rows where {_CONFIG} says {num_rows}: not of one run; {REMEDY}"
        )
    return records


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
