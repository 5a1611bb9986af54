"""The program that ``workbench profile`` starts under a tool: ``python -m workbench.profiled FOLDER``.

It reads the folder's job, serves the workload up to the end of the captured iterations, and leaves its own trace
there as a run folder.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import EngineError
from workbench.loading import load_for
from workbench.profile_job import RUN, TORCH_TRACE, VERSIONS, Captured, Job, ProfileError, read_job, write_captured
from workbench.session import Session
from workbench.workloads import Workload, parse_workload


def main(folder: Path) -> int:
    """Do the job; an error of the user's goes into the folder in one line."""
    try:
        write_captured(_work(read_job(folder), folder), folder)
    except EngineError as error:
        write_captured(" ".join(str(error).split()), folder)
        return 2
    return 0


def _work(job: Job, folder: Path) -> Captured:
    config = EngineConfig.from_mapping(dict(job.config), source="job")
    loaded = load_for(config, job.model)
    workload = parse_workload(job.workload, vocab_size=loaded.vocab_size)
    clock = job.clock or ("iterations" if workload.unit == "iterations" else "virtual")
    with Session(loaded, config=config, clock=clock) as session:
        session.submit_workload(workload)
        _advance(session, job, workload)
        first = session.engine.controller.next_index
        with _tool(job.tool, folder):
            session.capture(job.stretch.count)
        last = session.engine.controller.next_index - 1
        _check_records(session, first, last)
        session.save(folder / RUN, overwrite=True)
        notes = (*workload.notes, *workload.length_notes(session.engine.resolved.max_sequence_length))
        return _captured(session, first, last, notes)


def _advance(session: Session, job: Job, workload: Workload) -> None:
    """Run up to the first iteration that is to be captured."""
    if job.when == "decode-full":
        together = workload.concurrency or len(workload.requests)
        _run_until_full(session, min(session.config.max_requests, together, len(workload.requests)))
    session.run(job.stretch.first)
    if session.finished:
        taken = session.engine.controller.next_index
        raise ProfileError(f"the workload ended after {taken} iterations, before the first that was to be captured")


def _run_until_full(session: Session, num_rows: int) -> None:
    """Until a forward of ``num_rows`` decode rows and nothing else was launched."""
    most = 0
    while not session.finished:
        session.step()
        launched = session.recorder.iterations()[-1].launched
        if launched is not None:
            most = max(most, launched.num_decode)
            if launched.num_decode == num_rows and not launched.num_prefill:
                return
    raise ProfileError(f"--when decode-full: no batch held {num_rows} decode rows and no prefill; the most were {most}")


def _check_records(session: Session, first: int, last: int) -> None:
    kept = session.recorder.iterations()
    if not kept or kept[0].iteration > first:
        raise ProfileError(
            f"{last - first + 1} iterations are more than the recorder keeps: capture fewer with --iterations A-B"
        )


def _tool(tool: str, folder: Path) -> AbstractContextManager[None]:
    return _torch_profiler(folder / TORCH_TRACE) if tool == "torch" else nullcontext()


@contextmanager
def _torch_profiler(out: Path) -> Iterator[None]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    from tracing.torch_clock import noting_clock

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler, noting_clock(profiler):
        yield
    profiler.export_chrome_trace(str(out))


def _captured(session: Session, first: int, last: int, notes: tuple[str, ...]) -> Captured:
    import torch

    return Captured(
        first=first,
        last=last,
        session_id=session.recorder.session_id,
        nvtx=session.recorder.nvtx_status,
        epoch_offset_ns=time.time_ns() - time.perf_counter_ns(),
        versions=dict(zip(VERSIONS, (version("nvtx"), torch.__version__), strict=True)),
        workload_notes=notes,
    )


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
