"""The order of collectives of several ranks, side by side."""

from __future__ import annotations

from dataclasses import replace

from engine.parallel.log import Collective
from engine.request import SamplingParams
from tests.rank_world import rank_world
from workbench.collectives import collectives_table


def account(*, is_dummy: bool = False, iterations: int = 3) -> list[Collective]:
    """As a rank's log gives it: the host's before the device's."""
    host = [Collective("host", "agree", "options", 14 * part, 128) for part in range(2)]
    host += [
        Collective("host", "agree", topic, at, 128) for at in range(iterations) for topic in ("iteration", "batch")
    ]
    device = [
        Collective("device", kind, "forward", at, 640, is_dummy)
        for at in range(iterations)
        for kind in ("gather", "sum")
    ]
    return host + device


class TestSideBySide:
    def test_rows_follow_the_iterations_and_keep_the_order_of_each_place(self) -> None:
        table = collectives_table([account(), account()])
        told = [(row.place, row.first.purpose, row.number) for row in table.rows[:7]]

        assert told == [
            ("host", "options", 0),
            ("host", "options", 1),
            ("host", "iteration", 2),
            ("host", "batch", 3),
            ("device", "forward", 0),
            ("device", "forward", 1),
            ("host", "iteration", 4),
        ]
        for place in ("host", "device"):
            numbers = [row.number for row in table.rows if row.place == place]
            assert numbers == list(range(len(numbers)))

    def test_dummy_work_is_marked_and_is_no_difference(self) -> None:
        table = collectives_table([account(), account(is_dummy=True)])

        assert table.difference is None
        assert [table.rows[4].cell(rank) for rank in (0, 1)] == ["✓", "dummy"]
        assert "2 ranks did the same, in the same order: 8 of the host and 6 of the device" in str(table)
        assert "repeating-linear-gradient" in table._repr_html_()
        assert "repeating-linear-gradient" not in collectives_table([account(), account()])._repr_html_()

    def test_the_first_difference_is_marked_and_told(self) -> None:
        other = account()
        other[-3] = replace(other[-3], num_bytes=1_280)
        table = collectives_table([account(), other])
        (marked,) = [row for row in table.rows if table.is_different(row)]

        assert (marked.place, marked.number) == ("device", 3)
        assert str(table).startswith("device collective 3 differs; rank 0: sum for forward in iteration 1, 640 bytes")
        assert next(line for line in str(table).splitlines() if line.startswith("→")).endswith("1,280 bytes")
        assert table._repr_html_().count("background:#F6C6CE") == 1

    def test_a_rank_that_stopped_did_nothing_any_more(self) -> None:
        table = collectives_table([account(), account(iterations=2)])

        assert table.difference is not None
        assert table.rows[-1].cell(1) == "nothing"

    def test_of_many_those_around_the_difference_are_shown(self) -> None:
        logs = [account(iterations=500), account(iterations=500)]
        assert "more, in .rows" in str(collectives_table(logs))
        logs[1][202] = replace(logs[1][202], kind="sum")
        table = collectives_table(logs)

        assert any(table.is_different(row) for row in table.shown())
        assert len(table.shown()) == 60

    def test_nothing_was_done_yet(self) -> None:
        assert "0 of the host" in str(collectives_table([[], []]))


def test_engines_of_two_ranks_are_seen_to_do_the_same() -> None:
    greedy = SamplingParams(max_tokens=4, temperature=0.0, seed=0, ignore_eos=True)
    with rank_world(2) as world:
        world.on(0, lambda one: one.submit([1, 2, 3], greedy))
        world.drain()
        table = collectives_table(world.logs())

    assert table.difference is None
    assert {row.cell(1) for row in table.rows if row.place == "device"} == {"dummy"}
    assert {row.cell(0) for row in table.rows} == {"✓"}
