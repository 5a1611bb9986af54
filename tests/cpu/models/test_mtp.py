"""Draft heads of MiMo, GLM-4-MoE and Nemotron-H: what they foretell, against a straight-line reference.

A head that is wired wrongly passes every test of equal outputs, since acceptance changes no token; so its logits are
compared, and its acceptance with that of the same head told the true text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError
from engine.models.loader import LoadedModel, load_model
from engine.request import RequestOutput
from tests.checkpoints import edit_config, randomise, write_checkpoint
from tests.same_outputs import check_same
from tests.teacher import CLOSE, check_against_transformers, text_of

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True, logprobs=1)
PROMPTS = [[5, 6, 7, 8, 9], [11] * 16, [3, 1, 4, 1, 5, 9, 2, 6] * 4 + [7], [12]]
MIMO_CHANGES: dict[str, Any] = {"head_dim": 16}
GLM4_CHANGES: dict[str, Any] = {
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "head_dim": 16,
}


@dataclass
class Family:
    """A checkpoint with heads, and what its parts are called."""

    folder: Path
    reference: Path
    """The same without heads, for transformers."""
    prefixes: tuple[str, ...]
    names: dict[str, str]
    is_hidden_first: bool


def write_mimo(folder: Path, num_heads: int = 1, **changes: Any) -> Family:
    keys = {**MIMO_CHANGES, **changes}
    reference = write_checkpoint(folder / "reference", "Qwen2ForCausalLM", **keys)
    own = write_checkpoint(folder / "own", "Qwen2ForCausalLM", old_keys=True, **keys)
    edit_config(
        own,
        architectures=["MiMoForCausalLM"],
        model_type="mimo",
        num_nextn_predict_layers=num_heads,
        use_sliding_window=False,
        layer_types=...,
    )
    names = {"token": "token_layernorm", "hidden": "hidden_layernorm", "project": "input_proj"}
    names |= {"final": "final_layernorm"}
    family = Family(own, reference, tuple(f"model.mtp_layers.{i}" for i in range(num_heads)), names, True)
    add_heads(family)
    return family


def write_glm4(folder: Path, num_heads: int = 1, **changes: Any) -> Family:
    """One head in the keys of transformers 5, several in those of 4."""
    keys = {**GLM4_CHANGES, **changes}
    reference = write_checkpoint(folder / "reference", "Glm4MoeForCausalLM", **keys)
    own = write_checkpoint(folder / "own", "Glm4MoeForCausalLM", old_keys=num_heads > 1, **keys)
    edit_config(own, num_nextn_predict_layers=num_heads)
    names = {"token": "enorm", "hidden": "hnorm", "project": "eh_proj", "final": "shared_head.norm"}
    family = Family(own, reference, tuple(f"model.layers.{3 + i}" for i in range(num_heads)), names, False)
    add_heads(family, copies=("embed_tokens", "shared_head.head"))
    return family


def write_nemotron(folder: Path, num_heads: int = 1, *, second: str = "-", **changes: Any) -> Family:
    """Heads of an attention layer and a feed-forward, or experts (``second="E"``), which no key need say."""
    keys: dict[str, Any] = {
        "hybrid_override_pattern": f"M*{second}M",
        "num_hidden_layers": 4,
        "head_dim": 24,
        "ssm_state_size": 12,
        "mamba_num_heads": 8,
        "mamba_head_dim": 10,
        "n_groups": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        **changes,
    }
    reference = write_checkpoint(folder / "reference", "NemotronHForCausalLM", **keys)
    own = write_checkpoint(folder / "own", "NemotronHForCausalLM", **keys)
    pattern = {} if second == "E" else {"mtp_hybrid_override_pattern": f"*{second}"}
    edit_config(own, num_nextn_predict_layers=num_heads, **pattern)
    names = {"token": "enorm", "hidden": "hnorm", "project": "eh_proj", "final": "final_layernorm"}
    family = Family(own, reference, tuple(f"mtp.layers.{2 * i}" for i in range(num_heads)), names, False)
    weights = load_file(own / "model.safetensors")
    shapes: dict[str, torch.Size] = {}
    for head in range(num_heads):
        for place, source in enumerate((1, 2)):  # the model's attention layer, and what is behind it
            prefix, target = f"backbone.layers.{source}.", f"mtp.layers.{2 * head + place}."
            shapes |= {target + n.removeprefix(prefix): t.shape for n, t in weights.items() if n.startswith(prefix)}
        shapes |= {f"mtp.layers.{2 * head}.{one}.weight": torch.Size([64]) for one in ("enorm", "hnorm")}
        shapes[f"mtp.layers.{2 * head}.eh_proj.weight"] = torch.Size([64, 128])
        shapes[f"mtp.layers.{2 * head + 1}.final_layernorm.weight"] = torch.Size([64])
    save_file({**weights, **random_tensors(shapes, seed=7)}, own / "model.safetensors")
    return family


WRITERS: dict[str, Callable[..., Family]] = {
    "mimo": write_mimo,
    "glm4": write_glm4,
    "nemotron": write_nemotron,
    "nemotron with experts": partial(write_nemotron, second="E"),
}


def random_tensors(shapes: dict[str, torch.Size], seed: int) -> dict[str, Tensor]:
    holder = nn.ParameterDict({n.replace(".", "/"): nn.Parameter(torch.empty(s)) for n, s in shapes.items()})
    randomise(holder, seed=seed)
    return {name.replace("/", "."): parameter.detach() for name, parameter in holder.items()}


def add_heads(family: Family, copies: tuple[str, ...] = ()) -> None:
    """Random heads, whose layer has the names and shapes of the model's last one."""
    path = family.folder / "model.safetensors"
    weights = load_file(path)
    for number, prefix in enumerate(family.prefixes):
        shapes = {name.removeprefix("model.layers.2."): t.shape for name, t in weights.items() if ".layers.2." in name}
        shapes |= {f"{family.names[one]}.weight": torch.Size([64]) for one in ("token", "hidden", "final")}
        shapes[f"{family.names['project']}.weight"] = torch.Size([64, 128])
        weights |= {f"{prefix}.{name}": one for name, one in random_tensors(shapes, seed=number + 7).items()}
        for copy in copies:
            weights[f"{prefix}.{copy}.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, path)


def reference_logits(family: Family, text: list[int], head: int) -> Tensor:
    """[len(text) - head - 1, V]: row i tells of the token at i + head + 2, by one head after another on the true text.

    The model is transformers', run without a cache over the whole text, and so are MiMo's and GLM's layers.
    """
    import transformers

    is_nemotron = family.names["final"] == "final_layernorm" and not family.is_hidden_first
    model = transformers.AutoModelForCausalLM.from_pretrained(family.reference, attn_implementation="eager").eval()
    weights = load_file(family.folder / "model.safetensors")
    ids = torch.tensor(text)
    eps = model.config.layer_norm_epsilon if is_nemotron else model.config.rms_norm_eps
    base = model.model if hasattr(model, "model") else model.backbone

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weights[f"{name}.weight"]

    with torch.no_grad():
        hidden = base(ids[None], use_cache=False).last_hidden_state[0]
        for depth, prefix in enumerate(family.prefixes[: head + 1]):
            before, following = hidden[: len(text) - 1 - depth], ids[depth + 1 :]
            token = norm(model.get_input_embeddings()(following), f"{prefix}.{family.names['token']}")
            state = norm(before, f"{prefix}.{family.names['hidden']}")
            pair = [state, token] if family.is_hidden_first else [token, state]
            x = torch.cat(pair, dim=1) @ weights[f"{prefix}.{family.names['project']}.weight"].T
            if is_nemotron:
                hidden = nemotron_head(x, weights, 2 * depth, norm, model.config)
                continue
            layer = model.model.layers[2]
            own = {n.removeprefix(f"{prefix}."): t for n, t in weights.items() if n.startswith(f"{prefix}.")}
            load_layer(layer, own)
            places = torch.arange(x.shape[0])[None]
            mask = torch.full((x.shape[0], x.shape[0]), float("-inf")).triu(1)[None, None]
            turns = model.model.rotary_emb(x[None], places)
            out = layer(x[None], attention_mask=mask, position_embeddings=turns, position_ids=places)
            out = out[0] if isinstance(out, tuple) else out
            hidden = norm(out.reshape(x.shape), f"{prefix}.{family.names['final']}")
        logits: Tensor = model.lm_head(hidden)
        return logits


def nemotron_head(x: Tensor, weights: dict[str, Tensor], number: int, norm: Any, config: Any) -> Tensor:
    """Attention without positions, then down(relu(up x)^2), each on a normed input and added; then the last norm."""
    attention, mlp = f"mtp.layers.{number}", f"mtp.layers.{number + 1}"
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    normed = norm(x, f"{attention}.norm")
    q, k, v = (normed @ weights[f"{attention}.mixer.{one}_proj.weight"].T for one in "qkv")
    k, v = (one.view(-1, kv_heads, size).repeat_interleave(heads // kv_heads, 1) for one in (k, v))
    scores = torch.einsum("thd,shd->hts", q.view(-1, heads, size), k) * size**-0.5
    scores = scores + torch.full(scores.shape[1:], float("-inf")).triu(1)
    mixed = torch.einsum("hts,shd->thd", scores.softmax(-1), v).flatten(1)
    x = x + mixed @ weights[f"{attention}.mixer.o_proj.weight"].T
    normed = norm(x, f"{mlp}.norm")
    if f"{mlp}.mixer.gate.weight" in weights:
        x = x + nemotron_experts(normed, {n.removeprefix(f"{mlp}.mixer."): t for n, t in weights.items()}, config)
    else:
        up = normed @ weights[f"{mlp}.mixer.up_proj.weight"].T
        x = x + up.relu().pow(2) @ weights[f"{mlp}.mixer.down_proj.weight"].T
    last: Tensor = norm(x, f"{mlp}.final_layernorm")
    return last


def nemotron_experts(x: Tensor, weights: dict[str, Tensor], config: Any) -> Tensor:
    """By transformers' own layer."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE

    layer = NemotronHMoE(config)
    for name, target in layer.state_dict().items():
        if name in weights:
            target.copy_(weights[name])
        else:
            for expert in range(target.shape[0]):
                target[expert].copy_(weights[name.replace("experts.", f"experts.{expert}.") + ".weight"])
    out: Tensor = layer(x[None])[0]
    return out


def load_layer(layer: nn.Module, own: dict[str, Tensor]) -> None:
    """Into transformers' layer, whose experts are fused."""
    wanted = layer.state_dict()
    for name, target in wanted.items():
        if name in own:
            target.copy_(own[name])
        elif name == "mlp.experts.gate_up_proj":
            for expert in range(target.shape[0]):
                parts = [own[f"mlp.experts.{expert}.{one}_proj.weight"] for one in ("gate", "up")]
                target[expert].copy_(torch.cat(parts))
        elif name == "mlp.experts.down_proj":
            for expert in range(target.shape[0]):
                target[expert].copy_(own[f"mlp.experts.{expert}.down_proj.weight"])
        else:
            raise AssertionError(f"nobody fills {name}")


class Watched:
    """An engine on the inline device that keeps the logits its heads draft from."""

    def __init__(self, loaded: LoadedModel, drafts: int, **options: Any) -> None:
        limits: dict[str, Any] = {"max_requests": 4, "max_batch_tokens": 64, "max_sequence_length": 64}
        config = {"device": "inline", "debug_invariants": True, "num_blocks": 40, "speculative_tokens": drafts}
        self.engine = Engine(loaded, EngineConfig(**{**limits, **config, **options}))
        self.told: list[tuple[str, int, int, Tensor]] = []
        """Request, tokens known, head, logits."""
        if drafts:
            self._watch(loaded.model)

    def _watch(self, model: Any) -> None:
        speculator = self.engine.runner.speculator
        assert speculator is not None
        draw, launch = model.draft_logits, speculator.launch_draft
        now: list[Any] = []

        def launch_draft(verified: Any, table: Any, *more: Any) -> None:
            requests = table.requests[verified.first_row : verified.first_row + verified.num_rows]
            lengths = self.engine.runner.columns.length[verified.first_row :].tolist()  # type: ignore[index]
            now[:] = [(request.request_id, lengths[i]) for i, request in enumerate(requests)]
            launch(verified, table, *more)

        def draft_logits(head: int, hidden_LE: Tensor) -> Tensor:
            logits: Tensor = draw(head, hidden_LE)
            self.told += [(name, known, head, logits[i]) for i, (name, known) in enumerate(now)]
            return logits

        speculator.launch_draft = launch_draft  # type: ignore[method-assign]
        speculator._model = _Overridden(model, draft_logits)  # type: ignore[assignment]

    def serve(self, params: SamplingParams = GREEDY) -> list[RequestOutput]:
        return self.engine.generate(PROMPTS, params)


class _Overridden:
    """A model one of whose methods is another."""

    def __init__(self, model: Any, draft_logits: Any) -> None:
        self._model = model
        self.draft_logits = draft_logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@pytest.fixture(params=WRITERS)
def family(request: pytest.FixtureRequest, tmp_path: Path) -> Family:
    return WRITERS[request.param](tmp_path)


class TestOneHead:
    def test_is_loaded_with_the_model(self, family: Family) -> None:
        loaded = load_model(family.folder, device=CPU)

        assert loaded.model.num_draft_heads == 1  # type: ignore[attr-defined]

    def test_changes_no_token_and_transformers_agrees(self, family: Family) -> None:
        loaded = load_model(family.folder, device=CPU)

        plain = Watched(loaded, 0).serve()
        drafted = Watched(loaded, 1).serve()

        assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
        check_against_transformers(family.reference, drafted)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"mode": "legacy"},
            {"chunked_prefill": True, "max_batch_tokens": 12},
            {"prefix_caching": True},
            {"graphs": (4, 8), "graph_non_decode": False},
            {"late_rewind": True},
        ],
        ids=lambda options: next(iter(options), "async"),
    )
    def test_foretells_what_the_straight_line_does(self, family: Family, options: dict[str, Any]) -> None:
        loaded = load_model(family.folder, device=CPU)
        watched = Watched(loaded, 1, **options)

        outputs = watched.serve()
        outputs += watched.serve() if "prefix_caching" in options else []

        if "prefix_caching" in options:
            assert watched.engine.counters.prefix_hit_tokens > 0
        check_drafts(family, outputs, watched, heads=1)


