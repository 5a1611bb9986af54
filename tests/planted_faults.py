"""Faults to be planted in the engine by monkeypatching; test_planted_faults.py wants each to be noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from engine import columns as columns_module
from engine import controller as controller_module
from engine import plan as plan_module
from engine import resolution as resolution_module
from engine import runner as runner_module
from engine.admission import Capacity, RequestQueue
from engine.cache.blocks import BlockPool
from engine.columns import DeviceColumns
from engine.controller import Controller
from engine.device_host import ThreadStream
from engine.emission import OutputEmitter
from engine.phases import Order, Phase, Reason
from engine.results import ResultBuffers
from engine.runner import Runner
from engine.sample_launcher import SampleLauncher
from engine.sampling.torch import TorchSampler
from engine.staging import Slab
from engine.table import RequestTable

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    """How to plant it, and the world in which it does harm."""

    name: str
    plant: Callable[[Patch], None]
    options: dict[str, Any] = field(default_factory=dict)
    text: bool = False
    slow: dict[str, float] = field(default_factory=dict)
    """Seconds that work of a name takes longer on the device, where harm is a matter of time."""


def wrap(patch: Patch, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``around(real, *its arguments)``."""
    real = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: around(real, *args, **kwargs))


def early_free(patch: Patch) -> None:
    def resolve(real: Any, self: Controller, iteration: Any) -> None:
        real(self, iteration)
        if self.table.num_live:
            self.pool.release(self.table.held_blocks(np.array([0])))

    wrap(patch, Controller, "_resolve", resolve)


def leaked_block(patch: Patch) -> None:
    wrap(patch, BlockPool, "release", lambda real, self, ids: real(self, ids[1:]))


def fixed_host_column(name: str) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        def keep(real: Any, self: RequestTable, alive: Any) -> Any:
            before = getattr(self, name).copy()
            moves = real(self, alive)
            getattr(self, name)[moves.target] = before[moves.target]
            return moves

        wrap(patch, RequestTable, "keep", keep)

    return plant


def fixed_device_column(name: str) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        def move(real: Any, self: DeviceColumns, source: Any, target: Any) -> None:
            column = getattr(self, name)
            before = None if column is None else column.clone()
            real(self, source, target)
            if column is not None:
                column[target] = before[target]

        wrap(patch, DeviceColumns, "move", move)

    return plant


def no_event_before_the_copy(patch: Patch) -> None:
    patch.setattr(ThreadStream, "wait_for", lambda self, event: None)


def half_reused_without_its_event(patch: Patch) -> None:
    patch.setattr(Slab, "acquire", lambda self: self._halves.both[0])


def pending_kept_over_reset(patch: Patch) -> None:
    def drop(real: Any, self: Controller) -> None:
        pending = self.pending
        real(self)
        self.pending = pending

    wrap(patch, Controller, "drop_pending", drop)


def one_token_too_many(patch: Patch) -> None:
    def end_of(real: Any, request: Any, eos: Any) -> Any:
        end = real(request, eos)
        is_last = end is not None and end[0] == "length" and len(request.output_ids) == request.max_new_tokens
        return None if is_last else end

    wrap(patch, resolution_module, "end_of", end_of)


def length_measured_one_late(patch: Patch) -> None:
    def add(real: Any, self: RequestTable, *args: Any, **kwargs: Any) -> Any:
        row = real(self, *args, **kwargs)
        self.num_output[row] += 1
        return row

    wrap(patch, RequestTable, "add", add)


def sampling_behind_the_next_forward(patch: Patch) -> None:
    held: list[tuple[Any, ...]] = []
    is_overlap = [False]

    def sample(real: Any, self: Controller, iteration: Any) -> None:
        is_overlap[0] = iteration.order is Order.OVERLAP and iteration.plan is not None
        real(self, iteration)
        is_overlap[0] = False

    def launch(real: Any, self: Runner, stream: Any, name: str, work: Any, *rest: Any) -> Any:
        if is_overlap[0]:
            held.append((self, stream, name, work))
            return None
        timing = real(self, stream, name, work, *rest)
        if name == "forward":
            for late in held:
                real(*late)
            held.clear()
        return timing

    wrap(patch, Controller, "_sample", sample)
    wrap(patch, Runner, "_launch", launch)


