"""Recorded traffic through an engine, leg by leg, and what requests that wait cost the host.

    python -m benchmarks.traffic serve azure:PATH/azure_llm_2023_conv.csv mooncake:PATH/mooncake_conversation.jsonl
    python -m benchmarks.traffic serve 'mooncake:FILE?scale=0.2' --legs legacy async+prefix --device cuda --out FILE
    python -m benchmarks.traffic waiting --rows 64 256

``docs/traffic.md`` says what is measured, how a leg is written, and what the tables have shown.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml

from benchmarks.traffic_tables import metric_row, print_serving
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineError, RequestError
from engine.models.loader import LoadedModel
from engine.request import RequestOutput
from tracing.recorder import Recorder
from tracing.summary import Spread
from workbench.documents import jsonable
from workbench.environment import environment
from workbench.legs import LEGS, Leg, leg_config
from workbench.loading import load_for
from workbench.repeats import RepeatRow
from workbench.session import Session
from workbench.workloads import Workload, WorkloadError, parse_workload

_WORDS: dict[str, dict[str, Any]] = {
    "prefix": {"prefix_caching": True},
    "overlapped": {"overlap_admission": True},
    "exposed": {"overlap_admission": False},
    "chunked": {"chunked_prefill": True},
}
WARM_REQUESTS = 32
"""Served in each engine before what is measured, from another seed: no prompt of theirs is met again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What fits a kind of device: the engine, and the traces cut down to it."""

    model: str
    engine: Mapping[str, Any]
    traces: Mapping[str, Mapping[str, str]]
    """Workload options by kind, where the line of text does not say otherwise."""
    warm_rounds: int
    chunk: int
    """Tokens of a forward in the leg that reads prompts in chunks."""

    @property
    def legs(self) -> tuple[str, ...]:
        """Those that run where none are named; the engine leaves out what it refuses."""
        more = ("async+prefix", f"async+chunked={self.chunk}", f"async+prefix+chunked={self.chunk}")
        return ("legacy", "no-overlap", "async+exposed", "async", *more)


SMALL = Scale(
    model="shape:tiny",
    engine={"max_requests": 32, "max_batch_tokens": 1024, "max_sequence_length": 1024},
    traces={
        "azure": {"requests": "1000", "shrink": "8", "max_length": "1024", "scale": "0.1"},
        "mooncake": {"requests": "1000", "shrink": "32", "max_length": "1024", "spread": "3", "scale": "0.2"},
    },
    warm_rounds=0,
    chunk=256,
)
LARGE = Scale(
    model="shape:qwen3-0.6b",
    engine={"max_requests": 128, "max_batch_tokens": 8192, "max_sequence_length": 8192},
    traces={
        "azure": {"requests": "1000", "shrink": "1", "max_length": "8192", "scale": "0.1"},
        "mooncake": {"requests": "1000", "shrink": "4", "max_length": "8192", "spread": "3", "scale": "0.1"},
    },
    warm_rounds=1,  # Triton compiles for each kind of shape that it meets
    chunk=2048,
)


# -- what is asked for ---------------------------------------------------------------------------------------------


def parse_leg(text: str) -> Leg:
    """``BASE+WORD+NAME=VALUE..``: a leg of ``workbench compare`` with engine options of its own.

    Raises:
        WorkloadError: a part of it is unknown.
    """
    base, *words = text.split("+")
    if base not in LEGS:
        raise WorkloadError(f"leg {text!r}: {base!r} is unknown; a leg begins with {', '.join(LEGS)}")
    changes: dict[str, Any] = {}
    for word in words:
        changes.update(_options_of(f"leg {text!r}", word))
    return replace(LEGS[base], name=text, changes=changes)


def _options_of(owner: str, word: str) -> Mapping[str, Any]:
    name, equals, value = word.partition("=")
    if not equals and name in _WORDS:
        return _WORDS[name]
    if name == "mode" or not (name and value):
        raise WorkloadError(f"{owner}: {word!r} is unknown; known are {', '.join(_WORDS)}, chunked=TOKENS, NAME=VALUE")
    if name == "chunked":
        return {**_WORDS[name], "max_batch_tokens": yaml.safe_load(value)}
    return {name: yaml.safe_load(value)}


def workload_text(text: str, scale: Scale, requests: int | None) -> str:
    """``text`` with the options it leaves open filled in; kinds without defaults stay as they are.

    Raises:
        WorkloadError: ``requests`` is given for a kind that is no excerpt of a file.
    """
    head, _, query = text.partition("?")
    kind = head.partition(":")[0]
    if kind not in scale.traces:
        if requests is not None:
            raise WorkloadError(f"--requests goes with {' and '.join(scale.traces)}; write it into {text!r} itself")
        return text
    given = [part for part in query.split("&") if part]
    keys = {part.partition("=")[0] for part in given}
    left_open = {key: value for key, value in scale.traces[kind].items() if key not in keys}
    if keys & {"rate", "concurrency"}:  # these replace the trace's arrivals
        left_open = {key: value for key, value in left_open.items() if key not in ("scale", "spread")}
    if requests is not None and "requests" not in keys:
        left_open["requests"] = str(requests)
    return f"{head}?{'&'.join([*given, *(f'{key}={value}' for key, value in left_open.items())])}"


def with_ids(workload: Workload) -> Workload:
    """The same with prompts made: nobody's time is spent on it while requests arrive."""
    made = tuple(
        spec if isinstance(spec.prompt, str) else replace(spec, prompt=tuple(spec.prompt)) for spec in workload.requests
    )
    return replace(workload, requests=made)


