"""Decoders with experts, and MiMo, say what transformers says; no schedule, padding or layout of files changes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.errors import CheckpointError
from engine.invariants import check_idle
from engine.models.loader import LoadedModel, load_model
from engine.models.moe import MoE, count_expert_load
from engine.request import RequestOutput
from tests.checkpoints import edit_config, write_checkpoint
from tests.cpu.models.test_mtp import write_mimo
from tests.forward_driver import ForwardDriver, Text, greedy
from tests.same_outputs import check_same
from tests.teacher import CLOSE, check_against_transformers, transformers_says

LENGTHS = (1, 2, 15, 16, 17, 33, 100)
CPU = torch.device("cpu")
LIMITS: dict[str, Any] = {
    "max_requests": 8,
    "max_batch_tokens": 256,
    "max_sequence_length": 128,
    "num_blocks": 60,
    "device": "inline",
    "debug_invariants": True,
}
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1, prompt_logprobs=1)

EIGHT = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
MIXTRAL = ("MixtralForCausalLM", {"num_local_experts": 6, "num_experts_per_tok": 2})
QWEN2 = ("Qwen2MoeForCausalLM", {**EIGHT, "num_experts": 8, "shared_expert_intermediate_size": 56})
QWEN3 = ("Qwen3MoeForCausalLM", {**EIGHT, "num_local_experts": 8, "head_dim": 32})
GLM4 = ("Glm4MoeForCausalLM", {**EIGHT, "n_routed_experts": 8, "n_shared_experts": 2, "head_dim": 16})
MIMO = ("Qwen2ForCausalLM", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 640_000.0}})
FAMILIES = {"mixtral": MIXTRAL, "qwen2": QWEN2, "qwen3": QWEN3, "glm4": GLM4}
HALF_TURNED = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}

VARIANTS: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any]]] = {
    "mixtral": (MIXTRAL, {}),
    "mixtral-old-keys": (MIXTRAL, {"old_keys": True, "edits": {"head_dim": ...}}),
    "mixtral-one-expert-a-token": (MIXTRAL, {"num_experts_per_tok": 1, "num_local_experts": 4}),
    "mixtral-every-expert": (MIXTRAL, {"num_experts_per_tok": 6, "tie_word_embeddings": True}),
    "mixtral-window": (MIXTRAL, {"sliding_window": 12}),
    "mixtral-no-theta": (MIXTRAL, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "no_rope": True}),
    "qwen2": (QWEN2, {}),
    "qwen2-old-keys": (
        QWEN2,
        {"old_keys": True, "edits": {"layer_types": ..., "mlp_only_layers": ..., "qkv_bias": ...}},
    ),
    "qwen2-renormalised": (QWEN2, {"norm_topk_prob": True}),
    "qwen2-no-biases": (QWEN2, {"qkv_bias": False}),
    "qwen2-every-second-layer": (QWEN2, {"decoder_sparse_step": 2}),
    "qwen2-window": (QWEN2, {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}),
    "qwen2-window-old-keys": (
        QWEN2,
        {
            "use_sliding_window": True,
            "sliding_window": 12,
            "max_window_layers": 2,
            "old_keys": True,
            "edits": {"layer_types": ...},
        },
    ),
    "qwen2-dense": (QWEN2, {"mlp_only_layers": [0, 1, 2]}),
    "qwen3": (QWEN3, {}),
    "qwen3-old-keys": (QWEN3, {"old_keys": True, "edits": {"num_local_experts": ..., "num_experts": 8}}),
    "qwen3-renormalised": (QWEN3, {"norm_topk_prob": True}),
    "qwen3-dense-layer": (QWEN3, {"mlp_only_layers": [1], "attention_bias": True}),
    "qwen3-window": (QWEN3, {"use_sliding_window": True, "sliding_window": 12}),
    "glm4": (GLM4, {}),
    "glm4-old-keys": (
        GLM4,
        {
            "old_keys": True,
            "edits": {"partial_rotary_factor": 0.5, "rope_scaling": None, "num_nextn_predict_layers": 1},
        },
    ),
    "glm4-old-keys-without-a-factor": (GLM4, {"old_keys": True, "edits": {"rope_scaling": None}}),
    "glm4-groups": (GLM4, {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
    "glm4-not-renormalised": (GLM4, {"norm_topk_prob": False, "n_shared_experts": 1}),
    "glm4-no-dense-layer": (GLM4, {"first_k_dense_replace": 0, "attention_bias": True, "use_qk_norm": True}),
    "glm4-two-dense-layers": (GLM4, {"first_k_dense_replace": 2}),
    "glm4-a-quarter-turned": (GLM4, {"rope_parameters": {**HALF_TURNED, "partial_rotary_factor": 0.25}}),
    "glm4-yarn": (
        GLM4,
        {
            "rope_parameters": {
                **HALF_TURNED,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
}


def write(folder: Path, variant: str) -> Path:
    (architecture, sizes), changes = VARIANTS[variant]
    changes = {**sizes, **changes}
    has_no_rope = changes.pop("no_rope", False)
    write_checkpoint(folder, architecture, **changes)
    change_weights(folder, spread_correction_biases)
    return edit_config(folder, **({"rope_parameters": ...} if has_no_rope else {}))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def spread_correction_biases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers starts them at 0, where choice and weight are one."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(tensor.shape, generator=generator) * 0.3 if "correction_bias" in name else tensor
        for name, tensor in weights.items()
    }


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(folder, dtype=dtype, device=CPU)


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


def serve(loaded: LoadedModel, params: Any = GREEDY, **options: Any) -> tuple[list[RequestOutput], Engine]:
    with Engine(loaded, EngineConfig(**{**LIMITS, **options})) as engine:
        outputs = engine.generate(prompts(loaded.vocab_size), params, progress=False)
        check_idle(engine)
    return outputs, engine


def serve_one_by_one(loaded: LoadedModel, params: Any = GREEDY, **options: Any) -> list[RequestOutput]:
    with Engine(loaded, EngineConfig(**{**LIMITS, **options})) as engine:
        return [engine.generate([prompt], params, progress=False)[0] for prompt in prompts(loaded.vocab_size)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_ids_and_log_probabilities_equal_transformers(variant: str, tmp_path: Path) -> None:
    folder = write(tmp_path, variant)
    loaded = load(folder)

    outputs, _ = serve(loaded)

    check_against_transformers(folder, outputs)
    layers = [module for module in loaded.model.modules() if isinstance(module, MoE)]  # type: ignore[attr-defined]
    assert bool(layers) is (variant != "qwen2-dense")


def write_family(folder: Path, family: str) -> tuple[Path, Path]:
    """A checkpoint with all that is special to its family, and the same for transformers, which has no MiMo."""
    if family == "mimo":
        mimo = write_mimo(folder)
        return mimo.folder, mimo.reference
    own = write(folder, {"glm4": "glm4-groups"}.get(family, family))
    return own, own


@pytest.mark.parametrize("family", [*FAMILIES, "mimo"])
def test_log_probabilities_equal_transformers_at_every_length(family: str, tmp_path: Path) -> None:
    """1 to 100 tokens, packed ten by ten; what transformers says of the longest tells of all that it begins with."""
    (folder, reference), (text,) = write_family(tmp_path, family), prompts(199)[-1:]
    model = load(folder).model
    said = transformers_says(reference, [[*text, 0]], dtype=torch.float32, device=CPU, attention="eager")[0]
    ends = [*text[1:], 0]

    for first in range(1, 101, 10):
        texts = [Text(text[:length]) for length in range(first, first + 10)]
        for length, (logits,) in enumerate(ForwardDriver(model).forward(texts), first):
            found = logits.log_softmax(-1)
            assert float(found[ends[length - 1]]) == pytest.approx(float(said.logprobs[length - 1]), abs=CLOSE)
            assert int(found.argmax()) == int(said.best[length - 1])


class TestSchedules:
    """In float64, where rounding cannot change a route."""

    @pytest.fixture(params=[*FAMILIES, "mimo"])
    def loaded(self, request: pytest.FixtureRequest, tmp_path: Path) -> LoadedModel:
        return load(write_family(tmp_path, request.param)[0], torch.float64)

    def test_no_schedule_changes_what_is_said(self, loaded: LoadedModel) -> None:
        """One by one, in chunks, asynchronously, in buckets whose padding goes to experts, too."""
        alone = serve_one_by_one(loaded, mode="legacy")
        chunks: dict[str, Any] = {"chunked_prefill": True, "max_batch_tokens": 16}
        for options in (
            {"mode": "legacy"},
            {"mode": "async"},
            {"mode": "async", **chunks},
            {"mode": "async", "graphs": (8,), **chunks},
            {"mode": "async", "capacity_policy": "max_utilization", "block_size": 4, "num_blocks": 29},
        ):
            outputs, engine = serve(loaded, **options)
            check_same(outputs, alone)
            assert (engine.counters.graph_hits > 5) is ("graphs" in options)
            assert (engine.counters.evictions > 0) is ("capacity_policy" in options)

    def test_no_prefix_out_of_the_cache_changes_what_is_said(self, loaded: LoadedModel) -> None:
        """Of prompts that are read again; who wants their log-probabilities has no hits."""
        params = GREEDY.replace(prompt_logprobs=None)
        alone = serve_one_by_one(loaded, params, mode="legacy")
        for mode in ("legacy", "async"):
            with Engine(loaded, EngineConfig(**LIMITS, mode=mode, prefix_caching=True)) as engine:
                for _ in range(2):
                    outputs = engine.generate(prompts(loaded.vocab_size), params, progress=False)
                    check_same(outputs, alone)
                check_idle(engine)
            assert [output.num_cached_tokens for output in outputs] == [0, 0, 0, 0, 16, 32, 96]

    @pytest.mark.parametrize("how", ["persist", "offload", "recompute"])
    def test_no_suspension_changes_what_is_said(self, loaded: LoadedModel, how: Any) -> None:
        expected, _ = serve(loaded)

        with Engine(loaded, EngineConfig(**LIMITS)) as engine:
            names = [engine.add_request(prompt, GREEDY) for prompt in prompts(loaded.vocab_size)]
            ended = {}
            for step in range(100):
                if step in (1, 4, 9):
                    engine.suspend(how)
                    engine.resume()
                ended |= {output.request_id: output for output in engine.step()}
            check_idle(engine)
        check_same([ended[name] for name in names], expected)

    def test_a_prompt_read_in_chunks_of_any_size_gives_the_same_logits(self, loaded: LoadedModel) -> None:
        """Sizes side by side, so that each forward holds chunks of all of them."""
        prompt = prompts(loaded.vocab_size)[-1][:37]
        (whole,) = ForwardDriver(loaded.model).forward([Text(prompt)])

        driver, texts = ForwardDriver(loaded.model, seed=3), {size: Text(prompt) for size in range(1, len(prompt))}
        last: dict[int, Tensor] = {}
        while running := {size: text for size, text in texts.items() if text.cached < len(prompt)}:
            last |= dict(zip(running, driver.forward_chunks(list(running.values()), list(running)), strict=True))

        for found in last.values():
            torch.testing.assert_close(found, whole, atol=1e-11, rtol=0.0)

    def test_seeded_draws_are_the_same_in_both_modes(self, loaded: LoadedModel) -> None:
        params = [SamplingParams(max_tokens=9 + i, seed=i, temperature=1.1, top_p=0.9) for i in range(len(LENGTHS))]

        one, other = (serve(loaded, params, mode=mode)[0] for mode in ("legacy", "async"))

        assert [output.token_ids for output in one] == [output.token_ids for output in other]

    @pytest.mark.parametrize("chunk", [1, 7, 50])
    def test_a_prompt_read_in_chunks_gives_the_same_logits(self, loaded: LoadedModel, chunk: int) -> None:
        texts = [Text(prompt) for prompt in prompts(loaded.vocab_size)]
        whole = [ForwardDriver(loaded.model).forward([Text(text.tokens)])[0] for text in texts]

        driver, last = ForwardDriver(loaded.model, seed=3), {}
        while running := [text for text in texts if text.cached < len(text.tokens)]:
            last |= dict(zip(map(id, running), driver.forward(running, chunk=chunk), strict=True))

        for text, expected in zip(texts, whole, strict=True):
            torch.testing.assert_close(last[id(text)], expected, atol=1e-11, rtol=0.0)


class TestLayoutsOfFiles:
    @pytest.mark.parametrize("family", FAMILIES)
    def test_experts_fused_as_transformers_holds_them_in_memory(self, family: str, tmp_path: Path) -> None:
        folder = write(tmp_path, family)
        expected = greedy(ForwardDriver(load(folder).model), prompts(199), 5)

        change_weights(folder, fuse)

        assert any("gate_up_proj" in name for name in load_file(folder / "model.safetensors"))
        assert greedy(ForwardDriver(load(folder).model), prompts(199), 5) == expected

    def test_experts_both_fused_and_not_are_refused(self, tmp_path: Path) -> None:
        folder = write(tmp_path, "qwen3")
        change_weights(folder, lambda weights: {**weights, **fuse(weights)})

        with pytest.raises(CheckpointError, match=r"holds tensor model\.layers\.\d\.mlp\.experts\..* twice"):
            load(folder)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_missing_expert_is_named(self, family: str, tmp_path: Path) -> None:
        folder = write(tmp_path, family)
        wanted = "model.layers.1.block_sparse_moe.experts.4.w3.weight"
        wanted = wanted if family == "mixtral" else "model.layers.1.mlp.experts.4.up_proj.weight"
        change_weights(folder, lambda weights: {n: w for n, w in weights.items() if n != wanted})

        with pytest.raises(CheckpointError, match=f"lacks tensor {re.escape(wanted)}"):
            load(folder)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_live_engine_takes_new_weights(self, family: str, tmp_path: Path) -> None:
        old = write(tmp_path / "old", family)
        new = write(tmp_path / "new", family)
        change_weights(new, lambda weights: {n: w if w.dim() == 1 else w.flip(0) for n, w in weights.items()})
        expected = [output.token_ids for output in serve(load(new, torch.float64))[0]]
        loaded = load(old, torch.float64)

        with Engine(loaded, EngineConfig(**LIMITS, graphs=(8,), graph_non_decode=False)) as engine:
            before = [o.token_ids for o in engine.generate(prompts(199), GREEDY, progress=False)]
            engine.pause()
            engine.load_weights(new)
            engine.resume()
            after = [o.token_ids for o in engine.generate(prompts(199), GREEDY, progress=False)]

        assert after == expected != before

    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({"num_experts_per_tok": 2}, "moe must be the model's"),
            ({"norm_topk_prob": True}, "moe must be the model's"),
            ({"mlp_only_layers": [0]}, "sparse must be the model's"),
        ],
    )
    def test_weights_of_another_router_are_refused(
        self, changes: dict[str, Any], expected: str, tmp_path: Path
    ) -> None:
        folder = write(tmp_path, "qwen3")
        loaded = load(folder)
        edit_config(folder, **changes)

        with Engine(loaded, EngineConfig(**LIMITS)) as engine:
            engine.pause()
            with pytest.raises(CheckpointError, match=expected):
                engine.load_weights(folder)


def fuse(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The experts of each layer under transformers 5's names in memory; Mixtral's block is called ``mlp`` there."""
    kept: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in weights.items():
        name = name.replace(".block_sparse_moe.", ".mlp.")
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
        else:
            kept[name] = tensor
    gate, up, down = (
        ("w1", "w3", "w2") if "w1" in next(iter(experts.values()))[0] else ("gate_proj", "up_proj", "down_proj")
    )
    for prefix, by_number in experts.items():
        ordered = [by_number[number] for number in range(len(by_number))]
        kept[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat((one[gate], one[up])) for one in ordered])
        kept[f"{prefix}.down_proj"] = torch.stack([one[down] for one in ordered])
    return kept


