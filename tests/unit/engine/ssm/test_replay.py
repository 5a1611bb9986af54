"""Rows that go back behind rejected tokens: replayed and stored states against a fresh scan of what stands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.ssm import TorchStateSpace
from engine.ssm import torch as backend_module
from engine.ssm.plan import Plan
from tests.planted_faults import wrap
from tests.ssm_batches import Sizes
from tests.ssm_rewinds import Rewinder, Story, Way

WAYS: list[Way] = ["stored", "replayed"]
SMALL = Sizes(heads=2, head_dim=3, groups=2, state=4)
TOLERANCE = {
    # Of the largest output, by the type that states are kept in; activations are float32, or float64 for the first.
    torch.float64: 1e-12,
    torch.float32: 2e-6,  # sums of some terms in another order
    torch.float16: 5e-4,  # a state is rounded to 11 bits once a forward, and decays
    torch.bfloat16: 4e-3,  # to 8 bits
}


def worst(
    way: Way,
    sizes: Sizes = SMALL,
    *,
    width: int = 3,
    seed: int = 0,
    steps: int = 8,
    kept: torch.dtype = torch.float64,
    spoils: bool = True,
) -> float:
    """The largest difference of an output from a fresh scan, of the largest output; NaN where a NaN came out."""
    dtype = torch.float64 if kept == torch.float64 else torch.float32
    rewinder = Rewinder(way, sizes, rows=3, width=width, dtype=dtype, state_dtype=kept)
    pairs = Story(rewinder, TorchStateSpace(), rows=3, seed=seed).run(steps, spoils=spoils)
    differences = [(found.double() - expected).abs().max() for found, expected in pairs]
    largest = max(float(expected.abs().max()) for _, expected in pairs)
    return float(torch.stack(differences).max()) / largest  # of NaN and numbers, NaN


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("conv", [2, 3, 4])
def test_any_counts_give_what_a_fresh_scan_gives(way: Way, width: int, conv: int) -> None:
    """Rows in any order, prompts and snapshots beside them; what is rejected, padding's or nobody's is NaN."""
    for seed in range(2):
        assert worst(way, replace(SMALL, width=conv), width=width, seed=seed, steps=5) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("groups", [1, 4])
def test_one_head_a_group_and_one_group_of_all(way: Way, groups: int) -> None:
    assert worst(way, replace(SMALL, heads=4, groups=groups), steps=5) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kept", [torch.float32, torch.float16, torch.bfloat16])
def test_states_are_kept_in_the_type_that_is_asked_for(way: Way, kept: torch.dtype) -> None:
    assert max(worst(way, kept=kept, seed=seed) for seed in range(3)) < TOLERANCE[kept]


def test_a_narrow_state_beside_wide_activations_is_widened_for_the_sums() -> None:
    rewinder = Rewinder("replayed", SMALL, rows=2, width=2, dtype=torch.float64, state_dtype=torch.float32)
    pairs = Story(rewinder, TorchStateSpace(), rows=2, seed=0).run(4)
    assert max(float((found - expected).abs().max()) for found, expected in pairs) < 1e-5
    assert rewinder.layer.ssm_state.dtype == torch.float32


def count_one_more(patch: pytest.MonkeyPatch) -> None:
    def replayed(real: Any, kept: Any, weights: Any, before: Any, plan: Plan) -> Any:
        more = plan.batch._replace(replayed_V=plan.batch.replayed_V + 1)  # type: ignore[operator]
        return real(kept, weights, before, Plan(more))

    wrap(patch, backend_module, "replayed_states", replayed)


def count_one_less(patch: pytest.MonkeyPatch) -> None:
    def replayed(real: Any, kept: Any, weights: Any, before: Any, plan: Plan) -> Any:
        fewer = plan.batch._replace(replayed_V=plan.batch.replayed_V - 1)  # type: ignore[operator]
        return real(kept, weights, before, Plan(fewer))

    wrap(patch, backend_module, "replayed_states", replayed)


def read_what_was_overwritten(patch: pytest.MonkeyPatch) -> None:
    def scan(real: Any, self: Any, inputs: Any, weights: Any, ssm_state: Any, batch: Any, kept: Any = None) -> Any:
        if batch.shape.num_replayed:
            backend_module.keep_inputs(kept, inputs, Plan(batch))
        return real(self, inputs, weights, ssm_state, batch, kept)

    wrap(patch, TorchStateSpace, "scan", scan)


def leave_no_inputs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backend_module, "keep_inputs", lambda *args: None)


def look_no_further_back_in_the_convolution(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Plan, "rejected_N", property(lambda self: torch.zeros_like(self.to_N)))


def leave_the_state_behind_all_tokens(patch: pytest.MonkeyPatch) -> None:
    """As if nothing were ever rejected."""

    def replayed(real: Any, kept: Any, weights: Any, before: Any, plan: Plan) -> Any:
        count_V = plan.batch.replayed_V
        assert count_V is not None
        everything = torch.where(count_V > 0, plan.batch.shape.wide_width, 0)
        return real(kept, weights, before, Plan(plan.batch._replace(replayed_V=everything)))

    wrap(patch, backend_module, "replayed_states", replayed)


@pytest.mark.parametrize(
    "plant",
    [
        count_one_more,
        count_one_less,
        read_what_was_overwritten,
        leave_no_inputs,
        look_no_further_back_in_the_convolution,
        leave_the_state_behind_all_tokens,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_is_seen(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no NaN gives it away."""
    plant(monkeypatch)
    assert not worst("replayed", spoils=False) < 1e-6
