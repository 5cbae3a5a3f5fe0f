"""Token sets of lengths that are drawn."""

import numpy as np
from numpy.typing import NDArray

import token_sets
from farthing.data.token_set import TokenSet


def token_set(lengths: NDArray[np.int64], seed: int = 0, n_labels: int = 0) -> TokenSet:
    """Random examples of these lengths; the last two thirds of each is its target."""
    draw = np.random.default_rng(seed)
    texts = [draw.integers(3, 99, n).tolist() for n in lengths]
    labels = draw.integers(0, n_labels, len(lengths)).tolist() if n_labels else None
    return token_sets.token_set(texts, np.maximum(1, lengths // 3).tolist(), labels)
