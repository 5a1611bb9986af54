"""The panel's panes alone, in a browser: each shows what it was sent, changes no more than that, and sends commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.ui.browser import keep_shot, missing

pytestmark = pytest.mark.skipif(missing("anywidget") is not None, reason=missing("anywidget") or "")

if missing("anywidget") is None:
    from tests.ui.panel_page import PanelPage, panel_page
    from tests.ui.panel_worlds import (
        TOKENS,
        bar_view,
        blocks_view,
        changes_view,
        drafting_rows,
        everything,
        experts_view,
        graphs_view,
        history_view,
        log_view,
        packed,
        request_row,
        requests_view,
        states_cell,
        stops_view,
    )
    from workbench.panel.messages import COMMANDS

HTML = '<img src=x onerror="window.wasHit=true"><b>bold</b>'
AREA = ".wb-pane:not([hidden]) .wb-scroll"


@pytest.fixture
def page(browser: Any) -> Iterator[PanelPage]:
    """A page with a session in mid run; no test may leave an error on its console."""
    with panel_page(browser, everything()) as panel:
        yield panel
        assert panel.errors == []


class TestRequests:
    def test_tells_of_each_what_it_holds_and_how_long_it_took(self, page: PanelPage) -> None:
        cells = page.page.locator(".wb-pane-requests tbody tr").nth(1).locator("td").all_inner_texts()

        assert [cell.strip() for cell in cells[1:8]] == ["decode", "1", "43", "16", "10/96", "53", "10–13, 17"]
        assert cells[9:12] == ["3.70", "48.3", "8.52"]
        assert "story-1" in cells[0]

    def test_marks_the_newest_token(self, page: PanelPage) -> None:
        row = page.page.locator(".wb-pane-requests tbody tr").nth(1)

        assert row.locator("[data-last]").inner_text() == TOKENS[10]
        assert row.locator("[data-new]").count() == 1
        assert row.locator("[data-last]").get_attribute("title") == "id 909, output 9"

    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    def test_tells_accepted_and_rejected_drafts_apart_by_more_than_hue(self, browser: Any, dark: bool) -> None:
        with panel_page(browser, everything(), dark=dark) as page:
            self.check_drafts(page, f"drafts-{'dark' if dark else 'light'}")
            assert page.errors == []

    def check_drafts(self, page: PanelPage, shot: str) -> None:
        assert page.page.locator(".wb-draft-legend").is_hidden()
        page.set("requests", requests_view(rows=drafting_rows(), left_out=0))
        first, second = (page.page.locator(".wb-pane-requests tbody tr").nth(place) for place in (0, 1))
        accepted = first.locator("[data-draft=accepted]")
        keep_shot(page.page, shot)
        assert page.page.evaluate("() => window.faint(4.5)") == []

        assert accepted.all_inner_texts() == [TOKENS[at] for at in (1, 4, 9)]
        assert accepted.first.get_attribute("title") == "id 900, output 0, an accepted draft"
        assert accepted.first.evaluate("(box) => getComputedStyle(box).boxShadow") != "none"
        rejected = first.locator(".wb-rejected s")
        assert rejected.all_inner_texts() == ["·or", "·<b>if</b>"]
        assert [one.get_attribute("title") for one in rejected.all()] == [
            f"draft 2 was turned down: the model drew {TOKENS[10]} instead; id 801",
            f"draft 3 was turned down: it follows draft 2, and the model drew {TOKENS[10]} instead of that; id 802",
        ]
        assert "linear-gradient" in rejected.first.evaluate("(box) => getComputedStyle(box).backgroundImage")
        assert rejected.first.evaluate("(box) => getComputedStyle(box).borderStyle") == "dashed"
        turned = rejected.first.evaluate("(box) => getComputedStyle(box).color")
        assert turned != accepted.first.evaluate("(box) => getComputedStyle(box).color")
        instead = first.locator("[data-draft=instead]")
        assert instead.all_inner_texts() == [TOKENS[5], TOKENS[10]]
        assert [one.get_attribute("title") for one in instead.all()] == [
            "id 904, output 4, drawn instead of draft 3 (·a)",
            "id 909, output 9, drawn instead of draft 2 (·or), which draft 3 (·<b>if</b>) followed",
        ]
        assert second.locator(".wb-rejected").is_hidden()
        assert page.page.inner_text(".wb-draft-legend").split("\n")[-1] == "draft turned down last"
        quiet = [{**row, "num_new": 0} for row in drafting_rows()]
        page.set("requests", requests_view(rows=quiet, left_out=0))
        assert first.locator(".wb-rejected").is_hidden()
        assert instead.count() == 2

    def test_marks_times_that_do_not_count(self, page: PanelPage) -> None:
        void = page.page.locator("[data-void]")

        assert void.count() == 3
        assert "stepped by hand" in void.first.get_attribute("title")

    def test_shows_names_and_tokens_as_the_words_they_are(self, page: PanelPage) -> None:
        row = request_row(0, request_id=HTML, tokens=[HTML], token_ids=[1], why=HTML)
        page.set("requests", requests_view(rows=[row]))
        words = page.page.inner_text(".wb-pane-requests tbody")

        assert words.count(HTML) == 3
        assert page.page.locator(".wb-pane-requests tbody :is(img, b)").count() == 0
        assert page.page.evaluate("() => window.wasHit") is None

    def test_aborts(self, page: PanelPage) -> None:
        page.button("Abort story-6").click()

        assert page.commands() == [("abort", {"request_id": "story-6"})]
        assert page.button("Abort story-9").is_disabled()

    def test_keeps_scroll_focus_and_selection_while_it_is_updated(self, page: PanelPage) -> None:
        rows = [request_row(number) for number in range(60)]
        page.set("requests", requests_view(rows=rows))
        page.page.evaluate(f"() => {{ document.querySelector('{AREA}').scrollTop = 400; }}")
        page.page.evaluate("() => window.getSelection().selectAllChildren(document.querySelectorAll('.wb-id')[20])")
        page.page.get_by_role("button", name="Abort story-21", exact=True).evaluate(
            "(one) => one.focus({ preventScroll: true })"
        )
        moved = [rows[21], *rows[:21], *rows[22:]]
        page.set("requests", requests_view(rows=[{**row, "kv_len": 9} for row in rows]))

        assert page.page.evaluate("() => window.getSelection().toString()") == "story-20"
        assert page.page.evaluate(f"() => document.querySelector('{AREA}').scrollTop") == 400
        page.set("requests", requests_view(rows=moved))
        assert page.page.evaluate("() => document.activeElement.title") == "Abort story-21"
        assert page.page.locator(".wb-pane-requests tbody .wb-id").first.inner_text() == "story-21"

    def test_shows_what_has_changed_since_its_picture_in_a_view_that_opens_later_too(self, page: PanelPage) -> None:
        rows = [request_row(number) for number in range(6)]
        news = {
            "since": 3,
            "order": ["story-4", "story-0", "story-9"],
            "rows": [request_row(9), {**rows[0], "kv_len": 777}],
            "left_out": 2,
            "hint": "",
        }
        page.set("requests", {**requests_view(rows=rows, left_out=0), "number": 3})
        page.set("requests_news", news)
        page.open_second_panes()
        for place in ("#panes", "#second"):
            shown = page.page.locator(f"{place} .wb-pane-requests")
            assert shown.locator("tbody .wb-id").all_inner_texts() == news["order"]
            assert shown.locator("tbody tr").nth(1).locator("td").nth(6).inner_text() == "777"
            assert "2 more requests" in shown.inner_text()
        page.set("requests_news", {**news, "since": 2})

        names = page.page.locator("#second .wb-pane-requests tbody .wb-id").all_inner_texts()
        assert names == [f"story-{number}" for number in range(6)]

    def test_touches_nothing_that_did_not_change(self, page: PanelPage) -> None:
        page.page.evaluate(
            """() => {
              window.touched = 0;
              new MutationObserver((all) => { window.touched += all.length; }).observe(
                document.querySelector(".wb-pane-requests"),
                { subtree: true, childList: true, characterData: true, attributes: true });
            }"""
        )
        page.set("requests", requests_view())
        assert page.page.evaluate("() => window.touched") == 0
        rows = requests_view()["rows"]
        page.set("requests", requests_view(rows=[{**rows[0], "kv_len": 16}, *rows[1:]]))

        assert page.page.evaluate("() => window.touched") == 1

    def test_shows_the_news_that_come_with_the_bar_until_later_ones_come(self, page: PanelPage) -> None:
        """In a run the rows that run come with the bar, in one message; all else on the panes' own way."""

        def told(number: int, kv_len: int, since: int = 7) -> dict[str, Any]:
            rows = [request_row(0, kv_len=kv_len)]
            return {"since": since, "number": number, "order": None, "rows": rows, "left_out": 0, "hint": ""}

        cell = page.page.locator(".wb-pane-requests tbody tr").first.locator("td").nth(6)
        page.set("requests", {**requests_view(), "number": 7})
        seen = []
        for trait, news in (
            ("rows", told(1, 101)),
            ("requests_news", told(2, 102)),
            ("rows", told(4, 104)),
            ("requests_news", told(3, 103)),
            ("rows", told(5, 105, since=6)),
            ("requests_news", told(5, 106)),
        ):
            page.set(trait, news)
            seen.append(cell.inner_text())

        assert seen == ["101", "102", "104", "104", "103", "106"]

    def test_shows_of_a_row_what_has_changed_and_the_blocks_that_were_added(self, page: PanelPage) -> None:
        rows = [request_row(number, blocks=[4, 5, 9]) for number in range(3)]
        page.set("requests", {**requests_view(rows=rows, left_out=0), "number": 3})
        more = {"request_id": "story-1", "kv_len": 777, "more_blocks": [10, *range(20, 200, 2)]}
        page.set("requests_news", {"since": 3, "number": 1, "order": None, "rows": [more], "left_out": 0, "hint": ""})
        cells = page.page.locator(".wb-pane-requests tbody tr").nth(1).locator("td")

        assert cells.nth(6).inner_text() == "777"
        assert cells.nth(5).inner_text() == f"{rows[1]['output_tokens']}/{rows[1]['max_tokens']}"
        assert cells.nth(7).inner_text().startswith("4–5, 9–10, 20, 22, ")
        assert len(cells.nth(7).inner_text()) == 40  # more than the column has room for
        assert cells.nth(7).get_attribute("title").startswith("94 blocks: 4–5, 9–10, 20, ")
        assert cells.nth(7).get_attribute("title").endswith(", 198")

    def test_shows_what_comes_with_the_timeline_beside_the_bar(self, page: PanelPage) -> None:
        """In a run bar, strip and the rows that run come with the timeline's message."""
        page.set("requests", {**requests_view(), "number": 7})
        news = {"since": 7, "number": 1, "order": None, "rows": [request_row(0, kv_len=101)], "left_out": 0, "hint": ""}
        page.page.evaluate(
            """(carried) => document.querySelector(".wb-panel-whole").dispatchEvent(
              new CustomEvent("wb-carried", { bubbles: true, detail: carried }))""",
            {"bar": {"headline": "between iterations · 3 running"}, "rows": news},
        )
        page.settle()

        assert page.page.inner_text(".wb-headline") == "between iterations · 3 running"
        assert bar_view()["model"] in page.page.inner_text(".wb-setup")  # what is not told anew is as it was
        assert page.page.locator(".wb-pane-requests tbody tr").first.locator("td").nth(6).inner_text() == "101"

    @pytest.mark.parametrize(("width", "is_cut"), [(1280, False), (700, True)])
    def test_makes_no_box_of_a_token_that_no_room_is_for(self, page: PanelPage, width: int, is_cut: bool) -> None:
        page.page.set_viewport_size({"width": width, "height": 800})
        texts = [str(10 + at) for at in range(24)]
        row = request_row(3, tokens=texts, token_ids=list(range(24)), output_tokens=60, num_new=1)
        page.set("requests", requests_view(rows=[row]))
        page.page.wait_for_function(
            "(isCut) => (document.querySelectorAll('.wb-tokens-run span').length < 24) === isCut", arg=is_cut
        )
        run, shown = (page.page.locator(part).first.bounding_box() for part in (".wb-tokens-run", ".wb-tokens"))
        boxes = page.page.locator(".wb-tokens-run span")

        assert boxes.all_inner_texts() == texts[-boxes.count() :]
        assert boxes.last.get_attribute("title") == "id 23, output 59"
        assert run["width"] > shown["width"] or not is_cut

    @pytest.mark.parametrize("width", [1280, 1000])
    def test_shows_headings_and_counts_of_thousands_of_tokens_whole(self, page: PanelPage, width: int) -> None:
        page.page.set_viewport_size({"width": width, "height": 800})
        page.set("requests", requests_view(rows=[request_row(3, output_tokens=1340, max_tokens=2000)]))
        cell = page.page.locator(".wb-pane-requests tbody td").nth(5)

        assert cell.inner_text() == "1340/2000"
        assert cell.evaluate("(cell) => cell.scrollWidth <= cell.clientWidth")
        heads = page.page.locator(".wb-pane-requests th").evaluate_all(
            "(all) => all.filter((one) => one.scrollWidth > one.clientWidth).map((one) => one.textContent)"
        )
        assert heads == []
        assert cell.get_attribute("title") == "1340 of at most 2000"

    def test_tells_of_each_token_its_id_place_and_log_probability(self, page: PanelPage) -> None:
        row = request_row(3, tokens=["a", "b"], token_ids=[11, 12], logprobs=[-0.25, None], output_tokens=9)
        page.set("requests", requests_view(rows=[row]))
        titles = page.page.locator(".wb-tokens-run span").evaluate_all("(all) => all.map((one) => one.title)")

        assert titles == ["id 11, output 7, log-probability -0.2500", "id 12, output 8"]

    def test_has_its_heading_in_view_while_it_scrolls(self, page: PanelPage) -> None:
        page.set("requests", requests_view(rows=[request_row(number) for number in range(60)]))
        page.page.evaluate(f"() => {{ document.querySelector('{AREA}').scrollTop = 900; }}")
        area = page.page.locator(AREA).bounding_box()

        assert page.page.locator(".wb-pane-requests th").first.bounding_box()["y"] == pytest.approx(area["y"], abs=1)

    def test_has_a_column_for_skipped_tokens_only_where_prefixes_are_cached(self, page: PanelPage) -> None:
        head = page.page.locator(".wb-pane-requests th").filter(has_text="skipped")
        cell = page.page.locator(".wb-pane-requests tbody tr").nth(1).locator("td").nth(4)
        assert head.is_visible()
        assert cell.inner_text() == "16"
        rows = [{**row, "cached_tokens": None} for row in requests_view()["rows"]]
        page.set("requests", requests_view(rows=rows))

        assert not head.is_visible()
        assert not cell.is_visible()

    def test_gives_the_reason_for_waiting_more_room_than_the_tokens(self, page: PanelPage) -> None:
        why = "not enough blocks: needs 18, 4 free · evicted in iteration 37"
        row = request_row(3, "waiting", tokens=request_row(11)["tokens"], output_tokens=60, why=why)
        page.set("requests", requests_view(rows=[row]))
        told, tokens = (page.page.locator(f".wb-pane-requests {part}").first for part in (".wb-why-cell", ".wb-tokens"))

        assert told.bounding_box()["width"] > 3 * tokens.bounding_box()["width"]


