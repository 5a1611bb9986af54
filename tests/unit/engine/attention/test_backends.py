"""Which attention backend a name means on which machine, and what is said where it cannot run."""

from __future__ import annotations

import pytest
import torch

from engine.attention import TorchAttention, backend_name, backends, make_attention
from engine.errors import ConfigError


@pytest.fixture
def has_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: object())


@pytest.fixture
def lacks_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None)


class TestBackendName:
    @pytest.mark.usefixtures("has_triton")
    @pytest.mark.parametrize(
        ("device", "dtype", "expected"),
        [
            ("cuda", torch.bfloat16, "triton"),
            ("cuda", torch.float16, "triton"),
            ("cuda", torch.float32, "torch"),
            ("cuda", torch.float64, "torch"),
            ("cpu", torch.bfloat16, "torch"),
        ],
    )
    def test_auto_is_the_fastest_that_runs(self, device: str, dtype: torch.dtype, expected: str) -> None:
        assert backend_name("auto", device, dtype) == expected

    @pytest.mark.usefixtures("lacks_triton")
    def test_auto_does_without_a_missing_package(self) -> None:
        assert backend_name("auto", "cuda", torch.bfloat16) == "torch"

    def test_torch_runs_everywhere(self) -> None:
        assert backend_name("torch", "cuda", torch.bfloat16) == "torch"
        assert isinstance(make_attention("torch", "cpu"), TorchAttention)

    @pytest.mark.usefixtures("lacks_triton")
    @pytest.mark.parametrize("name", ["triton", "flashinfer"])
    def test_a_missing_package_asked_for_by_name_is_an_error_with_its_remedy(self, name: str) -> None:
        with pytest.raises(ConfigError, match=rf"attention_backend='{name}' needs the package triton.*pip install"):
            backend_name(name, "cuda", torch.bfloat16)

    def test_flashinfer_alone_may_be_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backends, "find_spec", lambda name: None if name == "flashinfer" else object())

        assert backend_name("auto", "cuda", torch.bfloat16) == "triton"
        with pytest.raises(ConfigError, match=r"needs the package flashinfer; .*pip install flashinfer-python, or use"):
            make_attention("flashinfer", "cuda", torch.bfloat16)

    @pytest.mark.usefixtures("has_triton")
    @pytest.mark.parametrize(
        ("device", "dtype", "message"),
        [
            ("cpu", torch.bfloat16, "needs device='cuda', got 'cpu'.*attention_backend='torch'"),
            ("cuda", torch.float32, "needs dtype 'bfloat16' or 'float16', got 'float32'.*attention_backend='torch'"),
        ],
    )
    def test_where_it_cannot_run_the_message_says_why(self, device: str, dtype: torch.dtype, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            make_attention("triton", device, dtype)
