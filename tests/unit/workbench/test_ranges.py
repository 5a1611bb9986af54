"""What a session emits to NVTX: documented, balanced whatever happens, and told apart from other sessions."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.phases import Order, Phase
from tests.nvtx.sink import Range, RecordingSink
from tests.unit.workbench.worlds import make_drafting_session, make_session, spread_workload
from tracing.nvtx_ranges import SESSION_SHIFT
from tracing.recorder import Recorder
from workbench.session import Session

ROOT = Path(__file__).resolve().parents[3]
METRICS = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
KINDS = {"push": "push/pop", "start": "start/end"}


def documented() -> dict[tuple[str, str], tuple[str, str]]:
    """(name, category) -> (kind, colour) of every range in the table of docs/metrics.md."""
    section = METRICS[METRICS.index("\n## Ranges\n") :]
    found = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and (category := re.fullmatch(r"`(\w+)`", cells[1])):
            for name in re.findall(r"`(\w+)`", cells[0].partition(":")[0]):
                found[name, category[1]] = cells[2], cells[4]
    return found


def traced_session(sink: RecordingSink, session_id: int = 0, **options: object) -> Session:
    return make_session(recorder=Recorder(nvtx=sink, session_id=session_id), **options)


def ranges_of_everything() -> set[Range]:
    """Both modes, eager and captured, rows that move, a switch, drafts, admission beside a forward, a capture range."""
    sink = RecordingSink()
    for mode in ("legacy", "async"):
        for late in (False, True):
            with make_drafting_session(mode, recorder=Recorder(nvtx=sink), late_rewind=late) as session:
                session.submit_workload(spread_workload())
                session.run(6)
                session.mode = "legacy" if mode == "async" else "async"
                session.run()
        for graphs in (None, [4]):
            options = {"graphs": graphs, "graph_non_decode": False, "overlap_admission": graphs is None}
            with traced_session(sink, mode=mode, clock="iterations", **options) as session:
                session.submit_workload(spread_workload())
                session.capture(8)
                session.mode = "legacy" if mode == "async" else "async"
                session.run()
    assert sink.open_ranges() == []
    return set(sink.ranges)


class TestDocumented:
    def test_every_range_that_is_emitted_stands_in_metrics_md_with_kind_and_colour(self) -> None:
        table = documented()
        for one in ranges_of_everything():
            if one.kind == "mark":  # an instant: its category is said once for all
                assert one.category == "instant"
                assert f"`{one.name}`" in METRICS
                continue
            assert table.get((one.name, one.category)) == (KINDS[one.kind], one.colour), one

    def test_the_run_that_is_compared_emits_all_there_is_today(self) -> None:
        # Otherwise the test above would pass by looking at little.
        names = {one.name for one in ranges_of_everything()}

        assert names >= {phase.value for phase in Phase} | {order.label for order in Order if not order.needs_ranks}
        assert names >= {"publish", "fetch_accepted", "fetch", "compact", "replay", "samples", "accepted", "capture"}

    def test_every_name_in_the_code_is_documented(self) -> None:
        names = {name for name, _ in documented()}
        for folder in ("engine", "workbench"):
            for path in sorted((ROOT / folder).rglob("*.py")):
                for name in recorded_names(path.read_text(encoding="utf-8")):
                    assert name in names, f"{path} records {name!r}, which docs/metrics.md does not list"

    def test_every_phase_and_order_is_documented(self) -> None:
        table = documented()
        assert all((phase.value, "phase") in table for phase in Phase)
        assert all((order.label, "iteration") in table for order in Order)

    def test_the_pin_is_the_one_of_pyproject(self) -> None:
        pin = re.search(r'"nvtx==([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        assert pin is not None
        assert f"nvtx **{pin[1]}**" in METRICS


def recorded_names(source: str) -> set[str]:
    """Literal names given to ``recorder.phase``, ``wait`` and ``instant``."""
    return {
        node.args[0].value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("phase", "wait", "instant")
        and ast.unparse(node.func.value).endswith("recorder")
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }


def two_sessions(sink: RecordingSink) -> tuple[Session, Session]:
    sessions = tuple(traced_session(sink, session_id=number, mode="async") for number in (1, 2))
    for session in sessions:
        session.submit([[1, 2, 3], [4, 5]], max_tokens=12, temperature=0, ignore_eos=True)
    return sessions[0], sessions[1]


class TestTwoSessions:
    def test_interleaved_phase_by_phase_each_keeps_its_own_id_and_all_is_balanced(self) -> None:
        sink = RecordingSink()
        first, second = two_sessions(sink)
        with first, second:
            while not (first.finished and second.finished):
                for session in (first, second):
                    session.step_phase()
                    assert not any(sink.stacks.values()), "a push/pop range crosses a yield"
        assert sink.open_ranges() == []
        for number, session in ((1, first), (2, second)):
            ours = [one for one in sink.ranges if one.payload >> SESSION_SHIFT == number]
            iterations = [one.payload & (1 << SESSION_SHIFT) - 1 for one in ours if one.category == "iteration"]
            assert iterations == [record.iteration for record in session.iterations()]
            assert sum(one.category == "phase" for one in ours) == sum(
                len(Order[record.order.upper()].phases) for record in session.iterations()
            )

    @pytest.mark.parametrize("leave", [Session.close, Session.reset], ids=["closed", "reset"])
    def test_one_that_is_abandoned_between_two_phases_leaves_nothing_open(
        self, leave: Callable[[Session], object]
    ) -> None:
        sink = RecordingSink()
        first, second = two_sessions(sink)
        with second:
            first.run_to("forward")
            second.run_to("resolve")
            leave(first)
            second.run()
        first.close()
        assert sink.open_ranges() == []

    def test_one_that_fails_in_the_middle_of_a_phase_leaves_nothing_open(self) -> None:
        sink = RecordingSink()
        first, second = two_sessions(sink)
        with first, second:
            second.run_to("resolve")
            first.engine.runner.launch_forward = refuse  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                first.run()
            assert [one.payload >> SESSION_SHIFT for one in sink.open_ranges()] == [2]
            second.run()
        assert sink.open_ranges() == []


def refuse(*args: object) -> None:
    raise KeyboardInterrupt


class TestCapture:
    def test_brackets_the_iterations_asked_for(self) -> None:
        sink = RecordingSink()
        with traced_session(sink, session_id=3) as session:
            session.submit([1, 2, 3], max_tokens=12, temperature=0, ignore_eos=True)
            session.run(2)
            before = len(sink.ranges)
            session.capture(3)
        inside = [one for one in sink.ranges[before:] if one.category == "iteration"]
        assert sink.ranges[before] == Range("start", "capture", "capture", "#BDBDBD", 3 << SESSION_SHIFT)
        assert len(inside) == 3
        assert sink.open_ranges() == []

    def test_a_failure_inside_ends_it(self) -> None:
        sink = RecordingSink()
        with traced_session(sink) as session:
            session.submit([1, 2, 3], max_tokens=4)
            session.engine.runner.launch_forward = refuse  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                session.capture()
        assert sink.open_ranges() == []

    def test_is_refused_in_the_middle_of_an_iteration(self) -> None:
        with make_session() as session:
            session.submit([1, 2, 3], max_tokens=4)
            session.step_phase()
            with pytest.raises(RuntimeError, match="capture"):
                session.capture(1)