class TestBlocks:
    def told(self, page: PanelPage) -> str:
        words: str = page.page.inner_text(".wb-told")
        return words

    def colours(self, page: PanelPage, *blocks: int) -> list[list[int]]:
        """Near the lower left corner of each block."""
        page.settle()
        found: list[list[int]] = page.page.evaluate(
            """(blocks) => {
              const { map } = document.querySelector(".wb-panel-panes").panelPanes.panes.get("blocks").pane;
              const pen = map.canvas.getContext("2d");
              const at = ([x, y]) => [...pen.getImageData(x + 1, y + map.size - 3, 1, 1).data];
              return blocks.map((block) => at(map.place(block)));
            }""",
            list(blocks),
        )
        return found

    def test_names_the_block_under_the_pointer(self, page: PanelPage) -> None:
        page.open_tab("KV blocks")
        box = page.page.locator(".wb-map canvas").bounding_box()
        page.page.mouse.move(box["x"] + 5, box["y"] + 5)
        assert self.told(page) == (
            "block 0 · held by 3: story-0, its 1 of 18 and story-7, its 1 of 39 and story-8, its 1 of 57 · "
            "16 of 16 tokens cached (100 %) · named"
        )
        page.page.mouse.move(box["x"] + box["width"] - 5, box["y"] + box["height"] - 30)

        assert self.told(page).endswith("· free")

    def test_is_walked_by_arrow_keys(self, page: PanelPage) -> None:
        page.open_tab("KV blocks")
        page.page.focus(".wb-map canvas")
        page.press("ArrowRight", *17 * ["ArrowRight"])

        assert self.told(page) == "block 17 · story-0, its 18 of 18 · 7 of 16 tokens cached (44 %) · named"
        page.press("ArrowRight")
        assert self.told(page) == "block 18 · story-1, its 1 of 36 · 16 of 16 tokens cached (100 %)"

    def test_paints_holders_in_their_hue_and_free_blocks_in_none(self, page: PanelPage) -> None:
        page.open_tab("KV blocks")
        first, second, other, free = self.colours(page, 3, 4, 20, 511)

        assert first == second == [0x00, 0x98, 0xF1, 255]
        assert other == [0xE8, 0x6A, 0x29, 255]
        assert free[3] == 0 or free[:3] not in (first[:3], other[:3])

    def test_lights_a_holders_blocks(self, page: PanelPage) -> None:
        page.open_tab("KV blocks")
        page.page.get_by_role("button", name="story-1").click()
        first, other = self.colours(page, 3, 20)

        assert first[3] < 128
        assert other[3] == 255

    def test_has_a_legend_with_counts_and_facts_of_the_prefix_cache(self, page: PanelPage) -> None:
        page.open_tab("KV blocks")
        view = blocks_view()
        free, shared, cached = view["num_free"], view["num_shared"], view["num_cached"]
        keys = page.page.locator(".wb-keys li")

        assert [text.split() for text in keys.all_inner_texts()] == [
            ["A", str(512 - free - shared - (cached or 0)), "held", "by", "one"],
            ["2", str(shared), "shared"],
            [str(cached), "cached"],
            [str(free), "free"],
        ]
        assert "prefix hits38 % (12,416 of 32,700 tokens)" in page.page.inner_text(".wb-blocks-head").replace("\n", "")

    def test_tells_nothing_of_prefixes_where_none_are_cached(self, page: PanelPage) -> None:
        page.open_tab("KV blocks")
        page.set("blocks", blocks_view(has_prefixes=False))
        words = page.page.inner_text(".wb-pane-blocks")

        assert not [word for word in ("shared", "cached blocks", "prefix", "named") if word in words]
        assert page.page.locator(".wb-keys li").count() == 2
        assert not page.page.locator(".wb-blocks-head .wb-facts-row").is_visible()

    def test_tells_shared_cached_and_free_blocks_apart_by_more_than_hue(self, page: PanelPage) -> None:
        """A shared block has a frame in the colour of the page's text, a cached one stripes, a free one nothing."""
        page.open_tab("KV blocks")
        view = blocks_view()
        cached = 512 - 512 // 6
        shapes = page.page.evaluate(
            """(blocks) => {
              const { map } = document.querySelector(".wb-panel-panes").panelPanes.panes.get("blocks").pane;
              const pen = map.canvas.getContext("2d"), scale = window.devicePixelRatio;
              return blocks.map((block) => {
                const [x, y] = map.place(block), side = (map.size - 7) * scale;
                const rim = [...pen.getImageData((x + 1) * scale, (y + 1) * scale, 1, 1).data];
                const inner = pen.getImageData((x + 3) * scale, (y + 3) * scale, side, side).data;
                const shades = new Set();
                for (let at = 3; at < inner.length; at += 4) shades.add(inner[at]);
                return [rim, shades.size];
              });
            }""",
            [0, 3, cached, 511],
        )
        assert view["num_cached"]
        (shared_rim, _), (own_rim, _), (_, striped), (_, empty) = shapes

        assert shared_rim[:3] != own_rim[:3]
        assert striped > 2
        assert empty == 1

    def test_draws_a_large_pool_at_once(self, page: PanelPage) -> None:
        page.open_tab("KV blocks")
        page.set("blocks", blocks_view(16_384))
        keep_shot(page.page, "panel-blocks-16384")
        box, area = page.page.locator(".wb-map canvas").bounding_box(), page.page.locator(AREA).bounding_box()

        assert box["height"] <= area["height"]
        assert "16,384 blocks" in page.page.inner_text(".wb-summary:visible")
        page.page.mouse.move(box["x"] + 2, box["y"] + 2)
        assert self.told(page).startswith("block 0 · held by 3: story-0")


