"""The doctor tells what is there, and a remedy for all that is not."""

from __future__ import annotations

import json

import pytest

from workbench.cli import main
from workbench.doctor import Check, _nsys, _package, examine, format_checks


class TestDoctor:
    def test_every_missing_piece_has_a_remedy_and_every_found_one_a_version(self) -> None:
        for check in examine():
            assert check.found or check.remedy, check
            assert not check.found or check.detail, check

    def test_a_missing_package_is_told_with_its_remedy(self) -> None:
        check = _package("no-such-package", "nothing", "pip install it", "no_such_package")

        assert (check.found, check.detail, check.remedy) == (False, "", "pip install it")

    def test_a_missing_profiler_is_told(self) -> None:
        assert not _nsys(which=lambda name: None).found

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
