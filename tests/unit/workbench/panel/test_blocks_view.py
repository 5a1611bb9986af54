"""The block map: holders, hues and how full each block is."""

from __future__ import annotations

from tests.unit.workbench.worlds import make_session, spread_workload
from workbench.panel.blocks_view import blocks_view
from workbench.panel.requests_view import RequestRows


class TestBlocks:
    def test_of_an_empty_pool_are_free(self) -> None:
        with make_session() as session:
            pane = blocks_view(session)

        assert (pane["num_blocks"], pane["num_free"], pane["holders"]) == (24, 24, [])
        assert (pane["hues"], pane["fill"]) == ([-1] * 24, [0.0] * 24)

    def test_agree_with_the_snapshot_at_every_border(self) -> None:
        with make_session(clock="iterations", block_size=4, num_blocks=96) as session:
            session.submit_workload(spread_workload())
            most = 0
            while session.step_phase() is not None:
                pane, blocks = blocks_view(session), session.snapshot().blocks
                hues = {row["request_id"]: row["hue"] for row in RequestRows(session).view()["rows"]}
                assert pane["num_free"] == blocks.num_free == pane["hues"].count(-1)
                assert pane["hues"] == [-1 if name is None else hues[name] for name in blocks.holders]
                for holder in pane["holders"]:
                    assert tuple(sorted(holder["blocks"])) == blocks.held_by(holder["request_id"])
                    filled = sum(pane["fill"][block] for block in holder["blocks"])
                    assert round(filled * pane["block_size"], 6) == holder["tokens"]
                most = max(most, len(pane["holders"]))

        assert most == 4
        assert blocks_view(session)["holders"] == []

    def test_fill_up_in_the_order_of_positions(self) -> None:
        with make_session(block_size=8) as session:
            session.submit([1] * 21, max_tokens=9, ignore_eos=True)
            session.run(1)
            pane = blocks_view(session)

        (holder,) = pane["holders"]
        assert [pane["fill"][block] for block in holder["blocks"]] == [1.0, 1.0, 0.625]
        assert holder["tokens"] == 21
