"""What the README shows is run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine import EngineConfig, Order, Reason, SamplingParams
from engine.engine import Engine
from engine.models.loader import load_model
from workbench import loading

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def block_with(text: str) -> str:
    found = [block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if text in block]
    assert len(found) == 1, f"{len(found)} blocks of the README hold {text!r}"
    return found[0]


class TestReadme:
    def test_your_model_is_thirty_lines_and_serves(self, tmp_path: Path) -> None:
        code = block_with("register_model(")
        assert len([line for line in code.splitlines() if line.strip()]) <= 32
        exec(compile(code, "README.md", "exec"), {})
        config = {
            "architectures": ["OneLayerForCausalLM"],
            "vocab_size": 50,
            "hidden_size": 32,
            "num_attention_heads": 4,
        }
        (tmp_path / "config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(0)
        weights = {
            "embed.weight": torch.randn(50, 32, generator=generator),
            "qkv.weight": torch.randn(96, 32, generator=generator),
        }
        save_file(weights, tmp_path / "model.safetensors")
        params = SamplingParams(max_tokens=6, temperature=0)
        outputs = []
        for options in ({"mode": "legacy"}, {"mode": "async", "graphs": [2], "graph_non_decode": False}):
            settings: dict[str, Any] = {"max_sequence_length": 64, "max_requests": 2, **options}
            with Engine.from_pretrained(tmp_path, EngineConfig(**settings), progress=False) as engine:
                outputs.append([o.token_ids for o in engine.generate([[1, 2, 3], [4]], params, progress=False)])

        assert outputs[0] == outputs[1]
        assert all(len(ids) == 6 for ids in outputs[0])

    def test_your_policy_decides(self) -> None:
        code = block_with("OverlapFromFourRows")
        names: dict[str, Any] = {}
        exec(compile(code[: code.index("engine = Engine")], "README.md", "exec"), names)
        loaded = load_model("oracle", device=torch.device("cpu"))
        config = EngineConfig(device="inline", max_requests=4, max_sequence_length=64, max_batch_tokens=64)
        with Engine(loaded, config, policy=names["OverlapFromFourRows"]()) as engine:
            params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 8, 12, 16)]
            engine.generate([[1]] * 4, params, progress=False)
            reasons = engine.counters.reasons

        assert reasons[Reason.POLICY.name.lower()] > 0
        assert engine.counters.orders[Order.OVERLAP.label] > 0

    def test_your_admission_policy_is_compared_and_drawn(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        code = block_with("ShortestPromptFirst")
        monkeypatch.setattr(loading, "DEFAULT_MODEL", "oracle")
        monkeypatch.chdir(tmp_path)
        names: dict[str, Any] = {}
        exec(compile(code.replace("max_requests=8", "max_requests=8, repeats=1"), "README.md", "exec"), names)

        assert names["found"].ids_equal
        assert names["found"].runs[1].config["admission_policy"] == "ShortestPromptFirst"
        assert (tmp_path / "by-prompt.svg").read_text().startswith("<?xml")

    def test_comparing_three_legs_prints_a_table_and_a_prediction(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        code = block_with("from workbench import compare")
        monkeypatch.setattr(loading, "DEFAULT_MODEL", "oracle")
        exec(compile(code.replace("repeats=5", "repeats=2"), "README.md", "exec"), {})
        shown = capsys.readouterr().out

        assert "async without overlap" in shown
        assert "tokens/s" in shown
        assert "if device forward × 0.5: mean step" in shown

    @pytest.mark.timeout(60)
    def test_ranks_step_together(self, capsys: pytest.CaptureFixture[str]) -> None:
        exec(compile(block_with("from workbench import Cluster"), "README.md", "exec"), {})

        assert "all meet" in capsys.readouterr().out

    def test_unknown_architectures_point_to_the_section_that_exists(self) -> None:
        assert "\n## Your model\n" in README