class TestTwoHeads:
    @pytest.mark.parametrize("name", WRITERS)
    def test_the_second_goes_on_from_the_first(self, name: str, tmp_path: Path) -> None:
        family = WRITERS[name](tmp_path, 2)
        loaded = load_model(family.folder, device=CPU)
        watched = Watched(loaded, 2)

        outputs = watched.serve()

        plain = [one.token_ids for one in Watched(loaded, 0).serve()]
        assert [one.token_ids for one in outputs] == plain
        check_drafts(family, outputs, watched, heads=2)
        late = Watched(loaded, 2, late_rewind=True)
        assert [one.token_ids for one in late.serve()] == plain
        assert late.engine.counters.orders["mtp_overlap_late"] > 0

    def test_more_drafts_than_heads_are_refused(self, tmp_path: Path) -> None:
        loaded = load_model(write_mimo(tmp_path).folder, device=CPU)

        with pytest.raises(ConfigError, match="has 1 draft head; use at most 1"):
            Watched(loaded, 2)


FEW_IDS = 8
FEW_PROMPTS = [[place * place * (4 + place) % 31 % FEW_IDS for place in range(1, 1 + n)] for n in (5, 17, 33, 1)]
TAKEN_BACK = {"capacity_policy": "max_utilization", "num_blocks": 15, "paused_blocks": 0}
MODES = ["legacy", "async"]


