"""Weights in the precision of a run, cast once a step, an input cast once for all layers that read
it, and gradients added up many at a time: what autocast and autograd do for each layer in every
micro-batch, where a launch is what a GPU waits for.

The same numbers: a weight's copy is what autocast would make, gradients are products in the run's
precision that are added in fp32. Only where several layers read one input, their gradients of it
are added in the run's precision, as in a model whose weights are in it. On GPUs; CPUs go on as
before. Never run on a GPU, but on a hollow one, with values (docs/explanation/gpu.md).

Refuses weights that are not fp32, and layers that something else computes. Weights that are spread
over processes have no copies: they are gathered in the run's precision.
Copies are there within
`Casts.kept` alone, where no optimizer writes: no copy is ever older than its weight.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

MOST_WAITING = 1 << 24
"""Numbers of gradients that wait to be added together: 100 MB, with their copies in fp32."""
SMALL = 1 << 18
"""Numbers of a gradient that is worth waiting for others; one of more is added by itself."""


class Casts:
    """The fp32 weights of a model's linear layers, as they are computed in `dtype`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype, self.weights, head = dtype, list[Tensor](), _head_of(model)
        for module in model.modules():
            if hasattr(module, "cast_input_dtype_enabled") or hasattr(module, "_cast_input_dtype"):
                module.cast_input_dtype_enabled = False  # peft's, to fp32 and back
            if type(module) is not nn.Linear or module is head or "forward" in vars(module):
                continue
            own = [each for each in (module.weight, module.bias) if each is not None]
            if all(each.dtype == torch.float32 for each in own):
                module.forward = functools.partial(linear, module)
                self.weights += [
                    each for each in own if each.requires_grad and type(each) is nn.Parameter
                ]

    @contextlib.contextmanager
    def kept(self, *, adds: bool, several: bool = True) -> Iterator[None]:
        """Within the block weights, which must not change, are cast already; a copy is given up
        behind its backward pass where there are not `several`. With `adds` gradients are added to
        the weights' by the layers themselves, and are whole after
        `add_up`; else autograd does it, and hooks on weights hear of it."""
        copies = [torch.empty_like(weight, dtype=self.dtype) for weight in self.weights]
        if copies:
            torch._foreach_copy_(copies, [weight.detach() for weight in self.weights])
        _STEP.copies = {id(weight): copy for weight, copy in zip(self.weights, copies, strict=True)}
        del copies
        _STEP.adds, _STEP.several = adds, several
        try:
            yield
        finally:
            _STEP.forget()


class _Step:
    """Copies of a step's weights, and gradients that wait to be added."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """No step is under way."""
        self.copies: dict[int, Tensor] = {}
        self.adds = self.several = False
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.n_waiting = 0


_STEP = _Step()


def in_precision(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`: the step's copy, where there is one."""
    copy = None if torch.compiler.is_compiling() else _STEP.copies.get(id(weight))
    return weight.to(dtype) if copy is None or copy.dtype != dtype else copy


def gradient_of(weight: Tensor, gradient: Tensor) -> Tensor | None:
    """What a node of autograd hands out as the gradient of `weight`: nothing, where it is added up
    here.
    """
    if not _STEP.adds or id(weight) not in _STEP.copies:
        return gradient.to(weight.dtype)
    if gradient.numel() <= SMALL:
        _STEP.waiting.append((weight, gradient))
        _STEP.n_waiting += gradient.numel()
        if _STEP.n_waiting > MOST_WAITING:
            add_up()
        return None
    if weight.grad is None:
        return gradient.to(weight.dtype)
    weight.grad.add_(gradient)
    return None


@torch.no_grad()
def add_up() -> None:
    """Add the gradients that wait to those of their weights. After every backward pass."""
    while waiting := _STEP.waiting:
        # of a shared weight one at a time
        now = {id(weight): (weight, gradient) for weight, gradient in reversed(waiting)}
        _STEP.waiting = [one for one in waiting if now[id(one[0])][1] is not one[1]]
        whole = [torch.empty_like(weight) for weight, _ in now.values()]
        torch._foreach_copy_(whole, [gradient for _, gradient in now.values()])
        sums = [weight.grad for weight, _ in now.values() if weight.grad is not None]
        more = [
            each
            for each, (weight, _) in zip(whole, now.values(), strict=True)
            if weight.grad is not None
        ]
        for each, (weight, _) in zip(whole, now.values(), strict=True):
            weight.grad = each if weight.grad is None else weight.grad
        if sums:
            torch._foreach_add_(sums, more)
    _STEP.n_waiting = 0


def linear(module: Any, x: Tensor) -> Tensor:
    """x [..., i] -> [..., o], as `nn.Linear` computes it under autocast."""
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    device = x.device.type
    if (
        torch.compiler.is_compiling()
        or not torch.is_autocast_enabled(device)
        or not x.is_floating_point()
    ):
        return F.linear(x, weight, bias)
    seen = LAST_CAST.cast(x, torch.get_autocast_dtype(device))
    if id(weight) not in _STEP.copies or not torch.is_grad_enabled():
        return F.linear(
            seen, in_precision(weight, seen.dtype) if id(weight) in _STEP.copies else weight, bias
        )
    found: Tensor = _Dense.apply(seen, weight, bias)
    return found


class _Dense(torch.autograd.Function):
    """y = x Wᵀ + b by the copies of W [o, i] and b [o]; both are trained, or neither."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., i] -> [..., o] in its dtype."""
        matrix = in_precision(weight, x.dtype)
        ctx.save_for_backward(x, matrix)
        ctx.trained = weight, bias
        return F.linear(x, matrix, None if bias is None else in_precision(bias, x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x in its dtype, of W and b in fp32 or added to what they have."""
        x, matrix = ctx.saved_tensors
        weight, bias = ctx.trained
        rows = grad.reshape(-1, grad.shape[-1])
        of_x = grad @ matrix if ctx.needs_input_grad[0] else None
        of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            of_weight = gradient_of(weight, rows.t() @ x.reshape(-1, x.shape[-1]))
        if ctx.needs_input_grad[2]:
            of_bias = gradient_of(bias, rows.sum(0))
        if not _STEP.several:
            _STEP.copies.pop(id(weight), None)
        return of_x, of_weight, of_bias


class _LastCast:
    """The last input that was cast, so that the layers that read one tensor keep one copy of it.

    It is there for as long as the input: where activations are computed again nobody else keeps it,
    and gradients have to be added in the same order as where they are not.
    """

    def __init__(self) -> None:
        self._of: Callable[[], Any] = lambda: None
        self._copy: Tensor | None = None
        self._version = 0

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x in `dtype`: itself, the copy that another layer was given, or a new copy."""
        if x.dtype == dtype:
            return x
        if x.is_inference():
            return x.to(dtype)
        copy = self._copy if self._of() is x and self._version == x._version else None
        has_gradient = x.requires_grad and torch.is_grad_enabled()
        if copy is None or copy.dtype != dtype or copy.requires_grad != has_gradient:
            copy = x.to(dtype)
            self._of, self._version, self._copy = weakref.ref(x, self._forget), x._version, copy
        return copy

    def _forget(self, of: Any) -> None:
        if of is self._of:
            self._copy = None


LAST_CAST = _LastCast()


def _head_of(model: Any) -> Any:
    """The output layer, whose loss takes its weight by itself (`head.py`)."""
    find = getattr(model, "get_output_embeddings", None)
    return None if find is None else find()
