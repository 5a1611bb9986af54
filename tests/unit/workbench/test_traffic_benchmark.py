"""The traffic benchmark runs what was asked for, names what is refused, counts rightly; times are nobody's test."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import traffic
from benchmarks.traffic import (
    LARGE,
    SMALL,
    WARM_REQUESTS,
    drive,
    parse_leg,
    serve_legs,
    serving_numbers,
    warm_workload,
    with_ids,
    workload_text,
)
from benchmarks.traffic_tables import metric_row, print_serving
from benchmarks.traffic_waiting import _Crowd, measure_waiting, times_of
from engine.cache.prefix import block_digests
from engine.config import EngineConfig
from engine.engine import Engine
from engine.policy import never_overlap, prefer_overlap
from engine.request import RequestOutput, RequestTimings, SamplingParams
from tests.unit.workbench.worlds import make_session, oracle
from workbench.legs import Leg, leg_config
from workbench.workloads import RequestSpec, Workload, WorkloadError, parse_workload

MS = 1_000_000
BASE = EngineConfig(device="inline", max_requests=4, max_batch_tokens=64, max_sequence_length=64, num_blocks=64)
TRAFFIC = "poisson:rate=100,requests=6,input=4..20,output=3..6,prefix=3"


def ended(
    times_ms: tuple[float | None, float | None, float | None],
    *,
    tokens: int = 3,
    cached: int = 0,
    reason: str = "length",
) -> RequestOutput:
    """Arrived at 0; ``times_ms``: admitted, first token, finished. Its prompt has 10 tokens."""
    admitted, first, finished = (None if time is None else int(time * MS) for time in times_ms)
    return RequestOutput(
        request_id="r",
        prompt_token_ids=(1,) * 10,
        token_ids=(2,) * tokens,
        text="",
        new_token_ids=(),
        new_text="",
        finish_reason=reason,
        stop_reason=None,
        logprobs=None,
        prompt_logprobs=None,
        timings=RequestTimings(0, admitted_ns=admitted, first_token_ns=first, finished_ns=finished),
        num_cached_tokens=cached,
    )


class TestLegs:
    def test_begin_as_those_of_compare(self) -> None:
        legs = [parse_leg(name) for name in ("legacy", "no-overlap", "async")]

        assert [(leg.name, leg.mode, leg.policy) for leg in legs] == [
            ("legacy", "legacy", prefer_overlap),
            ("no-overlap", "async", never_overlap),
            ("async", "async", prefer_overlap),
        ]
        assert all(not leg.changes for leg in legs)

    def test_words_are_engine_options(self) -> None:
        leg = parse_leg("async+overlapped+prefix+chunked=256")

        assert leg.name == "async+overlapped+prefix+chunked=256"
        assert leg.changes == {
            "overlap_admission": True,
            "prefix_caching": True,
            "chunked_prefill": True,
            "max_batch_tokens": 256,
        }

    def test_take_any_option_with_its_type(self) -> None:
        leg = parse_leg("legacy+num_blocks=40+graph_non_decode=false+eviction_policy=lru")

        assert leg.changes == {"num_blocks": 40, "graph_non_decode": False, "eviction_policy": "lru"}

    @pytest.mark.parametrize(
        ("text", "part"), [("eager", "eager"), ("async+fast", "fast"), ("async+mode=legacy", "mode"), ("async+", "''")]
    )
    def test_an_unknown_part_is_named(self, text: str, part: str) -> None:
        with pytest.raises(WorkloadError, match=part):
            parse_leg(text)

    @pytest.mark.parametrize("scale", [SMALL, LARGE])
    def test_the_default_ones_can_be_read(self, scale: traffic.Scale) -> None:
        assert [parse_leg(text).name for text in scale.legs] == list(scale.legs)


class TestWorkloadText:
    def test_fills_in_what_is_left_open(self) -> None:
        text = workload_text("azure:a/b.csv?shrink=2", SMALL, 100)

        assert text == "azure:a/b.csv?shrink=2&requests=100&max_length=1024&scale=0.1"

    def test_what_the_text_says_wins_over_the_option(self) -> None:
        assert "requests=7&" in workload_text("azure:f?requests=7", SMALL, 100)
        assert "requests=100" not in workload_text("azure:f?requests=7", SMALL, 100)

    @pytest.mark.parametrize("own", ["rate=3", "concurrency=8"])
    def test_a_trace_whose_arrivals_are_replaced_is_not_scaled(self, own: str) -> None:
        text = workload_text(f"mooncake:f?{own}", SMALL, None)

        assert "scale=" not in text
        assert "spread=" not in text

    def test_other_kinds_stay_as_they_are_and_take_no_number_of_requests(self) -> None:
        assert workload_text(TRAFFIC, SMALL, None) == TRAFFIC
        with pytest.raises(WorkloadError, match="--requests goes with azure and mooncake"):
            workload_text(TRAFFIC, SMALL, 5)


class TestServingNumbers:
    def test_percentiles_are_over_requests_and_in_ms(self) -> None:
        outputs = [ended((k, 3 * k, 3 * k + 2 * k), tokens=3) for k in range(1, 12)]

        numbers = serving_numbers(outputs, 2.0, 0.5)

        for p in (50, 90, 99):
            assert numbers[f"wait p{p}"] == pytest.approx(np.percentile(range(1, 12), p))
            assert numbers[f"TTFT p{p}"] == pytest.approx(3 * np.percentile(range(1, 12), p))
            assert numbers[f"TPOT p{p}"] == pytest.approx(np.percentile(range(1, 12), p))  # two gaps of k
        assert numbers["tokens/s"] == 33 / 2
        assert numbers["with prompts"] == 143 / 2
        assert numbers["busy"] == 75

    def test_a_single_token_has_no_tpot_and_who_never_began_no_times(self) -> None:
        numbers = serving_numbers(
            [ended((1, 2, 2), tokens=1), ended((None, None, 5), tokens=0, reason="abort")], 1.0, 0.0
        )

        assert numbers["TPOT p50"] is None
        assert numbers["wait p50"] == 1
        assert numbers["cut off"] == 1

    def test_the_hit_rate_is_over_tokens_of_all_prompts(self) -> None:
        outputs = [ended((1, 2, 3), cached=cached) for cached in (0, 8, 4)]

        assert serving_numbers(outputs, 1.0, 0.0)["hit"] == pytest.approx(100 * 12 / 30)


class TestIdeal:
    @pytest.mark.parametrize("block_size", [1, 2, 3, 4])
    def test_is_what_an_endless_cache_of_the_engines_blocks_would_spare(self, block_size: int) -> None:
        rng = random.Random(block_size)
        prompts = [[rng.randrange(2) for _ in range(rng.randint(1, 14))] for _ in range(60)]
        arrivals = [float(rng.randrange(20)) for _ in prompts]
        params = SamplingParams(max_tokens=1)
        specs = [RequestSpec(prompt=p, params=params, arrival=a) for p, a in zip(prompts, arrivals, strict=True)]

        cache: set[bytes] = set()
        spared = 0
        for _, prompt in sorted(zip(arrivals, prompts, strict=True), key=lambda pair: pair[0]):
            digests = block_digests(prompt, block_size)
            known = [digest in cache for digest in digests]
            hits = known.index(False) if False in known else len(known)
            spared += block_size * min(hits, (len(prompt) - 1) // block_size)
            cache.update(digests)

        share = Workload(name="some", requests=tuple(specs), unit="s").prefix_share(block_size)
        assert 0 < share == pytest.approx(spared / sum(map(len, prompts)))


class TestWarmUp:
    def test_leaves_nothing_in_a_cache_that_the_workload_could_hit(self) -> None:
        workload = with_ids(parse_workload("poisson:rate=9,requests=50,input=20,output=2,prefix=18", vocab_size=64))
        warm = warm_workload(workload, 64)

        assert len(warm.requests) == WARM_REQUESTS
        for one, other in zip(warm.requests, workload.requests, strict=False):
            assert len(one.prompt) == len(other.prompt)
        both = Workload(name="both", requests=(warm.requests[0], workload.requests[0]))
        assert both.prefix_share(1) == 0


class TestDrive:
    def test_tells_for_how_long_the_engine_had_nothing_to_do(self) -> None:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        specs = tuple(RequestSpec(prompt=(1, 2), params=params, arrival=arrival) for arrival in (500.0, 0.0, 1000.0))
        with make_session(device="inline") as session:
            session.submit_workload(Workload(name="rare", requests=specs, unit="s"))
            idle_s = drive(session)
            end = session.clock.now()

        assert 0 < 1000 - idle_s < 100  # but for the milliseconds of six forwards
        assert end > 1000

    def test_a_closed_loop_is_never_idle(self) -> None:
        with make_session() as session:
            session.submit_workload("fixed:requests=6,input=4,output=3,concurrency=2")
            assert drive(session) == 0


class TestServeLegs:
    def test_a_refused_leg_is_named_in_one_line_and_the_others_go_on(self, capsys: pytest.CaptureFixture[str]) -> None:
        legs = [
            parse_leg(t) for t in ("legacy+max_requests=0", "legacy", "async+max_sequence_length=5000", "async+chunked")
        ]
        workload = with_ids(parse_workload(TRAFFIC, vocab_size=64))

        found = serve_legs(oracle(), legs, BASE, workload, warm_workload(workload, 64), repeats=2)

        assert found.names == ["legacy", "async+chunked"]
        assert list(found.refused) == ["legacy+max_requests=0", "async+max_sequence_length=5000"]
        errors = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
        assert len(errors) == 2
        assert "leg legacy+max_requests=0 left out: max_requests must be a positive whole number" in errors[0]
        assert all(len(runs) == 2 for runs in found.runs.values())
        assert [runs[0].numbers["cut off"] for runs in found.runs.values()] == [0, 0]

        print_serving(found, 2)
        shown = capsys.readouterr().out
        assert "leg async+max_sequence_length=5000 left out: " in shown
        assert sum(line.startswith("async+chunked ") for line in shown.splitlines()) == 5  # in every table

    def test_legs_of_an_exact_model_agree_on_every_token(self) -> None:
        workload = with_ids(parse_workload(TRAFFIC, vocab_size=64))
        legs = [parse_leg(text) for text in ("legacy", "no-overlap", "async", "async+chunked=16")]

        found = serve_legs(oracle(), legs, BASE, workload, warm_workload(workload, 64), repeats=1)

        rows = {row.label: row for row in found.rows}
        assert [leg.median for leg in rows["same tokens"].legs] == [6] * 4
        assert rows["hit"].ratios == rows["overlap"].ratios == (None,) * 4
        assert found.counts("orders")["no-overlap"].get("overlap", 0) == 0
        assert sum(found.counts("reasons")["async"].values()) == rows["iterations"].legs[2].median

    def test_repeats_take_turns_and_rounds_of_warm_up_do_not_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        served: list[str] = []
        whole = traffic.serve_once

        def noted(loaded: object, leg: Leg, *rest: object) -> traffic.Served:
            served.append(leg.name)
            return whole(loaded, leg, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(traffic, "serve_once", noted)
        workload = with_ids(parse_workload("fixed:requests=2,input=4,output=2", vocab_size=64))
        legs = [parse_leg("legacy"), parse_leg("async")]

        found = serve_legs(oracle(), legs, BASE, workload, warm_workload(workload, 64), repeats=2, warm_rounds=1)

        assert served == ["async", "legacy", "legacy", "async", "async", "legacy"]
        assert [len(runs) for runs in found.runs.values()] == [2, 2]

    def test_where_all_are_refused_the_tables_say_so(self, capsys: pytest.CaptureFixture[str]) -> None:
        workload = with_ids(parse_workload("fixed:requests=2,input=4,output=2", vocab_size=64))

        found = serve_legs(oracle(), [parse_leg("async+no_such=1")], BASE, workload, workload, repeats=1)
        print_serving(found, 1)

        assert found.to_dict()["metrics"] == []
        assert "leg async+no_such=1 left out: options: unknown option 'no_such'" in capsys.readouterr().out


class TestMetricRow:
    def test_ratios_are_paired_by_repeat_and_skip_what_is_missing(self) -> None:
        row = metric_row("TTFT p50", [[1.0, 2.0, None], [2.0, 8.0, 5.0]])

        assert row.ratios[0] is None
        assert row.ratios[1] is not None
        assert row.ratios[1].median == 3
        assert row.legs[1].median == 5


class TestWaiting:
    def test_the_queue_keeps_its_length_and_the_table_stays_full(self) -> None:
        config = leg_config(parse_leg("legacy"), BASE.replace(max_sequence_length=64), None)
        with Engine(oracle(), config) as engine:
            crowd = _Crowd(engine, 4)
            crowd.fill(7)
            for act in (
                crowd.probe_ns,
                crowd.probe_with_abort_ns,
                crowd.submit_ns,
                crowd.admit_ns,
                crowd.admit_with_a_row_ns,
                crowd.admit_after_abort_ns,
            ):
                assert act() > 0
                assert (engine.queue.num_waiting, engine.table.num_active) == (7, 4), act.__name__

    def test_a_row_goes_to_the_head_of_the_queue_each_time(self) -> None:
        """Once requests were aborted that still waited, and no row came free."""
        with Engine(oracle(), leg_config(parse_leg("legacy"), BASE, None)) as engine:
            crowd = _Crowd(engine, 4)
            crowd.fill(3)
            for _ in range(12):
                head = engine.queue.waiting[0]
                crowd.admit_with_a_row_ns()
                assert head.row is not None

    def test_an_abort_in_async_does_not_stall_it(self) -> None:
        leg = parse_leg("no-overlap")
        config = leg_config(leg, BASE.replace(max_sequence_length=64), None)
        with Engine(oracle(), config, policy=leg.policy) as engine:
            crowd = _Crowd(engine, 4)
            crowd.fill(3)
            crowd.admit_after_abort_ns()
            assert engine.queue.num_waiting == 3

    def test_prints_a_table_for_each_number_of_rows(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("benchmarks.traffic_waiting.SAMPLES", 2)

        found = measure_waiting(parse_leg("legacy"), [2, 3], [1, 0, 5], 1, 4)

        assert [one["rows"] for one in found["waiting"]] == [2, 3]
        shown = capsys.readouterr().out
        assert shown.count("5 waiting/1 waiting") == 2
        for row in found["waiting"][0]["metrics"]:
            assert [len(leg["samples"]) for leg in row["legs"].values()] == [1, 1, 1]

    def test_the_collector_is_on_again_even_where_it_failed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import gc

        monkeypatch.setattr(_Crowd, "probe_ns", lambda self: 1 / 0)
        leg = parse_leg("legacy")
        with pytest.raises(ZeroDivisionError):
            times_of(oracle(), leg, leg_config(leg, BASE, None), 0, 4)

        assert gc.isenabled()


class TestMain:
    def run(self, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["traffic", *words])
        monkeypatch.setattr("torch.set_num_threads", lambda number: None)
        return traffic.main()

    def test_writes_one_document_with_legs_and_what_was_left_out(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = tmp_path / "found.json"
        small = ["--set", "num_blocks=64", "--device", "inline", "--model", "oracle", "--repeats", "1"]

        code = self.run(
            monkeypatch, "serve", TRAFFIC, "--legs", "legacy", "async+no_such=1", *small, "--out", str(path)
        )

        found = json.loads(path.read_text(encoding="utf-8"))
        assert code == 0
        assert found["environment"]["cpu"]
        one = found["traffic"][0]
        assert [leg["name"] for leg in one["legs"]] == ["legacy"]
        assert one["legs"][0]["config"]["num_blocks"] == 64
        assert list(one["refused"]) == ["async+no_such=1"]
        assert one["workload"]["requests"] == 6
        assert {"tokens/s", "TTFT p90", "TPOT p99", "wait p50", "hit"} <= {row["label"] for row in one["metrics"]}

    @pytest.mark.parametrize(
        ("words", "named"),
        [
            (("azure:no/such.csv", "--model", "oracle"), "no/such.csv"),
            ((TRAFFIC, "--legs", "eager"), "eager"),
            ((TRAFFIC, "--set", "no_such=1"), "no_such"),
        ],
    )
    def test_what_cannot_be_read_is_one_line(
        self, words: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert self.run(monkeypatch, "serve", *words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("traffic: ")
        assert named in line
