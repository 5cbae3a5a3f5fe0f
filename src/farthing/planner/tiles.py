"""How many labelled positions the head takes at once, for the head that computes and the planner that counts its bytes.

Refuses to import torch.
"""

from __future__ import annotations

CUDA_TILE_TOKENS = 2048  # from here on a product is as quick as an undivided one; never timed on a GPU by us
CPU_TILE_TOKENS, CPU_MOST_TILE_TOKENS = 256, 1024  # bench/head.py: fewer cost time, more only memory
CPU_TILE_BYTES = 64 << 20  # of fp32 logits, where they are small enough for more tokens than that
CPU_BLOCK_BYTES = 1 << 20  # of the fp32 rows at work: they stay in the cache from the softmax to the gradient
CUDA_BLOCK_BYTES = 256 << 20
WRITES_MORE = 8
"""Times the tokens of a micro-batch that are written for at once: nothing is kept to go backward."""


def default_tile_tokens(n_words: int, device_type: str, trained_width: int = 0) -> int:
    """Labelled positions of a tile: as many as the products need to be quick.

    Where the head is trained (`trained_width` h) each tile adds to its whole gradient, so a tile has at least h positions:
    its logits are then no larger than that gradient.
    """
    if device_type != "cpu":
        return CUDA_TILE_TOKENS
    fitting = CPU_TILE_BYTES // (4 * n_words) // 32 * 32
    return min(CPU_MOST_TILE_TOKENS, max(CPU_TILE_TOKENS, fitting, trained_width))
