"""``workbench whatif``: what bounds the step of a saved run, and what it would be if some work took another time."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from tracing.run_folder import read_run
from tracing.trace import Trace
from workbench.nearby_runs import naming_runs
from workbench.options import UsageError

EXAMPLES = """\
examples:
  workbench whatif runs/demo/async
  workbench whatif runs/demo/async resolve=0.5x
  workbench whatif runs/demo/async 'device forward=0.8x' prepare=+200us
  workbench whatif runs/demo/async --iteration 40
Without changes: the critical path. A run's folder is made by --save, by the demo, or by session.save(folder).
"""
_CHANGE = re.compile(r"(?P<name>[^=]+)=(?:(?P<factor>[\d.]+)x|(?P<add>[+-][\d.]+)(?P<unit>us|ms))")
_US = {"us": 1.0, "ms": 1e3}


def add_what_if_flags(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("run", metavar="RUN", help="folder of a saved run")
    parser.add_argument(
        "changes", metavar="WORK=CHANGE", nargs="*", help="0.5x: half as long; +200us, -1ms: longer or shorter by that"
    )
    parser.add_argument("--iteration", metavar="N", type=int, help="critical path of this iteration alone")
    parser.add_argument("--json", action="store_true", help="print one JSON document and nothing else")


def what_if_command(args: argparse.Namespace) -> int:
    """Run the command; returns its exit status.

    Raises:
        RunFolderError: the folder is no run.
        UsageError: a change cannot be read, names what the run does not have, or nothing was measured.
    """
    scale, add_us = parse_changes(args.changes)
    if args.changes and args.iteration is not None:
        raise UsageError("--iteration is for the critical path; changes are replayed over the whole run")
    with naming_runs([args.run]):
        trace = read_run(args.run)
    try:
        found = trace.what_if(scale=scale, add_us=add_us) if args.changes else _path(trace, args.iteration)
    except ValueError as error:
        raise UsageError(f"{args.run}: {error}") from error
    print(json.dumps(found.to_dict(), indent=2) if args.json else found)  # noqa: T201 - the command's output
    return 0


def _path(trace: Trace, iteration: int | None) -> Any:
    path = trace.critical_path(iteration)
    if not path.segments:
        raise ValueError("no iteration was measured: the run is empty, or the times of all of them are void")
    return path


def parse_changes(texts: list[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Factors and microseconds by name of the work.

    Raises:
        UsageError: one is not of the form ``WORK=0.5x``, ``WORK=+200us`` or ``WORK=-1ms``.
    """
    scale: dict[str, float] = {}
    add_us: dict[str, float] = {}
    for text in texts:
        found = _CHANGE.fullmatch(text.strip())
        try:
            if found is None:
                raise ValueError
            if found["name"].strip() in (*scale, *add_us):
                raise UsageError(f"{found['name'].strip()!r} is given twice; one change a kind of work")
            if found["factor"] is not None:
                scale[found["name"].strip()] = float(found["factor"])
            else:
                add_us[found["name"].strip()] = float(found["add"]) * _US[found["unit"]]
        except ValueError:
            raise UsageError(
                f"cannot read the change {text!r}; say WORK=0.5x, WORK=+200us or WORK=-1ms, such as resolve=0.5x"
            ) from None
    return scale, add_us
