"""The account of what ranks do together, and the checker that compares accounts."""

from __future__ import annotations

from engine.parallel.log import Collective, CollectiveLog, Difference, first_difference, from_rows, to_rows


def agree(topic: str, iteration: int) -> Collective:
    return Collective("host", "agree", topic, iteration, 128)


def gather(purpose: str, iteration: int, num_bytes: int = 64, *, is_dummy: bool = False) -> Collective:
    return Collective("device", "gather", purpose, iteration, num_bytes, is_dummy)


class TestFirstDifference:
    def test_is_none_where_all_ranks_did_the_same(self) -> None:
        log = [agree("iteration", 0), agree("batch", 0), gather("forward", 0)]

        assert first_difference([log, list(log), list(log)]) is None

    def test_takes_dummy_work_for_the_same(self) -> None:
        assert first_difference([[gather("forward", 0)], [gather("forward", 0, is_dummy=True)]]) is None

    def test_names_the_first_place_where_a_rank_did_something_else(self) -> None:
        logs = [
            [gather("draft", 1), gather("forward", 1), gather("forward", 2)],
            [gather("draft", 1), gather("forward", 1), gather("forward", 2)],
            [gather("forward", 1), gather("draft", 1), gather("forward", 2)],
        ]

        found = first_difference(logs)

        assert found == Difference("device", 0, (0, 2), (logs[0][0], logs[2][0]))
        assert str(found) == (
            "device collective 0 differs; rank 0: gather for draft in iteration 1, 64 bytes; "
            "rank 2: gather for forward in iteration 1, 64 bytes"
        )

    def test_sees_another_size_and_an_end_that_comes_too_soon(self) -> None:
        size = first_difference([[gather("forward", 0, 64)], [gather("forward", 0, 128)]])
        end = first_difference([[agree("iteration", 0), agree("batch", 0)], [agree("iteration", 0)]])

        assert size is not None
        assert end == Difference("host", 1, (0, 1), (agree("batch", 0), None))
        assert "rank 1: nothing" in str(end)

    def test_names_what_came_first_and_not_what_followed_from_it(self) -> None:
        """A rank that stopped for a collective of its device is missed at the host's next agreement, too."""
        logs = [
            [agree("iteration", 4), gather("draft", 4)],
            [agree("iteration", 4), agree("iteration", 5), gather("forward", 4)],
        ]

        found = first_difference(logs)

        assert found == Difference("device", 0, (0, 1), (logs[0][1], logs[1][2]))

    def test_compares_the_host_and_the_device_apart(self) -> None:
        """A device works behind its host, by how much differs from rank to rank."""
        logs = [
            [agree("iteration", 0), gather("forward", 0), agree("iteration", 1)],
            [agree("iteration", 0), agree("iteration", 1), gather("forward", 0)],
        ]

        assert first_difference(logs) is None


class TestCollectiveLog:
    def test_says_what_a_device_did_it_for(self) -> None:
        log = CollectiveLog()
        with log.during("draft", 3, is_dummy=True):
            log.add_device("gather", 10)
        log.add_device("gather", 10)

        assert [(one.purpose, one.iteration, one.is_dummy) for one in log.entries()] == [
            ("draft", 3, True),
            ("capture", -1, False),
        ]

    def test_notes_what_a_captured_graph_repeats_with_each_replay(self) -> None:
        log = CollectiveLog()
        with log.capturing() as issued:
            log.add_device("gather", 10)
            log.add_device("sum", 20)
        assert log.entries() == []

        for iteration in (4, 5):
            with log.during("forward", iteration):
                log.replay(issued)

        assert [(one.kind, one.iteration) for one in log.entries("device")] == [
            ("gather", 4),
            ("sum", 4),
            ("gather", 5),
            ("sum", 5),
        ]

    def test_keeps_the_newest_and_counts_all(self) -> None:
        log = CollectiveLog(capacity=2)
        for iteration in range(5):
            log.add("host", "agree", "iteration", iteration, 128)

        assert [one.iteration for one in log.entries()] == [3, 4]
        assert log.counts() == {"host": 5, "device": 0}

    def test_goes_through_plain_values(self) -> None:
        entries = [agree("batch", 2), gather("draft", 2, is_dummy=True)]

        assert from_rows(to_rows(entries)) == entries
