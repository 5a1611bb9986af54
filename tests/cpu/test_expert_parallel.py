"""Models whose experts are spread over ranks say what they say on one rank, in float64, for every way of sharing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import EngineConfig, SamplingParams
from engine.config import MODES, Mode
from engine.engine import Engine
from engine.errors import CheckpointError
from engine.models.loader import SHIPPED, load_model
from engine.models.moe import Experts
from engine.parallel.log import first_difference, from_rows
from engine.parallel.shard import Shard
from engine.request import RequestOutput
from tests.checkpoints import write_checkpoint
from tests.cpu.models.test_hybrid_families import GRANITE, GRANITE_KEYS, NEMOTRON, NEMOTRON_KEYS
from tests.cpu.models.test_moe_families import GLM4, MIXTRAL, QWEN3
from tests.rank_world import on_ranks

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=1)
DRAWN = SamplingParams(max_tokens=10, temperature=0.8, seed=11, ignore_eos=True, logprobs=1)
PROMPTS = [[5, 6, 7, 8, 9], [11] * 16, [3, 1, 4, 1, 5, 9, 2, 6] * 4 + [7], [12]]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (MIXTRAL[0], {**MIXTRAL[1], "num_local_experts": 4}),
    "qwen3": QWEN3,
    "glm4": GLM4,
    "nemotron": (NEMOTRON, NEMOTRON_KEYS),
    "granite": (GRANITE, {**GRANITE_KEYS, "num_local_experts": 4}),
}
"""As many experts as four ranks can share."""
LIMITS: dict[str, Any] = {
    "max_requests": 4,
    "max_batch_tokens": 64,
    "max_sequence_length": 64,
    "num_blocks": 40,
    "device": "inline",
    "debug_invariants": True,
}
TIME_LIMIT_S = 120


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    written = {"shipped": SHIPPED}
    for name, (architecture, sizes) in FAMILIES.items():
        written[name] = write_checkpoint(tmp_path_factory.mktemp(name), architecture, **sizes)
    return written


def served(
    folder: Path, shares: Sequence[Sequence[int]], params: SamplingParams = GREEDY, **options: Any
) -> dict[int, RequestOutput]:
    """The prompts' answers, each served by the rank whose share it is in."""
    size = len(shares)

    def serve(ranks: Any) -> list[RequestOutput]:
        shard = Shard(ranks.rank, size)
        loaded = load_model(folder, dtype=torch.float64, device=CPU, shard=shard)
        config = EngineConfig(**{**LIMITS, "expert_parallel": size, **options})
        with Engine(loaded, config, ranks=ranks if size > 1 else None) as engine:
            return engine.generate([PROMPTS[number] for number in shares[ranks.rank]], params, progress=False)

    answers = on_ranks(size, serve)
    return {
        number: output
        for share, outputs in zip(shares, answers, strict=True)
        for number, output in zip(share, outputs, strict=True)
    }


def check_same(found: dict[int, RequestOutput], expected: dict[int, RequestOutput]) -> None:
    assert found.keys() == expected.keys()
    for number, one in found.items():
        other = expected[number]
        assert one.token_ids == other.token_ids
        for row, wanted in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert row == pytest.approx(wanted, abs=1e-6)


ALONE = [[0, 1, 2, 3]]


class TestRanksSayWhatOneSays:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_of_every_family(self, folders: dict[str, Path], family: str, mode: Mode) -> None:
        expected = served(folders[family], ALONE, mode=mode)

        check_same(served(folders[family], [[0, 1], [2, 3]], mode=mode), expected)
        check_same(served(folders[family], [[0], [], [1, 2, 3], []], mode=mode), expected)

    @pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
    @pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
    @pytest.mark.parametrize("drafts", [0, 2])
    def test_of_the_shipped_model(
        self, folders: dict[str, Path], drafts: int, params: SamplingParams, dispatch: str
    ) -> None:
        options: dict[str, Any] = {"speculative_tokens": drafts, "prefix_caching": True}
        expected = served(folders["shipped"], ALONE, params, **options)

        for shares in ([[0, 1], [2, 3]], [[], [0, 1, 2, 3]]):
            check_same(served(folders["shipped"], shares, params, expert_dispatch=dispatch, **options), expected)

    def test_in_chunks(self, folders: dict[str, Path]) -> None:
        options: dict[str, Any] = {"chunked_prefill": True, "max_batch_tokens": 12, "speculative_tokens": 1}
        expected = served(folders["shipped"], ALONE, speculative_tokens=1)

        check_same(served(folders["shipped"], [[0, 1], [2, 3]], **options), expected)

    def test_in_traced_buckets(self, folders: dict[str, Path]) -> None:
        options: dict[str, Any] = {"graphs": (4, 40), "max_sequence_length": 48, "debug_invariants": False}
        expected = served(folders["mixtral"], ALONE)

        check_same(served(folders["mixtral"], [[0, 1], [2, 3]], **options), expected)


