"""The widget's modules as one text, and what they share with Python."""

from __future__ import annotations

import re

import pytest

from workbench.widgets.front_end import HOME, joined_module

pytest.importorskip("anywidget")

from workbench.widgets.timeline import MODULES, TimelineWidget

TOP_LEVEL = re.compile(r"^(?:export )?(?:const|let|class|function\*?) (\w+)", re.MULTILINE)


class TestJoinedModule:
    def test_imports_nothing_and_exports_one_thing(self) -> None:
        text = TimelineWidget._esm

        assert not re.search(r"^import ", text, re.MULTILINE)
        assert re.findall(r"^export \w+", text, re.MULTILINE) == ["export default"]

    def test_holds_every_module_that_lies_there(self) -> None:
        assert {path.name for path in HOME.glob("timeline*.js")} == set(MODULES)

    def test_has_no_name_twice_at_the_top(self) -> None:
        names = TOP_LEVEL.findall(joined_module(*MODULES))

        assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)

    def test_lists_a_module_behind_those_it_imports(self) -> None:
        for place, name in enumerate(MODULES):
            wanted = re.findall(r'from "\./([^"]+)"', (HOME / name).read_text(encoding="utf-8"))
            assert set(wanted) <= set(MODULES[:place]), name

    def test_asks_nothing_of_the_network(self) -> None:
        text = TimelineWidget._esm + TimelineWidget._css

        assert not re.search(r"https?://|@import|fetch\(|XMLHttpRequest|new WebSocket", text)
