"""Graph-aware admission inside the engine: who waits for a graph, what it costs, and that no token changes."""

from __future__ import annotations

import itertools
import logging
import random
from functools import cache
from typing import Any

import pytest

from engine.errors import ConfigError, RequestError
from engine.graph_gate import CONTINUING_CHUNK
from engine.phases import Order, Phase
from engine.request import SamplingParams
from tests.bug_kind_world import MODES
from tests.oracle_reference import VOCAB
from tests.oracle_world import World, oracle_engine, play

PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=1, ignore_eos=True, logprobs=1)
SIZES = (1, 2, 4, 16)
"""Mixed forwards of 16 tokens hold 1, 2 or 4 prompts, and at most three decode rows beside one."""


def gated_world(**options: Any) -> World:
    defaults: dict[str, Any] = {
        "graph_all_prefills": True,
        "graphs": SIZES,
        "block_size": 16,
        "num_blocks": 16,
        "max_sequence_length": 64,
    }
    return World(oracle_engine(**{**defaults, **options}))


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * place * place + 3 * place + salt) % VOCAB for place in range(length)]


def serve(world: World, lengths: list[int], params: SamplingParams = PARAMS) -> list[tuple[int, ...]]:
    for number, length in enumerate(lengths):
        world.submit(prompt_of(length, number), params.replace(seed=number))
    world.drain()
    return [one.last.token_ids for one in world.all if one.last is not None]


