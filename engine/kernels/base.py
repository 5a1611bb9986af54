"""The arithmetic between a decoder's attention calls, as few fused operations behind one interface.

Letters: T tokens, I inputs of a projection, O its outputs, F feed-forward size, H query heads, G key/value heads,
D head size, Y = H + 2 G heads of the fused projection.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine.models.base import LayerCache


class Norm(Protocol):
    """Parameters of an RMS norm."""

    @property
    def weight(self) -> Tensor:
        """[size]."""
        ...

    @property
    def eps(self) -> float:
        """Added to the mean square."""
        ...


class Projection(Protocol):
    """Parameters of x W^T + b."""

    @property
    def weight(self) -> Tensor:
        """[O, I]."""
        ...

    @property
    def bias(self) -> Tensor | None:
        """[O]."""
        ...


class Kernels(Protocol):
    """One implementation. Every call only enqueues work, on the inputs' device, and can be captured in a graph.

    Activations and weights share one float type; sums, norms and rotations are float32 at least inside.
    """

    name: str

    def rms_norm(self, x_TI: Tensor, norm: Norm) -> Tensor:
        """``x / rms(x) * weight`` over the last dimension, [T, I]."""
        ...

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``x W^T + b``, [T, O]."""
        ...

    def norm_linear(self, x_TI: Tensor, norm: Norm, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``linear`` of ``rms_norm``, [T, O]."""
        ...

    def norm_swiglu(self, x_TI: Tensor, norm: Norm, gate_up: Projection) -> Tensor:
        """``silu(gate) * up`` of ``norm_linear``, whose outputs are F gates, then F ups; [T, F]."""
        ...

    def linear_add(self, x_TI: Tensor, projection: Projection, residual_TO: Tensor) -> Tensor:
        """``residual`` + ``linear``, [T, O]. The residual's memory may become the result's: the caller gives it up."""
        ...

    def rotation_tables(
        self, positions_T: Tensor, frequencies: Tensor, attention_factor: float
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of position * frequency, times the factor; each [T, 1, D / 2], float32 at least."""
        ...

    def rotate_and_append(
        self,
        qkv_TYD: Tensor,
        head_norms: tuple[Norm, Norm] | None,
        tables: tuple[Tensor, Tensor],
        cache: LayerCache,
        slots_T: Tensor,
    ) -> Tensor:
        """Norm (where given) and rotate queries and keys; write keys and values to ``cache`` at ``slots_T``.

        Args:
            qkv_TYD: H query heads, G key heads, G value heads of each token; only read.
            head_norms: Of each query head and each key head.
            tables: As :meth:`rotation_tables` gives them.
            cache: (keys, values), each [num_blocks + 1, block_size, G, D], contiguous.
            slots_T: [T] int64, block id * block_size + offset.

        Returns:
            The queries, [T, H, D].
        """
        ...
