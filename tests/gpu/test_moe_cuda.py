"""Products with experts on CUDA against plain torch in float64, alone, in captured graphs, and in a whole model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine import EngineConfig, SamplingParams
from engine.engine import Engine
from engine.kernels import TorchKernels
from engine.kernels.base import Activation
from engine.models.loader import load_model
from engine.models.moe import MoE, MoEConfig, Routing, count_expert_load
from engine.models.shapes import fill_randomly

pytest.importorskip("triton")
from engine.kernels import triton_routed as routed
from engine.kernels.experts import experts_grouped, experts_in_blocks
from engine.kernels.routing import RoutingRule
from engine.kernels.torch import relu2
from engine.kernels.triton import TritonKernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # without one, under Triton's interpreter
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 9e-4}
"""‖out - reference‖ / ‖reference‖: the inner values are rounded, each expert's result, and the sum."""
SIZES = [(8, 2, 64, 40), (16, 3, 72, 56), (128, 8, 256, 96), (4, 4, 64, 48)]
"""Experts, experts of a token, inputs, inner size; all a multiple of 8, as ``torch._grouped_mm`` needs."""


def by_grouped_mm(*arguments: Tensor, activation: Activation) -> Tensor:
    activate = routed.swiglu if activation == "swiglu" else relu2
    return experts_grouped(*arguments, activate, routed.grouped_mm, routed.combine)


def in_blocks(*arguments: Tensor, activation: Activation) -> Tensor:
    return experts_in_blocks(*arguments, lambda x: TorchKernels().activate(x, activation))


def by_pairs(*arguments: Tensor, activation: Activation) -> Tensor:
    return routed.experts_by_pairs(*arguments, activation)


WAYS: dict[str, Callable[..., Tensor]] = {"pairs": by_pairs, "grouped_mm": by_grouped_mm, "blocks": in_blocks}


def world(tokens: int, sizes: tuple[int, int, int, int], activation: Activation, dtype: torch.dtype) -> list[Tensor]:
    """x, ids, weights, up, down; expert 1 is everybody's, expert 0 is nobody's where there are enough others."""
    num_experts, top_k, inputs, inner = sizes
    generator = torch.Generator(DEVICE).manual_seed(tokens)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=DEVICE, generator=generator) * scale).to(dtype)

    wish_TX = torch.randn((tokens, num_experts), device=DEVICE, generator=generator)
    wish_TX[:, 1], wish_TX[:, 0] = 9.0, -9.0
    ids_TK = wish_TX.argsort(1, descending=True)[:, :top_k].contiguous()
    weights_TK = torch.rand((tokens, top_k), device=DEVICE, generator=generator) + 0.1
    rows = 2 * inner if activation == "swiglu" else inner
    return [
        random(tokens, inputs),
        ids_TK,
        weights_TK,
        random(num_experts, rows, inputs, scale=inputs**-0.5),
        random(num_experts, inputs, inner, scale=inner**-0.5),
    ]


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.double() if tensor.is_floating_point() else tensor for tensor in tensors]


def check(out: Tensor, reference: Tensor, *, slack: float = 1.0) -> None:
    assert out.shape == reference.shape
    error = float((out.double() - reference).norm() / reference.norm())
    assert error < slack * TOLERANCE[out.dtype], f"relative error {error:.2e}"