@cache
def free_answers(lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    return serve(World(oracle_engine()), list(lengths))


class TestSwitch:
    @pytest.mark.parametrize(
        ("all_prefills", "non_decode", "has_graphs"), list(itertools.product((False, True), repeat=3))
    )
    def test_is_on_with_both_options_and_something_captured(
        self, all_prefills: bool, non_decode: bool, has_graphs: bool
    ) -> None:
        graphs = (1, 2, 4, 16) if non_decode else (1, 2, 4)
        world = gated_world(
            graph_all_prefills=all_prefills, graph_non_decode=non_decode, graphs=graphs if has_graphs else None
        )
        is_on = world.engine.queue.capacity().gate is not None
        assert is_on == (all_prefills and non_decode and has_graphs)

    def test_refuses_graphs_in_which_no_prompt_fits(self) -> None:
        with pytest.raises(ConfigError, match=r"none of the .* captured forwards holds a prompt"):
            gated_world(graphs=(1, 2))


class TestWaiting:
    @pytest.mark.parametrize("mode", MODES)
    def test_no_prompt_is_read_eagerly_and_no_token_changes(self, mode: str) -> None:
        lengths = [5, 12, 14, 3, 16, 9, 2, 1]
        world = gated_world(mode=mode)

        assert serve(world, lengths) == free_answers(tuple(lengths))
        assert world.engine.counters.miss_reasons.total() == 0
        assert world.engine.counters.graph_wait_steps > 0

    def test_two_requests_that_do_not_fit_together_both_get_on(self) -> None:
        """The second one waits for no more than the first one's rows to end, and none of them stands still."""
        world = gated_world()
        first = world.submit(prompt_of(16), PARAMS)
        second = world.submit(prompt_of(16, 1), PARAMS)
        world.step()
        assert [request.request_id for request in world.engine.queue.waiting] == [second]
        ended: list[str] = []
        for _ in range(60):
            ended += [output.request_id for output in world.step() if output.finished]
            if len(ended) == 2:
                break
        assert ended == [first, second]

    def test_a_head_that_waits_for_a_graph_costs_no_overlap(self) -> None:
        world = gated_world()
        world.submit(prompt_of(16), PARAMS.replace(max_tokens=40))
        for _ in range(3):
            world.step()
        waiting = world.submit(prompt_of(16, 1), PARAMS)
        before = world.engine.counters.overlap_steps
        for _ in range(10):
            world.step()
        assert world.engine.counters.overlap_steps == before + 10
        assert world.engine._live[waiting].graph_wait_steps == 10
        world.drain()

    def test_the_probe_counts_nothing_and_admission_resets(self) -> None:
        world = gated_world()
        world.submit(prompt_of(16), PARAMS)
        waiting = world.submit(prompt_of(16, 1), PARAMS)
        for _ in range(4):
            world.step()
        request = world.engine._live[waiting]
        counted = request.graph_wait_steps
        assert counted >= 2
        for _ in range(5):
            world.engine.controller.order_state()
        assert request.graph_wait_steps == counted
        while request.row is None:
            world.step()
        assert request.graph_wait_steps == 0
        world.drain()

    def test_warns_at_multiples_of_the_longest_sequence(self, caplog: pytest.LogCaptureFixture) -> None:
        world = gated_world(max_sequence_length=120)
        world.submit(prompt_of(15), PARAMS.replace(max_tokens=105))
        waiting = world.submit(prompt_of(16, 1), PARAMS)
        with caplog.at_level(logging.WARNING, "engine.controller"):
            world.step()
            world.engine._live[waiting].graph_wait_steps = 118
            for _ in range(2):
                world.step()
            assert len(caplog.records) == 1
            world.step()
        assert ["has waited 120 iterations" in record.getMessage() for record in caplog.records] == [True]
        world.engine._live[waiting].graph_wait_steps = 0
        world.drain()

    def test_an_abort_while_waiting_leaves_nothing(self) -> None:
        world = gated_world()
        world.submit(prompt_of(16), PARAMS)
        waiting = world.submit(prompt_of(16, 1), PARAMS)
        last = world.submit(prompt_of(3, 2), PARAMS)
        for _ in range(4):
            world.step()
        world.abort(waiting)
        world.step()
        world.step()
        assert world.engine._live[last].row is not None
        world.drain()

    def test_what_fits_no_graph_even_alone_is_refused_at_the_door(self) -> None:
        world = gated_world()
        with pytest.raises(RequestError, match=r"17 prompt tokens .*no captured graph.*chunked_prefill=True") as error:
            world.submit(prompt_of(17), PARAMS)
        assert error.value.field == "prompt"
        assert not world.engine.has_unfinished()

    def test_a_prefix_hit_makes_room(self) -> None:
        world = gated_world(prefix_caching=True, block_size=4, num_blocks=60)
        world.submit(prompt_of(16), PARAMS.replace(max_tokens=40))
        for _ in range(3):
            world.step()
        world.submit(prompt_of(16), PARAMS)  # four tokens are left to read, and a graph has room for these
        world.step()
        world.step()
        assert world.engine.counters.graph_wait_steps == 0
        assert world.engine.table.num_live == 2
        world.drain()


class TestChunks:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("budget", [16, 20, 30])
    def test_are_cut_down_to_a_graph_and_change_no_token(self, mode: str, budget: int) -> None:
        lengths = [30, 5, 17, 41, 2, 33]
        world = gated_world(mode=mode, chunked_prefill=True, max_batch_tokens=budget)
        assert serve(world, lengths) == free_answers(tuple(lengths))
        assert set(world.engine.counters.miss_reasons) <= {CONTINUING_CHUNK}

    def test_that_go_on_where_no_graph_has_room_run_eagerly_with_their_reason(self) -> None:
        world = gated_world(chunked_prefill=True, max_batch_tokens=16, graphs=(1, 2, 4, 5))
        reasons: list[tuple[Order, str | None]] = []

        def look(border: Any) -> None:
            plan = border.iteration.plan
            if border.phase is Phase.FORWARD and border.side == "after" and plan is not None and plan.graph is None:
                reasons.append((border.iteration.order, plan.miss_reason))

        world.on_border = look
        serve(world, [3, 3, 3, 40])
        assert {reason for _, reason in reasons} <= {CONTINUING_CHUNK}

    def test_prompt_log_probabilities_are_read_eagerly_and_said_so(self) -> None:
        world = gated_world()
        serve(world, [7], PARAMS.replace(prompt_logprobs=1))
        assert dict(world.engine.counters.miss_reasons) == {"prompt log probabilities": 1}


class TestComingBack:
    def test_with_more_than_a_graph_holds_reads_eagerly(self) -> None:
        """It fitted at the door, and must not fail for what it has been given since."""
        world = gated_world(capacity_policy="max_utilization", block_size=4, num_blocks=13, paused_blocks=0)
        found = serve(world, [14, 15, 13, 16], PARAMS.replace(max_tokens=30))
        assert found == serve(World(oracle_engine()), [14, 15, 13, 16], PARAMS.replace(max_tokens=30))
        assert world.engine.counters.evictions > 0


class TestSchedules:
    @pytest.mark.parametrize("seed", range(20))
    def test_drawn_at_random_give_the_reference_s_answers(self, seed: int) -> None:
        rng = random.Random(seed)
        chunked = seed % 2 == 0
        world = gated_world(
            mode=rng.choice(MODES),
            chunked_prefill=chunked,
            max_batch_tokens=64 if not chunked else 20,
            graphs=(1, 2, 4, 8, 16) if chunked else (1, 2, 4, 16, 64),
            prefix_caching=rng.random() < 0.5,
            num_blocks=24,
        )
        play(world, rng, num_acts=30)
