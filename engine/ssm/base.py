"""The state-space interface: the operations of Mamba2 over a packed batch whose rows keep their state in slots.

Letters: T tokens of the batch, N batch rows, C convolution channels, K convolution width, H heads, P head size,
G groups, S state size. Head h belongs to group h // (H / G).

Both stateful operations follow the same rules. A row goes on from slot ``batch.state_from_N``, or from zeros where it
has no tokens before this forward, and leaves its state in ``batch.state_to_N``; each of ``batch.snapshots`` is written,
too. Padding tokens enter no state, and rows without query tokens write to the dummy slot alone.

The first V rows (``batch.shape.num_replayed``) are replayed: letter W, their tokens. Of such a row's last forward only
the first ``batch.replayed_V`` tokens stand. So the scan lets those enter the state once more, leaves that one in the
slot, and goes through the row's own W tokens from there, of which only the inputs are left (:class:`KeptInputs`). The
convolution just looks further back: its histories are W - 1 inputs longer than others, the newest last, and end with
those of all W tokens of the last forward. Where nothing is replayed the slot's state and history are exact, as behind a
prompt.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.batch import ForwardBatch

NO_LIMITS = (0.0, float("inf"))


class ScanInputs(NamedTuple):
    """What the scan reads of each token, in the activations' float type."""

    x_THP: Tensor
    dt_TH: Tensor
    """Time steps before bias and softplus."""
    B_TGS: Tensor
    C_TGS: Tensor


class KeptInputs(NamedTuple):
    """What slots keep of the tokens of their row's last forward, for replay: as :class:`ScanInputs`, without C.

    Each [num_slots + 1, W, ...] in the activations' float type, contiguous; written in place. They mean nothing in a
    slot whose state is exact.
    """

    x: Tensor
    """[num_slots + 1, W, H, P]."""
    dt: Tensor
    """[num_slots + 1, W, H]."""
    B: Tensor
    """[num_slots + 1, W, G, S]."""


class ScanWeights(NamedTuple):
    """Parameters of one layer's scan; the tensors float32 (float64 with float64 activations), contiguous."""

    a_log_H: Tensor
    """A = -exp(a_log)."""
    d_H: Tensor
    """Factor of x in the output."""
    dt_bias_H: Tensor
    dt_limits: tuple[float, float] = NO_LIMITS
    """Least and greatest time step behind softplus."""


class MixerWeights(NamedTuple):
    """What a mixer between its projections has of parameters."""

    conv_weight_CK: Tensor
    conv_bias_C: Tensor | None
    scan: ScanWeights
    norm_weight_I: Tensor | None
    """None: what leaves the mixer is not normed, for its last projection does that."""
    num_groups: int
    """G, of the scan and of the norm."""
    norm_eps: float


class MixedParts(NamedTuple):
    """What a mixer's first projection gives: rows of neighbouring elements, possibly part of a wider tensor."""

    gate_TI: Tensor
    conv_TC: Tensor
    """Inputs of the convolution: x of all heads, B of all groups, C of all groups."""
    dt_TH: Tensor


class StateSpace(Protocol):
    """One backend. Every call only enqueues work, branches on ``batch.shape`` alone, and can be captured in a graph.

    Sums and states are float32 at least inside. Outputs have the activations' float type; those of padding tokens are
    finite and otherwise undefined.
    """

    name: str
    can_replay: bool
    """Whether it computes replayed rows."""

    def conv(
        self, x_TC: Tensor, weight_CK: Tensor, bias_C: Tensor | None, conv_state: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """SiLU of the causal depthwise convolution of each row, over its history and its tokens.

        Args:
            x_TC: Inputs; rows of C neighbouring elements, possibly part of a wider tensor.
            weight_CK: Column K - 1 meets the token itself.
            bias_C: Added before SiLU.
            conv_state: [num_slots + 1, C, K - 1] inputs before the next token, oldest first; written in place. Where
                rows are replayed, W - 1 longer; of an exact one the last K - 1 mean anything.
            batch: Rows and their slots.

        Returns:
            [T, C], contiguous.
        """
        ...

    def scan(
        self,
        inputs: ScanInputs,
        weights: ScanWeights,
        ssm_state: Tensor,
        batch: ForwardBatch,
        kept: KeptInputs | None = None,
    ) -> Tensor:
        """The recurrence ``S = S exp(dt A) + dt x B^T``, ``y = S C + D x`` of each row.

        Args:
            inputs: Each of rows of neighbouring elements, possibly part of a wider tensor.
            weights: Of the layer; dt = softplus(dt + bias), within the limits.
            ssm_state: [num_slots + 1, H, P, S] in any float type; written in place. Within a forward it is float32 at
                least, and rounded where it is stored.
            batch: Rows and their slots.
            kept: Of the slots; needed where rows are replayed.

        Returns:
            y, [T, H, P], contiguous.
        """
        ...

    def mix(
        self,
        parts: MixedParts,
        weights: MixerWeights,
        conv_state: Tensor,
        ssm_state: Tensor,
        batch: ForwardBatch,
        kept: KeptInputs | None = None,
    ) -> Tensor:
        """All three, one after the other, as a mixer needs them: :func:`mix_by_parts`, in fewer kernels where it pays.

        Without the norm's weights it ends with ``y * silu(gate)``.

        Args:
            parts: Of all tokens.
            weights: Of the layer.
            conv_state: As for ``conv``.
            ssm_state: As for ``scan``.
            batch: Rows and their slots.
            kept: As for ``scan``.

        Returns:
            What goes into the mixer's last projection, [T, I], contiguous.
        """
        ...

    def gated_norm(self, y_TI: Tensor, gate_TI: Tensor, weight_I: Tensor, num_groups: int, eps: float) -> Tensor:
        """``y * silu(gate)``, RMS-normed over each of ``num_groups`` equal parts of I, times ``weight``; [T, I]."""
        ...


def scan_inputs(mixed_TC: Tensor, dt_TH: Tensor, num_groups: int, ssm_state: Tensor) -> ScanInputs:
    """What the scan reads, of the convolution's outputs and the time steps."""
    heads, head_dim, state_size = ssm_state.shape[1:]
    in_groups = num_groups * state_size
    x_TI, B_TI, C_TI = mixed_TC.split((heads * head_dim, in_groups, in_groups), dim=1)
    return ScanInputs(
        x_TI.unflatten(1, (heads, -1)), dt_TH, B_TI.unflatten(1, (num_groups, -1)), C_TI.unflatten(1, (num_groups, -1))
    )


def mix_by_parts(
    ssm: StateSpace,
    parts: MixedParts,
    weights: MixerWeights,
    conv_state: Tensor,
    ssm_state: Tensor,
    batch: ForwardBatch,
    kept: KeptInputs | None = None,
) -> Tensor:
    """Convolution, scan and gated norm of a backend; see :meth:`StateSpace.mix`."""
    gate_TI, mixed_TC, dt_TH = parts
    mixed_TC = ssm.conv(mixed_TC, weights.conv_weight_CK, weights.conv_bias_C, conv_state, batch)
    inputs = scan_inputs(mixed_TC, dt_TH, weights.num_groups, ssm_state)
    y_TI = ssm.scan(inputs, weights.scan, ssm_state, batch, kept).flatten(1)
    if weights.norm_weight_I is None:
        wide = torch.promote_types(y_TI.dtype, torch.float32)
        return (y_TI.to(wide) * functional.silu(gate_TI.to(wide))).to(y_TI.dtype)
    return ssm.gated_norm(y_TI, gate_TI, weights.norm_weight_I, weights.num_groups, weights.norm_eps)
