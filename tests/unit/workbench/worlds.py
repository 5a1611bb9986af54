"""Small worlds for the workbench's tests: the oracle model, whose outputs tell of any wrong block, row or order."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from engine.models.loader import LoadedModel, load_model
from engine.request import SamplingParams
from tracing.records import IterationRecord
from workbench.session import Session
from workbench.workloads import RequestSpec, Workload


@cache
def oracle() -> LoadedModel:
    return load_model("oracle", device=torch.device("cpu"))


def make_session(mode: str | None = None, **options: Any) -> Session:
    """A session on the oracle; inline unless a test wants times, for tests then need no second thread."""
    defaults = {"device": "inline", "max_requests": 4, "max_batch_tokens": 128, "max_sequence_length": 96}
    return Session(oracle(), mode, **{**defaults, "num_blocks": 24, **options})


@cache
def drafting_oracle() -> LoadedModel:
    """Three draft heads, right in two of three cases, and a recurrent state."""
    return load_model("oracle-mtp", device=torch.device("cpu"))


def make_drafting_session(mode: str | None = None, **options: Any) -> Session:
    """As :func:`make_session`, with two drafts a row."""
    defaults = {"device": "inline", "max_requests": 4, "max_batch_tokens": 128, "max_sequence_length": 96}
    defaults |= {"num_blocks": 40, "speculative_tokens": 2, "clock": "iterations", "progress": False}
    return Session(drafting_oracle(), mode, **{**defaults, **options})


def spread_workload(count: int = 6) -> Workload:
    """Requests of different lengths, greedy and drawn, arriving two by two; none ends by EOS."""
    specs = tuple(
        RequestSpec(
            prompt=tuple((3 * index + place) % 60 for place in range(2 + 5 * index)),
            params=SamplingParams(
                max_tokens=5 + 2 * index,
                temperature=0.9 * (index % 2),
                seed=index if index % 3 else None,
                ignore_eos=True,
            ),
            arrival=3 * (index // 2),
        )
        for index in range(count)
    )
    return Workload(name="spread", requests=specs, unit="iterations")


def tokens(session: Session) -> dict[str, tuple[int, ...]]:
    return {name: output.token_ids for name, output in session.outputs.items()}


def what_happened(record: IterationRecord) -> dict[str, Any]:
    """A record without its times and void reasons: what stepping must not change."""
    timeless = ("begin_ns", "end_ns", "void_reasons")
    return {name: getattr(record, name) for name in record.__slots__ if name not in timeless}