class TestDraftLayersAreLeftOut:
    def test_glm4_heads_that_the_configuration_does_not_tell_of(self, tmp_path: Path) -> None:
        folder = write(tmp_path, "glm4")
        expected = greedy(ForwardDriver(load(folder).model), prompts(199), 5)

        def add(weights: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
            of_last = {name: tensor for name, tensor in weights.items() if ".layers.2." in name}
            copies = {name.replace(".layers.2.", f".layers.{layer}."): w.clone() for name, w in of_last.items()}
            return {**weights, **copies, f"model.layers.{layer}.eh_proj.weight": torch.ones(64, 128)}

        for layer in (4, 5, 20):  # layer 3 is the one head that its configuration tells of
            change_weights(folder, partial(add, layer=layer))

        assert greedy(ForwardDriver(load(folder).model), prompts(199), 5) == expected

    def test_other_families_have_no_such_layers(self, tmp_path: Path) -> None:
        folder = write(tmp_path, "qwen3")
        change_weights(folder, lambda weights: {**weights, "model.layers.3.input_layernorm.weight": torch.ones(64)})

        with pytest.raises(CheckpointError, match=r"holds tensor model\.layers\.3\.input_layernorm"):
            load(folder)

    def test_mimo_is_qwen2_by_another_name(self, tmp_path: Path) -> None:
        """transformers has no MiMo, but its main model is Qwen2's with biases."""
        architecture, changes = MIMO
        reference = write_checkpoint(tmp_path / "qwen2", architecture, **changes)
        folder = write_checkpoint(tmp_path / "mimo", architecture, old_keys=True, **changes)
        edit_config(
            folder,
            architectures=["MiMoForCausalLM"],
            model_type="mimo",
            attention_bias=True,
            num_nextn_predict_layers=1,
            sliding_window=8,
            use_sliding_window=False,
            layer_types=...,
            use_mrope=False,
        )
        loaded = load(folder)
        outputs, _ = serve(loaded)

        assert loaded.architecture == "MiMoForCausalLM"
        check_against_transformers(reference, outputs)


class TestExpertLoad:
    def test_every_real_token_is_counted_once_for_each_of_its_experts(self, tmp_path: Path) -> None:
        """Buckets pad, chunks cut, asynchronous decode runs a token too many for each request that ends."""
        loaded = load(write(tmp_path, "glm4"), torch.float64)
        load_LX = count_expert_load(loaded.model)  # type: ignore[arg-type]
        assert load_LX is not None
        totals = []
        for options in ({}, {"graphs": (8,)}, {"chunked_prefill": True, "max_batch_tokens": 16}):
            load_LX.zero_()
            _, engine = serve(loaded, mode="legacy", **options)
            tokens = sum(LENGTHS) + (GREEDY.max_tokens - 1) * len(LENGTHS)
            assert load_LX.shape == (2, 8)
            assert load_LX.sum(1).tolist() == [tokens * 3, tokens * 3]
            assert (engine.counters.graph_hits > 0) is ("graphs" in options)
            totals.append(load_LX.clone())
        assert torch.equal(totals[0], totals[1])
        assert torch.equal(totals[0], totals[2])
        assert len(set(totals[0].flatten().tolist())) > 4

    def test_nothing_is_counted_unless_asked_for(self, tmp_path: Path) -> None:
        loaded = load(write(tmp_path, "mixtral"))

        serve(loaded)

        assert all(m.load_X is None for m in loaded.model.modules() if isinstance(m, MoE))  # type: ignore[attr-defined]

    def test_a_dense_model_has_no_load(self) -> None:
        model = load_model("shape:tiny", device=CPU).model

        assert count_expert_load(model) is None  # type: ignore[arg-type]
        assert model.wants_real_tokens is False  # type: ignore[attr-defined]
