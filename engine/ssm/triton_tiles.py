"""How the Triton kernels of Mamba2's scan are cut into programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.kernels.triton import overlapped, power_of_two
from engine.ssm.base import ScanInputs


@dataclass(frozen=True, slots=True)
class Tiles:
    """How the scan is cut into programs."""

    block_p: int = 16
    """Channels of a head that one program of a decode row takes; each is a run of S neighbouring state elements."""
    num_warps: int = 4
    step_limit: int = 1
    """Rows up to which decode rows without others beside them take two kernels in place of three: the first convolves B
    and C once a program, which costs little beside launches, and much beside many rows' states."""
    step_programs: int = 264
    """Of one row's or a few rows' step at least, two a multiprocessor, where ``block_p`` or more channels allow it."""
    replay_block_p: int = 8
    """As ``block_p``, for rows that are replayed."""
    replay_warps: int = 1
    walk_limit: int = 16
    """Tokens of a prefill row up to which the same program goes through them one by one."""
    chunk: int = 32
    """Tokens of a chunk of longer rows; 16 at least. With 64 of either the kernel keeps registers in memory."""
    chunk_block_p: int = 32
    """As ``block_p``, for those; 16 at least."""
    chunk_warps: int = 4


def num_parts(ssm_state: Tensor, block_p: int) -> int:
    """Programs of one row."""
    heads, head_dim = ssm_state.shape[1:3]
    return int(heads * -(-head_dim // block_p_of(ssm_state, block_p)))


def scan_sizes(inputs: ScanInputs, ssm_state: Tensor, block_p: int, least: int = 1) -> dict[str, Any]:
    """Compile-time sizes; blocks of ``least`` at least, as products of matrices want them."""
    _, heads, head_dim, state_size = ssm_state.shape
    return {
        "H": heads,
        "P": head_dim,
        "G": inputs.B_TGS.shape[1],
        "S": state_size,
        "BLOCK_P": max(least, block_p_of(ssm_state, block_p)),
        "BLOCK_S": max(least, power_of_two(state_size)),
        **overlapped(),
    }


def step_block_p(ssm_state: Tensor, rows: int, tiles: Tiles) -> int:
    """Channels that a program of a step takes: as many as leave all multiprocessors work, up to a head."""
    block_p = power_of_two(ssm_state.shape[2])
    while block_p > tiles.block_p and rows * num_parts(ssm_state, block_p) < tiles.step_programs:
        block_p //= 2
    return block_p


def block_p_of(ssm_state: Tensor, wanted: int) -> int:
    """Channels that a program takes, of at most a head."""
    return min(wanted, power_of_two(ssm_state.shape[2]))
