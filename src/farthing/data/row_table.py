"""The micro-batches of a step as a table of rows x lanes: a pure function of lengths.

Each lane computes a column. Whoever shares a step computes as many rows, of about the same cost. What a step is made of does
not change: every example stands in exactly one cell. Refuses to know the model, processes, and to import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Piece = NDArray[np.int64]
"""Examples of a micro-batch."""
Cut = Callable[[NDArray[np.int64], int], list[Piece]]
"""(examples, tokens of a micro-batch at most) -> micro-batches, see `packing`."""
TIGHTER = (1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.45, 1.6, 1.8, 2.1, 2.5)
"""Budgets that are tried for even micro-batches, in shares of the tokens of an average one."""


@dataclass(frozen=True)
class Cell:
    """A micro-batch in its place."""

    number: int
    """Row by row, empty cells counted."""
    lane: int
    examples: Piece


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
    cut: Cut,
    squares_at: int = 0,
) -> Table:
    """The step's examples in rows of `n_lanes` micro-batches of about the same cost, dearest row first.

    `lengths` [n_examples of the set] are tokens of each. The cost of an example is its tokens x (1 + tokens /
    `squares_at`): a causal layer of the usual shape attends as long as it multiplies at 12 x hidden tokens; 0 counts tokens
    alone. One lane has the micro-batches of `cut` as they are. Else the number of micro-batches is a multiple of the lanes,
    and rows are dealt there and back, so that columns cost alike too.
    """
    pieces = cut(examples, micro_batch_tokens)
    if n_lanes == 1:
        return Table(len(pieces), 1, in_one_lane(pieces))
    cost = _costs(lengths, squares_at)
    n_wanted = -(-len(pieces) // n_lanes) * n_lanes
    pieces = _split_dearest(_even(examples, lengths, micro_batch_tokens, n_wanted, cut), n_lanes, cost)
    order = sorted(range(len(pieces)), key=lambda at: (-_sum(cost, pieces[at]), int(pieces[at].min())))
    cells = []
    for place, at in enumerate(order):
        row, lane = divmod(place, n_lanes)
        lane = n_lanes - 1 - lane if row % 2 else lane
        cells.append(Cell(row * n_lanes + lane, lane, pieces[at]))
    return Table(-(-len(pieces) // n_lanes), n_lanes, tuple(sorted(cells, key=lambda cell: cell.number)))


def in_one_lane(pieces: list[Piece]) -> tuple[Cell, ...]:
    """Micro-batches one after the other."""
    return tuple(Cell(number, 0, piece) for number, piece in enumerate(pieces))


def _costs(lengths: NDArray[np.int64], squares_at: int) -> NDArray[np.int64]:
    """Of each example; whole numbers, which are the same on every machine."""
    tokens = lengths.astype(np.int64)
    return tokens * squares_at + tokens * tokens if squares_at else tokens


def _sum(cost: NDArray[np.int64], piece: Piece) -> int:
    return int(cost[piece].sum())


def _even(
    examples: NDArray[np.int64], lengths: NDArray[np.int64], most_tokens: int, n_wanted: int, cut: Cut
) -> list[Piece]:
    """Cut by the tightest budget that makes at most `n_wanted` pieces."""
    mean = int(lengths[examples].sum()) / n_wanted
    for share in TIGHTER:
        pieces = cut(examples, max(1, min(most_tokens, int(mean * share) + 1)))
        if len(pieces) <= n_wanted:
            return pieces
    return cut(examples, most_tokens)


def _split_dearest(pieces: list[Piece], n_lanes: int, cost: NDArray[np.int64]) -> list[Piece]:
    """Part the dearest micro-batches in two until their number is a multiple of the lanes, or none has two examples."""
    pieces = list(pieces)
    while len(pieces) % n_lanes:
        dear = [at for at, piece in enumerate(pieces) if len(piece) > 1]
        if not dear:
            break
        at = max(dear, key=lambda at: (_sum(cost, pieces[at]), -at))
        piece = pieces[at]
        upto = np.cumsum(cost[piece])
        first = 1 + int(np.abs(2 * upto[:-1] - upto[-1]).argmin())
        pieces[at : at + 1] = [piece[:first], piece[first:]]
    return pieces
