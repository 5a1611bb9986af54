"""Training batches: windows of the packed text, drawn by a seeded generator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tools.train_shipped.byte_tokens import SEPARATOR

_AT_FILE_START = 8
"""One window in so many begins with a file; the others begin anywhere."""


def encode(contents: Sequence[bytes]) -> Tensor:
    """The texts one after the other, a separator before each; [N] int16 on the CPU."""
    parts = []
    for content in contents:
        parts += [np.array([SEPARATOR], dtype=np.int16), np.frombuffer(content, dtype=np.uint8).astype(np.int16)]
    return torch.from_numpy(np.concatenate(parts))


class Windows:
    """Endless batches. Every epoch cuts the text anew, at another phase, so that each byte is seen in many places."""

    def __init__(self, tokens_N: Tensor, *, seed: int) -> None:
        """Draw from ``tokens_N`` (on any device; batches lie there too)."""
        self._tokens_N = tokens_N
        self._random = np.random.default_rng(seed)
        self._file_starts = torch.nonzero(tokens_N == SEPARATOR).flatten().cpu().numpy()
        self._left = np.empty(0, dtype=np.int64)
        self._length = 0

    def batch(self, count: int, length: int) -> Tensor:
        """``count`` windows of ``length`` tokens, [count, length] int64.

        Raises:
            ValueError: The text is shorter than two windows.
        """
        if len(self._tokens_N) < 2 * length:
            raise ValueError(f"the text has {len(self._tokens_N)} tokens, too few for windows of {length}")
        starts = self._starts(count, length)
        files = self._file_starts[self._file_starts <= len(self._tokens_N) - length]
        if len(files):
            at_file = self._random.random(count) < 1 / _AT_FILE_START
            starts = np.where(at_file, self._random.choice(files, count), starts)
        device = self._tokens_N.device
        places = torch.from_numpy(starts).to(device, non_blocking=True)[:, None] + torch.arange(length, device=device)
        return self._tokens_N[places].long()

    def _starts(self, count: int, length: int) -> np.ndarray:
        if length != self._length:
            self._left, self._length = self._left[:0], length
        while len(self._left) < count:
            phase = int(self._random.integers(length))
            starts = np.arange(phase, len(self._tokens_N) - length + 1, length)
            self._left = np.concatenate([self._left, self._random.permutation(starts)])
        taken, self._left = self._left[:count], self._left[count:]
        return taken
