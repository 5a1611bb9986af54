"""The main job: a real model serves sixteen prompts in both modes, and what that changed is shown."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.config import EngineConfig
from engine.models.loader import LoadedModel
from engine.request import RequestOutput
from tracing.comparison import KINDS_NOTE, Row, comparison_notes, comparison_rows, format_value
from tracing.text_table import aligned
from workbench.comparison import Comparison, Leg, compare
from workbench.demo_prompts import demo_workload
from workbench.demo_shipped import Say, run_shipped
from workbench.environment import environment_shown
from workbench.loading import check_device, load_for
from workbench.report import write_report
from workbench.runs import Run
from workbench.saved_runs import check_folders, save_runs
from workbench.session import Session
from workbench.verdicts import RequestVerdict, Verdict
from workbench.workloads import RequestSpec, Workload, WorkloadError

_SHOWN = (
    "tokens/s",
    "TTFT p50",
    "TPOT p50",
    "step time p50",
    "host work / iteration",
    "hidden / iteration",
    "exposed / iteration",
    "hidden share",
    "device busy",
    "bubbles",
    "graph hit rate",
    "padding tokens",
    "padding share",
    "wasted rows",
)
"""Rows of the terminal's table; the report has all of them."""

_MODEL = "smollm2"
_LEGS = (Leg(name="legacy", mode="legacy"), Leg(name="async", mode="async"))

_GLOSS = (
    "(A captured size is a forward of so many rows, recorded in advance and replayed; padding tokens fill it up; a "
    "batch with prompt tokens runs eagerly here: prefill not captured.)"
)


def demo_config(device: str) -> EngineConfig:
    """Decode forwards in five captured sizes; short sequences, so that few buckets have to be captured.

    float32 on CUDA as well: in bfloat16 a batch's composition turns tokens round, and the modes batch differently.
    """
    return EngineConfig.from_mapping(
        {
            "device": device,
            "dtype": "float32",
            "graphs": [1, 2, 4, 8, 16],
            "graph_non_decode": False,
            "max_requests": 16,
            "max_batch_tokens": 512,
            "max_sequence_length": 256,
        },
        source="demo",
    )


def run_demo(
    *,
    model: str | LoadedModel | None = None,
    device: str = "cpu",
    out: Path,
    say: Say,
    workload: Workload | None = None,
) -> int:
    """Serve, compare, print, write ``out/report.html`` and a run folder a mode; returns the exit status.

    Without a model or workload of the caller's the shipped model comes first (:mod:`workbench.demo_shipped`).

    1 if the modes' ids differ and rounding does not explain it; a difference that rounding explains is only told.

    Args:
        model: As for :class:`~workbench.session.Session`, but for None, which is ``smollm2``; needs a chat template.
        device: ``cpu``, ``inline`` or ``cuda``.
        out: Folder of report and runs; made if it is missing. What an earlier demo left there is replaced.
        say: Writes to the terminal.
        workload: None: the sixteen prompts.

    Raises:
        CheckpointError: the model is absent; the message says how to install it.
        ConfigError: there is no such device.
        WorkloadError: the workload chats, and the model has no tokenizer or no chat template.
        RunFolderError: something else stands where a run is to be saved.
    """
    config = demo_config(device)
    check_device(config)
    check_folders(out, [leg.name for leg in _LEGS], overwrite=True)
    is_shipped_right = run_shipped(device, say) if model is None and workload is None else True
    workload = workload or demo_workload()
    say("loading the model ...")
    loaded = load_for(config, model or _MODEL)
    _check_chat(loaded, workload)
    comparison = compare(
        workload,
        _LEGS,
        model=loaded,
        config=config,
        repeats=1,
        progress=False,
        warmup=1 if device == "cuda" else 0,  # its kernels load, or compile, when they are first used
        on_run=lambda name, session: _begin_leg(name, session, workload.requests[0], say),
    )
    summaries = {run.name: run.summary for run in comparison.runs}
    for line in (
        *_request_lines(comparison),
        "",
        *_table_lines(comparison),
        "",
        *(note for note in comparison_notes(summaries) if note != KINDS_NOTE),
        "",
        *_order_lines(comparison),
    ):
        say(line)
    path = write_report(
        out / "report.html",
        [run.view for run in comparison.runs],
        title=f"{loaded.name}: legacy and async on the same sixteen prompts",
        environment={**environment_shown(), "engine seed": config.seed},
        notes=[_verdict_line(comparison)],
    )
    saved = save_runs(out, [run.trace for run in comparison.runs], overwrite=True)
    say("")
    say(_verdict_line(comparison))
    say(f"both runs are saved; to see them again: workbench report {' '.join(map(str, saved))}")
    say(f"open {path} in a browser")
    return 0 if comparison.outputs_match and is_shipped_right else 1


def _check_chat(loaded: LoadedModel, workload: Workload) -> None:
    """Say it before minutes go into capturing."""
    can_chat = loaded.tokenizer is not None and loaded.tokenizer.has_chat_template
    if not can_chat and any(spec.chat for spec in workload.requests):
        raise WorkloadError(
            f"demo needs a model with a tokenizer and chat template, and {loaded.name} has none; "
            "leave --model out for smollm2, or serve token ids with workbench run"
        )


