"""How ``workbench run`` deals a workload out to ranks, and what it refuses; tests/cpu/workbench starts ranks."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig
from engine.request import SamplingParams
from engine.sampling.rng import derive_seed
from workbench.cli import main
from workbench.rank_commands import ALL_ON_0, ROUND_ROBIN, deal
from workbench.workloads import RequestSpec, Workload

COUNT = 7


def workload(concurrency: int | None = None) -> Workload:
    specs = tuple(
        RequestSpec(prompt=(number,), params=SamplingParams(seed=5 if number == 3 else None), arrival=0.0)
        for number in range(COUNT)
    )
    return Workload(name="made", requests=specs, concurrency=concurrency)


class TestDeal:
    @pytest.mark.parametrize("way", [ROUND_ROBIN, ALL_ON_0])
    @pytest.mark.parametrize("size", [2, 3, 9])
    def test_every_request_comes_to_one_rank_under_the_name_it_has_on_one(self, way: str, size: int) -> None:
        parts = [deal(workload(), rank, size, way, seed=0) for rank in range(size)]

        dealt = {
            name: spec.prompt
            for part in parts
            for name, spec in zip(part.request_ids, part.workload.requests, strict=True)
        }
        assert dealt == {f"request-{number}": (number,) for number in range(COUNT)}
        assert sum(len(part.request_ids) for part in parts) == COUNT

    def test_by_turns(self) -> None:
        assert deal(workload(), 1, 3, ROUND_ROBIN, seed=0).request_ids == ("request-1", "request-4")

    def test_all_on_rank_0(self) -> None:
        assert [len(deal(workload(), rank, 3, ALL_ON_0, seed=0).request_ids) for rank in range(3)] == [COUNT, 0, 0]

    def test_seeds_are_those_of_one_rank(self) -> None:
        part = deal(workload(), 1, 2, ROUND_ROBIN, seed=9)

        assert [spec.params.seed for spec in part.workload.requests] == [derive_seed(9, 1), 5, derive_seed(9, 5)]

    @pytest.mark.parametrize(("room", "size", "shares"), [(5, 2, [3, 2]), (4, 2, [2, 2]), (1, 2, [1, 1])])
    def test_the_room_of_a_closed_loop_is_shared_out(self, room: int, size: int, shares: list[int]) -> None:
        parts = [deal(workload(room), rank, size, ROUND_ROBIN, seed=0) for rank in range(size)]

        assert [part.workload.concurrency for part in parts] == shares


class TestRefusals:
    def error(self, capsys: pytest.CaptureFixture[str], *argv: str) -> str:
        assert main(argv) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        return printed.err

    def test_ranks_without_a_launcher(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "torchrun --nproc-per-node N" in self.error(
            capsys, "run", "--model", "oracle-moe", "--expert-parallel", "2"
        )

    def test_commands_that_know_one_rank_name_the_one_that_knows_several(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        told = self.error(capsys, "compare", "--model", "oracle-moe", "--expert-parallel", "2")

        assert "compare runs on one rank" in told
        assert "torchrun --nproc-per-node 2 -m workbench run --expert-parallel 2" in told

    def test_dealing_requests_out_to_one_rank(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "--rank-requests all-on-0 needs several ranks" in self.error(
            capsys, "run", "--model", "oracle", "--rank-requests", "all-on-0"
        )

    def test_processes_that_know_nothing_of_one_another(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)

        assert "add --expert-parallel 2" in self.error(capsys, "run", "--model", "oracle-moe")

    def test_one_rank_is_asked_for_nothing_new(self) -> None:
        assert not EngineConfig().has_ranks
