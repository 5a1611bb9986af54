"""Policies that researchers pass in: legal ones change no token, and illegal ones are told which rule they break."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from engine.admission import (
    AdmissionPolicy,
    Capacity,
    Entry,
    consider,
    first_come_first_served,
)
from engine.batch import BatchDimensions
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError, InvariantError, PolicyError
from engine.graphs import GraphListPolicy, captured_by_default
from engine.phases import Phase
from engine.request import Request, SamplingParams
from tests.bug_kind_world import MODES
from tests.oracle_reference import VOCAB
from tests.oracle_world import SMALL, World, loaded_oracle, play, shared_prompt

PARAMS = SamplingParams(max_tokens=6, temperature=1.0, seed=1, ignore_eos=True)
LENGTHS = (40, 3, 25, 9, 60, 1, 17, 12, 33, 5)


def policy_world(
    admission: Any = first_come_first_served, graph_list: Any = captured_by_default, **options: Any
) -> World:
    """The oracle's small engine, invariants on, with policies."""
    engine = Engine(loaded_oracle(), EngineConfig(**{**SMALL, **options}), admission=admission, graph_list=graph_list)
    if isinstance(admission, LongestHitFirst):
        admission.engine = engine
    return World(engine)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * place * place + 3 * place + salt) % VOCAB for place in range(length)]


def submit_all(world: World, lengths: Sequence[int] = LENGTHS) -> list[str]:
    return [
        world.submit(prompt_of(length, number), PARAMS.replace(seed=number)) for number, length in enumerate(lengths)
    ]


def entered(world: World) -> list[str]:
    """Ids in the order in which they were given a row, told as they enter."""
    order: list[str] = []

    def at_border(border: Any) -> None:
        if border.phase is Phase.ADMIT and border.side == "after":
            order.extend(request.request_id for request in border.iteration.admitted)

    world.on_border = at_border
    return order


# -- legal policies ----------------------------------------------------------------------------------------------------


class ShortestFirst:
    """The shortest prompt; of equals the oldest."""

    def choose(self, waiting: Sequence[Request], capacity: Capacity) -> Request | None:
        return min(waiting, key=lambda request: len(request.prompt_ids))


class LongestHitFirst:
    """Whoever skips most of its prompt; of equals the oldest."""

    engine: Engine

    def choose(self, waiting: Sequence[Request], capacity: Capacity) -> Request | None:
        return max(waiting, key=lambda request: self.engine.queue.hit(request).block_ids.size)


class FirstThatFits:
    """The oldest that could enter now, or else the oldest."""

    def choose(self, waiting: Sequence[Request], capacity: Capacity) -> Request | None:
        fitting = (one for one in waiting if isinstance(consider(one, capacity), Entry))
        return next(fitting, waiting[0])


class NewestFirst:
    def choose(self, waiting: Sequence[Request], capacity: Capacity) -> Request | None:
        return waiting[-1]


class OnlyInPairs:
    """Nobody while one row alone is free, unless nothing else runs."""

    def choose(self, waiting: Sequence[Request], capacity: Capacity) -> Request | None:
        return waiting[0] if capacity.free_rows > 1 else None


class Door:
    """Nobody while it is shut."""

    is_open = False

    def choose(self, waiting: Sequence[Request], capacity: Capacity) -> Request | None:
        return waiting[0] if self.is_open else None


LEGAL = (ShortestFirst, LongestHitFirst, FirstThatFits, NewestFirst, OnlyInPairs)
WORLDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"chunked_prefill": True, "max_batch_tokens": 17},
    "prefix": {"prefix_caching": True},
    "gated": {"graph_all_prefills": True, "graphs": (1, 2, 4, 16, 64), "chunked_prefill": True, "num_blocks": 40},
    "beside": {"overlap_admission": True, "chunked_prefill": True, "prefix_caching": True, "max_batch_tokens": 23},
    "pausing": {"capacity_policy": "max_utilization", "num_blocks": 26, "prefix_caching": True},
}


