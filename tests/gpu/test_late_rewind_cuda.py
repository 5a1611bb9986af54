"""Accepted counts that are waited for behind the next forward, on CUDA: the tokens of the CPU devices, and no wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine import EngineConfig, SamplingParams
from engine.batch import BatchShape
from engine.controller import Border
from engine.engine import Engine
from engine.invariants import check_device, check_idle
from engine.models.oracle import OracleModel
from engine.phases import Order, Phase
from engine.step_function import StepFunction
from tests.gpu.test_engine_cuda import LIMITS, MIX, PROMPTS
from tests.sync_debug import no_hidden_synchronisation

LATE = Order.MTP_OVERLAP_LATE
DEVICE = torch.device("cuda")


def run(model: str, **options: Any) -> tuple[list[tuple[Any, ...]], Engine]:
    engine = Engine.from_pretrained(model, EngineConfig(**{**LIMITS, **options}), progress=False)
    with engine:
        outputs = engine.generate(PROMPTS, MIX, progress=False)
        if engine.config.debug_invariants:
            check_device(engine)
        check_idle(engine)
    return [(o.token_ids, o.finish_reason) for o in outputs], engine


class TestSameTokens:
    @pytest.mark.parametrize("graphs", [None, -1])
    @pytest.mark.parametrize(("drafts", "rewind"), [(1, "stored"), (3, "stored"), (3, "replayed")])
    def test_lengths_on_the_device_change_no_token(self, drafts: int, rewind: str, graphs: int | None) -> None:
        expected, _ = run("oracle", device="inline", mode="legacy")

        options: dict[str, Any] = {"speculative_tokens": drafts, "state_rewind": rewind, "late_rewind": True}
        found, engine = run("oracle-mtp", device="cuda", graphs=graphs, **options)

        assert found == expected
        assert 0 < engine.counters.drafts_accepted[0] < engine.counters.drafts_proposed[0]
        assert engine.counters.orders[LATE.label] > 10

    @pytest.mark.parametrize("beside", [False, True])
    def test_prefixes_and_chunks_change_no_token(self, beside: bool) -> None:
        expected, _ = run("oracle", device="inline", mode="legacy")

        options: dict[str, Any] = {"speculative_tokens": 2, "prefix_caching": True, "chunked_prefill": True}
        found, engine = run(
            "oracle-mtp", device="cuda", graphs=-1, late_rewind=True, overlap_admission=beside, **options
        )

        assert found == expected
        assert engine.counters.orders[LATE.label] > 10

    def test_invariants_hold_at_every_border(self) -> None:
        expected, _ = run("oracle", device="inline", mode="legacy")

        found, _ = run(
            "oracle-mtp", device="cuda", graphs=-1, speculative_tokens=3, late_rewind=True, debug_invariants=True
        )

        assert found == expected

    @pytest.mark.parametrize("how", ["offload", "recompute"])
    def test_a_suspended_engine_goes_on(self, how: Any) -> None:
        expected, _ = run("oracle", device="inline", mode="legacy")
        config = EngineConfig(**LIMITS, device="cuda", speculative_tokens=2, late_rewind=True, graphs=-1)
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

    @pytest.mark.parametrize("graphs", [None, -1])
    @pytest.mark.parametrize("rewind", ["stored", "replayed"])
    def test_a_hybrid_in_float64_says_what_it_does_without_drafts(self, rewind: str, graphs: int | None) -> None:
        model = "shape:tiny-hybrid"
        expected, _ = run(model, device="cuda", mode="legacy", dtype="float64")

        options: dict[str, Any] = {"speculative_tokens": 2, "state_rewind": rewind, "late_rewind": True}
        found, engine = run(model, device="cuda", dtype="float64", graphs=graphs, **options)

        assert found == expected
        assert engine.counters.orders[LATE.label] > 0

    @pytest.mark.parametrize("model", ["shape:tiny-hybrid", "shipped"])
    def test_half_precision_runs_in_graphs(self, model: str) -> None:
        """bfloat16 changes tokens with the batch, so only that every request gets its tokens is asked for."""
        found, engine = run(model, device="cuda", dtype="bfloat16", graphs=-1, speculative_tokens=2, late_rewind=True)

        assert all(0 < len(ids) <= params.max_tokens for (ids, _), params in zip(found, MIX, strict=True))
        assert engine.counters.graph_hits > 0
        assert engine.counters.orders[LATE.label] > 0


class TestNoWait:
    def test_nothing_is_waited_for_before_the_next_forward_is_enqueued(self) -> None:
        config = EngineConfig(device="cuda", mode="async", graphs=-1, speculative_tokens=2, late_rewind=True, **LIMITS)
        checked = 0

        def begins_late(border: Border) -> bool:
            iteration = border.iteration
            return iteration.order is LATE and (border.phase, border.side) == (Phase.PREPARE, "before")

        with Engine.from_pretrained("oracle-mtp", config, progress=False) as engine:
            for prompt, params in zip(PROMPTS, MIX, strict=True):
                engine.add_request(prompt, params)
            while engine.has_unfinished():
                engine.step(until=begins_late)
                if engine.next_phase is not Phase.PREPARE:
                    continue
                with no_hidden_synchronisation():
                    borders = [engine.step_phase() for _ in range(4)]
                assert [border.phase for border in borders if border is not None] == list(LATE.phases[:4])
                assert engine.in_hand is not None
                assert engine.in_hand.num_tokens is None
                checked += 1
            assert engine.runner.speculator is not None
            waits = engine.runner.step_slab.num_waits + engine.runner.speculator.index_slab.num_waits

        assert checked > 10
        assert waits == 0

    def test_the_counts_are_on_their_way_while_the_next_forward_is_launched(self) -> None:
        """The device is kept busy ahead of verification, longer than a launch takes where nothing is compiled.

        Rows are plain, so that a few graphs are launched: behind some thousand launches CUDA lets the host wait.
        """
        config = EngineConfig(device="cuda", graphs=-1, speculative_tokens=2, late_rewind=True, **LIMITS)
        seen: list[bool] = []
        with Engine.from_pretrained("shape:tiny-hybrid", config, progress=False) as engine:
            for prompt in PROMPTS:
                engine.add_request(prompt, SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
            while engine.has_unfinished():
                border = engine.step_phase()
                while border is not None:
                    current = engine.controller.current
                    is_late = current is not None and current.order is LATE
                    if is_late and engine.next_phase is Phase.VERIFY:
                        engine.device.compute.launch(lambda: torch.cuda._sleep(100_000_000))
                    if is_late and border.phase is Phase.FORWARD:
                        assert current.verified is not None
                        seen.append(current.verified.accepted_ready.done())
                    border = engine.step_phase()

        assert len(seen) > 5
        assert not all(seen)


class TestInputs:
    @pytest.mark.parametrize("has_states", [False, True])
    @pytest.mark.parametrize("counts_lengths", [False, True])
    def test_made_by_one_kernel_are_those_that_torch_makes(self, counts_lengths: bool, has_states: bool) -> None:
        shape = BatchShape(num_tokens=20, num_decode=5, num_prefill=0, max_query_len=0, num_kv_blocks=7, decode_width=4)
        model = OracleModel(device=DEVICE, num_draft_heads=3, is_recurrent=has_states)
        step = StepFunction(model, 4, shape, num_drafts=3, counts_lengths=counts_lengths)
        plain, columns, states = random_inputs(has_states=has_states)

        batch, found_states, before_T = step._fused_drafting_batch(plain, columns, states)

        expected, expected_states, expected_before_T = step._drafting_batch(plain, columns, states)
        for name, wanted in expected._asdict().items():
            found = getattr(batch, name)
            is_same = torch.equal(found, wanted) if isinstance(wanted, torch.Tensor) else found == wanted
            assert is_same, f"{name}: {found}, not {wanted}"
        assert torch.equal(before_T, expected_before_T)
        assert len(found_states) == len(expected_states)
        pairs = zip(found_states, expected_states, strict=True)
        assert all(torch.equal(found, wanted) for found, wanted in pairs)


def random_inputs(
    *, has_states: bool
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Of three rows and two of padding, three drafts each, in a table of six rows of eight blocks of four tokens."""
    generator = torch.Generator().manual_seed(5)

    def drawn(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator)

    row_N, dummy = torch.tensor([4, 0, 2, 6, 6]), 6
    is_real_N = row_N != dummy
    length_R, kv_len_N = drawn(1, 25, 7), torch.where(is_real_N, drawn(4, 28, 5), 4)
    block_table = drawn(0, 90, 7, 8).to(torch.int32)
    block_table[dummy] = 99
    ids_NW = torch.where(is_real_N[:, None], torch.tensor([-1, -2, -3, -4]), 0)
    positions_NW = torch.where(is_real_N[:, None], kv_len_N[:, None] - 4 + torch.arange(4), 0)
    plain = [
        ids_NW.flatten(),
        positions_NW.flatten(),
        row_N.repeat_interleave(4),
        torch.arange(5).repeat_interleave(4),
        row_N,
        torch.arange(5) * 4,
        torch.full((5,), 4),
        kv_len_N,
        torch.arange(20),
        torch.full((5,), -1),
    ]
    ints = drawn(0, 60, 7, 5).to(DEVICE)  # the newest token is a column of five
    on_device = [tensor.to(DEVICE) for tensor in plain]
    columns = [drawn(0, 60, 7, 3), length_R, drawn(-1, 4, 7)]
    states = [drawn(0, 40, 5) for _ in range(2)] + [drawn(0, 5, 4) for _ in range(3)] if has_states else []
    return (
        (*on_device, ints[:, 0], block_table.to(DEVICE)),
        tuple(tensor.to(DEVICE) for tensor in columns),
        tuple(tensor.to(DEVICE) for tensor in states),
    )
