"""Figures as notebooks show them and as files: real formats, with what the numbers depend on inside."""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.unit.tracing.traces import device, phase
from tests.unit.workbench.figures.figure_worlds import MS, iterations, requests, spans, trace
from tests.unit.workbench.worlds import make_session
from tracing.trace import Records
from workbench.figures import FIGURES, Figure, FigureError, make_figure
from workbench.figures.draw_static import LOOKS, draw
from workbench.figures.errors import FigureImportError
from workbench.figures.figure import footer_lines
from workbench.figures.provenance import Provenance, config_hash

FACTS = (
    "model toy",
    f"config {config_hash({'model': 'toy', 'device': 'cpu', 'seed': 7, 'mode': 'async'})}",
    "commit abc123def456-dirty",
    "hardware Pico 1, 2 cores",
    "seed 7",
    "clock iterations",
    "void iterations left out: 1 of 3 (1 × stepped by hand or held at a breakpoint)",
)


@pytest.fixture
def figure() -> Figure:
    """Of a run with one void iteration behind the two that count."""
    last = iterations()[1]
    void = type(last)(
        iteration=2,
        mode="async",
        order="overlap",
        reason="decode only",
        begin_ns=last.end_ns,
        end_ns=last.end_ns + 5,
        void_reasons=("hand_stepped",),
    )
    return make_figure("latency", trace(records=Records(spans=spans(), iterations=[*iterations(), void])))


@pytest.fixture
def full() -> Figure:
    return make_figure("latency", trace(records=Records(spans=spans(), iterations=iterations(), requests=requests())))


def png_texts(data: bytes) -> dict[str, str]:
    """Text chunks, their checksums looked at."""
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    texts, at, kinds = {}, 8, []
    while at < len(data):
        size, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        assert zlib.crc32(kind + body) == int.from_bytes(data[at + 8 + size : at + 12 + size], "big")
        if kind == b"iTXt":
            key, rest = body.split(b"\0", 1)
            texts[key.decode()] = rest[2:].split(b"\0", 2)[2].decode()
        elif kind == b"tEXt":
            key, value = body.split(b"\0", 1)
            texts[key.decode()] = value.decode("latin-1")
        kinds.append(kind)
        at += 12 + size
    assert kinds[0] == b"IHDR"
    assert kinds[-1] == b"IEND"
    return texts


class TestProvenance:
    def test_tells_what_numbers_depend_on(self, figure: Figure) -> None:
        assert tuple(figure.provenance.parts) == FACTS

    def test_says_once_what_runs_share_and_of_each_what_they_do_not(self) -> None:
        parts = Provenance.of([trace("legacy"), trace("async")]).parts

        assert parts[0] == "model toy"
        assert re.fullmatch(r"config legacy [0-9a-f]{12}, async [0-9a-f]{12}", parts[1])
        assert parts[-1] == "void iterations left out: 0 of 2"

    def test_names_the_gpu_of_a_run_that_used_it(self) -> None:
        (run,) = Provenance.of([trace(config={"model": "toy", "device": "cuda"})]).runs

        assert run.hardware == "NVIDIA H200 + Pico 1, 2 cores"
        assert run.seed == "unknown"

    def test_tells_of_delays_that_were_put_in_on_purpose(self) -> None:
        delayed = trace(environment={"delays_s": {"resolve": 0.002}})

        assert "injected delays resolve 2 ms" in Provenance.of([delayed]).parts

    def test_the_hash_is_of_the_configuration_and_not_of_its_order(self) -> None:
        assert config_hash({"a": 1, "b": [2.5, None]}) == config_hash({"b": [2.5, None], "a": 1})
        assert config_hash({"a": 1}) != config_hash({"a": 2})
        # sha256 of {"a":1}, by sha256sum
        assert config_hash({"a": 1}) == "015abd7f5cc5"

    def test_a_line_of_the_footer_breaks_between_facts_only(self) -> None:
        assert footer_lines(["aaaa", "bb", "c" * 20, "d"], 10) == ["aaaa · bb", "c" * 20, "d"]


