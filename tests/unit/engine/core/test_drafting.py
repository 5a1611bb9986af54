"""Drafting: the schedule, and that acceptance never changes a token, an end or a log probability (I38 to I42).

``World`` compares every answer with its request computed alone, without drafts; invariants run at every border.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

from engine.controller import Border
from engine.errors import ConfigError, DeviceError
from engine.models.oracle import Skill
from engine.phases import Order, Phase
from engine.request import SamplingParams
from tests.bug_kind_world import MODES
from tests.drafting_world import GREEDY, PLAIN, RICH, SETTINGS, DraftingWorld, all_foreseen, prompt_of, times_met
from tests.oracle_reference import PIECES, expected_output
from tests.oracle_world import World

SKILLS: list[Skill] = ["right", "mixed", "wrong"]
WAYS = [("legacy", True), ("async", False), ("async", True)]
"""Mode, and whether prompts enter beside the pending forward."""
BEHIND_THE_PROMPT = [(False, Order.MTP_NO_OVERLAP), (True, Order.MTP_OVERLAP)]
"""So, and the order of the iteration that finds a prompt's forward pending."""
VERIFY, DRAFT, REWIND = Phase.VERIFY, Phase.DRAFT, Phase.REWIND
ADMIT, PREPARE, FORWARD = Phase.ADMIT, Phase.PREPARE, Phase.FORWARD
RESOLVE, EMIT = Phase.RESOLVE, Phase.EMIT


def orders_of(world: World) -> list[Order]:
    """The order of each iteration that came to its end."""
    return [order for order, phase, side in world.borders if side == "after" and phase is order.phases[-1]]


@cache
def alone(prompt: tuple[int, ...], params_at: int) -> tuple[int, ...]:
    params = [PLAIN, GREEDY][params_at].replace(max_tokens=30)
    assert params.seed is not None
    return expected_output(prompt, params, params.seed, max_length=100).token_ids


def _first_at(place: int, tokens: tuple[int, ...]) -> bool:
    return tokens[place] not in tokens[:place]


# -- the schedule ------------------------------------------------------------------------------------------------------


