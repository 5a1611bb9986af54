"""Verdicts: equal, apart by rounding that was checked, or DIFFERENT."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.loader import LoadedModel, load_model
from engine.request import RequestOutput, RequestTimings, SamplingParams
from workbench import verdicts
from workbench.rounding import LOGIT_NOISE, LOGPROB_TOLERANCE, Choice
from workbench.verdicts import Judge, RequestVerdict, Verdict

CONFIG = EngineConfig(
    max_requests=2, max_batch_tokens=64, max_sequence_length=64, num_blocks=16, device="inline", dtype="float32"
)
PROMPT = (5, 6, 7)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=5, ignore_eos=True)


def output(ids: tuple[int, ...], finish_reason: str = "length") -> RequestOutput:
    return RequestOutput(
        request_id="request-0",
        prompt_token_ids=PROMPT,
        token_ids=ids,
        text="",
        new_token_ids=(),
        new_text="",
        finish_reason=finish_reason,
        stop_reason=None,
        logprobs=None,
        prompt_logprobs=None,
        timings=RequestTimings(0),
    )


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("shape:tiny", device=torch.device("cpu"))


def serve_alone(loaded: LoadedModel, params: SamplingParams) -> RequestOutput:
    with Engine(loaded, CONFIG.replace(mode="legacy")) as engine:
        return engine.generate([list(PROMPT)], params, progress=False)[0]


def with_token(right: RequestOutput, position: int, token: int) -> RequestOutput:
    """``right`` with another token somewhere."""
    return replace(right, token_ids=(*right.token_ids[:position], token, *right.token_ids[position + 1 :]))


def judged(
    loaded: LoadedModel,
    params: SamplingParams,
    left: RequestOutput,
    right: RequestOutput,
    config: EngineConfig = CONFIG,
) -> RequestVerdict:
    with Judge(loaded, config, [params]) as judge:
        return judge.judge(0, left, [("async", right)])


def explain_up_to(monkeypatch: pytest.MonkeyPatch, distance: float, found: RequestVerdict) -> None:
    """Say that float32 is so noisy that rounding explains ``distance`` where ``found`` was judged."""
    assert found.tolerance is not None
    monkeypatch.setitem(LOGIT_NOISE, "float32", LOGIT_NOISE["float32"] * distance / found.tolerance)


class TestTokens:
    def test_the_same_ids_and_end_are_equal(self, tiny: LoadedModel) -> None:
        verdict = judged(tiny, GREEDY, output((1, 2)), output((1, 2)))

        assert (verdict.verdict, verdict.dtype) == (Verdict.EQUAL, "float32")

    def test_the_same_ids_with_another_end_are_different(self, tiny: LoadedModel) -> None:
        verdict = judged(tiny, GREEDY, output((1, 2)), output((1, 2), "stop"))

        assert verdict.verdict is Verdict.DIFFERENT
        assert "the same ids, but another end" in str(verdict)

    def test_a_missing_token_is_different(self, tiny: LoadedModel) -> None:
        verdict = judged(tiny, GREEDY, output((1, 2)), output((1,)))

        assert verdict.verdict is Verdict.DIFFERENT
        assert (verdict.position, verdict.tokens) == (1, (2, None))
        assert "async parts at output position 1 (2 or its end)" in str(verdict)

    def test_exact_arithmetic_has_no_excuse(self) -> None:
        oracle = load_model("oracle")
        wide = load_model("shape:tiny", dtype=torch.float64)
        for loaded, config in ((oracle, CONFIG), (wide, CONFIG.replace(dtype="float64"))):
            verdict = judged(loaded, GREEDY, output((1, 2)), output((1, 3)), config)

            assert verdict.verdict is Verdict.DIFFERENT
            assert "exactly" in verdict.explanation
            assert verdict.tolerance == 0.0

    def test_exact_arithmetic_excuses_not_even_a_tie(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A distance of 0 is within a tolerance of 0, and yet no rounding turns an exact choice round."""

        class TieArbiter:
            def choice_after(self, *_: object) -> Choice:
                return Choice(scores_V=np.array([1.0, 4.0, 4.0]), noise=0.0, params=GREEDY, uniform=0.5)

            def close(self) -> None: ...

        monkeypatch.setattr(verdicts, "Arbiter", lambda *_: TieArbiter())

        verdict = judged(load_model("oracle"), GREEDY, output((1,)), output((2,)))

        assert (verdict.distance, verdict.tolerance) == (0.0, 0.0)
        assert verdict.verdict is Verdict.DIFFERENT
        assert "rounding is no excuse" in verdict.explanation

    def test_the_worst_of_several_runs_counts(self, tiny: LoadedModel) -> None:
        with Judge(tiny, CONFIG, [GREEDY]) as judge:
            verdict = judge.judge(
                0, output((1, 2)), [("a", output((1, 2))), ("b", output((1,))), ("c", output((1, 2)))]
            )

        assert (verdict.verdict, verdict.run) == (Verdict.DIFFERENT, "b")

    def test_judging_leaves_the_checking_engine_empty(self, tiny: LoadedModel) -> None:
        right = serve_alone(tiny, GREEDY)
        wrong = with_token(right, 2, (right.token_ids[2] + 1) % 512)
        with Judge(tiny, CONFIG, [GREEDY, GREEDY]) as judge:
            twice = [judge.judge(index, right, [("async", wrong)]).distance for index in (0, 1)]

            assert judge._arbiter is not None
            assert not judge._arbiter.engine.has_unfinished()
            assert judge._arbiter.engine.pool.num_free == 16
        assert twice[0] == twice[1]