class TestFiles:
    def test_svg_has_the_footer_and_titles_as_text(self, figure: Figure, tmp_path: Path) -> None:
        path = figure.save(tmp_path / "new" / "latency.svg")

        root = ElementTree.fromstring(path.read_bytes())
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        text = "\n".join("".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text"))
        assert all(fact in text for fact in FACTS)
        assert "TTFT: time to first token" in "".join(root.itertext())

    def test_png_is_one_and_says_it_in_its_metadata(self, figure: Figure, tmp_path: Path) -> None:
        texts = png_texts(figure.save(tmp_path / "latency.png").read_bytes())

        assert texts["Title"] == "Latency"
        assert all(fact in texts["Description"] for fact in FACTS)

    def test_pdf_is_one_and_says_it_in_its_metadata(self, figure: Figure, tmp_path: Path) -> None:
        data = figure.save(tmp_path / "latency.pdf").read_bytes()

        assert data.startswith(b"%PDF-")
        assert data.rstrip().endswith(b"%%EOF")
        found = re.search(rb"/Subject (\((?:\\.|[^\\)])*\)|<[0-9A-Fa-f]*>)", data)
        assert found is not None
        assert all(fact in _pdf_text(found[1]) for fact in FACTS)

    def test_html_opens_offline_and_has_the_footer(self, full: Figure, tmp_path: Path) -> None:
        page = full.save(tmp_path / "latency.html").read_text(encoding="utf-8")

        assert FACTS[1] in page
        assert len(page) > 1_000_000  # plotly's script is inside
        assert not re.findall(r"<script[^>]*\bsrc=", page)

    @pytest.mark.parametrize("template", ["light", "dark"])
    @pytest.mark.parametrize("name", FIGURES)
    def test_every_figure_is_drawn_in_both_themes(self, name: str, template: str, tmp_path: Path) -> None:
        made = make_figure(name, [trace("legacy"), trace("async")], template=template)

        svg = made.save(tmp_path / "a.svg").read_text(encoding="utf-8")

        assert "legacy" in svg
        assert made.chart.axes[0].y_title in svg
        assert ("#14181f" in svg) is (template == "dark")
        assert made.figure.layout.template.layout.paper_bgcolor == ("white" if template == "light" else "rgb(17,17,17)")

    @pytest.mark.parametrize("name", FIGURES)
    def test_an_empty_one_says_what_to_do(self, name: str, tmp_path: Path) -> None:
        empty = make_figure(name, trace(records=Records()))

        assert "Nothing has run yet" in empty.save(tmp_path / "a.svg").read_text(encoding="utf-8")
        assert any("Nothing has run yet" in note.text for note in empty.figure.layout.annotations)

    def test_the_same_figure_gives_the_same_file(self, full: Figure, tmp_path: Path) -> None:
        for suffix in ("svg", "png", "pdf"):
            first, again = (full.save(tmp_path / f"{name}.{suffix}").read_bytes() for name in ("a", "b"))
            assert first == again

    @pytest.mark.parametrize("name", ["latency", "latency.jpg", "latency.svg.gz"])
    def test_an_unknown_suffix_is_refused_and_nothing_is_written(self, full: Figure, tmp_path: Path, name: str) -> None:
        with pytest.raises(FigureError, match=r"must end in one of \.svg, \.png, \.pdf, \.html"):
            full.save(tmp_path / name)
        assert not list(tmp_path.iterdir())

    def test_signs_that_mean_something_to_a_library_are_text(self, tmp_path: Path) -> None:
        odd = make_figure("throughput", {"a<b> $x^2$ & co": trace(), "_hidden": trace()})

        svg = odd.save(tmp_path / "a.svg")

        text = "".join(ElementTree.fromstring(svg.read_bytes()).itertext())
        assert "a<b> $x^2$ & co\n" in text
        assert " _hidden\n" in text
        assert odd.figure.data[0].name == "a&lt;b&gt; $x^2$ &amp; co"

    def test_axes_side_by_side_share_a_scale_that_holds_the_largest(self) -> None:
        """The first run's axis once ended the growing of the scale, and the second run's bars were cut."""
        work = [device("forward", 9 * MS, 10 * MS, 1), device("forward", 18 * MS, 19 * MS, 1)]
        slow = Records(spans=[*spans()[:5], *work, phase("prepare", 11 * MS, 18 * MS, 1)], iterations=iterations())
        made = make_figure("bubbles", [trace("one"), trace("two", records=slow)], by="iteration", window=1)

        sides = draw(made.chart, made.footer, LOOKS["light"]).axes

        tops = [side.get_ylim()[1] for side in sides]
        assert tops[0] == tops[1] > 8_000
        assert sides[0].get_ylim()[0] == 0


def _pdf_text(value: bytes) -> str:
    """A string of a PDF, by its marks."""
    if value.startswith(b"<"):
        raw = bytes.fromhex(value[1:-1].decode())
    else:
        # Escapes are of octal digits, or of the character itself.
        raw = re.sub(rb"\\([0-7]{3}|.)", lambda m: bytes([int(m[1], 8)]) if len(m[1]) == 3 else m[1], value[1:-1])
    return raw.decode("utf-16" if raw.startswith(b"\xfe\xff") else "latin-1")


class TestNotebook:
    def test_shows_plotly_and_a_line_of_text(self, full: Figure, monkeypatch: pytest.MonkeyPatch) -> None:
        renderers = import_module("plotly.io").renderers
        monkeypatch.setattr(renderers, "default", "plotly_mimetype")

        bundle = full._repr_mimebundle_()

        assert len(bundle["application/vnd.plotly.v1+json"]["data"]) == 3
        assert bundle["text/plain"] == "<Figure Latency of async: 2 rows>"

    def test_plotly_draws_every_series_with_axis_titles(self, full: Figure) -> None:
        drawn = full.figure

        assert [one.type for one in drawn.data] == ["scatter"] * 3
        assert drawn.layout.xaxis.title.text == "time (ms)"
        assert drawn.layout.yaxis.title.text == "requests served within it (%)"
        assert any(FACTS[1] in note.text for note in drawn.layout.annotations)

    def test_is_a_widget_among_others(self, full: Figure) -> None:
        assert type(full.widget()).__name__ == "FigureWidget"

    def test_a_session_draws_its_own(self) -> None:
        with make_session() as session:
            figure = session.figure("latency", template="dark")

        assert figure.template == "dark"
        assert "model oracle" in figure.provenance.text
        assert figure.chart.is_empty


class TestImports:
    def test_no_library_of_plots_is_loaded_before_something_is_drawn(self) -> None:
        code = (
            "import sys; import workbench.figures, workbench.comparison;"
            "print([n for n in ('plotly', 'matplotlib', 'ipywidgets', 'anywidget') if n in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == "[]"

    @pytest.mark.parametrize(("name", "library"), [("a.svg", "matplotlib"), ("a.html", "plotly")])
    def test_a_missing_library_is_one_line_with_the_extra_that_brings_it(
        self, full: Figure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
    ) -> None:
        for module in [module for module in sys.modules if module.partition(".")[0] == library]:
            monkeypatch.delitem(sys.modules, module)
        honest = builtins.__import__

        def refuse(module: str, *more: Any, **options: Any) -> Any:
            if module.partition(".")[0] == library:
                raise ImportError(module)
            return honest(module, *more, **options)

        monkeypatch.setattr(builtins, "__import__", refuse)
        monkeypatch.setattr("workbench.figures.errors.import_module", lambda module: refuse(module))

        with pytest.raises(FigureImportError, match=rf"needs {library}: pip install '\.\[notebook\]', or make lab"):
            full.save(tmp_path / name)