class TestPhases:
    def test_of_each_order_verify_and_rewind_before_lengths_are_used(self) -> None:
        assert Order.MTP_LEGACY.phases == (ADMIT, PREPARE, FORWARD, VERIFY, DRAFT, REWIND, RESOLVE, EMIT)
        assert Order.MTP_NO_OVERLAP.phases == (VERIFY, DRAFT, REWIND, RESOLVE, ADMIT, PREPARE, FORWARD, EMIT)
        assert Order.MTP_OVERLAP.phases == (VERIFY, DRAFT, REWIND, PREPARE, FORWARD, RESOLVE, EMIT)
        assert Order.MTP_OVERLAP_ADMIT.phases == (VERIFY, DRAFT, REWIND, ADMIT, PREPARE, FORWARD, RESOLVE, EMIT)
        assert Order.MTP_DRAIN.phases == (VERIFY, DRAFT, REWIND, RESOLVE, EMIT)

    @pytest.mark.parametrize(("beside", "behind_the_prompt"), BEHIND_THE_PROMPT)
    def test_of_a_run_are_those_without_drafts_where_none_is_accepted(
        self, beside: bool, behind_the_prompt: Order
    ) -> None:
        world = DraftingWorld(2, skill="wrong", overlap_admission=beside, late_rewind=False)
        world.submit([1, 2], GREEDY.replace(max_tokens=6))
        world.drain()

        assert orders_of(world) == [
            Order.PRIMER,
            behind_the_prompt,
            *[Order.MTP_OVERLAP] * 4,
            Order.MTP_NO_OVERLAP,
        ]

    @pytest.mark.parametrize(("beside", "behind_the_prompt"), BEHIND_THE_PROMPT)
    def test_of_a_run_with_three_tokens_a_step_and_a_switch(self, beside: bool, behind_the_prompt: Order) -> None:
        world = DraftingWorld(2, skill="right", overlap_admission=beside, late_rewind=False)
        world.submit([1, 2], GREEDY.replace(max_tokens=13))
        for _ in range(4):
            world.step()
        world.engine.set_mode("legacy")
        world.drain()

        expected = [Order.PRIMER, behind_the_prompt, Order.MTP_OVERLAP, Order.MTP_OVERLAP]
        assert orders_of(world) == [*expected, Order.MTP_DRAIN, Order.MTP_LEGACY]
        assert all_foreseen(world)

    def test_borders_stand_before_and_behind_each_of_them_and_stepping_by_phase_is_the_same(self) -> None:
        def lived(by_phase: bool) -> tuple[Any, Any]:
            world = DraftingWorld()
            for number, params in enumerate(RICH):
                world.submit(prompt_of(4 + number), params)
            while world.engine.has_unfinished():
                world.step_phase() if by_phase else world.step()
            while world.engine.in_hand is not None:
                world.step_phase()
            return world.borders, [one.last.token_ids for one in world.all if one.last is not None]

        assert lived(True) == lived(False)
        sides = Counter(side for _, _, side in lived(True)[0])
        assert sides["before"] == sides["after"]

    @pytest.mark.parametrize(("beside", "behind_the_prompt"), BEHIND_THE_PROMPT)
    def test_accepted_counts_are_absent_where_nothing_decoded(self, beside: bool, behind_the_prompt: Order) -> None:
        """A primer verifies nothing; what it launched holds prompts alone, and one token comes of each."""
        seen: list[tuple[Order, bool | None]] = []

        def look(border: Border) -> None:
            iteration = border.iteration
            if border.side == "after" and border.phase is iteration.order.phases[-1]:
                verified = iteration.verified
                seen.append((iteration.order, None if verified is None else verified.has_decode))
                assert (verified is None) == (iteration.num_tokens is None)

        world = DraftingWorld(overlap_admission=beside, late_rewind=False)
        world.on_border = look
        world.submit([1, 2, 3], GREEDY.replace(max_tokens=9))
        world.drain()
        world.engine.step()

        assert seen[:3] == [(Order.PRIMER, None), (behind_the_prompt, False), (Order.MTP_OVERLAP, True)]
        assert world.engine.counters.drafts_proposed.total() == sum(map(len, world.accepted)) * 3

    def test_a_drained_engine_verifies_nothing(self) -> None:
        world = DraftingWorld(mode="legacy")
        world.abort(world.submit([1, 2], GREEDY))
        world.drain()
        assert world.accepted == []
        assert not world.engine.counters.drafts_proposed


# -- answers -----------------------------------------------------------------------------------------------------------


class TestAnswers:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("skill", SKILLS)
    @pytest.mark.parametrize("drafts", [1, 2, 3])
    def test_are_those_of_no_drafts_token_for_token_and_log_probability_for_log_probability(
        self, drafts: int, skill: Skill, mode: str
    ) -> None:
        assert DraftingWorld(drafts, skill=skill, mode=mode).serve(RICH) == DraftingWorld(0, mode=mode).serve(RICH)

    @pytest.mark.parametrize("setting", SETTINGS)
    @pytest.mark.parametrize(("mode", "beside"), WAYS)
    def test_are_those_of_no_drafts_in_every_setting(self, mode: str, beside: bool, setting: str) -> None:
        world = DraftingWorld(3, mode=mode, overlap_admission=beside, **SETTINGS[setting])
        assert world.serve(RICH) == DraftingWorld(0).serve(RICH)
        assert world.counts == {0, 1, 2, 3}
        assert times_met(world, setting) > 0

    @pytest.mark.parametrize("budget", range(18, 30, 3))
    @pytest.mark.parametrize("kind", ["mtp", "drafting"])
    @pytest.mark.parametrize("beside", [False, True])
    def test_are_the_same_for_every_size_of_chunk(self, beside: bool, kind: Any, budget: int) -> None:
        options = {"chunked_prefill": True, "max_batch_tokens": budget, "prefix_caching": budget % 2 == 0}
        world = DraftingWorld(3, kind=kind, overlap_admission=beside, **options)
        for number, length in enumerate((33, 17, 40, 5)):
            world.submit(prompt_of(length, number), PLAIN.replace(seed=number, logprobs=1))
        world.drain()

    def test_are_the_same_on_the_thread_device(self) -> None:
        for mode in MODES:
            world = DraftingWorld(2, mode=mode, device="cpu", op_sleep_s=0.001)
            with world.engine:
                assert world.serve(RICH) == DraftingWorld(0).serve(RICH)

    @pytest.mark.parametrize("skill", SKILLS)
    def test_are_the_same_wherever_the_mode_is_switched(self, skill: Skill) -> None:
        switched = 0
        for at in range(1, 12):
            world = DraftingWorld(2, skill=skill)
            world.serve_switching(RICH[:4], every=at)
            switched += world.engine.counters.orders["mtp_drain"]
        assert switched > 5


