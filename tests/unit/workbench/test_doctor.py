"""The doctor tells what is there, and a remedy for all that is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fake_nsys import make_fake_nsys, there_is_nsys
from workbench.cli import main
from workbench.doctor import Check, _nsys, _nvtx, _package, examine, format_checks
from workbench.nsys_tool import Nsys, NsysError, find_nsys
from workbench.nsys_trial import try_ranges


class TestDoctor:
    def test_every_missing_piece_has_a_remedy_and_every_found_one_a_version(self) -> None:
        for check in examine():
            assert check.found or check.remedy, check
            assert not check.found or check.detail, check

    def test_a_missing_package_is_told_with_its_remedy(self) -> None:
        check = _package("no-such-package", "nothing", "pip install it", "no_such_package")

        assert (check.found, check.detail, check.remedy) == (False, "", "pip install it")

    def test_a_missing_profiler_is_told_with_its_remedy(self) -> None:
        def refuse() -> Nsys:
            raise NsysError("Nsight Systems is not here; install it")

        check = _nsys(find=refuse)
        assert (check.found, check.detail, check.remedy) == (False, "", "Nsight Systems is not here; install it")

    def test_a_profiler_that_records_a_range_of_ours_is_told_apart_from_one_that_does_not(self, tmp_path: Path) -> None:
        nsys = Nsys(make_fake_nsys(tmp_path))

        good = _nsys(find=lambda: nsys, trial=lambda tool: None)
        bad = _nsys(find=lambda: nsys, trial=lambda tool: "pip install nvtx==0.2.11")
        assert (good.detail, good.remedy) == ("2099.1.1 (tried: it records our ranges)", "")
        assert (bad.found, bad.detail, bad.remedy) == (True, "2099.1.1", "pip install nvtx==0.2.11")

    def test_another_nvtx_gets_the_pinned_one_as_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("workbench.doctor.version", lambda package: "0.2.17")

        check = _nvtx()
        assert check.detail.startswith("0.2.17 (")
        assert check.remedy.endswith("pip install nvtx==0.2.11")

    def test_an_attached_tool_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NVTX_DISABLE", raising=False)
        monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/tool.so")

        assert _nvtx().detail == (
            "0.2.11 (no tool attached: /opt/tool.so, which NVTX_INJECTION64_PATH names, was not loaded)"
        )

    @pytest.mark.slow
    @pytest.mark.skipif(not there_is_nsys(), reason="needs Nsight Systems")
    def test_the_profiler_that_is_here_records_a_range_of_ours(self) -> None:
        assert try_ranges(find_nsys()) is None

    def test_a_profiler_that_makes_no_report_is_told(self, tmp_path: Path) -> None:
        silent = tmp_path / "nsys"
        silent.write_text("#!/bin/sh\n", encoding="utf-8")
        silent.chmod(0o755)

        assert try_ranges(Nsys(silent)) == (
            "our capture range did not reach it (it ended with status 0): pip install nvtx==0.2.11"
        )

    def test_prints_a_line_a_piece(self) -> None:
        found = Check(name="torch", needed_for="everything", found=True, detail="2.13", remedy="")
        missing = Check(name="GPU", needed_for="cuda", found=False, detail="", remedy="buy one")

        lines = format_checks([found, missing]).splitlines()

        assert lines[0].split() == ["found", "torch", "2.13", "everything"]
        assert lines[1].endswith("-> buy one")

    def test_json_is_one_document(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor", "--json"]) == 0

        names = [check["name"] for check in json.loads(capsys.readouterr().out)]
        assert {"torch", "GPU", "flashinfer-python", "mamba-ssm", "nvtx", "nsys", "jupyterlab"} <= set(names)
