"""Models with Mamba2 layers say what Hugging Face transformers says, in float32, for every family and option."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.models.loader import load_model
from tests.checkpoints import write_checkpoint
from tests.forward_driver import Text, greedy
from tests.slot_driver import SlotDriver

LENGTHS = (1, 2, 3, 16, 33, 70, 100)
NUM_NEW = 12
TOLERANCE = 1e-4
"""On log-probabilities in float32; seen are differences around 1e-5."""
MAMBA2, BAMBA, NEMOTRON, GRANITE = (
    f"{name}ForCausalLM" for name in ("Mamba2", "Bamba", "NemotronH", "GraniteMoeHybrid")
)

MAMBA2_KEYS: dict[str, Any] = {"num_heads": 8, "head_dim": 16, "state_size": 12, "n_groups": 2, "rope_parameters": {}}
SHARED_KEYS: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_state": 12, "mamba_n_groups": 2}
BAMBA_KEYS: dict[str, Any] = {**SHARED_KEYS, "attn_layer_indices": [1]}
NEMOTRON_KEYS: dict[str, Any] = {
    "hybrid_override_pattern": "M*-EM",
    "num_hidden_layers": 5,
    "head_dim": 24,
    "ssm_state_size": 12,
    "mamba_num_heads": 8,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
}
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
GRANITE_KEYS: dict[str, Any] = {
    **SHARED_KEYS,
    "layer_types": LAYERS,
    "intermediate_size": 24,
    "shared_intermediate_size": 40,
    "num_local_experts": 6,
}
OLD_RANGE = {"time_step_limit": [0.0, float("inf")]}
"""As transformers 4 wrote it: bare Infinity, which is not JSON."""


def old(**edits: Any) -> dict[str, Any]:
    """Keys as transformers 4 had them."""
    return {"edits": {"dtype": ..., "torch_dtype": "float32", **OLD_RANGE, **edits}}


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (MAMBA2, MAMBA2_KEYS),
    "mamba2-biases-tied": (
        MAMBA2,
        {**MAMBA2_KEYS, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True},
    ),
    "mamba2-one-group-narrow": (MAMBA2, {**MAMBA2_KEYS, "n_groups": 1, "conv_kernel": 2, "layer_norm_epsilon": 1e-3}),
    "mamba2-limits": (MAMBA2, {**MAMBA2_KEYS, "time_step_limit": [0.1, 0.6]}),
    "mamba2-old-keys": (MAMBA2, {**MAMBA2_KEYS, **old()}),
    "bamba": (BAMBA, BAMBA_KEYS),
    "bamba-biases": (
        BAMBA,
        {**BAMBA_KEYS, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "mamba_conv_bias": False},
    ),
    "bamba-tied-no-attention": (BAMBA, {**BAMBA_KEYS, "attn_layer_indices": None, "tie_word_embeddings": True}),
    "bamba-old-keys": (
        BAMBA,
        {**BAMBA_KEYS, **old(rope_parameters=..., rope_theta=10000.0, rope_scaling=None, layers_block_type=...)},
    ),
    "bamba-linear": (
        BAMBA,
        {**BAMBA_KEYS, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "bamba-whole-heads-turned-limits": (
        BAMBA,
        {
            **BAMBA_KEYS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            "time_step_limit": [0.1, 0.6],
        },
    ),
    "nemotron": (NEMOTRON, NEMOTRON_KEYS),
    "nemotron-groups-latent": (
        NEMOTRON,
        {
            **NEMOTRON_KEYS,
            "n_group": 4,
            "topk_group": 2,
            "moe_latent_size": 32,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
        },
    ),
    "nemotron-biases": (NEMOTRON, {**NEMOTRON_KEYS, "mlp_bias": True, "use_bias": True, "use_conv_bias": False}),
    "nemotron-old-keys": (
        NEMOTRON,
        {
            **NEMOTRON_KEYS,
            **old(
                layers_block_type=...,
                hybrid_override_pattern="M*-EM",
                num_hidden_layers=5,
            ),
        },
    ),
    "nemotron-never-tied": (NEMOTRON, {**NEMOTRON_KEYS, "tie_word_embeddings": True}),
    "nemotron-no-attention": (NEMOTRON, {**NEMOTRON_KEYS, "hybrid_override_pattern": "M-M", "num_hidden_layers": 3}),
    "granite": (GRANITE, GRANITE_KEYS),
    "granite-multipliers": (
        GRANITE,
        {
            **GRANITE_KEYS,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0625,
            "logits_scaling": 3.0,
            "tie_word_embeddings": True,
        },
    ),
    "granite-rope-biases": (
        GRANITE,
        {**GRANITE_KEYS, "position_embedding_type": "rope", "attention_bias": True, "mamba_proj_bias": True},
    ),
    "granite-one-group-wide-heads-limits": (
        GRANITE,
        {
            **GRANITE_KEYS,
            "mamba_n_groups": 1,
            "mamba_expand": 3,
            "mamba_d_head": 24,
            "mamba_d_conv": 3,
            "head_dim": 32,
            "time_step_limit": [0.1, 0.6],
        },
    ),
    "granite-dense": (GRANITE, {**GRANITE_KEYS, "num_local_experts": 0, "residual_multiplier": 0.5}),
    "granite-old-keys": (
        GRANITE,
        {
            **GRANITE_KEYS,
            **old(
                layer_types=["mamba", "attention", "mamba"],
                rope_parameters=...,
                rope_theta=10000.0,
                position_embedding_type="nope",
            ),
        },
    ),
}
FEW = ("mamba2", "bamba", "nemotron", "granite-multipliers")


def write_hybrid(folder: Path, variant: str) -> Path:
    """A random checkpoint whose heads forget slowly and fast, and whose router's corrections matter."""
    architecture, changes = VARIANTS[variant]
    write_checkpoint(folder, architecture, **changes)
    weights, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)
    for name, tensor in weights.items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("A_log"):
            weights[name] = (torch.rand(tensor.shape, generator=generator) * 8 + 0.1).log()
        elif name.endswith("dt_bias"):
            weights[name] = noise * 1.5 - 2.5
        elif name.endswith("e_score_correction_bias"):
            weights[name] = noise * 0.3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def reference_logprobs(folder: Path, texts: list[list[int]]) -> list[torch.Tensor]:
    """Log-probabilities at every position of each text, one whole forward each, without a cache.

    That is the chunked form, which alone keeps time steps within their limits; and Nemotron-H puts another lower limit
    there than its file says (transformers issue 48989).
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for module in model.modules():
        if type(module).__name__ == "NemotronHMamba2Mixer":
            module.time_step_limit = tuple(model.config.time_step_limit)
    with torch.inference_mode():
        return [
            model(torch.tensor([text]), position_ids=torch.arange(len(text))[None], use_cache=False)
            .logits[0]
            .log_softmax(-1)
            for text in texts
        ]


def prompts_of(vocab_size: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = random.Random(1)
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logprobs_and_greedy_tokens_equal_transformers(variant: str, tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path, variant)
    loaded = load_model(folder, dtype=torch.float32)
    prompts = prompts_of(loaded.vocab_size)

    together = greedy(SlotDriver(loaded.model), prompts, NUM_NEW, stagger=3)
    alone = [greedy(SlotDriver(loaded.model, seed=2), [prompt], NUM_NEW)[0] for prompt in prompts]
    whole = [[*prompt, *new] for prompt, new in zip(prompts, together, strict=True)]
    all_logits = SlotDriver(loaded.model).forward([Text(text) for text in whole], every=True)
    reference = reference_logprobs(folder, whole)

    assert together == alone
    for prompt, text, logits, expected in zip(prompts, whole, all_logits, reference, strict=True):
        assert expected[len(prompt) - 1 : -1].argmax(-1).tolist() == text[len(prompt) :]
        torch.testing.assert_close(logits.log_softmax(-1), expected, atol=TOLERANCE, rtol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("variant", FEW)
def test_logprobs_equal_transformers_at_every_length(variant: str, tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path, variant)
    loaded = load_model(folder, dtype=torch.float32)
    prompts = prompts_of(loaded.vocab_size, tuple(range(1, 101)))
    reference = reference_logprobs(folder, prompts)

    for prompt, expected in zip(prompts, reference, strict=True):
        (logits,) = SlotDriver(loaded.model).forward([Text(prompt)])
        torch.testing.assert_close(logits.log_softmax(-1), expected[-1:], atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("variant", FEW)
@pytest.mark.parametrize("chunk", [1, 2, 7, 50])
def test_a_prompt_read_in_chunks_gives_the_same_logits(variant: str, chunk: int, tmp_path: Path) -> None:
    loaded = load_model(write_hybrid(tmp_path, variant), dtype=torch.float64)
    prompts = prompts_of(loaded.vocab_size)
    whole = [SlotDriver(loaded.model).forward([Text(prompt)])[0] for prompt in prompts]

    driver, texts = SlotDriver(loaded.model, seed=3), [Text(prompt) for prompt in prompts]
    last: dict[int, torch.Tensor] = {}
    while running := [text for text in texts if text.cached < len(text.tokens)]:
        last |= dict(zip(map(id, running), driver.forward(running, chunk=chunk), strict=True))

    for text, expected in zip(texts, whole, strict=True):
        torch.testing.assert_close(last[id(text)], expected, atol=1e-11, rtol=0.0)


@pytest.mark.parametrize("variant", FEW)
def test_a_prompt_read_in_chunks_of_any_size_gives_the_same_logits(variant: str, tmp_path: Path) -> None:
    """Every size there is of one prompt: sizes side by side, so that each forward holds chunks of all of them."""
    loaded = load_model(write_hybrid(tmp_path, variant), dtype=torch.float64)
    (prompt,) = prompts_of(loaded.vocab_size, (37,))
    (whole,) = SlotDriver(loaded.model).forward([Text(prompt)])

    driver, texts = SlotDriver(loaded.model, seed=3), {size: Text(prompt) for size in range(1, len(prompt))}
    last: dict[int, torch.Tensor] = {}
    while running := {size: text for size, text in texts.items() if text.cached < len(prompt)}:
        last |= dict(zip(running, driver.forward_chunks(list(running.values()), list(running)), strict=True))

    for size, found in last.items():
        torch.testing.assert_close(found, whole, atol=1e-11, rtol=0.0, msg=lambda text, size=size: f"{size}: {text}")


@pytest.mark.parametrize("variant", FEW)
def test_weights_of_another_checkpoint_replace_a_models_own(variant: str, tmp_path: Path) -> None:
    architecture, changes = VARIANTS[variant]
    first, second = write_hybrid(tmp_path / "first", variant), tmp_path / "second"
    write_checkpoint(second, architecture, **{**changes, "seed": 1})
    model, other = (load_model(folder, dtype=torch.float32).model for folder in (first, second))
    text = prompts_of(199)[-1]

    model.load_weights(load_file(second / "model.safetensors").items())  # type: ignore[attr-defined]

    found, expected = (SlotDriver(each).forward([Text(text)])[0] for each in (model, other))
    torch.testing.assert_close(found, expected, atol=0.0, rtol=0.0)


def test_nemotrons_experts_may_lie_in_one_tensor_as_transformers_holds_them(tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path, "nemotron-groups-latent")
    text, path = prompts_of(199)[-1], folder / "model.safetensors"
    (expected,) = SlotDriver(load_model(folder, dtype=torch.float32).model).forward([Text(text)])

    weights = load_file(path)
    for part in ("up", "down"):
        names = [f"backbone.layers.3.mixer.experts.{expert}.{part}_proj.weight" for expert in range(8)]
        weights[f"backbone.layers.3.mixer.experts.{part}_proj"] = torch.stack([weights.pop(name) for name in names])
    save_file(weights, path)

    (found,) = SlotDriver(load_model(folder, dtype=torch.float32).model).forward([Text(text)])
    torch.testing.assert_close(found, expected, atol=0.0, rtol=0.0)


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    folder = write_hybrid(tmp_path, "nemotron-no-attention")
    prompt = prompts_of(199)[-1]

    logits = [
        SlotDriver(load_model(folder, dtype=dtype).model).forward([Text(prompt)], every=True)[0]
        for dtype in (torch.bfloat16, torch.float32)
    ]

    rough, fine = (each.float().log_softmax(-1) for each in logits)
    assert logits[0].dtype == torch.bfloat16
    assert 0 < (rough - fine).abs().mean() < 0.05


def test_random_weights_of_a_shape_give_states_that_last() -> None:
    """Time steps and decays of the first training step: what was read 40 tokens ago is still told apart."""
    model = load_model("shape:tiny-hybrid", dtype=torch.float32).model
    text = prompts_of(model.vocab_size)[-1]

    one, other = (SlotDriver(model).forward([Text([first, *text[:40]])])[0] for first in (1, 2))

    assert torch.isfinite(one).all()
    assert 0.3 < float(one.std()) < 3.0
    assert float((one - other).abs().max()) > 1e-3
