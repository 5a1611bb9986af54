"""Drafts that were turned down, in the panel's text of a request, against what the device's columns held."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine.models.oracle import Skill
from engine.request import Request
from tests.foreseen_drafts import SCHEDULES, ForeseenDrafts, watch_too
from tests.oracle_reference import PIECES
from tests.oracle_world import loaded_oracle
from tests.unit.workbench.worlds import make_drafting_session
from workbench.drafted import KEPT_REJECTIONS
from workbench.panel.messages import RequestRow
from workbench.panel.requests_view import RequestRows
from workbench.panel.token_texts import visible
from workbench.session import Session

DRAFTS = 3
Rejection = tuple[int, int, list[int]]
"""Place in the output of what was drawn instead, which draft the first of them was, and the drafts."""


class Onlooker:
    """A session whose panel is compared, behind every step, with what drafts and outputs say by themselves."""

    def __init__(self, skill: Skill = "mixed", **options: Any) -> None:
        defaults: dict[str, Any] = {"device": "inline", "max_requests": 3, "max_batch_tokens": 96, "progress": False}
        defaults |= {"max_sequence_length": 96, "num_blocks": 60, "block_size": 4, "debug_invariants": True}
        defaults |= {"speculative_tokens": DRAFTS, "clock": "iterations"}
        model = loaded_oracle(has_text=True, kind="mtp", skill=skill)
        self.session = Session(model, options.pop("mode", "async"), **{**defaults, **options})
        self.pane = RequestRows(self.session)
        self.foreseen = ForeseenDrafts(self.session.engine)
        watch_too(self.session.engine, self.foreseen)
        self.requests: dict[str, Request] = {}
        self.rejected: dict[str, list[Rejection]] = {}
        self.seen: Counter[str] = Counter()

    def submit(self, prompt: list[int], **params: Any) -> str:
        names: list[str] = self.session.submit([prompt], ignore_eos=True, seed=len(prompt), **params)
        return names[0]

    def step(self) -> None:
        self._find()
        had = {name: len(request.output_ids) for name, request in self.requests.items()}
        self.foreseen.newest = {}
        self.session.step()
        self._find()
        for name, request in self.requests.items():
            self._expect(name, request, had.get(name, 0))
        for row in self.pane.view()["rows"]:
            if row["request_id"] in self.requests:
                self._compare(row)

    def _find(self) -> None:
        self.requests.update({one.request_id: one for one in self.session._desk.book.known_requests()})

    def _expect(self, name: str, request: Request, had: int) -> None:
        """Of the newest step: the first draft that is not the token in its place, and those behind it."""
        given, told = request.output_ids[had:], self.rejected.setdefault(name, [])
        if had == 0 or not given or request.key not in self.foreseen.newest:
            return
        drafts = self.foreseen.newest[request.key]
        accepted = 0
        while accepted < min(len(given), DRAFTS) and drafts[accepted] == given[accepted]:
            accepted += 1
        self.seen["cut"] += accepted == len(given) < DRAFTS
        if accepted == len(given):  # all were, or it ends within them
            return
        assert accepted == len(given) - 1
        if accepted < DRAFTS:
            told.append((had + accepted, accepted + 1, drafts[accepted:]))

    def _compare(self, row: RequestRow) -> None:
        name = row["request_id"]
        count = len(self.requests[name].output_ids)
        first = count - len(row["tokens"])
        told = [(first + one["at"], one["place"], one["token_ids"]) for one in row["rejected"]]
        wanted = [one for one in self.rejected[name] if first <= one[0] < count]
        least = KEPT_REJECTIONS - (self.requests[name].finish_reason is not None)  # one behind an end is not shown
        assert told in (wanted[-KEPT_REJECTIONS:], wanted[-least:]), name
        marks = self.session._watch.draft_marks(self.requests[name], 4)
        of_the_last = [] if marks is None else [one.at for one in marks.rejected]
        assert of_the_last == [one[0] for one in told if one[0] >= count - 4]
        for one in row["rejected"]:
            assert one["tokens"] == [visible(PIECES[token_id]) for token_id in one["token_ids"]]
            assert one["at"] not in row["accepted"]
        self.seen["behind the newest"] += bool(row["num_new"] and told and told[-1][0] == count - 1)
        self.seen["earlier"] += len(told) > 1

    def run(self, act: Callable[[int], None] = lambda step: None) -> None:
        for step in range(200):
            if not self.session.engine.has_unfinished():
                break
            act(step)
            self.step()
        assert not self.session.engine.has_unfinished()
        self.session.close()


def serve(onlooker: Onlooker, max_tokens: int = 12) -> None:
    for number in range(6):
        onlooker.submit([*range(3 + 4 * number)], max_tokens=max_tokens + number, temperature=float(number % 2))


class TestRejectedDrafts:
    @pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
    def test_are_those_that_the_columns_held(self, schedule: dict[str, Any]) -> None:
        skills: tuple[Skill, ...] = ("mixed", "wrong")
        for skill in skills:
            onlooker = Onlooker(skill, **schedule)
            serve(onlooker)
            onlooker.run()
            assert min(onlooker.seen["behind the newest"], onlooker.seen["earlier"]) > 5

    @pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
    def test_are_none_of_heads_that_are_always_right(self, schedule: dict[str, Any]) -> None:
        onlooker = Onlooker("right", **schedule)
        serve(onlooker)
        onlooker.run()
        assert not any(onlooker.rejected.values())

    @pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
    def test_stay_with_their_request_through_all_that_befalls_it(self, schedule: dict[str, Any]) -> None:
        """Rows move, requests are paused, evicted, suspended and aborted, prompts read in chunks, modes switched."""
        short: dict[str, Any] = {
            "capacity_policy": "max_utilization",
            "num_blocks": 20,
            "paused_blocks": 8,
            "max_sequence_length": 64,
        }
        onlooker = Onlooker(**schedule, **short, chunked_prefill=True, max_batch_tokens=18)
        rng, session = random.Random(5), onlooker.session
        serve(onlooker, 20)
        names = [one.request_id for one in session.requests()]

        def act(step: int) -> None:
            if step % 6 == 5:
                session.suspend(("persist", "offload", "recompute")[step // 6 % 3])
                session.resume()
            if step == 9:
                session.abort(rng.choice(names[:3]))
            if step % 11 == 10 and session.mode == "async":
                session.mode = "legacy"
            elif step % 11 == 10:
                session.mode = "async"

        onlooker.run(act)
        assert session.engine.counters.pauses + session.engine.counters.evictions > 0
        assert onlooker.seen["earlier"] > 5

    def test_are_none_behind_an_end_inside_the_accepted_ones(self) -> None:
        """By length and by a stop string, whatever the verification said of drafts further on."""
        cut = 0
        for max_tokens in range(2, 12):
            onlooker = Onlooker()
            onlooker.submit([5, 6, 7], max_tokens=max_tokens, temperature=0.0)
            onlooker.run()
            cut += onlooker.seen["cut"]
        assert cut > 0
        whole = Onlooker()
        whole.submit([5, 6, 7], max_tokens=16, temperature=0.0)
        whole.run()
        ((_, request),) = whole.requests.items()
        stopped = 0
        for place in range(1, 15):
            onlooker = Onlooker()
            stop = "".join(PIECES[token_id] for token_id in request.output_ids[place - 1 : place + 1])
            onlooker.submit([5, 6, 7], max_tokens=16, temperature=0.0, stop=[stop])
            onlooker.run()
            assert onlooker.session.requests()[0].finish_reason == "stop"
            stopped += onlooker.seen["cut"]
        assert stopped > 3

    def test_of_only_so_many_verifications_are_kept(self) -> None:
        onlooker = Onlooker("wrong")
        name = onlooker.submit([5, 6, 7], max_tokens=20, temperature=0.0)
        onlooker.run()
        (row,) = onlooker.pane.view()["rows"]
        assert len(onlooker.rejected[name]) == 19
        assert len(row["rejected"]) == KEPT_REJECTIONS
        assert [one["at"] for one in row["rejected"]] == [*range(20 - KEPT_REJECTIONS, 20)]
        assert {len(one["tokens"]) for one in row["rejected"]} == {DRAFTS}

    def test_are_forgotten_by_a_reset(self) -> None:
        with make_drafting_session() as session:
            session.submit([5, 6, 7], request_id="first", max_tokens=9, ignore_eos=True)
            session.run(6)
            assert RequestRows(session).view()["rows"][0]["rejected"]
            session.reset()
            session.submit([5, 6, 7], request_id="first", max_tokens=9, ignore_eos=True)
            session.run(2)
            assert RequestRows(session).view()["rows"][0]["rejected"] == []
