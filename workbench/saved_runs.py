"""Runs in folders: written by a command or a session, read again for tables and reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tracing.run_folder import OUTPUTS, REMEDY, RunFolderError, check_target, read_run, write_run
from tracing.trace import Trace
from workbench.report import RunView, write_report


def load_run(folder: str | Path) -> Trace:
    """Read a run folder; the tables and numbers are those of the run.

    Raises:
        RunFolderError: the folder is no run, or a file in it is missing, damaged or of a newer format.
    """
    trace = read_run(folder)
    for place, output in enumerate(trace.outputs):
        for key, is_right in _OUTPUT_KEYS.items():
            if not is_right(output.get(key)):
                fault = f"its output {place} has no {key}, or one of another kind"
                raise RunFolderError(f"{Path(folder) / OUTPUTS} is damaged: {fault}; {REMEDY}")
    return trace


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(token, int) for token in value)


_OUTPUT_KEYS: dict[str, Callable[[object], bool]] = {
    "request_id": lambda value: isinstance(value, str),
    "prompt_token_ids": _are_ids,
    "output_token_ids": _are_ids,
}
"""What every output of a run has, and how it is told."""


def folder_of(parent: str | Path, name: str) -> Path:
    """Where the run ``name`` of several is saved: ``async without overlap`` in ``async-without-overlap``."""
    return Path(parent) / name.replace("/", "-").replace(" ", "-")


def check_folders(parent: str | Path, names: Iterable[str], *, overwrite: bool = False) -> None:
    """Refuse what :func:`save_runs` would refuse; to be asked before the runs.

    Raises:
        RunFolderError: one of the folders is in use.
    """
    for name in names:
        check_target(folder_of(parent, name), overwrite=overwrite)


def save_runs(parent: str | Path, traces: Iterable[Trace], *, overwrite: bool = False) -> list[Path]:
    """Write each trace into a folder of its name; returns the folders.

    Raises:
        RunFolderError: one of the folders is in use; those before it are written.
    """
    return [write_run(trace, folder_of(parent, trace.name), overwrite=overwrite) for trace in traces]


def report_of(folders: Sequence[str | Path], out: str | Path, *, title: str | None = None) -> list[str]:
    """Write the report of saved runs, side by side; the first is the baseline.

    Args:
        folders: At least one, all different.
        out: The file; an existing one is replaced.
        title: Heading; None makes one.

    Returns:
        The sentences that stand under its heading.

    Raises:
        RunFolderError: as for :func:`load_run`, or a folder is named twice.
    """
    if len({Path(folder).resolve() for folder in folders}) < len(folders):
        raise RunFolderError("a run is compared with itself: name each folder once")
    traces = [load_run(folder) for folder in folders]
    names = _distinct_names(folders, traces)
    notes = [*_run_notes(names, traces), *_difference_notes(names, traces)]
    views = [RunView.of(trace, name) for trace, name in zip(traces, names, strict=True)]
    write_report(out, views, title=title or _title(names, traces), notes=notes)
    return notes


def _distinct_names(folders: Sequence[str | Path], traces: Sequence[Trace]) -> list[str]:
    """The runs' own names, or those of their folders, or the whole paths: the first that tell them apart."""
    choices = (
        [trace.name for trace in traces],
        [Path(folder).resolve().name for folder in folders],
        [str(Path(folder).resolve()) for folder in folders],
    )
    return next(names for names in choices if len(set(names)) == len(names))


def _title(names: Sequence[str], traces: Sequence[Trace]) -> str:
    models = dict.fromkeys(str(trace.config.get("model", "a run")) for trace in traces)
    return f"{', '.join(models)}: {' and '.join(names)}"


def _run_notes(names: Sequence[str], traces: Sequence[Trace]) -> list[str]:
    return [
        f"Of {name} {trace.lost_iterations:,} iterations are missing: the recorder's ring was full."
        for name, trace in zip(names, traces, strict=True)
        if trace.lost_iterations
    ]


def _difference_notes(names: Sequence[str], traces: Sequence[Trace]) -> list[str]:
    """What must be known before the runs' numbers are compared; the report itself marks fields that differ."""
    notes = []
    for name, other in zip(names[1:], traces[1:], strict=True):
        first, pair = traces[0], f"{names[0]} and {name}"
        if _workload(first) != _workload(other):
            notes.append(f"{pair} served different workloads: {_workload(first)}; {_workload(other)}.")
        elif first.outputs and other.outputs:
            notes.append(_outputs_note(pair, first.outputs, other.outputs))
    return notes


def _workload(trace: Trace) -> str:
    if not trace.workload:
        return "requests handed in one by one"
    return f"{trace.workload.get('name')} ({trace.workload.get('clock')} clock)"


def _outputs_note(pair: str, lefts: Sequence[Mapping[str, Any]], rights: Sequence[Mapping[str, Any]]) -> str:
    names = dict.fromkeys(output["request_id"] for output in (*lefts, *rights))
    if _differing(names, "prompt_token_ids", lefts, rights):
        return f"{pair} served different requests."
    apart = _differing(names, "output_token_ids", lefts, rights)
    if not apart:
        return f"{pair} gave the same ids for all {len(names)} requests."
    some = ", ".join(apart[:5]) + (" and others" if len(apart) > 5 else "")
    return f"The ids of {pair} differ for {len(apart)} of {len(names)} requests: {some}."


def _differing(names: Iterable[str], key: str, *runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Requests that have not the same ``key`` in both runs."""
    left, right = ({output["request_id"]: output[key] for output in outputs} for outputs in runs)
    return [name for name in names if left.get(name) != right.get(name)]