class TestLegalAdmission:
    def test_shortest_first_takes_the_shortest_and_of_equals_the_oldest(self) -> None:
        world = policy_world(ShortestFirst(), max_requests=1)
        order = entered(world)
        lengths = (*LENGTHS, 9, 3)
        names = submit_all(world, lengths)
        world.drain()

        assert order == [names[place] for place in sorted(range(len(lengths)), key=lambda place: lengths[place])]

    def test_longest_hit_first_lets_in_who_skips_most(self) -> None:
        world = policy_world(LongestHitFirst(), prefix_caching=True, max_requests=1)
        warm, cold = prompt_of(40), prompt_of(40, 3)
        world.submit(warm, PARAMS)
        world.drain()
        order = entered(world)
        names = [world.submit(ids, PARAMS) for ids in (cold, warm[:13], warm[:30] + cold[:9], warm)]
        world.drain()

        assert order == [names[place] for place in (3, 2, 1, 0)]

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("policy", LEGAL)
    def test_every_request_gets_the_tokens_that_first_come_first_served_gives(
        self, policy: type[AdmissionPolicy], mode: str
    ) -> None:
        answers = []
        for admission in (first_come_first_served, policy()):
            world = policy_world(admission, mode=mode)
            submit_all(world)
            world.drain()
            answers.append([one.last.token_ids for one in world.all if one.last is not None])

        assert answers[0] == answers[1]
        assert len(answers[1]) == len(LENGTHS)

    @pytest.mark.parametrize("kind", WORLDS)
    @pytest.mark.parametrize("policy", LEGAL)
    def test_random_schedules_give_the_reference_s_answers(self, policy: type[AdmissionPolicy], kind: str) -> None:
        """Submitting, aborting, mode switches, resets and steps by hand, each answer checked as it comes."""
        rng = random.Random(f"{policy.__name__} {kind}")
        world = policy_world(policy(), mode=rng.choice(MODES), **WORLDS[kind])
        longest = 30 if kind == "gated" else 60

        play(world, rng, num_acts=45, prompt=lambda draws: shared_prompt(draws, longest))

        assert len(world.all) > 10

    @pytest.mark.parametrize("mode", MODES)
    def test_nobody_enters_while_it_answers_none_and_rows_go_on(self, mode: str) -> None:
        door = Door()
        world = policy_world(door, mode=mode)
        door.is_open = True
        first = world.submit(prompt_of(5), PARAMS.replace(max_tokens=8))
        world.step()
        door.is_open = False
        second = world.submit(prompt_of(5, 1), PARAMS)
        for _ in range(12):
            world.step()
        assert world.live_ids == [second], f"{first} went on to its end meanwhile"
        assert world.engine.table.num_live == 0

        door.is_open = True
        world.drain()

    def test_nobody_it_wants_costs_no_overlap(self) -> None:
        door = Door()
        world = policy_world(door)
        door.is_open = True
        world.submit(prompt_of(5), PARAMS.replace(max_tokens=20))
        for _ in range(3):
            world.step()
        door.is_open = False
        world.submit(prompt_of(5, 1), PARAMS)
        before = world.engine.counters.overlap_steps
        for _ in range(8):
            world.step()

        assert world.engine.counters.overlap_steps == before + 8
        door.is_open = True
        world.drain()


# -- policies that break a rule ----------------------------------------------------------------------------------------


class Favourite:
    """Wants the first request it ever saw, for ever: it soon has a row, and then an end."""

    def __init__(self) -> None:
        self._favourite: Request | None = None

    def choose(self, waiting: Sequence[Request], capacity: Capacity) -> Request | None:
        self._favourite = self._favourite or waiting[0]
        return self._favourite


class FromElsewhere:
    """A request of another engine."""

    def __init__(self) -> None:
        other = policy_world()
        other.submit(prompt_of(5), PARAMS)
        self._request = other.engine.queue.waiting[0]

    def choose(self, waiting: Sequence[Request], capacity: Capacity) -> Request | None:
        return self._request


class Place:
    """Answers with a place rather than a request."""

    def choose(self, waiting: Sequence[Request], capacity: Capacity) -> Any:
        return 0


class Taker:
    """Takes its choice out of the queue by itself."""

    def choose(self, waiting: Any, capacity: Capacity) -> Any:
        chosen = waiting[0]
        waiting.take(chosen)
        return chosen


class Emptier:
    """Throws everybody out."""

    def choose(self, waiting: Any, capacity: Capacity) -> Any:
        waiting.clear()
        return None


class Wavering:
    """Wants the oldest, then nobody, then the oldest."""

    asked = 0

    def choose(self, waiting: Sequence[Request], capacity: Capacity) -> Request | None:
        self.asked += 1
        return waiting[0] if self.asked % 2 else None


class Raising:
    def choose(self, waiting: Sequence[Request], capacity: Capacity) -> Request | None:
        raise ZeroDivisionError("a fault of the policy's own")


def step_until_error(world: World, error: type[Exception], match: str, *, limit: int = 40) -> str:
    """What ``world`` says when it first fails, which must be by ``error``."""

    def step_on() -> None:
        for _ in range(limit):
            world.step()

    with pytest.raises(error, match=match) as caught:
        step_on()
    return str(caught.value)


