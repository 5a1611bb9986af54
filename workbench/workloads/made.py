"""Workloads that are made up: lengths by a law, arrivals by a law."""

from __future__ import annotations

import random
from collections.abc import Sequence

from workbench.workloads.kinds import SAMPLING_KEYS, WorkloadKind, WorkloadOptions, register_workload
from workbench.workloads.lengths import LengthLaw, parse_lengths
from workbench.workloads.prompts import SyntheticPrompt
from workbench.workloads.shaping import poisson_arrivals
from workbench.workloads.workload import RequestSpec, Workload, WorkloadError


def _fixed(options: WorkloadOptions) -> Workload:
    """With ``arrive=K``, K requests at each iteration, with ``concurrency=N`` one as another ends, else all at once."""
    count, arrive = options.whole("requests", low=1), options.whole("arrive", 0)
    concurrency = options.whole("concurrency", low=1) if "concurrency" in options.values else None
    if arrive and concurrency is not None:
        raise WorkloadError(f"workload {options.text!r}: arrive= and concurrency= exclude each other")
    arrivals = [index // arrive if arrive else 0 for index in range(count)]
    requests = _requests(options, arrivals)
    return Workload(name=options.text, requests=requests, unit="iterations", concurrency=concurrency)


def _poisson(options: WorkloadOptions) -> Workload:
    """Requests at random moments, ``rate`` a second on average."""
    rate = options.real("rate")
    if rate <= 0:
        raise WorkloadError(f"workload {options.text!r}: rate must be above 0 requests a second, got {rate}")
    arrivals = poisson_arrivals(options.whole("requests", low=1), rate, options.whole("seed", 0))
    return Workload(name=options.text, requests=_requests(options, arrivals), unit="s")


def _requests(options: WorkloadOptions, arrivals: Sequence[float]) -> tuple[RequestSpec, ...]:
    seed, params = options.whole("seed", 0), options.sampling()
    inputs, outputs, shared = _law(options, "input"), _law(options, "output"), options.whole("prefix", 0)
    draws = random.Random(f"lengths {seed}")
    return tuple(
        RequestSpec(
            prompt=SyntheticPrompt(
                length=inputs.draw(draws),
                own=index,
                vocab_size=options.vocab_size,
                seed=seed,
                blocks=("shared",) if shared else (),
                block_tokens=max(1, shared),
            ),
            params=params.replace(max_tokens=outputs.draw(draws), seed=seed + index),
            arrival=arrival,
        )
        for index, arrival in enumerate(arrivals)
    )


def _law(options: WorkloadOptions, key: str) -> LengthLaw:
    try:
        return parse_lengths(options.needed(key))
    except ValueError as error:
        if isinstance(error, WorkloadError):
            raise
        raise WorkloadError(f"workload {options.text!r}: {key} {error}") from error


register_workload(
    "fixed",
    WorkloadKind(
        _fixed,
        ("requests", "input", "output", "arrive", "concurrency", "prefix", *SAMPLING_KEYS),
        "fixed:requests=16,input=64,output=32",
    ),
)
register_workload(
    "poisson",
    WorkloadKind(
        _poisson,
        ("rate", "requests", "input", "output", "prefix", *SAMPLING_KEYS),
        "poisson:rate=4,requests=32,input=16..128,output=32",
    ),
)