class TestWays:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("sizes", SIZES)
    @pytest.mark.parametrize("tokens", [1, 2, 7, 33])
    @pytest.mark.parametrize("activation", ["swiglu", "relu2"])
    def test_equal_the_reference(
        self, way: str, sizes: tuple[int, int, int, int], tokens: int, activation: Activation
    ) -> None:
        arguments = world(tokens, sizes, activation, HALF)

        out = WAYS[way](*arguments, activation=activation)

        # A square doubles its input's relative error.
        check(out, TorchKernels().experts(*wide(arguments), activation), slack=2.0 if activation == "relu2" else 1.0)

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("sizes", SIZES)
    @pytest.mark.parametrize("tokens", [1, 33])
    def test_pairs_that_are_nobodys_add_nothing(self, way: str, sizes: tuple[int, int, int, int], tokens: int) -> None:
        """As where the other experts are on other ranks."""
        x, ids, weights, up, down = world(tokens, sizes, "swiglu", HALF)
        is_here = ids % 2 == 1
        weights = torch.where(is_here, weights, 0)
        expected = TorchKernels().experts(*wide([x, ids, weights, up, down]), "swiglu")

        out = WAYS[way](x, torch.where(is_here, ids, sizes[0]), weights, up, down, activation="swiglu")

        check(out, expected)

    @pytest.mark.parametrize("way", ["pairs", "blocks"])
    @pytest.mark.parametrize("sizes", [(5, 2, 50, 33), (3, 1, 7, 101)])
    def test_sizes_that_fit_no_tile(self, way: str, sizes: tuple[int, int, int, int]) -> None:
        arguments = world(9, sizes, "swiglu", torch.float16)

        check(WAYS[way](*arguments, activation="swiglu"), TorchKernels().experts(*wide(arguments), "swiglu"))

    @pytest.mark.parametrize("way", WAYS)
    def test_two_runs_agree_in_every_bit(self, way: str) -> None:
        arguments = world(40, SIZES[1], "swiglu", HALF)

        assert torch.equal(WAYS[way](*arguments, activation="swiglu"), WAYS[way](*arguments, activation="swiglu"))

    def test_a_token_is_the_same_in_every_bit_beside_any_others_by_pairs(self) -> None:
        x, ids, *rest = world(12, SIZES[1], "swiglu", HALF)
        weights, up, down = rest
        whole = by_pairs(x, ids, weights, up, down, activation="swiglu")

        alone = by_pairs(x[5:6], ids[5:6], weights[5:6], up, down, activation="swiglu")

        assert torch.equal(whole[5:6], alone)

    def test_the_interface_takes_each_way(self) -> None:
        """64 pairs and fewer one by one; more by the grouped product, or in blocks where that cannot be had."""
        for tokens in (1, 21, 22, 300):
            arguments = world(tokens, SIZES[1], "swiglu", HALF)
            check(TritonKernels().experts(*arguments, "swiglu"), TorchKernels().experts(*wide(arguments), "swiglu"))


