"""The dense decoder says what Hugging Face transformers says, in float32, for every family and option."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.loader import load_model
from tests.checkpoints import write_checkpoint
from tests.forward_driver import ForwardDriver, Text, greedy

LENGTHS = (1, 2, 15, 16, 17, 33, 100)
LLAMA, MISTRAL, QWEN2, QWEN3 = (f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3"))
NUM_NEW = 40
TOLERANCE = 1e-4
"""On log-probabilities in float32: the issue's number; seen are differences around 1e-5."""


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **values}}


ORIGINAL_32 = {"original_max_position_embeddings": 32}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "llama-old-keys": (LLAMA, {"old_keys": True}),
    "llama-sharded": (LLAMA, {"shards": True}),
    "llama-tied": (LLAMA, {"tie_word_embeddings": True}),
    "llama-biases": (LLAMA, {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": (LLAMA, {"head_dim": 24}),
    "llama-no-groups": (LLAMA, {"num_key_value_heads": 4}),
    "llama-one-kv-head": (LLAMA, {"num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "llama-linear": (LLAMA, rope("linear", factor=4.0)),
    "llama-linear-old-keys": (LLAMA, {**rope("linear", factor=4.0), "old_keys": True}),
    "llama3-rope": (LLAMA, rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL_32)),
    "llama3-rope-old-keys": (
        LLAMA,
        {
            **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL_32),
            "old_keys": True,
            "tie_word_embeddings": True,
        },
    ),
    "llama-yarn": (LLAMA, rope("yarn", factor=4.0, **ORIGINAL_32)),
    "llama-yarn-mscale": (
        LLAMA,
        rope("yarn", factor=8.0, mscale=1.0, mscale_all_dim=0.7, beta_fast=16.0, **ORIGINAL_32),
    ),
    "llama-yarn-exact-ramp": (
        LLAMA,
        rope("yarn", factor=4.0, attention_factor=0.9, truncate=False, beta_fast=2.0, beta_slow=0.25, **ORIGINAL_32),
    ),
    "mistral": (MISTRAL, {"sliding_window": None}),
    "mistral-window": (MISTRAL, {"sliding_window": 8}),
    "mistral-window-old-keys": (MISTRAL, {"sliding_window": 24, "head_dim": 32, "old_keys": True}),
    "qwen2": (QWEN2, {}),
    "qwen2-tied-old-keys": (QWEN2, {"tie_word_embeddings": True, "old_keys": True}),
    "qwen2-window-switched-off": (
        QWEN2,
        {"edits": {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 1, "layer_types": ...}},
    ),
    "qwen2-window": (QWEN2, {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "qwen2-window-old-keys": (
        QWEN2,
        {
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 1,
            "old_keys": True,
            "edits": {"layer_types": ...},
        },
    ),
    "qwen2-yarn": (QWEN2, rope("yarn", factor=4.0, **ORIGINAL_32)),
    "qwen3": (QWEN3, {"head_dim": 32}),
    "qwen3-tied-old-keys": (QWEN3, {"head_dim": 32, "tie_word_embeddings": True, "old_keys": True}),
    "qwen3-biases": (QWEN3, {"head_dim": 16, "attention_bias": True}),
    "qwen3-window-by-layer": (
        QWEN3,
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def prompts_of(vocab_size: int, seed: int = 1) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in LENGTHS]


def reference_logprobs(folder: Path, texts: list[list[int]]) -> list[torch.Tensor]:
    """Log-probabilities at every position of each text, one whole forward each, without a cache."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return [model(torch.tensor([text])).logits[0].log_softmax(-1) for text in texts]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_and_greedy_tokens_equal_transformers(variant: str, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    folder = write_checkpoint(tmp_path, architecture, **changes)
    loaded = load_model(folder, dtype=torch.float32)
    prompts = prompts_of(loaded.vocab_size)

    together = greedy(ForwardDriver(loaded.model), prompts, NUM_NEW, stagger=3)
    alone = [greedy(ForwardDriver(loaded.model, seed=2), [prompt], NUM_NEW)[0] for prompt in prompts]
    whole = [[*prompt, *new] for prompt, new in zip(prompts, together, strict=True)]
    all_logits = ForwardDriver(loaded.model).forward([Text(text) for text in whole], every=True)
    reference = reference_logprobs(folder, whole)

    assert together == alone
    for prompt, text, logits, expected in zip(prompts, whole, all_logits, reference, strict=True):
        # Each new token is the reference's own choice after the tokens before it, so greedy decoding agrees throughout.
        assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == text[len(prompt) :]
        torch.testing.assert_close(logits.log_softmax(-1), expected, atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("variant", ["llama", "mistral-window", "qwen3-window-by-layer"])
@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
def test_a_prompt_read_in_chunks_gives_the_same_logits(variant: str, chunk: int, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    loaded = load_model(write_checkpoint(tmp_path, architecture, **changes), dtype=torch.float64)
    prompts = prompts_of(loaded.vocab_size)
    whole = [ForwardDriver(loaded.model).forward([Text(prompt)])[0] for prompt in prompts]

    driver, texts = ForwardDriver(loaded.model, seed=3), [Text(prompt) for prompt in prompts]
    last: dict[int, torch.Tensor] = {}
    while running := [text for text in texts if text.cached < len(text.tokens)]:
        last |= dict(zip(map(id, running), driver.forward(running, chunk=chunk), strict=True))

    for text, expected in zip(texts, whole, strict=True):
        torch.testing.assert_close(last[id(text)], expected, atol=1e-11, rtol=0.0)


def test_float64_computes_in_float64(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, LLAMA)
    exact = load_model(folder, dtype=torch.float64)
    single = load_model(folder, dtype=torch.float32)
    prompt = prompts_of(exact.vocab_size)[-1]

    batched = ForwardDriver(exact.model).forward([Text(prompt), Text(prompt[:5]), Text(prompt[:50])])
    alone = ForwardDriver(exact.model, seed=1).forward([Text(prompt)])
    rounded = ForwardDriver(single.model).forward([Text(prompt)])

    assert batched[0].dtype == torch.float64
    torch.testing.assert_close(batched[0], alone[0], atol=1e-12, rtol=0.0)
    assert 1e-9 < (rounded[0] - alone[0]).abs().max() < 1e-3  # float32 somewhere inside would make this 0 or both equal


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, QWEN3, head_dim=32)
    prompt = prompts_of(199)[-1]

    logits = [
        ForwardDriver(load_model(folder, dtype=dtype).model).forward([Text(prompt)], every=True)[0]
        for dtype in (torch.bfloat16, torch.float32)
    ]

    rough, fine = (each.float().log_softmax(-1) for each in logits)
    assert logits[0].dtype == torch.bfloat16
    assert 0 < (rough - fine).abs().mean() < 0.05
