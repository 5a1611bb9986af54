"""A small world for scheduling tests: an engine on the oracle model whose every answer is checked as it comes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.controller import Border
from engine.device import Device
from engine.engine import Engine
from engine.errors import IterationFailedError
from engine.invariants import check_device, check_idle
from engine.models.loader import LoadedModel
from engine.models.oracle import OracleModel, Skill
from engine.phases import Order, Phase
from engine.policy import OrderPolicy, prefer_overlap
from engine.request import RequestOutput, SamplingParams
from tests.oracle_reference import EOS, PIECES, VOCAB, Expected, expected_output, expected_prompt_logprobs


class PieceTokenizer:
    """Each id is a piece of text; decoding is putting pieces side by side."""

    def encode(self, text: str) -> list[int]:
        return [PIECES.index(char) for char in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(PIECES[i] for i in ids)


class FaultyOracle(OracleModel):
    """An oracle whose logits are NaN at about one in ``nan_every`` histories; 0 is never."""

    def __init__(self, nan_every: int, **options: Any) -> None:
        super().__init__(VOCAB, **options)
        self.nan_every = nan_every

    def forward_hidden(self, batch: Any, caches: Any) -> tuple[Tensor, Tensor]:
        logits, hidden = super().forward_hidden(batch, caches)
        if not self.nan_every:
            return logits, hidden
        first = (logits[:, :1] * (65536 / self.spread)).to(torch.int64)
        return torch.where(first % self.nan_every == 1, torch.nan, logits), hidden


# -- engines -----------------------------------------------------------------------------------------------------------


Kind = Literal["oracle", "hybrid", "drafting", "mtp", "moe", "moe-mtp"]
"""Plain; with a recurrent state; with three draft heads; with both; plain with experts; with all. All answer alike."""


SMALL: dict[str, Any] = {
    "device": "inline",
    "block_size": 4,
    "num_blocks": 60,
    "max_requests": 4,
    "max_batch_tokens": 120,
    "max_sequence_length": 100,
    "debug_invariants": True,
}
"""Options of a small engine."""


def oracle_engine(
    *,
    nan_every: int = 0,
    has_text: bool = False,
    kind: Kind = "oracle",
    skill: Skill = "mixed",
    device_object: Device | None = None,
    policy: OrderPolicy = prefer_overlap,
    **options: Any,
) -> Engine:
    """A small engine with invariants on: 4 rows, blocks of 4, sequences of 100; ``options`` override."""
    return Engine(
        loaded_oracle(nan_every, has_text=has_text, kind=kind, skill=skill),
        EngineConfig(**{**SMALL, **options}),
        device=device_object,
        policy=policy,
    )


def loaded_oracle(
    nan_every: int = 0, *, has_text: bool = False, kind: Kind = "oracle", skill: Skill = "mixed"
) -> LoadedModel:
    """One model for all engines of a kind, with text or without, so that they share their traced buckets."""
    return _loaded_oracle(nan_every, has_text, kind, skill)


@cache
def _loaded_oracle(nan_every: int, has_text: bool, kind: Kind, skill: Skill) -> LoadedModel:
    """Behind a function of its own: the cache takes two spellings of one call for two models."""
    if has_text:
        tokenizer: Any = PieceTokenizer()
        return replace(_loaded_oracle(nan_every, False, kind, skill), tokenizer=tokenizer)
    return make_oracle(nan_every, kind=kind, skill=skill)


def make_oracle(nan_every: int = 0, *, kind: Kind = "oracle", skill: Skill = "mixed") -> LoadedModel:
    """A model of its own."""
    return LoadedModel(
        model=FaultyOracle(
            nan_every,
            device=torch.device("cpu"),
            is_recurrent=kind in ("hybrid", "mtp", "moe-mtp"),
            num_draft_heads=3 if kind in ("drafting", "mtp", "moe-mtp") else 0,
            skill=skill,
            num_experts=8 if kind in ("moe", "moe-mtp") else 0,
        ),
        tokenizer=None,
        name="oracle",
        eos_token_ids=(EOS,),
        vocab_size=VOCAB,
        architecture="Oracle",
        config={},
    )


# -- the world ---------------------------------------------------------------------------------------------------------


class PlantedError(Exception):
    """Raised by a test inside a phase."""


@dataclass
class Submitted:
    """One request and everything that came back."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    stream: bool
    tokens_at_abort: int | None = None
    was_reset: bool = False
    new_ids: list[int] = field(default_factory=list)
    new_text: str = ""
    last: RequestOutput | None = None


