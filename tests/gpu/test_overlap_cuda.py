"""With the device asleep, the host must still get through: order of events, not speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import EngineConfig, Order, Phase, SamplingParams
from engine.engine import Engine
from engine.models.loader import LoadedModel, load_model

SLEEP_S = 0.05
CYCLES_PER_SECOND = 1.98e9


class Sleepy(torch.nn.Module):
    """A model whose forwards keep the device busy for 50 ms more, once ``awake`` is False."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.vocab_size, self.max_position = inner.vocab_size, inner.max_position
        self.awake = True

    def cache_layout(self) -> Any:
        return self.inner.cache_layout()

    def forward(self, batch: Any, caches: Sequence[Any]) -> Tensor:
        if not self.awake:
            torch.cuda._sleep(int(SLEEP_S * CYCLES_PER_SECOND))
        return self.inner(batch, caches)


def sleepy_engine() -> tuple[Engine, Sleepy]:
    torch.cuda._sleep(1000)  # its first launch loads a module, which takes half a second
    loaded = load_model("shape:tiny", dtype=torch.bfloat16, device=torch.device("cuda", 0))
    model = Sleepy(loaded.model)
    config = EngineConfig(device="cuda", max_requests=8, max_batch_tokens=256, max_sequence_length=128, graphs=None)
    sleepy = LoadedModel(
        model=model,
        tokenizer=None,
        name="sleepy",
        eos_token_ids=(),
        vocab_size=loaded.vocab_size,
        architecture="Sleepy",
        config={},
    )
    return Engine(sleepy, config), model


def run_phase(engine: Engine, phase: Phase) -> None:
    border = engine.step_phase()
    assert border is not None
    assert border.phase is phase


MIXES = {
    "greedy": [SamplingParams(max_tokens=40, temperature=0)] * 6,
    "random": [SamplingParams(max_tokens=40, seed=i) for i in range(6)],
    "filters": [SamplingParams(max_tokens=40, seed=i, top_p=0.8, top_k=5 * i) for i in range(6)],
    "everything": [
        SamplingParams(max_tokens=40, seed=i, logprobs=i, presence_penalty=0.5, min_tokens=3, logit_bias={1: 1.0})
        for i in range(6)
    ],
}


class TestTheHostRunsAhead:
    @pytest.mark.parametrize("mix", MIXES)
    @pytest.mark.parametrize("survivors", ["all", "some"])
    def test_overlap_hides_everything_but_the_sampled_ids(self, mix: str, survivors: str) -> None:
        engine, model = sleepy_engine()
        params = list(MIXES[mix])
        if survivors == "some":  # rows 0 and 3 end in the watched iteration, so that others move
            params[0] = params[0].replace(max_tokens=14)
            params[3] = params[3].replace(max_tokens=14)
        for i, one in enumerate(params):
            engine.add_request([1 + i, 2, 3], one)
        for _ in range(13):
            engine.step()
        model.awake = False
        engine.step()  # launches a forward that sleeps
        assert engine.pending is not None
        begin = time.perf_counter()
        run_phase(engine, Phase.PREPARE)
        assert engine.controller.current is not None
        assert engine.controller.current.order is Order.OVERLAP
        run_phase(engine, Phase.SAMPLE)
        run_phase(engine, Phase.FORWARD)
        enqueued_s = time.perf_counter() - begin
        next_forward = engine.device.compute.record()
        run_phase(engine, Phase.RESOLVE)
        run_phase(engine, Phase.EMIT)
        run_phase(engine, Phase.PREPARE)
        hidden = not next_forward.done()
        while engine.has_unfinished():
            model.awake = True
            engine.step()
        engine.close()

        assert enqueued_s < 0.010, f"the next forward was enqueued after {enqueued_s * 1e3:.1f} ms"
        assert hidden, "resolve, compaction, emit and the next prepare outlasted the device's 50 ms"
