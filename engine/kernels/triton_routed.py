"""How tokens' products with their experts are cut into programs and launched. For bfloat16 and float16 on CUDA.

Letters: T tokens, K experts of a token, S = T K pairs, X experts, I inputs and outputs of an expert, U rows of its
first projection, F its inner size.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from engine.kernels import routing, triton_experts
from engine.kernels.base import Activation
from engine.kernels.experts import experts_grouped, experts_in_blocks
from engine.kernels.routing import Routing, RoutingRule
from engine.kernels.triton_elementwise import relu2_kernel, swiglu_kernel
from engine.kernels.triton_products import overlapped, power_of_two

_MOST_EXPERTS = 1024
"""Whose scores one program holds."""
MOST_PAIRS = 64
"""Pairs that are computed one by one. With more, many share an expert, whose weights are then read once for all."""
_ALIGNED = 8
"""Rows of two-byte elements whose length is a multiple of this begin where ``torch._grouped_mm`` can read them."""


def route(score_TX: Tensor, bias_X: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
    """See :meth:`engine.kernels.base.Kernels.route`: in one kernel, but for groups."""
    num_tokens, num_experts = score_TX.shape
    is_narrow = score_TX.dtype != torch.float64
    if rule.has_groups or num_experts > _MOST_EXPERTS or not is_narrow:
        return routing.route(score_TX, bias_X, rule)
    assert (bias_X is None) is (rule.routing is not Routing.SIGMOID), "a sigmoid router has a correction bias"
    ids_TK = torch.empty((num_tokens, rule.top_k), dtype=torch.int64, device=score_TX.device)
    weights_TK = torch.empty((num_tokens, rule.top_k), dtype=torch.float32, device=score_TX.device)
    triton_experts.route_kernel[(num_tokens,)](
        score_TX.contiguous(),
        bias_X,
        ids_TK,
        weights_TK,
        rule.floor,
        rule.scaling,
        EXPERTS=num_experts,
        TOP_K=rule.top_k,
        KIND=rule.routing.value,
        RENORMALISE=rule.renormalise,
        BLOCK_X=power_of_two(num_experts),
        BLOCK_K=power_of_two(rule.top_k),
        num_warps=1 if num_experts <= 256 else 4,
        **overlapped(),
    )
    return ids_TK, weights_TK


def experts(
    x_TI: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_XUI: Tensor, down_XIF: Tensor, activation: Activation
) -> Tensor:
    """See :meth:`engine.kernels.base.Kernels.experts`: by the fastest of the ways that can compute it."""
    if ids_TK.numel() <= MOST_PAIRS:
        return experts_by_pairs(x_TI, ids_TK, weights_TK, up_XUI, down_XIF, activation)
    activate = swiglu if activation == "swiglu" else relu2
    arguments = (x_TI, ids_TK, weights_TK, up_XUI, down_XIF, activate)
    sizes = (up_XUI.shape[2], down_XIF.shape[2])
    if x_TI.dtype == torch.bfloat16 and has_grouped_mm() and not any(size % _ALIGNED for size in sizes):
        return experts_grouped(*arguments, grouped_mm, combine)
    return experts_in_blocks(*arguments)


@cache
def has_grouped_mm() -> bool:
    """Whether ``torch._grouped_mm`` is one kernel; elsewhere it reads the groups' ends on the host."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def grouped_mm(rows_SA: Tensor, matrix_XAB: Tensor, end_X: Tensor) -> Tensor:
    """[S, B]: rows [end[x - 1], end[x]) times matrix x."""
    out_SB: Tensor = torch._grouped_mm(rows_SA, matrix_XAB, offs=end_X)
    return out_SB


def experts_by_pairs(
    x_TI: Tensor, ids_TK: Tensor, weights_TK: Tensor, up_XUI: Tensor, down_XIF: Tensor, activation: Activation
) -> Tensor:
    """Every pair by programs of its own, which find their expert's weights by its number: nothing is sorted."""
    (num_tokens, top_k), outputs, size = ids_TK.shape, down_XIF.shape[1], down_XIF.shape[2]
    x_TI, ids_TK, weights_TK = x_TI.contiguous(), ids_TK.contiguous(), weights_TK.contiguous()
    assert up_XUI.is_contiguous(), "weights are addressed by their place in a contiguous tensor"
    assert down_XIF.is_contiguous(), "weights are addressed by their place in a contiguous tensor"
    inner_SF = torch.empty((num_tokens * top_k, size), dtype=x_TI.dtype, device=x_TI.device)
    out_TI = torch.empty((num_tokens, outputs), dtype=x_TI.dtype, device=x_TI.device)
    block_n, block_k = 4, min(512, power_of_two(up_XUI.shape[2]))
    triton_experts.up_kernel[(-(-size // block_n), num_tokens * top_k)](
        x_TI,
        ids_TK,
        up_XUI,
        inner_SF,
        up_XUI.shape[0],
        INPUTS=up_XUI.shape[2],
        SIZE=size,
        TOP_K=top_k,
        IS_SWIGLU=activation == "swiglu",
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        **overlapped(),
    )
    block_n, block_k = 8, min(512, power_of_two(size))
    triton_experts.down_kernel[(-(-outputs // block_n), num_tokens)](
        inner_SF,
        ids_TK,
        weights_TK,
        down_XIF,
        out_TI,
        up_XUI.shape[0],
        OUTPUTS=outputs,
        SIZE=size,
        TOP_K=top_k,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=1,
        **overlapped(),
    )
    return out_TI


def combine(rows_SI: Tensor, place_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """As :func:`engine.kernels.experts.combine`, in one kernel."""
    (num_tokens, top_k), outputs = place_TK.shape, rows_SI.shape[1]
    out_TI = torch.empty((num_tokens, outputs), dtype=rows_SI.dtype, device=rows_SI.device)
    block = min(1024, power_of_two(outputs))
    triton_experts.combine_kernel[(num_tokens, -(-outputs // block))](
        rows_SI.contiguous(),
        place_TK.contiguous(),
        weights_TK.contiguous(),
        out_TI,
        OUTPUTS=outputs,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=4,
        **overlapped(),
    )
    return out_TI


def swiglu(gate_up: Tensor) -> Tensor:
    """SiLU of the first half of the last dimension times the second half."""
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    swiglu_kernel[(out.numel() // size, -(-size // block))](
        gate_up.contiguous(), out, SIZE=size, BLOCK=block, num_warps=4, **overlapped()
    )
    return out


def relu2(x: Tensor) -> Tensor:
    """The square of what is positive."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = 1024
    relu2_kernel[(-(-out.numel() // block),)](
        x.contiguous(), out, out.numel(), BLOCK=block, num_warps=4, **overlapped()
    )
    return out