def swapped_logits_rows(patch: Patch) -> None:
    def stage(real: Any, self: SampleLauncher, pending: Any, first: int, end: int) -> Any:
        half = real(self, pending, first, end)
        if half is None and end - first > 1:
            half = self.index_slab.acquire()
            half.fields["logits_row"][: end - first] = np.arange(end - first)
        if half is not None and end - first > 1:
            half.fields["logits_row"][:2] = half.fields["logits_row"][1::-1].copy()
        return half

    wrap(patch, SampleLauncher, "_stage_logits_rows", stage)


def padding_in_a_real_row(patch: Patch) -> None:
    def stage(real: Any, half: Any, table: Any, layout: Any, dummy_row: int) -> None:
        real(half, table, layout, 0 if layout.table_rows.size else dummy_row)

    wrap(patch, runner_module, "stage_tokens", stage)


def results_by_row_not_by_generation(patch: Patch) -> None:
    def resolve(real: Any, self: Controller, iteration: Any) -> None:
        self._end_aborted(iteration)
        self._release(iteration)
        if iteration.sampled is not None:
            rows = slice(iteration.sampled.first_row, iteration.sampled.first_row + iteration.sampled.num_rows)
            iteration.sampled.keys = self.table.key[rows].copy()
            iteration.sampled.num_rows = min(iteration.sampled.num_rows, self.table.num_live)
            iteration.sampled.keys = iteration.sampled.keys[: iteration.sampled.num_rows]
        real(self, iteration)

    wrap(patch, Controller, "_resolve", resolve)


def seed_by_row(patch: Patch) -> None:
    def ints(real: Any, request: Any) -> Any:
        values = list(real(request))
        values[columns_module.SEED] = request.row
        return tuple(values)

    wrap(patch, plan_module, "row_ints", ints)


def position_stands_still(patch: Patch) -> None:
    def sample(real: Any, self: SampleLauncher, pending: Any, first: int, end: int, *rest: Any) -> None:
        position = self.columns.ints[first:end, columns_module.POSITION]
        before = position.clone()
        real(self, pending, first, end, *rest)
        position.copy_(before)

    wrap(patch, SampleLauncher, "_sample", sample)


def eos_ignored_in_overlap(patch: Patch) -> None:
    def commit(real: Any, result: Any, table: Any, iteration: Any, resolved: Any, *args: Any, **kwargs: Any) -> None:
        if iteration.order is Order.OVERLAP:
            resolved = replace(resolved, eos_token_ids=())
        real(result, table, iteration, resolved, *args, **kwargs)

    wrap(patch, controller_module, "commit_results", commit)


def last_output_twice(patch: Patch) -> None:
    def emit(real: Any, self: OutputEmitter, iteration: Any) -> Any:
        stopped = real(self, iteration)
        iteration.outputs += [output for output in iteration.outputs if output.finished]
        return stopped

    wrap(patch, OutputEmitter, "emit", emit)


def abort_lost(patch: Patch) -> None:
    def abort(real: Any, self: RequestQueue, request: Any) -> None:
        request.abort_requested = True

    wrap(patch, RequestQueue, "abort", abort)


def abort_of_a_waiting_request_lost(patch: Patch) -> None:
    def take(real: Any, self: RequestQueue) -> Any:
        return [request for request in real(self) if request.row is not None]

    wrap(patch, RequestQueue, "take_aborted", take)


def token_after_an_abort(patch: Patch) -> None:
    def commit(real: Any, *args: Any, **kwargs: Any) -> None:
        table = args[1]
        flagged = [request for request in table.live_requests() if request.abort_requested]
        for request in flagged:
            request.abort_requested = False
        real(*args, **kwargs)
        for request in flagged:
            request.abort_requested = True

    wrap(patch, controller_module, "commit_results", commit)


def pending_not_remapped(patch: Patch) -> None:
    patch.setattr(Controller, "_remap_pending", lambda self, new_row: None)


def length_advanced_twice(patch: Patch) -> None:
    def advance(real: Any, self: Controller, rows: Any) -> Any:
        new_blocks = real(self, rows)
        self.table.kv_len[rows] += 1
        return new_blocks

    wrap(patch, Controller, "_advance", advance)


def block_to_the_wrong_row(patch: Patch) -> None:
    def append(real: Any, self: RequestTable, rows: Any, ids: Any) -> None:
        real(self, (rows + 1) % max(1, self.num_live), ids)

    wrap(patch, RequestTable, "append_blocks", append)


def counts_of_the_row_before(patch: Patch) -> None:
    def write(real: Any, self: DeviceColumns, column: Any, rows: Any, values: Any, *rest: Any) -> Any:
        is_counts = column is not None and column is self.output_counts
        before = column.index_select(0, rows) if is_counts else None
        column = real(self, column, rows, values, *rest)
        if before is not None:
            column[rows] = before.clamp(min=0)
        return column

    wrap(patch, DeviceColumns, "_write_wide", write)


