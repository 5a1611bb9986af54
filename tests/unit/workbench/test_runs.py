"""Runs as documents."""

from __future__ import annotations

import json

from tests.unit.workbench.worlds import make_session, spread_workload
from workbench.environment import environment
from workbench.runs import jsonable, serve


class TestJsonable:
    def test_turns_what_json_cannot_hold_into_null(self) -> None:
        value = {"a": float("nan"), "b": [float("inf"), 1.5], 3: (float("-inf"), {"c": None})}

        assert jsonable(value) == {"a": None, "b": [None, 1.5], "3": [None, {"c": None}]}


class TestServe:
    def test_gives_outputs_in_the_order_of_the_workload(self) -> None:
        workload = spread_workload()
        with make_session(clock="iterations") as session:
            seen: list[str] = []

            run = serve(session, workload, name="x", on_output=lambda output: seen.append(output.request_id))

        assert [output.prompt_token_ids for output in run.outputs] == [spec.prompt for spec in workload.requests]
        assert sorted(seen) == [output.request_id for output in run.outputs]
        assert run.counters["finished"] == {"length": 6}
        assert run.wall_s > 0

    def test_the_document_is_strict_json_with_logprobs_too(self) -> None:
        with make_session() as session:
            session.submit([1, 2], max_tokens=3, logprobs=2, request_id="first")
            session.run()
            session.reset()
            run = serve(session, spread_workload(1), name="x")

        text = json.dumps(jsonable(run.to_dict()), allow_nan=False)

        assert json.loads(text)["requests"][0]["request_id"] == "request-0"


class TestEnvironment:
    def test_names_hardware_versions_and_commit(self) -> None:
        found = environment()

        assert found["cpu"]
        assert found["cores"] >= 1
        assert found["torch"]
        assert {"commit", "python", "numpy", "gpu", "system"} <= set(found)
