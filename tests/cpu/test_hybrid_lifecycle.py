"""Hybrids with draft heads on real weights: new weights forget the states of old ones, threads change no token."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.cache.snapshots import SnapshotIndex
from engine.engine import Engine
from engine.invariants import check_device, check_idle
from engine.models.loader import LoadedModel, load_model
from tests.changed_shapes import TWO_LAYERS, changed_shape
from tests.checkpoints import write_checkpoint
from tests.cpu.models.test_hybrid_families import VARIANTS
from tests.cpu.test_engine_hybrids import MIX, prompts

LIMITS: dict[str, Any] = {
    "device": "inline",
    "block_size": 4,
    "num_blocks": 60,
    "max_requests": 4,
    "max_batch_tokens": 10,
    "chunked_prefill": True,
    "max_sequence_length": 48,
    "prefix_caching": True,
    "debug_invariants": True,
}
SERVING: dict[str, Any] = {
    "max_requests": 4,
    "max_batch_tokens": 40,
    "chunked_prefill": True,
    "max_sequence_length": 192,
    "num_blocks": 50,
    "debug_invariants": True,
}
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
SHARED = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]
PROMPTS = [SHARED, [*SHARED, 20, 21], [3, 4]]


# -- new weights -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two checkpoints of one model, of the variant that is asked for."""
    root, (architecture, keys) = tmp_path_factory.mktemp("weights"), VARIANTS[request.param]
    return [write_checkpoint(root / str(seed), architecture, **{**keys, "seed": seed}) for seed in (1, 2)]


def load(folder: Path) -> LoadedModel:
    return load_model(folder, dtype=torch.float64)


@cache
def answers(folder: Path) -> list[tuple[int, ...]]:
    """Of an engine that never had other weights, each prompt computed whole."""
    with Engine(load(folder), EngineConfig(**{**LIMITS, "prefix_caching": False})) as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, GREEDY, progress=False)]


def snapshots(engine: Engine) -> SnapshotIndex:
    assert engine.prefix_cache is not None
    assert engine.prefix_cache.snapshots is not None
    return engine.prefix_cache.snapshots


def change_weights(engine: Engine, how: str, folder: Path) -> None:
    engine.pause() if how == "pause" else engine.suspend(how)
    engine.load_weights(folder)
    assert len(snapshots(engine)) == 0
    engine.resume()


class TestNewWeights:
    @pytest.mark.parametrize("how", ["pause", "offload", "recompute"])
    @pytest.mark.parametrize(
        ("folders", "steps"),
        [*(("nemotron", steps) for steps in (1, 2, 3, 5)), ("mamba2", 2), ("bamba", 3), ("granite", 2)],
        indirect=["folders"],
    )
    def test_make_the_prefix_cache_forget_states_also_of_rows_that_are_half_read(
        self, folders: list[Path], how: str, steps: int
    ) -> None:
        """A block's name says tokens and not weights: a state that stayed would be found by the next such prompt."""
        config = EngineConfig(**LIMITS)
        with Engine(load(folders[0]), config) as engine:
            engine.generate(PROMPTS[:1], GREEDY, progress=False)
            for tail in ([30] * 9, [34] * 17):
                engine.add_request([*SHARED, *tail], GREEDY)
            for _ in range(steps):
                engine.step()
            assert len(snapshots(engine)) > 0
            change_weights(engine, how, folders[1])
            while engine.has_unfinished():
                engine.step()
            fresh, again = (
                [engine.generate([prompt], GREEDY, progress=False)[0] for prompt in PROMPTS] for _ in range(2)
            )
            check_idle(engine)
            check_device(engine)
        expected = answers(folders[1])
        assert [output.token_ids for output in fresh] == expected
        assert [output.token_ids for output in again] == expected
        assert [output.num_cached_tokens for output in again] == [12, 12, 0], "states of the new weights are kept"
        assert answers(folders[0]) != expected


# -- threads -----------------------------------------------------------------------------------------------------------


@cache
def few_ids() -> LoadedModel:
    """So few that random heads foresee some."""
    return changed_shape("tiny-hybrid", torch.float64, **TWO_LAYERS, vocab_size=8)


def serve(device: str, **options: Any) -> tuple[list[tuple[Any, ...]], dict[str, int]]:
    """Requests of every kind that come while others run: ids, ends and log probabilities; how often each order ran."""
    config = EngineConfig(**{**SERVING, "device": device, "speculative_tokens": 2, **options})
    with Engine(few_ids(), config) as engine:
        names, ended = [], {}
        for prompt, params in zip(prompts(few_ids().vocab_size), MIX, strict=True):
            names.append(engine.add_request(prompt, params))
            ended |= {output.request_id: output for output in engine.step()}
        while engine.has_unfinished():
            ended |= {output.request_id: output for output in engine.step()}
        check_idle(engine)
        assert engine.counters.drafts_accepted.total() > 0
        orders = dict(engine.counters.orders)
    told = [ended[name] for name in names]
    return [(one.token_ids, one.finish_reason, one.logprobs, one.prompt_logprobs) for one in told], orders


class TestThreads:
    @pytest.mark.parametrize("mode", ["async", "legacy"])
    @pytest.mark.parametrize("late", [False, True], ids=["counts awaited", "counts stay"])
    @pytest.mark.parametrize("rewind", ["stored", "replayed"])
    def test_draft_verify_and_rewind_as_the_callers_own_does(self, mode: str, late: bool, rewind: str) -> None:
        options = {"mode": mode, "late_rewind": late, "state_rewind": rewind, "overlap_admission": True}

        inline, inline_orders = serve("inline", **options)
        threads, orders = serve("cpu", op_sleep_s=0.001, **options)

        assert threads == inline
        assert orders == inline_orders
        if mode == "async":
            assert sum(count for name, count in orders.items() if "overlap" in name and "no_" not in name) > 10
