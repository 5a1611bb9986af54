"""The files that start everything agree with each other, and the checks that say so can fail."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import settings
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tools import check_house, preflight, strip_notebooks

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project() -> dict[str, Any]:
    parsed: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return parsed


@pytest.fixture
def environment() -> dict[str, Any]:
    parsed: dict[str, Any] = yaml.safe_load((ROOT / "environment.yml").read_text())
    return parsed


def make(*arguments: str) -> str:
    """Standard output of make, freed of what an outer make passes down."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-C", str(ROOT), "--no-print-directory", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=outer).stdout


def pip_part(environment: dict[str, Any]) -> list[str]:
    return next(item["pip"] for item in environment["dependencies"] if isinstance(item, dict))


def faults_of_environment(project: dict[str, Any], environment: dict[str, Any]) -> list[str]:
    ours, _ = check_house.pyproject_requirements(project)
    theirs, faults = check_house.environment_requirements(environment)
    return [
        *faults,
        *check_house.check_mission(theirs, source="environment.yml"),
        *check_house.compare_sets(ours, theirs),
    ]


class TestDeclaredPackages:
    def test_this_tree_is_in_order(self, project: dict[str, Any], environment: dict[str, Any]) -> None:
        assert faults_of_environment(project, environment) == []
        assert check_house.check_project(project) == []
        assert check_house.check_environment_python(environment) == []

    @pytest.mark.parametrize("name", check_house.MISSION_PACKAGES)
    def test_misses_each_package_of_the_mission(
        self, name: str, project: dict[str, Any], environment: dict[str, Any]
    ) -> None:
        lines = pip_part(environment)
        lines[:] = [line for line in lines if re.match(r"[\w-]+|.*", line)[0] != name]  # type: ignore[index]

        faults = faults_of_environment(project, environment)

        assert f"environment.yml: {name} is not declared" in faults
        assert f"{name} is in pyproject.toml and not in environment.yml" in faults

    def test_names_a_package_that_only_conda_has(self, project: dict[str, Any], environment: dict[str, Any]) -> None:
        pip_part(environment).append("attrs>=23")

        assert faults_of_environment(project, environment) == ["attrs is in environment.yml and not in pyproject.toml"]

    @pytest.mark.parametrize(
        ("before", "after"),
        [("plotly>=7.1,<8", "plotly>=6,<8"), ("nvtx==0.2.11", 'nvtx==0.2.11 ; platform_system == "Linux"')],
        ids=["range", "marker"],
    )
    def test_shows_both_sides_of_a_difference(
        self, before: str, after: str, project: dict[str, Any], environment: dict[str, Any]
    ) -> None:
        lines = pip_part(environment)
        lines[lines.index(before)] = after

        (fault,) = faults_of_environment(project, environment)

        assert fault.startswith(before.split(">")[0].split("=")[0])
        assert repr(str(Requirement(before))) in fault
        assert repr(str(Requirement(after))) in fault

    @pytest.mark.parametrize("name", check_house.GPU_PACKAGES)
    def test_wants_cuda_packages_behind_a_linux_marker(self, name: str, environment: dict[str, Any]) -> None:
        lines = pip_part(environment)
        lines[:] = [line.split(" ;")[0] if line.startswith(name) else line for line in lines]
        theirs, _ = check_house.environment_requirements(environment)

        assert check_house.check_mission(theirs, source="environment.yml") == [
            f'environment.yml: {name} needs the marker platform_system == "Linux"'
        ]

    def test_wants_cuda_packages_in_the_gpu_extra(self, project: dict[str, Any]) -> None:
        extras = project["optional-dependencies"]
        extras["notebook"] += extras["gpu"]
        extras["gpu"] = []

        assert check_house.check_project(project) == [
            f"pyproject.toml: {name} belongs to the extra gpu" for name in check_house.GPU_PACKAGES
        ]

    def test_wants_dev_tools_pinned(self, project: dict[str, Any]) -> None:
        project["optional-dependencies"]["dev"][0] = "ruff>=0.1"

        assert check_house.check_project(project) == ["pyproject.toml: 'ruff>=0.1' in dev is not pinned with =="]

    def test_wants_the_python_range_in_both(self, project: dict[str, Any], environment: dict[str, Any]) -> None:
        project["requires-python"] = ">=3.10"
        environment["dependencies"].remove("python>=3.11")

        assert len(check_house.check_project(project)) == 1
        assert len(check_house.check_environment_python(environment)) == 1

    def test_wants_torch_in_its_range(self, project: dict[str, Any]) -> None:
        narrowed = copy.deepcopy(project)
        narrowed["dependencies"] = [
            "torch>=2.12" if line.startswith("torch") else line for line in narrowed["dependencies"]
        ]
        found, _ = check_house.pyproject_requirements(narrowed)

        assert check_house.check_mission(found, source="here") == ["here: torch must be >=2.11,<2.15, is >=2.12"]

    def test_refuses_twins_and_nonsense(self) -> None:
        _, faults = check_house.parse_requirements(["a==1", "A==2", "not a requirement"], source="here")

        assert faults[0] == "here: a is declared twice"
        assert faults[1].startswith("here: 'not a requirement' is not a requirement")

    def test_wants_the_project_itself_installed(self, environment: dict[str, Any]) -> None:
        pip_part(environment).remove("--editable .")

        _, faults = check_house.environment_requirements(environment)

        assert faults == ["environment.yml: the pip part does not install the project (--editable .)"]