def go_on(world: World) -> None:
    """With the default policy in its place everything ends as it should; a failed iteration is recovered from first."""
    if world.engine.failure is not None:
        world.engine.recover()
    world.engine.queue._policy = first_come_first_served
    world.drain()


class TestRefusedAtOnce:
    @pytest.mark.parametrize("name", ["admission", "graph_list"])
    def test_a_class_is_no_instance(self, name: str) -> None:
        with pytest.raises(ConfigError, match=rf"{name} must be .*got .*ShortestFirst"):
            policy_world(**{name: ShortestFirst})

    @pytest.mark.parametrize("policy", [object(), None, lambda waiting, capacity: waiting[0]])
    @pytest.mark.parametrize("name", ["admission", "graph_list"])
    def test_it_must_have_choose(self, name: str, policy: Any) -> None:
        with pytest.raises(ConfigError, match=rf"{name} must .*a method choose\("):
            policy_world(**{name: policy})


class TestBrokenAdmission:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("policy", [Favourite, FromElsewhere])
    def test_choosing_who_does_not_wait_is_told_and_recovered_from(
        self, policy: type[AdmissionPolicy], mode: str
    ) -> None:
        world = policy_world(policy(), mode=mode)
        submit_all(world)

        told = step_until_error(world, PolicyError, r"does not wait \(I2\)")
        assert told.startswith(f"admission policy {policy.__name__} chose")
        assert "\n" not in told

        go_on(world)

    @pytest.mark.parametrize("mode", MODES)
    def test_an_ended_request_does_not_wait(self, mode: str) -> None:
        world = policy_world(Favourite(), mode=mode)
        first = world.submit(prompt_of(5), PARAMS.replace(max_tokens=2))
        while world.live_ids:
            world.step()
        world.submit(prompt_of(7), PARAMS)

        assert first in step_until_error(world, PolicyError, r"does not wait \(I2\)")

        go_on(world)

    @pytest.mark.parametrize("mode", MODES)
    def test_an_aborted_request_does_not_wait(self, mode: str) -> None:
        door, world = Favourite(), policy_world(Favourite(), mode=mode)
        world.engine.queue._policy = door
        first, second = submit_all(world, (5, 6))
        door.choose(world.engine.queue.waiting, world.engine.queue.capacity())
        world.abort(first)

        assert first in step_until_error(world, PolicyError, r"does not wait \(I2\)")
        assert second in world.live_ids

        go_on(world)

    def test_an_answer_that_is_no_request_is_told(self) -> None:
        world = policy_world(Place())
        submit_all(world)

        step_until_error(world, PolicyError, "admission policy Place")

    def test_the_message_is_short_enough_to_read(self) -> None:
        world = policy_world(Favourite())
        submit_all(world)

        assert len(step_until_error(world, PolicyError, "does not wait")) < 200

    @pytest.mark.parametrize("policy", [Taker, Emptier])
    def test_changing_the_queue_is_told_and_loses_nobody(self, policy: type[AdmissionPolicy]) -> None:
        world = policy_world(policy())
        names = submit_all(world)

        step_until_error(world, AttributeError, r"has no attribute '(take|clear)'")
        assert [request.request_id for request in world.engine.queue.waiting] == names

        go_on(world)

    def test_an_answer_that_changes_between_two_questions_breaks_i19(self) -> None:
        world = policy_world(Wavering())
        submit_all(world)

        step_until_error(world, InvariantError, "I19: ")

        go_on(world)

    @pytest.mark.parametrize("mode", MODES)
    def test_its_own_faults_come_through_and_are_recovered_from(self, mode: str) -> None:
        world = policy_world(Raising(), mode=mode)
        submit_all(world)

        step_until_error(world, ZeroDivisionError, "a fault of the policy's own")

        go_on(world)


class TestStarvation:
    def test_who_waits_for_a_graph_longer_than_requests_run_is_told_of(self, caplog: pytest.LogCaptureFixture) -> None:
        """Short prompts always find a graph beside those that run, and the policy lets them pass the long one."""
        world = policy_world(
            FirstThatFits(),
            graph_all_prefills=True,
            graphs=(1, 2, 4, 16),
            block_size=16,
            num_blocks=16,
            max_sequence_length=64,
        )
        params = PARAMS.replace(max_tokens=30)
        world.submit(prompt_of(3), params)
        world.step()
        long = world.submit(prompt_of(16, 1), PARAMS)
        with caplog.at_level(logging.WARNING):
            for number in range(230):
                if len(world.live_ids) < 4:
                    world.submit(prompt_of(3, number), params)
                world.step()

        assert world.engine._live[long].graph_wait_steps > 200
        told = [record.getMessage() for record in caplog.records if "for a captured graph" in record.getMessage()]
        assert [line.split(";")[0] for line in told] == [
            f"request {long} has waited {steps} iterations for a captured graph" for steps in (100, 200)
        ]
        world.drain()