class TestAShard:
    def test_holds_its_own_experts_and_everything_else(self, folders: dict[str, Path]) -> None:
        whole = load_model(folders["qwen3"], device=CPU).model
        halves = [load_model(folders["qwen3"], device=CPU, shard=Shard(rank, 2)).model for rank in range(2)]
        assert isinstance(whole, torch.nn.Module)
        for name, parameter in whole.named_parameters():
            parts = [half.get_parameter(name) for half in halves if isinstance(half, torch.nn.Module)]
            if ".experts." in name:
                assert torch.equal(torch.cat(parts), parameter)
            else:
                assert all(torch.equal(part, parameter) for part in parts)

    def test_of_random_weights_has_the_values_of_the_whole(self) -> None:
        whole, half = (load_model("shape:tiny-hybrid", shard=shard).model for shard in (None, Shard(1, 2)))
        assert isinstance(whole, torch.nn.Module)
        assert isinstance(half, torch.nn.Module)
        for name, parameter in whole.named_parameters():
            own = half.get_parameter(name)
            assert torch.equal(own, parameter[parameter.shape[0] // 2 :] if ".experts." in name else parameter), name

    def test_is_not_run_by_an_engine_alone(self, folders: dict[str, Path]) -> None:
        loaded = load_model(folders["mixtral"], device=CPU, shard=Shard(0, 2))
        with pytest.raises(Exception, match="holds the experts of rank 0 of 2 only"):
            Engine(loaded, EngineConfig(**LIMITS))

    def test_needs_all_of_the_checkpoint(self, folders: dict[str, Path], tmp_path: Path) -> None:
        """Another rank's experts are not copied, but they must be there, and of the right shape."""
        for file in folders["qwen3"].iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        weights = load_file(tmp_path / "model.safetensors")
        name = next(name for name in weights if ".experts." in name)
        del weights[name]
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

        for rank in range(2):
            with pytest.raises(CheckpointError, match="lacks"):
                load_model(tmp_path, device=CPU, shard=Shard(rank, 2))

    def test_keeps_its_share_of_the_memory(self, folders: dict[str, Path]) -> None:
        model = load_model(folders["qwen3"], device=CPU, shard=Shard(0, 4)).model
        assert isinstance(model, torch.nn.Module)
        layers = [module for module in model.modules() if isinstance(module, Experts)]
        assert {layer.up.shape[0] for layer in layers} == {2}


COMMON = """
    import json, os, sys, torch
    from engine import EngineConfig, SamplingParams
    from engine.engine import Engine
    from engine.parallel.log import to_rows
    torch.set_num_threads(1)
"""
SCRIPT = """
    config = EngineConfig(expert_parallel=2, dtype="float64", rank_timeout_s=30, speculative_tokens=1, device="cpu")
    engine = Engine.from_pretrained("shipped", config, progress=False)
    rank = engine.fleet.ranks.rank
    params = SamplingParams(max_tokens=12, temperature=0.0)
"""


FAMILIES_SCRIPT = """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    told = {}
    for name, folder, mode, options in json.loads(os.environ["RUNS"]):
        config = EngineConfig(expert_parallel=size, mode=mode, dtype="float64", rank_timeout_s=30, **options)
        engine = Engine.from_pretrained(folder, config, progress=False)
        params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=1)
        outputs = engine.generate(json.loads(os.environ["PROMPTS"])[rank::size], params, progress=False)
        log = to_rows(engine.fleet.ranks.log.entries())
        told[f"{name} {mode}"] = {"ids": [one.token_ids for one in outputs], "log": log}
        engine.close()
    print(json.dumps(told))
"""


def run_ranks(tmp_path: Path, body: str, *, size: int = 2, **variables: str) -> list[subprocess.CompletedProcess[str]]:
    """A script on processes that find each other as those of torchrun do; killed if they hang."""
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(COMMON) + body)
    port = 20_000 + os.getpid() % 20_000
    started = []
    for rank in range(size):
        found_by = {
            **variables,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        command = [sys.executable, "-X", "faulthandler", str(script)]
        environment = {**os.environ, **found_by, "PYTHONPATH": os.getcwd()}  # noqa: PTH109
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))  # type: ignore[call-overload]
    until, done = time.monotonic() + TIME_LIMIT_S, []
    for process in started:
        try:
            out, error = process.communicate(timeout=max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            for other in started:
                other.send_signal(signal.SIGABRT)  # faulthandler writes all stacks
            texts = [other.communicate()[1] for other in started]
            raise AssertionError("the ranks hang:\n" + "\n".join(texts)) from None
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, error))
    return done


