"""Heavy packages are imported where they are used, so that a small use stays small."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "gguf", "safetensors", "tokenizers", "huggingface_hub", "plotly", "ipywidgets")


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


class TestImports:
    def test_import_engine_loads_nothing_heavy(self) -> None:
        assert not loaded_after("import engine") & set(HEAVY)

    def test_the_engine_class_needs_torch_and_none_of_the_loaders(self) -> None:
        assert loaded_after("from engine import Engine") & set(HEAVY) == {"torch"}

    def test_tracing_imports_neither_engine_nor_workbench(self) -> None:
        loaded = loaded_after("import tracing.recorder, tracing.analysis")

        assert not {name for name in loaded if name.split(".")[0] in ("engine", "workbench", "torch")}
