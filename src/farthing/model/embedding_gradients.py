"""Gradients of embeddings on a CPU, added to the rows that were read instead of to a matrix of all
words.

torch makes a whole matrix of zeros for each pass through an embedding and adds it to what is there:
of a model whose output layer shares its weight, or in every micro-batch but the first, that is a
matrix written and two read for some hundred rows.

A hook behind the module takes what it gives out of autograd's hands and adds the gradient itself,
in the backward pass, to
`weight.grad`. Refuses weights that are not leaves of a CPU's, sparse gradients, and gradients by
frequency: those stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

FEWEST_NUMBERS = 2**18
"""Of a matrix that is worth it."""


def add_by_rows(inner: nn.Module) -> int:
    """Let the large trained embeddings of a model add up their gradients by rows; how many do."""
    found = 0
    for module in inner.modules():
        if (
            type(module) is not nn.Embedding
            or module.sparse
            or module.scale_grad_by_freq
            or module.max_norm is not None
        ):
            continue
        weight = module.weight
        is_there = weight.requires_grad and weight.is_leaf and weight.device.type == "cpu"
        if (
            is_there
            and weight.numel() >= FEWEST_NUMBERS
            and not nn.utils.parametrize.is_parametrized(module)
        ):
            module.register_forward_hook(_take_over)
            found += 1
    return found


def _take_over(module: Any, given: tuple[Any, ...], out: Tensor) -> Tensor:
    """What the module gave, as a node that adds to its weight's gradient; a forward hook."""
    is_traced = out.requires_grad and len(given) == 1 and not torch.compiler.is_compiling()
    if not is_traced or type(module.weight) is not nn.Parameter:
        return out
    anchor = torch.empty(
        0, requires_grad=True
    )  # makes autograd come here, where the weight is no input
    taken: Tensor = _Rows.apply(out.detach(), anchor, given[0], module)
    return taken


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor, ids: Tensor, module: nn.Embedding) -> Tensor:
        """out [..., h] of ids [...], as it is."""
        ctx.save_for_backward(ids)
        ctx.module = module
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        """Each row's gradient, to its word's; that of padding is left out, as torch does."""
        (ids,), weight, padding = ctx.saved_tensors, ctx.module.weight, ctx.module.padding_idx
        rows, words = grad.reshape(-1, grad.shape[-1]).to(weight.dtype), ids.reshape(-1)
        if padding is not None:
            rows = rows.masked_fill((words == padding)[:, None], 0)
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, words, rows)
        return None, None, None, None