class TestScripts:
    def test_this_tree_is_in_order(self) -> None:
        assert check_house.check_shell(ROOT / ".ci" / "run") == []

    def test_finds_a_script_that_bash_cannot_parse(self, tmp_path: Path) -> None:
        script = tmp_path / "run"
        script.write_text("set -euo pipefail\nif true; then\n")

        (fault,) = check_house.check_shell(script)

        assert "syntax error" in fault

    def test_finds_a_script_that_goes_on_after_a_failure(self, tmp_path: Path) -> None:
        script = tmp_path / "run"
        script.write_text("make lint\nmake test\n")

        assert check_house.check_shell(script) == ["run: no line 'set -euo pipefail'"]

    def test_ci_calls_the_tests_last_so_that_their_exit_code_is_its_own(self) -> None:
        lines = (ROOT / ".ci" / "run").read_text().splitlines()

        assert lines[-2:] == ["make test", "make test-ui"]
        assert "set -euo pipefail" in lines  # or the first of them could fail unseen


class TestMakefile:
    def test_documents_every_target_once(self) -> None:
        text = (ROOT / "Makefile").read_text()

        assert check_house.check_makefile(text) == []
        assert check_house.check_makefile(text.replace("\nbench:", "\nbanch:")) == [
            "Makefile: no documented target bench"
        ]

    def test_make_alone_lists_the_targets(self) -> None:
        assert {line.split()[0] for line in make().splitlines()}.issuperset(check_house.TARGETS)

    def test_demo_passes_the_device_on(self) -> None:
        assert "-m workbench demo --device cuda\n" in make("--dry-run", "demo", "DEVICE=cuda")
        assert "--device" not in make("--dry-run", "demo", "DEVICE=")

    def test_hooks_run_targets_that_exist(self) -> None:
        makefile = (ROOT / "Makefile").read_text()
        config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
        assert check_house.check_hooks(config, makefile) == []

        config["repos"][0]["hooks"][0]["entry"] = "make polish"
        config["repos"].append({"repo": "https://example.invalid/hooks", "hooks": []})

        assert len(check_house.check_hooks(config, makefile)) == 2


