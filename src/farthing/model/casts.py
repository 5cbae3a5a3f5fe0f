"""Weights in the precision of a run, cast once a step, and an input cast once for all layers that
read it: what autocast does for each layer in every micro-batch.

A copy is a leaf of autograd. Its gradient, a product in the run's precision, is added to that of
its weight in fp32, a bucket of them at a time. Where
several layers read one input, their gradients of it are added in the run's precision. On GPUs.
Weights that are spread over processes have no copies: they are gathered in the run's precision.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SMALL = 1 << 18
"""Numbers of a gradient that is worth adding together with others."""
BUCKET = 1 << 24
"""Numbers of gradients that wait to be added."""


class _Copy(NamedTuple):
    weight: Tensor
    copy: Tensor


_COPIES: dict[int, _Copy] = {}
"""Of a step that is under way, by the weight's id."""


class Casts:
    """The fp32 weights of a model's linear layers, as they are computed in `dtype`."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype, weights, head = dtype, dict[int, Tensor](), _head_of(model)
        for module in model.modules():
            if hasattr(module, "cast_input_dtype_enabled") or hasattr(module, "_cast_input_dtype"):
                module.cast_input_dtype_enabled = False  # peft's, to fp32 and back
            if type(module) is not nn.Linear or module is head or "forward" in vars(module):
                continue
            own = [each for each in (module.weight, module.bias) if each is not None]
            if all(each.dtype == torch.float32 for each in own):
                module.forward = functools.partial(linear, module)
                weights |= {
                    id(each): each
                    for each in own
                    if each.requires_grad and type(each) is nn.Parameter
                }
        self.weights = list(weights.values())

    @contextlib.contextmanager
    def kept(self, *, several: bool, at_once: bool = False) -> Iterator[None]:
        """Within the block weights, which must not change, are cast already; copies are given up
        behind their backward pass where there are not `several`. Gradients are whole after
        `add_up`, or `at_once` when hooks on `leaf_of` a weight hear of them.
        """
        copies = [torch.empty_like(weight, dtype=self.dtype) for weight in self.weights]
        if copies:
            torch._foreach_copy_(copies, [weight.detach() for weight in self.weights])
        buckets, n = [list[_Copy]()], 0
        # a backward pass comes to the last weights first
        for weight, copy in zip(self.weights[::-1], copies[::-1], strict=True):
            buckets[-1].append(_Copy(weight, copy.requires_grad_()))
            _COPIES[id(weight)] = buckets[-1][-1]
            n += weight.numel()
            if at_once or n > BUCKET:
                added = functools.partial(_add, buckets[-1], is_last=not several)
                copy.register_post_accumulate_grad_hook(added)
                buckets.append([])
                n = 0
        copies.clear()
        try:
            yield
        finally:
            _COPIES.clear()
            for bucket in buckets:
                bucket.clear()  # else a copy is kept by its own hook


def leaf_of(weight: Tensor) -> Tensor:
    """What autograd has the gradient of: the step's copy of a weight, or the weight itself."""
    found = None if torch.compiler.is_compiling() else _COPIES.get(id(weight))
    return weight if found is None else found.copy


def add_up() -> None:
    """Add the gradients that wait to those of their weights. After every backward pass."""
    _add(_COPIES.values())


@torch.no_grad()
def _add(copies: Iterable[_Copy], _: Tensor | None = None, *, is_last: bool = False) -> None:
    new: list[tuple[Tensor, Tensor]] = []
    sums: list[Tensor] = []
    more: list[Tensor] = []
    for weight, copy in copies:
        gradient = copy.grad
        if gradient is None:
            continue
        copy.grad = None
        if weight.grad is None:
            new.append((weight, gradient))
        elif gradient.numel() > SMALL:
            weight.grad.add_(gradient)
        else:
            sums.append(weight.grad)
            more.append(gradient)
        if is_last:
            _COPIES.pop(id(weight), None)
            copy.data = copy.new_empty(0)  # the graph keeps its leaves to the end
    if new:
        whole = [torch.empty_like(weight) for weight, _ in new]
        torch._foreach_copy_(whole, [gradient for _, gradient in new])
        for (weight, _), gradient in zip(new, whole, strict=True):
            weight.grad = gradient
    if sums:
        whole = [torch.empty_like(each) for each in sums]
        torch._foreach_copy_(whole, more)
        torch._foreach_add_(sums, whole)


def linear(module: Any, x: Tensor) -> Tensor:
    """x [..., i] -> [..., o], as `nn.Linear` computes it under autocast."""
    weight, bias = module._parameters["weight"], module._parameters["bias"]
    if torch.compiler.is_compiling() or not torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    seen = LAST_CAST.cast(x, torch.get_autocast_dtype(x.device.type))
    return F.linear(seen, leaf_of(weight), None if bias is None else leaf_of(bias))


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
