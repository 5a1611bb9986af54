"""Policies and salts through a session: passed on, remembered by runs, and told where a replay has others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from engine.admission import Capacity, first_come_first_served
from engine.batch import BatchDimensions
from engine.config import EngineConfig
from engine.errors import ConfigError, PolicyError, RequestError
from engine.policy import never_overlap
from engine.request import Request, SamplingParams
from tests.unit.workbench.worlds import make_session, oracle, spread_workload, tokens
from tracing.trace import Trace
from workbench import Leg, RequestSpec, Session, Workload, compare, load_run, parse_workload
from workbench.policies import DEFAULTS, policy_name
from workbench.replays import ReplayError
from workbench.report import differing_fields
from workbench.workloads import WorkloadError

CACHED: dict[str, Any] = {"prefix_caching": True, "block_size": 4, "num_blocks": 60}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]


class ShortestFirst:
    def choose(self, waiting: Sequence[Request], capacity: Capacity) -> Request | None:
        return min(waiting, key=lambda request: len(request.prompt_ids))


@dataclass(frozen=True)
class AtMostRows:
    """The oldest, while fewer than ``limit`` rows run."""

    limit: int

    def choose(self, waiting: Sequence[Request], capacity: Capacity) -> Request | None:
        return waiting[0] if capacity.held.num_rows < self.limit else None


class DecodeOnly:
    """Two sizes."""

    def choose(self, config: EngineConfig, max_sequence_length: int) -> Iterable[BatchDimensions]:
        return [BatchDimensions(num_tokens=rows, num_prefill=0, num_decode=rows) for rows in (1, config.max_requests)]


class Stranger:
    def __init__(self) -> None:
        self._first: Request | None = None

    def choose(self, waiting: Sequence[Request], capacity: Capacity) -> Request | None:
        self._first = self._first or waiting[0]
        return self._first


def by_length(*lengths: int) -> Workload:
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    specs = tuple(RequestSpec(prompt=tuple(range(length)), params=params) for length in lengths)
    return Workload(name="by length", requests=specs, unit="iterations")


def admitted(session: Session) -> list[str]:
    """Ids in the order in which they were given a row."""
    records = [record for record in session.requests() if record.admitted_ns is not None]
    return [record.request_id for record in sorted(records, key=lambda record: record.admitted_ns or 0)]


def record_run(act: Any = None, **options: Any) -> Trace:
    """A whole run of the spread workload, or of what ``act`` submits."""
    with make_session(**{"clock": "iterations", **options}) as session:
        if act is None:
            session.submit_workload(spread_workload())
        else:
            act(session)
        session.run()
        return session.trace


class TestPassedOn:
    def test_an_admission_policy_decides_who_is_next(self) -> None:
        orders = []
        for policy in (first_come_first_served, ShortestFirst()):
            with make_session(max_requests=1, admission=policy) as session:
                session.submit_workload(by_length(9, 2, 5))
                session.run()
                orders.append(admitted(session))

        assert orders == [["request-0", "request-1", "request-2"], ["request-1", "request-2", "request-0"]]

    def test_a_graph_list_says_what_is_captured(self) -> None:
        with make_session(clock="iterations", graph_list=DecodeOnly()) as session:
            session.submit_workload(spread_workload())
            session.run()

            assert [size.num_tokens for size in session.engine.runner.graphs.sizes] == [1, 4]
            assert session.engine.counters.graph_hits > 0

    def test_what_is_no_policy_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"write ShortestFirst\(\)"):
            make_session(admission=ShortestFirst)
        with pytest.raises(ConfigError, match="graph_list must be an object"):
            make_session(graph_list=DecodeOnly)

    def test_a_rule_that_is_broken_is_told_and_recovered_from(self) -> None:
        policy: Any = Stranger()
        with make_session(admission=policy) as session:
            session.submit_workload(by_length(5, 6))
            with pytest.raises(PolicyError, match=r"Stranger chose .*does not wait \(I2\)"):
                session.run()
            assert session.state == "failed"
            policy.choose = ShortestFirst().choose
            session.recover()
            session.run()

            assert [len(output.token_ids) for output in session.outputs.values()] == [5, 5]

    def test_a_reset_and_a_restart_keep_them(self) -> None:
        with make_session(max_requests=1, admission=ShortestFirst(), policy=never_overlap) as session:
            for begin_again in (session.restart, session.reset):
                if not session.submissions:
                    session.submit_workload(by_length(9, 2, 5))
                session.run()
                assert admitted(session) == ["request-1", "request-2", "request-0"]
                assert session.engine.counters.overlap_steps == 0
                begin_again()


class TestLegs:
    def test_each_has_its_own_and_tokens_are_equal(self) -> None:
        legs = [
            Leg(name="oldest", mode="async"),
            Leg(name="shortest", mode="async", admission=ShortestFirst()),
            Leg(name="graphs", mode="legacy", graph_list=DecodeOnly()),
        ]
        found = compare(
            spread_workload(), legs, model=oracle(), repeats=1, warmup=0, progress=False,
            device="inline", max_requests=2, max_batch_tokens=128, max_sequence_length=96,
        )  # fmt: skip

        assert found.ids_equal
        names = [[run.config[name] for name in DEFAULTS] for run in found.runs]
        assert names == [
            ["PreferOverlap", "FirstComeFirstServed", "CapturedByDefault"],
            ["PreferOverlap", "ShortestFirst", "CapturedByDefault"],
            ["PreferOverlap", "FirstComeFirstServed", "DecodeOnly"],
        ]
        first, _, graphs = (run.iterations for run in found.runs)
        assert not any(record.graph is not None and record.graph.hit for record in first)
        assert any(record.graph is not None and record.graph.hit for record in graphs)


class TestRemembered:
    def test_a_run_names_them_and_a_report_marks_where_they_differ(self) -> None:
        plain, other = record_run(), record_run(admission=ShortestFirst())

        assert other.config["admission_policy"] == "ShortestFirst"
        assert other.config["graph_list_policy"] == "CapturedByDefault"
        assert "admission_policy" in str(differing_fields([plain.config, other.config]))

    def test_a_dataclass_tells_its_parameters(self) -> None:
        assert policy_name(AtMostRows(3)) == "AtMostRows(limit=3)"

    def test_a_saved_run_has_them(self, tmp_path: Path) -> None:
        with make_session(clock="iterations", admission=ShortestFirst(), policy=never_overlap) as session:
            session.submit_workload(spread_workload())
            session.run()
            session.save(tmp_path / "run")

        config = load_run(tmp_path / "run").config
        assert [config[name] for name in DEFAULTS] == ["NeverOverlap", "ShortestFirst", "CapturedByDefault"]


class TestReplayed:
    def test_with_the_same_policies_the_schedule_is_the_record_s_and_nothing_is_told(self) -> None:
        run = record_run(admission=ShortestFirst(), max_requests=2)
        with make_session(admission=ShortestFirst(), max_requests=2) as session:
            replay = session.replay(run)
            session.run()

            assert replay.notes == ()
            assert replay.differing_orders == []
            assert session.resolved_config()["order_policy"] == "RecordedOrders"

    def test_with_another_policy_it_is_told_and_tokens_stay_equal(self) -> None:
        run = record_run(admission=ShortestFirst(), graph_list=DecodeOnly(), max_requests=2)
        with make_session(max_requests=2) as session:
            replay = session.replay(run)
            session.run()

            assert replay.notes == (
                "The schedule may differ from the record: its admission policy was ShortestFirst, this session's is "
                "FirstComeFirstServed.",
                "The schedule may differ from the record: its graph list policy was DecodeOnly, this session's is "
                "CapturedByDefault.",
            )
            recorded = {output["request_id"]: tuple(output["output_token_ids"]) for output in run.outputs}
            assert tokens(session) == recorded

    def test_another_order_policy_is_not_for_the_record_s_orders_are_taken(self) -> None:
        run = record_run(policy=never_overlap)
        with make_session() as session:
            assert session.replay(run).notes == ()

    @pytest.mark.parametrize(
        "options",
        [{"prefix_caching": True}, {"overlap_admission": False}, {"capacity_policy": "max_utilization"}],
        ids=lambda options: next(iter(options)),
    )
    def test_options_that_change_the_schedule_are_told(self, options: Mapping[str, Any]) -> None:
        run = record_run(**options)
        with make_session() as session:
            (note,) = session.replay(run).notes

        assert note == f"The schedule may differ from the record, for these options do: {next(iter(options))}."

    def test_a_run_that_is_older_than_they_had_the_defaults(self) -> None:
        run = record_run(overlap_admission=False)
        older = {name: value for name, value in run.config.items() if name not in (*DEFAULTS, "overlap_admission")}
        run = replace(run, config=older)
        with make_session(overlap_admission=False) as session:
            assert session.replay(run).notes == ()
        with make_session(overlap_admission=False, admission=ShortestFirst()) as session:
            (note,) = session.replay(run).notes
            assert "was FirstComeFirstServed, this session's is ShortestFirst" in note
        with make_session() as session:  # what is the default now was not then
            (note,) = session.replay(run).notes
            assert note.endswith("these options do: overlap_admission.")


def ask(session: Session, **options: Any) -> int:
    """Tokens that one more request with the same prompt skips."""
    name = session.submit(PROMPT, max_tokens=3, temperature=0, ignore_eos=True, **options)
    session.run()
    return session.outputs[name].num_cached_tokens


class TestSalts:
    def test_only_requests_of_one_salt_share(self) -> None:
        with make_session(**CACHED) as session:
            salts: tuple[dict[str, str], ...] = ({}, {"cache_salt": "b"}, {}, {"cache_salt": "b"}, {"cache_salt": "c"})

            assert [ask(session, **salt) for salt in salts] == [0, 0, 12, 12, 0]
            assert [one.cache_salt for one in session.submissions] == ["", "b", "", "b", "c"]

    def test_a_restart_and_a_replay_keep_them(self) -> None:
        def submit_all(session: Session) -> None:
            for place, salt in enumerate(("", "b", "", "b")):
                session.submit(
                    PROMPT, max_tokens=3, temperature=0, ignore_eos=True, cache_salt=salt, arrival=20 * place
                )

        def skipped(session: Session) -> list[int]:
            return [output.num_cached_tokens for output in session.outputs.values()]

        run = record_run(submit_all, **CACHED)
        with make_session(clock="iterations", **CACHED) as session:
            submit_all(session)
            session.run()
            before = skipped(session)
            session.restart()
            session.run()
            assert skipped(session) == before == [0, 0, 12, 12]
            session.replay(run)
            session.run()
            assert skipped(session) == before

    def test_a_run_of_an_earlier_version_had_none(self) -> None:
        run = record_run()
        outputs = [json.loads(json.dumps(output)) for output in run.outputs]
        for output in outputs:
            del output["asked"]["cache_salt"]
        with make_session() as session:
            session.replay(replace(run, outputs=outputs))
            session.run()

            assert {one.cache_salt for one in session.submissions} == {""}

    def test_one_that_is_no_string_is_refused_before_it_arrives(self) -> None:
        with make_session(clock="iterations", **CACHED) as session:
            with pytest.raises(RequestError, match="cache_salt must be a string, got 7") as caught:
                session.submit(PROMPT, arrival=50, cache_salt=7)  # type: ignore[arg-type]
            assert caught.value.field == "cache_salt"
            assert session.submissions == ()

    def test_a_workload_file_may_name_them(self, tmp_path: Path) -> None:
        lines = [{"prompt_ids": PROMPT, "cache_salt": "b"}, {"prompt_ids": PROMPT}]
        path = tmp_path / "requests.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
        workload = parse_workload(f"file:{path}", vocab_size=64)
        assert [spec.cache_salt for spec in workload.requests] == ["b", ""]
        with make_session(**CACHED) as session:
            session.submit_workload(workload)
            assert [one.cache_salt for one in session.submissions] == ["b", ""]

        path.write_text(json.dumps({"prompt_ids": PROMPT, "cache_salt": 7}))
        with pytest.raises(WorkloadError, match=r"requests\.jsonl:1: cache_salt must be a string, got 7"):
            parse_workload(f"file:{path}", vocab_size=64)


class TestForgetting:
    def test_makes_the_next_request_cold_and_is_told(self) -> None:
        with make_session(**CACHED) as session:
            assert [ask(session), ask(session)] == [0, 12]
            before = session.engine.pool.num_free

            assert session.reset_prefix_cache() > 0
            assert session.engine.pool.num_free == before
            assert ask(session) == 0
            assert [event.text for event in session.events if event.kind == "forgot"] == [
                "cached prefixes; 3 of their blocks are free now"
            ]

    def test_without_a_cache_there_is_nothing_to_forget(self) -> None:
        with make_session() as session:
            assert session.reset_prefix_cache() == 0

    def test_is_allowed_in_mid_iteration_and_changes_no_token(self) -> None:
        with make_session(**CACHED) as session:
            ask(session)
            expected = next(iter(session.outputs.values())).token_ids
            name = session.submit(PROMPT, max_tokens=3, temperature=0, ignore_eos=True)
            session.step_phase()
            session.reset_prefix_cache()
            session.run()

            assert session.outputs[name].token_ids == expected


def test_replays_of_another_model_are_refused_whatever_the_policies() -> None:
    run = record_run(admission=ShortestFirst())
    with make_session() as session, pytest.raises(ReplayError, match="recorded with model"):
        session.replay(replace(run, config={**run.config, "model": "another"}))