class TestProcesses:
    def test_over_gloo_say_what_one_says(self, tmp_path: Path) -> None:
        done = run_ranks(
            tmp_path,
            textwrap.dedent(SCRIPT)
            + textwrap.dedent("""
            outputs = engine.generate(["def main("] if rank == 0 else ["import ", "class A"], params, progress=False)
            log = to_rows(engine.fleet.ranks.log.entries())
            print(json.dumps({"texts": [one.text for one in outputs], "log": log}))
            engine.close()
            """),
        )
        assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
        told = [json.loads(one.stdout.splitlines()[-1]) for one in done]
        with Engine.from_pretrained("shipped", EngineConfig(dtype="float64"), progress=False) as engine:
            params = SamplingParams(max_tokens=12, temperature=0.0)
            expected = engine.generate(["def main(", "import ", "class A"], params, progress=False)
        assert told[0]["texts"] + told[1]["texts"] == [one.text for one in expected]
        assert first_difference([from_rows(one["log"]) for one in told]) is None

    @pytest.mark.parametrize("size", [2, 4])
    def test_over_gloo_of_every_family(self, folders: dict[str, Path], tmp_path: Path, size: int) -> None:
        """With drafts where there are heads."""
        families = ["mixtral", "qwen3", "nemotron", "shipped"]
        options = {"max_requests": 4, "max_batch_tokens": 64, "max_sequence_length": 64, "num_blocks": 40}
        runs = [
            (name, str(folders[name]), mode, {**options, "speculative_tokens": 2 * (name == "shipped")})
            for name in families
            for mode in MODES
        ]
        done = run_ranks(
            tmp_path, textwrap.dedent(FAMILIES_SCRIPT), size=size, RUNS=json.dumps(runs), PROMPTS=json.dumps(PROMPTS)
        )

        assert not any(one.returncode for one in done), done[0].stderr + done[-1].stderr
        told = [json.loads(one.stdout.splitlines()[-1]) for one in done]
        for name, _, mode, _ in runs:
            here = [one[f"{name} {mode}"] for one in told]
            found = {number: here[number % size]["ids"][number // size] for number in range(len(PROMPTS))}
            expected = served(folders[name], ALONE, mode=mode)
            assert found == {number: list(one.token_ids) for number, one in expected.items()}, f"{name} {mode}"
            assert first_difference([from_rows(one["log"]) for one in here]) is None

    def test_report_one_that_is_killed(self, tmp_path: Path) -> None:
        done = run_ranks(
            tmp_path,
            textwrap.dedent(SCRIPT)
            + textwrap.dedent("""
            for number in range(3):
                engine.add_request("def main(", params)
            for number in range(1000):
                engine.step()
                if rank == 1 and number == 4:
                    os.kill(os.getpid(), 9)
            """),
        )

        assert done[1].returncode == -signal.SIGKILL
        assert done[0].returncode == 1
        assert "another rank has died, hangs, or is not driven" in done[0].stderr
