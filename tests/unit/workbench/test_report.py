from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

import workbench.report as report_module
from engine.phases import Order, Phase
from tests.unit.tracing.simulated import Lengths, simulate
from tests.unit.tracing.traces import batch, detail, device, phase, record, wait
from tracing.comparison import KINDS_NOTE
from tracing.recorder import Recorder
from tracing.records import PHASE_COLOURS, Category, IterationRecord, RequestRecord, Span
from tracing.void_words import VOID_WORDS
from tracing.windows import host_work
from workbench.border_view import step_borders
from workbench.report import RunView, differing_fields, render_report, write_report
from workbench.report_border import Border, BorderInput, Choice, border_input, find_borders
from workbench.report_data import ORDER_COLOURS, initial_views, run_data
from workbench.report_idle import idle_groups
from workbench.report_pack import packed

NASTY = "</script><img src=x onerror=alert(1)>&\"'"


class Page(HTMLParser):
    """What a browser would see: elements, attributes, text, and the embedded data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.handlers: list[str] = []
        self.text = ""
        self.data = ""
        self._inside: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self._inside = "data" if ("id", "data") in attrs else tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside == "data":
            self.data += data
        elif self._inside not in ("script", "style"):
            self.text += data


def small_run(name: str = "async", **fields: Any) -> RunView:
    spans = [
        phase("prepare", 1000, 1400),
        detail("publish", 1100, 1200),
        phase("resolve", 1500, 1900),
        wait(1550, 1700),
        device("forward", 1300, 1700),
        device("fetch", 1700, 1720, lane="copy"),
        Span(name="abort", category=Category.INSTANT, lane="host", start_ns=1950, end_ns=1950, args={"request": "r1"}),
        Span(name="free_blocks", category=Category.COUNTER, lane="host", start_ns=1960, end_ns=1960, value=4.0),
    ]
    iterations = [record(0, 990, 2000, launched=batch(0), consumed=batch(0))]
    requests = [RequestRecord(request_id="r1", arrival_ns=900, first_token_ns=1_001_900, finish_reason="stop")]
    return RunView(name, spans, iterations, requests, **fields)


def page_of(*runs: RunView, **fields: Any) -> Page:
    return Page(render_report(list(runs), **({"title": "Demo"} | fields)))


def span_count(data: dict[str, Any]) -> int:
    return sum(len(lane["start"]) for lane in data["lanes"].values())


class TestPage:
    def test_is_one_file_that_asks_for_nothing(self, tmp_path: Path) -> None:
        path = write_report(tmp_path / "deep" / "report.html", [small_run()], title="Demo")
        text = path.read_text(encoding="utf-8")
        page = Page(text)
        assert page.links == ["data:,"]
        assert not re.search(r"https?://|@import|url\(", text)
        assert "prefers-color-scheme: dark" in text

    def test_contains_every_span_of_every_run(self) -> None:
        first, second = small_run("legacy"), small_run("async")
        runs = json.loads(page_of(first, second).data)["runs"]
        assert [run["name"] for run in runs] == ["legacy", "async"]
        assert [span_count(run) for run in runs] == [len(first.spans), len(second.spans)]
        assert json.loads(page_of(first).data)["phaseColours"] == PHASE_COLOURS

    def test_text_from_outside_is_escaped_everywhere(self) -> None:
        spans = [phase(NASTY, 0, 10)]
        iterations = [record(0, 0, 10, order=NASTY, reason=NASTY, wasted_rows={NASTY: 1}, void_reasons=(NASTY,))]
        requests = [RequestRecord(request_id=NASTY, arrival_ns=0, finish_reason=NASTY)]
        run = RunView(NASTY, spans, iterations, requests, config={NASTY: NASTY}, environment={NASTY: NASTY})
        page = page_of(run, title=NASTY, environment={NASTY: NASTY}, notes=[NASTY])
        plain = page_of(small_run(config={"a": 1}), environment={"a": 1}, notes=["a"])
        assert "img" not in page.tags
        assert page.handlers == []
        assert page.tags.count("script") == plain.tags.count("script") == 2
        assert page.text.count(NASTY) >= 8
        assert json.loads(page.data)["runs"][0]["names"] == [NASTY]

    def test_shows_facts_notes_numbers_and_requests(self) -> None:
        text = page_of(
            small_run("legacy", config={"mode": "legacy", "seed": 0}),
            small_run("async", config={"mode": "async", "seed": 0}),
            environment={"torch": "2.13.0"},
            notes=["Outputs are identical."],
        ).text
        for shown in ("2.13.0", "Outputs are identical.", "hidden share", "no samples", "decode only (1)", "1.001"):
            assert shown in text
        assert "The runs differ in: mode." in text

    def test_strikes_out_the_times_of_void_requests_and_says_why(self) -> None:
        """The panel struck them out, the report did not."""
        counts = RequestRecord(request_id="counts", arrival_ns=0, admitted_ns=10**6)
        marked = RequestRecord(request_id="marked", arrival_ns=0, admitted_ns=2 * 10**6, void_reasons=("paced",))
        # Records of earlier versions carry no mark: the void iteration beside them tells.
        beside = RequestRecord(request_id="beside", arrival_ns=20, admitted_ns=21, finished_ns=25)
        iterations = [record(0, 20, 30, void_reasons=("debugger",))]
        page = render_report(
            [RunView("one", [], iterations, [replace(counts, finished_ns=15), marked, beside])], title="x"
        )
        struck = re.findall(r'<td class="void" title="does not count: ([^"]+)">([^<]+)</td>', page)

        assert struck == [
            (VOID_WORDS["paced"], "2.00"),
            ("a void iteration ran while it lived", "0.000"),
            ("a void iteration ran while it lived", "0.000"),
        ]

    def test_calls_the_numbers_of_one_run_no_comparison(self) -> None:
        assert "<h2>Numbers</h2>" in render_report([small_run()], title="x")
        assert "<h2>Comparison</h2>" in render_report([small_run("a"), small_run("b")], title="x")

    def test_bounds_the_gain_and_says_what_does_not_compare(self) -> None:
        runs = [
            RunView(
                name, spans, [record(n, n * 10**6, (n + 1) * 10**6, order=order, launched=batch(n)) for n in range(4)]
            )
            for name, spans, order in (("legacy", legacy_steps(4), "legacy"), ("async", async_steps(4), "overlap"))
        ]
        text = page_of(*runs).text
        assert "more than that overlap cannot save here. One run each" in text
        assert KINDS_NOTE in text
        assert "lower is better" in text
        assert "One run each" not in page_of(*runs, repeats=5).text

    def test_tells_why_the_device_was_idle_in_three_divisions_of_all_idle_time(self) -> None:
        spans, iterations = simulate("legacy", 3, Lengths(launch=5, wake=7))
        run = RunView("legacy", spans, iterations)
        groups = idle_groups(run.summary)
        for group in groups:
            assert sum(float(row.share) for row in group.rows) == pytest.approx(100, abs=0.5)
        assert [row.label for row in groups[0].rows][:3] == ["prepare", "resolve", "emit"]
        assert groups[0].rows[0].colour == PHASE_COLOURS["prepare"]
        assert [(row.label, row.count) for row in groups[1].rows] == [
            ("before forward, legacy", "5"),
            ("launch latency", "3"),
        ]
        text = page_of(run).text
        for row in (row for group in groups for row in group.rows):
            assert row.label in text
            assert row.each in text

    def test_without_idle_time_says_so(self) -> None:
        assert idle_groups(RunView("async", [], []).summary) == []
        busy = RunView("async", [device("forward", 0, 10)], [record(0, 0, 10)])
        assert idle_groups(busy.summary) == []
        assert "Why the device was idle" in page_of(busy).text

    def test_an_empty_run_has_a_page_too(self) -> None:
        page = page_of(RunView("async", [], []))
        assert "no samples" in page.text
        assert unpacked(json.loads(page.data)["runs"][0])["iterations"] == []

    @pytest.mark.parametrize("names", [(), ("async", "async")])
    def test_runs_without_names_of_their_own_are_refused(self, names: tuple[str, ...], tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="each with a name of its own"):
            write_report(tmp_path / "report.html", [small_run(name) for name in names], title="Demo")
        assert list(tmp_path.iterdir()) == []

    def test_takes_what_a_recorder_gives(self) -> None:
        recorder = Recorder(nvtx=False)
        for iteration in range(3):
            recorder.begin_iteration(iteration, "OVERLAP", "decode only", "async")
            with recorder.phase("prepare"):
                recorder.instant("abort", request="r1")
            recorder.end_iteration(launched=batch(iteration))
        run = RunView("async", recorder.spans(), recorder.iterations())
        assert span_count(json.loads(page_of(run).data)["runs"][0]) == 6


class TestConfig:
    def test_names_fields_that_differ(self) -> None:
        assert differing_fields([{"mode": "legacy", "seed": 0}, {"mode": "async", "seed": 0, "extra": None}]) == [
            "mode"
        ]
        assert differing_fields([{"a": 1}, {}]) == ["a"]


class TestEngineNames:
    def test_every_order_has_a_colour_and_a_documented_range(self) -> None:
        metrics = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
        (line,) = [
            line for line in metrics.splitlines() if line.endswith("| `iteration` | start/end | iteration | #5F6B7A |")
        ]
        for order in Order:
            assert order.label in ORDER_COLOURS
            assert f"`{order.label}`" in line

    def test_no_order_has_the_colour_of_a_phase_or_of_a_mark(self) -> None:
        style = (Path(report_module.__file__).parent / "report.css").read_text(encoding="utf-8")
        marks = {colour.upper() for colour in re.findall(r"--(?:hidden-line|bubble|wait): (#\w+)", style)}
        taken = {colour.upper() for colour in PHASE_COLOURS.values()} | marks
        assert len(marks) == 5
        assert len(set(ORDER_COLOURS.values())) == len(ORDER_COLOURS)
        assert not {colour.upper() for colour in ORDER_COLOURS.values()} & taken

    def test_every_phase_has_a_colour(self) -> None:
        assert {phase.value for phase in Phase} <= set(PHASE_COLOURS)


class TestRunData:
    def test_hidden_exposed_and_bubbles_are_stretches_of_start_and_length(self) -> None:
        spans = [phase("prepare", 100, 140), device("forward", 120, 160), device("sample", 180, 190)]
        data = run_data(spans, [record(0, 100, 200)], initial_views([[]])[0])
        assert data["hidden"] == [20, 20]
        assert data["exposed"] == [0, 20]
        assert data["bubbles"] == [60, 20]

    def test_host_work_leaves_waits_out(self) -> None:
        assert host_work([phase("resolve", 0, 10), wait(3, 5), device("forward", 0, 10)]) == [(0, 3), (5, 10)]

    def test_every_bubble_says_what_ended_it_and_what_its_late_parts_were(self) -> None:
        data = run_data(*simulate("legacy", 3, Lengths(launch=5, wake=7)), initial_views([[]])[0])
        lengths, blame, names = data["bubbles"][1::2], data["blame"], data["names"]
        assert len(lengths) == len(blame["parts"]) == len(blame["before"]) == len(blame["iteration"])
        at = lengths.index(377)
        assert (names[blame["before"][at]], blame["iteration"][at]) == ("publish", 1)
        parts = blame["parts"][at]
        times = {names[name]: time for name, time in zip(parts[::2], parts[1::2], strict=True)}
        assert list(times.items())[:3] == [("prepare", 100), ("resolve", 80), ("emit", 60)]
        assert (times["wait for samples"], times["wake-up"]) == (15, 7)
        assert 377 - sum(times.values()) == 5, "launch latency is what is left"

    def test_every_lane_is_sorted_by_start(self) -> None:
        spans = [phase("emit", 50, 60), phase("prepare", 10, 20), device("forward", 30, 40), device("sample", 5, 6)]
        lanes = run_data(spans, [], initial_views([[]])[0])["lanes"]
        assert all(lane["start"] == sorted(lane["start"]) for lane in lanes.values())


def unpacked(run: dict[str, Any]) -> dict[str, Any]:
    """What report_unpack.js makes of a run, in Python."""

    def column(value: Any, count: int) -> list[Any]:
        return value if isinstance(value, list) else [value] * count

    def lane(found: dict[str, Any]) -> dict[str, Any]:
        start, count = list(accumulate(found["start"])), len(found["start"])
        whole = {name: column(value, count) for name, value in found.items()} | {"start": start}
        whole["iteration"] = list(accumulate(whole["iteration"]))
        if "enqueued" in whole:
            whole["enqueued"] = [
                None if delay is None else at - delay for at, delay in zip(start, whole["enqueued"], strict=True)
            ]
        return whole

    def stretches(flat: list[int]) -> list[int]:
        moments = list(accumulate(flat))
        return [moments[at] if at % 2 == 0 else number for at, number in enumerate(flat)]

    found = run["iterations"]
    count, texts = len(found["n"]), found["texts"]
    numbers, starts = list(accumulate(found["n"])), list(accumulate(found["start"]))
    back = {name: column(found[name], count) for name in ("consumedFrom", "launchedFrom")}
    words = ("order", "reason", "consumed", "launched", "graph", "wasted", "void")
    iterations = [
        {"n": numbers[at], "start": starts[at]}
        | {name: column(found[name], count)[at] for name in ("length", "tokens")}
        | {name: None if of[at] is None else numbers[at] - of[at] for name, of in back.items()}
        | {name: texts[column(found[name], count)[at]] for name in words}
        for at in range(count)
    ]
    return {
        **run,
        "lanes": {name: lane(one) for name, one in run["lanes"].items()},
        "iterations": iterations,
        **{name: stretches(run[name]) for name in ("hidden", "exposed", "bubbles")},
    }


def unpacked_by_the_page(run: dict[str, Any]) -> dict[str, Any]:
    script = (Path(report_module.__file__).parent / "report_unpack.js").read_text(encoding="utf-8")
    whole = f"{script}\nprocess.stdout.write(JSON.stringify(unpackRun(JSON.parse(require('fs').readFileSync(0)))));"
    done = subprocess.run(["node", "-e", whole], input=json.dumps(run), capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def any_run(seed: int) -> dict[str, Any]:
    """Lanes with everything a span may have, iterations with and without batches, void and not."""
    rng = random.Random(seed)
    spans, records, at = [], [], rng.randrange(-50, 50)
    for number in range(rng.randrange(6)):
        begin = at
        for name in rng.sample(["prepare", "forward", "resolve"], rng.randrange(4)):
            spans += [phase(name, at, at + 9, number), detail("publish", at + 1, at + 2 + rng.randrange(5), number)]
            noted = rng.choice([None, at + 3])
            spans.append(replace(device("forward", at + 4, at + 4 + rng.randrange(40), number), enqueued_ns=noted))
            at += rng.randrange(10, 30)
        args = {"request": rng.choice(["r1", NASTY])}
        spans.append(Span(name="abort", category=Category.INSTANT, lane="host", start_ns=at, end_ns=at, args=args))
        value = rng.choice([1.0, 2.5])
        spans.append(Span(name="free", category=Category.COUNTER, lane="host", start_ns=at, end_ns=at, value=value))
        launched, consumed = (rng.choice([None, batch(number), batch(number - 1)]) for _ in range(2))
        void = rng.choice([(), ("debugger",)])
        records.append(record(number, begin, at + 1, launched=launched, consumed=consumed, void_reasons=void))
        at += rng.randrange(1, 9)
    return run_data(spans, records, initial_views([records])[0])


def as_long_as_real(spans: list[Span], records: list[IterationRecord]) -> tuple[list[Span], list[IterationRecord]]:
    """A clock that counts 1,009 for 1, so that a step takes a millisecond and numbers have as many digits."""

    def slow(at_ns: int) -> int:
        return 1_009 * at_ns + at_ns % 977

    longer = [
        replace(
            span,
            start_ns=slow(span.start_ns),
            end_ns=slow(span.end_ns),
            enqueued_ns=None if span.enqueued_ns is None else slow(span.enqueued_ns),
        )
        for span in spans
    ]
    return longer, [replace(one, begin_ns=slow(one.begin_ns), end_ns=slow(one.end_ns)) for one in records]


class TestPacking:
    @pytest.mark.parametrize("seed", range(60))
    def test_loses_nothing(self, seed: int) -> None:
        run = any_run(seed)
        assert unpacked(json.loads(json.dumps(packed(run)))) == run

    @pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
    @pytest.mark.parametrize("seed", range(8))
    def test_is_undone_by_the_page(self, seed: int) -> None:
        run = any_run(seed)
        assert unpacked_by_the_page(packed(run)) == run

    def test_keeps_a_page_of_100_000_spans_under_5_mb(self) -> None:
        """It made 7.5 MB: every moment was written out, and every iteration had its field names and texts."""
        spans, records = as_long_as_real(*simulate("async", 10_000, Lengths(launch=5, wake=7)))
        assert len(spans) >= 100_000
        page = render_report([RunView("async", spans, records)], title="Demo")
        assert len(page.encode()) < 5_000_000 * len(spans) / 100_000


def decode_run(order: str, rows: list[int], step: int) -> list[IterationRecord]:
    return [
        record(number, number * step, (number + 1) * step, order=order, launched=batch(number, decode=count))
        for number, count in enumerate(rows)
    ]


class TestInitialViews:
    def test_show_four_steady_iterations_of_the_same_batch_size_in_both_runs(self) -> None:
        first = decode_run("LEGACY", [1] * 9 + [3] * 6, step=10)
        second = decode_run("OVERLAP", [2] * 20 + [3] * 8, step=5)
        one, two = initial_views([first, second])
        assert (one.start_ns, one.end_ns, one.is_steady) == (100, 140, True)
        assert (two.start_ns, two.end_ns, two.is_steady) == (110, 130, True)

    def test_without_a_common_size_each_run_shows_its_own(self) -> None:
        one, two = initial_views([decode_run("LEGACY", [1] * 4, 10), decode_run("OVERLAP", [2] * 4, 10)])
        assert one.is_steady
        assert two.is_steady

    def test_void_iterations_are_never_steady(self) -> None:
        (view,) = initial_views([[record(0, 5, 10, launched=batch(0), void_reasons=("debugger",))]])
        assert (view.start_ns, view.end_ns, view.is_steady) == (5, 10, False)


def legacy_steps(count: int, *, step: int = 1000_000, late: int = 0) -> list[Span]:
    """Forward 600 µs and sample 100 µs; the host resolves, prepares and launches for 200 µs while the device is idle.

    ``late``: by how much the third step's host work begins later.
    """
    spans = []
    for number in range(count):
        at = number * step
        shift = late if number == 2 else 0
        spans += [
            device("forward", at, at + 600_000, number),
            device("sample", at + 600_000, at + 700_000, number),
            phase("resolve", at + 100_000, at + 800_000, number),
            wait(at + 100_000, at + 710_000 + shift, number),
            phase("prepare", at + 850_000, at + 960_000, number + 1),
            device("publish", at + 970_000, at + 975_000, number + 1),
        ]
    return spans


def async_steps(count: int, *, blocked: int = 0) -> list[Span]:
    """The same host work beside the next forward, which ``blocked`` holds up in its publish."""
    spans = []
    for number in range(count):
        at = number * 1000_000
        spans += [
            device("publish", at, at + 10_000 + blocked, number),
            device("forward", at + 10_000 + blocked, at + 900_000, number),
            device("sample", at + 900_000, at + 1000_000, number + 1),
            phase("resolve", at + 300_000, at + 1100_000, number + 1),
            wait(at + 300_000, at + 1010_000, number + 1),
            phase("prepare", at + 1150_000, at + 1260_000, number + 2),
        ]
    return spans


def find_alone(spans: list[Span], steady: tuple[int, int] | None = None) -> Border | None:
    (border,) = find_borders([BorderInput(spans=spans, work=host_work(spans), steady=steady)])
    return border


def border_of(spans: list[Span], steady: tuple[int, int] | None = None) -> Border:
    border = find_alone(spans, steady)
    assert border is not None
    return border


def late(span: Span, late_ns: int) -> Span:
    """A publish or forward that begins later, and ends as before."""
    if span.name == "publish":
        return replace(span, start_ns=span.start_ns + late_ns, end_ns=span.end_ns + late_ns)
    return replace(span, start_ns=span.start_ns + late_ns) if span.name == "forward" else span


class TestBorder:
    def test_lies_where_the_forward_before_is_sampled(self) -> None:
        for spans, next_start in ((legacy_steps(4), 300_000), (async_steps(4), 10_000)):
            border = border_of(spans)
            sampled = {span.end_ns for span in spans if span.name == "sample"}
            assert border.at_ns in sampled
            assert border.next_start_ns - border.at_ns == next_start
            assert border.next_forward == border.finished + 1

    def test_in_legacy_the_host_works_alone(self) -> None:
        border = border_of(legacy_steps(4))
        assert (border.work_ns, border.hidden_ns) == (200_000, 0)
        assert border.text == (
            "device idle 0.29 ms: the host works alone for 0.20 ms "
            "(the rest: launch latency, wake-up and the time between phases)"
        )

    def test_in_async_the_same_work_is_hidden_behind_the_next_forward(self) -> None:
        border = border_of(async_steps(4))
        assert (border.work_ns, border.hidden_ns) == (200_000, 200_000)
        assert border.text == (
            f"0.20 ms of host work, hidden behind forward {border.next_forward}; "
            f"forward {border.next_forward} begins after 10 µs"
        )

    def test_a_next_forward_that_was_held_up_is_told(self) -> None:
        border = border_of(async_steps(4, blocked=220_000))
        number = border.next_forward
        assert border.text == (
            f"0.20 ms of host work, hidden behind publish {number} (0.17 ms) and forward {number} (30 µs); "
            f"forward {number} begins after 0.23 ms"
        )

    def test_is_the_median_one_of_steady_decode(self) -> None:
        spans = legacy_steps(8, late=80_000)
        steady = border_of(spans, (2_000_000, 5_700_000))
        assert steady.is_steady
        assert 2 <= steady.finished < steady.next_forward <= 5
        assert steady.work_ns == 200_000, "the late step is not the median"

    def test_is_behind_the_same_forward_in_all_runs_where_they_have_one_in_common(self) -> None:
        shifted = [
            replace(span, iteration=span.iteration + 3, start_ns=span.start_ns + 7, end_ns=span.end_ns + 7)
            for span in async_steps(8)
        ]
        traces = [BorderInput(spans=spans, work=host_work(spans), steady=None) for spans in (legacy_steps(8), shifted)]
        one, two = find_borders(traces)
        assert one is not None
        assert two is not None
        assert one.finished == two.finished >= 3

    def test_the_common_one_is_as_ordinary_as_can_be(self) -> None:
        late = legacy_steps(8, late=80_000)
        traces = [BorderInput(spans=spans, work=host_work(spans), steady=None) for spans in (late, async_steps(8))]
        one, two = find_borders(traces)
        assert one is not None
        assert two is not None
        assert one.finished == two.finished != 2, "the late step is not the median"

    def test_without_a_common_one_each_run_has_its_own(self) -> None:
        far = [replace(span, iteration=span.iteration + 100) for span in async_steps(4)]
        traces = [BorderInput(spans=spans, work=host_work(spans), steady=None) for spans in (legacy_steps(4), far, [])]
        assert [border and border.finished >= 100 for border in find_borders(traces)] == [False, True, None]

    def test_without_steady_decode_any_border_is_shown_and_says_so(self) -> None:
        assert not border_of(legacy_steps(3)).is_steady
        assert not border_of(legacy_steps(3), (50_000_000, 60_000_000)).is_steady

    def test_needs_two_forwards_and_host_work_between_them(self) -> None:
        assert find_alone([]) is None
        assert find_alone(legacy_steps(1)) is None
        idle_host = [span for span in legacy_steps(3) if span.category is Category.DEVICE]
        assert find_alone(idle_host) is None

    def test_is_typical_in_idle_time_as_well_and_names_the_worst(self) -> None:
        """Chosen by the reach of host work alone, it was the one at which the device idled longest."""
        spans = [late(span, 90_000) if span.iteration == 4 else span for span in legacy_steps(8)]
        border = border_of(spans)
        assert border.finished != 3
        assert border.choice is not None
        assert border.choice.text == (
            "a typical one of 7 borders: the device idles 0.29 ms at the median one, 0.39 ms at the worst, "
            "behind forward 3"
        )
        assert border_of(legacy_steps(2)).choice == Choice(
            count=1, median_idle_ns=295_000, worst=0, worst_idle_ns=295_000
        )
        page = json.loads(page_of(RunView("legacy", spans, [])).data)["runs"][0]
        assert page["border"]["choice"] == border.choice.text

    def test_of_iterations_that_do_not_count_is_none_and_the_page_says_so(self) -> None:
        spans = legacy_steps(4)
        void = [record(n, n * 10**6, (n + 1) * 10**6, void_reasons=("hand_stepped",)) for n in range(4)]
        run = RunView("stepped", spans, void)
        page = json.loads(page_of(run, RunView("none", [], [])).data)["runs"]
        assert [one["border"] for one in page] == [None, None]
        assert page[0]["noBorder"] == "every border touches an iteration whose times do not count"
        assert page[1]["noBorder"] == "no two forwards with host work between them"
        assert str(step_borders([run])) == f"stepped: {page[0]['noBorder']}"

        counted = [replace(one, void_reasons=()) if one.iteration >= 2 else one for one in void]
        border = find_borders([border_input(spans, counted, None)])[0]
        assert border is not None
        assert border.finished == 2, "the only one that touches no void iteration"

    def test_reaches_the_page_relative_to_the_first_moment(self) -> None:
        spans = [phase("admit", -5_000_000, -4_999_000), *async_steps(4)]
        data = json.loads(page_of(RunView("async", spans, [])).data)["runs"][0]["border"]
        border = border_of(spans)
        assert data["at"] == border.at_ns + 5_000_000
        assert data["workEnd"] - data["at"] == data["extent"] == border.extent_ns
        assert data["isHidden"]
        assert data["text"] == border.text
