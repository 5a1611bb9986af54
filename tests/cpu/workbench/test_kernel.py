"""A session in a real Jupyter kernel: debuggers, runs beside other cells, clicks while a cell awaits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

import pytest

pytest.importorskip("ipykernel")
pytest.importorskip("ipywidgets")

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 120
PREPARE = """
import torch
torch.set_num_threads(1)
from tests.unit.workbench.worlds import make_session
session = make_session(device="cpu", op_sleep_s=0.002)
"""


@dataclass
class Cell:
    """What one cell said."""

    text: str = ""
    error: str | None = None
    asked: list[str] = field(default_factory=list)
    """Prompts for input that it showed."""


class Kernel:
    """A kernel and a client that types."""

    def __init__(self) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(ROOT))

    def run(self, code: str, *, typed: Sequence[str] = ()) -> Cell:
        """Run a cell to its end, answering each prompt for input with the next line."""
        return self.finish(self.send(code), typed)

    def send(self, code: str) -> str:
        """Begin a cell."""
        return str(self.client.execute(code, allow_stdin=True))

    def finish(self, sent: str, typed: Sequence[str] = ()) -> Cell:
        """Wait for the end of a cell that was sent."""
        cell, lines, until = Cell(), iter(typed), time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            self._answer(cell, lines)
            try:
                message = self.client.get_iopub_msg(timeout=0.05)
            except Empty:
                continue
            if message["parent_header"].get("msg_id") != sent:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                cell.text += content["text"]
            elif message["msg_type"] == "execute_result":
                cell.text += content["data"]["text/plain"]
            elif message["msg_type"] == "error":
                cell.error = f"{content['ename']}: {content['evalue']}"
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return cell
        raise AssertionError(f"the cell did not end; it said {cell}")

    def _answer(self, cell: Cell, lines: Iterator[str]) -> None:
        try:
            request = self.client.get_stdin_msg(timeout=0)
        except Empty:
            return
        cell.asked.append(request["content"]["prompt"])
        self.client.input(next(lines, "c"))

    def click(self, comm_id: str) -> None:
        """What a browser sends when a button is clicked."""
        content = {"comm_id": comm_id, "data": {"method": "custom", "content": {"event": "click"}}}
        self.client.shell_channel.send(self.client.session.msg("comm_msg", content))

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel() -> Iterator[Kernel]:
    one = Kernel()
    try:
        prepared = one.run(PREPARE)
        assert prepared.error is None, prepared
        yield one
    finally:
        one.close()


@pytest.fixture(autouse=True)
def _fresh(kernel: Kernel) -> None:
    assert kernel.run("session.reset(); session.breakpoints.clear()").error is None


def value(kernel: Kernel, expression: str) -> Any:
    cell = kernel.run(expression)
    assert cell.error is None, cell
    return eval(cell.text)


class TestDebuggers:
    def test_breakpoint_in_a_cell_opens_a_prompt(self, kernel: Kernel) -> None:
        cell = kernel.run("secret = 41\ndef inner():\n    breakpoint()\ninner()", typed=["p secret + 1", "c"])

        assert cell.error is None
        assert [prompt.strip() for prompt in cell.asked] == ["ipdb>", "ipdb>"]
        assert "42" in cell.text

    def test_pdb_stands_in_the_phase(self, kernel: Kernel) -> None:
        kernel.run("session.submit([1, 2], max_tokens=4, ignore_eos=True)")
        cell = kernel.run("session.pdb('resolve')", typed=["p iteration.index", "n", "q"])

        assert cell.error is None
        assert "_resolve" in cell.text
        assert len(cell.asked) == 3
        assert "<after resolve, before emit: iteration 1 overlap>" in cell.text
        assert value(kernel, "len(session.run())") == 1


class TestBesideOtherCells:
    def test_other_cells_run_and_pause_it(self, kernel: Kernel) -> None:
        kernel.run("session.submit([1, 2], max_tokens=90, ignore_eos=True)")
        assert kernel.run("run = session.start()").error is None
        first = value(kernel, "session.engine.controller.next_index")
        second = value(kernel, "session.engine.controller.next_index")
        assert second > first
        assert value(kernel, "session.state") == "running"
        kernel.run("session.pause()")
        kernel.run("outcome = await run")

        assert value(kernel, "session.state") == "paused"
        assert value(kernel, "session.stopped.cause.value") == "pause"
        assert 0 < value(kernel, "outcome.iterations") < 90

    def test_a_click_is_handled_while_a_cell_awaits_the_run(self, kernel: Kernel) -> None:
        made = kernel.run(
            "import ipywidgets\n"
            "button = ipywidgets.Button(description='pause')\n"
            "clicked = []\n"
            "button.on_click(lambda _: (clicked.append(session.state), session.pause()))\n"
            "session.submit([1, 2], max_tokens=90, ignore_eos=True)\n"
            "button.comm.comm_id"
        )
        sent = kernel.send("outcome = await session.run_async()")
        kernel.click(made.text.strip("'"))
        assert kernel.finish(sent).error is None

        assert value(kernel, "clicked") == ["running"]
        assert value(kernel, "session.state") == "paused"
        assert value(kernel, "outcome.iterations") < 90

    def test_a_failure_in_the_background_is_shown_and_recovered_from(self, kernel: Kernel) -> None:
        kernel.run("session.submit([1, 2], max_tokens=20, ignore_eos=True)")
        kernel.run(
            "from engine.phases import Phase\n"
            "phases = session.engine.controller.phase_functions\n"
            "whole = phases[Phase.PREPARE]\n"
            "def broken(iteration):\n"
            "    raise ArithmeticError('planted')\n"
        )
        cell = kernel.run(
            "session.step()\n"
            "phases[Phase.PREPARE] = broken\n"
            "import asyncio\n"
            "run = session.start()\n"
            "while not run.done:\n"
            "    await asyncio.sleep(0.01)\n"
            "await asyncio.sleep(0.05)"
        )

        assert cell.error == "ArithmeticError: planted"  # shown, though the cell itself did not raise
        assert value(kernel, "session.state") == "failed"
        kernel.run("phases[Phase.PREPARE] = whole; session.recover()")
        assert value(kernel, "len(session.run())") == 1