# -- one run -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One run, reduced to what is told of it."""

    numbers: Mapping[str, float | None]
    """By metric, in the metric's unit."""
    orders: Mapping[str, int]
    reasons: Mapping[str, int]
    tokens: Sequence[tuple[int, ...]]
    """One a request."""
    config: Mapping[str, Any]
    """Resolved."""


def serve_once(loaded: LoadedModel, leg: Leg, config: EngineConfig, workload: Workload, warm: Workload) -> Served:
    """Serve ``workload`` in an engine of its own, on the virtual clock, with the recorder off."""
    with Session(
        loaded,
        config=config,
        clock="virtual",
        policy=leg.policy,
        recorder=Recorder(enabled=False),
        progress=False,
    ) as session:
        session.submit_workload(warm)
        drive(session)
        session.reset()
        gc.collect()
        ids = session.submit_workload(workload)
        idle_s = drive(session)
        outputs = session.outputs
        counters = session.engine.counters
        return Served(
            numbers={
                **serving_numbers([outputs[request_id] for request_id in ids], session.clock.now(), idle_s),
                "overlap": 100 * counters.overlap_steps / counters.steps,
                "iterations": counters.steps,
            },
            orders=dict(counters.orders),
            reasons=dict(counters.reasons),
            tokens=[outputs[request_id].token_ids for request_id in ids],
            config=session.resolved_config(),
        )


def drive(session: Session) -> float:
    """Serve all that was submitted; returns the seconds on the clock in which the engine had nothing to do."""
    arrivals = sorted(submission.arrival for submission in session.submissions)
    idle_s, ended = 0.0, 0
    while not session.finished:
        if not session.engine.has_unfinished():  # the clock will jump to the next one
            idle_s += max(0.0, arrivals[ended] - session.clock.now())
        ended += sum(output.finished for output in session.step())
    session.engine.device.synchronize()
    return idle_s


def serving_numbers(outputs: Sequence[RequestOutput], makespan_s: float, idle_s: float) -> dict[str, float | None]:
    """What callers felt and what the cache spared; ``docs/metrics.md`` defines the times.

    Args:
        outputs: The last one of each request.
        makespan_s: From the workload's start to the last end.
        idle_s: The part of it without a request.
    """
    num_output = sum(len(output.token_ids) for output in outputs)
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)
    return {
        "tokens/s": num_output / makespan_s,
        "with prompts": (num_output + num_prompt) / makespan_s,
        "busy": 100 * (1 - idle_s / makespan_s),
        **_percentiles("wait", [_gap(o.timings.arrival_ns, o.timings.admitted_ns) for o in outputs]),
        **_percentiles("TTFT", [_gap(o.timings.arrival_ns, o.timings.first_token_ns) for o in outputs]),
        **_percentiles("TPOT", [_tpot_ns(output) for output in outputs]),
        "hit": 100 * num_cached / num_prompt,
        "cut off": sum(output.finish_reason not in ("length", "stop") for output in outputs),
    }


def _gap(start_ns: int | None, end_ns: int | None) -> float | None:
    return None if start_ns is None or end_ns is None else end_ns - start_ns


