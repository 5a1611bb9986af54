"""Routers against straight-line references: who is chosen, with which weight, and who goes first of equals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.kernels import TorchKernels
from engine.kernels.routing import first_largest
from engine.models.loader import load_model
from engine.models.moe import MoE, MoEConfig, MoENames, Router, Routing, count_expert_load, counted
from engine.models.shapes import fill_randomly

HIDDEN, EXPERTS, TOP_K = 16, 12, 3
PLACEMENT: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}


def config(**changes: Any) -> MoEConfig:
    sizes = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K, "expert_size": 10}
    return MoEConfig(**{**sizes, **changes})


def router(seed: int = 1, **changes: Any) -> Router:
    made = Router(config(**changes), TorchKernels(), **PLACEMENT)
    generator = torch.Generator().manual_seed(seed)
    made.weight.normal_(0.0, 0.5, generator=generator)
    if made.correction_bias is not None:
        made.correction_bias.normal_(0.0, 0.3, generator=generator)
    return made


def router_that_scores(scores: list[float], bias: list[float] | None = None, **changes: Any) -> Router:
    """Of one token (1, 0, 0, ..): its score of expert x is ``scores[x]``."""
    made = router(num_experts=len(scores), **changes)
    made.weight.zero_()
    made.weight[:, 0] = torch.tensor(scores)
    if made.correction_bias is not None:
        made.correction_bias.copy_(torch.tensor(bias or [0.0] * len(scores)))
    return made


def one_token() -> Tensor:
    return torch.eye(HIDDEN, dtype=torch.float64)[:1]


def tokens(count: int = 50) -> Tensor:
    return torch.randn((count, HIDDEN), generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def by_hand(made: Router, x_E: Tensor) -> dict[int, float]:
    """Expert to weight of one token, in Python numbers."""
    setting = made.config
    score = [float(row @ x_E) for row in made.weight.double()]
    number = range(setting.num_experts)
    exp = [math.exp(value) for value in score]
    if setting.routing is Routing.SIGMOID:
        assert made.correction_bias is not None
        plain = [value / (1.0 + value) for value in exp]
        wish = [plain[i] + float(made.correction_bias[i]) for i in number]
        size = setting.num_experts // setting.num_groups
        groups = [range(begin, begin + size) for begin in range(0, setting.num_experts, size)]
        value = [sum(sorted((wish[i] for i in group), reverse=True)[:2]) for group in groups]
        best = sorted(range(len(groups)), key=lambda g: -value[g])[: setting.top_groups]
        allowed = [i for g in best for i in groups[g]]
        chosen = sorted(allowed, key=lambda i: -wish[i])[: setting.top_k]
        weights = {i: plain[i] for i in chosen}
    else:
        chosen = sorted(number, key=lambda i: -score[i])[: setting.top_k]
        among = chosen if setting.routing is Routing.TOPK_SOFTMAX else list(number)
        weights = {i: exp[i] / sum(exp[j] for j in among) for i in chosen}
    if setting.renormalise:
        total = sum(weights.values())
        weights = {i: weight / total for i, weight in weights.items()}
    return {i: weight * setting.scaling for i, weight in weights.items()}


SETTINGS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax renormalised": {"renormalise": True},
    "softmax of one": {"top_k": 1},
    "softmax of all": {"top_k": EXPERTS},
    "topk then softmax": {"routing": Routing.TOPK_SOFTMAX},
    "sigmoid": {"routing": Routing.SIGMOID},
    "sigmoid renormalised": {"routing": Routing.SIGMOID, "renormalise": True, "scaling": 2.5},
    "sigmoid with groups": {"routing": Routing.SIGMOID, "num_groups": 4, "top_groups": 2},
    "sigmoid with one group": {"routing": Routing.SIGMOID, "num_groups": 3, "top_groups": 1, "renormalise": True},
    "sigmoid with all groups": {"routing": Routing.SIGMOID, "num_groups": 4, "top_groups": 4, "scaling": 0.5},
}


class TestRouter:
    @pytest.mark.parametrize("setting", SETTINGS)
    def test_picks_and_weighs_as_by_hand(self, setting: str) -> None:
        made = router(**SETTINGS[setting])

        ids_TK, weights_TK = made(tokens())

        for x_E, ids, weights in zip(tokens(), ids_TK.tolist(), weights_TK.tolist(), strict=True):
            expected = by_hand(made, x_E)
            assert ids == list(expected)
            assert weights == pytest.approx(list(expected.values()), abs=1e-12)

    @pytest.mark.parametrize("routing", Routing)
    def test_of_equal_scores_the_lower_number_goes_first(self, routing: Routing) -> None:
        made = router_that_scores([0.1, 0.7, 0.2, 0.7, 0.2, 0.7, 0.2, 0.7] * 8, routing=routing, top_k=6)

        ids_TK, _ = made(one_token().expand(3, -1))

        assert ids_TK.tolist() == [[1, 3, 5, 7, 9, 11]] * 3

    def test_of_equal_groups_the_lower_number_goes_first(self) -> None:
        made = router_that_scores(
            [0.0, 0.5, 0.5, 0.0, 0.5, 0.0], routing=Routing.SIGMOID, num_groups=3, top_groups=1, top_k=2
        )

        assert made(one_token())[0].tolist() == [[1, 0]]

    def test_the_correction_bias_changes_the_choice_and_not_the_weight(self) -> None:
        scores, setting = [2.0, 1.0, 0.0, -1.0], {"routing": Routing.SIGMOID, "top_k": 2}
        plain = router_that_scores(scores, **setting)
        pushed = router_that_scores(scores, [-5.0, 0.0, 0.0, 5.0], **setting)
        sigmoid = torch.tensor(scores, dtype=torch.float64).sigmoid()

        assert plain(one_token())[0].tolist() == [[0, 1]]
        ids_TK, weights_TK = pushed(one_token())

        assert ids_TK.tolist() == [[3, 1]]
        torch.testing.assert_close(weights_TK[0], sigmoid[[3, 1]])

    def test_a_group_is_worth_its_two_best_and_not_its_best(self) -> None:
        made = router_that_scores(
            [4.0, -9.0, -9.0, 1.0, 1.0, -9.0], routing=Routing.SIGMOID, num_groups=2, top_groups=1, top_k=2
        )

        assert made(one_token())[0].tolist() == [[3, 4]]

    def test_a_sigmoid_router_keeps_float32_where_the_model_has_less(self) -> None:
        """A correction bias of 1.001 and one of 1.003 are one number in bfloat16."""
        made = Router(config(routing=Routing.SIGMOID), TorchKernels(), dtype=torch.bfloat16, device=torch.device("cpu"))
        assert made.correction_bias is not None
        made.weight.zero_()
        made.correction_bias.copy_(1.0 + torch.arange(EXPERTS) * 1e-3)

        ids_TK, weights_TK = made(torch.ones((1, HIDDEN), dtype=torch.bfloat16))

        assert ids_TK.tolist() == [[11, 10, 9]]
        assert weights_TK.dtype == torch.float32

    def test_nothing_is_divided_by_zero(self) -> None:
        made = router_that_scores([-800.0] * 4, routing=Routing.SIGMOID, renormalise=True, top_k=2)

        assert made(one_token())[1].tolist() == [[0.0, 0.0]]

    def test_padding_of_nan_gets_experts_of_its_own_and_leaves_the_others_alone(self) -> None:
        for setting in SETTINGS.values():
            made, x_TE = router(**setting), tokens(6)
            expected = made(x_TE)[0]
            x_TE[4] = float("nan")

            ids_TK, _ = made(x_TE)

            assert torch.equal(ids_TK[[0, 1, 2, 3, 5]], expected[[0, 1, 2, 3, 5]])
            assert ((ids_TK[4] >= 0) & (ids_TK[4] < EXPERTS)).all()
            assert len(set(ids_TK[4].tolist())) == made.config.top_k


def test_the_first_of_many_equals_are_taken_in_order() -> None:
    values, places = first_largest(torch.zeros(4, 1000), 5)

    assert places.tolist() == [[0, 1, 2, 3, 4]] * 4
    assert values.tolist() == [[0.0] * 5] * 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"top_k": 13}, "13 experts a token of 12 cannot be"),
        ({"top_k": 0}, "0 experts a token of 12 cannot be"),
        ({"routing": Routing.SIGMOID, "num_groups": 5}, "12 experts, n_group 5 and topk_group 1 do not fit"),
        ({"routing": Routing.SIGMOID, "num_groups": 4, "top_groups": 5}, "n_group 4 and topk_group 5 do not fit"),
        ({"routing": Routing.SIGMOID, "num_groups": 6}, "1 groups of 2 experts are too few for 3 a token"),
        ({"routing": Routing.SIGMOID, "num_groups": 12, "top_groups": 4}, "groups of 1 experts are too few"),
        ({"num_groups": 2}, "n_group must be 1 for this router, got 2"),
    ],
)
def test_sizes_that_cannot_be_routed_are_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        config(**changes)


class TestLayer:
    SETTINGS: tuple[dict[str, Any], ...] = (
        {},
        {"activation": "relu2", "shared_size": 14, "has_bias": True, "latent_size": 6, "routing": Routing.SIGMOID},
        {"shared_size": 14, "is_shared_gated": True},
        {"shared_size": 8, "routing": Routing.TOPK_SOFTMAX, "latent_size": 20},
    )

    @pytest.mark.parametrize("setting", SETTINGS, ids=str)
    @pytest.mark.parametrize("count", [1, 3, 40])
    def test_equals_the_formula(self, setting: dict[str, Any], count: int) -> None:
        layer = MoE(config(**setting), TorchKernels(), **PLACEMENT)
        generator = torch.Generator().manual_seed(4)
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.4, generator=generator)
        x_TE = tokens(count)

        found = layer(x_TE)

        for row, x_E in zip(found, x_TE, strict=True):
            torch.testing.assert_close(row, layer_by_hand(layer, x_E))

    def test_weights_keep_a_branch_at_its_size(self) -> None:
        """An expert's matrices are filled by the number of their inputs, not of experts or rows."""
        layer = MoE(config(num_experts=50, hidden_size=64, expert_size=200), TorchKernels(), **PLACEMENT)

        fill_randomly(layer)

        assert layer.experts.up.shape == (50, 400, 64)
        assert float(layer.experts.up.std()) == pytest.approx(64**-0.5, rel=0.02)
        assert float(layer.experts.down.std()) == pytest.approx(200**-0.5, rel=0.02)

    def test_a_shape_has_the_same_weights_in_every_run(self) -> None:
        one, other = (load_model("shape:tiny-moe", device=torch.device("cpu")).model for _ in range(2))

        for (name, mine), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):  # type: ignore[attr-defined]
            assert torch.equal(mine, theirs), name

    def test_every_parameter_has_a_place_in_the_checkpoint(self) -> None:
        for setting in self.SETTINGS:
            layer = MoE(config(**setting), TorchKernels(), MoENames(up=_ups(setting)), **PLACEMENT)
            places = layer.targets("layer")
            size = sum(parameter.numel() for parameter in layer.parameters())
            assert sum(target.numel() for target in places.values()) == size
            for whole, (target, stands_for) in layer.fused("layer").items():
                assert whole not in places
                assert sum(places[name].numel() for name in stands_for) == target.numel()


