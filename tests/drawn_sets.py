"""Token sets of lengths that are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.data.token_set import TokenSet


def token_set(
    lengths: NDArray[np.int64], seed: int = 0, n_labels: int = 0, **sizes: Any
) -> TokenSet:
    """Random examples of these lengths; the last two thirds of each is its target."""
    draw = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    at = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    n_inputs = np.maximum(1, lengths // 3)
    return TokenSet(
        folder=Path(),
        facts={"label_names": [str(label) for label in range(n_labels)], "sources": []},
        ids=draw.integers(3, 99, offsets[-1]).astype(np.int32),
        targets=(at >= np.repeat(n_inputs, lengths)).astype(np.uint8),
        offsets=offsets,
        lines=np.arange(len(lengths)),
        target_lengths=lengths - n_inputs,
        groups=np.arange(len(lengths), dtype=np.uint64),
        labels=draw.integers(0, n_labels, len(lengths)).astype(np.int32) if n_labels else None,
    )
