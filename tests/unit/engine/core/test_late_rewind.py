"""Accepted counts that are waited for behind the next forward: no token changes, and no length is off.

``World`` compares every answer with its request computed alone, without drafts; invariants run at every border.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.controller import Border
from engine.errors import ConfigError
from engine.models.oracle import Skill
from engine.phases import Order, Phase, Reason
from tests.drafting_world import (
    GREEDY,
    PLAIN,
    RICH,
    SETTINGS,
    DraftingWorld,
    all_foreseen,
    prompt_of,
    stand_still,
    times_met,
)
from tests.oracle_reference import PIECES, expected_output
from tracing.records import Category

SKILLS: list[Skill] = ["right", "mixed", "wrong"]
LATE = Order.MTP_OVERLAP_LATE


class LateWorld(DraftingWorld):
    """Rewinds late, and remembers its orders."""

    def __init__(self, drafts: int = 3, **options: Any) -> None:
        super().__init__(drafts, **{"late_rewind": True, **options})

    @property
    def orders(self) -> list[Order]:
        """Of each iteration that came to its end."""
        return [order for order, phase, side in self.borders if side == "after" and phase is order.phases[-1]]

    @property
    def num_late(self) -> int:
        return self.engine.counters.orders[LATE.label]


def told(prompt: list[int]) -> tuple[int, ...]:
    params = PLAIN.replace(max_tokens=30)
    assert params.seed is not None
    return expected_output(tuple(prompt), params, params.seed, max_length=100).token_ids


# -- the schedule ------------------------------------------------------------------------------------------------------


class TestTheOrder:
    def test_waits_for_nothing_before_its_forward(self) -> None:
        phases = LATE.phases
        assert phases[0] is Phase.PREPARE
        assert phases.index(Phase.VERIFY) < phases.index(Phase.DRAFT) < phases.index(Phase.FORWARD)
        assert phases.index(Phase.FORWARD) < phases.index(Phase.REWIND) < phases.index(Phase.RESOLVE)
        assert LATE.is_overlap
        assert LATE.without_drafting is Order.OVERLAP

    @pytest.mark.parametrize("beside", [False, True])
    def test_is_taken_until_every_row_might_end_within_its_drafts(self, beside: bool) -> None:
        """Two drafts a step, none accepted: behind token 4 of 6 two accepted ones would end it."""
        world = LateWorld(2, skill="wrong", overlap_admission=beside)
        world.submit([1, 2], GREEDY.replace(max_tokens=6))
        world.drain()

        first = [LATE] if beside else [Order.MTP_NO_OVERLAP]
        assert world.orders == [Order.PRIMER, *first, LATE, LATE, *[Order.MTP_OVERLAP] * 2, Order.MTP_NO_OVERLAP]
        reasons = world.engine.counters.reasons
        assert reasons["counts_later"] == world.num_late
        assert reasons["steady_decode"] == 2

    def test_is_another_where_requests_enter(self) -> None:
        world = LateWorld(2, overlap_admission=True)
        world.submit([1, 2], GREEDY.replace(max_tokens=30))
        for _ in range(3):
            world.step()
        world.submit([3, 4, 5], GREEDY.replace(max_tokens=9))
        world.step()
        world.step()
        world.drain()
        assert world.orders[2:5] == [LATE, Order.MTP_OVERLAP_ADMIT, LATE]

    @pytest.mark.parametrize("options", [{"mode": "legacy"}, {"speculative_tokens": 0}, {"late_rewind": False}])
    def test_is_never_taken_without_drafts_in_legacy_and_unasked(self, options: dict[str, Any]) -> None:
        drafts = options.pop("speculative_tokens", 2)
        world = LateWorld(drafts, **options)
        world.serve([GREEDY.replace(max_tokens=9)] * 2)
        assert world.num_late == 0

    def test_counts_have_not_arrived_when_the_next_forward_is_launched(self) -> None:
        """Verification takes so long that a host that waited for it anywhere would find it done."""
        world, seen = LateWorld(2, device="cpu"), Counter[bool]()
        world.engine.device.op_sleep_s = {"verify": 0.05}

        def look(border: Border) -> None:
            if (border.iteration.order, border.phase, border.side) == (LATE, Phase.FORWARD, "after"):
                assert border.iteration.verified is not None
                assert border.iteration.num_tokens is None
                seen[border.iteration.verified.accepted_ready.done()] += 1

        world.on_border = look
        with world.engine:
            world.serve([GREEDY.replace(max_tokens=9)] * 2)
        assert seen[False] > seen[True]

    def test_waits_for_the_counts_by_a_name_of_their_own(self) -> None:
        world = LateWorld(2)
        world.serve([GREEDY.replace(max_tokens=12)] * 2)
        waits = Counter(span.name for span in world.engine.recorder.spans() if span.category is Category.WAIT)
        assert waits["accepted"] >= world.num_late > 0

    @pytest.mark.parametrize("value", [None, 1, "yes"])
    def test_is_an_option_that_is_true_or_false(self, value: Any) -> None:
        with pytest.raises(ConfigError, match="late_rewind must be true or false"):
            EngineConfig(late_rewind=value)


# -- answers -----------------------------------------------------------------------------------------------------------


class TestAnswers:
    @pytest.mark.parametrize("states", ["stored", "replayed"])
    def test_are_the_same_however_states_go_back(self, states: str) -> None:
        for prefix in (False, True):
            world = LateWorld(3, state_rewind=states, prefix_caching=prefix)
            assert world.serve(RICH) == DraftingWorld(0).serve(RICH)
            assert world.num_late > 2

    @pytest.mark.parametrize("skill", SKILLS)
    @pytest.mark.parametrize("drafts", [1, 2, 3])
    def test_are_those_of_no_drafts_token_for_token_and_log_probability_for_log_probability(
        self, drafts: int, skill: Skill
    ) -> None:
        world = LateWorld(drafts, skill=skill)
        assert world.serve(RICH) == DraftingWorld(0).serve(RICH)
        assert world.num_late > 2

    @pytest.mark.parametrize(
        ("setting", "beside"), [*((name, True) for name in SETTINGS), ("plain", False), ("prefix, pausing", False)]
    )
    def test_are_those_of_no_drafts_in_every_setting(self, setting: str, beside: bool) -> None:
        world = LateWorld(3, overlap_admission=beside, **SETTINGS[setting])
        assert world.serve(RICH) == DraftingWorld(0).serve(RICH)
        assert world.counts == {0, 1, 2, 3}
        assert world.num_late > 1
        assert times_met(world, setting) > 0

    def test_are_the_same_on_the_thread_device(self) -> None:
        world = LateWorld(2, device="cpu", op_sleep_s=0.001)
        with world.engine:
            assert world.serve(RICH) == DraftingWorld(0).serve(RICH)
        assert world.num_late > 2

    @pytest.mark.parametrize("skill", SKILLS)
    def test_are_the_same_wherever_the_mode_is_switched(self, skill: Skill) -> None:
        switched = 0
        for at in range(1, 9):
            world = LateWorld(2, skill=skill)
            world.serve_switching(RICH[:4], every=at)
            switched += world.engine.counters.orders["mtp_drain"] * (world.num_late > 0)
        assert switched > 3

    @pytest.mark.parametrize("kind", ["mtp", "drafting"])
    def test_of_heads_that_are_always_right_have_every_draft_accepted(self, kind: Any) -> None:
        """They are right only if lengths on the device are: a wrong one changes no token of a model without states."""
        for setting in ("plain", "chunked", "prefix, pausing") if kind == "mtp" else ("plain", "prefix"):
            world = LateWorld(3 if kind == "mtp" else 1, skill="right", kind=kind, **SETTINGS[setting])
            params = [PLAIN.replace(seed=seed, max_tokens=14) for seed in range(5)] + [GREEDY] * 2
            world.serve(params)
            world.serve(params)
            assert all_foreseen(world), setting
            assert world.num_late > 2, setting


class TestLengths:
    def test_are_bounds_on_the_host_and_right_on_the_device(self) -> None:
        """What is staged of a row is what it comes to with all drafts accepted; the forward reads less where not."""
        world, beyond = LateWorld(3), 0

        def look(border: Border) -> None:
            nonlocal beyond
            iteration, table = border.iteration, world.engine.table
            if (iteration.order, border.phase, border.side) != (LATE, Phase.REWIND, "after") or iteration.plan is None:
                return
            rows, dims = iteration.plan.table_rows, iteration.plan.dims
            staged = iteration.plan.half.fields["kv_len"][: dims.num_decode]
            length = world.engine.runner.columns.length
            assert length is not None
            assert (length.numpy()[rows] + 3 == table.kv_len[rows]).all()
            assert (staged >= table.kv_len[rows]).all()
            beyond += int((staged > table.kv_len[rows]).sum())

        world.on_border = look
        world.serve([PLAIN.replace(seed=seed, max_tokens=20) for seed in range(4)])
        assert beyond > 5

    @pytest.mark.parametrize("skill", ["mixed", "wrong"])
    def test_go_back_across_a_block_border_beside_a_launched_forward(self, skill: Skill) -> None:
        crossed = 0

        def look(border: Border) -> None:
            nonlocal crossed
            verified, tokens = border.iteration.verified, border.iteration.num_tokens
            if (border.iteration.order, border.phase, border.side) == (LATE, Phase.REWIND, "after"):
                assert verified is not None
                assert tokens is not None
                ends = world.engine.table.kv_len[verified.first_row : verified.first_row + verified.num_rows]
                crossed += int(((ends + verified.num_drafts - tokens + 1) // 4 > ends // 4).sum())

        world = LateWorld(3, skill=skill)
        world.on_border = look
        world.serve([PLAIN.replace(seed=seed, max_tokens=15) for seed in range(4)])
        assert crossed > 5

    @pytest.mark.parametrize("drafts", [1, 2, 3])
    @pytest.mark.parametrize("skill", SKILLS)
    def test_stay_inside_the_blocks_that_admission_set_aside(self, drafts: int, skill: Skill) -> None:
        """The pool holds what the requests need at their longest and no block more."""
        lengths = [(5, 7), (6, 11), (3, 18)]
        needed = sum(-(-(length + most - 1 + 2 * drafts) // 4) for length, most in lengths)
        for launches in (False, True):
            world = LateWorld(
                drafts, skill=skill, num_blocks=needed, launch_ending_rows=launches, max_sequence_length=24
            )
            for seed, (length, most) in enumerate(lengths):
                world.submit(prompt_of(length, seed), PLAIN.replace(max_tokens=most, seed=seed))
            world.drain()
            assert world.num_late > 0

    @pytest.mark.parametrize("drafts", [1, 2, 3])
    def test_at_the_longest_sequence_stay_inside_the_block_table(self, drafts: int) -> None:
        for length in range(5, 13):
            world = LateWorld(drafts, skill="right", launch_ending_rows=length % 2 == 0, max_sequence_length=24)
            world.submit(prompt_of(length), PLAIN.replace(max_tokens=100))
            world.submit(prompt_of(5, 1), PLAIN.replace(max_tokens=100, seed=4))
            world.drain()
            assert len(world.all[0].new_ids) == 24 - length

    def test_are_known_again_at_every_iteration_border(self) -> None:
        for how in ("pause", "persist", "offload", "recompute"):
            for every in (2, 3):
                world = LateWorld(2, **SETTINGS["prefix, pausing"])
                for number, params in enumerate(RICH[:5]):
                    world.submit(prompt_of(5 + 3 * number, number % 3), params.replace(max_tokens=9, min_tokens=0))
                for step in range(100):
                    if not world.engine.has_unfinished():
                        break
                    if step % (every + 1) == every:
                        stand_still(world.engine, how)
                    world.step()
                world.drain()


class TestEnds:
    @pytest.mark.parametrize("drafts", [1, 2, 3])
    def test_by_length_come_at_exactly_max_tokens_for_every_accepted_count(self, drafts: int) -> None:
        """Also where the row stood in the next forward already, which was for nothing."""
        crossed, wasted = set[int](), 0

        def look(border: Border) -> None:
            verified, tokens = border.iteration.verified, border.iteration.num_tokens
            if (border.iteration.order, border.phase, border.side) == (LATE, Phase.REWIND, "after"):
                assert verified is not None
                assert tokens is not None
                table, at = world.engine.table, slice(verified.first_row, verified.first_row + verified.num_rows)
                over = table.num_output[at] + tokens - table.max_output[at]
                crossed.update((tokens[over >= 0] - 1).tolist())

        for max_tokens in range(1, 11):
            world = LateWorld(drafts)
            world.on_border = look
            for salt in range(6):
                most = max_tokens if salt else 24  # one that goes on, so that the others are launched late as well
                world.submit(prompt_of(5, salt), PLAIN.replace(max_tokens=most, seed=salt))
            world.drain()
            ends = [24, *[max_tokens] * 5]
            assert [len(one.last.token_ids) for one in world.all if one.last is not None] == ends
            wasted += world.engine.counters.wasted["length"]
        assert crossed == set(range(drafts + 1))
        assert wasted > 5

    @pytest.mark.parametrize("place", range(9))
    def test_by_a_stop_id_come_at_every_place_of_an_accepted_run(self, place: int) -> None:
        salt = next(n for n in range(50) if told(prompt_of(6, n))[place] not in told(prompt_of(6, n))[:place])
        answer = told(prompt_of(6, salt))
        for skill in ("right", "mixed"):
            world = LateWorld(3, skill=skill)
            world.submit(prompt_of(6, salt), PLAIN.replace(max_tokens=30, stop_token_ids=[answer[place]], logprobs=1))
            world.submit(prompt_of(9, 1), PLAIN.replace(max_tokens=20))
            world.drain()
            last = world.all[0].last
            assert last is not None
            assert (last.token_ids, last.finish_reason) == (answer[: place + 1], "stop")

    @pytest.mark.parametrize("place", range(1, 9))
    def test_by_a_stop_string_come_at_every_place_of_an_accepted_run(self, place: int) -> None:
        answer = told(prompt_of(6))
        for length in (1, 2):
            text = "".join(PIECES[token] for token in answer[place - length + 1 : place + 1])
            params = PLAIN.replace(max_tokens=30, stop=[text], detokenize=True, min_tokens=place)
            world = LateWorld(3, skill="right", has_text=True)
            world.submit(prompt_of(6), params, stream=length == 2)
            world.submit(prompt_of(9, 1), PLAIN.replace(max_tokens=20))
            world.drain()
            last = world.all[0].last
            assert last is not None
            assert last.finish_reason == "stop"

    @pytest.mark.parametrize("count", [1, 3])
    def test_by_an_abort_come_at_every_border(self, count: int) -> None:
        """Of one that is alone, too: its iteration has then prepared for nobody."""
        at, reached = 0, set()
        while True:
            world = LateWorld(2)
            seen = 0

            def look(border: Border, world: LateWorld = world, at: int = at) -> None:
                nonlocal seen
                if seen == at:
                    reached.add((border.iteration.order, border.phase, border.side))
                    world.abort(world.live_ids[0])
                seen += 1

            world.on_border = look
            for salt in range(count):
                world.submit(prompt_of(5, salt), PLAIN.replace(max_tokens=8, seed=salt))
            world.drain()
            if seen <= at:
                break
            at += 1
        assert {(LATE, phase, side) for phase in LATE.phases for side in ("before", "after")} <= reached

    def test_by_logits_that_are_no_numbers_come_where_they_do_without_drafts(self) -> None:
        failed: Counter[str] = Counter()
        for seed in range(10):
            world = LateWorld(3, skill="right", nan_every=31, prefix_caching=seed % 2 == 0)
            for number in range(4):
                world.submit(prompt_of(3 + number, seed), PLAIN.replace(seed=seed, max_tokens=25))
            world.drain()
            failed.update(one.last.finish_reason for one in world.all if one.last is not None)
        assert failed["error"] > 8
        assert failed["length"] > 2


class TestFailures:
    @pytest.mark.parametrize("phase", LATE.phases, ids=lambda phase: phase.value)
    def test_in_any_phase_lose_and_repeat_no_token(self, phase: Phase) -> None:
        failed = Counter[Order | None]()
        for at in (2, 3, 5):
            for after in (False, True):
                world = LateWorld(2, prefix_caching=True)
                for number, params in enumerate(RICH[:5]):
                    world.submit(prompt_of(5 + 3 * number, number % 3), params.replace(max_tokens=12, min_tokens=0))
                for _ in range(at):
                    world.step()
                if world.fail_in(phase, after=after):
                    failed[world.borders[-1][0]] += 1
                    world.engine.recover()
                world.drain()
        assert failed[LATE] > 1


class TestCounters:
    @pytest.mark.parametrize("skill", SKILLS)
    def test_of_logits_rows_add_up(self, skill: Skill) -> None:
        """I60: tokens given, rejected drafts, and what was drawn behind an end or for nobody."""
        world = LateWorld(3, skill=skill)
        params = [PLAIN.replace(seed=seed, max_tokens=1 + 6 * (seed % 3)) for seed in range(6)]
        world.serve(params)
        counters = world.engine.counters
        counts = [count for step in world.accepted for count in step]
        assert counters.drafts_proposed.total() == 3 * len(counts)
        assert counters.drafts_accepted.total() == sum(counts)
        assert counters.generated_tokens == sum(one.max_tokens for one in params)
        assert counters.overlap_steps >= world.num_late
        assert counters.reasons[Reason.COUNTS_LATER.name.lower()] == world.num_late
