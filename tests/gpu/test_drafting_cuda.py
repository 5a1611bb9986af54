"""Draft heads and recurrent states on CUDA: the tokens of the CPU devices, and one wait before the next forward."""

from __future__ import annotations

from typing import Any

import pytest

from engine import EngineConfig
from engine.engine import Engine
from engine.invariants import check_device, check_idle
from engine.phases import Order, Phase
from tests.gpu.test_engine_cuda import LIMITS, MIX, PROMPTS
from tests.sync_debug import no_hidden_synchronisation


def run(model: str, **options: Any) -> tuple[list[tuple[Any, ...]], Engine]:
    engine = Engine.from_pretrained(model, EngineConfig(**{**LIMITS, **options}), progress=False)
    with engine:
        outputs = engine.generate(PROMPTS, MIX, progress=False)
        if engine.config.debug_invariants:
            check_device(engine)
        check_idle(engine)
    return [(o.token_ids, o.finish_reason) for o in outputs], engine


class TestSameTokens:
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    @pytest.mark.parametrize("graphs", [None, -1])
    @pytest.mark.parametrize(
        ("drafts", "rewind"), [(0, "stored"), (1, "stored"), (3, "stored"), (1, "replayed"), (3, "replayed")]
    )
    def test_drafts_and_states_change_no_token(self, mode: str, graphs: int | None, drafts: int, rewind: str) -> None:
        expected, _ = run("oracle", device="inline", mode="legacy")

        options: dict[str, Any] = {"speculative_tokens": drafts, "state_rewind": rewind}
        found, engine = run("oracle-mtp", device="cuda", mode=mode, graphs=graphs, **options)

        assert found == expected
        if drafts:
            assert 0 < engine.counters.drafts_accepted[0] < engine.counters.drafts_proposed[0]

    @pytest.mark.parametrize(("drafts", "rewind"), [(0, "stored"), (2, "stored"), (2, "replayed")])
    def test_prefixes_are_skipped_with_their_states(self, drafts: int, rewind: str) -> None:
        expected, _ = run("oracle", device="inline", mode="legacy")

        options: dict[str, Any] = {"prefix_caching": True, "speculative_tokens": drafts, "state_rewind": rewind}
        with Engine.from_pretrained(
            "oracle-mtp", EngineConfig(**{**LIMITS, **options, "device": "cuda"}), progress=False
        ) as engine:
            first = engine.generate(PROMPTS, MIX, progress=False)
            again = engine.generate(PROMPTS, MIX, progress=False)

        assert [(o.token_ids, o.finish_reason) for o in first] == expected
        assert [(o.token_ids, o.finish_reason) for o in again] == expected
        assert engine.counters.prefix_hit_tokens > 0

    @pytest.mark.parametrize("how", ["offload", "recompute"])
    @pytest.mark.parametrize("rewind", ["stored", "replayed"])
    def test_a_suspended_engine_goes_on(self, how: Any, rewind: Any) -> None:
        expected, _ = run("oracle", device="inline", mode="legacy")
        options: dict[str, Any] = {"speculative_tokens": 2, "prefix_caching": True, "state_rewind": rewind}
        config = EngineConfig(**LIMITS, device="cuda", **options)
        with Engine.from_pretrained("oracle-mtp", config, progress=False) as engine:
            ids = [engine.add_request(prompt, params) for prompt, params in zip(PROMPTS, MIX, strict=True)]
            done = {}
            for iteration in range(10_000):
                if not engine.has_unfinished():
                    break
                if iteration in (3, 9):
                    engine.suspend(how)
                    engine.resume()
                done.update({o.request_id: o for o in engine.step() if o.finished})

        assert [(done[one].token_ids, done[one].finish_reason) for one in ids] == expected


class TestOneWait:
    def test_nothing_but_the_accepted_counts_is_waited_for(self) -> None:
        config = EngineConfig(device="cuda", graphs=-1, speculative_tokens=2, late_rewind=False, **LIMITS)
        checked = 0
        with Engine.from_pretrained("oracle-mtp", config, progress=False) as engine:
            for prompt, params in zip(PROMPTS, MIX, strict=True):
                engine.add_request(prompt, params)
            while engine.has_unfinished():
                border = engine.step_phase()
                while border is not None:
                    current = engine.controller.current
                    is_overlap = current is not None and current.order in (Order.MTP_OVERLAP, Order.MTP_OVERLAP_ADMIT)
                    if is_overlap and engine.next_phase is not None:
                        with no_hidden_synchronisation():
                            border = engine.step_phase()
                        checked += engine.next_phase is Phase.FORWARD
                    else:
                        border = engine.step_phase()

        assert checked > 10


class TestHalfPrecision:
    @pytest.mark.parametrize("model", ["shape:tiny-hybrid", "shape:tiny-moe"])
    def test_hybrids_and_experts_run_in_graphs(self, model: str) -> None:
        """bfloat16 changes tokens with the batch, so only that every request gets all of its tokens is asked for."""
        found, engine = run(model, device="cuda", dtype="bfloat16", graphs=-1)

        assert [len(ids) for ids, _ in found] == [params.max_tokens for params in MIX]
        assert engine.counters.graph_hits > 0

    @pytest.mark.parametrize("model", ["shape:tiny-hybrid", "shipped"])
    @pytest.mark.parametrize("state_dtype", ["auto", "bfloat16"])
    def test_states_are_replayed_in_graphs(self, model: str, state_dtype: str) -> None:
        options: dict[str, Any] = {"speculative_tokens": 2, "state_rewind": "replayed"}
        found, engine = run(model, device="cuda", dtype="bfloat16", graphs=-1, mamba_state_dtype=state_dtype, **options)

        assert all(len(ids) <= params.max_tokens for (ids, _), params in zip(found, MIX, strict=True))
        assert engine.counters.graph_hits > 0
        assert sum(engine.counters.drafts_proposed.values()) > 0

    @pytest.mark.parametrize(
        ("model", "drafts", "rewind"),
        [
            ("shape:tiny-hybrid", 0, "stored"),
            ("shape:tiny-hybrid", 2, "stored"),
            ("shape:tiny-hybrid", 2, "replayed"),
            ("shape:tiny-moe", 0, "stored"),
        ],
    )
    @pytest.mark.parametrize("graphs", [None, -1])
    def test_float64_is_the_same_in_both_modes(self, model: str, drafts: int, rewind: str, graphs: int | None) -> None:
        expected, _ = run(model, device="cuda", mode="legacy", dtype="float64")

        options: dict[str, Any] = {"speculative_tokens": drafts, "state_rewind": rewind}
        found, engine = run(model, device="cuda", dtype="float64", graphs=graphs, **options)

        assert found == expected
        assert (sum(engine.counters.drafts_proposed.values()) > 0) is (drafts > 0)
