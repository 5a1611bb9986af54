"""Which state-space backend is made where, and what is said where one cannot be."""

from __future__ import annotations

import pytest
import torch

from engine.batch import BatchShape
from engine.errors import ConfigError
from engine.ssm import make_ssm, ssm_name
from engine.ssm.plan import chunk_size


def test_auto_is_torch_on_the_cpu_and_in_float64() -> None:
    assert make_ssm("auto", "cpu", torch.bfloat16).name == "torch"
    assert ssm_name("auto", "cuda", torch.float64) == "torch"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "message"),
    [
        ("cudnn", "cuda", torch.bfloat16, "must be one of auto, torch"),
        ("triton", "cpu", torch.bfloat16, "device='cuda'"),
        ("mamba_ssm", "cpu", torch.float32, "device='cuda'"),
        ("triton", "cuda", torch.float64, "float64"),
    ],
)
def test_a_backend_that_cannot_run_says_why(name: str, device: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_ssm(name, device, dtype)


@pytest.mark.parametrize("longest", [1, 2, 5, 63, 64, 65, 500])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_there_are_chunks_for_every_way_to_share_out_the_tokens(longest: int, rows: int) -> None:
    for tokens in {longest, longest + 3, rows * longest}:
        shape = BatchShape(num_tokens=tokens, num_decode=0, num_prefill=rows, max_query_len=longest, num_kv_blocks=1)
        size, count = chunk_size(shape)
        whole, rest = divmod(tokens, longest)
        greedy = [longest] * min(whole, rows) + [min(rest, longest)]
        spread = [min(longest, max(1, tokens // rows + 1))] * min(rows, tokens)
        for lengths in (greedy[:rows], [1] * min(rows, tokens), spread):
            if sum(lengths) <= tokens:
                assert sum(-(-length // size) for length in lengths) <= count
