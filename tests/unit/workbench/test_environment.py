"""The commit that numbers name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from workbench import environment


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of a file and a notebook."""
    (tmp_path / "notebooks").mkdir()
    for name in ("engine.py", "notebooks/one.ipynb"):
        (tmp_path / name).write_text("as committed")
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    return tmp_path


class TestCommit:
    def test_is_not_dirty_because_lab_rewrote_a_notebook(self, checkout: Path) -> None:
        """Opening a notebook was enough for ``-dirty`` below every figure."""
        clean = environment.commit()
        (checkout / "notebooks" / "one.ipynb").write_text("opened")

        assert clean is not None
        assert len(clean) == 12
        assert environment.commit() == clean

    def test_is_dirty_where_code_differs(self, checkout: Path) -> None:
        clean = environment.commit()
        (checkout / "engine.py").write_text("changed")

        assert environment.commit() == f"{clean}-dirty"

    def test_is_unknown_outside_a_checkout(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(environment, "ROOT", tmp_path)

        assert environment.commit() is None
