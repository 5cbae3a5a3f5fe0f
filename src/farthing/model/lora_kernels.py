"""LoRA layers without casts and copies: one product for the frozen weight, two thin ones added to
it in place.

`use_low_rank` gives the plain LoRA layers of a `peft` model another forward pass and leaves the
layers themselves, their weights, names, saving, loading and merging to `peft`. Only the input (one
tensor for all layers that read it), the thin product, the cast adapters and what dropout keeps (a
byte a number) are held for the backward pass; frozen weights get no gradient, and the input gets
one only where something below is trained. A matrix in 4 bits is made whole once in the forward pass
and once in the backward pass, and not kept. Variants, adapter biases and several adapters at once
compute as `peft` has them compute, and are counted with the reason.

Shapes: n positions, i inputs, o outputs, r rank. Adapters are cast to the precision of the run in
every forward pass, on a GPU once a step (`casts.py`).
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from farthing.model.casts import LAST_CAST, leaf_of
from farthing.model.products import with_zeros

_FOUR_BITS = "peft.tuners.lora.bnb.Linear4bit"  # there only where bitsandbytes is


class Replaced(NamedTuple):
    """How many LoRA layers of a model are fused, and why others are not (reason -> layers)."""

    n_fused: int
    reasons: dict[str, int]

    @property
    def n_left(self) -> int:
        return sum(self.reasons.values())

    def __str__(self) -> str:
        words = f"{self.n_fused} LoRA layers fused"
        if self.reasons:
            words += f", {self.n_left} left to peft: "
            words += "; ".join(f"{n} with {reason}" for reason, n in self.reasons.items())
        return words


def use_low_rank(model: Any) -> Replaced:
    """Give every plain LoRA layer of `model` the fused forward pass."""
    reasons: Counter[str] = Counter()
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        why = _why_not(module)
        reasons[why] += 1
        if not why:
            if not isinstance(module, LowRank):
                module.__class__ = _fused_class(type(module))  # type: ignore[arg-type]
            module.plain = module.active_adapters[0]
    return Replaced(reasons.pop("", 0), dict(reasons))


def _theirs(module: Any) -> type:
    """The class that peft gave the layer."""
    return type(module).__bases__[1] if isinstance(module, LowRank) else type(module)


def _why_not(module: Any) -> str:
    """What keeps a layer from being fused as it is; empty when nothing does."""
    kind, base = _theirs(module), module.base_layer
    names = [name for name in module.active_adapters if name in module.lora_A]
    if kind is not PeftLinear and f"{kind.__module__}.{kind.__name__}" != _FOUR_BITS:
        return f"a layer of another kind ({kind.__module__.split('.')[-1]}.{kind.__name__})"
    if kind is PeftLinear and type(base) not in (nn.Linear, Conv1D):
        return f"a base layer of another kind ({type(base).__name__})"
    if kind is PeftLinear and not base.weight.is_floating_point():
        return "quantized weights"
    if base._forward_hooks or base._forward_pre_hooks or nn.utils.parametrize.is_parametrized(base):
        return "a base layer that something listens to or rewrites"
    if len(names) != 1:
        return f"{len(names)} adapters at once"
    if names[0] in module.lora_variant:
        variant = type(module.lora_variant[names[0]]).__name__.removesuffix("LinearVariant")
        return f"a variant of LoRA ({variant})"
    if module.lora_bias.get(names[0]):
        return "a bias in the adapter"
    if any(weight.requires_grad for weight in base.parameters()):
        return "a base layer that is trained too"
    return ""


class LowRank:
    """A LoRA layer of `peft` whose plain case is one function; the rest is inherited."""

    plain = "default"
    """The adapter that is fused while it is the only active one."""

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., i] -> [..., o]."""
        # without the detours of `nn.Module`: on small models they cost as much as the products
        modules, name = self._modules, self.plain
        weight, bias = (modules["base_layer"]._parameters[each] for each in ("weight", "bias"))
        a, b = (modules[each]._modules[name]._parameters["weight"] for each in ("lora_A", "lora_B"))
        packed = getattr(weight, "quant_state", None)
        kept, device = weight.dtype if packed is None else packed.dtype, x.device.type
        is_cast = torch.is_autocast_enabled(device)
        is_one = self._active_adapter in (name, [name])
        # mixed without autocast: peft multiplies each in its own
        is_mixed = not is_cast and not x.dtype == kept == a.dtype == b.dtype
        if args or kwargs or self._disable_adapters or self.merged or not is_one or is_mixed:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        if type(modules["base_layer"]) is Conv1D:
            weight = weight.t()
        dropout = modules["lora_dropout"]._modules[name]
        p = dropout.p if self.training and type(dropout) is nn.Dropout else 0.0
        computed = torch.get_autocast_dtype(device) if is_cast else x.dtype
        a, b, scale = leaf_of(a), leaf_of(b), float(self.scaling[name])
        return _LowRank.apply(x, weight, bias, a, b, scale, computed, packed, p)


