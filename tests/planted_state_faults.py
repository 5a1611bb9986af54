"""Faults of recurrent states and of drafting; as ``planted_faults``, played by ``memory_world.play_memory``.

Those of ``HEADS`` change no token, only what is accepted: they are played where every draft must be.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from engine import controller as controller_module
from engine import draft_passes as passes_module
from engine import runner as runner_module
from engine import speculative as speculative_module
from engine import step_function as step_module
from engine import verification as verification_module
from engine.cache.slots import SlotPool
from engine.cache.snapshots import SnapshotIndex
from engine.columns import POSITION, DeviceColumns
from engine.config import EngineConfig
from engine.controller import Border
from engine.models import oracle as oracle_module
from engine.models.oracle import OracleModel
from engine.phases import Phase
from engine.prefix_cache import PrefixCache
from engine.sampling.torch import TorchSampler
from engine.speculative import Speculator, Verified
from engine.table import RequestTable
from tests.drafting_world import PLAIN
from tests.memory_world import MemoryWorld, pieced_prompt
from tests.planted_faults import Fault, Patch, fixed_host_column, wrap

# -- going back --------------------------------------------------------------------------------------------------------


def rewound_to_one_token_too_many(patch: Patch) -> None:
    def rewind(real: Any, verified: Verified, table: RequestTable) -> Any:
        counts = real(verified, table)
        table.kv_len[verified.first_row : verified.first_row + verified.num_rows] += verified.num_drafts >= counts
        return counts

    wrap(patch, controller_module, "rewind", rewind)


def never_rewound(patch: Patch) -> None:
    def rewind(real: Any, verified: Verified, table: RequestTable) -> Any:
        lengths = table.kv_len.copy()
        counts = real(verified, table)
        table.kv_len[:] = lengths
        return counts

    wrap(patch, controller_module, "rewind", rewind)


def accepted_count_forgotten(patch: Patch) -> None:
    def rewind(real: Any, verified: Verified, table: RequestTable) -> Any:
        counts = real(verified, table)
        table.num_accepted[:] = 0
        return counts

    wrap(patch, controller_module, "rewind", rewind)


def one_draft_too_many_accepted(patch: Patch) -> None:
    def launch(real: Any, self: Speculator, *args: Any) -> Any:
        verified = real(self, *args)
        counts = verified.buffers.accepted_view[: verified.num_rows]
        np.minimum(counts + 1, verified.num_drafts, out=counts)
        return verified

    wrap(patch, Speculator, "launch_verify", launch)


def position_advanced_for_dead_drafts(patch: Patch) -> None:
    def launch(real: Any, self: Speculator, pending: Any, table: RequestTable) -> Any:
        verified = real(self, pending, table)
        rows = slice(verified.first_row, verified.first_row + verified.num_rows)
        dead = verified.num_drafts - verified.buffers.accepted_view[: verified.num_rows]
        self.columns.ints[rows, POSITION] += torch.from_numpy(dead)
        return verified

    wrap(patch, Speculator, "launch_verify", launch)


def rejected_tokens_counted_in_penalties(patch: Patch) -> None:
    def accept(real: Any, self: TorchSampler, rows: Any, sampled: Any) -> None:
        real(self, rows, sampled._replace(bad=torch.zeros_like(sampled.bad)))

    wrap(patch, TorchSampler, "accept", accept)


def tokens_behind_an_end_given(patch: Patch) -> None:
    late: set[int] = set()

    def end_of(real: Any, request: Any, eos: Any) -> Any:
        end = real(request, eos)
        if end is None or request.key in late or end[0] == "length":
            return end
        late.add(request.key)
        return None

    wrap(patch, verification_module, "end_of", end_of)


def log_probabilities_of_the_first_token_for_all(patch: Patch) -> None:
    def logprobs(real: Any, buffers: Any, index: int, token: int, count: int) -> Any:
        row = real(buffers, index, token, count)
        return dict(list(row.items())[::-1])

    wrap(patch, verification_module, "logprobs_of", logprobs)


def blocks_for_one_token_a_step(patch: Patch) -> None:
    patch.setattr(EngineConfig, "lookahead", property(lambda self: 1))


def acceptance_counted_from_place_one(patch: Patch) -> None:
    def count(real: Any, num_drafts: Any, accepted: Any, counters: Any) -> None:
        real(num_drafts, accepted, counters)
        if num_drafts.any():
            counters.drafts_accepted[int(num_drafts.max()) - 1] += int((accepted > 0).sum())
            counters.drafts_accepted[0] -= int((accepted > 0).sum())

    wrap(patch, verification_module, "_count", count)


def ends_looked_for_at_the_first_token(patch: Patch) -> None:
    def look(real: Any, table: Any, rows: Any, tokens: Any, num_tokens: Any, eos: Any) -> Any:
        return real(table, rows, tokens[0], 1, eos)

    wrap(patch, verification_module, "needs_a_closer_look", look)


def lengths_do_not_move_on_the_device(patch: Patch) -> None:
    def columns(real: Any, self: DeviceColumns) -> Any:
        return [column for column in real(self) if column is not self.length]

    wrap(patch, DeviceColumns, "_all", columns)


# -- states ------------------------------------------------------------------------------------------------------------


def accepted_count_not_applied_to_the_state(patch: Patch) -> None:
    def stage(real: Any, half: Any, table: RequestTable, *rest: Any, **options: Any) -> None:
        counts, table.num_accepted = table.num_accepted, np.zeros_like(table.num_accepted)
        try:
            real(half, table, *rest, **options)
        finally:
            table.num_accepted = counts

    wrap(patch, runner_module, "stage_states", stage)


def states_behind_drafts_not_kept(patch: Patch) -> None:
    patch.setattr(runner_module, "rejectable_states", lambda table, layout, states_per_row: [])


def states_behind_drafts_in_one_place(patch: Patch) -> None:
    def rejectable(real: Any, *args: Any) -> Any:
        return [(row, after, slot - (after > 1)) for row, after, slot in real(*args)]

    wrap(patch, runner_module, "rejectable_states", rejectable)


# -- states that go back by replay -------------------------------------------------------------------------------------


def a_token_too_many_replayed(patch: Patch) -> None:
    wrap(patch, step_module, "replayed_counts", lambda real, *args: (real(*args) + 1).clamp(max=4))


def a_draft_forgotten_in_replay(patch: Patch) -> None:
    def counts(real: Any, *args: Any) -> Any:
        count_V = real(*args)
        return torch.where(count_V > 1, count_V - 1, count_V)

    wrap(patch, step_module, "replayed_counts", counts)


def a_token_replayed_behind_prompts(patch: Patch) -> None:
    wrap(patch, step_module, "replayed_counts", lambda real, *args: real(*args).clamp(min=1))


def nothing_replayed(patch: Patch) -> None:
    wrap(patch, step_module, "replayed_counts", lambda real, *args: torch.zeros_like(real(*args)))


def counts_of_rows_in_another_order(patch: Patch) -> None:
    wrap(patch, step_module, "replayed_counts", lambda real, accepted_R, row_V: real(accepted_R, row_V.flip(0)))


def inputs_overwritten_before_they_are_replayed(patch: Patch) -> None:
    def replayed(real: Any, batch: Any, hash_V: Any, kept: Any) -> Any:
        count = hash_V.shape[0]
        own_VW = batch.token_ids_T[: batch.shape.num_stepping_tokens].view(count, -1)
        kept.index_copy_(0, batch.state_to_N[:count], own_VW)
        return real(batch, hash_V, kept)

    wrap(patch, oracle_module, "_replayed", replayed)


def accepted_counts_do_not_move(patch: Patch) -> None:
    def columns(real: Any, self: DeviceColumns) -> Any:
        return [column for column in real(self) if column is not self.accepted]

    wrap(patch, DeviceColumns, "_all", columns)


def accepted_counts_of_former_owners(patch: Patch) -> None:
    def write(real: Any, self: DeviceColumns, *args: Any) -> None:
        assert self.accepted is not None
        counts = self.accepted.clone()
        real(self, *args)
        self.accepted.copy_(counts)

    wrap(patch, DeviceColumns, "write_rows", write)
    wrap(patch, passes_module, "verify_plain", _without_marking_prompts)
    wrap(patch, speculative_module, "verify_plain", _without_marking_prompts)


def _without_marking_prompts(real: Any, columns: DeviceColumns, rows_n: Any, *args: Any) -> None:
    assert columns.accepted is not None
    counts_n = columns.accepted.index_select(0, rows_n)
    real(columns, rows_n, *args)
    new_n = columns.accepted.index_select(0, rows_n)
    columns.accepted.index_copy_(0, rows_n, torch.where(new_n < 0, counts_n, new_n))


# -- slots -------------------------------------------------------------------------------------------------------------


def slot_not_given_back(patch: Patch) -> None:
    wrap(patch, SlotPool, "give_back", lambda real, self, slots: real(self, slots[1:]))


def slot_given_back_twice(patch: Patch) -> None:
    def give_back(real: Any, self: SlotPool, slots: Any) -> None:
        real(self, slots)
        if slots.size and self.num_free < self.num_slots:
            real(self, slots[:1])

    wrap(patch, SlotPool, "give_back", give_back)


def snapshot_read_by_every_chunk(patch: Patch) -> None:
    def begin(real: Any, self: RequestTable, row: int, *args: Any) -> None:
        source = int(self.state_from[row])
        real(self, row, *args)
        self.state_from[row] = source

    wrap(patch, RequestTable, "begin_chunk", begin)


def snapshot_not_read(patch: Patch) -> None:
    wrap(patch, RequestTable, "add", lambda real, *args, **options: real(*args, **{**options, "state_from": -1}))


def snapshot_kept_before_its_launch(patch: Patch) -> None:
    def stage(real: Any, self: PrefixCache, rows: Any) -> Any:
        staged = list(real(self, rows))
        for one in staged if self.snapshots is not None else ():
            self.snapshots.keep(one.digest, one.slot)
        self.staged = []
        return staged

    wrap(patch, PrefixCache, "stage_snapshots", stage)


def snapshot_taken_a_token_early(patch: Patch) -> None:
    def stage(real: Any, self: PrefixCache, rows: Any) -> Any:
        self.staged = [one._replace(after=max(1, one.after - 1)) for one in real(self, rows)]
        return self.staged

    wrap(patch, PrefixCache, "stage_snapshots", stage)


def snapshot_slot_given_to_two(patch: Patch) -> None:
    def reserve(real: Any, self: SnapshotIndex, spare: Any) -> Any:
        slot = real(self, spare)
        if slot is not None:
            self._free.append(slot)
        return slot

    wrap(patch, SnapshotIndex, "reserve", reserve)


def snapshot_outlives_its_block(patch: Patch) -> None:
    patch.setattr(SnapshotIndex, "forget", lambda self, digest: None)


def staged_snapshots_lost(patch: Patch) -> None:
    def keep(real: Any, self: PrefixCache) -> None:
        self.staged = self.staged[1:]
        real(self)

    wrap(patch, PrefixCache, "keep_snapshots", keep)


def hit_deeper_than_its_snapshot(patch: Patch) -> None:
    def find(real: Any, self: PrefixCache, request: Any) -> Any:
        blocks, slot = real(self, request)
        return (self.pool.match(self.skippable(request)), slot) if slot >= 0 else (blocks, slot)

    wrap(patch, PrefixCache, "_find", find)
    patch.setattr(SnapshotIndex, "touch", lambda self, digest: None)


def padding_writes_to_a_snapshot(patch: Patch) -> None:
    def stage(real: Any, half: Any, layout: Any, snapshots: Any, dummy_slot: int, *rest: Any) -> None:
        real(half, layout, snapshots, dummy_slot - 1 if layout.table_rows.size else dummy_slot, *rest)

    wrap(patch, runner_module, "stage_snapshots", stage)


# -- draft heads: no token changes -------------------------------------------------------------------------------------


def heads_read_the_hidden_state_of_the_token_itself(patch: Patch) -> None:
    def before(real: Any, positions_T: Any, *args: Any) -> Any:
        return real(positions_T + 1, *args)

    wrap(patch, step_module, "slots_before", before)
    wrap(patch, passes_module, "slots_before", before)


def heads_see_entries_from_one_too_early(patch: Patch) -> None:
    def draft(real: Any, self: OracleModel, head: int, before_TE: Any, batch: Any, cache: Any) -> Any:
        return real(self, head, before_TE, batch._replace(first_key=batch.first_key - 1), cache)

    wrap(patch, OracleModel, "draft", draft)


def drafts_do_not_move(patch: Patch) -> None:
    def columns(real: Any, self: DeviceColumns) -> Any:
        return [column for column in real(self) if column is not self.drafts]

    wrap(patch, DeviceColumns, "_all", columns)


def heads_do_not_read_prompts(patch: Patch) -> None:
    def draft(real: Any, self: OracleModel, head: int, before_TE: Any, batch: Any, cache: Any) -> Any:
        if batch.token_ids_T.numel() > 16:
            return before_TE
        return real(self, head, before_TE, batch, cache)

    wrap(patch, OracleModel, "draft", draft)


def drafts_drawn_with_the_uniform_of_the_token_before(patch: Patch) -> None:
    def sample(real: Any, self: TorchSampler, logits: Any, rows: Any, needs: Any) -> Any:
        return real(self, logits, rows._replace(position=rows.position - 1), needs)

    def draft(real: Any, *args: Any) -> None:
        with patch.context() as inner:
            wrap(inner, TorchSampler, "sample", sample)
            real(*args)

    wrap(patch, Speculator, "_draft", draft)


def drafts_read_in_the_wrong_order(patch: Patch) -> None:
    def with_drafts(real: Any, token_ids: Any, token_row: Any, drafts_RS: Any) -> Any:
        return real(token_ids, token_row, drafts_RS.flip(1))

    wrap(patch, step_module, "_with_drafts", with_drafts)


def play_right(world: MemoryWorld, rng: random.Random) -> None:
    """Requests whose every token the heads foresee; some are aborted, so that rows move. Drained and checked.

    Raises:
        AssertionError: a draft was refused.
    """

    def look(border: Border) -> None:
        verified, tokens = border.iteration.verified, border.iteration.num_tokens
        if border.phase is Phase.REWIND and border.side == "after" and verified is not None and tokens is not None:
            accepted = (tokens - 1).tolist()
            assert accepted == verified.num_drafts.tolist(), f"{accepted} of {verified.num_drafts} drafts accepted"
        if world.live_ids and rng.random() < 0.02:
            world.abort(rng.choice(world.live_ids))

    world.on_border = look
    for _ in range(12):
        for _ in range(rng.choice([0, 1, 2])):
            params = PLAIN.replace(seed=rng.randrange(1 << 40), max_tokens=rng.randint(2, 20))
            world.submit(pieced_prompt(rng, 30), params)
        for _ in range(rng.randint(1, 4)):
            world.step()
    world.drain(300)


BASE: dict[str, Any] = {"max_sequence_length": 52, "capacity_policy": "max_utilization", "paused_blocks": 6}
DRAFTS = {
    **BASE,
    "num_blocks": 18,
    "kind": "mtp",
    "state_rewind": "stored",
    "speculative_tokens": 3,
    "late_rewind": False,
}
STATES = {**BASE, "num_blocks": 16, "kind": "hybrid", "prefix_caching": True}
BOTH = {**DRAFTS, "prefix_caching": True}
REPLAYED = {**DRAFTS, "state_rewind": "replayed"}
CHUNKED_STATES = {**STATES, "chunked_prefill": True, "max_batch_tokens": 8}
BUCKETED_STATES = {**STATES, "num_blocks": 24, "graphs": (16,), "max_batch_tokens": 60, "graph_non_decode": True}
RIGHT = {"kind": "mtp", "skill": "right", "speculative_tokens": 3}

REWINDS = [
    Fault("rewound to one token too many", rewound_to_one_token_too_many, DRAFTS),
    Fault("never rewound", never_rewound, DRAFTS),
    Fault("accepted count forgotten", accepted_count_forgotten, DRAFTS),
    Fault("one draft too many accepted", one_draft_too_many_accepted, DRAFTS),
    Fault("position advanced for dead drafts", position_advanced_for_dead_drafts, DRAFTS),
    Fault("rejected tokens counted in penalties", rejected_tokens_counted_in_penalties, DRAFTS),
    Fault("tokens behind an end given", tokens_behind_an_end_given, DRAFTS),
    Fault("log probabilities of another token", log_probabilities_of_the_first_token_for_all, DRAFTS),
    Fault("blocks for one token a step", blocks_for_one_token_a_step, DRAFTS),
    Fault("acceptance counted from place one", acceptance_counted_from_place_one, DRAFTS),
    Fault("ends looked for at the first token", ends_looked_for_at_the_first_token, DRAFTS),
    Fault("lengths do not move on the device", lengths_do_not_move_on_the_device, DRAFTS),
]
STATES_FAULTS = [
    Fault("accepted count not applied to the state", accepted_count_not_applied_to_the_state, DRAFTS),
    Fault("states behind drafts not kept", states_behind_drafts_not_kept, DRAFTS),
    Fault("states behind drafts in one place", states_behind_drafts_in_one_place, DRAFTS),
    Fault("a token too many replayed", a_token_too_many_replayed, REPLAYED),
    Fault("a draft forgotten in replay", a_draft_forgotten_in_replay, REPLAYED),
    Fault("a token replayed behind prompts", a_token_replayed_behind_prompts, REPLAYED),
    Fault("nothing replayed", nothing_replayed, REPLAYED),
    Fault("replayed counts of other rows", counts_of_rows_in_another_order, REPLAYED),
    Fault("inputs overwritten before they are replayed", inputs_overwritten_before_they_are_replayed, REPLAYED),
    Fault("accepted counts do not move on the device", accepted_counts_do_not_move, REPLAYED),
    Fault("accepted counts of former owners", accepted_counts_of_former_owners, REPLAYED),
    Fault("slot not given back", slot_not_given_back, STATES),
    Fault("slot given back twice", slot_given_back_twice, STATES),
    Fault("snapshot read by every chunk", snapshot_read_by_every_chunk, CHUNKED_STATES),
    Fault("snapshot not read", snapshot_not_read, STATES),
    Fault("snapshot kept before its launch", snapshot_kept_before_its_launch, STATES),
    Fault("snapshot taken a token early", snapshot_taken_a_token_early, STATES),
    Fault("snapshot slot given to two", snapshot_slot_given_to_two, STATES),
    Fault("snapshot outlives its block", snapshot_outlives_its_block, STATES),
    Fault("staged snapshots lost", staged_snapshots_lost, STATES),
    Fault("hit deeper than its snapshot", hit_deeper_than_its_snapshot, BOTH),
    Fault("padding writes to a snapshot", padding_writes_to_a_snapshot, BUCKETED_STATES),
    *(
        Fault(f"host column {name} does not move", fixed_host_column(name), BOTH)
        for name in ("state_slot", "num_accepted")
    ),
]
HEADS = [
    Fault("heads read the hidden state of the token itself", heads_read_the_hidden_state_of_the_token_itself, RIGHT),
    Fault("heads see entries from one too early", heads_see_entries_from_one_too_early, RIGHT),
    Fault("drafts do not move", drafts_do_not_move, RIGHT),
    Fault("heads do not read prompts", heads_do_not_read_prompts, RIGHT),
    Fault("drafts drawn with another uniform", drafts_drawn_with_the_uniform_of_the_token_before, RIGHT),
    Fault("drafts read in the wrong order", drafts_read_in_the_wrong_order, RIGHT),
]
STATE_FAULTS = REWINDS + STATES_FAULTS