def _ups(setting: dict[str, Any]) -> tuple[str, ...]:
    is_gated = setting.get("activation", "swiglu") == "swiglu"
    return ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight") if is_gated else ("experts.{}.up_proj.weight",)


def layer_by_hand(layer: MoE, x_E: Tensor) -> Tensor:
    def feed(x: Tensor, up: Tensor, down: Tensor, bias: Tensor | None = None) -> Tensor:
        inner = up @ x if bias is None else up @ x + bias
        if layer.config.activation == "relu2":
            return down @ inner.clamp(min=0.0) ** 2
        gate, other = inner.chunk(2)
        return down @ (gate * gate.sigmoid() * other)

    def linear(part: Any, x: Tensor) -> Tensor:
        return x if part is None else part.weight @ x + (0.0 if part.bias is None else part.bias)

    x_I, experts = linear(layer.latent_in, x_E), layer.experts
    weights = by_hand(layer.router, x_E)
    routed = sum(w * feed(x_I, experts.up[i], experts.down[i]) for i, w in weights.items())
    assert isinstance(routed, Tensor)
    out_E = linear(layer.latent_out, routed)
    if layer.shared is None:
        return out_E
    shared = feed(x_E, layer.shared.up.weight, layer.shared.down.weight, layer.shared.up.bias)
    if layer.shared.down.bias is not None:
        shared = shared + layer.shared.down.bias
    return out_E + (shared if layer.shared.gate is None else (layer.shared.gate @ x_E).sigmoid() * shared)


