"""How many labelled positions the head takes at once, for the head that computes and the planner
that counts its bytes.
"""

from __future__ import annotations

CUDA_TILE_TOKENS = (
    2048  # from here on a product is as quick as an undivided one; never timed on a GPU by us
)
CPU_TILE_TOKENS, CPU_MOST_TILE_TOKENS = (
    256,
    1024,
)  # fewer cost time, more only memory (measured 2026-11-21)
CPU_TILE_BYTES = 64 << 20  # of fp32 logits, where they are small enough for more tokens than that
CPU_BLOCK_BYTES = (
    1 << 20
)  # of the fp32 rows at work: they stay in the cache from the softmax to the gradient
CUDA_BLOCK_BYTES = 256 << 20
WRITES_MORE = 8
"""Times the tokens of a micro-batch that are written for at once: nothing is kept to go backward.
"""


def default_tile_tokens(n_words: int, device_type: str, trained_width: int = 0) -> int:
    """Labelled positions of a tile: as many as the products need to be quick.

    Where the head is trained (`trained_width` h) each tile adds to its whole gradient, so a tile
    has at least h positions: its logits are then no larger than that gradient.
    """
    if device_type != "cpu":
        return CUDA_TILE_TOKENS
    fitting = CPU_TILE_BYTES // (4 * n_words) // 32 * 32
    return min(CPU_MOST_TILE_TOKENS, max(CPU_TILE_TOKENS, fitting, trained_width))


def head_bytes(
    n_scored: int,
    n_words: int,
    width: int,
    precision: str,
    *,
    trained_bytes: int = 0,
    is_cuda: bool = True,
    is_one_kernel: bool = False,
    has_cap: bool = False,
) -> int:
    """What `model/head.py` takes for so many labelled positions beside the gradients of a trained
    head and of the positions: a tile of logits, fp32 rows of it, casts.

    `trained_bytes` are those of a number of a trained matrix, 0 where it is frozen. One kernel
    makes no rows in fp32. Else there are log-softmax and, in bf16, the fp32 copy that it is made
    of (of fp16 CUDA's kernel makes none); with a cap three.
    """
    c = 4 if precision == "fp32" else 2
    tile = min(
        n_scored,
        default_tile_tokens(n_words, "cuda" if is_cuda else "cpu", width if trained_bytes else 0),
    )
    rows = min(tile, max(1, (CUDA_BLOCK_BYTES if is_cuda else CPU_BLOCK_BYTES) // (4 * n_words)))
    n_blocks = 3 if has_cap else 1 if c == 4 or (is_cuda and precision == "fp16") else 2
    found = c * tile * (n_words + width)
    if not is_one_kernel:
        found += 4 * n_blocks * rows * n_words
    if trained_bytes > c:  # the matrix in the precision of the run, and the product of a tile
        found += 2 * c * n_words * width
    return found
