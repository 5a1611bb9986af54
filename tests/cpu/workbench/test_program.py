"""``python -m workbench`` as a program of its own: what is on standard output, and what it exits with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TINY = ["--model", "shape:tiny", "--max-requests", "4", "--max-sequence-length", "64", "--num-blocks", "16"]


def workbench(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workbench", *argv], cwd=ROOT, capture_output=True, text=True, check=False
    )


class TestProgram:
    def test_json_and_nothing_else_is_on_standard_output(self) -> None:
        done = workbench(
            "compare", *TINY, "--workload", "fixed:requests=3,input=8,output=5", "--graphs", "1,4", "--json"
        )

        assert done.returncode == 0, done.stderr
        document = json.loads(done.stdout)
        assert done.stdout.count("\n") == 1
        assert document["outputs_match"] is True
        assert [leg["name"] for leg in document["legs"]] == ["legacy", "async without overlap", "async"]
        assert "Traceback" not in done.stderr

    def test_a_users_error_is_one_line_and_status_two(self) -> None:
        done = workbench("run", *TINY, "--workload", "fixed:requests=0,input=8,output=5")

        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.splitlines() == [
            "workbench: error: workload 'fixed:requests=0,input=8,output=5': requests must be at least 1, got 0"
        ]

    def test_importing_the_package_brings_in_neither_torch_nor_a_plot(self) -> None:
        code = "import sys, workbench; print([n for n in ('torch', 'plotly', 'transformers') if n in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

        assert done.stdout.strip() == "[]"
