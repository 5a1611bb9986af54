"""How the states of real recurrent layers are kept: replayed for stored, narrow for wide, and what each takes."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.errors import ConfigError
from engine.invariants import check_idle
from engine.models.base import StateOptions
from engine.models.hybrid import HybridModel
from engine.models.hybrid_config import LayerKind
from engine.models.hybrid_families import read_hybrid
from engine.models.loader import LoadedModel, load_model
from engine.models.shapes import shape_config
from engine.step_function import bytes_per_slot, layer_states
from tests.changed_shapes import TWO_LAYERS, changed_shape
from tests.cpu.test_engine_hybrids import MIX, prompts

SERVING: dict[str, Any] = {
    "device": "inline",
    "max_requests": 4,
    "max_batch_tokens": 160,
    "max_sequence_length": 144,
    "num_blocks": 50,
    "debug_invariants": True,
}
LOGPROB_TOLERANCE = {
    # Of the likelihoods of a float32 model's own tokens, by the type of its states; a state is rounded once a step.
    "float16": 2e-3,
    "bfloat16": 2e-2,
}
RECORD = Path(__file__).parents[2] / "docs/decisions/0015-recurrent-states.md"


@cache
def few_ids() -> LoadedModel:
    """So few that random heads foresee some."""
    return changed_shape("tiny-hybrid", torch.float64, **TWO_LAYERS, vocab_size=8)


def serve(
    *, suspends: str | None = None, aborts: int | None = None, **options: Any
) -> tuple[list[tuple[Any, ...]], Engine]:
    """Requests that come while others run; what each got but the one that is aborted after a few steps."""
    loaded = few_ids()
    engine = Engine(loaded, EngineConfig(**{**SERVING, **options}))
    names, ended, step = [], {}, 0
    for prompt, params in zip(prompts(loaded.vocab_size), MIX, strict=True):
        names.append(engine.add_request(prompt, params))
        ended |= {output.request_id: output for output in engine.step()}
    while engine.has_unfinished():
        step += 1
        if suspends is not None and step in (2, 5):
            engine.suspend(suspends)  # type: ignore[arg-type]
            engine.resume()
        if step == 3 and aborts is not None:
            engine.abort(names[aborts])
        ended |= {output.request_id: output for output in engine.step()}
    check_idle(engine)
    told = [ended[name] for number, name in enumerate(names) if number != aborts]
    return [(one.token_ids, one.finish_reason, one.prompt_logprobs is None) for one in told], engine


@cache
def expected() -> list[tuple[Any, ...]]:
    return serve()[0]


class TestReplay:
    @pytest.mark.parametrize(
        "options",
        [
            {"speculative_tokens": 1},
            {"mode": "legacy"},
            {"chunked_prefill": True, "max_batch_tokens": 15},
            {"prefix_caching": True, "block_size": 4, "num_blocks": 160},
            {"capacity_policy": "max_utilization", "block_size": 4, "num_blocks": 28},
            {"graphs": (12,), "graph_non_decode": False, "device": "cpu"},
            {"suspends": "persist"},
            {"suspends": "offload"},
            {"suspends": "recompute"},
            {"launch_ending_rows": True},
        ],
        ids=lambda options: ", ".join(map(str, options)),
    )
    def test_and_stored_states_give_the_tokens_of_no_drafts(self, options: dict[str, Any]) -> None:
        for rewind in ("replayed",) if "graphs" in options else ("stored", "replayed"):
            found, engine = serve(**{"speculative_tokens": 2, "state_rewind": rewind, **options})
            assert found == expected()
            proposed, accepted = engine.counters.drafts_proposed, engine.counters.drafts_accepted
            assert 0 < accepted.total() < proposed.total()
            assert (engine.counters.evictions > 0) is ("capacity_policy" in options)

    def test_goes_on_where_a_neighbour_is_aborted(self) -> None:
        plain, _ = serve(aborts=1)

        found, _ = serve(aborts=1, speculative_tokens=2, state_rewind="replayed")

        assert found == plain

    def test_takes_one_state_a_row_and_says_so(self) -> None:
        _, stored = serve(speculative_tokens=2, state_rewind="stored")
        _, replayed = serve(speculative_tokens=2, state_rewind="replayed")

        assert [len(engine.runner.cache_tensors[1]) for engine in (stored, replayed)] == [13, 5]
        assert (stored.resolved.config.state_rewind, replayed.resolved.config.state_rewind) == ("stored", "replayed")

    def test_is_what_auto_means_where_the_backend_computes_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        _, engine = serve(speculative_tokens=2)
        assert engine.resolved.config.state_rewind == "replayed"

        loaded = few_ids()
        assert isinstance(loaded.model, HybridModel)
        monkeypatch.setattr(loaded.model.ssm, "can_replay", False)
        with Engine(loaded, EngineConfig(**SERVING, speculative_tokens=1)) as engine:
            assert engine.resolved.config.state_rewind == "stored"

    def test_is_refused_where_the_backend_does_not_compute_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loaded = few_ids()
        assert isinstance(loaded.model, HybridModel)
        monkeypatch.setattr(loaded.model.ssm, "can_replay", False)
        monkeypatch.setattr(loaded.model.ssm, "name", "mamba_ssm")

        with pytest.raises(ConfigError, match="not computed by ssm_backend='mamba_ssm'; use ssm_backend='triton' or"):
            Engine(loaded, EngineConfig(**SERVING, speculative_tokens=1, state_rewind="replayed"))


class TestStateType:
    @pytest.mark.parametrize("rewind", ["stored", "replayed"])
    @pytest.mark.parametrize("kept", ["float16", "bfloat16"])
    def test_of_half_the_size_moves_likelihoods_by_little(self, kept: str, rewind: str) -> None:
        loaded, params = load_model("shipped", dtype=torch.float32), SamplingParams(max_tokens=1, prompt_logprobs=0)
        prompt = [1 + 7 * place % 200 for place in range(60)]

        def likelihoods(dtype: str) -> list[float]:
            config = EngineConfig(
                device="inline",
                max_requests=2,
                max_batch_tokens=16,
                chunked_prefill=True,
                max_sequence_length=128,
                speculative_tokens=2,
                state_rewind=rewind,  # type: ignore[arg-type]
                mamba_state_dtype=dtype,  # type: ignore[arg-type]
            )
            with Engine(loaded, config) as engine:
                assert engine.resolved.state_dtype == ("float32" if dtype == "auto" else dtype)
                (output,) = engine.generate([prompt], params, progress=False)
            assert output.prompt_logprobs is not None
            return [row[token] for row, token in zip(output.prompt_logprobs[1:], prompt[1:], strict=True) if row]

        wide, narrow = likelihoods("auto"), likelihoods(kept)
        differences = [abs(one - other) for one, other in zip(wide, narrow, strict=True)]
        assert 0 < max(differences) < LOGPROB_TOLERANCE[kept]

    def test_that_is_wide_enough_changes_no_token(self) -> None:
        found, engine = serve(mamba_state_dtype="float32", speculative_tokens=2, state_rewind="replayed")

        assert found == expected()
        assert engine.runner.cache_tensors[1].dtype == torch.float32

    def test_halves_what_states_take(self) -> None:
        sizes = [
            bytes_per_slot(layer_states(few_ids().model, 0, StateOptions(dtype=dtype)))
            for dtype in (torch.float32, torch.bfloat16)
        ]
        elements = TWO_LAYERS["mamba_num_heads"] * TWO_LAYERS["mamba_head_dim"] * TWO_LAYERS["ssm_state_size"]
        assert sizes[0] - sizes[1] == 2 * elements

    def test_means_nothing_without_recurrent_layers(self) -> None:
        loaded = load_model("shape:tiny", dtype=torch.float32)
        with Engine(loaded, EngineConfig(**SERVING, mamba_state_dtype="bfloat16")) as engine:
            assert engine.resolved.state_dtype == ""

    def test_is_one_of_a_few(self) -> None:
        with pytest.raises(ConfigError, match="mamba_state_dtype must be one of auto, float32, bfloat16, float16"):
            EngineConfig(mamba_state_dtype="int8")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="state_rewind must be one of auto, stored, replayed; got 'both'"):
            EngineConfig(state_rewind="both")  # type: ignore[arg-type]


def mebibytes(shape: str, drafts: int, *, replays: bool, kept: torch.dtype) -> float:
    """What a row's slot takes in a bfloat16 model of that shape."""
    config = read_hybrid(shape_config(shape))
    options = StateOptions(replay_width=drafts + 1 if replays else 0, dtype=kept)
    layers = sum(spec.kind is LayerKind.MAMBA for spec in config.layers)
    states = 1 if replays else drafts + 1
    return states * layers * config.mamba.slot_state(torch.bfloat16, options).bytes_per_slot() / 2**20


def test_the_decision_record_tells_what_a_row_takes() -> None:
    """Its table: shape, drafts, MiB stored and replayed with float32 states, and with bfloat16 ones."""
    number = r"\s*([\d.]+)\s*\|"
    rows = re.findall(rf"^\| (nemotron-h-4b|hybrid-2b) \| (\d) \|{number * 4}", RECORD.read_text("utf-8"), re.MULTILINE)
    assert [(shape, int(drafts)) for shape, drafts, *_ in rows] == [
        (shape, drafts) for shape in ("nemotron-h-4b", "hybrid-2b") for drafts in (1, 2)
    ]
    for shape, drafts, *told in rows:
        found = [
            mebibytes(shape, int(drafts), replays=replays, kept=kept)
            for kept in (torch.float32, torch.bfloat16)
            for replays in (False, True)
        ]
        assert [float(one) for one in told] == pytest.approx(found, abs=0.05)
