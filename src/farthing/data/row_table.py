"""The micro-batches of a step as a table of rows x slots: a pure function of lengths.

Each slot computes a column. Whoever shares a step computes as many rows, of about the same cost.
What a step is made of does not change: every example stands in exactly one cell.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from farthing.arrays import Ints

Examples = Ints
"""Examples of a micro-batch."""
Split = Callable[[Ints, int], list[Examples]]
"""(examples, tokens of a micro-batch at most) -> micro-batches, see `packing`."""
Costs = Callable[[Examples], Ints]
"""What each of some examples costs to compute; whole numbers, which are the same on every machine.
"""
FEW = 12
"""Examples of which all ways to part them in two are looked at: 2,048."""
TIGHTER = (1.0, 1.02, 1.05, 1.1, 1.2, 1.3, 1.45, 1.6, 1.8, 2.1, 2.5)
"""Budgets that are tried for even micro-batches, in shares of the tokens of an average one."""


@dataclass(frozen=True)
class Cell:
    """A micro-batch in its place."""

    number: int
    """Row by row, empty cells counted."""
    slot: int
    examples: Examples


def row_table(lanes: Sequence[Sequence[Examples]]) -> list[Cell]:
    """The cells of a step from the micro-batches of each slot, row by row."""
    n = len(lanes)
    cells = [
        Cell(row * n + slot, slot, each)
        for slot, lane in enumerate(lanes)
        for row, each in enumerate(lane)
    ]
    return sorted(cells, key=lambda cell: cell.number)


def of_slots(table: Sequence[Cell], slots: range) -> list[Cell]:
    """The cells of some slots, slot by slot."""
    return sorted((cell for cell in table if cell.slot in slots), key=lambda cell: cell.slot)


def rows_of(
    examples: Ints,
    lengths: Ints,
    micro_batch_tokens: int,
    n_slots: int,
    *,
    split: Split,
    squares_at: int = 0,
    costs: Costs | None = None,
) -> list[Cell]:
    """The step's examples in rows of `n_slots` micro-batches of about the same cost, dearest row
    first.

    `lengths` [n_examples of the set] are tokens of each. One slot has the micro-batches of `split`
    as they are. With `costs`, where examples may be computed together in any way, they are dealt to
    slots, neighbours costing alike too, and each slot is split apart. Else the step is split, the
    number of micro-batches a multiple of the slots, and rows are dealt there and back; an example
    then costs its tokens x (1 + tokens / `squares_at`), 0: its tokens.
    """
    micro_batches = split(examples, micro_batch_tokens)
    if n_slots == 1:
        return row_table([micro_batches])

    def dearest_first(some: Examples, n_wanted: int, cost: Costs) -> list[Examples]:
        """Micro-batches by the tightest budget that makes at most so many; the dearest are then
        parted in two until there are so many, or none has two examples.
        """
        mean = int(lengths[some].sum()) / n_wanted
        budgets = [min(micro_batch_tokens, int(mean * share) + 1) for share in TIGHTER]
        tried = (split(some, most) for most in (*budgets, micro_batch_tokens))
        found = list(next(each for each in tried if len(each) <= n_wanted))
        while len(found) < n_wanted:
            sums = [(len(each) > 1, int(cost(each).sum())) for each in found]
            at = sums.index(max(sums))
            if len(dear := found[at]) == 1:
                break
            upto = np.cumsum(cost(dear))
            first = 1 + int(np.abs(2 * upto[:-1] - upto[-1]).argmin())
            found[at : at + 1] = [dear[:first], dear[first:]]
        return sorted(found, key=lambda each: (-int(cost(each).sum()), int(each.min())))

    if costs is not None:
        dealt = _dealt([(each, at) for at, each in enumerate(costs(examples).tolist())], n_slots)
        parts = [examples[places] for places in dealt]
        n_rows = max(len(split(part, micro_batch_tokens)) for part in parts if len(part))
        return row_table(
            [dearest_first(part, n_rows, costs) if len(part) else [] for part in parts]
        )

    def squared(some: Examples) -> Ints:
        tokens = lengths[some].astype(np.int64)
        return tokens * squares_at + tokens * tokens if squares_at else tokens

    lanes: list[list[Examples]] = [[] for _ in range(n_slots)]
    ordered = dearest_first(examples, -(-len(micro_batches) // n_slots) * n_slots, squared)
    for place, each in enumerate(ordered):
        row, slot = divmod(place, n_slots)
        lanes[n_slots - 1 - slot if row % 2 else slot].append(each)
    return row_table(lanes)


def _dealt(costs: list[tuple[int, int]], n: int) -> list[list[int]]:
    """Places of (cost, place) in `n` parts that cost alike: halves of halves, so that neighbours
    together cost alike too.

    An odd number at once. Of all halves of a few the best, of more by the largest
    differences (Karmarkar and Karp 1982): the two sets of parts that differ most among themselves
    are joined, the dearest part of one with the cheapest of the other.
    """
    if n == 1 or not costs:
        return [sorted(place for _, place in costs), *([] for _ in range(n - 1))]
    n_parts = n if n % 2 else 2
    if n_parts == 2 and len(costs) <= FEW:
        in_first = np.arange(1 << (len(costs) - 1))[:, None] >> np.arange(len(costs)) & 1 == 1
        of_all = np.array([cost for cost, _ in costs])
        best = in_first[np.abs(2 * (in_first @ of_all) - of_all.sum()).argmin()]
        halves = (
            [each for each, is_first in zip(costs, best, strict=True) if is_first == side]
            for side in (True, False)
        )
        return [places for half in halves for places in _dealt(half, n // 2)]
    nothing: list[Any] = [(0, [])] * (n_parts - 1)
    sets = [
        (-cost, place, [(cost, [(cost, place)]), *nothing]) for cost, place in costs
    ]  # parts: (cost of all, what)
    heapq.heapify(sets)
    while len(sets) > 1:
        (_, place, one), (_, _, other) = heapq.heappop(sets), heapq.heappop(sets)
        parts = [
            (a + b, [*mine, *its]) for (a, mine), (b, its) in zip(one, reversed(other), strict=True)
        ]
        parts.sort(key=lambda part: -part[0])
        heapq.heappush(sets, (parts[-1][0] - parts[0][0], place, parts))
    return [places for _, part in sets[0][2] for places in _dealt(part, n // n_parts)]