class World:
    """An engine, what was asked of it, and what it answered. Every answer is checked as it comes."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.all: list[Submitted] = []
        self.current: dict[str, Submitted] = {}
        """By id; an id may be used again after its end."""
        self.on_border: Callable[[Border], None] | None = None
        """Called at every border, behind the engine's own checks."""
        self.borders: list[tuple[Order, Phase, str]] = []
        self.num_near = 0
        self.check_from = 0
        """Borders before that one are not checked: for a series of worlds that part at one border more each."""
        self._checks = engine._check if engine.config.debug_invariants else None
        engine.controller.watch = self._watch

    def _watch(self, border: Border) -> None:
        if self._checks is not None and len(self.borders) >= self.check_from:
            self._checks(border)
        self.borders.append((border.iteration.order, border.phase, border.side))
        if self.on_border is not None:
            self.on_border(border)

    @property
    def nan_every(self) -> int:
        return self.engine.loaded.model.nan_every  # type: ignore[attr-defined,no-any-return]

    @property
    def live_ids(self) -> list[str]:
        return [request_id for request_id, one in self.current.items() if one.last is None]

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        stream: bool = False,
        request_id: str | None = None,
        cache_salt: str = "",
    ) -> str:
        assert params.seed is not None, "tests name their seeds"
        given = self.engine.add_request(
            list(prompt), params, request_id=request_id, stream=stream, cache_salt=cache_salt
        )
        one = Submitted(given, list(prompt), params, stream)
        self.all.append(one)
        self.current[given] = one
        return given

    def abort(self, request_id: str) -> bool:
        one, request = self.current.get(request_id), self.engine._live.get(request_id)
        accepted = self.engine.abort(request_id)
        if accepted:
            assert one is not None
            assert request is not None
            one.tokens_at_abort = len(request.output_ids)
        return accepted

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        self.take(outputs)
        return outputs

    def step_up_to(self, count: int) -> None:
        """So many steps, the last one checked: for a series of worlds each of which takes one step more."""
        checks, self._checks = self._checks, None
        for at in range(count):
            self._checks = checks if at == count - 1 else None
            self.step()
        self._checks = checks

    def step_phase(self) -> Border | None:
        border = self.engine.step_phase()
        if border is not None and self.engine.in_hand is None:
            self.take(border.iteration.outputs)
        return border

    def reset(self) -> None:
        for one in self.all:
            one.was_reset = one.was_reset or one.last is None
        self.take(self.engine.reset())
        assert not self.live_ids, "reset left requests without an end"
        check_idle(self.engine)

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            one = self.current[output.request_id]
            assert one.last is None, f"{output.request_id} gave an output after its last one (I43)"
            one.new_ids += output.new_token_ids
            one.new_text += output.new_text
            assert tuple(one.new_ids) == output.token_ids, f"{output.request_id}: new ids do not add up (I46)"
            assert one.new_text == output.text, f"{output.request_id}: new text does not add up (I46)"
            assert output.prompt_token_ids == tuple(one.prompt)
            assert output.logprobs is None or len(output.logprobs) == len(output.token_ids)
            if output.finished:
                one.last = output
                self.verify(one)
            else:
                assert one.stream, f"{output.request_id} does not stream"
                assert one.tokens_at_abort is None or len(one.new_ids) <= one.tokens_at_abort

    def verify(self, one: Submitted) -> None:
        """The answer is the reference's, cut where an abort or a reset came in between."""
        output, params = one.last, one.params
        assert output is not None
        assert params.seed is not None
        expected = expected_output(
            one.prompt,
            params,
            params.seed,
            max_length=self.engine.resolved.max_sequence_length,
            follow=output.token_ids,
            nan_every=self.nan_every,
            at_most=len(output.token_ids) if output.finish_reason == "abort" else None,
        )
        self.num_near += expected.num_near
        name, count = one.request_id, len(output.token_ids)
        assert output.token_ids == expected.token_ids[:count], f"{name}: {output.token_ids} is not {expected}"
        if output.finish_reason == "abort":
            assert one.was_reset or one.tokens_at_abort is not None, f"{name} aborted itself"
            assert one.was_reset or count <= (one.tokens_at_abort or 0), f"{name}: a token after its abort (I58)"
        else:
            assert count == len(expected.token_ids), f"{name}: {count} of {len(expected.token_ids)} tokens"
            assert output.finish_reason == expected.finish_reason, f"{name}: {output.finish_reason}, not {expected}"
            if output.finish_reason == "stop":
                assert output.stop_reason == expected.stop_reason
            if self.engine.loaded.tokenizer is not None:
                assert output.text == expected.text, f"{name}: {output.text!r}, not {expected.text!r}"
        self._verify_logprobs(one, output, expected)
        times = output.timings
        known = [times.arrival_ns, times.admitted_ns, times.first_token_ns, times.finished_ns]
        passed = [moment for moment in known if moment is not None]
        assert passed == sorted(passed), f"{name}: times run backwards: {times} (I44)"
        assert times.first_token_ns is not None or not count

    def _verify_logprobs(self, one: Submitted, output: RequestOutput, expected: Expected) -> None:
        if one.params.logprobs is None:
            assert output.logprobs is None
        else:
            assert output.logprobs is not None
            assert len(output.logprobs) == len(output.token_ids)
            for row, wanted in zip(output.logprobs, expected.logprobs, strict=False):
                _check_row(row, wanted)
        if one.params.prompt_logprobs is not None and (output.token_ids or output.prompt_logprobs):
            wanted_rows = expected_prompt_logprobs(one.prompt, one.params.prompt_logprobs, self.nan_every)
            assert output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(wanted_rows)
            assert output.prompt_logprobs[0] is None
            for found, wanted_row in zip(output.prompt_logprobs[1:], wanted_rows[1:], strict=True):
                assert found is not None
                if wanted_row is not None:
                    _check_row(found, wanted_row)

    def drain(self, limit: int = 2000) -> None:
        """Run to the end; then nothing is held and every request has had its one last output."""
        for _ in range(limit):
            if not self.engine.has_unfinished():
                break
            self.step()
        assert not self.engine.has_unfinished(), f"still busy after {limit} steps; live: {self.live_ids}"
        assert self.engine.step() == []
        assert not self.live_ids, f"{self.live_ids} never ended"
        check_idle(self.engine)
        check_device(self.engine)

    # -- failures

    @contextmanager
    def fault_in(self, phase: Phase, *, after: bool) -> Iterator[None]:
        """Within: the phase raises, ahead of its work or behind it."""
        phases = self.engine.controller._phases
        real = phases[phase]

        def faulty(iteration: Any) -> None:
            if after:
                real(iteration)
            raise PlantedError(f"planted in {phase.value}")

        phases[phase] = faulty
        try:
            yield
        finally:
            phases[phase] = real

    def fail_in(self, phase: Phase, *, after: bool) -> bool:
        """Make one step fail in ``phase``; False if the next step does not take it (then it ran normally)."""
        with self.fault_in(phase, after=after):
            try:
                self.step()
            except PlantedError:
                assert self.engine.failure is not None
                assert self.engine.failure.phase is phase
                self._check_refusal()
                return True
        return False

    def _check_refusal(self) -> None:
        for call in (self.engine.step, self.engine.step_phase):
            try:
                call()
            except IterationFailedError:
                continue
            raise AssertionError("stepping went on after a failed iteration")