class LowRankLinear(LowRank, PeftLinear):
    """Over a matrix that is not quantized."""


@functools.cache
def _fused_class(kind: type) -> type:
    if kind is PeftLinear:
        return LowRankLinear
    return type(f"LowRank{kind.__name__}", (LowRank, kind), {})


def _dense(weight: Tensor, packed: Any, dtype: torch.dtype) -> Tensor:
    """The frozen matrix [o, i] in `dtype`; one in 4 bits by its state of quantization."""
    if packed is None:
        return weight.to(dtype)
    import bitsandbytes.functional

    whole: Tensor = bitsandbytes.functional.dequantize_4bit(weight, packed)
    return whole.to(dtype)


class _LowRank(torch.autograd.Function):
    """y = x Wᵀ + b + s (D x Aᵀ) Bᵀ with W [o, i] and b [o] frozen, A [r, i] and B [o, r] trained, D
    dropout.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scale: float,
        computed: torch.dtype,
        packed: Any,
        p: float,
    ) -> Tensor:
        """x [..., i] -> [..., o] in `computed`."""
        # a compiler casts once by itself, and can't follow a memory of tensors
        seen = x.to(computed) if torch.compiler.is_compiling() else LAST_CAST.cast(x, computed)
        own = seen.reshape(-1, seen.shape[-1])
        rows = with_zeros(own)
        thin_a, thin_b = a.to(computed), b.to(computed)
        y = rows.new_empty((*x.shape[:-1], b.shape[0]))
        flat = y.view(-1, b.shape[0])
        if rows is not own:
            flat = rows.new_empty(rows.shape[0], b.shape[0])
        dense = _dense(weight, packed, computed)
        if bias is None:
            torch.mm(rows, dense.t(), out=flat)
        else:
            torch.addmm(bias.to(computed), rows, dense.t(), out=flat)
        del dense
        dropped, mask = torch.native_dropout(own, p, True) if p else (own, None)
        thin = torch.mm(rows if mask is None else with_zeros(dropped), thin_a.t())  # [n, r]
        flat.addmm_(thin, thin_b.t(), alpha=scale)
        ctx.save_for_backward(seen, thin, weight, thin_a, thin_b, mask)
        ctx.scale, ctx.dtype, ctx.trained, ctx.packed = scale, x.dtype, a.dtype, packed
        ctx.grows = 1 / (1 - p) if p < 1 else 0.0
        return y if rows is own else y.copy_(flat[: own.shape[0]].view_as(y))

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x in its dtype, of A and B in theirs."""
        if torch.is_grad_enabled():
            raise RuntimeError("the fused LoRA layer has no second derivatives")
        seen, thin, weight, thin_a, thin_b, mask = ctx.saved_tensors
        own = seen.reshape(-1, seen.shape[-1])
        rows = with_zeros(own)
        grad = with_zeros(grad_y.reshape(-1, grad_y.shape[-1]).to(seen.dtype))
        needs_x, _, _, needs_a, needs_b, *_ = ctx.needs_input_grad
        of_x = of_a = of_b = None
        # products that scale by themselves
        if needs_b:
            of_b = torch.empty_like(thin_b).addmm_(grad.t(), thin, beta=0, alpha=ctx.scale)
            of_b = of_b.to(ctx.trained)
        if needs_x or needs_a:
            of_thin = torch.empty_like(thin).addmm_(grad, thin_b, beta=0, alpha=ctx.scale)  # [n, r]
            if needs_a:
                dropped = rows if mask is None else with_zeros(_dropped(own, mask, ctx.grows))
                of_a = torch.mm(of_thin.t(), dropped).to(ctx.trained)
                del dropped
            if needs_x:
                of_x = torch.mm(grad, _dense(weight, ctx.packed, seen.dtype))
                if mask is None:
                    of_x.addmm_(of_thin, thin_a)
                of_x = of_x[: own.shape[0]]
                if mask is not None:
                    of_thin = torch.mm(of_thin, thin_a)[: own.shape[0]]
                    of_x += _dropped(of_thin, mask, ctx.grows)
                of_x = of_x.view(seen.shape).to(ctx.dtype)
        return of_x, None, None, of_a, of_b, None, None, None, None


def _dropped(numbers: Tensor, mask: Tensor, grows: float) -> Tensor:
    """As dropout has left `numbers` before: those of `mask`, larger by `grows`."""
    return torch.ops.aten.native_dropout_backward(numbers, mask, grows)
