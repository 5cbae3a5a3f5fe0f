"""Sums of a step's gradients over the processes that share it.

`AllReduce` is the default: flat buckets leave while the last backward pass is still at work, and
the sum is the same to rounding on any number of processes. `FixedOrder` adds up in an order that
does not depend on how many processes there are, for the same bits. A step then has a fixed number
of slots, columns of its table of micro-batches, whose gradients are added one after the other.

Every process sends the same buckets in the same order, one that has failed too: others wait for it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

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
BUCKET = 1 << 24  # numbers that are sent at once; a larger weight goes by itself


def n_slots_for(n_ranks: int) -> int:
    """How many slots a run has that begins on so many processes."""
    return next((n for n in (SLOTS, 2 * SLOTS) if n_ranks <= n), n_ranks)


def slots_of(rank: int, n_ranks: int, n_slots: int) -> range:
    """The slots that a process computes: neighbours, and so those of the process after it."""
    return range(rank * n_slots // n_ranks, (rank + 1) * n_slots // n_ranks)


def reducer_of(ranks: Ranks, weights: Sequence[Tensor], n_slots: int) -> Reducer:
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


class Reducer(ABC):
    """What a step tells of its backward passes, and how the sums come to the weights."""

    def __init__(self, ranks: Ranks, weights: Sequence[Tensor]) -> None:
        self._ranks, self._weights = ranks, weights
        self._hooks: list[Any] = []
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._forget_hooks()
        self._has = [0] * len(self._weights)

    def slot(self, number: int) -> None:
        """The slots before this one are complete."""
        return None

    def last_backward_begins(self) -> None:
        """The backward pass that comes now is the last one of the step."""
        return None

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Gradients of the backward passes in the block are not of the step, and forgotten."""
        self._forget_hooks()
        kept = [weight.grad for weight in self._weights]
        yield
        for weight, gradient in zip(self._weights, kept, strict=True):
            weight.grad = gradient

    @abstractmethod
    def end(self, has_failed: bool) -> list[int]:
        """No backward pass comes any more. Of each weight, 1 where this process has a gradient."""

    @abstractmethod
    def finish(self, has_gradient: Sequence[int]) -> None:
        """Leave the sums with the weights of every process. `has_gradient` says of each weight
        whether any process has a gradient; the others keep none.
        """

    def give_up(self) -> None:
        """Wait for what is under way, and keep nothing of it."""
        self.finish([0] * len(self._weights))

    def _forget_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _in_buckets(self, places: Iterable[int]) -> list[list[int]]:
        """Places of weights, in order, in buckets of one dtype and at most `BUCKET` numbers; a
        larger weight has one of its own.
        """
        buckets: list[list[int]] = []
        n, dtype = 0, None
        for at in places:
            weight = self._weights[at]
            if not buckets or weight.dtype != dtype or n + weight.numel() > BUCKET:
                buckets.append([])
                n, dtype = 0, weight.dtype
            buckets[-1].append(at)
            n += weight.numel()
        return buckets

    def _parts(self, flat: Tensor, bucket: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """(place of a weight, what `flat` has for it) of a bucket."""
        parts = flat.split([self._weights[at].numel() for at in bucket])
        for at, part in zip(bucket, parts, strict=True):
            yield at, part.view(self._weights[at].shape)


class AllReduce(Reducer):
    """`all_reduce` of flat buckets. A weight's gradient becomes a view of its bucket."""

    def __init__(self, ranks: Ranks, weights: Sequence[Tensor]) -> None:
        super().__init__(ranks, weights)
        # a backward pass comes to the last weights first
        self._buckets = self._in_buckets(reversed(range(len(weights))))
        self._overlaps = ranks.n > 1 and ranks.device.type == "cuda"

    def begin(self) -> None:
        super().begin()
        self._ready = set[int]()
        self._sent: list[tuple[Tensor, Any]] = []

    def last_backward_begins(self) -> None:
        if self._overlaps:
            self._hooks = [
                leaf_of(weight).register_post_accumulate_grad_hook(partial(self._is_there, at))
                for at, weight in enumerate(self._weights)
            ]

    def _is_there(self, at: int, _: Tensor) -> None:
        self._ready.add(at)
        while len(self._sent) < len(self._buckets) and self._ready.issuperset(
            self._buckets[len(self._sent)]
        ):
            self._send()

    def _send(self) -> None:
        parts = []
        for at in self._buckets[len(self._sent)]:
            weight = self._weights[at]
            self._has[at] = int(weight.grad is not None)
            zeros = weight.grad is None
            parts.append(weight.new_zeros(weight.numel()) if zeros else weight.grad.reshape(-1))
            weight.grad = None
        flat = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(SUMS)
        self._sent.append((flat, dist.all_reduce(flat, async_op=True)))

    def end(self, has_failed: bool) -> list[int]:
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
        with self._ranks.together():
            for bucket, (flat, work) in zip(self._buckets, self._sent, strict=False):
                work.wait()
                for at, part in self._parts(flat, bucket):
                    if has_gradient[at]:
                        self._weights[at].grad = part.to(self._weights[at].dtype)
        self._sent = []


class FixedOrder(Reducer):
    """Sums that are the same to the bit on any number of processes: after the backward passes each
    adds its slots to the sum that it gets from the one before, and the last one tells all.
    """

    def __init__(self, ranks: Ranks, weights: Sequence[Tensor], n_slots: int) -> None:
        self._slots = slots_of(ranks.index, ranks.n, n_slots)
        super().__init__(ranks, weights)

    def begin(self) -> None:
        super().begin()
        self._kept: list[list[Tensor | None]] = []
        """Gradients of each slot; those of the first process are added up at once."""
        self._next = self._slots.start

    def slot(self, number: int) -> None:
        for _ in range(self._next, number):
            self._close()
        self._next = max(self._next, number)

    def _close(self) -> None:
        """Take the weights' gradients as those of a slot."""
        adds_up = self._ranks.index == 0 and bool(self._kept)
        if not adds_up:
            self._kept.append([None] * len(self._weights))
        sums = self._kept[-1]
        for at, weight in enumerate(self._weights):
            gradient, weight.grad = weight.grad, None
            if gradient is not None:
                before, self._has[at] = sums[at], 1
                gradient = gradient.to(SUMS)
                sums[at] = gradient if before is None else before.add_(gradient)

    def end(self, has_failed: bool) -> list[int]:
        if has_failed:
            self._kept = []
        else:
            self.slot(self._slots.stop)
        return self._has

    def finish(self, has_gradient: Sequence[int]) -> None:
        ranks, weights = self._ranks, self._weights
        used = (at for at in range(len(weights)) if has_gradient[at])
        sums: list[tuple[list[int], Tensor]] = []
        with ranks.together():
            for bucket in self._in_buckets(used):
                n_numbers = sum(weights[at].numel() for at in bucket)
                flat = weights[bucket[0]].new_zeros(n_numbers, dtype=SUMS)
                if ranks.index > 0:
                    dist.recv(flat, ranks.index - 1)
                for slot in self._kept:
                    for at, part in self._parts(flat, bucket):
                        if (gradient := slot[at]) is not None:
                            part.add_(gradient)
                            slot[at] = None
                if ranks.index < ranks.n - 1:
                    dist.send(flat, ranks.index + 1)
                sums.append((bucket, flat))
            for bucket, flat in sums:
                if ranks.n > 1:
                    dist.broadcast(flat, ranks.n - 1)
                for at, part in self._parts(flat, bucket):
                    weights[at].grad = part.to(weights[at].dtype)
        self._kept = []