def _check_row(row: dict[int, float], wanted: dict[int, float]) -> None:
    assert list(row) == list(wanted), f"log probabilities of {list(row)}, wanted {list(wanted)}"
    assert np.allclose(list(row.values()), list(wanted.values()), atol=1e-5, rtol=0)


# -- random requests ---------------------------------------------------------------------------------------------------


def random_params(rng: random.Random, *, text: bool = False, max_tokens: int = 40) -> SamplingParams:
    """Parameters over the whole range the core supports; numbers are dyadic, see the module's text."""
    tokens = rng.choice([1, 1, 2, 3, rng.randint(1, max_tokens)])
    options: dict[str, Any] = {"max_tokens": tokens, "seed": rng.randint(-(2**40), 2**63), "detokenize": text}
    options["temperature"] = rng.choice([0.0, 0.0, 0.5, 1.0, 2.0, 1e-6])
    if rng.random() < 0.3:
        options["min_tokens"] = rng.randint(0, tokens)
    if rng.random() < 0.4:
        options["stop_token_ids"] = rng.sample(range(VOCAB), rng.randint(1, 6))
    if rng.random() < 0.3:
        options["logprobs"] = rng.choice([0, 1, 2, 5, 70])
    if rng.random() < 0.15:
        options["prompt_logprobs"] = rng.choice([0, 1, 3])
    if rng.random() < 0.3:
        options["presence_penalty"] = rng.choice([0.5, -0.5, 2.0])
        options["frequency_penalty"] = rng.choice([0.0, 0.25, 1.5])
        options["repetition_penalty"] = rng.choice([1.0, 2.0, 0.5])
    if rng.random() < 0.25:
        ids = rng.sample(range(VOCAB), rng.randint(1, 5))
        options["logit_bias"] = {i: rng.choice([-100.0, -1.5, 0.25, 3.0, 8.0]) for i in ids}
    if rng.random() < 0.3:
        options["top_k"] = rng.choice([-1, 1, 2, 10, 64, 100])
    if rng.random() < 0.2:
        options["top_p"] = rng.choice([0.1, 0.5, 0.9])
    if rng.random() < 0.15:
        options["min_p"] = rng.choice([0.05, 0.5])
    options["ignore_eos"] = rng.random() < 0.3
    if text and rng.random() < 0.5:
        length = rng.choice([1, 2])  # of one length, so that the first to begin is the first to be complete
        options["stop"] = ["".join(rng.choices("abcdxyzAB", k=length)) for _ in range(rng.randint(1, 6))]
        options["include_stop_str_in_output"] = rng.random() < 0.3
    return SamplingParams(**options)