class TestStates:
    def test_show_whose_each_slot_is_and_what_each_snapshot_stands_behind(self, page: PanelPage) -> None:
        page.set("blocks", {**blocks_view(), "states": states_cell()})
        page.open_tab("KV blocks")
        keep_shot(page.page, "states")
        assert page.page.evaluate("() => window.faint(4.5)") == []
        slots, kept = page.page.locator(".wb-slots li"), page.page.locator(".wb-snapshots button")

        assert slots.count() == 8
        assert page.page.locator(".wb-slots li[data-free]").count() == 3
        assert slots.nth(1).get_attribute("title") == "slot 1: the state of story-1"
        assert kept.nth(1).inner_text().split() == ["A", "block", "2", "48", "tokens"]
        kept.nth(1).hover()
        page.settle()
        assert page.page.inner_text(".wb-pane-blocks .wb-told").startswith("block 2 · ")

    def test_are_not_there_for_a_model_without_any(self, page: PanelPage) -> None:
        page.set("blocks", blocks_view())
        page.open_tab("KV blocks")

        assert page.page.locator(".wb-states").is_hidden()


class TestExperts:
    def test_tell_the_load_of_the_one_under_the_pointer_and_by_arrow_keys(self, page: PanelPage) -> None:
        page.open_tab("Experts")
        keep_shot(page.page, "experts")
        page.page.focus(".wb-pane-experts canvas")
        page.press("ArrowRight", "ArrowRight", "ArrowDown")

        assert page.page.inner_text(".wb-pane-experts .wb-told").startswith("layer 3 · expert 1 · 20 tokens, ")

    def test_are_darker_the_more_they_have(self, page: PanelPage) -> None:
        counts = np.zeros((1, 4), dtype="<u8")
        counts[0] = (0, 10, 20, 40)
        view = experts_view(counts=packed(counts, "<u8"), layers=[0], num_experts=4, imbalances=[40 / 17.5])
        page.set("experts", view)
        page.open_tab("Experts")
        levels = page.page.evaluate(
            """() => {
              const canvas = document.querySelector(".wb-pane-experts canvas"), scale = window.devicePixelRatio;
              const { data } = canvas.getContext("2d").getImageData(0, 6 * scale, canvas.width, 1);
              return [1, 2, 3].map((at) => data[4 * Math.round((62 + 26 * at + 4) * scale)]);
            }"""
        )

        assert levels == sorted(levels, reverse=True)
        assert len(set(levels)) == 3

    def test_say_what_to_do_where_nothing_is_counted(self, page: PanelPage) -> None:
        page.set("experts", experts_view(counts="", layers=[], imbalances=[]))
        page.open_tab("Experts")

        assert "expert_load=True" in page.page.inner_text(".wb-pane-experts")