def row_not_written_at_admission(patch: Patch) -> None:
    def write(real: Any, self: DeviceColumns, rows: Any, ints: Any, floats: Any, *rest: Any) -> None:
        before = self.ints.index_select(0, rows)
        real(self, rows, ints, floats, *rest)
        self.ints[rows] = before

    wrap(patch, DeviceColumns, "write_rows", write)


def parameters_of_the_row_before(patch: Patch) -> None:
    def write(real: Any, self: DeviceColumns, rows: Any, ints: Any, floats: Any, *rest: Any) -> None:
        before = self.floats.index_select(0, rows).nan_to_num(1.0)
        real(self, rows, ints, floats, *rest)
        self.floats[rows] = before

    wrap(patch, DeviceColumns, "write_rows", write)


def bad_logits_taken(patch: Patch) -> None:
    def store(real: Any, self: ResultBuffers, sampled: Any, count: int) -> None:
        real(self, sampled, count)
        self.ints[0][1, :count] = 0

    wrap(patch, ResultBuffers, "store", store)


def logprobs_of_the_next_row(patch: Patch) -> None:
    num_rows = [1]

    def commit(real: Any, result: Any, *rest: Any, **options: Any) -> None:
        num_rows[0] = result.num_rows
        real(result, *rest, **options)

    def row(real: Any, buffers: Any, index: int, *rest: Any) -> Any:
        return real(buffers, (index + 1) % num_rows[0], *rest)

    wrap(patch, controller_module, "commit_results", commit)
    wrap(patch, resolution_module, "logprobs_of", row)


def admission_counts_free_blocks_only(patch: Patch) -> None:
    def capacity(real: Any, self: RequestQueue) -> Capacity:
        return replace(real(self), free_blocks=self._pool.num_free)

    wrap(patch, RequestQueue, "capacity", capacity)


def probe_changes_the_queue(patch: Patch) -> None:
    def refusal(real: Any, self: RequestQueue) -> Any:
        self._waiting.settle()
        if self._waiting:
            self._waiting._queue.move_to_end(self._waiting[0].key)
        return real(self)

    wrap(patch, RequestQueue, "head_refusal", refusal)


def min_tokens_one_too_long(patch: Patch) -> None:
    def sample(real: Any, self: TorchSampler, logits: Any, rows: Any, needs: Any) -> Any:
        return real(self, logits, rows._replace(min_tokens=rows.min_tokens + (rows.min_tokens > 0)), needs)

    wrap(patch, TorchSampler, "sample", sample)


def mode_switched_without_a_drain(patch: Patch) -> None:
    def choose(real: Any, state: Any, policy: Any) -> Any:
        order, reason = real(state, policy)
        return (Order.LEGACY, Reason.LEGACY_MODE) if reason is Reason.MODE_SWITCH else (order, reason)

    wrap(patch, controller_module, "choose_order", choose)


def rows_moved_after_prepare(patch: Patch) -> None:
    def forward(real: Any, self: Controller, iteration: Any) -> None:
        if iteration.plan is not None and iteration.plan.table_rows.size > 1:
            iteration.plan.table_rows = iteration.plan.table_rows[::-1].copy()
        real(self, iteration)

    wrap(patch, Controller, "_forward", forward)


def token_the_host_knew_before(patch: Patch) -> None:
    def stage(real: Any, half: Any, table: Any, layout: Any, dummy_row: int) -> None:
        real(half, table, layout, dummy_row)
        for i, row in enumerate(layout.table_rows.tolist()):
            request = table.requests[row]
            if not table.is_prefill[row] and request.output_ids:
                half.fields["token_ids"][half.fields["query_start"][layout.batch_rows[i]]] = request.output_ids[-1]

    wrap(patch, runner_module, "stage_tokens", stage)


def stale_blocks_behind_a_row(patch: Patch) -> None:
    def add(real: Any, self: DeviceColumns, rows: Any, cols: Any, blocks: Any, known: Any) -> None:
        real(self, rows, cols, blocks, known)
        self.block_table[rows, -1] = 0

    wrap(patch, DeviceColumns, "add_blocks", add)


