from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.stops import StopHit, StopMatcher

STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
TEXT = st.text("abc", max_size=40)


def naive(text: str, stops: list[str], unarmed: int = 0) -> StopHit | None:
    """By str.find on the whole text: first to begin, then longest; must end after ``unarmed`` characters."""
    hits = []
    for stop in stops:
        start = text.find(stop, max(0, unarmed - len(stop) + 1))
        if start >= 0:
            hits.append(StopHit(stop, start))
    return min(hits, key=lambda hit: (hit.start, -len(hit.stop)), default=None)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[a:b] for a, b in pairwise(borders)]


def run(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], StopHit | None]:
    matcher = StopMatcher(stops, include)
    passed = [matcher.feed(piece) for piece in pieces]
    return [*passed, matcher.flush()], matcher.hit


class TestAgainstFind:
    @settings(max_examples=500)
    @given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 40)), include=st.booleans())
    def test_finds_the_same_match_however_the_text_is_cut(
        self, text: str, stops: list[str], cuts: list[int], include: bool
    ) -> None:
        passed, hit = run(pieces_of(text, cuts), stops, include)

        assert hit == naive(text, stops)
        cut = len(text) if hit is None else hit.end if include else hit.start
        assert "".join(passed) == text[:cut]

    @settings(max_examples=500)
    @given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 40)))
    def test_passes_on_as_much_as_is_safe_and_no_more(self, text: str, stops: list[str], cuts: list[int]) -> None:
        matcher, seen, passed = StopMatcher(stops), "", ""
        for piece in pieces_of(text, cuts):
            seen += piece
            passed += matcher.feed(piece)
            if matcher.hit is not None:
                break
            first = naive(seen, stops)
            openings = [i for i in range(len(seen)) if any(s.startswith(seen[i:]) and s != seen[i:] for s in stops)]
            # A stop found already makes its own later occurrences irrelevant, so it holds nothing back.
            limit = min([*openings, *([first.start] if first else []), len(seen)])
            assert len(passed) >= limit
            assert passed == seen[: len(passed)]
            assert first is None or len(passed) <= first.start

    @settings(max_examples=500)
    @given(text=TEXT, stops=STOPS, unarmed=st.integers(0, 40), cuts=st.lists(st.integers(0, 40)))
    def test_a_match_that_ends_in_unarmed_text_is_none(
        self, text: str, stops: list[str], unarmed: int, cuts: list[int]
    ) -> None:
        unarmed = min(unarmed, len(text))
        matcher = StopMatcher(stops)
        passed = [matcher.feed(piece, armed=False) for piece in pieces_of(text[:unarmed], cuts)]
        passed += [matcher.feed(piece) for piece in pieces_of(text[unarmed:], cuts)]
        passed.append(matcher.flush())

        hit = naive(text, stops, unarmed)
        assert matcher.hit == hit
        assert "".join(passed) == text[: len(text) if hit is None else hit.start]


class TestKnownFaults:
    def test_keeps_partial_progress_on_a_mismatch(self) -> None:
        # Bug kind 21: 1,1,2 with stop 1,2; 'aab' in 'aaab'; '12' found though '13' was begun.
        assert run(list("112"), ["12"])[1] == StopHit("12", 1)
        assert run(list("aaab"), ["aab"])[1] == StopHit("aab", 1)
        assert run(list("12"), ["13", "2"]) == (["", "1", ""], StopHit("2", 1))

    def test_of_two_that_begin_together_the_longer_wins(self) -> None:
        for pieces in (["abc"], ["ab", "c"], list("abc")):
            assert run(pieces, ["ab", "abc"])[1] == StopHit("abc", 0)
        assert run(list("abd"), ["ab", "abc"]) == (["", "", "", ""], StopHit("ab", 0))

    def test_a_candidate_waits_and_the_end_settles_it(self) -> None:
        matcher = StopMatcher(["bc", "abcd"])
        assert matcher.feed("xabc") == "x"
        assert (matcher.hit, matcher.candidate) == (None, StopHit("bc", 2))

        assert matcher.flush() == "a"
        assert matcher.hit == StopHit("bc", 2)

    def test_matches_in_the_middle_and_across_borders(self) -> None:
        # Bug kind 18: tokens 'a', ',b', ',c d' with stop 'b,c'.
        assert run(["a", ",b", ",c d"], ["b,c"]) == (["a", ",", "", ""], StopHit("b,c", 2))

    def test_searches_all_of_a_long_piece(self) -> None:
        # Bug kind 25: a stop early in several tokens accepted at once.
        assert run(["hello", "wo;;rldabcdefghij"], [";;"])[1] == StopHit(";;", 7)

    def test_releases_what_it_held_when_the_text_ends(self) -> None:
        # Bug kind 74: a stop of 40 characters, an end by length.
        stop = "x" * 40
        assert run(["ab", "x" * 39], [stop]) == (["ab", "", "x" * 39], None)

    def test_one_character_works_and_an_empty_string_is_refused(self) -> None:
        # Bug kind 73.
        assert run(["ab"], ["b"])[1] == StopHit("b", 1)
        assert run(["ab"], []) == (["ab", ""], None)
        with pytest.raises(ValueError, match="must not be empty"):
            StopMatcher(["a", ""])

    def test_text_after_the_hit_is_dropped(self) -> None:
        matcher = StopMatcher([";"])
        assert matcher.feed("a;b") == "a"
        assert matcher.feed("c") == ""
        assert matcher.flush() == ""
        assert matcher.hit == StopHit(";", 1)

    def test_long_stops_cost_constant_work_a_character(self) -> None:
        def cost(length: int) -> float:
            matcher = StopMatcher(["a" * length + "b"] * 4)
            begin = time.process_time()
            for _ in range(20_000):
                matcher.feed("a")
            return time.process_time() - begin

        cost(10)
        assert cost(5000) < 20 * max(cost(10), 0.005)
