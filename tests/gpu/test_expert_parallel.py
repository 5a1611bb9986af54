"""Experts of several ranks on CUDA: NCCL inside captured graphs, as far as one GPU can show it, and two ranks on it.

NCCL runs with one rank here: its collectives are issued, captured and replayed as with more, and change nothing. Two
ranks share the GPU as threads, eagerly. On a machine with two GPUs or more ``TestTwoGpus`` runs NCCL between them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.invariants import check_device, check_idle
from engine.models.loader import load_model
from engine.parallel.distributed import ProcessRanks
from engine.parallel.log import Collective, first_difference, from_rows
from engine.parallel.shard import Shard
from engine.runner import Runner
from tests.gpu.test_engine_cuda import LIMITS, MIX, PROMPTS
from tests.rank_world import on_ranks
from tests.sync_debug import no_hidden_synchronisation

CUDA = torch.device("cuda")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
Answers = list[tuple[Any, ...]]


@pytest.fixture(scope="module")
def nccl() -> Iterator[ProcessRanks]:
    ranks = ProcessRanks(dist.HashStore(), "alone", 0, 1, CUDA, 60.0)
    yield ranks
    ranks.close()


def run(model: str, ranks: Any, **options: Any) -> tuple[Answers, Engine]:
    engine = Engine.from_pretrained(model, EngineConfig(**{**LIMITS, **options}), ranks=ranks, progress=False)
    outputs = engine.generate(PROMPTS, MIX, progress=False)
    if engine.config.debug_invariants:
        check_device(engine)
    check_idle(engine)
    engine._quiesce()
    return [(one.token_ids, one.finish_reason) for one in outputs], engine


class TestNccl:
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    @pytest.mark.parametrize("graphs", [None, -1])
    @pytest.mark.parametrize("drafts", [0, 2])
    def test_changes_no_token_of_the_oracle(
        self, nccl: ProcessRanks, mode: str, graphs: int | None, drafts: int
    ) -> None:
        expected, _ = run("oracle-moe", None, device="inline", mode="legacy")

        found, engine = run("oracle-moe", nccl, device="cuda", mode=mode, graphs=graphs, speculative_tokens=drafts)

        assert found == expected
        if graphs:
            assert engine.counters.graph_hits > 0
            assert engine.counters.graph_misses == 0

    @pytest.mark.parametrize("graphs", [None, "auto"])
    def test_changes_no_token_of_the_shipped_model(self, nccl: ProcessRanks, graphs: Any) -> None:
        options: dict[str, Any] = {"device": "cuda", "dtype": "float64", "speculative_tokens": 2}
        if graphs:
            options |= {"dtype": "float32", "attention_backend": "torch"}
        expected, _ = run("shipped", None, graphs=graphs, **options)

        found, _ = run("shipped", nccl, graphs=graphs, **options)

        assert found == expected

    def test_is_noted_at_every_replay(self, nccl: ProcessRanks) -> None:
        """What a graph does unseen stands in the log as if it were run eagerly."""
        found: list[list[tuple[Any, ...]]] = []
        for graphs in (None, -1):
            config = EngineConfig(**{**LIMITS, "device": "cuda", "graphs": graphs, "speculative_tokens": 1})
            engine = Engine.from_pretrained("oracle-moe", config, ranks=nccl, progress=False)
            engine.add_request([1, 2, 3], GREEDY)
            for _ in range(3):
                engine.step()
            nccl.log.clear()
            engine.step()
            found.append([(one.kind, one.purpose) for one in nccl.log.entries("device")])
            while engine.has_unfinished():
                engine.step()
            engine._quiesce()

        assert found[0] == found[1]
        assert found[0] == [("gather", "draft"), ("sum", "draft")] + 2 * [("gather", "forward"), ("sum", "forward")]

    def test_is_waited_for_by_no_overlap_iteration(self, nccl: ProcessRanks) -> None:
        config = EngineConfig(**{**LIMITS, "device": "cuda", "graphs": "auto"})
        engine = Engine.from_pretrained("oracle-moe", config, ranks=nccl, progress=False)
        for number in range(3):
            engine.add_request([number + 1], GREEDY)
        for _ in range(4):
            engine.step()
        for _ in range(8):
            with no_hidden_synchronisation():
                engine.step()
        while engine.has_unfinished():
            engine.step()


@pytest.fixture
def one_captures_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a thread captures, no other thread of its process may synchronise the GPU; ranks are processes mostly."""
    real, lock, both = Runner.capture, threading.Lock(), threading.Barrier(2)

    def capture(runner: Runner, *arguments: Any) -> None:
        if runner.ranks is None or runner.ranks.size == 1:
            real(runner, *arguments)
            return
        both.wait(60)
        with lock:
            real(runner, *arguments)
        both.wait(60)

    monkeypatch.setattr(Runner, "capture", capture)


