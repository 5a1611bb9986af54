"""What ``benchmarks/drafting.py`` finds: a file, and lines as it is found."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.drafting_stretches import SEED, Rate
from workbench.documents import jsonable
from workbench.environment import environment

_SHARES = {"hidden": "hidden_share", "bubbles": "bubble_share"}


@dataclass(slots=True)
class Found:
    """All that a run has come to."""

    engines: list[dict[str, Any]] = field(default_factory=list)
    cells: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    loading_s: dict[str, float] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Groups for which no time was left."""
    failed: list[str] = field(default_factory=list)
    """Groups that cannot be measured here, and why."""

    def write(self, args: argparse.Namespace, bandwidth: float) -> None:
        """The file, if one is asked for."""
        if args.out is None:
            return
        document = {
            "command": "drafting",
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "environment": environment(),
            "seed": SEED,
            "options": {name: value for name, value in vars(args).items() if name != "out"},
            "bandwidth": bandwidth,
            **asdict(self),
        }
        args.out.write_text(json.dumps(jsonable(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def cell_line(cell: dict[str, Any]) -> str:
    """One leg at one rate."""
    tpot, step = cell["tpot_ms"], cell["step_ms"]
    shares = (f"{name} {'-' if cell[key] is None else f'{cell[key]:.1%}'}" for name, key in _SHARES.items())
    busy = "-" if cell["busy_ms"] is None else f"{cell['busy_ms']:.3f}"
    return (
        f"S={cell['drafts']} rate {rate_name(cell['rate']):>4} {cell['batch']:>4} rows  {cell['leg']:<8} "
        f"TPOT {tpot['median']:7.3f} ms ({tpot['min']:.3f} to {tpot['max']:.3f})  floor {cell['floor_ms']:.3f}  "
        f"step {step['median']:.3f}  busy {busy}  {cell['tokens_a_step']:.2f} tok/step  {'  '.join(shares)}"
    )


def pair_line(pair: dict[str, Any]) -> str:
    """A later leg over the first."""
    ratio, (own, other) = pair["step_ratio"], pair["state_bytes_per_row"]
    return (
        f"    {pair['leg']} over {pair['over']}, rate {rate_name(pair['rate'])}: step x {ratio['median']:.3f} "
        f"({ratio['min']:.3f} to {ratio['max']:.3f}, {ratio['count']} pairs); states of a row {own / 1e6:,.2f} MB "
        f"to {other / 1e6:,.2f}"
    )


def rate_name(rate: Rate) -> str:
    """As the command line has it."""
    return "-" if rate is None else str(rate)
