"""A session's trace as a value with tables, and as a folder."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from engine.errors import MidIterationError
from tests.unit.workbench.worlds import make_session, spread_workload
from tracing.run_folder import RunFolderError
from workbench import load_run


class TestTrace:
    def test_has_a_table_of_everything(self) -> None:
        with make_session(device="cpu", clock="iterations") as session:
            session.submit_workload(spread_workload())
            session.run()
            trace, steps = session.trace, session.engine.counters.steps

        for name in ("spans", "iterations", "requests", "phases", "device", "bubbles", "blame"):
            assert isinstance(getattr(trace, name), pa.Table), name
        assert trace.iterations.num_rows == trace.counters["steps"] == steps
        assert trace.requests.column("request_id").to_pylist() == [f"request-{index}" for index in range(6)]
        assert set(trace.phases.column("phase").to_pylist()) >= {"admit", "prepare", "forward", "sample", "resolve"}
        forwards = [row for row in trace.device.to_pylist() if row["name"] == "forward"]
        assert len(forwards) == sum(row is not None for row in trace.iterations.column("graph_label").to_pylist())
        assert sum(trace.bubbles.column("duration_ns").to_pylist()) == trace.summary.device.bubble_ns
        assert sum(trace.blame.column("duration_ns").to_pylist()) == trace.summary.device.bubble_ns

    def test_stays_as_it_is_while_the_session_goes_on(self) -> None:
        with make_session() as session:
            session.submit([1, 2], max_tokens=5)
            session.step()
            before = session.trace
            session.run()

            assert before.iterations.num_rows == 1
            assert session.trace.iterations.num_rows > 1

    def test_can_be_looked_at_in_mid_iteration(self) -> None:
        with make_session() as session:
            session.submit([1, 2], max_tokens=5)
            session.step()
            session.step_phase()

            assert session.trace.iterations.num_rows == 1

    def test_is_named_by_the_mode_and_holds_what_it_depends_on(self) -> None:
        with make_session("legacy", seed=7) as session:
            trace = session.trace

        assert trace.name == "legacy"
        assert trace.config["seed"] == 7
        assert trace.environment["cpu"]
        assert trace.device_clock_error_ns is None


class TestSave:
    def test_can_be_loaded_again_equal_and_after_the_session_is_closed(self, tmp_path: Path) -> None:
        with make_session(clock="iterations") as session:
            session.submit_workload(spread_workload())
            session.run()
            trace = session.trace

        assert load_run(session.save(tmp_path / "run")) == trace

    def test_needs_an_iteration_border(self, tmp_path: Path) -> None:
        with make_session() as session:
            session.submit([1, 2], max_tokens=5)
            session.step()
            session.step_phase()

            with pytest.raises(MidIterationError, match="save needs an iteration border"):
                session.save(tmp_path / "run")

        assert not (tmp_path / "run").exists()

    def test_replaces_a_run_only_if_asked(self, tmp_path: Path) -> None:
        with make_session() as session:
            session.save(tmp_path / "run")
            session.submit([1, 2], max_tokens=5)
            session.run()

            with pytest.raises(RunFolderError, match="holds a run already"):
                session.save(tmp_path / "run")
            assert load_run(tmp_path / "run").iterations.num_rows == 0

            session.save(tmp_path / "run", overwrite=True)

        assert load_run(tmp_path / "run").iterations.num_rows > 0