class _Streams:
    """Shows the text of streamed requests as it grows, one at a time: a second one waits until the first has ended."""

    def __init__(self, name: str, session: Session, say: Say) -> None:
        self._session = session
        self._say = say
        self._shown: str | None = None
        self._waiting: deque[RequestOutput] = deque()
        self._streamed: frozenset[str] | None = None
        say(f"\n--- {name} ---")

    def __call__(self, output: RequestOutput) -> None:
        if self._streamed is None:
            self._streamed = frozenset(one.request_id for one in self._session.submissions if one.stream)
        if output.request_id not in self._streamed:
            return
        if self._shown is None:
            self._shown = output.request_id
            self._say(f"{output.request_id}: ", end="")
        if output.request_id == self._shown:
            self._show(output)
        else:
            self._waiting.append(output)

    def _show(self, output: RequestOutput) -> None:
        self._say(output.new_text.replace("\n", " "), end="")
        if not output.finished:
            return
        self._say(f" [{output.finish_reason}]")
        self._shown = None
        waiting, self._waiting = self._waiting, deque()
        for one in waiting:
            self(one)


def _begin_leg(name: str, session: Session, first: RequestSpec, say: Say) -> _Streams:
    """One short request first, so that the first leg does not pay for what every process does once."""
    session.submit(first.prompt, max_tokens=2, temperature=0.0, chat=first.chat)
    session.run()
    session.reset()
    return _Streams(name, session, say)


def _request_lines(comparison: Comparison) -> list[str]:
    """What each request asked for and got."""
    specs, outputs = comparison.workload.requests, comparison.runs[-1].outputs
    lines = ["", "request     arrives  sampling      tokens  end     text"]
    for spec, output in zip(specs, outputs, strict=True):
        sampling = "greedy" if spec.params.is_greedy else f"seed {spec.params.seed} T={spec.params.temperature:g}"
        text = " ".join(output.text.split())[:58]
        lines.append(
            f"{output.request_id:<11} {spec.arrival:>7g}  {sampling:<12} {len(output.token_ids):>7}  "
            f"{output.finish_reason or '':<6}  {text}"
        )
    return [*lines, *_least_sure(outputs)]


def _least_sure(outputs: Sequence[RequestOutput]) -> list[str]:
    """What log-probabilities are good for: where the model hesitated most."""
    found = [
        (next(iter(row.values())), output.request_id, position)
        for output in outputs
        for position, row in enumerate(output.logprobs or ())
    ]
    if not found:
        return []
    logprob, request_id, position = min(found)
    return [
        f"least likely of the {len(found)} tokens with log-probabilities: number {position} of {request_id}, "
        f"p = {math.exp(logprob):.3f}"
    ]


def _table_lines(comparison: Comparison) -> list[str]:
    rows = [row for row in comparison_rows([run.summary for run in comparison.runs]) if row.label in _SHOWN]
    head = ["", "unit", *(run.name for run in comparison.runs), "ratio"]
    return aligned([head, *(_cells(row) for row in rows)])


def _cells(row: Row) -> list[str]:
    values = [format_value(value, row.unit) for value in row.values]
    return [row.label, row.unit, *values, "" if row.ratio is None else f"{row.ratio:.2f}x"]


def _order_lines(comparison: Comparison) -> list[str]:
    lines = [line for run in comparison.runs for line in (*_orders_of(run), *_forwards_of(run))]
    return [*lines, _GLOSS]


def _orders_of(run: Run) -> list[str]:
    return [f"{run.name}: {order.order} {order.count} x ({_counts(order.reasons)})" for order in run.summary.orders]


def _forwards_of(run: Run) -> list[str]:
    graphs, wasted = run.summary.graphs, run.summary.wasted_rows
    return [
        f"{run.name}: {graphs.hits} forwards ran in captured sizes with {graphs.padding_tokens} padding tokens; "
        f"misses: {_counts(graphs.misses)}; wasted rows: {_counts(wasted.by_cause)}"
    ]


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _verdict_line(comparison: Comparison) -> str:
    total = len(comparison.verdicts)
    if comparison.ids_equal:
        return f"Both modes gave the same ids for all {total} requests."
    parted = [one for one in comparison.verdicts if one.verdict is not Verdict.EQUAL]
    where = "; ".join(f"{one.request_id}{_place(one)} ({one.explanation})" for one in parted)
    has_ids, has_rest = (any((one.position is None) is rest for one in parted) for rest in (False, True))
    what = " and ".join(["ids"] * has_ids + ["log-probabilities"] * has_rest)
    how = "differ by rounding alone" if comparison.outputs_match else "DIFFER"
    return f"The modes' {what} {how} for {len(parted)} of {total} requests: {where}."


def _place(one: RequestVerdict) -> str:
    """None where the ids are the same, and only log-probabilities differ."""
    return "" if one.position is None else f" at position {one.position}"
