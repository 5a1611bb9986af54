"""Faults of lengths that the device counts while the host knows bounds; as ``planted_state_faults``."""

from __future__ import annotations

from typing import Any

from engine import controller as controller_module
from engine.columns import DeviceColumns
from engine.controller import Controller
from engine.phases import Order
from engine.speculative import Verified
from engine.step_function import StepFunction
from engine.table import RequestTable
from tests.planted_faults import Fault, Patch, wrap
from tests.planted_state_faults import DRAFTS


def bounds_read_as_lengths(patch: Patch) -> None:
    patch.setattr(StepFunction, "_with_lengths", lambda self, plain, length_R: plain)


def positions_right_and_lengths_bounds(patch: Patch) -> None:
    def lengths(real: Any, self: StepFunction, plain: Any, length_R: Any) -> Any:
        return (*real(self, plain, length_R)[:7], *plain[7:])

    wrap(patch, StepFunction, "_with_lengths", lengths)


def lengths_of_before_the_verification(patch: Patch) -> None:
    """As if the forward were enqueued ahead of the verification whose counts it reads."""

    def lengths(real: Any, self: StepFunction, plain: Any, length_R: Any) -> Any:
        return real(self, plain, length_R - 1)

    wrap(patch, StepFunction, "_with_lengths", lengths)


def state_behind_the_newest_token_alone(patch: Patch) -> None:
    patch.setattr(StepFunction, "_with_accepted", lambda self, states, table_row, accepted_R: states)


def accepted_counts_do_not_move_on_the_device(patch: Patch) -> None:
    def columns(real: Any, self: DeviceColumns) -> Any:
        return [column for column in real(self) if column is not self.accepted]

    wrap(patch, DeviceColumns, "_all", columns)


def drafts_of_the_launched_forward_taken_back_too(patch: Patch) -> None:
    def rewind(real: Any, verified: Verified, table: RequestTable) -> Any:
        before = table.kv_len.copy()
        counts = real(verified, table)
        table.kv_len[:] -= before - table.kv_len
        return counts

    wrap(patch, controller_module, "rewind", rewind)


def blocks_beyond_those_set_aside(patch: Patch) -> None:
    patch.setattr(Controller, "_may_grow", lambda self, index: True)


def rows_launched_that_end_whatever_is_accepted(patch: Patch) -> None:
    def continuing(real: Any, self: Controller) -> Any:
        current = self.current
        is_late = current is not None and current.order is Order.MTP_OVERLAP_LATE
        return self.table.active_rows if is_late else real(self)

    wrap(patch, Controller, "_continuing_rows", continuing)


LATE = {**DRAFTS, "late_rewind": True}
RESERVED = {"max_sequence_length": 40, "num_blocks": 18, "kind": "mtp", "speculative_tokens": 3, "late_rewind": True}

LATE_FAULTS = [
    Fault("bounds read as lengths", bounds_read_as_lengths, LATE),
    Fault("positions right and lengths bounds", positions_right_and_lengths_bounds, LATE),
    Fault("lengths of before the verification", lengths_of_before_the_verification, LATE),
    Fault("state behind the newest token alone", state_behind_the_newest_token_alone, LATE),
    Fault("accepted counts do not move on the device", accepted_counts_do_not_move_on_the_device, LATE),
    Fault("drafts of the launched forward taken back too", drafts_of_the_launched_forward_taken_back_too, LATE),
    Fault("blocks beyond those set aside", blocks_beyond_those_set_aside, RESERVED),
    Fault("rows launched that end whatever is accepted", rows_launched_that_end_whatever_is_accepted, LATE),
]
