"""How much of a workload's prompts an ideal prefix cache would not compute."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workbench.workloads.prompts import SyntheticPrompt
from workbench.workloads.workload import Prompt, Workload, WorkloadError


def prefix_share(workload: Workload, block_size: int) -> float:
    """Tokens in full leading blocks that an earlier prompt began with, over all prompt tokens.

    The cache never forgets and a prompt is in it from its arrival on. As in the engine only full blocks are shared,
    and the last token of a prompt is always computed.
    """
    if block_size < 1:
        raise WorkloadError(f"block_size must be at least 1, got {block_size}")
    seen: set[bytes] = set()
    num_shared = num_tokens = 0
    for spec in sorted(workload.requests, key=lambda one: one.arrival):
        ids = _ids(spec.prompt)
        blocks = min(_known_blocks(ids, block_size, seen), (len(ids) - 1) // block_size)
        num_shared += blocks * block_size
        num_tokens += len(ids)
    return num_shared / num_tokens if num_tokens else 0.0


def _ids(prompt: Prompt) -> NDArray[np.int64]:
    if isinstance(prompt, str):
        raise WorkloadError("prefix_share needs prompts of token ids, and one is text")
    return prompt.array() if isinstance(prompt, SyntheticPrompt) else np.asarray(prompt, np.int64)


def _known_blocks(ids: NDArray[Any], block_size: int, seen: set[bytes]) -> int:
    """Leading blocks that were seen behind the same blocks before; all of the prompt's are seen from now on."""
    data, step = ids.tobytes(), block_size * ids.itemsize
    known, chain = 0, b""
    for index in range(len(ids) // block_size):
        chain = hashlib.blake2b(chain + data[index * step : (index + 1) * step], digest_size=8).digest()
        # Digests name whole prefixes: once one is new, so are all behind it.
        known += chain in seen
        seen.add(chain)
    return known