# -- graph lists -------------------------------------------------------------------------------------------------------


class Listed:
    """What it was given."""

    def __init__(self, *sizes: Any) -> None:
        self.sizes = sizes

    def choose(self, config: EngineConfig, max_sequence_length: int) -> Iterable[BatchDimensions]:
        return iter(self.sizes)


class NoList:
    def choose(self, config: EngineConfig, max_sequence_length: int) -> Any:
        return None


def dims(tokens: int, prefill: int, decode: int) -> BatchDimensions:
    return BatchDimensions(num_tokens=tokens, num_prefill=prefill, num_decode=decode)


class TestGraphLists:
    def test_what_is_listed_is_captured_and_hit_and_changes_no_token(self) -> None:
        answers = []
        sizes = (dims(4, 0, 4), dims(1, 0, 1), dims(24, 2, 2), dims(24, 2, 2))
        for graph_list in (captured_by_default, Listed(*sizes)):
            world = policy_world(graph_list=graph_list)
            submit_all(world, (5, 9, 3, 12, 30))
            world.drain()
            answers.append([one.last.token_ids for one in world.all if one.last is not None])

        assert answers[0] == answers[1]
        assert world.engine.runner.graphs.sizes == sorted(set(sizes))
        assert world.engine.counters.graph_hits > 0
        assert world.engine.counters.graph_misses > 0, "30 tokens are in no list"

    def test_it_is_told_the_settled_options(self) -> None:
        asked: list[tuple[EngineConfig, int]] = []

        class Asks:
            def choose(self, config: EngineConfig, max_sequence_length: int) -> Iterable[BatchDimensions]:
                asked.append((config, max_sequence_length))
                return []

        policy_world(graph_list=Asks(), graphs="auto")

        ((config, longest),) = asked
        assert config.graphs != "auto"
        assert longest == 100

    def test_none_at_all_is_as_without_graphs(self) -> None:
        world = policy_world(graph_list=Listed(), graphs=(1, 2, 4))
        submit_all(world, (5, 9))
        world.drain()

        assert world.engine.counters.graph_hits == world.engine.counters.graph_misses == 0

    @pytest.mark.parametrize(
        ("size", "rule"),
        [
            (dims(0, 0, 0), "it holds no row"),
            (dims(4, 0, 0), "it holds no row"),
            (dims(4, -1, 2), "it holds no row"),
            (dims(-4, 1, 0), "it holds no row"),
            (dims(5, 0, 5), "5 rows, max_requests=4"),
            (dims(8, 3, 2), "5 rows, max_requests=4"),
            (dims(121, 2, 0), "121 tokens, max_batch_tokens=120"),
            (dims(2, 2, 1), "its rows have 3 tokens at least"),
            (dims(5, 0, 4), "its rows have 4 tokens at most"),
            (dims(102, 1, 1), "its rows have 101 tokens at most"),
        ],
    )
    def test_a_size_that_can_never_run_is_refused_with_the_rule(self, size: BatchDimensions, rule: str) -> None:
        with pytest.raises(ConfigError, match=rf"graph list policy Listed: .* can never run \(I49\): {rule}") as caught:
            policy_world(graph_list=Listed(dims(1, 0, 1), size))
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("size", [4, (4, 0, 4), "4"])
    def test_what_is_no_size_is_refused(self, size: Any) -> None:
        with pytest.raises(ConfigError, match=r"graph list policy Listed: .* is no BatchDimensions"):
            policy_world(graph_list=Listed(size))

    @pytest.mark.parametrize("graph_list", [NoList(), Listed([4, 0, 4])])
    def test_an_answer_that_is_no_collection_of_sizes_is_refused(self, graph_list: GraphListPolicy) -> None:
        with pytest.raises(ConfigError, match="graph list policy"):
            policy_world(graph_list=graph_list)

    def test_its_own_faults_come_through(self) -> None:
        class Faulty:
            def choose(self, config: EngineConfig, max_sequence_length: int) -> Iterable[BatchDimensions]:
                raise ZeroDivisionError("a fault of the policy's own")

        with pytest.raises(ZeroDivisionError, match="of the policy's own"):
            policy_world(graph_list=Faulty())