class TestGraphs:
    def test_tells_hits_padding_and_misses(self, page: PanelPage) -> None:
        page.open_tab("Graphs")
        row = page.page.locator(".wb-graphs tbody tr").nth(3)
        assert row.locator("td").all_inner_texts()[5:] == ["512", "512", "1"]
        assert row.locator(".wb-pending").is_visible()
        assert "1,146 of 1,196 (96 %)" in page.page.inner_text(".wb-pane-graphs .wb-facts-row")
        assert "holds prefill rows" in page.page.inner_text(".wb-misses")
        assert "graph waits3 iterations" in page.page.inner_text(".wb-pane-graphs .wb-facts-row").replace("\n", "")
        waiting = page.page.locator(".wb-awaited:visible")
        assert waiting.all_inner_texts() == ["story-12 waits"]
        assert "story-12 for 32 tokens" in page.page.inner_text(".wb-pane-graphs .wb-facts-row")
        page.set("graphs", graphs_view(deferrals=None))
        assert "graph waits" not in page.page.inner_text(".wb-pane-graphs .wb-facts-row")
        page.set("graphs", graphs_view(graphs=[], hits=0, misses={}))

        assert "No sizes are captured" in page.page.inner_text(".wb-pane-graphs")


class TestChanges:
    def test_shows_what_was_read_and_written_with_what_stood_there(self, page: PanelPage) -> None:
        page.open_tab("Read / wrote")
        prepare = page.page.locator(".wb-card").first
        wrote = prepare.locator(".wb-column").nth(1).locator("li").nth(1)

        assert prepare.locator("h4").inner_text() == "prepare"
        assert wrote.locator(".wb-value").inner_text().split() == ["99", "→", "272"]
        assert wrote.locator(".wb-swatch").inner_text() == "A"

    def test_strikes_out_stale_values_and_says_so(self, page: PanelPage) -> None:
        page.open_tab("Read / wrote")

        assert page.page.locator("[data-stale]").all_inner_texts() == ["88 ·by", "311"]
        assert page.page.locator("li:has([data-stale]) .wb-note").all_inner_texts() == ["stale", "stale, it ended"]

    def test_switches_recording(self, page: PanelPage) -> None:
        page.open_tab("Read / wrote")
        page.page.get_by_label("record changes").uncheck()

        assert page.commands() == [("record_changes", {"wanted": False})]

    def test_reads_from_the_device_with_a_warning(self, page: PanelPage) -> None:
        page.open_tab("Read / wrote")
        page.button("Read last_token from the device").click()

        assert page.commands() == [("read_device", {"name": "last_token"})]
        assert "voids the times" in page.page.inner_text(".wb-warning")
        assert "1204, 311" in page.page.inner_text(".wb-device-value")

    def test_tells_what_to_do_where_nothing_was_recorded(self, page: PanelPage) -> None:
        page.open_tab("Read / wrote")
        page.set("changes", changes_view(recording=False, cards=[], device_values=[], device_value=""))

        assert "Switch recording on" in page.page.inner_text(".wb-pane-changes")
        assert page.page.get_by_label("record changes").is_visible()