class TestLoad:
    def test_counts_real_tokens_of_every_expert(self) -> None:
        ids_TK = torch.tensor([[0, 2], [2, 3], [1, 2], [3, 0]])
        load_X = torch.tensor([10, 0, 0, 0, 0])

        again = counted(load_X, ids_TK, torch.tensor([True, True, False, True]))

        assert torch.equal(again, ids_TK)
        assert load_X.tolist() == [12, 0, 2, 2, 0]
        counted(load_X, ids_TK, None)
        assert load_X.tolist() == [14, 1, 5, 4, 0]

    def test_layers_write_to_rows_of_one_tensor_from_zero(self) -> None:
        layers = [MoE(config(num_experts=count), TorchKernels(), **PLACEMENT) for count in (12, 5)]
        model = torch.nn.ModuleList(layers)
        fill_randomly(model)
        load_LX = count_expert_load(model)
        assert load_LX is not None

        for layer in layers:
            layer(tokens(7))

        assert load_LX.shape == (2, 12)
        assert load_LX.sum(1).tolist() == [21, 21]
        assert load_LX[1, 5:].sum() == 0
        assert count_expert_load(model, is_on=False) is None
        layers[0](tokens(7))
        assert load_LX.sum(1).tolist() == [21, 21]
        assert all("load" not in name for name in model.state_dict())
