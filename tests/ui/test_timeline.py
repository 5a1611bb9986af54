"""The timeline's front-end alone, in a browser: what is painted, what the pointer and the keys do, what it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.ui.browser import keep_shot, missing
from tests.unit.tracing.traces import batch, detail, device, phase, record, wait
from tests.unit.workbench.widgets.timeline_worlds import HandTrace, work
from tracing.records import PHASE_COLOURS, Category, GraphUse, IterationRecord, Span

pytestmark = pytest.mark.skipif(missing("anywidget") is not None, reason=missing("anywidget") or "")

if missing("anywidget") is None:
    from tests.ui.stub_page import StubPage, timeline_page
    from workbench.report import RunView
    from workbench.report_data import ORDER_COLOURS
    from workbench.widgets.timeline_stream import InHand, TimelineStream, run_messages

US = 1_000
STEP = 1_000 * US
MANY = 100_000


def step_of(number: int, base: int) -> tuple[list[Span], IterationRecord]:
    """An iteration of 1 ms: the host waits from 300 to 700 µs, the device is idle from 720 to 780 µs."""

    def at(micro: int) -> int:
        return base + micro * US

    spans = [
        phase("prepare", at(0), at(100), number),
        phase("forward", at(100), at(200), number),
        detail("publish", at(120), at(180), number),
        phase("resolve", at(200), at(900), number),
        wait(at(300), at(700), number, name="samples"),
        phase("emit", at(900), at(950), number),
        device("sample", at(650), at(720), number, enqueued=at(90)),
        device("fetch", at(720), at(740), number, enqueued=at(95), lane="copy"),
        device("forward", at(780), at(1_640), number, enqueued=at(190)),
    ]
    use = GraphUse(label="CUDA graph", hit=True, dims=(8, 0, 8), padding_tokens=1)
    rows = batch(number, decode=7)
    order = "no_overlap" if number == 1 else "overlap"
    return spans, record(
        number, base, at(960), order=order, reason="decode only", consumed=rows, launched=rows, graph=use, new_tokens=7
    )


def trace_of(count: int) -> HandTrace:
    trace = HandTrace()
    for number in range(count):
        spans, one = step_of(number, number * STEP)
        trace.recorded += sorted(spans, key=lambda span: span.enqueued_ns or span.end_ns)
        trace.records.append(one)
    return trace


DRAFTS = {"light": ("#0072B2", "#B5541C"), "dark": ("#56B4E9", "#E69F00")}
"""Hues of accepted drafts and of those turned down, as in the text of requests."""


def with_rewinds(trace: HandTrace, told: list[tuple[float, int, int]]) -> HandTrace:
    """Rewinds in it: at which step, of how many accepted drafts out of how many."""
    for at, accepted, drafts in told:
        moment = {"lane": "host", "start_ns": int(at * STEP), "end_ns": int(at * STEP)}
        args = {"accepted": accepted, "drafts": drafts}
        trace.recorded.append(Span(name="rewind", category=Category.INSTANT, args=args, **moment))
    return trace


@pytest.fixture
def page(browser: Any) -> Iterator[StubPage]:
    """A page with the widget and nothing in it; no test may leave an error on its console."""
    with timeline_page(browser) as stub:
        yield stub
        assert stub.errors == []


def fill(page: StubPage, count: int = 10) -> tuple[HandTrace, TimelineStream]:
    """Iterations of 1 ms each, all in view."""
    trace = trace_of(count)
    stream = TimelineStream(trace)
    page.deliver(stream.restart(MANY))
    page.show(0, count * STEP)
    return trace, stream


class TestPicture:
    def test_has_each_lanes_work_where_it_ran(self, page: StubPage) -> None:
        fill(page, 3)

        assert page.colour("host", STEP + 50 * US) == PHASE_COLOURS["prepare"]
        assert page.colour("host", STEP + 150 * US) == PHASE_COLOURS["forward"]
        assert page.colour("host", STEP + 800 * US) == PHASE_COLOURS["resolve"]
        assert page.colour("device compute", STEP + 1_200 * US) == PHASE_COLOURS["forward"]
        assert page.colour("device compute", STEP + 690 * US) == PHASE_COLOURS["sample"]
        assert page.colour("device copy", STEP + 730 * US) == PHASE_COLOURS["fetch"]
        assert page.colour("host", STEP + 150 * US, part=1.3) == PHASE_COLOURS["publish"]
        assert page.colour("iterations", 2.9 * STEP) == ORDER_COLOURS["overlap"]
        assert page.colour("iterations", 1.9 * STEP) == ORDER_COLOURS["no_overlap"]
        keep_shot(page.page, "timeline-light")

    def test_has_nothing_of_a_phase_where_the_host_waits_or_the_device_is_idle(self, page: StubPage) -> None:
        fill(page, 3)
        colours = {page.colour("host", STEP + micro * US, part=0.1) for micro in range(320, 680, 7)}
        idle = {page.colour("device compute", STEP + micro * US, part=0.1) for micro in range(722, 778, 3)}

        assert PHASE_COLOURS["resolve"] not in colours
        assert len(colours) > 1, "waits are hatched"
        assert PHASE_COLOURS["forward"] not in idle
        assert len(idle) > 1, "bubbles are hatched"

    def test_stays_where_it_was_painted_on_a_fine_screen(self, browser: Any) -> None:
        with timeline_page(browser, scale=2) as page:
            fill(page, 3)

            assert page.page.evaluate("() => window.timeline.canvas.width / window.timeline.canvas.clientWidth") == 2
            assert page.colour("host", STEP + 50 * US) == PHASE_COLOURS["prepare"]

    def test_fills_the_width_it_is_given(self, page: StubPage) -> None:
        fill(page, 3)
        page.page.set_viewport_size({"width": 700, "height": 600})
        page.settle()

        assert page.page.evaluate("() => window.timeline.canvas.clientWidth") < 700
        assert page.colour("host", STEP + 50 * US) == PHASE_COLOURS["prepare"]
        assert page.page.evaluate("() => document.documentElement.scrollWidth") <= 700

    def test_of_spans_thinner_than_a_pixel_shows_what_fills_most(self, page: StubPage) -> None:
        fill(page, 2_000)

        assert page.colour("device compute", 1_000 * STEP) != page.call("colour", *page.place("host", 0, part=-0.4))
        rectangles = page.page.evaluate(
            """() => {
              const { canvas } = window.timeline, pen = canvas.getContext("2d");
              let count = 0;
              pen.fillRect = (...place) => { count += 1; Object.getPrototypeOf(pen).fillRect.apply(pen, place); };
              window.timeline.paint();
              delete pen.fillRect;
              return count / canvas.width;
            }"""
        )
        assert 0 < rectangles < 8  # a pixel's width: fewer than there are spans, however many those are

    def test_has_work_that_has_not_ended_open_at_the_right_and_what_waits_in_line_behind_it(
        self, page: StubPage
    ) -> None:
        trace = trace_of(2)
        trace.recorded = [one for one in trace.recorded if (one.name, one.iteration) != ("forward", 1) or one.phase]
        trace.works = [work("forward", STEP + 190 * US, iteration=1), work("sample", STEP + 955 * US, iteration=2)]
        stream = TimelineStream(trace, lambda: InHand(2, "overlap", "decode only"))
        page.deliver(stream.restart(MANY))
        boxes = page.page.evaluate(
            "() => window.timeline.painter.boxes.map(({ left, right, top }) => [left, right, top])"
        )
        hand, running, queued = sorted(boxes, key=lambda box: (box[2], box[0]))
        keep_shot(page.page, "timeline-unfinished")

        assert running[1] <= queued[0] + 0.01
        assert hand[0] < hand[1]
        left, top = page.page.evaluate(
            "() => { const box = window.timeline.canvas.getBoundingClientRect(); return [box.left, box.top]; }"
        )
        for box, words in ((running, "runs, as far as"), (queued, "in line"), (hand, "has begun and not ended")):
            page.page.mouse.move(left + (box[0] + box[1]) / 2, top + box[2] + 4)
            assert words in page.call("tip")

    def test_flags_moments_and_names_them_with_their_request_where_there_is_room(self, page: StubPage) -> None:
        """A mark was a hair on the strip that only hovering named."""
        trace = trace_of(3)
        moments = [("pause", "r1", 1.3), ("resume", "r1", 2.3), ("evict", "r2", 2.31), ("abort", "r3", 2.32)]
        for name, request_id, at in moments:
            moment = {"lane": "host", "start_ns": int(at * STEP), "end_ns": int(at * STEP)}
            args = {"request_id": request_id, "free_blocks": 0}
            trace.recorded.append(Span(name=name, category=Category.INSTANT, args=args, **moment))
        page.deliver(TimelineStream(trace).restart(MANY))
        page.show(0, 3 * STEP)
        told = page.page.evaluate(
            """() => {
              const { timeline } = window, { painter } = timeline, told = [];
              painter.aboveLanes = (text) => told.push(text);
              timeline.paint();
              delete painter.aboveLanes;
              return told;
            }"""
        )
        keep_shot(page.page, "timeline-marks")

        assert told[:2] == ["pause r1", "resume r1 · evict r2 · 1 more"]
        assert page.colour("iterations", 1.3 * STEP) != page.colour("iterations", 1.35 * STEP)
        assert "pause" in page.hover("iterations", 1.3 * STEP)
        assert "request_id=r1" in page.hover("iterations", 1.3 * STEP)

    @pytest.mark.parametrize("theme", ["light", "dark"])
    def test_has_each_rewind_as_a_tick_of_its_accepted_drafts_and_of_those_turned_down(
        self, browser: Any, theme: str
    ) -> None:
        """It was a tick in the colour of the letters: of how many drafts, hovering alone told."""
        accepted, turned = DRAFTS[theme]
        told = [(0.5, 3, 8), (1.5, 0, 4), (2.5, 4, 4)]
        with timeline_page(browser, dark=theme == "dark") as page:
            page.deliver(TimelineStream(with_rewinds(trace_of(3), told)).restart(MANY))
            page.show(0, 3 * STEP)
            page.page.mouse.move(5, 700)
            keep_shot(page.page, f"timeline-drafts-{theme}")
            columns = [
                [page.colour("iterations", at * STEP, part=pixel / 18) for pixel in range(-8, 6)] for at, *_ in told
            ]
            broad = [page.colour("iterations", 2.5 * STEP + step * US, part=3 / 18) for step in range(-20, 20)]
            thin = [page.colour("iterations", 1.5 * STEP + step * US, part=3 / 18) for step in range(-20, 20)]
            legend = page.text(".wb-legend")

        mixed, none, whole = columns
        assert 3 <= mixed.count(accepted) <= 6 <= mixed.count(turned) <= 9
        assert mixed.index(turned) < mixed.index(accepted), "accepted ones are below"
        assert none.count(turned) >= 11
        assert accepted not in none
        assert whole.count(accepted) >= 11
        assert turned not in whole
        assert broad.count(accepted) > 1.5 * thin.count(turned) > 0, "they are told by their width, too"
        assert "accepted drafts" in legend
        assert "drafts turned down" in legend

    def test_ticks_that_would_touch_are_one_of_all_their_drafts(self, page: StubPage) -> None:
        page.deliver(TimelineStream(with_rewinds(trace_of(3), [(1.5, 0, 6), (1.502, 6, 6)])).restart(MANY))
        page.show(0, 3 * STEP)
        column = [page.colour("iterations", 1.5 * STEP, part=pixel / 18) for pixel in range(-8, 6)]

        assert column.count(DRAFTS["light"][0]) == column.count(DRAFTS["light"][1]) == 6

    def test_puts_runs_below_each_other(self, page: StubPage) -> None:
        trace = trace_of(3)
        runs = [RunView(name, trace.recorded, trace.records) for name in ("legacy", "async")]
        page.deliver(run_messages(runs, MANY))
        page.show(0, 3 * STEP)
        keep_shot(page.page, "timeline-two-runs")

        for block in (0, 1):
            assert page.colour("host", STEP + 50 * US, block=block) == PHASE_COLOURS["prepare"]
        assert page.place("host", STEP, block=1)[1] > page.place("device copy", STEP)[1]


class TestPauses:
    PAUSE = 4_000_000 * US

    def fill(self, page: StubPage) -> None:
        trace = trace_of(1)
        spans, one = step_of(1, STEP + self.PAUSE)
        trace.recorded += spans
        trace.records.append(one)
        page.deliver(TimelineStream(trace).restart(MANY))
        page.press()

    def test_are_cut_out_of_the_axis_and_named(self, page: StubPage) -> None:
        self.fill(page)
        begin, end = page.view()
        keep_shot(page.page, "timeline-pause")

        assert end - begin < 4 * STEP
        page.show(0, 3 * STEP)
        assert page.colour("host", STEP + self.PAUSE + 50 * US) == PHASE_COLOURS["prepare"]
        assert "pause · 3.999 s" in page.hover("host", STEP + self.PAUSE / 2)

    def test_are_to_scale_where_one_wants_them(self, page: StubPage) -> None:
        self.fill(page)
        page.set("cut_pauses", False)
        begin, end = page.view()

        assert end - begin > self.PAUSE
        assert page.hover("host", STEP + self.PAUSE / 2) == ""

    def test_have_a_key_and_a_button(self, page: StubPage) -> None:
        self.fill(page)
        page.page.click("text=Cut pauses")
        assert page.trait("cut_pauses") is False
        page.page.focus("canvas")
        page.press("c")
        assert page.trait("cut_pauses") is True


class TestHover:
    def test_tells_of_device_work_what_it_was_part_of_and_when_it_was_enqueued(self, page: StubPage) -> None:
        fill(page, 3)
        lines = page.hover("device compute", STEP + 1_000 * US).splitlines()

        assert lines[0] == "forward 1 · device compute"
        assert lines[1] == "860 µs"
        assert "iteration 1, no_overlap: decode only" in lines
        assert "enqueued 590 µs before it began" in lines
        assert "batch: 7 tokens, 0 prefill and 7 decode rows" in lines
        assert "ran as CUDA graph of 8 tokens, 1 of padding" in lines

    def test_tells_of_a_phase_how_much_of_it_was_waiting(self, page: StubPage) -> None:
        fill(page, 3)

        assert "700 µs, of which 400 µs waiting" in page.hover("host", STEP + 800 * US)
        assert page.hover("host", STEP + 500 * US).startswith("waits for samples · host")
        assert page.hover("host", STEP + 150 * US, part=1.3).startswith("publish · host")

    def test_tells_of_a_bubble_who_is_to_blame(self, page: StubPage) -> None:
        trace = trace_of(3)
        late = [
            device("forward", 3 * STEP + 700 * US, 3 * STEP + 800 * US, 3, enqueued=3 * STEP + 690 * US),
            phase("prepare", 3 * STEP, 3 * STEP + 660 * US, 3),
        ]
        trace.recorded += late
        trace.records.append(record(3, 3 * STEP, 3 * STEP + 960 * US, order="legacy", reason="mode"))
        page.deliver(TimelineStream(trace).restart(MANY))
        page.show(0, 4 * STEP)
        lines = page.hover("device compute", 3 * STEP + 680 * US).splitlines()
        keep_shot(page.page, "timeline-blame")

        assert lines == [
            "device idle · 60 µs",
            "before forward of iteration 3, legacy",
            "why: mode",
            "nothing was enqueued for 50 µs; the host meanwhile:",
            "· between phases 30 µs",
            "· prepare 20 µs",
            "launch latency 10 µs",
        ]

    def test_tells_of_an_iteration_its_order_reason_and_batches(self, page: StubPage) -> None:
        fill(page, 3)
        text = page.hover("iterations", STEP + 500 * US)

        for words in ("iteration 1 · no_overlap", "why: decode only", "960 µs", "7 new tokens", "launched: 7 tokens"):
            assert words in text

    def test_says_nothing_where_nothing_is(self, page: StubPage) -> None:
        fill(page, 3)

        assert page.hover("device compute", 100 * US) == ""
        page.hover("host", 50 * US)
        page.page.mouse.move(600, 700)
        assert page.call("tip") == ""

    def test_stays_on_the_page(self, page: StubPage) -> None:
        fill(page, 3)
        page.hover("iterations", 2.9 * STEP)
        box = page.page.locator(".wb-timeline-tip").bounding_box()

        assert 0 <= box["x"] < box["x"] + box["width"] <= 1280
        assert 0 <= box["y"] < box["y"] + box["height"] <= 800


class TestSelection:
    def test_by_a_click_on_anything_of_an_iteration(self, page: StubPage) -> None:
        fill(page, 5)
        page.click("iterations", 2 * STEP + 500 * US)
        assert page.trait("selected_iteration") == 2
        page.click("device compute", 3 * STEP + 1_000 * US)
        assert page.trait("selected_iteration") == 3
        page.click("device compute", 100 * US)
        assert page.trait("selected_iteration") == 3

    def test_is_told_in_words(self, page: StubPage) -> None:
        fill(page, 5)
        assert page.text(".wb-selected") == ""
        page.set("selected_iteration", 4)
        keep_shot(page.page, "timeline-selected")

        assert page.text(".wb-selected").startswith("iteration 4 · overlap · why: decode only")
        page.set("selected_iteration", 99)
        assert page.text(".wb-selected") == "iteration 99 is not in the timeline"
        page.set("selected_iteration", None)
        assert page.text(".wb-selected") == ""

    def test_from_python_brings_the_iteration_into_view(self, page: StubPage) -> None:
        fill(page, 50)
        page.show(40 * STEP, 44 * STEP)
        page.set("selected_iteration", 7)
        begin, end = page.view()

        assert begin <= 7 * STEP < end

    def test_that_is_in_view_already_moves_nothing(self, page: StubPage) -> None:
        fill(page, 50)
        page.show(40 * STEP, 44 * STEP)
        page.set("selected_iteration", 42)

        assert page.view() == (40 * STEP, 44 * STEP)

    def test_moves_by_keys(self, page: StubPage) -> None:
        fill(page, 5)
        page.page.focus("canvas")
        page.press("ArrowUp")
        assert page.trait("selected_iteration") == 4
        page.press("ArrowUp", "ArrowUp", "ArrowDown")
        assert page.trait("selected_iteration") == 3
        page.press("f")
        begin, end = page.view()
        assert 2.5 * STEP < begin < 3 * STEP < end < 4.5 * STEP
        page.press("Escape")
        assert page.trait("selected_iteration") is None

    def test_is_not_made_by_a_drag(self, page: StubPage) -> None:
        fill(page, 5)
        x, y = page.place("host", 2 * STEP + 50 * US)
        page.page.mouse.move(x, y)
        page.page.mouse.down()
        page.page.mouse.move(x - 80, y, steps=4)
        page.page.mouse.up()

        assert page.trait("selected_iteration") is None


class TestView:
    def test_zooms_with_the_wheel_around_the_pointer(self, page: StubPage) -> None:
        fill(page, 10)
        page.page.focus("canvas")
        before = page.place("host", 3 * STEP)
        page.page.mouse.move(*before)
        page.page.mouse.wheel(0, -400)
        page.settle()
        begin, end = page.view()

        assert end - begin < 0.7 * 10 * STEP
        assert page.place("host", 3 * STEP)[0] == pytest.approx(before[0], abs=1)

    def test_leaves_the_wheel_to_the_page_until_it_is_in_hand(self, page: StubPage) -> None:
        fill(page, 10)
        page.page.mouse.move(*page.place("host", 3 * STEP))
        page.page.mouse.wheel(0, -400)
        page.settle()

        assert page.view() == (0, 10 * STEP)
        assert "Click the timeline first" in page.text(".wb-notice")
        page.page.keyboard.down("Control")
        page.page.mouse.wheel(0, -100)
        page.settle()
        assert page.view() != (0, 10 * STEP)

    def test_pans_by_dragging_and_what_was_under_the_pointer_stays_there(self, page: StubPage) -> None:
        fill(page, 10)
        page.show(2 * STEP, 6 * STEP)
        x, y = page.place("host", 4 * STEP)
        page.page.mouse.move(x, y)
        page.page.mouse.down()
        page.page.mouse.move(x + 200, y, steps=5)
        page.page.mouse.up()
        page.settle()

        assert page.place("host", 4 * STEP)[0] == pytest.approx(x + 200, abs=1)

    @pytest.mark.parametrize(("key", "grows"), [("+", False), ("=", False), ("w", False), ("-", True), ("s", True)])
    def test_zooms_by_keys(self, page: StubPage, key: str, grows: bool) -> None:
        fill(page, 10)
        page.show(3 * STEP, 6 * STEP)
        page.page.focus("canvas")
        page.press(key)
        begin, end = page.view()

        assert (end - begin > 3 * STEP) is grows

    @pytest.mark.parametrize(("key", "sign"), [("ArrowLeft", -1), ("a", -1), ("ArrowRight", 1), ("d", 1)])
    def test_pans_by_keys(self, page: StubPage, key: str, sign: int) -> None:
        fill(page, 10)
        page.show(3 * STEP, 6 * STEP)
        page.page.focus("canvas")
        page.press(key)

        assert (page.view()[0] - 3 * STEP) * sign > 0

    def test_fits_everything(self, page: StubPage) -> None:
        fill(page, 10)
        page.show(3 * STEP, 4 * STEP)
        page.page.click("text=Fit")
        page.settle()
        begin, end = page.view()

        assert begin <= 0
        assert end >= 10 * STEP
        assert end - begin < 12 * STEP

    def test_never_loses_sight_of_everything(self, page: StubPage) -> None:
        fill(page, 10)
        page.page.focus("canvas")
        page.press(*["ArrowRight"] * 60)
        begin, _ = page.view()
        assert begin < 10.7 * STEP
        page.press(*["-"] * 60)
        begin, end = page.view()
        assert end - begin < 20 * STEP
        page.press(*["+"] * 80)
        begin, end = page.view()
        assert end - begin >= 199

    def test_of_runs_that_have_ended_is_all_of_them_until_a_person_looks_closer(self, browser: Any) -> None:
        """They opened on the tail of the longest, as a run that goes on does."""
        with timeline_page(browser, traits={"follow": False}) as page:
            trace = trace_of(20)
            views = [RunView(name, tuple(trace.recorded), tuple(trace.records)) for name in ("one", "other")]
            messages = run_messages(views, MANY)
            page.deliver(messages)
            begin, end = page.view()
            assert begin <= 0
            assert end >= 19 * STEP
            page.page.focus("canvas")
            page.press("+")
            length = page.view()[1] - page.view()[0]
            page.deliver(messages)

            assert page.view()[1] - page.view()[0] == pytest.approx(length)


class TestFollow:
    def test_keeps_the_newest_at_the_right(self, page: StubPage) -> None:
        trace, stream = trace_of(10), None
        stream = TimelineStream(trace)
        page.deliver(stream.restart(MANY))
        length = page.view()[1] - page.view()[0]
        spans, one = step_of(10, 10 * STEP)
        trace.recorded += spans
        trace.records.append(one)
        page.deliver(stream.follow(MANY))
        begin, end = page.view()

        assert 11.6 * STEP < end < 12 * STEP
        assert end - begin == pytest.approx(length, rel=0.01)
        assert length < 8 * STEP, "the last few iterations, not all"

    def test_ends_with_a_pan_and_begins_with_the_button(self, page: StubPage) -> None:
        trace = trace_of(10)
        stream = TimelineStream(trace)
        page.deliver(stream.restart(MANY))
        page.page.focus("canvas")
        page.press("ArrowLeft")
        kept = page.view()
        assert page.trait("follow") is False
        spans, one = step_of(10, 10 * STEP)
        trace.recorded += spans
        trace.records.append(one)
        page.deliver(stream.follow(MANY))
        assert page.view() == kept
        page.page.click("text=Follow")
        page.settle()

        assert page.trait("follow") is True
        assert page.view()[1] > 11 * STEP

    def test_goes_on_while_one_zooms(self, page: StubPage) -> None:
        page.deliver(TimelineStream(trace_of(20)).restart(MANY))
        page.page.focus("canvas")
        before = page.view()
        page.press("+")

        assert page.trait("follow") is True
        assert page.view()[1] - page.view()[0] < before[1] - before[0]
        assert page.view()[1] > 20 * STEP


class TestMessages:
    def test_the_widget_asks_for_everything_when_it_begins_and_after_a_gap(self, page: StubPage) -> None:
        trace, stream = fill(page, 3)
        assert page.sent() == ["ready"]
        trace.recorded.append(phase("admit", 4 * STEP, 5 * STEP, 4))
        stream.follow(MANY)  # never arrives
        trace.recorded.append(phase("admit", 5 * STEP, 6 * STEP, 4))
        page.deliver(stream.follow(MANY))
        trace.recorded.append(phase("admit", 6 * STEP, 7 * STEP, 4))
        page.deliver(stream.follow(MANY))
        assert page.sent() == ["ready", "lost"]
        page.deliver(stream.restart(MANY))
        page.show(0, 8 * STEP)

        assert page.colour("host", 4.5 * STEP) == PHASE_COLOURS["admit"]

    def test_what_comes_before_the_first_whole_one_is_passed_over(self, page: StubPage) -> None:
        stream = TimelineStream(trace_of(3))
        messages = stream.restart(MANY)
        page.deliver(messages[1:])
        assert page.sent() == ["ready"]
        assert page.page.evaluate("() => window.timeline.store.isEmpty")
        page.deliver(messages)

        assert not page.page.evaluate("() => window.timeline.store.isEmpty")

    def test_what_was_left_out_is_marked_and_can_be_asked_for(self, page: StubPage) -> None:
        trace = trace_of(2)
        stream = TimelineStream(trace)
        page.deliver(stream.restart(MANY))
        assert not page.page.is_visible("text=Load")
        whole = trace_of(30)
        trace.recorded, trace.records = whole.recorded, whole.records
        page.deliver(stream.follow(100))
        page.show(0, 31 * STEP)
        assert page.hover("host", 8 * STEP).startswith("not sent")
        keep_shot(page.page, "timeline-skipped")
        page.page.click("text=Load")

        assert page.sent() == ["ready", "load"]

    def test_iterations_of_what_was_left_out_in_a_run_come_behind_it_and_stand_where_they_were(
        self, page: StubPage
    ) -> None:
        trace = trace_of(2)
        stream = TimelineStream(trace)
        page.deliver(stream.restart(MANY))
        for count in (40, 80):
            whole = trace_of(count)
            trace.recorded, trace.records = whole.recorded, whole.records
            page.deliver(stream.glimpse(50))
        seen = "() => [...window.timeline.store.groups[0].iterations.number.subarray(0, %s)]"
        assert page.page.evaluate("() => window.timeline.store.numIterations") < 20
        first = page.page.evaluate("() => window.timeline.view.from")
        assert 70 * STEP < first < 78 * STEP  # those behind the stretch alone: all of them are there
        while stream.is_behind:
            page.deliver(stream.follow(50))

        assert page.page.evaluate(seen % 80) == list(range(80))
        page.set("selected_iteration", 20)
        assert page.text(".wb-selected").startswith("iteration 20 ")
        page.set("selected_iteration", 79)
        assert page.text(".wb-selected").startswith("iteration 79 ")

    def test_no_more_is_kept_than_was_said(self, browser: Any) -> None:
        with timeline_page(browser, traits={"max_spans": 1_000}) as page:
            trace = trace_of(100)
            stream = TimelineStream(trace)
            page.deliver(stream.restart(MANY))
            for count in range(110, 300, 10):
                whole = trace_of(count)
                trace.recorded, trace.records = whole.recorded, whole.records
                page.deliver(stream.follow(MANY))
            kept, newest, first, blame = page.page.evaluate(
                """() => { const { store } = window.timeline, [group] = store.groups;
                  return [store.numSpans, store.extent().to, group.iterations.number[0], group.blame.size]; }"""
            )
            page.show(289 * STEP, 290 * STEP)

            assert 800 < kept <= 1_000
            assert newest == 289 * STEP + 1_640 * US
            assert 170 <= first <= 200
            assert blame <= 120
            assert page.colour("host", 289 * STEP + 50 * US) == PHASE_COLOURS["prepare"]
            assert "older ones dropped" in page.text(".wb-status")
            page.set("selected_iteration", 250)
            assert page.text(".wb-selected").startswith("iteration 250 ")
            assert page.errors == []

    def test_device_work_that_is_told_late_stands_where_it_ran(self, page: StubPage) -> None:
        trace = trace_of(6)
        late = [one for one in trace.recorded if one.category is Category.DEVICE and one.iteration == 2]
        trace.recorded = [one for one in trace.recorded if one not in late]
        trace.works = [work(one.name, one.enqueued_ns or 0, lane=one.lane, iteration=2) for one in late]
        stream = TimelineStream(trace)
        page.deliver(stream.restart(MANY))
        trace.works = []
        trace.recorded += late
        page.deliver(stream.follow(MANY))
        page.show(0, 7 * STEP)

        for number in range(6):
            assert page.hover("device compute", number * STEP + 1_000 * US).startswith(f"forward {number} ")


class TestThemes:
    @pytest.mark.parametrize("dark", [False, True])
    def test_words_stand_out_in_either(self, browser: Any, dark: bool) -> None:
        with timeline_page(browser, dark=dark) as page:
            fill(page, 3)
            keep_shot(page.page, f"timeline-{'dark' if dark else 'light'}-run")
            theme, ratio = page.call("contrast", ".wb-timeline")

            assert theme == ("dark" if dark else "light")
            assert ratio > 7
            assert page.colour("host", STEP + 50 * US) == PHASE_COLOURS["prepare"]
            assert page.errors == []

    def test_follow_the_notebooks_own(self, page: StubPage) -> None:
        fill(page, 3)
        light = page.call("colour", *page.place("host", 0, part=-0.1))
        page.page.evaluate(
            """() => { document.body.style.setProperty("--jp-layout-color0", "#111111");
              document.body.style.setProperty("--jp-ui-font-color0", "#ffffff"); }"""
        )
        page.settle()

        assert page.page.get_attribute(".wb-timeline", "data-theme") == "dark"
        assert page.call("colour", *page.place("host", 0, part=-0.1)) != light

    def test_ink_is_the_one_that_is_read_more_easily(self, page: StubPage) -> None:
        inks = page.page.evaluate(
            "(colours) => colours.map((one) => window.timeline.look.ink(one))",
            ["#FFFFFF", "#000000", "#0072B2", "#F0E2C6"],
        )

        assert inks == ["#000000", "#ffffff", "#ffffff", "#000000"]

    def test_of_another_page_are_painted_when_it_comes_into_view(self, page: StubPage) -> None:
        """Drawn in a hidden tab while the theme changed, it stayed blank until somebody pointed at it."""
        fill(page, 3)
        page.page.evaluate("() => { document.querySelector('.wb-timeline').style.display = 'none'; }")
        page.settle()
        page.page.evaluate(
            """() => {
              const { look, canvas } = window.timeline;
              look.page = "#123456";  // as if made under another theme
              canvas.width = 1;
              document.querySelector(".wb-timeline").style.display = "";
            }"""
        )
        page.page.wait_for_function("() => window.timeline.look.page !== '#123456'")
        page.settle()

        assert page.colour("host", STEP + 50 * US) == PHASE_COLOURS["prepare"]


class TestAccess:
    def test_an_empty_timeline_says_what_to_do(self, browser: Any) -> None:
        with timeline_page(browser, traits={"hint": "Run something."}) as page:
            keep_shot(page.page, "timeline-empty")
            assert page.text(".wb-notice") == "Run something."
            fill(page, 1)
            assert page.text(".wb-notice") == ""

    def test_an_empty_timeline_in_a_panel_names_the_panels_keys(self, page: StubPage) -> None:
        """It told a person before the buttons to type session.step_phase()."""
        page.page.evaluate("() => document.body.classList.add('wb-panel-whole')")
        page.set("hint", "Nothing has run yet. session.step_phase() runs one phase.")

        assert page.text(".wb-notice").startswith("Nothing has run yet: P runs one phase, S one iteration, R all")

    def test_takes_little_room_and_none_for_what_is_not_selected(self, browser: Any) -> None:
        with timeline_page(browser, width=870) as page:
            fill(page, 3)
            root, more = page.page.locator(".wb-timeline"), page.page.get_by_role("button", name="…")
            low = root.bounding_box()["height"]
            assert low <= 215
            more.click()
            assert page.page.locator(".wb-legend").bounding_box()["height"] > 30
            more.click()
            page.set("selected_iteration", 1)
            assert root.bounding_box()["height"] > low

    def test_the_picture_is_told_in_words_too(self, page: StubPage) -> None:
        fill(page, 10)
        page.show(2 * STEP, 5.5 * STEP)
        label = page.page.get_attribute("canvas", "aria-label") or ""

        assert label.startswith("Timeline of 10 iterations in 10.64 ms; iterations 2 to 5 in view")
        assert page.page.get_attribute(".wb-selected", "aria-live") == "polite"
        assert page.text(".wb-status").startswith("iterations 2 to 5")

    def test_the_keyboard_reaches_everything(self, page: StubPage) -> None:
        fill(page, 3)
        reached = []
        for _ in range(5):
            page.press("Tab")
            reached.append(
                page.page.evaluate("() => document.activeElement.textContent || document.activeElement.tagName")
            )

        assert reached == ["Fit", "Follow", "−", "+", "CANVAS"]

    def test_only_keys_with_a_modifier_go_on_to_the_page(self, page: StubPage) -> None:
        fill(page, 3)
        page.page.evaluate(
            "() => { window.keys = []; document.addEventListener('keydown', (event) => window.keys.push(event.key)); }"
        )
        page.page.focus("canvas")
        page.press("x", "+", "Control+s", "Shift+Enter", "d")

        assert page.page.evaluate("() => window.keys") == ["Control", "s", "Enter"]

    def test_the_legend_names_what_is_there(self, page: StubPage) -> None:
        fill(page, 3)
        legend = page.text(".wb-legend")

        for words in ("prepare", "publish, fetch (copies)", "host waits for the device", "iteration: no_overlap"):
            assert words in legend
        assert "draft" not in legend

    def test_two_views_show_the_same_each_at_its_own_zoom(self, page: StubPage) -> None:
        fill(page, 10)
        page.call("open")
        page.set("selected_iteration", 3)
        page.page.locator("canvas").nth(1).focus()
        page.press("+", "+")
        lengths = page.page.evaluate(
            "() => [...document.querySelectorAll('.wb-timeline')].map((one) => one.timeline.view.length)"
        )
        words = page.page.locator(".wb-selected").all_inner_texts()

        assert lengths[0] == 10 * STEP
        assert lengths[1] < 9 * STEP
        assert words[0] == words[1] != ""

    def test_a_view_that_is_closed_leaves_nothing(self, page: StubPage) -> None:
        fill(page, 3)
        page.call("shut")

        assert page.page.query_selector(".wb-timeline") is None
        page.page.evaluate("() => window.model.set('selected_iteration', 1)")
