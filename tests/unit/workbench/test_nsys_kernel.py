"""The Jupyter kernel under Nsight Systems: what is written, and that it outlives its capture ranges."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fake_nsys import make_fake_nsys, there_is_nsys
from workbench import nsys_kernel
from workbench.cli import main
from workbench.nsys_tool import NSYS_VARIABLE, Nsys, find_nsys


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Jupyter's folder of the user, empty."""
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    return tmp_path / "jupyter" / "kernels"


class TestInstall:
    def test_writes_a_kernel_that_survives_the_end_of_a_capture_range(self, kernels: Path, tmp_path: Path) -> None:
        nsys = make_fake_nsys(tmp_path)
        reports = tmp_path / "reports"
        call = ["install-nsys-kernel", "--user", "--nsys", str(nsys), "--reports", str(reports)]

        assert main(call) == 0

        spec = json.loads((kernels / nsys_kernel.KERNEL / "kernel.json").read_text(encoding="utf-8"))
        argv = spec["argv"]
        assert argv[:2] == [str(nsys), "profile"]
        assert {"--capture-range=nvtx", "--nvtx-capture=capture@engine", "--capture-range-end=repeat"} <= set(argv)
        assert f"--output={reports}/notebook-%p" in argv
        assert argv[-5:] == [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        assert spec["interrupt_mode"] == "message"

    def test_is_found_by_jupyter(self, kernels: Path, tmp_path: Path) -> None:
        manager = pytest.importorskip("jupyter_client.kernelspec").KernelSpecManager(kernel_dirs=[str(kernels)])
        spec = nsys_kernel.kernel_spec(Nsys(Path("/opt/nsys")), tmp_path, trace=("nvtx",))
        nsys_kernel.write_kernel(kernels / nsys_kernel.KERNEL, spec)

        assert manager.get_kernel_spec(nsys_kernel.KERNEL).argv == spec["argv"]

    def test_can_be_taken_away_and_then_is_gone(
        self, kernels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main(["install-nsys-kernel", "--user", "--nsys", str(make_fake_nsys(tmp_path)), "--reports", str(tmp_path)])

        assert main(["install-nsys-kernel", "--user", "--remove"]) == 0
        assert not (kernels / nsys_kernel.KERNEL).exists()
        assert main(["install-nsys-kernel", "--user", "--remove"]) == 0
        assert "there is no kernel in" in capsys.readouterr().out.splitlines()[-1]

    def test_goes_into_this_environment_unless_it_is_for_the_user(self) -> None:
        assert nsys_kernel.kernel_folder(user=False).is_relative_to(sys.prefix)

    def test_without_nsys_is_one_line_with_the_remedy(
        self, monkeypatch: pytest.MonkeyPatch, kernels: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv(NSYS_VARIABLE, "/nowhere/nsys")

        assert main(["install-nsys-kernel", "--user"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "install NVIDIA Nsight Systems" in line
        assert not kernels.exists()


_OPEN = """\
from workbench import Session
session = Session("oracle", device="inline", max_requests=2, max_sequence_length=64)
session.submit([[1, 2, 3]] * 2, max_tokens=30, ignore_eos=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not there_is_nsys(), reason="needs Nsight Systems")
def test_two_captures_in_a_kernel_are_two_reports_and_the_kernel_lives(kernels: Path, tmp_path: Path) -> None:
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import KernelManager

    spec = nsys_kernel.kernel_spec(find_nsys(), tmp_path, trace=("nvtx",))
    nsys_kernel.write_kernel(kernels / nsys_kernel.KERNEL, spec)
    manager: Any = KernelManager(
        kernel_name=nsys_kernel.KERNEL, kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(kernels)])
    )
    manager.start_kernel(cwd=str(Path(__file__).resolve().parents[3]))
    client = manager.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        for code in (
            _OPEN,
            "session.capture(5)",
            "session.capture(5)",
            "assert session.engine.controller.next_index == 10",
        ):
            reply = client.execute_interactive(code, timeout=120, output_hook=lambda message: None)
            assert reply["content"]["status"] == "ok", reply["content"]
        assert manager.is_alive()
    finally:
        client.stop_channels()
        manager.shutdown_kernel()
    assert len(list(tmp_path.glob("notebook-*.[12].*"))) >= 2
