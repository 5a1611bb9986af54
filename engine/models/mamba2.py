"""The Mamba2 mixer: a projection, a short convolution, a state-space recurrence, a gated norm and a projection back.

Letters: T tokens, E hidden size, H heads, P head size, I = H P, G groups, S state size, C = I + 2 G S convolution
channels, K convolution width, W tokens of a replayed row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor, nn

from engine.batch import ForwardBatch
from engine.errors import CheckpointError
from engine.kernels import Kernels
from engine.models.base import PLAIN_STATES, LayerCache, SlotState, StateOptions
from engine.models.parts import Linear, Placement, RMSNorm, empty, split_targets
from engine.ssm.base import NO_LIMITS, KeptInputs, MixedParts, MixerWeights, ScanWeights, StateSpace


@dataclass(frozen=True, slots=True, kw_only=True)
class MixerConfig:
    """Sizes and switches of all Mamba2 layers of a model."""

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    """Head h takes B and C of group h // (num_heads / num_groups); the gated norm is over a group's channels."""
    state_size: int
    conv_width: int = 4
    conv_bias: bool = True
    proj_bias: bool = False
    """Of both projections."""
    norm_eps: float = 1e-5
    dt_limits: tuple[float, float] = NO_LIMITS
    """Least and greatest time step, in steps of one token as in whole prompts: transformers keeps them in the latter
    only, and for some families puts ``time_step_min`` in their place, against the released code."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_groups:
            raise CheckpointError(
                f"config.json: the number of groups ({self.num_groups}) must divide that of heads ({self.num_heads})"
            )
        if self.conv_width < 2:
            raise CheckpointError(f"config.json: the convolution must be 2 wide at least, got {self.conv_width}")

    @property
    def inner_size(self) -> int:
        """I."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    def slot_state(self, dtype: torch.dtype, options: StateOptions = PLAIN_STATES) -> SlotState:
        """What one layer remembers for each row.

        Convolution inputs are kept as they come. The SSM state is float32 whatever the activations unless ``options``
        say otherwise, as it adds up small steps over thousands of tokens; float64 in float64 models. For replay there
        are W - 1 more inputs of the convolution, and what the recurrence read of W tokens (:class:`KeptInputs`).
        """
        heads, width = self.num_heads, options.replay_width
        history = self.conv_width - 1 + max(0, width - 1)
        shapes: tuple[tuple[int, ...], ...] = (
            (self.conv_channels, history),
            (heads, self.head_dim, self.state_size),
        )
        if width:
            shapes += ((width, heads, self.head_dim), (width, heads), (width, self.num_groups, self.state_size))
        exact = options.dtype or exact_dtype(dtype)
        return SlotState(shapes=shapes, dtypes=(dtype, exact, *[dtype] * (len(shapes) - 2)))


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of states and of the parameters that exponentials are taken of."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Mamba2Mixer(nn.Module):
    """One layer's mixer.

    ``a_log``, ``d`` and ``dt_bias`` are float32 whatever the other weights (float64 in float64 models): a checkpoint in
    bfloat16 loses nothing by it, and one that keeps them in float32, as the released code does, is not rounded.
    """

    def __init__(self, config: MixerConfig, ssm: StateSpace, kernels: Kernels, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.config, self.ssm, self.kernels = config, ssm, kernels
        hidden, inner, channels, heads = config.hidden_size, config.inner_size, config.conv_channels, config.num_heads
        exact: Placement = {**placement, "dtype": exact_dtype(placement["dtype"])}
        self.project = Linear(hidden, inner + channels + heads, bias=config.proj_bias, **placement)
        self.conv_weight = empty(channels, config.conv_width, **placement)
        self.conv_bias = empty(channels, **placement) if config.conv_bias else None
        self.a_log = empty(heads, **exact)
        self.d = empty(heads, **exact)
        self.dt_bias = empty(heads, **exact)
        self.norm = RMSNorm(inner, config.norm_eps, **placement)
        self.out = Linear(inner, hidden, bias=config.proj_bias, **placement)

    def forward(self, x_TE: Tensor, norm: RMSNorm, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """What goes into ``out``: the gated norm of what the recurrence makes of ``norm`` of x; [T, I]."""
        return self._mixed(x_TE, norm, batch, cache, self.norm.weight)

    def add_to(self, x_TE: Tensor, norm: RMSNorm, batch: ForwardBatch, cache: LayerCache) -> Tensor:
        """The stream behind the whole mixer, ``out`` included; the caller gives ``x`` up."""
        shape, groups = batch.shape, self.config.num_groups
        has_parts = shape.num_decode == shape.num_tokens and self.kernels.norms_parts(
            shape.num_tokens, self.out, groups
        )
        if not has_parts:
            return self.kernels.linear_add(self(x_TE, norm, batch, cache), self.out, x_TE)
        gated_TI = self._mixed(x_TE, norm, batch, cache, None)
        return self.kernels.parts_norm_linear_add(gated_TI, self.norm, groups, self.out, x_TE)

    def _mixed(
        self, x_TE: Tensor, norm: RMSNorm, batch: ForwardBatch, cache: LayerCache, norm_weight_I: Tensor | None
    ) -> Tensor:
        config = self.config
        conv_state, ssm_state, *kept = cache
        projected = self.kernels.norm_linear(x_TE, norm, self.project.weight, self.project.bias)
        sizes = (config.inner_size, config.conv_channels, config.num_heads)
        parts = MixedParts(*projected.split(sizes, dim=1))
        weights = MixerWeights(
            self.conv_weight,
            self.conv_bias,
            ScanWeights(self.a_log, self.d, self.dt_bias, config.dt_limits),
            norm_weight_I,
            config.num_groups,
            config.norm_eps,
        )
        return self.ssm.mix(parts, weights, conv_state, ssm_state, batch, KeptInputs(*kept) if kept else None)

    def targets(self, prefix: str) -> dict[str, Tensor]:
        """Where each checkpoint tensor goes."""
        found = {
            f"{prefix}.A_log": self.a_log.data,
            f"{prefix}.D": self.d.data,
            f"{prefix}.dt_bias": self.dt_bias.data,
            f"{prefix}.conv1d.weight": self.conv_weight.data[:, None],
            f"{prefix}.norm.weight": self.norm.weight.data,
            **split_targets(self.project, [self.project.weight.shape[0]], [f"{prefix}.in_proj"]),
            **split_targets(self.out, [self.out.weight.shape[0]], [f"{prefix}.out_proj"]),
        }
        if self.conv_bias is not None:
            found[f"{prefix}.conv1d.bias"] = self.conv_bias.data
        return found