def tokens_behind_a_stop_string(patch: Patch) -> None:
    def take(request: Any) -> None:
        detokenizer = request.detokenizer
        request.text = detokenizer.text
        if detokenizer.hit is not None:
            request.finish_reason, request.stop_reason = "stop", detokenizer.hit.stop
            request.output_ids.append(0)
            request.logprobs.extend(request.logprobs[-1:])

    patch.setattr(OutputEmitter, "_take_text", staticmethod(take))


def forward_left_out(patch: Patch) -> None:
    def prepare(real: Any, self: Controller, iteration: Any) -> None:
        if iteration.order is not Order.NO_OVERLAP or iteration.index % 3:
            real(self, iteration)

    wrap(patch, Controller, "_prepare", prepare)


def host_waits_before_the_next_forward(patch: Patch) -> None:
    phases = (Phase.PREPARE, Phase.SAMPLE, Phase.RESOLVE, Phase.FORWARD, Phase.EMIT)
    patch.setattr(Order.OVERLAP, "_value_", phases)


def half_of_other_rows_advanced(patch: Patch) -> None:
    def restage(real: Any, half: Any, table: Any, batch: Any, layout: Any) -> bool:
        if half.layout is not None and half.layout.shape == layout.shape:
            half.layout = layout
        return bool(real(half, table, batch, layout))

    wrap(patch, runner_module, "restage_decode", restage)


BUCKETS = {"graphs": (2, 4, 16), "block_size": 16, "num_blocks": 16}
SLOW_DEVICE = {"device": "cpu", "op_sleep_s": 0.002}

FAULTS = [
    Fault("early free", early_free),
    Fault("leaked block", leaked_block),
    *(
        Fault(f"host column {name} does not move", fixed_host_column(name))
        for name in (
            "key",
            "kv_len",
            "num_output",
            "max_output",
            "prompt_len",
            "block_count",
            "block_ids",
            "is_watched",
        )
    ),
    *(
        Fault(f"device column {name} does not move", fixed_device_column(name))
        for name in ("block_table", "ints", "floats", "stop_ids", "bias_ids", "bias_values")
    ),
    *(
        Fault(f"device column {name} does not move", fixed_device_column(name))
        for name in ("output_counts", "prompt_mask")
    ),
    Fault("no event before the copy", no_event_before_the_copy, SLOW_DEVICE),
    Fault(
        "staging half reused without its event",
        half_reused_without_its_event,
        SLOW_DEVICE,
        slow={"publish": 0.002},  # else the copy has nearly always run when the half is written again
    ),
    Fault("pending kept over reset", pending_kept_over_reset),
    Fault("one token too many", one_token_too_many),
    Fault("length measured one late", length_measured_one_late),
    Fault("sampling behind the next forward", sampling_behind_the_next_forward),
    Fault("swapped logits rows", swapped_logits_rows),
    Fault("padding in a real row", padding_in_a_real_row, BUCKETS),
    Fault("results by row, not by generation", results_by_row_not_by_generation),
    Fault("seed by row", seed_by_row),
    Fault("position stands still", position_stands_still),
    Fault("EOS ignored in overlap", eos_ignored_in_overlap),
    Fault("last output twice", last_output_twice),
    Fault("abort lost", abort_lost),
    Fault("abort of a waiting request lost", abort_of_a_waiting_request_lost),
    Fault("token after an abort", token_after_an_abort),
    Fault("pending not remapped", pending_not_remapped),
    Fault("length advanced twice", length_advanced_twice),
    Fault("block to the wrong row", block_to_the_wrong_row),
    Fault("counts of the row before", counts_of_the_row_before),
    Fault("row not written at admission", row_not_written_at_admission),
    Fault("parameters of the row before", parameters_of_the_row_before),
    Fault("bad logits taken", bad_logits_taken, {"nan_every": 31}),
    Fault("log probabilities of the next row", logprobs_of_the_next_row),
    Fault("admission counts free blocks only", admission_counts_free_blocks_only, {"num_blocks": 26}),
    Fault("probe changes the queue", probe_changes_the_queue),
    Fault("min_tokens one too long", min_tokens_one_too_long),
    Fault("mode switched without a drain", mode_switched_without_a_drain),
    Fault("rows moved after prepare", rows_moved_after_prepare),
    Fault("token the host knew before", token_the_host_knew_before),
    Fault("stale blocks behind a row", stale_blocks_behind_a_row),
    Fault("tokens behind a stop string", tokens_behind_a_stop_string, text=True),
    Fault("forward left out", forward_left_out),
    Fault("staging half of other rows advanced", half_of_other_rows_advanced, BUCKETS),
    Fault("host waits before the next forward", host_waits_before_the_next_forward),
]