def _tpot_ns(output: RequestOutput) -> float | None:
    gap_ns, count = _gap(output.timings.first_token_ns, output.timings.finished_ns), len(output.token_ids) - 1
    return None if gap_ns is None or count < 1 else gap_ns / count


def _percentiles(name: str, samples_ns: Sequence[float | None]) -> dict[str, float | None]:
    """In milliseconds."""
    spread = Spread.of(sample for sample in samples_ns if sample is not None)
    if spread is None:
        return dict.fromkeys((f"{name} p50", f"{name} p90", f"{name} p99"))
    return {
        f"{name} p50": spread.p50_ns / 1e6,
        f"{name} p90": spread.p90_ns / 1e6,
        f"{name} p99": spread.p99_ns / 1e6,
    }


# -- legs in turn --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """One workload in all legs that took part."""

    workload: Workload
    ideal: float
    """Share of prompt tokens that an endless prefix cache would spare."""
    runs: Mapping[str, Sequence[Served]]
    """By leg, one a repeat."""
    refused: Mapping[str, str]
    """Legs that took no part, and why."""

    @property
    def names(self) -> list[str]:
        """Legs that took part, the baseline first."""
        return list(self.runs)

    @property
    def rows(self) -> list[RepeatRow]:
        """Each metric; ratios are to the first leg, paired by repeat."""
        legs = list(self.runs.values())
        if not legs:
            return []
        named = [metric_row(name, [[run.numbers[name] for run in leg] for leg in legs]) for name in legs[0][0].numbers]
        same = [[float(self.num_same(run)) for run in leg] for leg in legs]
        return [*named, metric_row("same tokens", same)]

    def num_same(self, run: Served) -> int:
        """Requests with the tokens that they had in the first leg's first run."""
        first = next(iter(self.runs.values()))[0]
        return sum(ours == theirs for ours, theirs in zip(run.tokens, first.tokens, strict=True))

    def counts(self, what: str) -> dict[str, dict[str, float]]:
        """Of each leg the iterations by ``orders`` or ``reasons``, medians over repeats."""
        found: dict[str, dict[str, float]] = {}
        for leg, runs in self.runs.items():
            told: list[Mapping[str, int]] = [getattr(run, what) for run in runs]
            found[leg] = {
                key: median(one.get(key, 0) for one in told) for key in dict.fromkeys(k for t in told for k in t)
            }
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "workload": self.workload.to_dict(),
            "prompt_tokens": self.workload.num_prompt_tokens,
            "output_tokens": sum(spec.params.max_tokens for spec in self.workload.requests),
            "ideal_prefix_share": self.ideal,
            "legs": [{"name": name, "config": dict(runs[0].config)} for name, runs in self.runs.items()],
            "refused": dict(self.refused),
            "metrics": [row.to_dict(self.names) for row in self.rows],
            "orders": self.counts("orders"),
            "reasons": self.counts("reasons"),
        }


def serve_legs(
    loaded: LoadedModel,
    legs: Sequence[Leg],
    base: EngineConfig,
    workload: Workload,
    warm: Workload,
    *,
    repeats: int,
    warm_rounds: int = 0,
) -> Traffic:
    """Every leg ``repeats`` times, taking turns, one engine at a time; a leg that is refused is left out and named."""
    ideal = workload.prefix_share(base.block_size)  # first, for it refuses prompts that are text
    runs: dict[str, list[Served]] = {leg.name: [] for leg in legs}
    refused: dict[str, str] = {}
    num_blocks: int | None = None
    for repeat in range(-warm_rounds, repeats):
        for place in range(len(legs)):
            leg = legs[(place + repeat) % len(legs)]  # whoever comes first in one repeat comes last in the next
            if leg.name in refused:
                continue
            try:
                served = serve_once(loaded, leg, leg_config(leg, base, num_blocks), workload, warm)
            except (ConfigError, RequestError) as error:
                refused[leg.name] = str(error)
                say(f"leg {leg.name} left out: {error}")
                continue
            num_blocks = num_blocks or served.config["num_blocks"]
            if repeat >= 0:
                runs[leg.name].append(served)
            say(f"repeat {repeat + 1} of {repeats}, {leg.name}: {served.numbers['tokens/s']:,.0f} tokens/s")
    took_part = {name: done for name, done in runs.items() if name not in refused}
    return Traffic(
        workload=workload,
        ideal=ideal,
        runs=took_part,
        refused=refused,
    )


