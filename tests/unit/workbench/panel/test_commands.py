"""Commands: what each does, and that nothing a person types is ever an exception."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.phases import Phase
from tests.unit.workbench.panel.test_bar_view import fail_in
from tests.unit.workbench.panel.test_requests_view import text_session
from tests.unit.workbench.worlds import make_session, tokens
from workbench import load_run
from workbench.panel.bar_view import bar_view
from workbench.panel.commands import Commands
from workbench.panel.messages import COMMANDS, Notice
from workbench.session import Session


def told(session: Session, name: str, /, **args: Any) -> str:
    """The text of a command that works."""
    notice = Commands(session).run(name, args)
    assert notice["level"] == "info", notice
    assert "\n" not in notice["text"]
    return notice["text"]


def refused(session: Session, name: str, args: Any = None) -> str:
    """The text of a command that is refused: one line, and nothing for a debugger."""
    notice = Commands(session).run(name, args)
    assert (notice["level"], notice["detail"]) == ("error", ""), notice
    assert "\n" not in notice["text"]
    return notice["text"]


def one_request(session: Session) -> Session:
    session.submit([1], max_tokens=30, ignore_eos=True)
    return session


def in_loop(work: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        return await work()

    return asyncio.run(run())


class TestDispatch:
    def test_knows_every_command_of_the_schema_and_no_other(self) -> None:
        with make_session() as session:
            assert set(Commands(session)._does) == set(COMMANDS)

    @pytest.mark.parametrize("name", ["nothing", "", None, 3, "__class__", "Step"])
    def test_refuses_a_command_that_is_none(self, name: Any) -> None:
        with make_session() as session:
            assert "there is no command" in refused(session, name)

    @pytest.mark.parametrize("name", list(COMMANDS))
    def test_refuses_arguments_that_are_none(self, name: str) -> None:
        with make_session() as session:
            assert f"{name} has no argument 'zzz'; it takes " in refused(session, name, {"zzz": 1})
            assert "arguments come by name" in refused(session, name, [1])

    @pytest.mark.parametrize("value", [[], {}, "x\ny", "\x00", -1, True, float("nan"), 1e308, "🙂", ["a", 2], object()])
    @pytest.mark.parametrize("name", list(COMMANDS))
    def test_survives_any_value_of_any_argument(self, name: str, value: Any, tmp_path: Path) -> None:
        with one_request(make_session()) as session:
            session.run(2)
            for argument in COMMANDS[name]:
                given = str(tmp_path / "run") if argument == "folder" and isinstance(value, str) else value
                notice = Commands(session).run(name, {argument: given})
                assert notice["level"] in ("info", "error")
                assert "\n" not in notice["text"]
                json.dumps(notice)

    def test_notices_are_numbered_without_a_gap(self) -> None:
        with one_request(make_session()) as session:
            commands = Commands(session)
            names = ["step_phase", "nothing", "step", "pause", "step", "recover"]
            assert [commands.run(name)["number"] for name in names] == [1, 2, 3, 4, 5, 6]

    def test_every_command_on_a_closed_session_is_a_line(self, tmp_path: Path) -> None:
        with one_request(make_session()) as session:
            session.break_on("emit", request="nobody")
            session.run()
        for name, can in bar_view(session)["can"].items():
            if not can and name != "pause":
                assert refused(session, name) == f"{name}: the session is closed; make a new one"
        assert told(session, "choose", iteration=3) == ""
        assert told(session, "save", folder=str(tmp_path / "late")).startswith("saved; in a terminal: ")


class TestDriving:
    def test_a_phase_an_iteration_and_the_end(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=2, ignore_eos=True)
            assert told(session, "step_phase") == "admit of iteration 0 ran"
            assert told(session, "step") == "iteration 0 ran"
            assert told(session, "step") == "iteration 1 ran"
            session.run()
            nothing = "nothing is left to do: submit a request, or restart"
            assert told(session, "step") == told(session, "step_phase") == nothing

    def test_a_step_that_a_breakpoint_holds_says_so(self) -> None:
        with one_request(make_session()) as session:
            session.break_on("forward")
            assert told(session, "step") == "breakpoint 1 (before forward), before forward of iteration 0"

    def test_a_phase_that_raises_is_told_with_its_traceback(self) -> None:
        with one_request(make_session()) as session:
            commands, mend = Commands(session), fail_in(session, Phase.SAMPLE)
            session.run(1)
            notice = commands.run("step")

            assert notice["level"] == "error"
            assert notice["text"].startswith("ZeroDivisionError in sample: planted; recover goes on")
            assert "Traceback" in notice["detail"]
            assert "planted" in notice["detail"]
            assert session.state == "failed"
            assert "an iteration failed in sample" in refused(session, "step")
            mend()
            assert told(session, "recover").startswith("every row is computed again")
            assert told(session, "step") == "iteration 2 ran"
            assert refused(session, "recover") == "recover: nothing has failed"

    def test_what_nobody_foresaw_keeps_its_traceback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with one_request(make_session()) as session:
            monkeypatch.setattr(session, "step", lambda: [][1])
            notice = Commands(session).run("step")

        assert (notice["level"], notice["text"]) == ("error", "IndexError: list index out of range")
        assert "Traceback" in notice["detail"]


class Told:
    """Keeps what is told later than its command."""

    def __init__(self) -> None:
        self.notices: list[Notice] = []

    def __call__(self, notice: Notice) -> None:
        self.notices.append(notice)

    async def next(self) -> Notice:
        async with asyncio.timeout(20):
            while not self.notices:
                await asyncio.sleep(0)
        return self.notices.pop(0)


def run_in_background(session: Session, name: str, **args: Any) -> tuple[Notice, Notice]:
    """What is told at once, and at the end."""
    later = Told()

    async def work() -> tuple[Notice, Notice]:
        return Commands(session, later).run(name, args), await later.next()

    now, then = in_loop(work)
    return now, then


class TestBackground:
    def test_without_a_loop_is_refused_in_a_line(self) -> None:
        with one_request(make_session()) as session:
            assert "running event loop" in refused(session, "run")
            assert "running event loop" in refused(session, "run_until", {"expression": "s.finished"})

    def test_runs_so_many_iterations_or_to_the_end(self) -> None:
        with one_request(make_session()) as session:
            now, then = run_in_background(session, "run", n=4.0)
            assert (now["text"], then["text"]) == ("runs 4 iterations", "ran 4 iterations")
            assert then["number"] == now["number"] + 1
            now, then = run_in_background(session, "run")
            assert then["text"] == "nothing is left to do"
            assert session.finished

    @pytest.mark.parametrize("n", [0, -3, 2.5, True, "4", [4]])
    def test_refuses_a_number_of_iterations_that_is_none(self, n: Any) -> None:
        with one_request(make_session()) as session:
            assert f"run: n must be a whole number of at least 1, got {n!r}" in refused(session, "run", {"n": n})

    @pytest.mark.parametrize("name", ["s", "session"])
    def test_runs_until_an_expression_is_true(self, name: str) -> None:
        with one_request(make_session()) as session:
            now, then = run_in_background(session, "run_until", expression=f" {name}.row(0).output_tokens >= 8 ")
            assert now["text"] == f"runs until {name}.row(0).output_tokens >= 8"
            assert then["text"].startswith("the condition is true behind iteration")
            assert session.row(0).output_tokens == 8

    def test_a_condition_that_raises_on_the_way_is_told_and_leaves_the_session_whole(self) -> None:
        with one_request(make_session()) as session:
            _, then = run_in_background(session, "run_until", expression="1 / (5 - s.row(0).output_tokens) > 9")
            assert (then["level"], then["text"]) == ("error", "ZeroDivisionError: division by zero")
            assert session.state == "paused"

    def test_a_failure_is_told_with_its_traceback(self) -> None:
        with one_request(make_session()) as session:
            fail_in(session, Phase.EMIT)
            _, then = run_in_background(session, "run")
            assert then["level"] == "error"
            assert then["text"].startswith("ZeroDivisionError in emit: planted; recover goes on")
            assert "Traceback" in then["detail"]

    def test_pauses(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=80, ignore_eos=True)
            assert told(session, "pause") == "nothing runs"

            async def work() -> list[str]:
                later = Told()
                commands = Commands(session, later)
                texts = [commands.run("run")["text"]]
                texts.append(commands.run("step")["text"])
                texts.append(commands.run("pause")["text"])
                return [*texts, (await later.next())["text"]]

            texts = in_loop(work)

        assert "driven by a run in the background" in texts[1]
        assert texts[2] == "pauses behind the iteration in hand"
        assert texts[3].startswith("paused behind iteration")

    def test_a_cancelled_task_is_told_as_a_stop_and_leaves_no_breakpoint(self) -> None:
        later = Told()

        async def work() -> None:
            Commands(session, later).run("run_to", {"phase": "admit"})
            await asyncio.sleep(0.05)  # the loop then ends, and cancels its tasks

        with make_session(device="cpu", op_sleep_s=0.02) as session:
            session.submit([1], max_tokens=80, ignore_eos=True)
            session.run(3)
            in_loop(work)
            assert len(session.breakpoints) == 0
            assert session.state == "paused"

        assert [notice["level"] for notice in later.notices] == ["info"]
        assert later.notices[0]["text"].startswith("the task was cancelled")

    def test_a_reset_says_nothing_later(self) -> None:
        with make_session() as session:
            session.submit([1], max_tokens=80, ignore_eos=True)

            async def work() -> list[Notice]:
                later = Told()
                commands = Commands(session, later)
                commands.run("run")
                commands.run("reset")
                await asyncio.sleep(0.05)
                return later.notices

            assert in_loop(work) == []


class TestRunTo:
    def test_stands_before_a_phase_that_is_near_without_a_loop(self) -> None:
        with one_request(make_session()) as session:
            session.run(3)
            assert told(session, "run_to", phase="resolve") == "stands before resolve of iteration 3"
            assert session.engine.next_phase is Phase.RESOLVE

    def test_runs_on_the_loop_to_one_that_is_far(self) -> None:
        """The next admit of a steady decode may be thousands of iterations away, and the kernel must answer."""
        with make_session(clock="iterations") as session:
            session.submit([1], max_tokens=60, ignore_eos=True)
            session.submit([2], max_tokens=9, arrival=20)
            session.run(3)
            now, then = run_in_background(session, "run_to", phase="admit")

            assert now["text"] == "runs to the next admit"
            assert "before admit of iteration 20" in then["text"]
            assert session.engine.next_phase is Phase.ADMIT
            assert len(session.breakpoints) == 0

    def test_leaves_no_breakpoint_where_it_never_comes_or_cannot_run(self) -> None:
        with one_request(make_session(launch_ending_rows=True)) as session:
            session.run(3)
            assert "running event loop" in refused(session, "run_to", {"phase": "admit"})
            _, then = run_in_background(session, "run_to", phase="admit")
            assert then["text"] == "nothing is left to do"
            assert len(session.breakpoints) == 0

    def test_refuses_what_is_no_phase_and_a_session_with_nothing_to_do(self) -> None:
        with make_session() as session:
            assert "phase must be one of admit" in refused(session, "run_to", {"phase": "foward"})
            assert "phase is missing" in refused(session, "run_to")
            assert "nothing is left to do" in refused(session, "run_to", {"phase": "resolve"})


class TestConditions:
    @pytest.mark.parametrize(
        ("source", "why"),
        [
            ("s.row(0", "is no expression of s"),
            ("x = 3", "is no expression of s"),
            ("import os", "is no expression of s"),
            ("s.finishd", "has no attribute 'finishd'"),
            ("t.finished", "name 't' is not defined; the session is called s"),
            ("s.row()", "missing 1 required positional argument"),
            ("s.row(0).output >= 3", "has no attribute 'output'"),
            ("", "expression is missing, such as"),
            ("   ", "expression is missing, such as"),
            (3, "expression must be a text"),
            ("s\x00", "is no expression of s"),
        ],
    )
    def test_that_cannot_be_meant_are_refused_at_once(self, source: Any, why: str) -> None:
        with one_request(make_session()) as session:
            assert why in refused(session, "run_until", {"expression": source})
            if isinstance(source, str) and source.strip():
                assert why in refused(session, "break_on", {"when": source})
            assert session.engine.controller.next_index == 0

    @pytest.mark.parametrize(
        "source", ["s.outputs['late'].finished", "s.engine.pending.iteration > 3", "[1, 2][s.row(0).output_tokens + 5]"]
    )
    def test_on_what_is_not_there_yet_are_taken(self, source: str) -> None:
        with one_request(make_session()) as session:
            assert told(session, "break_on", when=source) == f"breakpoint 1 (when {source}) is set"

    def test_are_compiled_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with one_request(make_session()) as session:
            told(session, "break_on", when="s.row(0).output_tokens == 6")
            monkeypatch.setattr("builtins.compile", lambda *_, **__: pytest.fail("compiled again"))
            session.run()
            assert session.row(0).output_tokens == 6

    def test_may_use_names_inside_comprehensions(self) -> None:
        with one_request(make_session()) as session:
            told(session, "break_on", when="any(s.row(i).output_tokens > 3 for i in range(4))")
            session.run()
            assert session.row(0).output_tokens == 4


class TestRequests:
    def test_ids_for_a_model_without_a_tokenizer(self) -> None:
        with make_session() as session:
            for typed in ("3 5 8", "3, 5,8", "[3, 5, 8]", " 3\n5 8 "):
                told(session, "submit", prompt=typed, max_tokens=3)
            assert {one.prompt_ids for one in session.submissions} == {(3, 5, 8)}
            assert "oracle has no tokenizer, so a prompt is token ids such as 3 5 8; got 'once'" in refused(
                session, "submit", {"prompt": "once"}
            )
            assert "outside the vocabulary" in refused(session, "submit", {"prompt": "3 99"})
            assert "prompt is missing" in refused(session, "submit", {"prompt": "  "})

    def test_text_for_one_that_has_one_and_how_to_sample(self) -> None:
        with text_session() as session:
            text = told(session, "submit", prompt="abc", max_tokens=7, temperature=0.5, stop="\n", seed=11)
            assert text == "submitted request-0"
            params = session.submissions[0].params
            assert (params.max_tokens, params.temperature, params.stop, params.seed) == (7, 0.5, ("\n",), 11)
            told(session, "submit", prompt="abc", max_tokens="", temperature=None, stop=["a", ""])
            params = session.submissions[1].params
            assert (params.max_tokens, params.temperature, params.stop) == (16, 1.0, ("a",))

    @pytest.mark.parametrize(
        ("args", "why"),
        [
            ({"max_tokens": "many"}, "max_tokens must be a whole number"),
            ({"max_tokens": 0}, "max_tokens must be at least 1"),
            ({"temperature": "hot"}, "temperature must be a number"),
            ({"temperature": -1}, "temperature must be at least 0"),
            ({"stop": 3}, "stop must be a text or a list of texts"),
            ({"seed": 1.5}, "seed must be a whole number"),
        ],
    )
    def test_refuses_values_that_do_not_fit(self, args: dict[str, Any], why: str) -> None:
        with text_session() as session:
            assert why in refused(session, "submit", {"prompt": "abc", **args})
            assert session.submissions == ()

    def test_abort_of_one_that_lives_and_of_others(self) -> None:
        with one_request(make_session()) as session:
            session.run(2)
            assert told(session, "abort", request_id="request-0").startswith("request-0 is aborted")
            assert "is not live" in refused(session, "abort", {"request_id": "request-0"})
            assert "is not live" in refused(session, "abort", {"request_id": "nobody"})
            assert "request_id is missing" in refused(session, "abort")
            session.run()
            assert session.outputs["request-0"].finish_reason == "abort"

    def test_restart_gives_the_same_tokens_and_reset_leaves_none(self) -> None:
        with make_session() as session:
            session.submit([[1], [2]], max_tokens=6, ignore_eos=True)
            session.run()
            before = tokens(session)
            commands = Commands(session)
            commands.run("choose", {"iteration": 2})
            assert commands.run("restart")["text"] == "starts over with the same 2 requests and seeds"
            assert commands.chosen is None
            session.run()
            assert tokens(session) == before
            assert told(session, "reset") == "all is dropped; 0 requests were live"
            assert session.submissions == ()


class TestMode:
    def test_is_toggled_and_told_when_it_takes_effect(self) -> None:
        with one_request(make_session()) as session:
            session.run(3)
            assert told(session, "set_mode").startswith("legacy: Iteration 3 drains the forward of iteration 2")
            assert told(session, "set_mode", mode="legacy") == "legacy is asked for already"
            session.run(2)
            assert session.mode == "legacy"
            assert told(session, "set_mode", mode="legacy") == "the mode is legacy already"
            assert "mode must be" in refused(session, "set_mode", {"mode": "fast"})
            assert "mode must be a text" in refused(session, "set_mode", {"mode": 3})


class TestPace:
    def test_is_so_many_iterations_a_second(self) -> None:
        with make_session() as session:
            commands = Commands(session)
            assert commands.pace_per_s == 0
            assert commands.run("set_pace", {"per_s": 4})["text"].startswith("at most 4 iterations a second")
            assert (session.pace_s, commands.pace_per_s) == (0.25, 4)
            assert commands.run("set_pace", {"per_s": 0})["text"] == "as fast as they go"
            assert session.pace_s == 0

    @pytest.mark.parametrize("per_s", [-1, 1e-9, 1e9, float("inf"), float("nan"), "fast", None, True])
    def test_refuses_what_is_none(self, per_s: Any) -> None:
        with make_session() as session:
            assert "per_s must be" in refused(session, "set_pace", {"per_s": per_s})
            assert session.pace_s == 0


class TestLooking:
    def test_records_changes_while_wanted(self) -> None:
        with make_session() as session:
            assert "from the next iteration on" in told(session, "record_changes", wanted=True)
            assert session.record_changes
            assert "no longer" in told(session, "record_changes", wanted=False)
            assert not session.record_changes
            for wanted in (None, "yes", 1):
                assert "wanted must be true or false" in refused(session, "record_changes", {"wanted": wanted})

    def test_reads_the_device_and_voids_the_iteration(self) -> None:
        with one_request(make_session(device="cpu")) as session:
            session.run(3)
            commands = Commands(session)
            assert commands.run("read_device", {"name": "logits"})["level"] == "info"
            value = session.read_device("logits")
            session.run(1)

            head, *rest = commands.device_value.splitlines()
            assert head == f"logits [1 × 64] {value.dtype}"
            assert len(rest) > 1
            assert session.iterations()[-1].void_reasons == ("device_read",)
            assert "read_device knows last_token" in refused(session, "read_device", {"name": "weights"})
            assert "name is missing" in refused(session, "read_device")

    def test_leaves_numpy_printing_as_it_was(self) -> None:
        with one_request(make_session()) as session:
            session.run(2)
            before = np.get_printoptions()
            told(session, "read_device", name="block_table")
            assert np.get_printoptions() == before

    def test_chooses_an_iteration_that_there_is(self) -> None:
        with one_request(make_session()) as session:
            session.run(4)
            commands = Commands(session)
            assert commands.run("choose", {"iteration": 2})["text"] == ""  # every view shows it
            assert commands.chosen == 2
            notice = commands.run("choose", {"iteration": 9})
            assert (notice["level"], notice["text"]) == ("error", "iteration 9 is not in the history; 0 to 3 are")
            assert commands.chosen == 2
            assert "at least 0" in commands.run("choose", {"iteration": -1})["text"]
            assert commands.run("choose", {"iteration": None})["text"] == ""
            assert commands.chosen is None

    def test_saves_at_a_border_and_nowhere_else(self, tmp_path: Path) -> None:
        with one_request(make_session()) as session:
            session.run(4)
            folder = tmp_path / "run"
            assert told(session, "save", folder=str(folder)) == f"saved; in a terminal: workbench report {folder}"
            assert len(load_run(folder).records.iterations) == 4
            assert str(folder) in refused(session, "save", {"folder": str(folder)})
            session.step_phase()
            assert "save needs an iteration border" in refused(session, "save", {"folder": str(tmp_path / "other")})
            assert "folder is missing" in refused(session, "save", {"folder": ""})

    def test_a_folder_that_cannot_be_written_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with one_request(make_session()) as session:
            session.run(2)
            notice = Commands(session).run("save", {"folder": str(tmp_path / "file" / "run")})

        assert notice["level"] == "error"
        assert "file" in notice["text"]


class TestBreakpoints:
    def test_are_set_from_all_that_they_may_name(self) -> None:
        with one_request(make_session(device="cpu", graphs=[1], graph_non_decode=False)) as session:
            assert told(session, "break_on", phase="resolve") == "breakpoint 1 (before resolve) is set"
            assert "for request-0" in told(session, "break_on", phase="forward", request="request-0")
            assert "reason HEAD_ADMISSIBLE" in told(session, "break_on", reason="HEAD_ADMISSIBLE")
            assert "graph miss" in told(session, "break_on", graph_miss=True)
            assert "bubble longer than 50 µs" in told(session, "break_on", bubble_us=50)
            assert len(session.breakpoints) == 5

    @pytest.mark.parametrize(
        ("args", "why"),
        [
            ({}, "break_on needs something to stop at"),
            ({"phase": "", "request": "", "graph_miss": False}, "break_on needs something to stop at"),
            ({"phase": "nothing"}, "phase must be one of"),
            ({"reason": "nothing"}, "reason must be one of"),
            ({"graph_miss": True}, "captures no graphs"),
            ({"graph_miss": "yes"}, "graph_miss must be true or false"),
            ({"bubble_us": 10}, "inline device has no bubbles"),
            ({"bubble_us": "long"}, "bubble_us must be a number"),
        ],
    )
    def test_that_could_never_be_hit_are_refused(self, args: dict[str, Any], why: str) -> None:
        with one_request(make_session()) as session:
            assert why in refused(session, "break_on", args)
            assert len(session.breakpoints) == 0

    def test_are_disabled_enabled_and_removed_by_number(self) -> None:
        with one_request(make_session()) as session:
            told(session, "break_on", phase="resolve")
            (stop,) = session.breakpoints
            assert "stops nothing" in told(session, "enable_stop", id=1, enabled=False)
            assert not stop.enabled
            assert "stops runs again" in told(session, "enable_stop", id=1.0, enabled=True)
            assert stop.enabled
            assert "enabled must be true or false" in refused(session, "enable_stop", {"id": 1})
            assert "id must be a whole number" in refused(session, "remove_stop")
            assert refused(session, "remove_stop", {"id": 7}) == "remove_stop: there is no breakpoint 7"
            assert told(session, "remove_stop", id=1) == "breakpoint 1 (before resolve) is removed"
            assert len(session.breakpoints) == 0


class TestTwoSessions:
    def test_do_not_disturb_each_other(self) -> None:
        with make_session() as left, make_session("legacy") as right:
            for session in (left, right):
                session.submit([[1], [2]], max_tokens=9, ignore_eos=True)
            commands, others = Commands(left), Commands(right)
            commands.run("step")
            commands.run("break_on", {"phase": "resolve"})
            commands.run("choose", {"iteration": 0})
            commands.run("set_pace", {"per_s": 9})
            commands.run("record_changes", {"wanted": True})

            assert (others.chosen, others.pace_per_s, right.record_changes) == (None, 0, False)
            assert (right.engine.controller.next_index, len(right.breakpoints)) == (0, 0)
            commands.run("abort", {"request_id": "request-0"})
            right.run()
            assert [output.finish_reason for output in right.outputs.values()] == ["length", "length"]