class TestEnds:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("drafts", [1, 2, 3])
    def test_by_length_come_at_exactly_max_tokens_for_every_accepted_count(self, drafts: int, mode: str) -> None:
        """Also where more tokens were accepted than there is room for."""
        crossed, beyond = set[int](), 0

        def look(border: Border) -> None:
            nonlocal beyond
            verified, tokens = border.iteration.verified, border.iteration.num_tokens
            if border.phase is REWIND and border.side == "after" and verified is not None and tokens is not None:
                table, at = world.engine.table, slice(verified.first_row, verified.first_row + verified.num_rows)
                over = table.num_output[at] + tokens - table.max_output[at]
                crossed.update((tokens[over >= 0] - 1).tolist())
                beyond += int((over > 0).sum())

        for max_tokens in range(1, 11):
            world = DraftingWorld(drafts, mode=mode)
            world.on_border = look
            for salt in range(6):
                world.submit(prompt_of(5, salt), PLAIN.replace(max_tokens=max_tokens, seed=salt))
            world.drain()
            assert all(one.last is not None and len(one.last.token_ids) == max_tokens for one in world.all)
        assert crossed == set(range(drafts + 1))
        assert beyond > 5

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("drafts", [1, 2, 3])
    def test_at_the_longest_sequence_stay_inside_the_block_table(self, drafts: int, mode: str) -> None:
        """Rows launched beside their end, with accepted drafts beyond it, took a block more than a row may have."""
        for length in range(5, 13):
            world = DraftingWorld(drafts, mode=mode, skill="right", launch_ending_rows=True, max_sequence_length=24)
            world.submit(prompt_of(length), PLAIN.replace(max_tokens=100))
            world.submit(prompt_of(5, 1), PLAIN.replace(max_tokens=100, seed=4))
            world.drain()
            assert len(world.all[0].new_ids) == 24 - length

    @pytest.mark.parametrize(("mode", "launches"), [("legacy", False), ("async", False), ("async", True)])
    @pytest.mark.parametrize("place", range(9))
    def test_by_a_stop_id_come_at_every_place_of_an_accepted_run(self, place: int, mode: str, launches: bool) -> None:
        for number, params in enumerate([PLAIN, GREEDY]):
            salt = next(n for n in range(50) if _first_at(place, alone(tuple(prompt_of(6, n)), number)))
            told = alone(tuple(prompt_of(6, salt)), number)
            world = DraftingWorld(3, skill="right", mode=mode, launch_ending_rows=launches)
            world.submit(prompt_of(6, salt), params.replace(max_tokens=30, stop_token_ids=[told[place]]))
            world.submit(prompt_of(9, 1), PLAIN.replace(max_tokens=20))
            world.drain()
            last = world.all[0].last
            assert last is not None
            assert (last.finish_reason, last.token_ids) == ("stop", told[: place + 1])

    @pytest.mark.parametrize("mode", MODES)
    def test_by_eos_come_at_every_place_of_an_accepted_run(self, mode: str) -> None:
        params, places = PLAIN.replace(ignore_eos=False, logit_bias={63: 3.0}, max_tokens=30), set()
        for seed in range(60):
            world = DraftingWorld(3, skill="right", mode=mode)
            world.submit([1, 2, 3], params.replace(seed=seed))
            world.drain()
            last = world.all[0].last
            assert last is not None
            if last.finish_reason == "stop":
                assert last.token_ids[-1] == 63
                places.add((len(last.token_ids) - 2) % 4)  # the first comes of the prompt, then four a step
            if places == {0, 1, 2, 3}:
                break
        assert places == {0, 1, 2, 3}

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("place", range(1, 9))
    def test_by_a_stop_string_come_at_every_place_of_an_accepted_run(self, place: int, mode: str) -> None:
        """Text, ids and log probabilities end together; ids that were accepted behind it are nobody's."""
        told = alone(tuple(prompt_of(6)), 0)
        for length in (1, 2):  # of two tokens: across the border of a run, too
            text = "".join(PIECES[token] for token in told[place - length + 1 : place + 1])
            params = PLAIN.replace(max_tokens=30, stop=[text], detokenize=True, min_tokens=place, logprobs=2)
            world = DraftingWorld(3, skill="right", has_text=True, mode=mode)
            world.submit(prompt_of(6), params, stream=length == 2)
            world.submit(prompt_of(9, 1), PLAIN.replace(max_tokens=20))
            world.drain()
            last = world.all[0].last
            assert last is not None
            assert last.finish_reason == "stop"
            assert last.token_ids == told[: len(last.token_ids)]
            assert last.logprobs is not None
            assert [next(iter(row)) for row in last.logprobs] == list(last.token_ids)
            whole = "".join(PIECES[token] for token in last.token_ids)
            assert whole.startswith(last.text + text)

    @pytest.mark.parametrize("min_tokens", range(1, 10))
    def test_do_not_come_before_min_tokens_inside_an_accepted_run(self, min_tokens: int) -> None:
        world = DraftingWorld(3, skill="right")
        stops = list(range(0, 64, 2))
        for seed in range(3):
            world.submit(
                [1, 2, 3 + seed],
                PLAIN.replace(seed=seed, max_tokens=14, min_tokens=min_tokens, stop_token_ids=stops, logprobs=1),
            )
        world.drain()
        assert all(one.last is not None and len(one.last.token_ids) > min_tokens for one in world.all)

    @pytest.mark.parametrize(("mode", "beside"), WAYS)
    def test_by_an_abort_come_at_every_border_of_every_order(self, mode: str, beside: bool) -> None:
        """Of those that count lengths on the device ``test_late_rewind.py`` does the same."""
        at, reached = 0, set()
        while True:
            world = DraftingWorld(2, mode=mode, overlap_admission=beside, late_rewind=False)
            world.check_from = at
            seen = 0

            def look(border: Border, world: DraftingWorld = world, at: int = at) -> None:
                nonlocal seen
                if seen == 9:
                    world.submit(prompt_of(5, 3), PLAIN.replace(max_tokens=6, seed=3))
                if seen == at:
                    reached.add((border.iteration.order, border.phase, border.side))
                    world.abort(world.live_ids[-(at % 2)])
                seen += 1

            world.on_border = look
            for salt in range(3):
                world.submit(prompt_of(5, salt), PLAIN.replace(max_tokens=6 + 5 * (salt == 2), seed=salt))
            world.drain()
            check_counts_agree(world)
            if seen <= at:
                break
            at += 1
        orders = [Order.MTP_LEGACY] if mode == "legacy" else [Order.MTP_OVERLAP]
        orders += [Order.MTP_OVERLAP_ADMIT] if mode == "async" and beside else []
        assert {(order, *at) for order in orders for at in product(order.phases, ("before", "after"))} <= reached

    def test_by_logits_that_are_no_numbers_come_where_they_do_without_drafts(self) -> None:
        """A row may fail behind accepted drafts, and beside rows that go on."""
        failed: Counter[str] = Counter()
        for seed in range(12):
            world = DraftingWorld(3, skill="right", nan_every=31, prefix_caching=seed % 2 == 0)
            for number in range(4):
                world.submit(prompt_of(3 + number, seed), PLAIN.replace(seed=seed, max_tokens=25))
            world.drain()
            failed.update(one.last.finish_reason for one in world.all if one.last is not None)
        assert failed["error"] > 10
        assert failed["length"] > 3