def say(line: str) -> None:
    """What goes on, beside the tables."""
    print(line, file=sys.stderr, flush=True)


# -- commands ------------------------------------------------------------------------------------------------------


def serve_command(args: argparse.Namespace) -> dict[str, Any]:
    """Every workload in every leg."""
    scale = LARGE if args.device == "cuda" else SMALL
    legs = [parse_leg(text) for text in dict.fromkeys(args.legs or scale.legs)]
    texts = [workload_text(text, scale, args.requests) for text in args.workloads]
    options = {**scale.engine, "device": args.device}
    for pair in args.set:
        options.update(_options_of("--set", pair))
    base = EngineConfig.from_mapping(options, source="--set")
    loaded = load_for(base, args.model or scale.model)
    warm_rounds = scale.warm_rounds if args.warm_rounds is None else args.warm_rounds
    found = []
    for text in texts:
        workload = with_ids(parse_workload(text, vocab_size=loaded.vocab_size))
        warm = warm_workload(workload, loaded.vocab_size)
        traffic = serve_legs(loaded, legs, base, workload, warm, repeats=args.repeats, warm_rounds=warm_rounds)
        print_serving(traffic, args.repeats)
        found.append(traffic)
    return {
        "model": loaded.name,
        "device": args.device,
        "repeats": args.repeats,
        "warm_rounds": warm_rounds,
        "traffic": [one.to_dict() for one in found],
    }


def warm_workload(workload: Workload, vocab_size: int) -> Workload:
    """The first few requests all at once, with every id of their prompts another one."""
    few = workload.requests[:WARM_REQUESTS]
    shifted = tuple(
        replace(spec, arrival=0.0, prompt=tuple((int(token) + 1) % vocab_size for token in spec.prompt)) for spec in few
    )
    return replace(workload, name="warm-up", requests=shifted, concurrency=None)


def waiting_command(args: argparse.Namespace) -> dict[str, Any]:
    """Host time of admit and probe by the length of the queue."""
    from benchmarks.traffic_waiting import measure_waiting

    return measure_waiting(parse_leg(args.leg), args.rows, args.waiting, args.rounds, args.prompt_tokens)


def main() -> int:
    """Print tables; write one JSON document where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    serve = commands.add_parser("serve", help="throughput and latencies of recorded traffic, leg by leg")
    serve.add_argument("workloads", nargs="+", metavar="WORKLOAD", help="azure:FILE, mooncake:FILE or any other")
    serve.add_argument("--legs", nargs="+", metavar="LEG", help=" ".join(SMALL.legs))
    serve.add_argument("--requests", type=int, help="of each trace (1000)")
    serve.add_argument("--repeats", type=int, default=5)
    serve.add_argument("--warm-rounds", type=int, help="whole rounds thrown away first (CUDA: 1, else 0)")
    serve.add_argument("--device", default="cpu", choices=["cpu", "inline", "cuda"])
    serve.add_argument("--model", help="shape:tiny, on CUDA shape:qwen3-0.6b")
    serve.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="engine options of all legs")
    serve.set_defaults(run=serve_command)
    waiting = commands.add_parser("waiting", help="host time of admission by the number of requests that wait")
    waiting.add_argument("--leg", default="legacy")
    waiting.add_argument("--rows", nargs="+", type=int, default=[64])
    waiting.add_argument(
        "--waiting", nargs="+", type=int, default=[1, 0, 100, 1000, 10000], help="lengths; ratios are to the first"
    )
    waiting.add_argument("--rounds", type=int, default=5)
    waiting.add_argument("--prompt-tokens", type=int, default=128)
    waiting.set_defaults(run=waiting_command)
    for command in (serve, waiting):
        command.add_argument("--out", type=Path, help="also write everything to this JSON file")
    args = parser.parse_args()
    if getattr(args, "device", "cpu") != "cuda":
        torch.set_num_threads(1)  # host and device share the cores
    try:
        found = args.run(args)
    except EngineError as error:
        say(f"traffic: {error}")
        return 2
    if args.out is not None:
        document = {
            "command": " ".join(["traffic", *sys.argv[1:]]),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "environment": environment(),
            **found,
        }
        args.out.write_text(json.dumps(jsonable(document), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
