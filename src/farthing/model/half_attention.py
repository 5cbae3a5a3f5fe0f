"""Attention in bf16 on a CPU, in few shapes: a document after another, a block of queries at a
time.

oneDNN, by which torch multiplies matrices of bf16, makes code for every shape of a product and
keeps it for the life of the process: about 0.65 MiB and 0.8 ms each. So queries and keys of a block
are copied, with zeros up to one of `few_sizes`. Short documents are multiplied in fp32, by MKL,
which makes no code and is quicker for them (docs/log.md has the times). Scores live for a block;
its weights are kept where they are few, else the backward pass makes them again.

Refuses dropout, windows, soft-capping, biases and documents that share keys: `is_for` says no to
what it can see of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from farthing.model.documents import Documents

MOST_KEYS = 2048  # up to which blocks are quicker than torch's fused kernel
MOST_KEPT = 256  # keys that a block may see for its weights to be kept
MOST_KEYS_FP32, MOST_SCORES_FP32 = (
    64,
    64 * 64,
)  # of a block and a head: up to which products in fp32 are quicker
ROWS, MOST_SCORES = (
    128,
    2**19,
)  # of a block; where nothing is hidden it has as many rows as have so many scores


def few_sizes(n: int) -> int:
    """The least size that is as large: multiples of 16, from 256 on eight for each doubling."""
    step = max(16, 1 << max(0, n - 1).bit_length() >> 4)
    return -(-n // step) * step


def is_for(query: Tensor, documents: Documents, *, causal: bool) -> bool:
    """Whether `half_attention` can take these queries [T, H, D], and is expected to be quicker."""
    if query.device.type != "cpu" or query.dtype != torch.bfloat16:
        return False
    fewest = 0 if causal else MOST_KEYS_FP32
    return fewest < documents.most_keys <= MOST_KEYS and not torch.compiler.is_compiling()


def half_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, *, causal: bool, scale: float
) -> Tensor:
    """Query [T, H, D], key and value [K, G, D] -> [T, H, D], all bf16; causal: a document's last
    query is at its last key.

    H is a multiple of G. Scores are rounded to bf16 as in attention in plain operations, softmax is
    fp32.
    """
    out: Tensor = _Half.apply(query, key, value, documents, causal, scale)
    return out


class _Block(NamedTuple):
    """Queries of a document and the keys that they see, by their places."""

    rows: slice
    keys: slice
    dtype: torch.dtype
    """In which they are multiplied."""
    is_last: bool
    """Of its document."""

    @property
    def n_rows(self) -> int:
        """Queries."""
        return int(self.rows.stop - self.rows.start)

    @property
    def n_keys(self) -> int:
        """Keys."""
        return int(self.keys.stop - self.keys.start)

    def taken(self, tensor: Tensor, places: slice, n_groups: int) -> Tensor:
        """[T, H, D] at these places -> [G, H / G * size, D], with zeros behind each head's."""
        n = places.stop - places.start
        size = n if self.dtype == torch.float32 else few_sizes(n)
        found = torch.zeros(tensor.shape[1], size, tensor.shape[2], dtype=self.dtype)
        found[:, :n] = tensor[places].transpose(0, 1)
        return found.view(n_groups, -1, tensor.shape[2])

    def given_back(self, tensor: Tensor, n_heads: int) -> Tensor:
        """[G, H / G * size, D] -> [T, H, D] of the queries: the opposite of `taken`."""
        return tensor.view(n_heads, -1, tensor.shape[2])[:, : self.n_rows].transpose(0, 1)


