"""Both modes' borders as a picture in a notebook and as sentences at a prompt."""

from __future__ import annotations

import pytest

from tests.unit.workbench.test_snapshot import Tags
from tests.unit.workbench.worlds import make_session
from workbench.border_view import StepBorders, step_borders
from workbench.report import RunView


@pytest.fixture(scope="module")
def shown() -> StepBorders:
    runs = []
    with make_session(device="cpu", op_sleep_s=0.004) as session:
        session.submit([[1, 2], [3]], max_tokens=9, ignore_eos=True)
        for mode in ("legacy", "async"):
            session.mode = mode
            session.restart()
            session.run()
            runs.append(session.run_view(mode))
    return step_borders(runs)


class TestStepBorders:
    def test_says_that_legacy_exposes_and_async_hides(self, shown: StepBorders) -> None:
        legacy, overlapped = str(shown).splitlines()

        assert legacy.startswith("legacy: device idle")
        assert overlapped.startswith("async: ")
        assert "hidden behind" in overlapped
        assert repr(shown) == str(shown)

    def test_draws_host_and_device_of_each_run_with_the_idle_device(self, shown: StepBorders) -> None:
        text = shown._repr_html_()
        page = Tags(text)

        assert page.open == []
        for part in (
            "legacy",
            "async",
            "host",
            "device compute",
            "device idle",
            "hidden host work",
            "done and sampled",
        ):
            assert part in page.text
        legacy, overlapped = text.split("<b>async</b>")
        assert "title='exposed" in legacy
        assert "title='hidden" in overlapped

    def test_says_where_a_run_has_no_border(self) -> None:
        view = step_borders([RunView("<nothing>", [], [])])

        assert str(view) == "<nothing>: no two forwards with host work between them"
        assert "&lt;nothing&gt;" in view._repr_html_()

    def test_needs_a_run(self) -> None:
        with pytest.raises(ValueError, match=r"session\.run_view"):
            step_borders([])
