"""Void reasons in words: every reason that the code or the documentation knows has some."""

from __future__ import annotations

import re
from pathlib import Path

from tracing.void_words import VOID_WORDS, void_words

ROOT = Path(__file__).resolve().parents[3]


class TestVoidWords:
    def test_has_words_for_every_reason_that_is_documented(self) -> None:
        metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
        table = metrics.split("| void reason |")[1].split("\n\n")[0]

        assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(VOID_WORDS) - {"recovered"}

    def test_has_words_for_every_reason_that_the_code_gives(self) -> None:
        """A footer said ``event_loop 3``."""
        given = {
            reason
            for folder in ("engine", "workbench")
            for file in (ROOT / folder).rglob("*.py")
            for reason in re.findall(r"void_reasons\.add\(\"(\w+)\"\)", file.read_text(encoding="utf-8"))
        }

        assert {"hand_stepped", "event_loop", "paced"} <= given
        assert given <= set(VOID_WORDS)

    def test_tells_a_name_of_another_version_as_it_is(self) -> None:
        assert void_words(("debugger", "moonlight")) == f"{VOID_WORDS['debugger']}, moonlight"
        assert void_words(()) == ""
