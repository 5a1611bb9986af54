"""Every notebook runs from top to bottom, and stays as it was written: without outputs."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tools.strip_notebooks import stripped

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[!.]*.ipynb"))


def run_notebook(path: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(path, as_version=4)
    # Run from the repository root, where workbench is importable without being installed.
    return NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(ROOT)}}).execute()


def printed(notebook: nbformat.NotebookNode) -> str:
    """All text that the cells printed, one after the other."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestEveryNotebook:
    def test_is_committed_without_outputs(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")

        assert stripped(text) == text

    def test_has_short_cells(self, path: Path) -> None:
        cells = nbformat.read(path, as_version=4).cells

        assert max(cell.source.count("\n") + 1 for cell in cells if cell.cell_type == "code") <= 15


class TestFirstSteps:
    def test_shows_one_iteration_of_every_order(self) -> None:
        notebook = run_notebook(ROOT / "notebooks" / "01_first_steps.ipynb")

        text = printed(notebook)
        for line in ("order: primer", "no_overlap because", "overlap because", "('drain',", "legacy ->", "same tokens:"):
            assert line in text, f"{line!r} is not in what the notebook printed:\n{text}"

    def test_shows_the_snapshot_as_a_table(self) -> None:
        notebook = run_notebook(ROOT / "notebooks" / "01_first_steps.ipynb")

        shown = [o for cell in notebook.cells for o in cell.get("outputs", []) if o.output_type == "execute_result"]
        assert sum("text/html" in output.data for output in shown) >= 6
