"""The four mixers of Nemotron-H as differentiable modules, their parameters named as in its checkpoints.

Each has ``forward`` over whole sequences and ``step`` over one token a sequence with an explicit memory. The step is
slow and plain; generation uses it, and tests compare the two.

Letters: B sequences, T tokens, E hidden size, H heads, G groups or key/value heads, D head size, P Mamba head size,
S state size, C convolution channels, K convolution width, X experts, F inner size of an expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.train_shipped.architecture import Architecture
from tools.train_shipped.scan import scan_all, scan_one

Memory = tuple[Tensor, ...]
"""What a mixer remembers between steps; empty before the first."""


class Weights(nn.Module):
    """A matrix without bias, under the name ``weight``."""

    def __init__(self, rows: int, columns: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns) * (scale / math.sqrt(columns)))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class RMSNorm(nn.Module):
    """Root mean square norm with a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Convolution(nn.Module):
    """Parameters of a depthwise causal convolution, applied as a sum of shifted products.

    cuDNN's gradient of a depthwise weight takes longer than all the rest of the layer.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Convolution and SiLU; zeros before the first token."""
        length, width = x_BTC.shape[1], self.weight.shape[-1]
        padded = functional.pad(x_BTC, (0, 0, width - 1, 0))
        return self.silu_of(lambda place: padded[:, place : place + length])

    def silu_of(self, column: Callable[[int], Tensor]) -> Tensor:
        """SiLU of the weighted sum over ``column(place)``, the oldest first."""
        weight_KC = self.weight[:, 0].T
        total = sum((column(place) * weight for place, weight in enumerate(weight_KC)), self.bias)
        return functional.silu(total)


