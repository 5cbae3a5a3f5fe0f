"""The gradients of a step on their way between ranks, in buckets: after the last backward pass, or
under it where that pays.

Under it a bucket leaves as soon as the pass has come to all of its weights, in a thread (on a GPU
in a stream of its own). All ranks send the same buckets in the same order, one that has failed too:
the others wait for it. Refuses to talk to other ranks: `ranks.py` does, and to change a sum: the
order of additions is that of `lanes.py`. Not run on GPUs so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from farthing.train.lanes import LaneSums, Piece
from farthing.train.ranks import Ranks

BUCKET = 1 << 24
"""Numbers of a gradient that are sent at once."""
EARLY_BYTES = 256 << 20
"""Gradients from this size on are sent under the last backward pass: 0.1 s at 4 GB/s there and
back, as cards without peer access reach. On a CPU never: the pass and the sums want the same cores
(docs/log.md)."""


def pays_early(ranks: Ranks, weights: Sequence[Tensor]) -> bool:
    """Whether to send under the last backward pass. The same on all ranks."""
    if ranks.n == 1 or ranks.is_spread or ranks.device.type != "cuda":
        return False
    return sum(weight.nbytes for weight in weights) >= EARLY_BYTES


class Sending:
    """The gradients of one step."""

    def __init__(self, ranks: Ranks, sums: LaneSums) -> None:
        self._ranks, self._sums = ranks, sums
        self._is_early = pays_early(ranks, sums.weights)
        self._hooks: list[Any] = []
        self._under_way: list[Future[None]] = []
        if self._is_early:
            self._buckets = buckets_of(reversed(range(len(sums.weights))), sums.weights)
            begin = [
                (piece.at, number)
                for number, bucket in enumerate(self._buckets)
                for piece in bucket
            ]
            self._missing = dict(reversed(begin))  # with its first piece
            self._thread = ThreadPoolExecutor(1, "farthing-sending")
            self._stream = torch.cuda.Stream() if ranks.device.type == "cuda" else None

    def last_pass_begins(self) -> None:
        """The backward pass that comes now is this rank's last one of the step."""
        if self._is_early:
            self._hooks = [
                weight.register_post_accumulate_grad_hook(partial(self._is_there, at))
                for at, weight in enumerate(self._sums.weights)
            ]

    def _is_there(self, at: int, _: Tensor) -> None:
        self._missing.pop(at, None)
        first_missing = min(self._missing.values(), default=len(self._buckets))
        while len(self._under_way) < first_missing:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[len(self._under_way)]
        self._sums.end([piece.at for piece in bucket if piece.start == 0])
        there = None if self._stream is None else torch.cuda.current_stream().record_event()
        self._under_way.append(self._thread.submit(self._send, bucket, there))

    def _send(self, bucket: list[Piece], there: Any) -> None:
        if self._stream is None:
            self._ranks.sum_bucket(bucket, self._sums)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(there)
            for gradient in (
                each for piece in bucket for each in self._sums.nodes[piece.at] if each is not None
            ):
                gradient.record_stream(self._stream)
            self._ranks.sum_bucket(bucket, self._sums)

    def passes_end(self, has_failed: bool) -> list[int]:
        """No backward pass comes any more. Of each weight, 1 where this rank's lanes have a
        gradient of it, else 0.
        """
        for hook in self._hooks:
            hook.remove()
        if has_failed:
            self._sums.forget()
        elif not self._is_early:
            self._sums.end(range(len(self._sums.weights)))
        while self._is_early and len(self._under_way) < len(self._buckets):
            self._send_next()
        return self._sums.has_gradient

    def wait(self) -> None:
        """Until what is under way is there, or lost with another rank."""
        if self._is_early:
            with self._ranks.together():
                for each in self._under_way:
                    each.result()
            self._thread.shutdown()
            if self._stream is not None:
                torch.cuda.current_stream().wait_stream(self._stream)

    def finish(self, has_gradient: Sequence[int]) -> None:
        """Leave the gradients of all lanes, added up by the tree, with the weights of every rank.
        `has_gradient` says of each weight whether any rank has one; the others keep none."""
        weights = self._sums.weights
        if self._ranks.n == 1:
            self._sums.give_back()
        elif not self._is_early:
            with self._ranks.together():
                for bucket in buckets_of(
                    [at for at, each in enumerate(has_gradient) if each], weights
                ):
                    self._ranks.sum_bucket(bucket, self._sums)
        else:
            for weight, has in zip(weights, has_gradient, strict=True):
                weight.grad = weight.grad if has else None
        self._sums.forget()


def sums_bytes(ranks: Ranks, weights: Sequence[Tensor]) -> int:
    """What sums of whole gradients take besides: a bucket as this rank has it, as others send it,
    and as it comes out.
    """
    n_numbers = min(BUCKET, sum(weight.numel() for weight in weights))
    return 0 if ranks.n == 1 or ranks.trains_rows else 3 * 4 * n_numbers


def buckets_of(wanted: Iterable[int], weights: Sequence[Tensor]) -> list[list[Piece]]:
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
