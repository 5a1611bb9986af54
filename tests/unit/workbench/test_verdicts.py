"""Verdicts: equal, apart by rounding that was checked, or DIFFERENT."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.models.loader import LoadedModel, load_model
from engine.request import RequestOutput, RequestTimings, SamplingParams
from workbench import verdicts
from workbench.verdicts import Judge, Verdict

CONFIG = EngineConfig(max_requests=2, max_batch_tokens=64, max_sequence_length=64, num_blocks=16, device="inline")
PROMPT = (5, 6, 7)


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


class TestJudge:
    def test_the_same_ids_and_end_are_equal(self, tiny: LoadedModel) -> None:
        with Judge(tiny, CONFIG, [SamplingParams(temperature=0.0)]) as judge:
            verdict = judge.judge(0, output((1, 2)), [("async", output((1, 2)))])

        assert verdict.verdict is Verdict.EQUAL

    def test_the_same_ids_with_another_end_are_different(self, tiny: LoadedModel) -> None:
        with Judge(tiny, CONFIG, [SamplingParams(temperature=0.0)]) as judge:
            verdict = judge.judge(0, output((1, 2)), [("async", output((1, 2), "stop"))])

        assert verdict.verdict is Verdict.DIFFERENT

    def test_a_missing_token_is_different(self, tiny: LoadedModel) -> None:
        with Judge(tiny, CONFIG, [SamplingParams(temperature=0.0)]) as judge:
            verdict = judge.judge(0, output((1, 2)), [("async", output((1,)))])

        assert verdict.verdict is Verdict.DIFFERENT
        assert verdict.position == 1
        assert verdict.tokens == (2, None)

    def test_a_greedy_token_that_was_never_near_the_best_is_different(self, tiny: LoadedModel) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
        right = serve_alone(tiny, params)
        wrong_id = next(token for token in range(512) if token not in right.logprobs[3])  # type: ignore[index]
        wrong = replace(right, token_ids=(*right.token_ids[:3], wrong_id, *right.token_ids[4:]))
        with Judge(tiny, CONFIG, [params]) as judge:
            verdict = judge.judge(0, right, [("async", wrong)])

        assert verdict.verdict is Verdict.DIFFERENT
        assert (verdict.position, verdict.run) == (3, "async")
        assert verdict.tokens == (right.token_ids[3], wrong_id)

    def test_a_greedy_choice_within_the_bound_is_numeric_and_tells_its_margin(
        self, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
        right = serve_alone(tiny, params)
        assert right.logprobs is not None
        best, second = list(right.logprobs[3])[:2]
        margin = right.logprobs[3][best] - right.logprobs[3][second]
        swapped = replace(right, token_ids=(*right.token_ids[:3], second, *right.token_ids[4:]))
        for bound, expected in ((margin * 1.01, Verdict.NUMERIC), (margin * 0.99, Verdict.DIFFERENT)):
            monkeypatch.setitem(verdicts.MARGIN_BOUND, "float32", bound)
            with Judge(tiny, CONFIG, [params]) as judge:
                verdict = judge.judge(0, right, [("async", swapped)])

            assert verdict.verdict is expected
            assert verdict.margin == pytest.approx(margin, rel=1e-4)

    def test_a_draw_away_from_every_border_is_different(self, tiny: LoadedModel) -> None:
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=5, ignore_eos=True)
        right = serve_alone(tiny, params)
        wrong = replace(right, token_ids=(right.token_ids[0], (right.token_ids[1] + 9) % 512, *right.token_ids[2:]))
        with Judge(tiny, CONFIG, [params]) as judge:
            verdict = judge.judge(0, right, [("async", wrong)])

        assert verdict.verdict is Verdict.DIFFERENT
        assert "not near a border" in verdict.explanation

    def test_a_draw_on_a_border_is_numeric(self, tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=5, ignore_eos=True)
        right = serve_alone(tiny, params)
        wrong = replace(right, token_ids=(right.token_ids[0], (right.token_ids[1] + 9) % 512, *right.token_ids[2:]))
        # With the sampler's tolerance this wide every draw lies within it of some border.
        monkeypatch.setattr("engine.sampling.torch.BOUNDARY_TOLERANCE", {torch.float32: 1.0})
        with Judge(tiny, CONFIG, [params]) as judge:
            verdict = judge.judge(0, right, [("async", wrong)])

        assert verdict.verdict is Verdict.NUMERIC

    def test_exact_arithmetic_has_no_excuse(self) -> None:
        oracle = load_model("oracle")
        wide = load_model("shape:tiny", dtype=torch.float64)
        params = SamplingParams(temperature=0.0)
        for loaded, config in ((oracle, CONFIG), (wide, CONFIG.replace(dtype="float64"))):
            with Judge(loaded, config, [params]) as judge:
                verdict = judge.judge(0, output((1, 2)), [("async", output((1, 3)))])

            assert verdict.verdict is Verdict.DIFFERENT
            assert "exactly" in verdict.explanation

    def test_the_worst_of_several_runs_counts(self, tiny: LoadedModel) -> None:
        with Judge(tiny, CONFIG, [SamplingParams(temperature=0.0)]) as judge:
            verdict = judge.judge(
                0, output((1, 2)), [("a", output((1, 2))), ("b", output((1,))), ("c", output((1, 2)))]
            )

        assert (verdict.verdict, verdict.run) == (Verdict.DIFFERENT, "b")

    def test_judging_leaves_the_checking_engine_empty(self, tiny: LoadedModel) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
        right = serve_alone(tiny, params)
        wrong = replace(right, token_ids=(*right.token_ids[:2], (right.token_ids[2] + 1) % 512))
        with Judge(tiny, CONFIG, [params, params]) as judge:
            verdicts_twice = [judge.judge(index, right, [("async", wrong)]).margin for index in (0, 1)]

            assert judge._engine is not None
            assert not judge._engine.has_unfinished()
            assert judge._engine.pool.num_free == 16
        assert verdicts_twice[0] == verdicts_twice[1]
