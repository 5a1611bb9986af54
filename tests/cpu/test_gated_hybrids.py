"""Hybrids with the graph gate on and the list of graphs that is chosen by itself: no step is eager.

Rows with recurrent states match graphs strictly: a spare prefill row holds no decode row. So without the gate some
mixes find no graph, though many are captured.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.graph_gate import CONTINUING_CHUNK
from engine.models.loader import LoadedModel
from tests.changed_shapes import TWO_LAYERS, changed_shape
from tests.oracle_world import loaded_oracle

LIMITS: dict[str, Any] = {
    "device": "inline",
    "graphs": -1,  # what "auto" is where a GPU captures prompts
    "chunked_prefill": True,
    "max_requests": 3,
    "max_batch_tokens": 16,
    "max_sequence_length": 48,
    "num_blocks": 9,
    "debug_invariants": True,
}
LENGTHS = (1, 2, 3, 5, 7, 9, 14, 20, 30)
"""Of prompts; the longest are read in two or three chunks."""
NUM_REQUESTS = 40


@cache
def small_hybrid() -> LoadedModel:
    """Buckets are dear, so there is little to trace."""
    return changed_shape("tiny-hybrid", torch.float64, **TWO_LAYERS)


MODELS: dict[str, tuple[Callable[[], LoadedModel], int]] = {
    "two layers": (small_hybrid, 0),
    "oracle with drafts": (lambda: loaded_oracle(kind="mtp"), 2),
}


def serve(loaded: LoadedModel, **options: Any) -> tuple[list[tuple[int, ...]], list[str], Engine]:
    """Requests come in bursts while others run; their tokens, and why steps were eager."""
    rng = random.Random(0)
    with Engine(loaded, EngineConfig(**{**LIMITS, **options})) as engine:
        ids, outputs = [], {}
        while len(ids) < NUM_REQUESTS:
            for _ in range(rng.choice((1, 2, 3))):
                prompt = [rng.randrange(60) for _ in range(rng.choice(LENGTHS))]
                params = SamplingParams(max_tokens=rng.randrange(1, 8), seed=len(ids), ignore_eos=True)
                ids.append(engine.add_request(prompt, params))
            for _ in range(rng.randrange(1, 8)):
                outputs |= {output.request_id: output.token_ids for output in engine.step()}
        while engine.has_unfinished():
            outputs |= {output.request_id: output.token_ids for output in engine.step()}
    uses = [record.graph for record in engine.recorder.iterations() if record.graph is not None]
    return [outputs[name] for name in ids], [use.miss_reason for use in uses if use.miss_reason is not None], engine


@pytest.mark.parametrize("mode", ["async", "legacy"])
@pytest.mark.parametrize("model", MODELS)
def test_no_step_is_eager_but_for_continuing_chunks_and_no_token_changes(model: str, mode: str) -> None:
    make, drafts = MODELS[model]
    options = {"mode": mode, "speculative_tokens": drafts}

    open_tokens, open_reasons, _ = serve(make(), **options)
    tokens, reasons, engine = serve(make(), **options, graph_all_prefills=True)

    assert "prefill not captured" in open_reasons, "the gate has nothing to do"
    assert set(reasons) <= {CONTINUING_CHUNK}
    assert engine.counters.graph_hits > 30
    assert tokens == open_tokens
