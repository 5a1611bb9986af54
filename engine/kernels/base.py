"""The arithmetic between a decoder's attention calls, as few fused operations behind one interface.

Letters: T tokens, I inputs of a projection, O its outputs, F feed-forward size, H query heads, G key/value heads,
D head size, Y = H + 2 G heads of the fused projection, X experts, K experts of a token, U rows of an expert's first
projection.
"""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from engine.kernels.routing import RoutingRule
from engine.models.base import LayerCache

Activation = Literal["swiglu", "relu2"]
"""``swiglu``: SiLU of the first half of the columns times the second half. ``relu2``: squares, 0 for negatives."""


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

    def embed(self, ids_T: Tensor, table_VI: Tensor) -> Tensor:
        """Rows of ``table``, [T, I]."""
        ...

    def rms_norm(self, x_TI: Tensor, norm: Norm) -> Tensor:
        """``x / rms(x) * weight`` over the last dimension, [T, I]."""
        ...

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``x W^T + b``, [T, O]."""
        ...

    def norm_linear(self, x_TI: Tensor, norm: Norm, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``linear`` of ``rms_norm``, [T, O]."""
        ...

    def norm_activate(self, x_TI: Tensor, norm: Norm, up: Projection, activation: Activation) -> Tensor:
        """``activate`` of ``norm_linear``; with ``swiglu`` its outputs are F gates, then F ups; [T, F]."""
        ...

    def linear_add(self, x_TI: Tensor, projection: Projection, residual_TO: Tensor) -> Tensor:
        """``residual`` + ``linear``, [T, O]. The residual's memory may become the result's: the caller gives it up."""
        ...

    def norms_parts(self, rows: int, projection: Projection, num_parts: int) -> bool:
        """Whether :meth:`parts_norm_linear_add` takes one kernel for so many rows; only then it is to be called."""
        ...

    def parts_norm_linear_add(
        self, x_TI: Tensor, norm: Norm, num_parts: int, projection: Projection, residual_TO: Tensor
    ) -> Tensor:
        """``linear_add`` of x normed over each of ``num_parts`` equal parts of I, times the norm's weight; [T, O]."""
        ...

    def rotation_tables(
        self, positions_T: Tensor, frequencies: Tensor, attention_factor: float
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine of position * frequency, times the factor; each [T, 1, R / 2], float32 at least."""
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

    def activate(self, x_TU: Tensor, activation: Activation) -> Tensor:
        """[T, F]; F is U / 2 for ``swiglu``, U for ``relu2``."""
        ...

    def route(self, score_TX: Tensor, bias_X: Tensor | None, rule: RoutingRule) -> tuple[Tensor, Tensor]:
        """Each token's experts, the best first; of equals, the one with the lower number first.

        Args:
            score_TX: A router's scores, before softmax or sigmoid, in any float type.
            bias_X: SIGMOID's correction bias, float32 or float64.
            rule: How they become experts and weights.

        Returns:
            Numbers, [T, K] int64, no two of a token alike, in [0, X) even where scores are NaN; and their weights,
            [T, K] float32, of float64 scores float64.
        """
        ...

    def experts(
        self,
        x_TI: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        up_XUI: Tensor,
        down_XIF: Tensor,
        activation: Activation,
    ) -> Tensor:
        """For each token the weighted sum of its experts' ``down activate(up x)``.

        A token's result depends neither on the other tokens' values nor on the order of anything: its K results are
        added in the order of ``ids``.

        Args:
            x_TI: Tokens.
            ids_TK: [T, K] int64, the experts of each token: in [0, X), no two alike, or X, which is nobody here: such a
                pair adds nothing, and no weights are read for it. Its own weight must be 0.
            weights_TK: [T, K] float32 or float64, the experts' weights.
            up_XUI: First projection of every expert; with ``swiglu`` F gates, then F ups.
            down_XIF: Second projection of every expert.
            activation: Between the two.

        Returns:
            [T, I] in the dtype of ``x``, memory of its own.
        """
        ...
