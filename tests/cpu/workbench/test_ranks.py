"""Ranks that are processes, under torchrun and through ipyparallel. Each test ends within its limit, whatever hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tracing.run_folder import read_run
from workbench.cluster import Cluster, ClusterError

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 150
OPTIONS: dict[str, Any] = {
    "device": "inline",
    "dtype": "float64",
    "max_requests": 4,
    "max_batch_tokens": 128,
    "max_sequence_length": 128,
}
FLAGS = [word for name, value in OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
WORK = ["--workload", "fixed:requests=5,input=12,output=6,arrive=9,temperature=0.8"]
"""Each ends before the next arrives: in between all ranks sleep, and jump to it together."""


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Ended with all its children at the limit."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def torchrun(*argv: str) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "workbench", "run"]
    return run([*start, "--expert-parallel", "2", *FLAGS, *argv])


@pytest.mark.timeout(2 * LIMIT_S + 10)
class TestTorchrun:
    def test_ranks_say_what_one_says_and_only_rank_0_prints(self, tmp_path: Path) -> None:
        alone = run([sys.executable, "-m", "workbench", "run", *FLAGS, *WORK, "--json"])
        assert alone.returncode == 0, alone.stderr
        expected = json.loads(alone.stdout)

        done = torchrun(*WORK, "--json", "--save", str(tmp_path / "run"))

        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") == 1
        told = json.loads(done.stdout)
        for name in ("request_id", "output_token_ids", "finish_reason"):
            assert [one[name] for one in told["requests"]] == [one[name] for one in expected["requests"]]
        assert [one["rank"] for one in told["requests"]] == [0, 1, 0, 1, 0]
        assert told["collectives"]["host"] > 0
        assert told["collectives"]["device"] > 0
        assert [read_run(tmp_path / f"run-rank{rank}").rank for rank in range(2)] == [0, 1]


@pytest.mark.skipif(find_spec("ipyparallel") is None, reason="needs ipyparallel")
@pytest.mark.timeout(LIMIT_S)
class TestProcessesOfACluster:
    @pytest.fixture
    def cluster(self) -> Iterator[Cluster]:
        with Cluster(ranks=2, clock="iterations", rank_timeout_s=30.0, progress=False, **OPTIONS) as cluster:
            yield cluster

    def test_step_together_say_what_threads_say_and_tell_who_died(self, cluster: Cluster) -> None:
        with Cluster(ranks=2, in_process=True, clock="iterations", progress=False, **OPTIONS) as threads:
            for one in (cluster, threads):
                one.submit("def add(a, b):", rank=0, max_tokens=5, seed=1)
                one.submit("import ", rank=1, arrival=3, max_tokens=5, seed=2)
                for _ in range(6):
                    one.step_phase()
                one.mode = "legacy"
                one.run()
                one.check_collectives()
            expected = {name: output.token_ids for name, output in threads.outputs.items()}

        assert {name: output.token_ids for name, output in cluster.outputs.items()} == expected
        assert [len(one.trace.records.iterations) for one in cluster.traces()] == [cluster.places[0].begun] * 2
        with pytest.raises(ClusterError, match="processes of their own"):
            _ = cluster.sessions

        cluster.submit("class ", rank=0, max_tokens=50)
        cluster.step()
        victim = cluster._asking.connection.links[1].process  # type: ignore[attr-defined]
        os.kill(victim, signal.SIGKILL)
        begin_s = time.monotonic()
        with pytest.raises(ClusterError, match=rf"rank 1 \(process {victim} on .*\), run: it has died"):
            cluster.run()
        assert time.monotonic() - begin_s < 30  # what ranks may wait for one another
        with pytest.raises(ClusterError, match="rank 1 is lost"):
            cluster.step()
