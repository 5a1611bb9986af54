"""A user's own module, from a checkpoint folder to logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from engine.attention import kv_state
from engine.errors import CheckpointError, ConfigError
from engine.models import registry
from engine.models.loader import load_model
from engine.models.registry import known_architectures, model_class, register_model
from engine.models.weights import fill_weights, weight_targets
from tests.forward_driver import ForwardDriver, Text, greedy


class Bare(nn.Module):
    """One attention layer without positions: what a user would write first."""

    def __init__(self, config, attention, dtype, device) -> None:
        super().__init__()
        size, self.heads = config["hidden_size"], config["num_attention_heads"]
        kind = {"dtype": dtype, "device": device}
        self.attention, self.head_dim, self.dtype = attention, size // self.heads, dtype
        self.vocab_size, self.max_position = config["vocab_size"], 1024
        self.embed = nn.Embedding(self.vocab_size, size, **kind)
        self.qkv = nn.Linear(size, 3 * size, bias=False, **kind)

    @classmethod
    def from_checkpoint_config(cls, config, *, attention, dtype, device):
        return cls(config, attention, dtype, device)

    def load_weights(self, weights) -> None:
        fill_weights(weight_targets(self), weights)

    def cache_layout(self):
        return [kv_state(self.heads, self.head_dim, self.dtype)]

    def forward(self, batch, caches):
        x = self.embed(batch.token_ids_T)
        q, k, v = self.qkv(x).unflatten(1, (3, self.heads, self.head_dim)).unbind(1)
        x = x + self.attention(q, k, v, caches[0], batch, scale=self.head_dim**-0.5).flatten(1)
        return functional.linear(x[batch.logits_idx_L], self.embed.weight)


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_registered", {})
    return


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (50, 32), "qkv.weight": (96, 32)}
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, tmp_path / "model.safetensors")
    config = {"architectures": ["Bare"], "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


class TestRegisterModel:
    def test_a_registered_module_runs_from_a_checkpoint(self, folder: Path) -> None:
        register_model("Bare", Bare)
        loaded = load_model(folder, dtype=torch.float64)
        prompts = [[1, 2, 3], [4] * 20, [7]]

        assert loaded.architecture == "Bare"
        together = greedy(ForwardDriver(loaded.model), prompts, 10, stagger=2)
        assert together == [greedy(ForwardDriver(loaded.model), [prompt], 10)[0] for prompt in prompts]

    def test_its_logits_are_those_of_dense_attention(self, folder: Path) -> None:
        register_model("Bare", Bare)
        model = load_model(folder, dtype=torch.float64).model
        tokens = [3, 1, 4, 1, 5]
        (paged,) = ForwardDriver(model).forward([Text(tokens)])

        x = model.embed.weight[tokens]
        q, k, v = (model.qkv(x).view(5, 3, 4, 8).transpose(0, 2)[:, i] for i in range(3))
        dense = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        torch.testing.assert_close(paged[0], (x + dense)[-1] @ model.embed.weight.T, atol=1e-11, rtol=0.0)

    def test_missing_weights_are_named(self, folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        register_model("Bare", Bare)
        save_file(
            {"embed.weight": load_file(folder / "model.safetensors")["embed.weight"]}, folder / "model.safetensors"
        )

        with pytest.raises(CheckpointError, match=r"checkpoint lacks tensor qkv\.weight"):
            load_model(folder)

    def test_registering_again_replaces_the_class(self) -> None:
        class Newer(Bare):
            pass

        register_model("Bare", Bare)
        register_model("Bare", Newer)

        assert model_class("Bare") is Newer

    def test_a_class_without_the_members_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="must define from_checkpoint_config, load_weights, cache_layout"):
            register_model("Plain", nn.Linear)

    def test_an_unknown_name_lists_registered_ones_too(self) -> None:
        register_model("Bare", Bare)

        assert "Bare" in known_architectures()
        with pytest.raises(
            CheckpointError, match=r"'Bert' is not known; known: .*Bare, .*LlamaForCausalLM, .*register_model"
        ):
            model_class("Bert")


class TestFillWeights:
    def test_a_tensor_that_comes_twice_is_refused(self) -> None:
        targets = {"a": torch.zeros(2)}

        with pytest.raises(CheckpointError, match="holds tensor a twice"):
            fill_weights(targets, [("a", torch.ones(2)), ("a", torch.ones(2))])

    def test_converts_to_the_targets_type(self) -> None:
        target = torch.zeros(2, dtype=torch.float64)
        fill_weights({"a": target}, [("a", torch.tensor([1.5, 2.5], dtype=torch.bfloat16))])

        assert target.tolist() == [1.5, 2.5]
