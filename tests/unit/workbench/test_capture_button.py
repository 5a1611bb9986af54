from __future__ import annotations

import pytest

from tests.nvtx.sink import RecordingSink
from tests.unit.workbench.worlds import make_session
from tracing.recorder import Recorder
from workbench.capture_button import CaptureButton

pytest.importorskip("ipywidgets")


class TestCaptureButton:
    def test_captures_as_many_iterations_as_its_field_says_at_each_press(self) -> None:
        sink = RecordingSink()
        with make_session(recorder=Recorder(nvtx=sink)) as session:
            session.submit([1, 2, 3], max_tokens=9, temperature=0, ignore_eos=True)
            button = CaptureButton(session, 4)
            number, press, line = button.widget.children

            press.click()
            assert line.value == "captured iterations 0 to 3; 0 requests ended"
            number.value = 20
            press.click()
            assert (
                line.value == f"captured iterations 4 to {session.engine.controller.next_index - 1}; 1 requests ended"
            )
        assert sum(one.name == "capture" for one in sink.ranges) == 2
        assert sink.open_ranges() == []

    def test_says_when_nothing_is_left_to_do(self) -> None:
        with make_session() as session:
            widget = session.capture_button(4)
            widget.children[1].click()

            assert widget.children[2].value == "nothing is left to do: submit requests first"

    def test_says_why_it_cannot_in_the_middle_of_an_iteration(self) -> None:
        with make_session() as session:
            session.submit([1, 2, 3], max_tokens=4)
            session.step_phase()
            widget = session.capture_button(4)
            widget.children[1].click()

            assert widget.children[2].value.startswith("not captured: ")

    def test_says_at_first_whether_a_tool_is_attached(self) -> None:
        with make_session(recorder=Recorder(nvtx=False)) as session:
            assert session.capture_button().children[2].value == "off"
