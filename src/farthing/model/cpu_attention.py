"""Attention on a CPU, a block of queries at a time, by matrix products over the keys that the block
sees.

torch's fused kernel for CPUs works at a third of what products reach in fp32, and less in bf16;
products waste the upper half of a block's own square only (docs/log.md has the times). Memory is
that of a fused kernel: scores live for a block, and the backward pass computes them again.

Refuses dropout, windows and soft-capping, which the kernels of `attention.py` have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

FEWEST_KEYS_FP32, MOST_KEYS = (
    384,
    2048,
)  # between which products are quicker; in bf16 they are from one key on
ROWS_FP32, ROWS_BF16, FEWEST_ROWS = 64, 128, 32
MOST_SCORES = 2**20  # of a block: with what the backward pass makes of them 14 MB


def is_quicker_in_blocks(query: Tensor, n_keys: int) -> bool:
    """Whether `blocked_attention` is expected to beat torch's fused kernel here."""
    if query.device.type != "cpu" or n_keys > MOST_KEYS or torch.compiler.is_compiling():
        return False
    return query.dtype == torch.bfloat16 or (
        query.dtype == torch.float32 and n_keys >= FEWEST_KEYS_FP32
    )


def blocked_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float
) -> Tensor:
    """Query [N, H, T, D], key and value [N, G, K, D] -> [N, H, T, D]; causal: the last query is at
    the last key.

    H is a multiple of G. fp32 or bf16; scores of bf16 are rounded to it, as in attention in plain
    operations, softmax and sums over blocks are fp32.
    """
    out: Tensor = _Blocked.apply(query, key, value, causal, scale)
    return out


class _Blocked(torch.autograd.Function):
    """Works on heads of a key together: queries [N * G, H / G, T, D], keys and values [N * G, K,
    D].

    What comes out lies in memory token by token, as the next product wants it, so that it is kept
    once.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
    ) -> Tensor:
        """A block after another; nothing of the scores is kept."""
        n, n_heads, length, width = query.shape
        ctx.causal, ctx.scale = causal, scale
        out = query.new_empty(n, length, n_heads, width).transpose(1, 2)
        query = (query * scale).reshape(n * key.shape[1], -1, length, width)
        key, value = key.flatten(0, 1), value.flatten(0, 1)
        with torch.autocast("cpu", enabled=False):
            for rows, seen in _blocks(query, key, causal):
                weights = _weights(query[:, :, rows], key[:, :seen], causal).to(value.dtype)
                out[:, :, rows] = torch.bmm(weights, value[:, :seen]).view_as(out[:, :, rows])
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Scores and weights of a block again, then what they pass on; sums over blocks in fp32."""
        query, key, value, out = ctx.saved_tensors
        to_query = torch.empty_like(query)
        to_key, to_value = (torch.zeros(key.shape, dtype=torch.float32) for _ in range(2))
        given_all, out = grad.reshape(query.shape), out.reshape(query.shape)
        for rows, seen in _blocks(query, key, ctx.causal):
            block, given, made = (_flat(tensor[:, :, rows]) for tensor in (query, given_all, out))
            taken = (given.float() * made.float()).sum(
                -1, keepdim=True
            )  # by softmax, of the gradient of its scores
            weights = _weights(query[:, :, rows], key[:, :seen], ctx.causal)
            scores = (
                torch.bmm(given, value[:, :seen].transpose(1, 2)).float().sub_(taken).mul_(weights)
            )
            weights, scores = weights.to(key.dtype), scores.to(key.dtype)
            to_query[:, :, rows] = torch.bmm(scores, key[:, :seen]).view_as(to_query[:, :, rows])
            to_value[:, :seen] += torch.bmm(weights.transpose(1, 2), given)
            to_key[:, :seen] += torch.bmm(scores.transpose(1, 2), block)
        shape = (grad.shape[0], -1, *key.shape[1:])
        return (
            to_query.mul_(ctx.scale).view(grad.shape),
            to_key.to(key.dtype).view(shape),
            to_value.to(value.dtype).view(shape),
            None,
            None,
        )


def _blocks(query: Tensor, key: Tensor, causal: bool) -> Iterator[tuple[slice, int]]:
    """(queries of a block, how many keys they see) from the first to the last."""
    length, n_keys = query.shape[2], key.shape[1]
    step = ROWS_FP32 if query.dtype == torch.float32 else ROWS_BF16
    while step > FEWEST_ROWS and step * query.shape[0] * query.shape[1] * n_keys > MOST_SCORES:
        step //= 2
    for start in range(0, length, step):
        stop = min(start + step, length)
        yield slice(start, stop), n_keys - length + stop if causal else n_keys


def _weights(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    """Scaled queries [N, R, B, D] of a block and the keys [N, S, D] it sees -> fp32 [N, R * B, S]."""  # noqa: E501
    n, n_heads, n_rows, _ = query.shape
    scores = torch.bmm(_flat(query), key.transpose(1, 2))
    if causal and n_rows > 1:
        later = torch.ones(n_rows, n_rows, dtype=torch.bool).triu_(1)
        scores.view(n, n_heads, n_rows, -1)[..., -n_rows:].masked_fill_(later, float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.float32)


def _flat(tensor: Tensor) -> Tensor:
    """[N, R, B, X] -> [N, R * B, X]."""
    return tensor.reshape(tensor.shape[0], -1, tensor.shape[-1])