class TestWhitespace:
    def git(self, folder: Path, *arguments: str) -> None:
        subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True)

    def test_sees_faults_that_are_already_committed(self, tmp_path: Path) -> None:
        self.git(tmp_path, "init")
        (tmp_path / "page.md").write_text("clean\ntrailing \n")
        self.git(tmp_path, "add", "page.md")
        self.git(tmp_path, "-c", "user.name=n", "-c", "user.email=e@e", "commit", "-m", "one")

        assert check_house.check_whitespace(tmp_path) == ["git diff --check: page.md:2: trailing whitespace."]

        (tmp_path / "page.md").write_text("clean\n")
        assert check_house.check_whitespace(tmp_path) == []

    def test_says_so_outside_a_checkout(self, tmp_path: Path) -> None:
        (fault,) = check_house.check_whitespace(tmp_path)

        assert fault.startswith("git diff --check")


class TestDecisionPages:
    def test_wants_numbers_without_gaps_and_a_status(self) -> None:
        good = "# 0001: t\n\nStatus: accepted\n"
        assert check_house.check_decisions({"0001-a.md": good, "0002-b.md": "Status: replaced by 0003\n"}) == []

        assert len(check_house.check_decisions({"0001-a.md": good, "0003-b.md": good})) == 1
        assert len(check_house.check_decisions({"0001-a.md": good, "0001-b.md": good})) == 1
        assert len(check_house.check_decisions({"0001-a.md": "# no status\n"})) == 1