class TestHistory:
    def choose(self, page: PanelPage) -> list[int | None]:
        return [args["iteration"] for name, args in page.commands() if name == "choose"]

    def test_chooses_by_buttons(self, page: PanelPage) -> None:
        page.open_tab("History")
        for name in ("Previous iteration", "Next iteration", "Newest"):
            page.button(name).click()

        assert self.choose(page) == [870, 872, None]

    def test_chooses_by_the_slider_the_last_of_the_places_it_passed(self, page: PanelPage) -> None:
        page.open_tab("History")
        slider = page.page.get_by_label("Iteration", exact=True)
        slider.focus()
        page.press("ArrowLeft", "ArrowLeft", "ArrowLeft")
        page.page.wait_for_function("() => window.models.panes.sent.some(({ args }) => args.iteration === 868)")
        chosen = self.choose(page)

        assert chosen[-1] == 868
        assert len(chosen) <= 3

    def test_chooses_by_number(self, page: PanelPage) -> None:
        page.open_tab("History")
        page.page.get_by_label("Go to iteration").fill("12")
        page.press("Enter")

        assert self.choose(page) == [12]

    def test_follows_the_newest(self, page: PanelPage) -> None:
        page.open_tab("History")
        page.set("history", history_view(chosen=None, last=1_300))

        assert page.page.get_by_label("Iteration", exact=True).input_value() == "1300"
        assert page.button("Next iteration").is_disabled()
        assert page.button("Newest").get_attribute("aria-pressed") == "true"

    def test_leaves_a_thumb_that_is_dragged_where_it_is(self, page: PanelPage) -> None:
        page.open_tab("History")
        slider = page.page.get_by_label("Iteration", exact=True)
        box = slider.bounding_box()
        page.page.mouse.move(box["x"] + 0.25 * box["width"], box["y"] + box["height"] / 2)
        page.page.mouse.down()
        page.page.wait_for_timeout(150)
        held = slider.input_value()
        page.set("history", history_view(chosen=None, last=1_210))
        assert slider.input_value() == held
        page.page.mouse.up()

        assert self.choose(page)[-1] == int(held) == pytest.approx(300, abs=20)

    def test_shows_facts_watches_and_the_table(self, page: PanelPage) -> None:
        page.open_tab("History")
        words = page.page.inner_text(".wb-pane-history")

        assert "3.1 ms, of which 1.9 ms waiting" in words
        assert "s.row(0).output_tokens" in words
        assert page.page.locator(".wb-image tr").nth(4).locator("td").all_inner_texts()[1] == "story-3"
        assert page.page.locator(".wb-image th").count() == 8


