"""The micro-batches of a step as a table of rows x lanes: a pure function of lengths.

Each lane computes a column. Whoever shares a step computes as many rows, of about the same cost. What a step is made of does
not change: every example stands in exactly one cell. Refuses to know the model, processes, and to import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Examples = NDArray[np.int64]
"""Examples of a micro-batch."""
Split = Callable[[NDArray[np.int64], int], list[Examples]]
"""(examples, tokens of a micro-batch at most) -> micro-batches, see `packing`."""
TIGHTER = (1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.45, 1.6, 1.8, 2.1, 2.5)
"""Budgets that are tried for even micro-batches, in shares of the tokens of an average one."""


@dataclass(frozen=True)
class Cell:
    """A micro-batch in its place."""

    number: int
    """Row by row, empty cells counted."""
    lane: int
    examples: Examples


@dataclass(frozen=True)
class Table:
    """The cells of a step; those without examples are left out."""

    n_rows: int
    n_lanes: int
    cells: tuple[Cell, ...]

    def of_lanes(self, lanes: range) -> list[Cell]:
        """The cells of some lanes, lane by lane."""
        return sorted((cell for cell in self.cells if cell.lane in lanes), key=lambda cell: (cell.lane, cell.number))


def rows_of(
    examples: NDArray[np.int64],
    lengths: NDArray[np.int64],
    micro_batch_tokens: int,
    n_lanes: int,
    *,
    split: Split,
    squares_at: int = 0,
) -> Table:
    """The step's examples in rows of `n_lanes` micro-batches of about the same cost, dearest row first.

    `lengths` [n_examples of the set] are tokens of each. The cost of an example is its tokens x (1 + tokens /
    `squares_at`): a causal layer of the usual shape attends as long as it multiplies at 12 x hidden tokens; 0 counts tokens
    alone. One lane has the micro-batches of `split` as they are. Else the number of micro-batches is a multiple of the lanes,
    and rows are dealt there and back, so that columns cost alike too.
    """
    micro_batches = split(examples, micro_batch_tokens)
    if n_lanes == 1:
        return Table(len(micro_batches), 1, in_one_lane(micro_batches))
    cost = _costs(lengths, squares_at)
    n_wanted = -(-len(micro_batches) // n_lanes) * n_lanes
    micro_batches = _split_dearest(_even(examples, lengths, micro_batch_tokens, n_wanted, split), n_lanes, cost)
    order = sorted(
        range(len(micro_batches)), key=lambda at: (-_sum(cost, micro_batches[at]), int(micro_batches[at].min()))
    )
    cells = []
    for place, at in enumerate(order):
        row, lane = divmod(place, n_lanes)
        lane = n_lanes - 1 - lane if row % 2 else lane
        cells.append(Cell(row * n_lanes + lane, lane, micro_batches[at]))
    return Table(-(-len(micro_batches) // n_lanes), n_lanes, tuple(sorted(cells, key=lambda cell: cell.number)))


def in_one_lane(micro_batches: list[Examples]) -> tuple[Cell, ...]:
    """Micro-batches one after the other."""
    return tuple(Cell(number, 0, micro_batch) for number, micro_batch in enumerate(micro_batches))


def _costs(lengths: NDArray[np.int64], squares_at: int) -> NDArray[np.int64]:
    """Of each example; whole numbers, which are the same on every machine."""
    tokens = lengths.astype(np.int64)
    return tokens * squares_at + tokens * tokens if squares_at else tokens


def _sum(cost: NDArray[np.int64], micro_batch: Examples) -> int:
    return int(cost[micro_batch].sum())


def _even(
    examples: NDArray[np.int64], lengths: NDArray[np.int64], micro_batch_tokens: int, n_wanted: int, split: Split
) -> list[Examples]:
    """Split by the tightest budget that makes at most `n_wanted` micro-batches."""
    mean = int(lengths[examples].sum()) / n_wanted
    for share in TIGHTER:
        micro_batches = split(examples, max(1, min(micro_batch_tokens, int(mean * share) + 1)))
        if len(micro_batches) <= n_wanted:
            return micro_batches
    return split(examples, micro_batch_tokens)


def _split_dearest(micro_batches: list[Examples], n_lanes: int, cost: NDArray[np.int64]) -> list[Examples]:
    """Part the dearest micro-batches in two until their number is a multiple of the lanes, or none has two examples."""
    micro_batches = list(micro_batches)
    while len(micro_batches) % n_lanes:
        dear = [at for at, micro_batch in enumerate(micro_batches) if len(micro_batch) > 1]
        if not dear:
            break
        at = max(dear, key=lambda at: (_sum(cost, micro_batches[at]), -at))
        micro_batch = micro_batches[at]
        upto = np.cumsum(cost[micro_batch])
        first = 1 + int(np.abs(2 * upto[:-1] - upto[-1]).argmin())
        micro_batches[at : at + 1] = [micro_batch[:first], micro_batch[first:]]
    return micro_batches