# -- heads -------------------------------------------------------------------------------------------------------------


class TestHeads:
    @pytest.mark.parametrize(
        ("setting", "drafts", "kind"),
        [(name, 3, "mtp") for name in SETTINGS]
        + [(name, 1, "drafting") for name in SETTINGS if name not in ("buckets", "gated")],
    )
    def test_that_are_always_right_have_all_drafts_accepted(self, setting: str, drafts: int, kind: Any) -> None:
        """They are right only if they read the right hidden states and entries: a wrong one changes no token."""
        world = DraftingWorld(drafts, skill="right", kind=kind, **SETTINGS[setting])
        params = [PLAIN.replace(seed=seed, max_tokens=14) for seed in range(5)] + [GREEDY] * 2
        world.serve(params)
        world.serve(params)  # the same again: cached, where there is a cache

        assert all_foreseen(world)
        if setting in ("pausing", "prefix, pausing"):
            assert world.engine.counters.pauses or world.engine.counters.evictions
        if setting.startswith("prefix"):
            assert world.engine.counters.prefix_hit_tokens

    @pytest.mark.parametrize("setting", ["plain", "chunked", "prefix", "prefix, pausing"])
    def test_that_are_always_right_are_so_beside_prompts_that_enter(self, setting: str) -> None:
        """A row whose prompt the verified forward has read goes on from the entries of its last token."""
        world = DraftingWorld(3, skill="right", **SETTINGS[setting])
        for number in range(8):
            world.submit(prompt_of(5 + 3 * (number % 5), number % 3), PLAIN.replace(seed=number))
            world.step()
        world.drain()
        assert all_foreseen(world)
        assert world.engine.counters.orders["mtp_overlap_admit"] > 2

    @pytest.mark.parametrize(("mode", "late"), [("legacy", False), ("async", False), ("async", True)])
    @pytest.mark.parametrize("setting", ["plain", "prefix"])
    def test_that_are_always_right_are_so_of_rows_that_are_verified_token_by_token(
        self, setting: str, mode: str, late: bool
    ) -> None:
        """As one that wants log probabilities is, and all beside it: other code accepts drafts and advances lengths."""
        world = DraftingWorld(3, skill="right", mode=mode, late_rewind=late, **SETTINGS[setting])
        params = [PLAIN.replace(seed=seed, max_tokens=14, logprobs=seed % 3) for seed in range(5)] + [GREEDY]
        world.serve(params)
        world.serve(params)
        assert all_foreseen(world)

    @pytest.mark.parametrize("mode", MODES)
    def test_that_are_always_wrong_have_none(self, mode: str) -> None:
        world = DraftingWorld(3, skill="wrong", mode=mode)
        world.serve([GREEDY.replace(max_tokens=9)] * 4)
        assert world.counts == {0}

    def test_that_are_mixed_have_every_count(self) -> None:
        world = DraftingWorld(3)
        world.serve([PLAIN.replace(seed=seed) for seed in range(6)])
        assert world.counts == {0, 1, 2, 3}

    @pytest.mark.parametrize("length", [5, 8, 9, 13, 16, 21])
    @pytest.mark.parametrize("kind", ["mtp", "drafting"])
    def test_find_what_they_need_behind_a_prefix_hit(self, kind: Any, length: int) -> None:
        """Of 1, 2 and more blocks: the first token behind it goes on from the boundary entry, which nobody rewrote."""
        world = DraftingWorld(3, skill="right", kind=kind, prefix_caching=True)
        for tail in range(3):
            world.submit([*prompt_of(length), 50 + tail, 3], PLAIN.replace(seed=tail))
            world.drain()
        assert [one.last.num_cached_tokens for one in world.all if one.last is not None][1] == length // 4 * 4
        assert all_foreseen(world)

    @pytest.mark.parametrize("wanted", [4, 7])
    def test_that_are_too_few_are_a_clear_error(self, wanted: int) -> None:
        with pytest.raises(ConfigError, match=f"speculative_tokens={wanted}: oracle has 3 draft heads; use at most 3"):
            DraftingWorld(wanted, block_size=8)
        with pytest.raises(ConfigError, match="no draft heads; use 0, or a model with MTP layers"):
            DraftingWorld(1, kind="hybrid")


