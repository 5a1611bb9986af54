"""The benchmarks of drafting and of state updates measure what they say, in turns; times are nobody's test."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import drafting, ssm_update
from benchmarks.drafting_stretches import OWN, Sizes, spread, tokens_expected
from engine import draft_passes
from engine.ssm.torch import TorchStateSpace
from tests.ssm_batches import Sizes as LayerSizes

QUICK = ("--quick", "--device", "inline", "--batches", "2", "--repeats", "1")


@pytest.fixture(autouse=True)
def _no_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.drafting.copy_bandwidth", lambda device: 1e9)


def measured(tmp_path: Path, *words: str, status: int = 0) -> dict[str, Any]:
    path = tmp_path / "found.json"
    assert drafting.main([*QUICK, *words, "--out", str(path)]) == status
    document: dict[str, Any] = json.loads(path.read_text())
    return document


class TestDrafting:
    def test_forces_acceptance_at_every_rate_in_one_engine(self, tmp_path: Path) -> None:
        found = measured(tmp_path, "--drafts", "0", "2", "--rates", "0", "1", "--repeats", "2")

        told = [(cell["drafts"], cell["rate"], cell["tokens_a_step"], cell["acceptance"]) for cell in found["cells"]]
        assert told == [(0, None, 1.0, []), (2, 0.0, 1.0, [0.0, 0.0]), (2, 1.0, 3.0, [1.0, 1.0])]
        assert len(found["engines"]) == 2
        for cell in found["cells"]:
            assert cell["tpot_ms"]["count"] == cell["step_ms"]["count"] == 2
            assert cell["tpot_ms"]["median"] == pytest.approx(cell["step_ms"]["median"] / cell["tokens_a_step"])

    def test_divides_by_the_tokens_to_be_expected_and_not_by_those_that_chance_drew(self, tmp_path: Path) -> None:
        found = measured(tmp_path, "--drafts", "2", "--rates", OWN, "0.5", "--batches", "1", "--repeats", "1")

        cells = {cell["rate"]: cell for cell in found["cells"]}
        for rate, tokens in ((0.5, 1.75), (OWN, cells[OWN]["tokens_a_step"])):
            assert cells[rate]["tpot_ms"]["median"] == pytest.approx(cells[rate]["step_ms"]["median"] / tokens)

    def test_measures_in_the_middle_of_the_cache_that_is_asked_for(self, tmp_path: Path) -> None:
        found = measured(tmp_path, "--drafts", "1", "--rates", "1", "--cached", "60", "--repeats", "2")

        assert found["cells"][0]["cached"] == pytest.approx(60, abs=12)

    def test_lets_acceptance_be_the_models_own_again_afterwards(self, tmp_path: Path) -> None:
        own = draft_passes.count_accepted
        measured(tmp_path, "--drafts", "1", "--rates", OWN, "0.5")
        assert draft_passes.count_accepted is own

    def test_has_an_entry_for_each_leg_and_a_ratio_for_each_later_one(self, tmp_path: Path) -> None:
        found = measured(tmp_path, "--drafts", "0", "1", "--rates", "1", "--repeats", "3", "--legs", "async", "legacy")

        assert [(cell["drafts"], cell["leg"]) for cell in found["cells"]] == [(0, "async"), (1, "async"), (1, "legacy")]
        (pair,) = found["pairs"]
        assert (pair["leg"], pair["over"], pair["drafts"], pair["rate"]) == ("legacy", "async", 1, 1.0)
        assert pair["step_ratio"] == spread(pair["turns"])
        assert len(pair["turns"]) == 3

    def test_counts_the_states_of_a_row(self, tmp_path: Path) -> None:
        legs = ("async+state_rewind=stored", "async+state_rewind=replayed")
        found = measured(tmp_path, "--drafts", "0", "2", "--rates", "1", "--legs", *legs)

        none, stored, replayed = (engine["state_bytes_per_row"] for engine in found["engines"])
        assert stored == pytest.approx(3 * none, rel=0.25)  # the dummy's share is another
        assert none < replayed < stored
        assert found["pairs"][0]["state_bytes_per_row"] == [replayed, stored]
        assert found["engines"][0]["config"]["state_rewind"] == "auto", "without drafts it means nothing"

    def test_refuses_a_leg_whose_option_there_is_not_before_it_measures(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(drafting, "measure", None)
        with pytest.raises(SystemExit) as stopped:
            drafting.main([*QUICK, "--legs", "async", "async+later_rewind=true"])
        assert stopped.value.code == 2
        assert "later_rewind" in capsys.readouterr().err

    def test_names_what_does_not_fit_and_goes_on(self, tmp_path: Path) -> None:
        found = measured(tmp_path, "--drafts", "5", "0", status=1)

        (failed,) = found["failed"]
        assert failed.startswith("shape:tiny-hybrid S=5 2 rows: speculative_tokens=5")
        assert [cell["drafts"] for cell in found["cells"]] == [0]

    def test_names_what_no_time_was_left_for(self, tmp_path: Path) -> None:
        found = measured(tmp_path, "--drafts", "0", "1", "--seconds", "0")

        assert found["left_out"] == ["shape:tiny-hybrid S=0 2 rows", "shape:tiny-hybrid S=1 2 rows"]
        assert found["cells"] == []

    def test_takes_turns_at_going_first_and_lets_the_models_own_text_come_before_forced_one(self) -> None:
        order: list[tuple[str, Any]] = []

        def seat(name: str) -> Any:
            return SimpleNamespace(
                leg=SimpleNamespace(name=name), stretch=lambda rate, sizes: order.append((name, rate))
            )

        sizes = Sizes(steps=1, settle=1, repeats=2, cached=64)
        rest: Any = None
        group = drafting.Group(loaded=rest, base=rest, legs=[], drafts=1, batch=1, rates=[0.5, OWN], sizes=sizes)
        times = group.take_turns([seat("a"), seat("b")])

        turns = [("a", OWN), ("b", OWN), ("b", OWN), ("a", OWN), ("a", 0.5), ("b", 0.5), ("b", 0.5), ("a", 0.5)]
        assert order == turns
        assert {key: len(found) for key, found in times.items()} == dict.fromkeys(set(turns), 2)

    def test_expects_the_tokens_of_a_row_that_its_rate_gives(self) -> None:
        assert [tokens_expected(rate, 2) for rate in (0.0, 0.5, 1.0)] == [1.0, 1.75, 3.0]
        assert tokens_expected(None, 0) == 1


class TestSsmUpdate:
    @pytest.fixture
    def bench(self, monkeypatch: pytest.MonkeyPatch) -> ssm_update.Bench:
        """A pool on the CPU, in which a call takes as many microseconds as there are calls."""

        def time_us(calls: list[Any]) -> float:
            for call in calls:
                call()
            return float(len(calls))

        monkeypatch.setattr(ssm_update, "time_us", time_us)
        monkeypatch.setattr(ssm_update, "triton", TorchStateSpace)
        monkeypatch.setattr(ssm_update, "mamba_ssm", lambda: None)
        return ssm_update.Bench(LayerSizes(heads=4, head_dim=8, groups=2, state=16, slots=20), torch.float32, "cpu")

    def test_tells_the_share_of_a_copy_of_as_many_bytes(self, bench: ssm_update.Bench) -> None:
        copy, update = ssm_update.compare_updates(bench, "small", [4], lambda rows: ssm_update.ways(bench, rows, ()))

        assert (copy.name, update.name) == ("copy", "ours")
        assert copy.num_bytes == update.num_bytes == 2 * 4 * 4 * 8 * 16 * 4
        assert (copy.us, update.us) == (2.0, 5.0), "from four slots to four, and five times four in place"
        assert (copy.share_of_copy, update.share_of_copy) == (1.0, 0.4)

    def test_moves_states_and_copies_others_than_it_reads(self, bench: ssm_update.Bench) -> None:
        before = bench.state.clone()
        ((_, calls),) = ssm_update.ways(bench, 4, ())
        calls[0]()
        moved = [bool((now != then).any()) for now, then in zip(bench.state, before, strict=True)]
        assert moved == [True] * 4 + [False] * 17
        bench.copies(4)[0]()
        assert torch.equal(bench.state[:4], bench.state[4:8])

    @pytest.mark.parametrize("shape", ["nemotron-h-4b", "hybrid-2b"])
    @pytest.mark.parametrize("rows", ssm_update.ROWS)
    def test_goes_through_more_states_than_a_cache_holds(self, shape: str, rows: int) -> None:
        sizes = ssm_update.sizes_of(shape)
        bench = ssm_update.Bench.__new__(ssm_update.Bench)
        bench.sizes = sizes
        bench.state = torch.empty((1, sizes.heads, sizes.head_dim, sizes.state), device="meta")

        for step in (rows, 2 * rows):
            firsts = bench.firsts(rows, step)
            assert len(firsts) * rows * bench.state_bytes >= 1 << 28
            assert firsts[-1] + step <= sizes.slots