@pytest.mark.usefixtures("one_captures_at_a_time")
class TestTwoRanksOnOneGpu:
    @pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    @pytest.mark.parametrize(("model", "drafts"), [("oracle-moe", 0), ("oracle-moe", 2), ("shipped", 2)])
    def test_say_what_one_says(self, model: str, drafts: int, mode: str, dispatch: str) -> None:
        options: dict[str, Any] = {"device": "cuda", "graphs": None, "mode": mode, "speculative_tokens": drafts}
        if model == "shipped":
            options["dtype"] = "float64"
        prompts = [[5, 6, 7], [8] * 17, [9, 10]]

        def serve(ranks: Any, size: int, own: list[list[int]]) -> tuple[list[tuple[int, ...]], list[Collective]]:
            dtype = torch.float64 if model == "shipped" else None
            loaded = load_model(model, dtype=dtype, device=CUDA, shard=Shard(ranks.rank, size))
            config = EngineConfig(**{**LIMITS, **options, "expert_parallel": size, "expert_dispatch": dispatch})
            with Engine(loaded, config, ranks=ranks if size > 1 else None) as engine:
                outputs = engine.generate(own, GREEDY, progress=False)
                return [one.token_ids for one in outputs], ranks.log.entries()

        expected = on_ranks(1, lambda ranks: serve(ranks, 1, prompts))[0][0]
        found = on_ranks(2, lambda ranks: serve(ranks, 2, prompts[:2] if ranks.rank else prompts[2:]))

        assert found[1][0] + found[0][0] == expected
        assert first_difference([log for _, log in found]) is None


SCRIPT = """
    import json, os
    from engine import EngineConfig, SamplingParams
    from engine.engine import Engine
    from engine.parallel.log import to_rows
    options = json.loads(os.environ["OPTIONS"])
    engine = Engine.from_pretrained(os.environ["MODEL"], EngineConfig(expert_parallel=2, **options), progress=False)
    rank = engine.fleet.ranks.rank
    prompts = [[5, 6, 7], [8] * 17] if rank == 0 else [[9, 10]]
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    outputs = engine.generate(prompts, params, progress=False)
    told = {"ids": [one.token_ids for one in outputs], "log": to_rows(engine.fleet.ranks.log.entries())}
    told["hits"] = engine.counters.graph_hits
    open(os.environ["TOLD"] + str(rank), "w").write(json.dumps(told))
    engine.close()
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
class TestTwoGpus:
    @pytest.mark.parametrize("mode", ["legacy", "async"])
    @pytest.mark.parametrize("graphs", [None, -1])
    @pytest.mark.parametrize("drafts", [0, 2])
    def test_over_nccl_say_what_one_says(self, tmp_path: Path, mode: str, graphs: int | None, drafts: int) -> None:
        options = {**LIMITS, "device": "cuda", "mode": mode, "graphs": graphs, "speculative_tokens": drafts}
        script = tmp_path / "rank.py"
        script.write_text(textwrap.dedent(SCRIPT))
        found_by = {"OPTIONS": json.dumps(options), "MODEL": "oracle-moe", "TOLD": str(tmp_path / "told")}
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
        subprocess.run(command, env={**os.environ, **found_by}, check=True, timeout=240)

        told = [json.loads((tmp_path / f"told{rank}").read_text()) for rank in range(2)]
        with Engine.from_pretrained("oracle-moe", EngineConfig(**{**options, "graphs": None}), progress=False) as one:
            expected = one.generate([[5, 6, 7], [8] * 17, [9, 10]], GREEDY, progress=False)
        assert told[0]["ids"] + told[1]["ids"] == [list(output.token_ids) for output in expected]
        assert first_difference([from_rows(each["log"]) for each in told]) is None
        assert not graphs or all(each["hits"] > 0 for each in told)
