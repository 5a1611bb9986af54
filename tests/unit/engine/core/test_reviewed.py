"""Defects that a reviewer found, each with the story of its fault."""

from __future__ import annotations

import dataclasses
import gc
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import CheckpointError, ConfigError, EngineConfig, EngineError, SamplingParams
from engine.engine import Engine
from engine.errors import DeviceError
from engine.models.loader import LoadedModel, load_model
from engine.phases import Phase
from tests.checkpoints import edit_config, write_checkpoint
from tracing.recorder import Recorder
from workbench import Session
from workbench.cli import main

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
SMALL: dict[str, Any] = {"max_requests": 4, "max_batch_tokens": 64, "max_sequence_length": 64}


def oracle() -> LoadedModel:
    return load_model("oracle", device=torch.device("cpu"))


def drain(engine: Engine) -> list[Any]:
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    return outputs


class TestClosed:
    @pytest.mark.timeout(60)
    def test_an_engine_refuses_instead_of_waiting_for_ever(self) -> None:
        engine = Engine(oracle(), EngineConfig(**SMALL))
        engine.add_request([1, 2], GREEDY)
        engine.step()
        engine.close()

        for call in (engine.step, engine.reset, engine.recover, lambda: engine.add_request([1], GREEDY)):
            with pytest.raises(EngineError, match="closed"):
                call()
        with pytest.raises(DeviceError, match="closed"):
            engine.device.synchronize()

    @pytest.mark.timeout(60)
    def test_a_session_can_still_be_read(self) -> None:
        with Session("oracle") as session:
            session.submit([1, 2, 3], max_tokens=4, temperature=0)
            session.run()

        assert len(session.iterations()) > 0
        assert "tokens/s" in str(session.summary())


class TestFailedConstruction:
    def test_leaves_no_threads(self) -> None:
        before = threading.active_count()

        for _ in range(3):
            with pytest.raises(ConfigError, match="max_sequence_length"):
                Engine.from_pretrained("oracle", EngineConfig(max_sequence_length=100_000), progress=False)
        gc.collect()

        assert threading.active_count() <= before


class TestLoadedModels:
    def test_an_eos_id_outside_the_vocabulary_harms_nobody(self) -> None:
        loaded = dataclasses.replace(oracle(), eos_token_ids=(-1,))
        with Engine(loaded, EngineConfig(**SMALL)) as engine:
            outputs = engine.generate(
                [[1, 2], [3]], [GREEDY, SamplingParams(max_tokens=4, min_tokens=1)], progress=False
            )

        assert [output.finish_reason for output in outputs] == ["length", "length"]

    def test_the_stored_dtype_is_the_weights(self) -> None:
        loaded = load_model("shape:tiny", dtype=torch.float64, device=torch.device("cpu"))

        with Engine(loaded, EngineConfig(device="inline", **SMALL)) as engine:
            assert engine.resolved.dtype == "float64"
        with pytest.raises(ConfigError, match="was loaded in float64"):
            Engine(loaded, EngineConfig(device="inline", dtype="float32", **SMALL))

    @pytest.mark.parametrize(
        "edits", [{"rms_norm_eps": "a"}, {"rope_parameters": "x"}, {"num_attention_heads": 0}, {"head_dim": "x"}]
    )
    def test_a_damaged_configuration_is_one_clear_error(self, edits: dict[str, Any], tmp_path: Path) -> None:
        folder = edit_config(write_checkpoint(tmp_path / "model", "LlamaForCausalLM"), **edits)

        with pytest.raises(CheckpointError, match="model"):
            load_model(folder, device=torch.device("cpu"))

    def test_a_damaged_tokenizer_is_one_clear_error(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path / "model", "LlamaForCausalLM")
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": 3}}))

        with pytest.raises(CheckpointError, match="tokenizer"):
            load_model(folder, device=torch.device("cpu"))


class TestStreams:
    def test_an_abort_behind_resolve_is_followed_by_the_last_output_alone(self) -> None:
        """It holds the token that resolve had given before the abort, and no output comes between."""
        with Engine(oracle(), EngineConfig(device="inline", **SMALL)) as engine:
            request_id = engine.add_request([7], GREEDY, stream=True)
            for _ in range(3):
                engine.step()
            while (border := engine.step_phase()) is not None and border.phase is not Phase.RESOLVE:
                pass
            assert engine.abort(request_id)

            outputs = drain(engine)

        assert [output.finish_reason for output in outputs] == ["abort"]
        assert len(outputs[0].token_ids) == 3


class TestRecorder:
    def test_an_interrupt_while_times_are_read_breaks_nothing_later(self) -> None:
        class Interrupting:
            """Device times whose end raises once, as a Ctrl-C there would."""

            start_ns = 1
            raises = True

            def done(self) -> bool:
                return True

            @property
            def end_ns(self) -> int:
                if self.raises:
                    self.raises = False
                    raise KeyboardInterrupt
                return 2

        recorder = Recorder(nvtx=False)
        recorder.device("forward", "compute", 0, Interrupting())
        with pytest.raises(KeyboardInterrupt):
            recorder.spans()

        assert [(span.start_ns, span.end_ns) for span in recorder.spans()] == [(1, 2)]


class TestUserErrors:
    def test_a_report_that_cannot_be_written_is_refused_before_the_run(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        begin = time.perf_counter()

        status = main(["run", "--model", "oracle", "--workload", "fixed:requests=1", "--report", "/proc/none/x.html"])

        captured = capsys.readouterr()
        assert (status, captured.out) == (2, "")
        assert "--report /proc/none/x.html cannot be written" in captured.err
        assert time.perf_counter() - begin < 60

    def test_a_graph_size_that_can_never_be_used_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="5000"):
            Engine(oracle(), EngineConfig(graphs=[5000], device="inline", **SMALL))

    def test_a_pool_beyond_all_memory_is_one_clear_error(self) -> None:
        with pytest.raises(ConfigError, match=r"takes .* GiB"):
            Engine(oracle(), EngineConfig(num_blocks=10**14, device="inline", **SMALL))

    def test_a_folder_that_cannot_be_made_is_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        status = main(["bench", "--only", "host", "--quick", "--out", "/proc/none"])

        assert status == 2
        assert capsys.readouterr().err.strip().splitlines()[-1].startswith("workbench: error: ")
