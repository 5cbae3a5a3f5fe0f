"""What is only for CPUs: products of few shapes, attention of packed documents and RMS norms that
beat torch's own there.

`use` is the one switch. Measured on two cores (evidence/log.md): products and blocks of few shapes
are a tenth to two fifths of a step in bf16, and without them memory grows with every step; products
of short documents are a tenth to a quarter in bf16, one node for a norm a tenth for T5. Everything
else is left to torch.

Shapes: T tokens of N documents, K keys, H query and G key heads of D.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

from farthing.model import attention_kernels
from farthing.model.attention_kernels import AttentionSettings
from farthing.model.documents import Documents
from farthing.model.norms import is_known
from farthing.model.products import few_sizes, with_zeros

MOST_SHORT = 128  # keys up to which documents that look both ways are a block each
MOST_KEYS = 2048  # up to which blocks are quicker than torch's fused kernel
MOST_KEPT = 256  # keys that a block may see for its weights to be kept
MOST_SCORES_FP32 = 64 * 64  # of a block and a head: up to which products in fp32 are quicker
# of a block; where nothing is hidden it has as many rows as have so many scores
ROWS, MOST_SCORES = 128, 2**19


def use(inner: nn.Module) -> None:
    """Compute a model that is on a CPU by what is here."""
    attention_kernels.KERNELS["cpu"] = attend
    for module in inner.modules():
        if is_known(module) and module.weight.device.type == "cpu":
            module.forward = functools.partial(_normed, module, module.forward)
        elif isinstance(module, nn.Linear | Conv1D):
            module.forward = functools.partial(_of_few_rows, module.forward)


def attend(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, how: AttentionSettings
) -> Tensor:
    """As every kernel of `attention_kernels`: query [T, H, D], key and value [K, G, D] -> [T, H,
    D].
    """
    if not takes(query, documents, how):
        return attention_kernels.padded(query, key, value, documents, how)
    return _Attention.apply(query, key, value, how.bias, documents, how)


# ---- products of few shapes ----


def _of_few_rows(original: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    n = x[..., 0].numel()
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    if dtype != torch.bfloat16 or n == few_sizes(n):
        return original(x)
    found = original(with_zeros(x.reshape(n, -1).to(dtype)))
    return found[:n].view(*x.shape[:-1], found.shape[-1])


# ---- a block of queries at a time ----
# Blocks are copied, with zeros up to one of `few_sizes`. Short documents, and those with a bias,
# are a block each, which is multiplied in fp32, by MKL: products this small gain nothing from bf16.
# Scores live for a block; its weights are kept where they are few, else made again.


def takes(query: Tensor, documents: Documents, how: AttentionSettings) -> bool:
    """Whether `_Attention` computes what is asked, and is expected to be quicker."""
    if query.device.type != "cpu" or torch.compiler.is_compiling() or how.window or how.softcap:
        return False
    if is_small(documents, how):
        return query.dtype in (torch.float32, torch.bfloat16)
    return query.dtype == torch.bfloat16 and documents.most_keys <= MOST_KEYS


def is_small(documents: Documents, how: AttentionSettings) -> bool:
    """Whether a document is one block."""
    return how.bias is not None or (not how.causal and documents.most_keys <= MOST_SHORT)


class _Block(NamedTuple):
    """Queries of a document and the keys that they see, by their places."""

    rows: slice
    keys: slice
    first: int
    """The place of its first query in the document."""
    dtype: torch.dtype
    """In which they are multiplied."""
    is_last: bool
    """Of its document."""

    @property
    def n_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def n_keys(self) -> int:
        return int(self.keys.stop - self.keys.start)

    @property
    def keeps(self) -> bool:
        """Whether its weights are kept."""
        return self.dtype == torch.float32 or self.n_keys <= MOST_KEPT

    def taken(self, tensor: Tensor, places: slice, n_groups: int, scale: float = 1.0) -> Tensor:
        """[T, H, D] at these places -> [G, H / G * size, D], scaled; in bf16 with zeros behind each
        head's.
        """
        found = tensor[places].transpose(0, 1)
        if self.dtype == torch.float32:
            found = found.to(self.dtype)
        else:
            n, size = found.shape[1], few_sizes(found.shape[1])
            wide = torch.zeros(tensor.shape[1], size, tensor.shape[2], dtype=self.dtype)
            wide[:, :n] = found
            found = wide
        found = found.reshape(n_groups, -1, tensor.shape[2])
        return found if scale == 1 else found * scale

    def given_back(self, tensor: Tensor, n_heads: int) -> Tensor:
        """[G, H / G * size, D] -> [T, H, D] of the queries: the opposite of `taken`."""
        return tensor.view(n_heads, -1, tensor.shape[2])[:, : self.n_rows].transpose(0, 1)

    def of_bias(self, bias: Tensor) -> Tensor:
        """[1, H, L, L] -> [H, rows, keys]"""
        return bias[0, :, self.first : self.first + self.n_rows, : self.n_keys]

    def weights(self, own: Tensor, seen: Tensor, n_heads: int, how: AttentionSettings) -> Tensor:
        """Scaled queries [G, H / G * B, D] and keys [G, S, D] -> [G, H / G * B, S]; none for
        padding.
        """
        scores = torch.bmm(own, seen.transpose(1, 2))
        scores[:, :, self.n_keys :] = -torch.inf
        if how.bias is not None:  # where a query looks back, it hides what comes later
            scores.view(n_heads, -1, scores.shape[2]).add_(self.of_bias(how.bias))
        elif how.causal and self.n_rows > 1:
            later = torch.ones(self.n_rows, self.n_rows, dtype=torch.bool).triu_(1)
            last = slice(self.n_keys - self.n_rows, self.n_keys)
            scores.view(n_heads, -1, scores.shape[2])[:, : self.n_rows, last].masked_fill_(
                later, -torch.inf
            )
        return torch.softmax(scores, -1, dtype=torch.float32).to(own.dtype)


class _Attention(torch.autograd.Function):
    """Works on heads of a key together; sums over blocks are in fp32."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        documents: Documents,
        how: AttentionSettings,
    ) -> Tensor:
        """A block after another. `bias` is that of `how`, for its gradient."""
        ctx.documents, ctx.how, kept = documents, replace(how, bias=None), list[Tensor]()
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        n_heads, n_groups = query.shape[1], key.shape[1]
        for block in _blocks(documents, n_heads, how):
            own = block.taken(query, block.rows, n_groups, how.scale)
            weights = block.weights(own, block.taken(key, block.keys, n_groups), n_heads, how)
            if block.keeps:
                kept.append(weights)
            if how.dropout:
                kept.append(torch.empty_like(weights).bernoulli_(1 - how.dropout))
                weights = weights * kept[-1].div_(1 - how.dropout)
            made = torch.bmm(weights, block.taken(value, block.keys, n_groups))
            out[block.rows] = block.given_back(made, n_heads)
        ctx.save_for_backward(query, key, value, bias, *kept)
        return out

    @staticmethod
    @once_differentiable
    @torch.autocast("cpu", enabled=False)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Weights of a block, made again where there are many, then what they pass on."""
        query, key, value, bias, *all_kept = ctx.saved_tensors
        how, kept = replace(ctx.how, bias=bias), iter(all_kept)
        found = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for tensor in (query, key, value)
        ]
        to_query, to_key, to_value = found
        to_bias = torch.zeros_like(bias) if ctx.needs_input_grad[3] else None
        n_heads, n_groups = query.shape[1], key.shape[1]
        sums: list[Tensor] = []
        for block in _blocks(ctx.documents, n_heads, how):
            own = block.taken(query, block.rows, n_groups, how.scale)
            given = block.taken(grad, block.rows, n_groups)
            seen, read = (block.taken(tensor, block.keys, n_groups) for tensor in (key, value))
            weights = next(kept) if block.keeps else block.weights(own, seen, n_heads, how)
            of_weights, passed = torch.bmm(given, read.transpose(1, 2)), weights
            if how.dropout:
                dropped = next(kept)
                of_weights, passed = of_weights * dropped, weights * dropped
            scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
            if to_bias is not None:
                block.of_bias(to_bias).add_(scores.view(n_heads, -1, scores.shape[2]))
            of_own = torch.bmm(scores, seen).mul_(how.scale)
            to_query[block.rows] = block.given_back(of_own, n_heads)
            more = [
                torch.bmm(scores.transpose(1, 2), own)[:, : block.n_keys],
                torch.bmm(passed.transpose(1, 2), given)[:, : block.n_keys],
            ]
            if sums:
                for into, one in zip(sums, more, strict=True):
                    into[:, : block.n_keys] += one
            else:  # the first of a document: none sees more keys
                sums = more if block.is_last else [tensor.float() for tensor in more]
            if block.is_last:
                places = slice(block.keys.start, block.keys.start + sums[0].shape[1])
                to_key[places], to_value[places] = (tensor.transpose(0, 1) for tensor in sums)
                sums = []
        return *found, to_bias, None, None


def _blocks(documents: Documents, n_heads: int, how: AttentionSettings) -> Iterator[_Block]:
    """Of one document after another, from its last queries to its first where it looks back, which
    see fewer keys.
    """
    start = key_start = 0
    whole = is_small(documents, how)
    for length, n_keys in zip(documents.lengths, documents.key_lengths, strict=True):
        step = ROWS
        if whole:
            step = length
        elif not how.causal:
            step = max(ROWS, MOST_SCORES // (n_heads * n_keys) // 16 * 16)
        firsts = range(0, length, step)
        for first in reversed(firsts) if how.causal else firsts:
            last = min(first + step, length)
            seen = n_keys - length + last if how.causal and how.bias is None else n_keys
            is_few = whole or (last - first) * seen <= MOST_SCORES_FP32
            yield _Block(
                slice(start + first, start + last),
                slice(key_start, key_start + seen),
                first,
                torch.float32 if is_few else torch.bfloat16,
                first == (firsts[0] if how.causal else firsts[-1]),
            )
        start, key_start = start + length, key_start + n_keys


# ---- RMS norms in fp32 as one node, which keeps its input and one number a row ----
# The backward pass is that of torch's layer norm, which is one kernel, with a mean of 0 and what it
# then takes too much given back (Zhang and Sennrich 2019, arXiv 1910.07467, section 4).


def _normed(module: Any, original: Any, hidden: Tensor) -> Tensor:
    is_plain = hidden.dtype == module.weight.dtype == torch.float32 and hidden.device.type == "cpu"
    if not is_plain or torch.compiler.is_compiling():
        return original(hidden)
    return _Norm.apply(hidden, module.weight, module.variance_epsilon)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Keeps hidden and the inverse root [..., 1]."""
        # vector_norm would be one pass less, and some 1e-5 off
        inverse = hidden.square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
        ctx.save_for_backward(hidden, weight, inverse)
        return torch.mul(hidden, inverse).mul_(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """A layer norm whose mean is 0 also takes the mean of grad x weight away, which is added
        again.
        """
        hidden, weight, inverse = ctx.saved_tensors
        width = hidden.shape[-1]
        wants = [ctx.needs_input_grad[0], ctx.needs_input_grad[1], False]
        of_hidden, of_weight, _ = torch.ops.aten.native_layer_norm_backward(
            grad, hidden, [width], torch.zeros_like(inverse), inverse, weight, None, wants
        )
        if wants[0]:
            # a product's last bits hang on where its numbers lie in memory, and gathered weights
            # lie anywhere
            aligned = weight.clone()
            mean = (
                torch.mv(grad.reshape(-1, width), aligned)
                .view(inverse.shape)
                .mul_(inverse)
                .div_(width)
            )
            of_hidden += mean
        return of_hidden, of_weight, None