class TestRewinding:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("skill", ["mixed", "wrong"])
    def test_goes_back_across_a_block_border_and_forward_again(self, skill: Skill, mode: str) -> None:
        crossed = 0

        def look(border: Border) -> None:
            nonlocal crossed
            verified, tokens = border.iteration.verified, border.iteration.num_tokens
            if border.phase is REWIND and border.side == "after" and verified is not None and tokens is not None:
                at = slice(verified.first_row, verified.first_row + verified.num_rows)
                ends = world.engine.table.kv_len[at]
                crossed += int(((ends + verified.num_drafts - tokens + 1) // 4 > ends // 4).sum())

        world = DraftingWorld(3, skill=skill, mode=mode)
        world.on_border = look
        world.serve([PLAIN.replace(seed=seed, max_tokens=15) for seed in range(4)])
        assert crossed > 5

    def test_leaves_rows_that_read_prompts_alone(self) -> None:
        world = DraftingWorld(3, skill="wrong", chunked_prefill=True, max_batch_tokens=18)

        def look(border: Border) -> None:
            verified = border.iteration.verified
            if border.phase is REWIND and border.side == "after" and verified is not None:
                table = world.engine.table
                for row in range(verified.first_row, verified.first_row + verified.num_rows):
                    if table.is_prefill[row]:
                        assert table.kv_len[row] == table.prompt_len[row]

        world.on_border = look
        for number in range(5):
            world.submit(prompt_of(11 + number), PLAIN.replace(seed=number))
        world.drain()

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("logprobs", [None, 1])
    def test_does_not_take_what_a_row_held_before_for_drafts_of_a_prompt(self, logprobs: int | None, mode: str) -> None:
        """Were they compared, the first would be accepted, for it is what the prompt's logits say."""
        prompt, poisoned = prompt_of(6), 0

        def look(border: Border) -> None:
            nonlocal poisoned
            if (border.phase, border.side) == (VERIFY, "before") and not poisoned:  # the prompt is verified first
                drafts = world.engine.runner.columns.drafts
                assert drafts is not None
                drafts[0] = torch.tensor(alone(tuple(prompt), 0)[:3])
                poisoned += 1

        world = DraftingWorld(3, skill="right", mode=mode)
        world.on_border = look
        world.submit(prompt, PLAIN.replace(logprobs=logprobs))
        world.drain()
        assert poisoned == 1


# -- what comes in between ---------------------------------------------------------------------------------------------


def busy(setting: str, mode: str, skill: Skill = "mixed") -> DraftingWorld:
    world = DraftingWorld(2, skill=skill, mode=mode, **SETTINGS[setting])
    for number, params in enumerate(RICH[:5] if skill == "mixed" else [PLAIN] * 5):
        world.submit(prompt_of(5 + 3 * number, number % 3), params.replace(max_tokens=7, min_tokens=0))
    return world


def stand_still(world: World, how: str) -> None:
    if how == "pause":
        world.engine.pause()
    else:
        world.engine.suspend(how)
    world.engine.resume()


class TestStandstills:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("setting", ["plain", "chunked", "prefix, pausing"])
    @pytest.mark.parametrize("how", ["offload", "recompute"])
    def test_change_no_answer_wherever_they_come(self, how: str, setting: str, mode: str) -> None:
        pending, at = 0, 0
        while True:
            world = busy(setting, mode)
            world.step_up_to(at)
            if not world.engine.has_unfinished():
                break
            pending += world.engine.pending is not None
            stand_still(world, how)
            world.drain()
            at += 1
        assert at > 4
        assert (pending > 3) == (mode == "async")

    def test_with_a_graphs_logits_pending_change_no_answer(self) -> None:
        for at in (2, 3):
            world = DraftingWorld(3, **SETTINGS["buckets"])
            for number in range(4):
                world.submit(prompt_of(5, number), RICH[0].replace(seed=number))
            for _ in range(at):
                world.step()
            assert world.engine.pending is not None
            assert world.engine.pending.logits.in_graph
            stand_still(world, "offload")
            world.drain()

    @pytest.mark.parametrize("how", ["pause", "persist", "offload", "recompute"])
    def test_leave_heads_that_are_always_right_so(self, how: str) -> None:
        """Entries of heads, their hidden states and drafts come back with the rest, or are made anew."""
        for every in (1, 2, 3):
            world = busy("prefix", "async", "right")
            for step in range(100):
                if not world.engine.has_unfinished():
                    break
                if step % (every + 1) == every:
                    stand_still(world, how)
                world.step()
            world.drain()
            # Computed anew every other iteration it only reads prompts.
            assert all_foreseen(world) or (how == "recompute" and not world.counts)


class TestFailures:
    @pytest.mark.parametrize("phase", list(Order.MTP_LEGACY.phases), ids=lambda phase: phase.value)
    @pytest.mark.parametrize("mode", MODES)
    def test_in_any_phase_lose_and_repeat_no_token(self, mode: str, phase: Phase) -> None:
        failed = 0
        for at in (1, 2, 4):
            for after in (False, True):
                world = busy("prefix", mode)
                for _ in range(at):
                    world.step()
                if world.fail_in(phase, after=after):
                    failed += 1
                    world.engine.recover()
                world.drain()
        assert failed > 2

    @pytest.mark.parametrize("device", ["inline", "cpu"])
    @pytest.mark.parametrize("when", [1, 2, 3])
    def test_of_device_work_leave_nothing_behind_that_was_never_sent(
        self, device: str, when: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """On threads the host launches a verification before it hears of it; its inputs are not sent any more."""
        world = DraftingWorld(2, skill="right", device=device, overlap_admission=False, late_rewind=False)
        model = world.engine.loaded.model
        forward, calls = type(model).forward_hidden, 0  # type: ignore[attr-defined]

        def broken(*inputs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == when:
                raise RuntimeError("planted")
            return forward(model, *inputs)

        monkeypatch.setattr(model, "forward_hidden", broken)
        for salt in range(2):
            world.submit(prompt_of(5, salt), PLAIN.replace(seed=salt, max_tokens=20))
        failed = 0
        while world.engine.has_unfinished():
            try:
                world.step()
            except (RuntimeError, DeviceError):
                failed += 1
                world.engine.recover()
        world.drain()

        assert failed == 1


class TestCapturedSizes:
    @pytest.mark.parametrize("mode", MODES)
    def test_hold_chunks_beside_rows_of_drafts(self, mode: str) -> None:
        """In one shape, so only their numbers tell two forwards of the same rows apart."""
        for seed in range(8):
            rng = random.Random(seed)
            world = DraftingWorld(
                3,
                skill="right",
                mode=mode,
                graphs=(4, 16, 32),
                graph_all_prefills=True,
                chunked_prefill=True,
                max_batch_tokens=32,
                max_sequence_length=40,
                max_requests=4,
                late_rewind=False,
            )
            for _ in range(30):
                if len(world.live_ids) < 4 and rng.random() < 0.7:
                    prompt = prompt_of(rng.choice([2, 20, 33, 36]), rng.randrange(60))
                    world.submit(prompt, PLAIN.replace(seed=seed, max_tokens=rng.randint(2, 20)))
                world.step()
            world.drain()
            assert world.engine.counters.drafts_accepted.total() > 0


def check_counts_agree(world: DraftingWorld) -> None:
    """Of the engine and of its requests."""
    counters, requests = world.engine.counters, world.requests.values()
    assert sum(request.num_drafted for request in requests) == counters.drafts_proposed.total()
    assert sum(request.num_accepted for request in requests) == counters.drafts_accepted.total()


class TestCounters:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("drafts", [1, 3])
    def test_are_by_place_and_by_request(self, drafts: int, mode: str) -> None:
        world = DraftingWorld(drafts, mode=mode)
        world.serve([PLAIN.replace(seed=seed) for seed in range(6)])

        counts = [count for step in world.accepted for count in step]
        counters = world.engine.counters
        assert [counters.drafts_proposed[place] for place in range(drafts)] == [len(counts)] * drafts
        accepted = [sum(count > place for count in counts) for place in range(drafts)]
        assert [counters.drafts_accepted[place] for place in range(drafts)] == accepted
        for name, request in world.requests.items():
            assert (request.num_drafted, request.num_accepted) == (world.verified_of[name], world.accepted_of[name])

    @pytest.mark.parametrize("mode", MODES)
    def test_of_logits_rows_add_up(self, mode: str) -> None:
        """I60: tokens given, rejected drafts, and what was drawn behind an end or for nobody."""
        world = DraftingWorld(3, mode=mode)
        consumed = 0

        def look(border: Border) -> None:
            nonlocal consumed
            verified = border.iteration.verified
            if border.phase is VERIFY and border.side == "after" and verified is not None:
                consumed += int((verified.num_drafts + 1).sum())

        world.on_border = look
        params = [PLAIN.replace(seed=seed, max_tokens=1 + 4 * (seed % 3)) for seed in range(6)]
        world.serve(params)
        counters = world.engine.counters
        rejected = counters.drafts_proposed.total() - counters.drafts_accepted.total()
        assert consumed == counters.sampled_rows + rejected
        behind = counters.sampled_rows - counters.generated_tokens
        assert counters.generated_tokens == sum(one.max_tokens for one in params)
        assert 0 <= behind <= 3 * len(params)

    @pytest.mark.parametrize("skill", SKILLS)
    def test_of_draws_near_a_boundary_leave_out_what_is_drawn_behind_a_rejected_draft(self, skill: Skill) -> None:
        """Were all draws near one, they would be the tokens drawn for somebody."""

        def look(border: Border) -> None:
            verified = border.iteration.verified
            if (border.phase, border.side) == (RESOLVE, "before") and verified is not None:
                for step in verified.buffers.steps:
                    step.ints_view[2] = 1

        world = DraftingWorld(3, skill=skill)
        world.on_border = look
        world.serve([PLAIN.replace(seed=seed) for seed in range(4)])
        assert world.engine.counters.near_boundary == world.engine.counters.sampled_rows > 40

    def test_of_steps_fall_with_acceptance(self) -> None:
        steps = {}
        for skill in SKILLS:
            world = DraftingWorld(3, skill=skill, mode="legacy")
            world.submit([1, 2, 3], SamplingParams(max_tokens=21, temperature=0.0, seed=0, ignore_eos=True))
            world.drain()
            steps[skill] = world.engine.counters.orders["mtp_legacy"]
        assert (steps["right"], steps["wrong"]) == (1 + 20 // 4, 21)
        assert steps["right"] < steps["mixed"] < steps["wrong"]