RULES: dict[str, RoutingRule] = {
    "softmax": RoutingRule(routing=Routing.SOFTMAX, top_k=3, renormalise=False, scaling=1.0),
    "softmax renormalised": RoutingRule(routing=Routing.SOFTMAX, top_k=8, renormalise=True, scaling=1.0),
    "one expert": RoutingRule(routing=Routing.SOFTMAX, top_k=1, renormalise=True, scaling=1.0),
    "topk-softmax": RoutingRule(routing=Routing.TOPK_SOFTMAX, top_k=6, renormalise=False, scaling=1.0),
    "sigmoid": RoutingRule(routing=Routing.SIGMOID, top_k=5, renormalise=True, scaling=2.5),
    "sigmoid as it is": RoutingRule(routing=Routing.SIGMOID, top_k=6, renormalise=False, scaling=1.0),
    "groups": RoutingRule(routing=Routing.SIGMOID, top_k=4, renormalise=True, scaling=1.0, num_groups=2, top_groups=1),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
class TestRoutes:
    @pytest.mark.parametrize("num_experts", [8, 60, 128])
    def test_equal_the_reference(self, rule: RoutingRule, num_experts: int) -> None:
        score_TX = torch.randn((40, num_experts), device=DEVICE) * 3
        bias_X = torch.randn(num_experts, device=DEVICE) if rule.routing is Routing.SIGMOID else None

        ids_TK, weights_TK = TritonKernels().route(score_TX, bias_X, rule)

        wide_bias_X = None if bias_X is None else bias_X.double()
        expected_ids_TK, expected_TK = TorchKernels().route(score_TX.double(), wide_bias_X, rule)
        assert torch.equal(ids_TK, expected_ids_TK)
        torch.testing.assert_close(weights_TK.double(), expected_TK, atol=1e-6, rtol=1e-5)
        assert ids_TK.dtype == torch.int64

    def test_of_equal_scores_the_lower_number_goes_first(self, rule: RoutingRule) -> None:
        score_TX = torch.tensor([[0.5, 2.0, 0.5, 2.0, 2.0, 0.5, 2.0, 0.5]] * 3, device=DEVICE, dtype=HALF)
        bias_X = torch.zeros(8, device=DEVICE) if rule.routing is Routing.SIGMOID else None

        ids_TK, _ = TritonKernels().route(score_TX, bias_X, rule)

        first = [1, 3, 0, 2] if rule.has_groups else [1, 3, 4, 6, 0, 2, 5, 7][: rule.top_k]
        assert ids_TK.tolist() == [first] * 3

    def test_scores_of_nan_choose_experts_that_exist_and_differ(self, rule: RoutingRule) -> None:
        score_TX = torch.randn((3, 8), device=DEVICE)
        score_TX[0], score_TX[1, 2] = float("nan"), float("nan")
        bias_X = torch.zeros(8, device=DEVICE) if rule.routing is Routing.SIGMOID else None

        ids_TK, _ = TritonKernels().route(score_TX, bias_X, rule)

        for ids in ids_TK.tolist():
            assert len(set(ids)) == rule.top_k
            assert set(ids) <= set(range(8))


class TestOnADevice:
    """What needs a GPU and cannot be had from Triton's interpreter."""

    @pytest.fixture(autouse=True)
    def _needs_cuda(self) -> None:
        if DEVICE != "cuda":
            pytest.skip("needs a CUDA device")

    @pytest.mark.parametrize("tokens", [1, 8, 9, 256])
    def test_a_captured_graph_follows_new_routes(self, tokens: int) -> None:
        """Nothing is read on the host: replayed with other ids, the graph computes those experts."""
        kernels = TritonKernels()
        static = world(tokens, SIZES[2], "swiglu", HALF)
        for _ in range(2):
            kernels.experts(*static, "swiglu")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = kernels.experts(*static, "swiglu")
        for seed in range(3):
            generator = torch.Generator(DEVICE).manual_seed(seed)
            static[0].copy_(torch.randn(static[0].shape, device=DEVICE, generator=generator))
            wish = torch.rand((tokens, 128), device=DEVICE, generator=generator)
            static[1].copy_(wish.argsort(1)[:, :8])
            graph.replay()
            check(out, TorchKernels().experts(*wide(static), "swiglu"))

    @pytest.mark.parametrize("routing", Routing)
    def test_a_layer_picks_the_experts_that_float64_picks(self, routing: Routing) -> None:
        """The router's own arithmetic: in bfloat16 scores a few tokens may sit on a border, most must not."""
        sizes = {"hidden_size": 64, "num_experts": 16, "top_k": 4, "expert_size": 32, "shared_size": 48}
        groups = {"num_groups": 4, "top_groups": 2} if routing is Routing.SIGMOID else {}
        config = MoEConfig(routing=routing, renormalise=True, **sizes, **groups)
        layer = MoE(config, TritonKernels(), dtype=HALF, device=torch.device(DEVICE))
        fill_randomly(layer)
        exact = MoE(config, TorchKernels(), dtype=torch.float64, device=torch.device(DEVICE))
        exact.load_state_dict(layer.state_dict())
        x_TE = torch.randn((200, 64), device=DEVICE).to(HALF)

        ids, expected = layer.router(x_TE)[0], exact.router(x_TE.double())[0]

        is_same_T = (ids.sort(1)[0] == expected.sort(1)[0]).all(1)
        assert is_same_T.float().mean() > 0.9
        # Scores are rounded, too, and weights are their exponentials.
        check(layer(x_TE)[is_same_T], exact(x_TE.double())[is_same_T], slack=2.5)

    def test_a_model_counts_every_token_with_graphs_and_without(self) -> None:
        loaded = load_model("shape:tiny-moe", device=torch.device(DEVICE))
        load_LX = count_expert_load(loaded.model)  # type: ignore[arg-type]
        assert load_LX is not None
        prompts = [list(range(3, 3 + n)) for n in (1, 5, 17, 60)]
        params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
        for graphs in (None, "auto"):
            config = EngineConfig(
                device="cuda", mode="legacy", graphs=graphs, max_requests=8, max_sequence_length=128, num_blocks=64
            )
            with Engine(loaded, config) as engine:
                load_LX.zero_()
                engine.generate(prompts, params, progress=False)
                assert (engine.counters.graph_hits > 0) is (graphs is not None)
            torch.cuda.synchronize()
            assert load_LX.sum(1).tolist() == [(sum(map(len, prompts)) + 8 * len(prompts)) * 2] * 2
