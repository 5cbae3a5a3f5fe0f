"""Padding as other trainers have it: micro-batches of a number of examples, sorted by length, each
as long as its longest.

For published rows that the planner is held against; farthing cuts by tokens (`data/lengths`).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.data.lengths import Lengths, Padded

_MOST_CELLS = (
    1_500_000  # of one table of order statistics: a finer one takes seconds and changes nothing
)


def padded_by_number(lengths: Lengths, micro: int, global_batch: int) -> Padded:
    """What a mean example becomes when steps of `global_batch` random examples are cut into
    micro-batches of `micro`.

    Exact for the distribution: the longest of a micro-batch is an order statistic of the step.
    Targets of seq2seq are left out: no published run that it is for has any.
    """
    global_batch = max(1, min(global_batch, lengths.n_examples))
    micro = max(1, min(micro, global_batch))
    of_all = _order_statistics(lengths.tokens, lengths.n_examples, global_batch)
    longest, squared = (each[::micro] for each in of_all)
    starts = np.arange(0, global_batch, micro)
    rows = np.minimum(starts + micro, global_batch) - starts
    tokens, pairs = float(rows @ longest) / global_batch, float(rows @ squared) / global_batch
    return Padded(tokens, 0.0, pairs, 0.0, 0.0)


def _order_statistics(
    sample: NDArray[np.int64], n_examples: int, n_drawn: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Expected longest, second longest ... of `n_drawn` examples, and the expected squares of them.

    Drawn without replacement from `n_examples` that are distributed as the sample: the number of
    drawn ones above a length is hypergeometric, and the k-th longest is at most that length when
    fewer than k are above it (David and Nagaraja, Order Statistics, 2003, section 3.7).
    """
    values, counts = np.unique(sample, return_counts=True)
    n_most = max(64, _MOST_CELLS // n_drawn)
    means = values.astype(np.float64)
    if len(values) > n_most:  # bins of neighbouring lengths, each with its mean
        bins = np.arange(len(values)) * n_most // len(values)
        means = np.bincount(bins, counts * means) / np.bincount(bins, counts)
        counts = np.bincount(bins, counts).astype(np.int64)
    n_above = n_examples - np.round(np.cumsum(counts)[:-1] * (n_examples / len(sample))).astype(
        np.int64
    )
    n_above = np.clip(n_above, 0, n_examples)
    log_factorial = _log_factorials(n_examples)
    k = np.arange(n_drawn + 1)
    above, below = n_above[:, None] - k, (n_examples - n_above)[:, None] - (n_drawn - k)
    is_possible = (above >= 0) & (below >= 0)
    log_p = log_factorial(n_above)[:, None] - log_factorial(k) - log_factorial(np.maximum(above, 0))
    log_p += log_factorial(n_examples - n_above)[:, None] - log_factorial(n_drawn - k)
    log_p -= log_factorial(np.maximum(below, 0))
    log_p -= (
        log_factorial(n_examples) - log_factorial(n_drawn) - log_factorial(n_examples - n_drawn)
    )
    p = np.where(is_possible, np.exp(np.minimum(log_p, 0.0)), 0.0)
    at_most = np.minimum(
        np.cumsum(p, axis=1)[:, :-1], 1.0
    )  # [length, k]: fewer than k + 1 drawn ones are longer
    squares = means**2
    return means[-1] - np.diff(means) @ at_most, squares[-1] - np.diff(squares) @ at_most


def _log_factorials(most: int) -> Any:
    """ln(n!) for arrays of whole numbers up to `most`: a table where it is small, Stirling's series
    beyond it.
    """
    table = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, min(most, 100_000) + 1)))])

    def of(n: Any) -> Any:
        n = np.asarray(n)
        large = np.maximum(n, 2).astype(np.float64)
        series = (
            large * np.log(large) - large + 0.5 * np.log(2 * math.pi * large) + 1 / (12 * large)
        )
        return (
            np.where(n < len(table), table[np.minimum(n, len(table) - 1)], series)
            if most > 100_000
            else table[n]
        )

    return of