class MambaMixer(nn.Module):
    """Projection, convolution, state-space scan, gated norm, projection."""

    def __init__(self, arch: Architecture, out_scale: float) -> None:
        super().__init__()
        self.arch = arch
        inner, heads = arch.inner_size, arch.mamba_heads
        self.in_proj = Weights(inner + arch.conv_channels + heads, arch.hidden_size)
        self.conv1d = Convolution(arch.conv_channels, arch.conv_width)
        # Heads that forget at different speeds: rates over 1..16 and time steps over 0.001..0.1, as Mamba2 begins.
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        dt = torch.empty(heads).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = RMSNorm(inner, arch.norm_eps)
        self.out_proj = Weights(arch.hidden_size, inner, scale=out_scale)

    def forward(self, x_BTE: Tensor) -> Tensor:
        gate, mixed, dt = self._project(x_BTE)
        x, B, C = self._parts(self.conv1d(mixed).to(mixed.dtype))
        with torch.autocast(x.device.type, enabled=False):
            y_BTHP = scan_all(x, dt, -self.A_log.exp(), B, C, self.D, self.arch.chunk_size)
        return self._gated(y_BTHP, gate)

    def step(self, x_BE: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        gate, mixed_BC, dt = self._project(x_BE)
        if not memory:
            arch, batch = self.arch, x_BE.shape[0]
            size = (batch, arch.mamba_heads, arch.mamba_head_dim, arch.state_size)
            columns = mixed_BC.new_zeros(batch, arch.conv_width - 1, arch.conv_channels)
            memory = (columns, torch.zeros(size, dtype=dt.dtype, device=dt.device))
        columns_BKC, state = memory
        columns_BKC = torch.cat([columns_BKC, mixed_BC[:, None]], dim=1)
        x, B, C = self._parts(self.conv1d.silu_of(lambda place: columns_BKC[:, place]).to(mixed_BC.dtype))
        y_BHP, state = scan_one(state, x, dt, -self.A_log.exp(), B, C, self.D)
        return self._gated(y_BHP, gate), (columns_BKC[:, 1:], state)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        arch = self.arch
        gate, mixed, dt = self.in_proj(x).split((arch.inner_size, arch.conv_channels, arch.mamba_heads), dim=-1)
        return gate, mixed, functional.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias)

    def _parts(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        arch = self.arch
        in_groups = arch.num_groups * arch.state_size
        x, B, C = mixed.split((arch.inner_size, in_groups, in_groups), dim=-1)
        groups = (arch.num_groups, arch.state_size)
        return x.unflatten(-1, (arch.mamba_heads, -1)), B.unflatten(-1, groups), C.unflatten(-1, groups)

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        """Norm of ``y * silu(gate)`` over each group's channels, then the projection back."""
        y = y.flatten(-2) * functional.silu(gate.to(y.dtype))
        grouped = y.unflatten(-1, (self.arch.num_groups, -1))
        normed = functional.rms_norm(grouped, grouped.shape[-1:], None, self.norm.eps).flatten(-2)
        result: Tensor = self.out_proj(normed * self.norm.weight)
        return result


class AttentionMixer(nn.Module):
    """Grouped-query attention without positions."""

    def __init__(self, arch: Architecture, out_scale: float) -> None:
        super().__init__()
        self.head_dim = arch.head_dim
        self.q_proj = Weights(arch.num_heads * arch.head_dim, arch.hidden_size)
        self.k_proj = Weights(arch.num_kv_heads * arch.head_dim, arch.hidden_size)
        self.v_proj = Weights(arch.num_kv_heads * arch.head_dim, arch.hidden_size)
        self.o_proj = Weights(arch.hidden_size, arch.num_heads * arch.head_dim, scale=out_scale)

    def _heads(self, x_BTE: Tensor) -> list[Tensor]:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return [project(x_BTE).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in projections]

    def forward(self, x_BTE: Tensor) -> Tensor:
        q_BHTD, k_BGTD, v_BGTD = self._heads(x_BTE)
        y_BHTD = functional.scaled_dot_product_attention(q_BHTD, k_BGTD, v_BGTD, is_causal=True, enable_gqa=True)
        result: Tensor = self.o_proj(y_BHTD.transpose(1, 2).flatten(2))
        return result

    def step(self, x_BE: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        q, k, v = self._heads(x_BE[:, None])
        if memory:
            k, v = torch.cat([memory[0], k], dim=2), torch.cat([memory[1], v], dim=2)
        y_BH1D = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o_proj(y_BH1D.transpose(1, 2).flatten(2))[:, 0], (k, v)


class FeedForward(nn.Module):
    """down(relu(up x)^2)."""

    def __init__(self, arch: Architecture, size: int, out_scale: float) -> None:
        super().__init__()
        self.up_proj = Weights(size, arch.hidden_size)
        self.down_proj = Weights(arch.hidden_size, size, scale=out_scale)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(functional.relu(self.up_proj(x)).square())
        return result

    def step(self, x_BE: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return self(x_BE), memory


class Router(nn.Module):
    """Sigmoid scores; the best of score + correction bias, weighted by score alone, weights summing to one."""

    e_score_correction_bias: Tensor
    load_X: Tensor

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.top_k = arch.top_k
        self.weight = nn.Parameter(torch.randn(arch.num_experts, arch.hidden_size) / math.sqrt(arch.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(arch.num_experts))
        self.register_buffer("load_X", torch.zeros(arch.num_experts), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Weights of all experts [..., X], zero for those not chosen; counts the chosen in ``load_X``."""
        with torch.autocast(x.device.type, enabled=False):
            score = functional.linear(x.to(self.weight.dtype), self.weight).sigmoid()
        ids = (score.detach() + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        chosen = torch.zeros_like(score).scatter(-1, ids, 1.0)
        if self.training:
            self.load_X += chosen.detach().flatten(0, -2).sum(0)
        kept = score * chosen
        return kept / (kept.sum(-1, keepdim=True) + 1e-20)

    @torch.no_grad()
    def balance(self, rate: float) -> Tensor:
        """Make experts with less than their share likelier, the others less so; gives the shares, counts anew."""
        share_X = self.load_X / self.load_X.sum().clamp(min=1)
        self.e_score_correction_bias += rate * torch.sign(share_X.mean() - share_X)
        self.load_X.zero_()
        return share_X


class Experts(nn.Module):
    """Weights of all routed experts; checkpoints hold a tensor an expert."""

    def __init__(self, arch: Architecture, out_scale: float) -> None:
        super().__init__()
        experts, hidden, size = arch.num_experts, arch.hidden_size, arch.expert_size
        self.up_proj = nn.Parameter(torch.randn(experts, size, hidden) / math.sqrt(hidden))
        self.down_proj = nn.Parameter(torch.randn(experts, hidden, size) * (out_scale / math.sqrt(size)))


class ExpertMixer(nn.Module):
    """Routed experts beside a shared one. All experts are computed and weighted, most by zero: two large products."""

    def __init__(self, arch: Architecture, out_scale: float) -> None:
        super().__init__()
        self.gate = Router(arch)
        self.experts = Experts(arch, out_scale)
        self.shared_experts = FeedForward(arch, arch.shared_size, out_scale)

    def forward(self, x: Tensor) -> Tensor:
        weight_X = self.gate(x)
        up_XFE, down_XEF = self.experts.up_proj, self.experts.down_proj
        inner = functional.relu(functional.linear(x, up_XFE.flatten(0, 1))).square()
        inner = inner.unflatten(-1, (up_XFE.shape[0], -1)) * weight_X[..., None].to(inner.dtype)
        routed = functional.linear(inner.flatten(-2), down_XEF.transpose(0, 1).flatten(1))
        result: Tensor = routed + self.shared_experts(x)
        return result

    def step(self, x_BE: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return self(x_BE), memory


def make_mixer(letter: str, arch: Architecture) -> MambaMixer | AttentionMixer | FeedForward | ExpertMixer:
    """The mixer that a letter of the pattern stands for; what it adds to the stream shrinks with the depth."""
    out_scale = 1 / math.sqrt(len(arch.pattern))
    if letter == "M":
        return MambaMixer(arch, out_scale)
    if letter == "*":
        return AttentionMixer(arch, out_scale)
    if letter == "-":
        return FeedForward(arch, arch.mlp_size, out_scale)
    return ExpertMixer(arch, out_scale)