@dataclass
class Cold:
    """What each of ``FEW_PROMPTS`` gives alone, in legacy mode and whole."""

    outputs: list[RequestOutput]
    """Without drafts."""
    foretold: dict[tuple[int, int, int], Tensor]
    """What two heads draft from: logits by number of the prompt, tokens known, head."""

    def check(self, watched: Watched, outputs: list[RequestOutput]) -> None:
        """Outputs and draft logits are these."""
        numbers = [FEW_PROMPTS.index(list(output.prompt_token_ids)) for output in outputs]
        check_same(outputs, [self.outputs[number] for number in numbers])
        found = foretold(watched, outputs)
        common = found.keys() & self.foretold.keys()
        assert len(common) > 5 * len(outputs)
        for key in common:
            torch.testing.assert_close(found[key], self.foretold[key], atol=1e-9, rtol=0.0)
        counters = watched.engine.counters
        assert 0 < counters.drafts_accepted.total() < counters.drafts_proposed.total()


def few(loaded: LoadedModel, drafts: int, **options: Any) -> Watched:
    """An engine with room for one prompt and its output, many times over unless ``options`` say otherwise."""
    limits: dict[str, Any] = {"block_size": 4, "num_blocks": 80, "max_sequence_length": 52, "dtype": "float64"}
    return Watched(loaded, drafts, **{**limits, **options})


