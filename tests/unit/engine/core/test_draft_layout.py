"""Tokens of a forward with drafts: of each decode row its newest one and its drafts in order, and zeros behind all."""

from __future__ import annotations

import numpy as np
import torch

from engine.controller import Border
from engine.draft_passes import draft_pass
from engine.phases import Phase
from engine.step_function import FROM_DRAFT, FROM_SAMPLE, _with_drafts
from tests.drafting_world import GREEDY, PLAIN, DraftingWorld, prompt_of


def test_drafts_take_the_place_of_their_names_and_nothing_else_changes() -> None:
    drafts_RS = torch.tensor([[11, 12, 13], [21, 22, 23], [-7, -7, -7]])
    row = [1] * 4 + [0] * 4 + [0, 0, 2, 2]
    named = [FROM_SAMPLE, FROM_DRAFT, FROM_DRAFT - 1, FROM_DRAFT - 2]
    token_ids = torch.tensor([*named, *named, 5, 60, 0, 0])
    before = token_ids.clone()

    found = _with_drafts(token_ids, torch.tensor(row), drafts_RS)

    assert found.tolist() == [FROM_SAMPLE, 21, 22, 23, FROM_SAMPLE, 11, 12, 13, 5, 60, 0, 0]
    assert (found.dtype, found.shape) == (torch.int64, token_ids.shape)
    assert torch.equal(token_ids, before)


def test_what_is_staged_names_drafts_in_order_and_its_tail_is_zero() -> None:
    """Of a captured size that held more rows before: nothing of them is left."""
    padded = 0

    def look(border: Border) -> None:
        nonlocal padded
        plan = border.iteration.plan
        if plan is None or (border.phase, border.side) != (Phase.PREPARE, "after") or plan.dims.num_prefill:
            return
        fields, real = plan.half.fields, 4 * plan.dims.num_decode
        names = fields["token_ids"][:real].reshape(-1, 4)
        assert (names == [FROM_SAMPLE, FROM_DRAFT, FROM_DRAFT - 1, FROM_DRAFT - 2]).all()
        assert (fields["token_row"][:real].reshape(-1, 4) == plan.table_rows[:, None]).all()
        places = fields["positions"][:real].reshape(-1, 4)
        assert (np.diff(places, axis=1) == 1).all()
        assert fields["token_ids"].dtype == np.int64
        tail = slice(real, plan.shape.num_tokens)
        padded += tail.stop > tail.start
        for name, empty in (("token_ids", 0), ("positions", 0), ("token_row", world.engine.config.max_requests)):
            assert (fields[name][tail] == empty).all(), name

    world = DraftingWorld(3, graphs=(16,), max_sequence_length=40)
    world.on_border = look
    for number in range(4):
        world.submit(prompt_of(5 + number, number), PLAIN.replace(seed=number, max_tokens=4 + 5 * number))
    world.drain()
    assert padded > 2


def test_a_captured_pass_s_padding_stays_in_the_dummy_block_however_often_it_ran() -> None:
    """Verification lets the dummy row's length grow with every step, too; behind its one block there is nothing."""
    world = DraftingWorld(3, mode="legacy")
    world.submit(prompt_of(6), GREEDY.replace(max_tokens=30))
    for _ in range(3):
        world.step()
    engine, columns = world.engine, world.engine.runner.columns
    assert columns.drafts is not None
    assert columns.length is not None
    told, blocks = columns.drafts[0].clone(), engine.table.block_ids[0, : engine.table.block_count[0]].tolist()
    others = [block for block in range(engine.pool.num_blocks) if block not in blocks]
    tensors = [tensor for tensor in engine.runner.cache_tensors if tensor.shape[0] == engine.pool.num_blocks + 1]
    before = [tensor[others].clone() for tensor in tensors]
    columns.length[columns.dummy_row] = 10_000

    draft_pass(
        engine.loaded.model,  # type: ignore[arg-type]
        columns,
        torch.tensor([0, columns.dummy_row, columns.dummy_row]),
        engine.runner._head_caches,
        lambda head, logits_nV: logits_nV.argmax(-1),
        num_blocks=columns.block_table.shape[1],
        block_size=engine.config.block_size,
        num_drafts=3,
    )

    assert columns.drafts[0].tolist() == told.tolist()
    assert len(tensors) > 3
    for tensor, old in zip(tensors, before, strict=True):
        assert torch.equal(tensor[others], old)
