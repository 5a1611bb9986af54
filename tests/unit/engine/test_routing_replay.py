"""Recordings at the door and in files, weights of experts that were told, and choices on their way to a forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch import RoutingTape
from engine.device import make_device
from engine.errors import ConfigError, RequestError
from engine.kernels import TorchKernels
from engine.kernels.routing import Routing, RoutingRule, route, weights_at
from engine.models.loader import load_model
from engine.models.moe import MoE, MoEConfig, number_experts
from engine.models.shapes import fill_randomly
from engine.routing_files import load_routing, save_routing
from engine.routing_replay import RoutingRecorder, RoutingSizes, salted
from engine.table import RequestTable
from tracing.recorder import Recorder

SIZES = RoutingSizes(num_layers=2, top_k=3, num_experts=6)
PLACEMENT: dict[str, Any] = {"dtype": torch.float64, "device": torch.device("cpu")}
RULES = {
    "softmax": RoutingRule(routing=Routing.SOFTMAX, top_k=3, renormalise=False, scaling=1.0),
    "renormalised": RoutingRule(routing=Routing.SOFTMAX, top_k=3, renormalise=True, scaling=2.5),
    "topk-softmax": RoutingRule(routing=Routing.TOPK_SOFTMAX, top_k=3, renormalise=False, scaling=1.0),
    "sigmoid": RoutingRule(routing=Routing.SIGMOID, top_k=3, renormalise=True, scaling=1.5),
    "sigmoid-groups": RoutingRule(
        routing=Routing.SIGMOID, top_k=3, renormalise=False, scaling=1.0, num_groups=4, top_groups=2
    ),
}


def choices(*, seed: int = 0, tokens: int = 5, sizes: RoutingSizes = SIZES) -> Any:
    draws = np.random.default_rng(seed).random((tokens, sizes.num_layers, sizes.num_experts))
    return draws.argsort(axis=2)[:, :, : sizes.top_k].astype(np.int16)


def changed(value: int, *, at: tuple[int, int, int] = (1, 0, 2)) -> Any:
    routing = choices()
    routing[at] = value
    return routing


def scores(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(40, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


class TestSizes:
    def test_layers_of_draft_heads_do_not_count(self) -> None:
        assert RoutingSizes.of(load_model("shape:tiny-hybrid").model) == RoutingSizes(1, 2, 8)
        assert RoutingSizes.of(load_model("shipped").model) == RoutingSizes(3, 2, 8)

    def test_a_token_takes_two_bytes_for_each_choice(self) -> None:
        assert SIZES.state.bytes_per_token() == 2 * 2 * 3


class TestAtTheDoor:
    @pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64])
    def test_keeps_a_copy_in_sixteen_bits(self, dtype: Any) -> None:
        routing = choices().astype(dtype)

        kept = SIZES.checked(routing)

        assert kept.dtype == np.int16
        assert np.array_equal(kept, routing)
        assert not np.shares_memory(kept, routing)

    def test_takes_lists_and_recordings_of_no_token(self) -> None:
        assert SIZES.checked(choices().tolist()).shape == (5, 2, 3)
        assert SIZES.checked(np.zeros((0, 2, 3), dtype=np.int16)).shape == (0, 2, 3)

    @pytest.mark.parametrize(
        ("routing", "told"),
        [
            (choices()[0], r"expected \[tokens, 2 layers, 3 experts of a token\], got \(2, 3\)"),
            (choices()[:, :1], r"got \(5, 1, 3\)"),
            (choices()[:, :, :2], r"got \(5, 2, 2\)"),
            ([[[1, 2, 3]], [[1, 2]]], "expected an array"),
            ("first", r"got \(\)"),
            (choices().astype(float), "whole numbers, got float64"),
            (choices() > 2, "whole numbers, got bool"),
            (changed(6), r"must lie in \[0, 6\), got 0 to 6"),
            (changed(-1), r"must lie in \[0, 6\), got -1"),
            (choices().astype(np.int64) + 2**16, r"must lie in \[0, 6\)"),
            (changed(int(choices()[1, 0, 0])), "token 1 names an expert twice in layer 0"),
        ],
    )
    def test_refuses_what_cannot_be_replayed_and_names_it(self, routing: Any, told: str) -> None:
        with pytest.raises(RequestError, match=f"routing: .*{told}") as caught:
            SIZES.checked(routing)

        assert caught.value.field == "routing"

    def test_the_salt_is_of_all_choices_and_of_the_callers_own(self) -> None:
        salts = [
            salted("", choices()),
            salted("mine", choices()),
            salted("", choices(seed=1)),
            salted("", choices()[:4]),
        ]

        assert len({"", "mine", *salts}) == 6
        assert salted("", choices()[:, ::-1][:, ::-1]) == salts[0]


class TestFiles:
    def test_come_back_as_they_were_under_any_names(self, tmp_path: Path) -> None:
        recordings = {"request/1": choices(), "file": choices(seed=1, tokens=0), "\N{SNOWMAN}": choices(seed=2)}

        save_routing(tmp_path / "some.file", recordings)
        found = load_routing(tmp_path / "some.file")

        assert list(found) == list(recordings)
        for name, routing in recordings.items():
            assert found[name].dtype == np.int16
            assert np.array_equal(found[name], routing)

    @pytest.mark.parametrize("what", ["nothing", "text", "array", "others", "half"])
    def test_another_file_is_refused_in_one_line_that_names_it(self, what: str, tmp_path: Path) -> None:
        path = tmp_path / "recording.npz"
        save_routing(path, {"a": choices(tokens=500)})
        whole = path.read_bytes()
        path.unlink()
        if what == "text":
            path.write_text("routing")
        elif what == "array":
            with path.open("wb") as file:
                np.save(file, choices())
        elif what == "others":
            np.savez(path, routing=choices())
        elif what == "half":
            path.write_bytes(whole[: len(whole) // 2])

        with pytest.raises(ConfigError, match=r"recording.npz cannot be read as recorded routing") as caught:
            load_routing(path)

        assert "\n" not in str(caught.value)


class TestWeights:
    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
    def test_of_the_experts_that_the_router_chose_are_its_own(self, rule: str, dtype: torch.dtype) -> None:
        bias_X = torch.linspace(-0.2, 0.2, 8, dtype=torch.float64) if "sigmoid" in rule else None
        ids_TK, weights_TK = route(scores(dtype), bias_X, RULES[rule])

        assert torch.equal(weights_at(scores(dtype), ids_TK, RULES[rule]), weights_TK)

    @pytest.mark.parametrize("rule", RULES)
    def test_of_other_experts_follow_the_same_rule(self, rule: str) -> None:
        ids_TK = torch.tensor([[7, 0, 3]] * 40)

        found_TK = weights_at(scores(), ids_TK, RULES[rule])

        for score_X, found_K in zip(scores().tolist(), found_TK, strict=True):
            said = np.exp([score_X[i] for i in (7, 0, 3)])
            if RULES[rule].routing is Routing.SIGMOID:
                said = said / (1 + said)
            elif RULES[rule].routing is Routing.SOFTMAX:
                said = said / np.exp(score_X).sum()
            if RULES[rule].renormalise or RULES[rule].routing is Routing.TOPK_SOFTMAX:
                said = said / said.sum()
            assert found_K.tolist() == pytest.approx((said * RULES[rule].scaling).tolist(), rel=1e-12)


class TestLayer:
    def test_obeys_told_tokens_only_and_notes_all(self) -> None:
        layers = torch.nn.ModuleList(
            MoE(
                MoEConfig(hidden_size=16, num_experts=6, top_k=3, expert_size=10, renormalise=True),
                TorchKernels(),
                **PLACEMENT,
            )
            for _ in range(2)
        )
        fill_randomly(layers)
        number_experts(layers)
        second = layers[1]
        x_TE = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        own_TK, _ = second.router(x_TE)  # type: ignore[operator]
        given_TLK = torch.full((4, 2, 3), -1, dtype=torch.int16)
        given_TLK[1, 1] = torch.tensor([5, 0, 2])
        kept_SLK = torch.full((9, 2, 3), -7, dtype=torch.int16)

        told = second(x_TE, routing=RoutingTape(kept_SLK, torch.tensor([8, 0, 3, 5]), given_TLK))

        noted = [own_TK[0].tolist(), [5, 0, 2], own_TK[2].tolist(), own_TK[3].tolist()]
        assert kept_SLK[[8, 0, 3, 5], 1].tolist() == noted
        assert (kept_SLK[:, 0] == -7).all()
        assert (kept_SLK[[1, 2, 4, 6, 7]] == -7).all()
        free = second(x_TE)
        assert torch.equal(told[[0, 2, 3]], free[[0, 2, 3]])
        assert not torch.allclose(told[1], free[1])


class TestRecorder:
    def test_does_nothing_while_memory_is_given_back(self) -> None:
        recorder = RoutingRecorder(RequestTable(2, 2), make_device("inline"), lambda: None, Recorder(), SIZES)

        recorder.save(iter(()))
