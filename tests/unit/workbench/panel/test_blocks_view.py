"""The block map: holders, hues, how full each block is, and what is shared and cached."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import numpy as np

from tests.unit.workbench.worlds import make_session, spread_workload
from workbench.panel.blocks_view import CACHED, FREE, BlockMap
from workbench.panel.messages import BlocksPane, HolderCell
from workbench.panel.requests_view import RequestRows
from workbench.session import Session


def unpacked(packed: str, kind: str = "u1") -> list[int]:
    return [int(one) for one in np.frombuffer(b64decode(packed), dtype=kind)]


def blocks_of(holder: HolderCell) -> list[int]:
    return unpacked(holder["blocks"], "<u4")


def tokens_of(pane: BlocksPane) -> list[int]:
    """Cached tokens of each block, as the browser reads them."""
    tokens = [pane["block_size"] if kind < CACHED else 0 for kind in unpacked(pane["kinds"])]
    for block, count in zip(pane["partly"][::2], pane["partly"][1::2], strict=True):
        tokens[block] = count
    return tokens


def named_blocks(pane: BlocksPane) -> set[int]:
    bits = np.unpackbits(np.frombuffer(b64decode(pane["named"]), dtype=np.uint8), bitorder="little")
    return {int(block) for block in np.flatnonzero(bits)}


def check_agrees_with_the_snapshot(pane: BlocksPane, session: Session) -> None:
    blocks = session.snapshot().blocks
    hues = {row["request_id"]: row["hue"] for row in RequestRows(session).view()["rows"]}
    kinds = [
        hues[holders[0]] if holders else CACHED if blocks.is_cached(block) else FREE
        for block, holders in enumerate(blocks.holders)
    ]
    assert unpacked(pane["kinds"]) == kinds
    assert (pane["num_free"], pane["num_cached"] or 0) == (blocks.num_free, blocks.num_cached)
    assert pane["num_shared"] == blocks.num_shared
    refs = [len(holders) for holders in blocks.holders]
    assert (unpacked(pane["refs"]) == refs) if blocks.num_shared else pane["refs"] == ""
    assert named_blocks(pane) == set(blocks.named or ())
    tokens = tokens_of(pane)
    for holder in pane["holders"]:
        assert tuple(sorted(blocks_of(holder))) == blocks.held_by(holder["request_id"])
        assert sum(tokens[block] for block in blocks_of(holder)) == holder["tokens"]


def prefix_session(**options: Any) -> Session:
    """Requests that begin alike, in a pool too small for all of them."""
    wanted: dict[str, Any] = {"prefix_caching": True, "block_size": 4, "num_blocks": 40, "clock": "iterations"}
    session = make_session(**{**wanted, **options})
    head = list(range(12))
    session.submit([40] * 22, max_tokens=9, ignore_eos=True)
    session.submit([*head, 1, 2, 3], max_tokens=3, ignore_eos=True)
    session.run()
    session.submit([[*head, 7, index] for index in range(3)], max_tokens=9, ignore_eos=True)
    session.submit([5] * 30, max_tokens=9, ignore_eos=True)
    return session


class TestBlocks:
    def test_of_an_empty_pool_are_free(self) -> None:
        with make_session() as session:
            pane = BlockMap(session).view()

        assert (pane["num_blocks"], pane["num_free"], pane["holders"]) == (24, 24, [])
        assert (unpacked(pane["kinds"]), pane["partly"]) == ([FREE] * 24, [])

    def test_agree_with_the_snapshot_at_every_border(self) -> None:
        with make_session(clock="iterations", block_size=4, num_blocks=96) as session:
            session.submit_workload(spread_workload())
            most, blocks = 0, BlockMap(session)
            while session.step_phase() is not None:
                check_agrees_with_the_snapshot(blocks.view(), session)
                most = max(most, len(blocks.view()["holders"]))

            assert most == 4
            assert blocks.view()["holders"] == []

    def test_fill_up_in_the_order_of_positions(self) -> None:
        with make_session(block_size=8) as session:
            session.submit([1] * 21, max_tokens=9, ignore_eos=True)
            session.run(1)
            pane = BlockMap(session).view()

        (holder,) = pane["holders"]
        assert [tokens_of(pane)[block] for block in blocks_of(holder)] == [8, 8, 5]
        assert holder["tokens"] == 21

    def test_tell_nothing_of_features_that_are_off(self) -> None:
        with make_session() as session:
            session.submit([[1] * 20, [1] * 20], max_tokens=9, ignore_eos=True)
            session.run(2)
            pane = BlockMap(session).view()

        assert (pane["num_cached"], pane["num_shared"], pane["refs"], pane["named"], pane["facts"]) == (
            *(None, 0, "", ""),
            [],
        )


class TestSharing:
    def test_agrees_with_the_snapshot_at_every_border_while_blocks_are_shared_cached_and_evicted(self) -> None:
        with prefix_session(num_blocks=16, capacity_policy="max_utilization") as session:
            blocks = BlockMap(session)
            shared = cached = 0
            while session.step_phase() is not None:
                pane = blocks.view()
                check_agrees_with_the_snapshot(pane, session)
                shared, cached = max(shared, pane["num_shared"]), max(cached, pane["num_cached"] or 0)

            assert shared == 3
            assert cached >= 3
            assert session.engine.pool.num_evicted > 0  # type: ignore[attr-defined]

    def test_counts_references_and_keeps_the_first_holders_hue(self) -> None:
        with prefix_session() as session:
            session.run(2)
            pane = BlockMap(session).view()

        first = blocks_of(pane["holders"][0])[:3]
        assert [unpacked(pane["refs"])[block] for block in first] == [3, 3, 3]
        assert {unpacked(pane["kinds"])[block] for block in first} == {pane["holders"][0]["hue"]}
        assert set(first) <= named_blocks(pane)

    def test_leaves_cached_blocks_behind_which_hold_nobodys_tokens(self) -> None:
        with prefix_session() as session:
            session.run()
            pane = BlockMap(session).view()

        assert pane["holders"] == []
        assert pane["num_cached"] == unpacked(pane["kinds"]).count(CACHED) == len(named_blocks(pane)) > 6
        assert pane["num_free"] == 40 - pane["num_cached"]

    def test_is_full_as_soon_as_a_row_that_skips_it_is_placed(self) -> None:
        """Before its prepare the row's own count of cached tokens is 0, which emptied the blocks of all who share."""
        with prefix_session() as session:
            session.step_phase()
            pane = BlockMap(session).view()

        first = blocks_of(pane["holders"][0])[:3]
        assert [tokens_of(pane)[block] for block in first] == [4, 4, 4]
        assert [holder["tokens"] for holder in pane["holders"]] == [12, 12, 12, 0]

    def test_is_forgotten_where_the_cache_is_reset(self) -> None:
        with prefix_session() as session:
            blocks = BlockMap(session)
            session.run()
            assert named_blocks(blocks.view())
            session.engine.reset_prefix_cache()

            assert named_blocks(blocks.view()) == set()
            assert blocks.view()["num_free"] == 40

    def test_facts_are_the_hit_rate_and_what_gave_way(self) -> None:
        with prefix_session(num_blocks=16, capacity_policy="max_utilization") as session:
            session.run()
            facts, counters = dict(BlockMap(session).view()["facts"]), session.engine.counters

        hit, asked = counters.prefix_hit_tokens, counters.prefix_query_tokens
        assert facts["prefix hits"] == f"{100 * hit / asked:.0f} % ({hit} of {asked} tokens)"
        assert hit >= 36
        assert int(facts["cached blocks evicted"]) > 0
        assert (int(facts["rows paused"]), int(facts["requests evicted"])) == (counters.pauses, counters.evictions)
        assert counters.pauses + counters.evictions > 0


class TestLargePools:
    def test_are_sent_as_a_few_bytes_a_block(self) -> None:
        with make_session(
            num_blocks=10_000, block_size=4, max_sequence_length=2_000, max_batch_tokens=2_000, prefix_caching=True
        ) as session:
            session.submit([[index] * 400 for index in range(4)], max_tokens=5, ignore_eos=True)
            session.run(2)
            pane = BlockMap(session).view()

        assert len(json.dumps(pane)) < 4 * 10_000
        assert len(pane["partly"]) <= 2 * 4
