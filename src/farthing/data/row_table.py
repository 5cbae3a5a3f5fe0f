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
    if costs is not None:
        return row_table(
            _lane_by_lane(examples, lengths, micro_batch_tokens, n_slots, split, costs)
        )

    def cost(some: Examples) -> Ints:
        tokens = lengths[some].astype(np.int64)
        return tokens * squares_at + tokens * tokens if squares_at else tokens

    n_wanted = -(-len(micro_batches) // n_slots) * n_slots
    micro_batches = _split_dearest(
        _even(examples, lengths, micro_batch_tokens, n_wanted, split), n_slots, cost
    )
    lanes: list[list[Examples]] = [[] for _ in range(n_slots)]
    for place, micro_batch in enumerate(_dearest_first(micro_batches, cost)):
        row, slot = divmod(place, n_slots)
        lanes[n_slots - 1 - slot if row % 2 else slot].append(micro_batch)
    return row_table(lanes)


def _lane_by_lane(
    examples: Ints,
    lengths: Ints,
    micro_batch_tokens: int,
    n_slots: int,
    split: Split,
    costs: Costs,
) -> list[list[Examples]]:
    """The examples dealt to slots, each of which is split into as many micro-batches as the one
    that needs most.
    """
    of_each = [(cost, at) for at, cost in enumerate(costs(examples).tolist())]
    parts = [examples[places] for places in _dealt(of_each, n_slots)]
    n_rows = max(len(split(part, micro_batch_tokens)) for part in parts if len(part))
    lanes: list[list[Examples]] = []
    for part in parts:
        found = _even(part, lengths, micro_batch_tokens, n_rows, split) if len(part) else []
        lanes.append(_dearest_first(_split_dearest(found, n_rows, costs), costs))
    return lanes


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


def _dearest_first(micro_batches: list[Examples], costs: Costs) -> list[Examples]:
    return sorted(micro_batches, key=lambda each: (-int(costs(each).sum()), int(each.min())))


def _even(
    examples: Ints,
    lengths: Ints,
    micro_batch_tokens: int,
    n_wanted: int,
    split: Split,
) -> list[Examples]:
    """Split by the tightest budget that makes at most `n_wanted` micro-batches."""
    mean = int(lengths[examples].sum()) / n_wanted
    for share in TIGHTER:
        micro_batches = split(examples, max(1, min(micro_batch_tokens, int(mean * share) + 1)))
        if len(micro_batches) <= n_wanted:
            return micro_batches
    return split(examples, micro_batch_tokens)


def _split_dearest(micro_batches: list[Examples], multiple: int, costs: Costs) -> list[Examples]:
    """Part the dearest micro-batches in two until their number is a multiple of that, or none has
    two examples.
    """
    micro_batches = list(micro_batches)
    while len(micro_batches) % multiple:
        dear = [at for at, micro_batch in enumerate(micro_batches) if len(micro_batch) > 1]
        if not dear:
            break
        at = max(dear, key=lambda at: (int(costs(micro_batches[at]).sum()), -at))
        micro_batch = micro_batches[at]
        upto = np.cumsum(costs(micro_batch))
        first = 1 + int(np.abs(2 * upto[:-1] - upto[-1]).argmin())
        micro_batches[at : at + 1] = [micro_batch[:first], micro_batch[first:]]
    return micro_batches
