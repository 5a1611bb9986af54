"""``workbench run`` as one of several processes that ``torchrun`` started: each rank serves its part of the workload.

The ranks run at the pace of the slowest, and until nobody has anything left; then rank 0 tells of all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from engine.config import EngineConfig
from engine.errors import ConfigError, RankError
from engine.parallel.distributed import ProcessRanks, is_launched
from engine.parallel.log import first_difference, from_rows, to_rows
from engine.sampling.rng import derive_seed
from workbench.serve_commands import WAYS, endings, print_json
from workbench.workloads import Workload

if TYPE_CHECKING:
    from workbench.runs import Run

ROUND_ROBIN, ALL_ON_0 = WAYS
_PATIENCE_S = 600.0
"""How long ranks wait for rank 0 to write its report."""


@dataclass(frozen=True)
class Part:
    """What one rank serves of a workload."""

    workload: Workload
    request_ids: tuple[str, ...]
    """As one rank alone would name them."""


@dataclass(frozen=True)
class RankRun:
    """What one rank has to tell."""

    run: Run
    collectives: list[dict[str, Any]]


def check_ranks(config: EngineConfig, way: str | None) -> None:
    """Refuse to be one of several processes that know nothing of one another.

    Raises:
        ConfigError: ``torchrun`` started some, and ``expert_parallel`` does not say so; or requests are to be dealt out
            to ranks, and there are none.
    """
    if way is not None and not config.has_ranks:
        raise ConfigError(f"--rank-requests {way} needs several ranks; add --expert-parallel N, under torchrun")
    started = int(os.environ["WORLD_SIZE"]) if is_launched() else 1
    if started > 1 and not config.has_ranks:
        raise ConfigError(
            f"this is one of {started} processes that were started together, and expert_parallel is 1; add "
            f"--expert-parallel {started}, or start one alone"
        )


def rank_folder(folder: str, config: EngineConfig) -> str:
    """Where this process saves its run."""
    return f"{folder.rstrip('/')}-rank{os.environ.get('RANK', '0')}" if config.has_ranks else folder


def deal(workload: Workload, rank: int, size: int, way: str, seed: int) -> Part:
    """A rank's part: by turns, or all for rank 0. A closed loop's room is shared out with its requests.

    Args:
        workload: All of it.
        rank: Whose part.
        size: How many ranks there are.
        way: One of ``WAYS``.
        seed: The engine's, from which requests without a seed derive theirs, whatever rank they come to.
    """
    mine = [number for number in range(len(workload.requests)) if (number % size if way == ROUND_ROBIN else 0) == rank]
    specs = []
    for number in mine:
        spec = workload.requests[number]
        own = spec.params.seed if spec.params.seed is not None else derive_seed(seed, number)
        specs.append(replace(spec, params=spec.params.replace(seed=own)))
    room = workload.concurrency
    if room is not None and way == ROUND_ROBIN:
        room = max(1, room // size + (rank < room % size))
    name = f"{workload.name}, rank {rank} of {size}"
    part = replace(workload, name=name, requests=tuple(specs), concurrency=room)
    return Part(part, tuple(f"request-{number}" for number in mine))


def run_on_ranks(args: argparse.Namespace, config: EngineConfig) -> int:
    """Serve this process' part; returns the exit status: 1 if a request of any rank failed.

    Raises:
        RankError: a rank has gone, or ranks did not do the same together.
        ConfigError: this process was not started as one of so many.
    """
    from workbench.loading import load_for
    from workbench.runs import serve
    from workbench.session import Session
    from workbench.workloads import parse_workload

    with _only_rank_0() as is_first:
        loaded = load_for(config, args.model, progress=is_first)
        workload = parse_workload(args.workload, vocab_size=loaded.vocab_size)
        clock = args.clock or ("iterations" if workload.unit == "iterations" else "virtual")
        with Session(loaded, config=config, clock=clock, progress=is_first) as session:
            assert session.engine.fleet is not None
            ranks = session.engine.fleet.ranks
            assert isinstance(ranks, ProcessRanks)
            if is_first:
                for note in (*workload.notes, *workload.length_notes(session.engine.resolved.max_sequence_length)):
                    print(f"warning: workload: {note}", file=sys.stderr)
            part = deal(workload, ranks.rank, ranks.size, args.rank_requests or ROUND_ROBIN, config.seed)
            run = serve(session, part.workload, name=f"rank {ranks.rank}", request_ids=part.request_ids)
            told = RankRun(run, to_rows(ranks.log.entries()))
            with _telling(ranks):
                return _tell(args, config, workload, told, ranks)


@contextlib.contextmanager
def _only_rank_0() -> Iterator[bool]:
    """Whether this is rank 0; whatever others print goes to standard error."""
    is_first = os.environ.get("RANK", "0") == "0"
    with contextlib.nullcontext() if is_first else contextlib.redirect_stdout(sys.stderr):
        yield is_first


@contextlib.contextmanager
def _telling(ranks: ProcessRanks) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # of torch.distributed
        if isinstance(error, RankError):
            raise
        raise RankError(f"rank {ranks.rank} served its requests, and another rank has gone: {error}") from error


def _tell(
    args: argparse.Namespace, config: EngineConfig, workload: Workload, told: RankRun, ranks: ProcessRanks
) -> int:
    """Bring everything to rank 0, which prints it; all ranks return its verdict."""
    import torch.distributed as dist

    from tracing.run_folder import write_run

    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(_PATIENCE_S, ranks.timeout_s)))
    everybody: list[Any] | None = [None] * ranks.size if ranks.rank == 0 else None
    if args.save:
        run, folder = told.run, rank_folder(args.save, config)
        written = write_run(replace(run.trace, rank=ranks.rank), folder, overwrite=args.overwrite)
        print(f"saved: {written}", file=sys.stderr)
    dist.gather_object(told, everybody, dst=0, group=group)
    verdict: list[Any] = [0, None]
    if everybody is not None:
        verdict = list(_judge(everybody))
        if verdict[1] is None:
            _show(args, workload, everybody)
    dist.broadcast_object_list(verdict, src=0, group=group)
    status, difference = verdict
    if difference is not None:
        raise RankError(f"ranks did not do the same together: {difference}")
    return int(status)


def _judge(everybody: Sequence[RankRun]) -> tuple[int, str | None]:
    """The exit status, and where ranks' accounts differ."""
    difference = first_difference([from_rows(one.collectives) for one in everybody])
    has_failed = any(output.finish_reason == "error" for one in everybody for output in one.run.outputs)
    return int(has_failed), None if difference is None else str(difference)


