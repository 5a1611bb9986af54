"""Progress bars are for people at a terminal; logs and pipes stay clean."""

from __future__ import annotations

import sys

import pytest

from engine.progress import CaptureBar


class TestCaptureBar:
    def test_says_nothing_where_standard_error_is_no_terminal(self, capsys: pytest.CaptureFixture[str]) -> None:
        bar = CaptureBar()
        bar(1, 2, 0)
        bar(2, 2, 0)

        assert capsys.readouterr().err == ""

    def test_counts_graphs_and_memory_on_a_terminal(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        bar = CaptureBar()
        bar(2, 2, 3 << 20)

        shown = capsys.readouterr().err
        assert "2/2" in shown
        assert "3 MiB" in shown
