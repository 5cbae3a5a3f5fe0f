"""Attention of short documents on a CPU: one after another by matrix products, their weights kept.

Below some 128 keys products in plain operations are quicker than torch's fused kernel, and a bias
by distance leaves nothing else. Taken one by one documents need no padding, no gathering and no
joining: each is a view of all tokens, and one node of autograd stands for all of them. docs/log.md
has the times.

What comes in bf16 is multiplied in fp32: products this small gain nothing from bf16, and oneDNN
makes code for each shape. Refuses fp16, keys that several heads or documents share, and CUDA:
`is_for` says no. Who asks sees to windows and soft-capping.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from farthing.model.documents import Documents

MOST_KEYS = 128
"""From which on torch's fused kernel is as quick, where there is no bias."""


def is_for(
    query: Tensor, key: Tensor, documents: Documents, *, has_bias: bool, causal: bool
) -> bool:
    """Whether `short_attention` can take these queries and keys [T, H, D], and is expected to be
    quicker.
    """
    is_known = query.dtype in (torch.float32, torch.bfloat16)
    if query.device.type != "cpu" or not is_known or query.shape[1] != key.shape[1]:
        return False
    if documents.key_rows is not None:
        return False
    is_short = has_bias or (not causal and documents.most_keys <= MOST_KEYS)
    return is_short and not torch.compiler.is_compiling()


def short_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    scale: float,
    bias: Tensor | None,
    dropout: float,
) -> Tensor:
    """Query [T, H, D], key and value [K, H, D] -> [T, H, D]; every query sees all keys of its
    document.

    `bias` [1, H, L, L] is added to the scores by the places of query and key, minus infinity where
    a query does not see.
    """
    out: Tensor = _Short.apply(query, key, value, bias, documents, scale, dropout)
    return out


class _Short(torch.autograd.Function):
    """Keeps weights [H, L, K] of each document, and what was dropped of them."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        documents: Documents,
        scale: float,
        dropout: float,
    ) -> Tensor:
        """A document after another."""
        given = query, key, value
        query, key, value = (_wide(tensor) for tensor in given)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        all_weights, all_kept = [], []
        for (q, o, k, v), biased in _each(documents, (query, out), (key, value), bias):
            scores = torch.bmm(q, k.transpose(1, 2))
            if scale != 1:
                scores *= scale
            if biased is not None:
                scores += biased
            weights = torch.softmax(scores, -1)
            all_weights.append(weights)
            if dropout:
                kept = torch.empty_like(weights).bernoulli_(1 - dropout).div_(1 - dropout)
                all_kept.append(kept)
                weights = torch.mul(weights, kept, out=scores)
            o.copy_(torch.bmm(weights, v))
        ctx.save_for_backward(*given, *all_weights, *all_kept)
        ctx.documents, ctx.scale, ctx.of_bias = (
            documents,
            scale,
            None if bias is None else bias.shape,
        )
        return out.to(given[0].dtype)

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of query, key, value and bias; nothing is computed again but what was
        dropped.
        """
        query, key, value, *kept = ctx.saved_tensors
        dtype = query.dtype
        query, key, value, grad = (_wide(tensor) for tensor in (query, key, value, grad))
        n = len(ctx.documents.lengths)
        found = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for tensor in (query, key, value)
        ]
        of_bias = (
            None
            if ctx.of_bias is None or not ctx.needs_input_grad[3]
            else grad.new_zeros(ctx.of_bias)
        )
        views = _each(ctx.documents, (query, grad, found[0]), (key, value, *found[1:]), of_bias)
        for number, ((q, g, to_q, k, v, to_k, to_v), to_bias) in enumerate(views):
            weights = kept[number]
            of_weights = torch.bmm(g, v.transpose(1, 2))
            if len(kept) > n:
                of_weights *= kept[n + number]
                to_v.copy_(torch.bmm((weights * kept[n + number]).transpose(1, 2), g))
            else:
                to_v.copy_(torch.bmm(weights.transpose(1, 2), g))
            scores = torch._softmax_backward_data(of_weights, weights, -1, torch.float32)
            if to_bias is not None:
                to_bias += scores
            if ctx.scale != 1:
                scores *= ctx.scale
            to_q.copy_(torch.bmm(scores, k))
            to_k.copy_(torch.bmm(scores.transpose(1, 2), q))
        return *(tensor.to(dtype) for tensor in found), of_bias, None, None, None


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _each(
    documents: Documents, own: tuple[Tensor, ...], seen: tuple[Tensor, ...], bias: Tensor | None
) -> Iterator[tuple[tuple[Tensor, ...], Tensor | None]]:
    """Of each document: views [H, L, D] of tensors over tokens, then [H, K, D] of those over keys;
    of the bias [H, L, K].
    """
    lengths, keys = documents.lengths, documents.key_lengths
    parts = [tensor.transpose(0, 1).split(lengths, 1) for tensor in own]
    parts += [tensor.transpose(0, 1).split(keys, 1) for tensor in seen]
    for length, n_keys, *views in zip(lengths, keys, *parts, strict=True):
        yield tuple(views), None if bias is None else bias[0, :, :length, :n_keys]