class TestStops:
    def test_adds_a_breakpoint_of_what_was_filled_in(self, page: PanelPage) -> None:
        page.open_tab("Breakpoints")
        page.page.get_by_label("before phase").select_option("resolve")
        page.page.get_by_label("order's reason").select_option(label="rows are paused")
        page.page.get_by_label("for request").fill("story-3")
        page.page.get_by_label("bubble longer than, µs").fill("250.5")
        page.page.get_by_label("graph miss").check()
        page.page.get_by_label("when this is true").fill("s.finished")
        page.button("Add breakpoint").click()

        assert page.commands() == [
            (
                "break_on",
                {
                    "phase": "resolve",
                    "request": "story-3",
                    "reason": "PAUSED_ROWS",
                    "bubble_us": 250.5,
                    "graph_miss": True,
                    "when": "s.finished",
                },
            )
        ]
        page.answer("break_on", "breakpoint 9 is set")
        assert page.page.get_by_label("for request").input_value() == ""
        assert page.button("Add breakpoint").is_disabled()

    def test_keeps_what_was_refused_with_the_reason_under_it(self, page: PanelPage) -> None:
        """A typo in the condition emptied the form, and why was said only in the bar, out of view."""
        page.open_tab("Breakpoints")
        page.page.get_by_label("when this is true").fill("s.rwo(0)")
        page.button("Add breakpoint").click()
        page.answer("break_on", "'Session' has no 'rwo'", level="error")
        error = page.page.locator(".wb-stop-form .wb-form-error")

        assert error.inner_text() == "✕ 'Session' has no 'rwo'"
        assert page.page.get_by_label("when this is true").input_value() == "s.rwo(0)"
        page.page.get_by_label("when this is true").press("End")
        page.page.keyboard.type("!")
        assert not error.is_visible()

    def test_adds_none_that_names_nothing(self, page: PanelPage) -> None:
        page.open_tab("Breakpoints")
        add = page.button("Add breakpoint")
        assert add.is_disabled()
        add.click(force=True)
        page.page.get_by_label("before phase").select_option("sample")
        assert add.is_enabled()
        page.page.get_by_label("before phase").select_option("any")

        assert add.is_disabled()
        assert page.commands() == []

    def test_leaves_open_what_was_not_filled_in(self, page: PanelPage) -> None:
        page.open_tab("Breakpoints")
        page.page.get_by_label("before phase").select_option("sample")
        page.button("Add breakpoint").click()
        (_, args), *_ = page.commands()

        assert args == {**dict.fromkeys(COMMANDS["break_on"]), "phase": "sample"}

    def test_keeps_what_is_being_filled_in_while_it_is_updated(self, page: PanelPage) -> None:
        page.open_tab("Breakpoints")
        page.page.get_by_label("before phase").select_option("sample")
        page.page.get_by_label("for request").fill("story")
        page.set("stops", stops_view(rows=[]))
        page.page.keyboard.type("-1")

        assert page.page.get_by_label("for request").input_value() == "story-1"
        assert page.page.get_by_label("before phase").input_value() == "sample"

    def test_enables_and_removes(self, page: PanelPage) -> None:
        page.open_tab("Breakpoints")
        page.page.get_by_label("bubble longer than 500").check()
        page.button("Remove breakpoint 2").click()

        assert page.commands() == [("enable_stop", {"id": 4, "enabled": True}), ("remove_stop", {"id": 2})]

    def test_marks_the_one_that_the_session_stands_at(self, page: PanelPage) -> None:
        page.open_tab("Breakpoints")
        row = page.page.locator(".wb-is-hit")

        assert row.count() == 1
        assert "#2" in row.inner_text()
        assert "stands here" in row.inner_text()


class TestLog:
    def test_lists_events_the_newest_first(self, page: PanelPage) -> None:
        page.open_tab("Events")
        assert page.page.locator(".wb-pane-log tbody tr").first.inner_text().split("\t")[0].strip() == "1,204"
        assert "310 older events" in page.page.inner_text(".wb-pane-log")
        page.set("events", log_view(rows=[{"iteration": 1, "kind": "ended", "text": HTML}], left_out=0))

        assert HTML in page.page.inner_text(".wb-pane-log tbody")
        assert page.page.evaluate("() => window.wasHit") is None

    def test_keeps_two_events_that_say_the_same(self, page: PanelPage) -> None:
        page.open_tab("Events")
        page.set("events", log_view(rows=2 * [{"iteration": 1, "kind": "mode", "text": "async"}], left_out=0))

        assert page.page.locator(".wb-pane-log tbody tr").count() == 2