class TestPreflight:
    def test_refuses_an_old_python_and_says_what_to_do(self) -> None:
        assert preflight.python_fault((3, 11, 0), "python3") is None
        fault = preflight.python_fault((3, 10, 12), "/usr/bin/python3")

        assert fault is not None
        assert "3.10.12" in fault
        assert "make PYTHON=" in fault

    def test_refuses_a_full_disk_and_says_what_to_do(self) -> None:
        assert preflight.disk_fault(3.0, need_gb=3.0, folder=ROOT) is None
        fault = preflight.disk_fault(0.287, need_gb=3.0, folder=ROOT)

        assert fault is not None
        assert "0.3 GB are free" in fault
        assert "make VENV=" in fault

    def test_warns_of_the_cuda_build_on_linux_only(self) -> None:
        assert preflight.cuda_note(5.0, is_linux=True, folder=ROOT) is not None
        assert preflight.cuda_note(5.0, is_linux=False, folder=ROOT) is None
        assert preflight.cuda_note(50.0, is_linux=True, folder=ROOT) is None

    def test_refuses_a_dead_index_within_seconds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
            monkeypatch.setenv(name, "http://127.0.0.1:9/simple")  # the discard port: nothing listens
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")

        fault = preflight.index_fault(sys.executable)

        assert fault is not None
        assert "check the network" in fault

    def test_asks_nothing_of_the_network_once_installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(preflight, "index_fault", lambda _: "asked")
        (tmp_path / ".stamp-demo").touch()

        assert preflight.main(["check", "--venv", str(tmp_path), "--stamp", ".stamp-demo"]) == 0
        assert preflight.main(["check", "--venv", str(tmp_path), "--stamp", ".stamp-other"]) == 1

    def test_prints_one_line_a_fault(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(preflight, "index_fault", lambda _: None)
        monkeypatch.setattr(preflight, "INSTALL_GB", 0.0)
        monkeypatch.setattr(preflight, "MIN_PYTHON", (99, 0))

        assert preflight.main(["check", "--venv", str(tmp_path / "not" / "there")]) == 1

        lines = capsys.readouterr().err.splitlines()
        assert [line for line in lines if "note" not in line] == [
            f"preflight: {preflight.python_fault(sys.version_info[:3], sys.executable)}"
        ]

    @pytest.mark.parametrize(
        ("version", "expected"),
        [("2.10.9", False), ("2.11.0", True), ("2.13.0+cpu", True), ("2.14.1", True), ("2.15.0", False)],
    )
    def test_reads_torch_range_as_packaging_does(self, version: str, expected: bool) -> None:
        requirement = preflight.torch_requirement(ROOT / "pyproject.toml")

        assert preflight.in_range(version, requirement) is expected
        assert (version.split("+")[0] in SpecifierSet(check_house.TORCH_RANGE)) is expected

    def test_refuses_a_range_it_cannot_read(self) -> None:
        with pytest.raises(ValueError, match=r"~=2\.11"):
            preflight.in_range("2.11", "torch~=2.11")

    def test_finds_the_torch_of_this_environment(self) -> None:
        assert preflight.has_torch() is preflight.in_range(torch.__version__, "torch>=2.11,<2.15")

    def test_needs_the_standard_library_only(self) -> None:
        command = [sys.executable, "-I", "-S", str(ROOT / "tools" / "preflight.py"), "--help"]

        subprocess.run(command, check=True, capture_output=True)


class TestStripNotebooks:
    notebook: dict[str, Any]

    @pytest.fixture(autouse=True)
    def make_notebook(self) -> None:
        self.notebook = {
            "cells": [
                {"cell_type": "markdown", "metadata": {}, "source": ["× kept"]},
                {
                    "cell_type": "code",
                    "metadata": {"execution": {"iopub": "now"}},
                    "source": ["1 + 1"],
                    "execution_count": 3,
                    "outputs": [{"output_type": "execute_result"}],
                },
            ],
            "metadata": {"kernelspec": {"name": "python3"}, "widgets": {"state": {}}},
            "nbformat": 4,
            "nbformat_minor": 5,
        }

    def test_removes_what_running_left_and_nothing_else(self) -> None:
        clean = json.loads(strip_notebooks.stripped(json.dumps(self.notebook)))

        assert clean["cells"][0] == self.notebook["cells"][0]
        assert clean["cells"][1]["source"] == ["1 + 1"]
        assert clean["cells"][1]["outputs"] == []
        assert clean["cells"][1]["execution_count"] is None
        assert clean["metadata"] == strip_notebooks.LAB_METADATA

    def test_leaves_a_clean_notebook_byte_for_byte(self) -> None:
        clean = strip_notebooks.stripped(json.dumps(self.notebook))

        assert strip_notebooks.stripped(clean) == clean
        assert strip_notebooks.stripped(clean.replace("\n", "\n ")) == clean.replace("\n", "\n ")

    def test_check_names_the_file_and_changes_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "a.ipynb"
        path.write_text(json.dumps(self.notebook))

        assert strip_notebooks.main(["--check", str(path)]) == 1
        assert "run make fmt" in capsys.readouterr().out
        assert json.loads(path.read_text()) == self.notebook

        assert strip_notebooks.main([str(path)]) == 0
        assert strip_notebooks.main(["--check", str(path)]) == 0


class TestTestConfiguration:
    def test_torch_computes_on_one_thread(self) -> None:
        assert torch.get_num_threads() == 1

    def test_hypothesis_has_no_deadline_and_ci_draws_the_same_examples(self) -> None:
        assert settings.default is not None
        assert settings.default.deadline is None
        assert settings.get_profile("ci").derandomize
        if os.environ.get("CI") and not os.environ.get("HYPOTHESIS_PROFILE"):
            assert settings.default.derandomize

    @pytest.mark.parametrize("module", ["engine.graphs", "tracing.recorder", "workbench.session"])
    def test_our_own_warnings_are_errors(self, module: str) -> None:
        with pytest.raises(UserWarning, match="ours"):
            warnings.warn_explicit("ours", UserWarning, "file.py", 1, module=module)

    def test_tracing_a_bucket_is_no_error(self) -> None:
        torch.jit.trace(torch.neg, torch.ones(2))

    def test_tests_are_no_packages(self) -> None:
        """With an ``__init__.py``, tests/unit/engine would be imported as ``engine``."""
        assert list((ROOT / "tests").rglob("__init__.py")) == []

    @pytest.mark.gpu
    def test_gpu_tests_run_only_where_there_is_one(self) -> None:
        assert torch.cuda.is_available()
