"""Gradients of a step, added up in an order that does not depend on how many processes share the
step.

A run that several GPUs share has a fixed number of lanes. A lane is a column of the step's table of
micro-batches; its gradients are added one after the other. Lanes are added by a fixed tree of
pairs, whoever computes them: lane 0 and 1, 2 and 3, then those two. Floating-point sums depend on
their order alone, so that the result is the same to the bit on any number of processes. Refuses to
know other processes: `ranks.py` carries sums between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

LANES = 4
"""Of a run that adds up in a fixed order: as many processes can share it, on fewer some compute
several lanes.
"""
Node = tuple[int, int]
"""(first lane, end) of a subtree."""
Gradients = list[Tensor | None]
"""None where a weight had no part in the loss."""


class Piece(NamedTuple):
    """Numbers of a weight, laid out flat, that are sent with one bucket."""

    at: int
    """Its place among the weights."""
    start: int
    end: int


def n_lanes_for(n_ranks: int, fixed_order: bool) -> int:
    """How many lanes a run has that begins on so many processes."""
    if not fixed_order:
        return n_ranks
    return next((n for n in (LANES, 2 * LANES) if n_ranks <= n), n_ranks)


def lanes_of(rank: int, n_ranks: int, n_lanes: int) -> range:
    """The lanes that a process computes: neighbours, so that it can add up what the tree adds up
    anyway.
    """
    return range(rank * n_lanes // n_ranks, (rank + 1) * n_lanes // n_ranks)


def middle(node: Node) -> int:
    """Where the tree parts a node of several lanes."""
    return node[0] + (node[1] - node[0] + 1) // 2


def nodes_of(lanes: range, n_lanes: int) -> list[Node]:
    """The largest subtrees that lie within `lanes`, in order."""

    def within(node: Node) -> list[Node]:
        if lanes.start <= node[0] and node[1] <= lanes.stop:
            return [node]
        if node[1] <= lanes.start or lanes.stop <= node[0] or node[1] - node[0] == 1:
            return []
        return [*within((node[0], middle(node))), *within((middle(node), node[1]))]

    return within((0, n_lanes))


def add_up(nodes: dict[Node, Tensor], n_lanes: int) -> Tensor:
    """The root of the tree from subtrees that make up all lanes; tensors are changed in place."""

    def value(node: Node) -> Tensor:
        found = nodes.pop(node, None)
        if found is not None:
            return found
        return value((node[0], middle(node))).add_(value((middle(node), node[1])))

    return value((0, n_lanes))


@dataclass
class LaneSums:
    """The gradients of the lanes that this process has computed so far, added up by subtrees."""

    n_lanes: int
    weights: Sequence[Tensor]
    lanes: range

    def __post_init__(self) -> None:
        self.has_gradient = [0] * len(self.weights)
        """Of each weight, 1 where any of these lanes has a gradient of it."""
        self.nodes: list[Gradients] = [[] for _ in self.weights]
        """Of each weight: the sums of the subtrees so far, see `nodes_of`."""
        self._next = self.lanes.start

    def forget(self) -> None:
        """Keep nothing of what was added up, and add nothing any more."""
        self.nodes = [[] for _ in self.weights]
        self._next = self.lanes.stop

    def up_to(self, lane: int) -> None:
        """The lanes before `lane` are complete."""
        for each in range(self._next, lane):
            self._close(each, range(len(self.weights)))
        self._next = max(self._next, lane)

    def end(self, places: Sequence[int]) -> None:
        """All lanes are complete, as far as these weights go."""
        for each in range(self._next, self.lanes.stop):
            self._close(each, places)

    def _close(self, lane: int, places: Sequence[int]) -> None:
        """Take the weights' gradients as those of a lane, and add up what is complete."""
        for at in places:
            gradient, self.weights[at].grad = self.weights[at].grad, None
            self.has_gradient[at] |= int(gradient is not None)
            self.nodes[at].append(gradient)
        n_before, n_now = (
            len(nodes_of(range(self.lanes.start, end), self.n_lanes)) for end in (lane, lane + 1)
        )
        for _ in range(n_before + 1 - n_now):
            others = [self.nodes[at].pop() for at in places]
            totals = _added([self.nodes[at].pop() for at in places], others)
            for at, total in zip(places, totals, strict=True):
                self.nodes[at].append(total)

    def room_for(self, at: int) -> Tensor:
        """Where the sum of all lanes of a weight's gradients may be written: over one of them, else
        it is new.
        """
        found = next(
            (each for each in self.nodes[at] if each is not None and each.is_contiguous()), None
        )
        return (
            torch.empty_like(self.weights[at], memory_format=torch.contiguous_format)
            if found is None
            else found
        )

    def give_back(self) -> None:
        """Put the gradients of the one subtree that is left, all lanes, to the weights."""
        for weight, (gradient,) in zip(self.weights, self.nodes, strict=True):
            weight.grad = gradient


def _added(mine: Gradients, other: Gradients) -> Gradients:
    """Sums, in place of `mine`. What is missing counts as zeros, as it does where it is sent."""
    both = [(a, b) for a, b in zip(mine, other, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    alone = [
        a if a is not None else b
        for a, b in zip(mine, other, strict=True)
        if (a is None) != (b is None)
    ]
    if alone:
        torch._foreach_add_(alone, 0.0)  # -0.0 becomes 0.0
    return [a if a is not None else b for a, b in zip(mine, other, strict=True)]