def random_prompt(rng: random.Random, longest: int = 60) -> list[int]:
    length = rng.choice([1, 2, 3, 4, 5, 8, rng.randint(1, longest)])
    return [rng.randrange(VOCAB) for _ in range(min(length, longest))]


def shared_prompt(rng: random.Random, longest: int = 60) -> list[int]:
    """One of few beginnings, up to a place of its own, and a tail that is often none."""
    first = 11 * rng.randrange(2)
    base = [(first + 5 * place) % VOCAB for place in range(longest)]
    tail = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 3, 9]))]
    return (base[: rng.choice([3, 4, 5, 8, 12, 16, 17, 24, 31, 32, 40, longest])] + tail)[:longest]


def play(
    world: World,
    rng: random.Random,
    *,
    num_acts: int = 30,
    text: bool = False,
    prompt: Callable[[random.Random], list[int]] = random_prompt,
) -> None:
    """A schedule that touches everything but failures, drawn from ``rng``; ends drained and checked."""

    def at_border(_: Border) -> None:
        if world.live_ids and rng.random() < 0.02:
            world.abort(rng.choice(world.live_ids))

    world.on_border = at_border
    for _ in range(num_acts):
        act = rng.random()
        if act < 0.4:
            world.submit(prompt(rng), random_params(rng, text=text), stream=rng.random() < 0.5)
        elif act < 0.8:
            world.step()
        elif act < 0.92:
            world.step_phase()
        elif act < 0.98:
            world.engine.set_mode(rng.choice(["async", "async", "legacy"]))
        else:
            world.reset()
    world.drain()
