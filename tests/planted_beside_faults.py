"""Faults of prompts that enter while tokens are unresolved; as ``planted_state_faults``.

Those of rows that are kept beyond their end need a newcomer in one iteration of one length: :func:`play_kept` is that.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.controller import Controller
from engine.request import SamplingParams
from engine.table import RequestTable
from tests.oracle_world import World
from tests.planted_faults import Fault, Patch, wrap
from tests.planted_state_faults import DRAFTS


def rows_released_because_nothing_is_pending(patch: Patch) -> None:
    """Between verify and forward nothing is, but the verified tokens have not been given out."""

    def admit(real: Any, self: Controller, iteration: Any) -> None:
        if self.pending is None:
            self._end_aborted(iteration)
            self._release(iteration)
            self._make_room(iteration)
        iteration.admitted = self.queue.admit()

    wrap(patch, Controller, "_admit", admit)


def prompts_that_the_verified_forward_has_read_are_read_again(patch: Patch) -> None:
    def let_decode(real: Any, self: Controller, iteration: Any) -> None:
        if iteration.verified is None:
            real(self, iteration)

    wrap(patch, Controller, "_let_read_prompts_decode", let_decode)


def newcomers_decode_before_they_are_read(patch: Patch) -> None:
    def let_decode(real: Any, self: Controller, iteration: Any) -> None:
        real(self, iteration)
        if iteration.verified is not None and iteration.order.is_overlap:
            self.table.is_prefill[self.table.num_paused : self.table.num_live] = False

    wrap(patch, Controller, "_let_read_prompts_decode", let_decode)


def newcomers_stand_in_front(patch: Patch) -> None:
    """Rows change places in admit, whatever is to be given out by row."""

    def add(real: Any, self: RequestTable, *args: Any, **options: Any) -> int:
        row: int = real(self, *args, **options)
        first = self.num_paused
        if row > first:
            order = np.arange(self.num_live)
            order[[first, row]] = order[[row, first]]
            self.rearrange(order, num_paused=first)
        return first

    wrap(patch, RequestTable, "add", add)


def ending_rows_take_what_was_promised(patch: Patch) -> None:
    patch.setattr(Controller, "_is_set_aside", lambda self, rows: np.ones(rows.size, dtype=np.bool_))


def play_kept(world: World) -> None:
    """A request ends where its blocks do, and beside its last forward another enters that needs all others."""
    drafts = world.engine.config.speculative_tokens
    params = SamplingParams(max_tokens=5 - 2 * drafts, temperature=0.0, seed=1, ignore_eos=True, detokenize=False)
    for steps in range(1, 7):
        world.submit([3, 13, 37, 11], params)
        for _ in range(steps):
            world.step()
        world.submit([5, 15, 39, 13, 1, 3, 19, 49], params.replace(max_tokens=1))
        world.drain()


BESIDE: dict[str, Any] = {**DRAFTS, "mode": "async", "overlap_admission": True}

BESIDE_FAULTS = [
    Fault("rows released because nothing is pending", rows_released_because_nothing_is_pending, BESIDE),
    Fault("read prompts read again", prompts_that_the_verified_forward_has_read_are_read_again, BESIDE),
    Fault("newcomers decode before they are read", newcomers_decode_before_they_are_read, BESIDE),
    Fault("newcomers stand in front", newcomers_stand_in_front, BESIDE),
]

KEPT: dict[str, Any] = {"launch_ending_rows": True, "num_blocks": 4, "max_sequence_length": 20}
KEPT_DRAFTS: dict[str, Any] = {
    **KEPT,
    "num_blocks": 5,
    "kind": "drafting",
    "speculative_tokens": 1,
    "skill": "right",
    "late_rewind": False,
}

KEPT_FAULTS = [
    Fault("ending rows take what was promised", ending_rows_take_what_was_promised, KEPT),
    Fault("ending rows with drafts take what was promised", ending_rows_take_what_was_promised, KEPT_DRAFTS),
]