def _show(args: argparse.Namespace, workload: Workload, everybody: Sequence[RankRun]) -> None:
    from tracing.analysis import format_comparison
    from workbench.environment import environment_shown
    from workbench.report import write_report
    from workbench.runs import document

    runs = [one.run for one in everybody]
    counts = {place: sum(one["place"] == place for one in everybody[0].collectives) for place in ("host", "device")}
    together = f"{counts['host']:,} host and {counts['device']:,} device collectives, the same on {len(runs)} ranks"
    if args.report:
        views = [run.view for run in runs]
        written = write_report(
            args.report, views, title=workload.name, environment=environment_shown(), notes=[together]
        )
        print(f"report: {written}", file=sys.stderr)
    if args.json:
        print_json(sys.stdout, document("run", workload, **_to_dict(runs), collectives=counts))
        return
    print(format_comparison({run.name: run.summary for run in runs}))
    outputs = [output for run in runs for output in run.outputs]
    print(endings(sorted(outputs, key=lambda output: _number(output.request_id))))
    print(together)


def _to_dict(runs: Sequence[Run]) -> dict[str, Any]:
    """For JSON: one list of requests, as one rank would have them, and what else each rank has to tell."""
    told = [{"rank": rank, **run.to_dict()} for rank, run in enumerate(runs)]
    requests = [{**request, "rank": one["rank"]} for one in told for request in one.pop("requests")]
    requests.sort(key=lambda request: _number(request["request_id"]))
    return {"config": told[0]["config"], "requests": requests, "ranks": told}


def _number(request_id: str) -> int:
    return int(request_id.rpartition("-")[2])
