"""How much of a prompt the next forward reads."""

from __future__ import annotations


def chunk_size(remaining: int, budget: int, *, chunked: bool = True) -> int:
    """Tokens of a prompt's next chunk: what is left of it, or of the budget; 0: none now.

    Neither a chunk nor what it leaves is a single token. Prefill kernels of FlashAttention take a query of one token
    for a decode row (upstream's guard; ours read it rightly), and a lone last token would cost a forward of its own.
    """
    if remaining <= budget:
        return remaining
    if not chunked:
        return 0
    chunk = budget - (remaining - budget == 1)
    return chunk if chunk >= 2 else 0