class TestGreedy:
    @pytest.mark.parametrize(("share", "expected"), [(1.01, Verdict.NUMERIC), (0.99, Verdict.DIFFERENT)])
    def test_the_third_best_is_numeric_up_to_what_rounding_explains(
        self, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch, share: float, expected: Verdict
    ) -> None:
        right = serve_alone(tiny, GREEDY)
        assert right.logprobs is not None
        best, _, third = right.logprobs[3]
        margin = right.logprobs[3][best] - right.logprobs[3][third]
        other = with_token(right, 3, third)
        explain_up_to(monkeypatch, share * margin, judged(tiny, GREEDY, right, other))

        verdict = judged(tiny, GREEDY, right, other)

        assert verdict.verdict is expected
        assert (verdict.position, verdict.tokens, verdict.measure) == (3, (best, third), "logit margin")
        assert verdict.distance == pytest.approx(margin, rel=1e-4)
        assert verdict.tolerance == pytest.approx(share * margin, rel=1e-4)

    def test_float32_explains_next_to_nothing(self, tiny: LoadedModel) -> None:
        right = serve_alone(tiny, GREEDY)
        assert right.logprobs is not None
        second = list(right.logprobs[3])[1]

        verdict = judged(tiny, GREEDY, right, with_token(right, 3, second))

        assert verdict.verdict is Verdict.DIFFERENT
        assert verdict.tolerance is not None
        assert 0 < verdict.tolerance < 2e-5
        assert "that rounding in float32 explains" in verdict.explanation


class TestDraw:
    def test_a_near_border_excuses_the_token_behind_it_alone(
        self, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        right = serve_alone(tiny, DRAWN)
        rivals = [right.token_ids[1] + step for step in (-1, 1, 9)]
        found = [judged(tiny, DRAWN, right, with_token(right, 1, rival)) for rival in rivals]
        assert all(one.verdict is Verdict.DIFFERENT and one.measure == "draw distance" for one in found)
        near = min(found[:2], key=lambda one: one.distance or 0.0)
        assert near.distance is not None
        explain_up_to(monkeypatch, 1.01 * near.distance, near)

        again = [judged(tiny, DRAWN, right, with_token(right, 1, rival)) for rival in rivals]

        numeric = [one.tokens for one in again if one.verdict is Verdict.NUMERIC]
        assert numeric == [near.tokens]

    def test_the_first_runs_token_must_be_explained_as_well(self, tiny: LoadedModel) -> None:
        right = serve_alone(tiny, DRAWN)
        wrong = with_token(right, 1, (right.token_ids[1] + 9) % 512)

        one, other = judged(tiny, DRAWN, right, wrong), judged(tiny, DRAWN, wrong, right)

        assert one.verdict is other.verdict is Verdict.DIFFERENT
        assert one.distance == other.distance


class TestLogprobs:
    @pytest.mark.parametrize(("share", "expected"), [(0.9, Verdict.EQUAL), (1.1, Verdict.DIFFERENT)])
    def test_are_compared_where_asked_for(self, tiny: LoadedModel, share: float, expected: Verdict) -> None:
        right = serve_alone(tiny, GREEDY)
        assert right.logprobs is not None
        apart = share * LOGPROB_TOLERANCE["float32"]
        moved = ({**right.logprobs[0], right.token_ids[0]: right.logprobs[0][right.token_ids[0]] - apart},)

        verdict = judged(tiny, GREEDY, right, replace(right, logprobs=moved + right.logprobs[1:]))

        assert verdict.verdict is expected
        assert verdict.logprob_deviation == pytest.approx(apart)

    def test_are_compared_up_to_where_the_runs_part(self, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        right = serve_alone(tiny, GREEDY)
        assert right.logprobs is not None
        second = list(right.logprobs[3])[1]
        other = with_token(right, 3, second)
        near = judged(tiny, GREEDY, right, other)
        assert near.distance is not None
        explain_up_to(monkeypatch, 1.01 * near.distance, near)
        for position, expected in ((2, Verdict.DIFFERENT), (3, Verdict.NUMERIC)):
            rows = list(right.logprobs)
            rows[position] = {token: value - 1.0 for token, value in rows[position].items()}

            verdict = judged(tiny, GREEDY, right, replace(other, logprobs=tuple(rows)))

            assert verdict.verdict is expected
            assert ("log-probabilities of output position 2 differ by 1" in str(verdict)) == (position == 2)

    def test_of_prompts_are_compared(self, tiny: LoadedModel) -> None:
        params = GREEDY.replace(prompt_logprobs=0)
        right = serve_alone(tiny, params)
        assert right.prompt_logprobs is not None
        rows = (None, *(dict.fromkeys(row, -1.0) for row in right.prompt_logprobs[1:] if row))

        verdict = judged(tiny, params, right, replace(right, prompt_logprobs=rows))

        assert verdict.verdict is Verdict.DIFFERENT
        assert "log-probabilities of prompt position" in str(verdict)


class TestReport:
    def test_holds_what_was_judged_and_by_what(self, tiny: LoadedModel) -> None:
        right = serve_alone(tiny, GREEDY)
        wrong = with_token(right, 3, (right.token_ids[3] + 1) % 512)

        told = judged(tiny, GREEDY, right, wrong).to_dict()

        assert told["verdict"] == "DIFFERENT"
        assert (told["dtype"], told["run"], told["position"]) == ("float32", "async", 3)
        assert told["tokens"] == [right.token_ids[3], wrong.token_ids[3]]
        assert told["measure"] == "logit margin"
        assert told["distance"] > told["tolerance"] > 0
        assert told["logprob_deviation"] == 0.0