def foretold(watched: Watched, outputs: list[RequestOutput]) -> dict[tuple[int, int, int], Tensor]:
    numbers = {output.request_id: FEW_PROMPTS.index(list(output.prompt_token_ids)) for output in outputs}
    return {(numbers[name], known, head): logits for name, known, head, logits in watched.told}


@pytest.fixture(scope="module", params=["mimo", "glm4", "nemotron"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model with two heads and few ids."""
    family = WRITERS[request.param](tmp_path_factory.mktemp("family"), 2, vocab_size=FEW_IDS)
    return load_model(family.folder, dtype=torch.float64, device=CPU)


@pytest.fixture(scope="module")
def cold(loaded: LoadedModel) -> Cold:
    plain, drafting = (few(loaded, drafts, mode="legacy") for drafts in (0, 2))
    outputs, drafted = (
        [one.engine.generate([prompt], GREEDY)[0] for prompt in FEW_PROMPTS] for one in (plain, drafting)
    )
    return Cold(outputs, foretold(drafting, drafted))


class TestSchedules:
    """In float64, with so few ids that random heads foresee some: nothing changes what is said, nor what is drafted."""

    @pytest.mark.parametrize("mode", MODES)
    def test_chunks_of_every_size(self, loaded: LoadedModel, cold: Cold, mode: str) -> None:
        """Whose borders fall between a token and the one that a head reads beside it."""
        for budget in range(4, 16):
            options: dict[str, Any] = {"max_batch_tokens": budget, "max_requests": 1, "debug_invariants": False}
            watched = few(loaded, 1, mode=mode, chunked_prefill=True, **options)
            cold.check(watched, watched.engine.generate(FEW_PROMPTS[1:2], GREEDY))
            launched = [one.launched for one in watched.engine.recorder.iterations() if one.launched is not None]
            assert max(one.num_tokens for one in launched) == budget

    @pytest.mark.parametrize("mode", MODES)
    def test_prefixes_out_of_the_cache(self, loaded: LoadedModel, cold: Cold, mode: str) -> None:
        watched = few(loaded, 2, mode=mode, prefix_caching=True, mamba_cache_gb=0.01, max_batch_tokens=100)

        outputs = [output for _ in range(2) for output in watched.engine.generate(FEW_PROMPTS, GREEDY)]

        assert [output.num_cached_tokens for output in outputs[-4:]] == [4, 16, 32, 0]
        cold.check(watched, outputs)

    @pytest.mark.parametrize("mode", MODES)
    def test_rows_that_are_taken_back(self, loaded: LoadedModel, cold: Cold, mode: str) -> None:
        watched = few(loaded, 2, mode=mode, **TAKEN_BACK)

        outputs = watched.engine.generate(FEW_PROMPTS, GREEDY)

        assert watched.engine.counters.evictions > 0
        cold.check(watched, outputs)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("how", ["persist", "offload", "recompute"])
    def test_suspensions(self, loaded: LoadedModel, cold: Cold, how: str, mode: str) -> None:
        watched = few(loaded, 2, mode=mode, chunked_prefill=True, max_batch_tokens=20)
        engine = watched.engine
        ended: dict[str, RequestOutput] = {}
        names = [engine.add_request(prompt, GREEDY) for prompt in FEW_PROMPTS]

        for step in range(60):
            if step in (1, 4, 10):
                engine.suspend(how)
                engine.resume()
            ended |= {output.request_id: output for output in engine.step()}

        cold.check(watched, [ended[name] for name in names])


class TestFiles:
    def test_heads_that_a_file_lacks_are_none(self, family: Family) -> None:
        path = family.folder / "model.safetensors"
        save_file(without_heads(load_file(path), family), path)
        loaded = load_model(family.folder, device=CPU)

        assert loaded.model.num_draft_heads == 0  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="has no draft heads; use 0, or a model with MTP layers"):
            Watched(loaded, 1)

    def test_heads_that_the_configuration_does_not_tell_of_are_left_out(self, family: Family) -> None:
        edit_config(family.folder, num_nextn_predict_layers=0)

        assert load_model(family.folder, device=CPU).model.num_draft_heads == 0  # type: ignore[attr-defined]

    def test_nemotrons_heads_may_be_told_of_in_the_words_of_transformers_5(self, tmp_path: Path) -> None:
        """As its configuration class writes them, with an attention layer and a feed-forward."""
        family = write_nemotron(tmp_path)
        edit_config(family.folder, mtp_hybrid_override_pattern=..., mtp_layers_block_type=["full_attention", "mlp"])
        watched = Watched(load_model(family.folder, device=CPU), 1)

        check_drafts(family, watched.serve(), watched, heads=1)

    def test_the_number_of_heads_goes_by_either_name(self, tmp_path: Path) -> None:
        """What transformers 5 calls an attribute is what its file and older ones call a key."""
        folder = write_glm4(tmp_path).folder
        edit_config(folder, num_nextn_predict_layers=..., num_mtp_layers=1)

        assert load_model(folder, device=CPU).model.num_draft_heads == 1  # type: ignore[attr-defined]

    def test_half_a_head_is_an_error_that_names_what_lacks(self, family: Family) -> None:
        path, missing = family.folder / "model.safetensors", f"{family.prefixes[0]}.{family.names['project']}.weight"
        save_file({n: t for n, t in load_file(path).items() if n != missing}, path)

        with pytest.raises(CheckpointError, match=missing.replace(".", r"\.")):
            load_model(family.folder, device=CPU)

    def test_a_live_engine_takes_new_heads_and_none_without(self, family: Family) -> None:
        engine = Watched(load_model(family.folder, device=CPU), 1).engine
        path = family.folder / "model.safetensors"
        weights = load_file(path)
        engine.suspend("recompute")

        engine.load_weights(family.folder)
        save_file(without_heads(weights, family), path)
        with pytest.raises(CheckpointError, match="lacks"):
            engine.load_weights(family.folder)


def without_heads(weights: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    return {name: one for name, one in weights.items() if not name.startswith((*family.prefixes, "mtp."))}


def check_drafts(family: Family, outputs: list[RequestOutput], watched: Watched, *, heads: int) -> None:
    """Draft logits are the reference's, wherever drafts before them were right; and so is acceptance."""
    texts = {output.request_id: text_of(output) for output in outputs}
    reference = {name: [reference_logits(family, text, head) for head in range(heads)] for name, text in texts.items()}
    compared, accepted = 0, [0] * heads
    right: dict[tuple[str, int], int] = {}
    for name, known, head, logits in watched.told:
        text = texts[name]
        row = known - 2  # told of the token behind the newest, head by head
        if row >= len(reference[name][head]) or right.get((name, known), 0) < head:
            continue  # behind the end, or what it goes on from was another token
        expected = reference[name][head][row]
        assert torch.allclose(logits, expected, atol=CLOSE, rtol=0), (name, known, head)
        compared += 1
        place = known + head
        if place < len(text) and int(logits.argmax()) == text[place]:
            right[name, known] = head + 1
            accepted[head] += 1
    assert compared > 20
    told = watched.engine.counters.drafts_accepted
    for head in range(heads):
        assert accepted[head] == told[head], (head, accepted, told)