class _Half(torch.autograd.Function):
    """Works on heads of a key together."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        documents: Documents,
        causal: bool,
        scale: float,
    ) -> Tensor:
        """A block after another; weights are kept where there are few."""
        ctx.documents, ctx.causal, ctx.scale = documents, causal, scale
        all_weights = []
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        n_heads, n_groups = query.shape[1], key.shape[1]
        for block in _blocks(documents, n_heads, causal):
            own = block.taken(query, block.rows, n_groups).mul_(scale)
            weights = _weights(own, block.taken(key, block.keys, n_groups), block, n_heads, causal)
            if block.n_keys <= MOST_KEPT:
                all_weights.append(weights)
            made = torch.bmm(weights, block.taken(value, block.keys, n_groups))
            out[block.rows] = block.given_back(made, n_heads)
        ctx.save_for_backward(query, key, value, *all_weights)
        return out

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Weights of a block, made again where there are many, then what they pass on; sums over
        blocks in fp32.
        """
        query, key, value, *all_weights = ctx.saved_tensors
        kept = iter(all_weights)
        found = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for tensor in (query, key, value)
        ]
        to_query, to_key, to_value = found
        n_heads, n_groups = query.shape[1], key.shape[1]
        sums: list[Tensor] = []
        for block in _blocks(ctx.documents, n_heads, ctx.causal):
            own, given = (block.taken(tensor, block.rows, n_groups) for tensor in (query, grad))
            seen, read = (block.taken(tensor, block.keys, n_groups) for tensor in (key, value))
            own.mul_(ctx.scale)
            weights = (
                next(kept)
                if block.n_keys <= MOST_KEPT
                else _weights(own, seen, block, n_heads, ctx.causal)
            )
            of_weights = torch.bmm(given, read.transpose(1, 2))
            scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            to_query[block.rows] = block.given_back(
                torch.bmm(scores, seen).mul_(ctx.scale), n_heads
            )
            more = [
                torch.bmm(scores.transpose(1, 2), own),
                torch.bmm(weights.transpose(1, 2), given),
            ]
            more = [tensor[:, : block.n_keys] for tensor in more]
            if sums:
                for into, one in zip(sums, more, strict=True):
                    into[:, : block.n_keys] += one
            else:  # the first of a document: none sees more keys
                sums = more if block.is_last else [tensor.float() for tensor in more]
            if block.is_last:
                places = slice(block.keys.start, block.keys.start + sums[0].shape[1])
                to_key[places], to_value[places] = (tensor.transpose(0, 1) for tensor in sums)
                sums = []
        return *found, None, None, None


def _blocks(documents: Documents, n_heads: int, causal: bool) -> Iterator[_Block]:
    """Of one document after another, from its last queries to its first where it looks back, which
    see fewer keys.
    """
    start = key_start = 0
    for length, n_keys in zip(documents.lengths, documents.key_lengths, strict=True):
        step = ROWS
        if not causal:
            step = max(ROWS, MOST_SCORES // (n_heads * n_keys) // 16 * 16)
        firsts = range(0, length, step)
        for number, first in enumerate(reversed(firsts) if causal else firsts):
            last = min(first + step, length)
            seen = n_keys - length + last if causal else n_keys
            dtype = torch.float32 if (last - first) * seen <= MOST_SCORES_FP32 else torch.bfloat16
            yield _Block(
                slice(start + first, start + last),
                slice(key_start, key_start + seen),
                dtype,
                number == len(firsts) - 1,
            )
        start, key_start = start + length, key_start + n_keys


def _weights(own: Tensor, seen: Tensor, block: _Block, n_heads: int, causal: bool) -> Tensor:
    """Scaled queries [G, H / G * B, D] of a block and keys [G, S, D] -> [G, H / G * B, S]; none for
    padding.
    """
    scores = torch.bmm(own, seen.transpose(1, 2))
    scores[:, :, block.n_keys :] = -torch.inf
    if causal and block.n_rows > 1:
        later = torch.ones(block.n_rows, block.n_rows, dtype=torch.bool).triu_(1)
        last = slice(block.n_keys - block.n_rows, block.n_keys)
        scores.view(n_heads, -1, scores.shape[2])[:, : block.n_rows, last].masked_fill_(
            later, -torch.inf
        )
    return torch.softmax(scores, -1, dtype=torch.float32).to(own.dtype)
