"""Sums of a step's gradients over the processes that share it.

`AllReduce` is the default: flat buckets leave while the last backward pass is still at work, and
the sum is the same to rounding on any number of processes. `FixedOrder` adds up in an order that
does not depend on how many processes there are, for the same bits. A step then has a fixed number
of slots, columns of its table of micro-batches. Each slot's gradients are added one after the
other, and slots by a tree: 0 and 1, 2 and 3, then those two, whoever computes them.

Every process sends the same buckets in the same order, one that has failed too: others wait for it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from farthing.dist.ranks import Ranks
from farthing.model.casts import leaf_of
from farthing.model.precision import SUMS

SLOTS = 4
"""Of a step that is added up in a fixed order: as many processes can share it, on fewer some
compute several.
"""
BUCKET = 1 << 24
"""Numbers that are sent at once. `AllReduce` sends a larger weight by itself, `FixedOrder` in
pieces.
"""
Node = tuple[int, int]
"""(first slot, end) of a subtree."""
Gradients = list[Tensor | None]
"""None where a weight had no part in the loss."""
_all_gather = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)  # its name before torch 2.13


def n_slots_for(n_ranks: int) -> int:
    """How many slots a run has that begins on so many processes."""
    return next((n for n in (SLOTS, 2 * SLOTS) if n_ranks <= n), n_ranks)


def slots_of(rank: int, n_ranks: int, n_slots: int) -> range:
    """The slots that a process computes: neighbours, so that it can add up what the tree adds up
    anyway.
    """
    return range(rank * n_slots // n_ranks, (rank + 1) * n_slots // n_ranks)


def reducer_of(ranks: Ranks, weights: Sequence[Tensor], n_slots: int) -> AllReduce | FixedOrder:
    """For `n_slots` in a fixed order, or 0: in any. Rows of weights that FSDP2 sums are no matter
    of a reducer.
    """
    weights = [] if ranks.trains_rows else weights
    return FixedOrder(ranks, weights, n_slots) if n_slots else AllReduce(ranks, weights)


def reduce_bytes(ranks: Ranks, weights: Sequence[Tensor]) -> int:
    """What sums of whole gradients take besides, at most: a bucket as this process has it, as
    others send it, and as it comes out.
    """
    n_numbers = min(BUCKET, sum(weight.numel() for weight in weights))
    return 0 if ranks.n == 1 or ranks.trains_rows else 3 * 4 * n_numbers


class AllReduce:
    """`all_reduce` of flat buckets. A weight's gradient becomes a view of its bucket."""

    def __init__(self, ranks: Ranks, weights: Sequence[Tensor]) -> None:
        self._ranks, self._weights = ranks, weights
        # a backward pass comes to the last weights first
        self._buckets = _in_buckets(list(enumerate(weights))[::-1])
        self._bucket_of = {at: n for n, bucket in enumerate(self._buckets) for at in bucket}
        self._overlaps = ranks.n > 1 and ranks.device.type == "cuda"
        self._hooks: list[Any] = []
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._forget_hooks()
        self._missing = [len(bucket) for bucket in self._buckets]
        self._sent: list[tuple[Tensor, Any]] = []
        self._has = [0] * len(self._weights)

    def slot(self, number: int) -> None:
        """The slots before this one are complete."""

    def last_backward_begins(self) -> None:
        """The backward pass that comes now is the last one of the step."""
        if self._overlaps:
            self._hooks = [
                leaf_of(weight).register_post_accumulate_grad_hook(partial(self._is_there, at))
                for at, weight in enumerate(self._weights)
            ]

    def _is_there(self, at: int, _: Tensor) -> None:
        self._missing[self._bucket_of[at]] -= 1
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send()

    def _send(self) -> None:
        weights = [self._weights[at] for at in self._buckets[len(self._sent)]]
        for at, weight in zip(self._buckets[len(self._sent)], weights, strict=True):
            self._has[at] = int(weight.grad is not None)
        parts = [
            weight.new_zeros(weight.numel()) if weight.grad is None else weight.grad.reshape(-1)
            for weight in weights
        ]
        flat = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(SUMS)
        for weight in weights:
            weight.grad = None
        self._ranks.n_sums += 1
        self._sent.append((flat, dist.all_reduce(flat, async_op=True)))

    def end(self, has_failed: bool) -> list[int]:
        """No backward pass comes any more. Of each weight, 1 where this process has a gradient."""
        self._forget_hooks()
        if has_failed:
            for weight in self._weights:
                weight.grad = None
        if self._ranks.n == 1:
            return [int(weight.grad is not None) for weight in self._weights]
        with self._ranks.together():
            while len(self._sent) < len(self._buckets):
                self._send()
        return self._has

    def finish(self, has_gradient: Sequence[int]) -> None:
        """Leave the sums with the weights of every process. `has_gradient` says of each weight
        whether any process has a gradient; the others keep none.
        """
        with self._ranks.together():
            for bucket, (flat, work) in zip(self._buckets, self._sent, strict=False):
                work.wait()
                parts = flat.split([self._weights[at].numel() for at in bucket])
                for at, part in zip(bucket, parts, strict=True):
                    if has_gradient[at]:
                        weight = self._weights[at]
                        weight.grad = part.view(weight.shape).to(weight.dtype)
        self._sent = []

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Gradients of the backward passes in the block are not of the step, and forgotten."""
        self._forget_hooks()
        kept = [weight.grad for weight in self._weights]
        yield
        for weight, gradient in zip(self._weights, kept, strict=True):
            weight.grad = gradient

    def give_up(self) -> None:
        """Wait for what is under way, and keep nothing of it."""
        self.finish([0] * len(self._weights))

    def _forget_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _in_buckets(weights: Iterable[tuple[int, Tensor]]) -> list[list[int]]:
    """Places of weights, in order, in buckets of one dtype and at most `BUCKET` numbers; a larger
    weight has one of its own.
    """
    buckets: list[list[int]] = []
    n, dtype = 0, None
    for at, weight in weights:
        if not buckets or weight.dtype != dtype or n + weight.numel() > BUCKET:
            buckets.append([])
            n, dtype = 0, weight.dtype
        buckets[-1].append(at)
        n += weight.numel()
    return buckets


# ---- in a fixed order ----


class Piece(NamedTuple):
    """Numbers of a weight, laid out flat, that are sent with one bucket."""

    at: int
    """Its place among the weights."""
    start: int
    end: int


def middle(node: Node) -> int:
    """Where the tree parts a node of several slots."""
    return node[0] + (node[1] - node[0] + 1) // 2


def nodes_of(slots: range, n_slots: int) -> list[Node]:
    """The largest subtrees that lie within `slots`, in order."""

    def within(node: Node) -> list[Node]:
        if slots.start <= node[0] and node[1] <= slots.stop:
            return [node]
        if node[1] <= slots.start or slots.stop <= node[0] or node[1] - node[0] == 1:
            return []
        return [*within((node[0], middle(node))), *within((middle(node), node[1]))]

    return within((0, n_slots))


def add_up(nodes: dict[Node, Tensor], n_slots: int) -> Tensor:
    """The root of the tree from subtrees that make up all slots; tensors are changed in place."""

    def value(node: Node) -> Tensor:
        found = nodes.pop(node, None)
        if found is not None:
            return found
        return value((node[0], middle(node))).add_(value((middle(node), node[1])))

    return value((0, n_slots))


class FixedOrder:
    """Sums that are the same to the bit on any number of processes: after the backward passes, each
    process adds up a slice of a bucket, then the slices go to all.
    """

    def __init__(self, ranks: Ranks, weights: Sequence[Tensor], n_slots: int) -> None:
        self._ranks, self._weights, self._n = ranks, weights, n_slots
        self._slots = slots_of(ranks.index, ranks.n, n_slots)
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._has = [0] * len(self._weights)
        self.nodes: list[Gradients] = [[] for _ in self._weights]
        """Of each weight: the sums of the subtrees so far, see `nodes_of`."""
        self._next = self._slots.start

    def last_backward_begins(self) -> None:
        """Nothing is sent before all slots are complete."""

    def slot(self, number: int) -> None:
        """The slots before this one are complete."""
        for each in range(self._next, number):
            self._close(each)
        self._next = max(self._next, number)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """As `AllReduce.aside`."""
        self.slot(self._slots.stop)
        yield
        for weight in self._weights:
            weight.grad = None

    def end(self, has_failed: bool) -> list[int]:
        """No backward pass comes any more. Of each weight, 1 where this process has a gradient."""
        if has_failed:
            self.nodes = [[] for _ in self._weights]
        else:
            self.slot(self._slots.stop)
        return self._has

    def finish(self, has_gradient: Sequence[int]) -> None:
        """As `AllReduce.finish`."""
        if self._ranks.n == 1:
            for weight, (gradient,) in zip(self._weights, self.nodes, strict=True):
                weight.grad = gradient
        else:
            with self._ranks.together():
                for bucket in _in_pieces(
                    [at for at, each in enumerate(has_gradient) if each], self._weights
                ):
                    self._sum(bucket)
        self.nodes = [[] for _ in self._weights]

    def give_up(self) -> None:
        """Keep nothing of the step."""
        self.nodes = [[] for _ in self._weights]

    def _close(self, slot: int) -> None:
        """Take the weights' gradients as those of a slot, and add up what is complete."""
        for at, weight in enumerate(self._weights):
            gradient, weight.grad = weight.grad, None
            self._has[at] |= int(gradient is not None)
            self.nodes[at].append(gradient)
        n_before, n_now = (
            len(nodes_of(range(self._slots.start, end), self._n)) for end in (slot, slot + 1)
        )
        for _ in range(n_before + 1 - n_now):
            others = [each.pop() for each in self.nodes]
            totals = _added([each.pop() for each in self.nodes], others)
            for each, total in zip(self.nodes, totals, strict=True):
                each.append(total)

    def _sum(self, bucket: Sequence[Piece]) -> None:
        """Leave the gradients of all slots with these pieces of the weights on every process.

        Pieces of a weight come in order, and are written over its gradients: what is taken besides
        is some times the bucket. A process that has one slot sends 2 (n - 1) / n of the gradient,
        as in a ring. What a process does not have counts as zeros.
        """
        ranks, like = self._ranks, self._weights[bucket[0].at]
        size = -(-sum(piece.end - piece.start for piece in bucket) // ranks.n)  # of a slice
        held = [nodes_of(slots_of(rank, ranks.n, self._n), self._n) for rank in range(ranks.n)]
        n_own = len(held[ranks.index])
        mine = like.new_zeros(n_own, size * ranks.n)
        place = 0
        for at, start, end in bucket:
            for row, gradient in zip(mine, self.nodes[at], strict=False):
                if gradient is not None:
                    row[place : place + end - start].copy_(gradient.reshape(-1)[start:end])
            place += end - start
        sent = mine.view(n_own, ranks.n, size).transpose(0, 1).reshape(-1)
        got = like.new_empty(sum(len(nodes) for nodes in held) * size)
        ranks.n_sums += 2
        dist.all_to_all_single(
            got, sent, [len(nodes) * size for nodes in held], [n_own * size] * ranks.n
        )
        slices = dict(
            zip([node for nodes in held for node in nodes], got.view(-1, size), strict=True)
        )
        flat = like.new_empty(size * ranks.n)
        _all_gather(flat, add_up(slices, self._n).contiguous())
        place = 0
        for at, start, end in bucket:
            weight = self._weights[at]
            if start == 0:
                weight.grad = self._room_for(at)
            assert weight.grad is not None
            weight.grad.view(-1)[start:end] = flat[place : place + end - start]
            place += end - start
            if end == weight.numel():
                self.nodes[at] = []

    def _room_for(self, at: int) -> Tensor:
        """Where the sum of a weight's gradients may be written: over one of them, else it is new."""
        for each in self.nodes[at]:
            if each is not None and each.is_contiguous():
                return each
        return torch.empty_like(self._weights[at], memory_format=torch.contiguous_format)


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


def _in_pieces(wanted: Iterable[int], weights: Sequence[Tensor]) -> list[list[Piece]]:
    """Weights at these places, in order, in buckets of one dtype and at most `BUCKET` numbers;
    larger ones in pieces.
    """
    buckets: list[list[Piece]] = []
    n, dtype = 0, None
    for at in wanted:
        weight = weights[at]
        for start in range(0, max(1, weight.numel()), BUCKET):
            piece = Piece(at, start, min(start + BUCKET, weight.numel()))
            size = piece.end - start
            if not buckets or weight.dtype != dtype or n + size > BUCKET:
                buckets.append([])
                n, dtype = 0, weight.dtype
            buckets[-1].append(piece)
            n += size
    return buckets
