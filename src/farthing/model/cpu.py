"""What is only for CPUs: attention of packed documents and RMS norms that beat torch's own there.

`use` is the one switch. Measured on two cores (evidence/log.md): blocks of few shapes are a tenth
to two fifths of a step in bf16, products of short documents a tenth to a quarter in bf16, one
node for a norm a tenth for T5. Everything else is left to torch.

Shapes: T tokens of N documents, K keys, H query and G key heads of D.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from farthing.model import attention_kernels
from farthing.model.attention_kernels import How
from farthing.model.documents import Documents
from farthing.model.norms import is_known

MOST_SHORT = 128  # keys from which on torch's fused kernel is as quick, where there is no bias
MOST_KEYS = 2048  # up to which blocks are quicker than torch's fused kernel
MOST_KEPT = 256  # keys that a block may see for its weights to be kept
# of a block and a head: up to which products in fp32 are quicker
MOST_KEYS_FP32, MOST_SCORES_FP32 = 64, 64 * 64
# of a block; where nothing is hidden it has as many rows as have so many scores
ROWS, MOST_SCORES = 128, 2**19


def use(inner: nn.Module) -> None:
    """Compute a model that is on a CPU by what is here."""
    attention_kernels.KERNELS["documents"] = attend
    for module in inner.modules():
        if is_known(module) and module.weight.device.type == "cpu":
            module.forward = functools.partial(_normed, module, module.forward)


def attend(query: Tensor, key: Tensor, value: Tensor, documents: Documents, how: How) -> Tensor:
    """Query [T, H, D], key and value [K, G, D] -> [T, H, D], as every kernel of
    `attention_kernels`.
    """
    is_here = query.device.type == "cpu" and not torch.compiler.is_compiling()
    if is_here and how.window is None and how.softcap is None:
        if takes_blocks(query, documents, how):
            found: Tensor = _Blocks.apply(query, key, value, documents, how.causal, how.scale)
            return found
        if takes_short(query, key, documents, how):
            found = _Short.apply(query, key, value, how.bias, documents, how.scale, how.dropout)
            return found
    return attention_kernels.per_document(query, key, value, documents, how)


# ---- bf16, a block of queries at a time ----
# oneDNN, by which torch multiplies matrices of bf16, makes code for every shape of a product and
# keeps it for the life of the process: about 0.65 MiB and 0.8 ms each. So blocks are copied, with
# zeros up to one of `few_sizes`. Short documents are multiplied in fp32, by MKL, which makes none.
# Scores live for a block; its weights are kept where they are few, else made again.


def few_sizes(n: int) -> int:
    """The least size that is as large: multiples of 16, from 256 on eight for each doubling."""
    step = max(16, 1 << max(0, n - 1).bit_length() >> 4)
    return -(-n // step) * step


def takes_blocks(query: Tensor, documents: Documents, how: How) -> bool:
    """Whether `_Blocks` computes what is asked, and is expected to be quicker."""
    if query.dtype != torch.bfloat16 or how.bias is not None or how.dropout:
        return False
    return (0 if how.causal else MOST_KEYS_FP32) < documents.most_keys <= MOST_KEYS


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


class _Blocks(torch.autograd.Function):
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


# ---- short documents, or with a bias by distance, one after another ----
# Each is a view of all tokens, and one node of autograd stands for all of them: no padding, no
# gathering. In bf16 too products are in fp32, as products this small gain nothing from bf16.


def takes_short(query: Tensor, key: Tensor, documents: Documents, how: How) -> bool:
    """Whether `_Short` computes what is asked, and is expected to be quicker."""
    is_known_dtype = query.dtype in (torch.float32, torch.bfloat16)
    if not is_known_dtype or query.shape[1] != key.shape[1] or documents.key_rows is not None:
        return False
    return how.bias is not None or (not how.causal and documents.most_keys <= MOST_SHORT)


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
        for (q, o, k, v), biased in _each_document(documents, (query, out), (key, value), bias):
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
        views = _each_document(
            ctx.documents, (query, grad, found[0]), (key, value, *found[1:]), of_bias
        )
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


def _each_document(
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


# ---- RMS norms in fp32 as one node, which keeps its input and one number a row ----
# The backward pass is that of torch's layer norm, which is one kernel, with a mean of 0 and what it
# then takes too much given back (Zhang and Sennrich 2019, arXiv 1910.07467, section 4).


def _normed(module: Any, original: Any, hidden: Tensor) -> Tensor:
    is_plain = hidden.dtype == module.weight.dtype == torch.float32 and hidden.device.type == "cpu"
    if not is_plain or torch.compiler.is_compiling():
        plain: Tensor = original(hidden)
        return plain
    out: Tensor = _Norm.apply(hidden, module.weight, module.variance_epsilon)
    return out


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
