"""LoRA layers without casts and copies: one product for the frozen weight, two thin ones added to
it in place.

`use_low_rank` gives the plain LoRA layers of a `peft` model another forward pass and leaves the
layers themselves, their weights, names, saving, loading and merging to `peft`. Only the input (one
tensor for all layers that read it), the thin product and the cast adapters are kept for the
backward pass; frozen weights get no gradient, and the input gets one only where something below is
trained. Refuses variants, quantized weights, adapter biases, dropout at work and several adapters
at once: those layers compute as `peft` has them compute, and are counted with the reason. Never run
on a GPU.

Shapes: n positions, i inputs, o outputs, r rank. Adapters are cast to the precision of the run in
every forward pass, on a GPU once a step (`casts.py`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from farthing.model.casts import LAST_CAST, gradient_of, in_precision


@dataclass(frozen=True)
class Replaced:
    """How many LoRA layers of a model are fused in training, how many are not, and why (reason ->
    layers).
    """

    n_fused: int
    n_left: int
    reasons: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        words = f"{self.n_fused} LoRA layers fused"
        if self.n_left:
            words += f", {self.n_left} left to peft: "
            words += "; ".join(f"{n} with {reason}" for reason, n in self.reasons.items())
        return words


def use_low_rank(model: Any) -> Replaced:
    """Give every plain LoRA layer of `model` the fused forward pass; layers with dropout use it in
    evaluation only.

    Whether a layer is plain is looked at again in each forward pass, so merging, disabling or
    adding adapters is safe.
    """
    reasons: Counter[str] = Counter()
    n_fused = 0
    for module in model.modules():
        if not isinstance(module, LoraLayer):
            continue
        why = _why_never(module)
        if not why and type(module) is PeftLinear:
            module.__class__ = LowRankLinear
        why = why or _why_not_now(module, is_training=True)
        n_fused += not why
        if why:
            reasons[why] += 1
    return Replaced(n_fused, sum(reasons.values()), dict(reasons))


def leave_low_rank(model: Any) -> None:
    """Give the layers of `model` the forward pass of `peft` back."""
    for module in model.modules():
        if type(module) is LowRankLinear:
            module.__class__ = PeftLinear


def _why_never(module: Any) -> str:
    """What makes a layer one that can't be fused, whatever its adapters; empty when nothing does."""  # noqa: E501
    if type(module) not in (PeftLinear, LowRankLinear):
        return (
            "a layer of another kind"
            f" ({type(module).__module__.split('.')[-1]}.{type(module).__name__})"
        )
    base = module.base_layer
    if type(base) not in (nn.Linear, Conv1D):
        return f"a base layer of another kind ({type(base).__name__})"
    if not base.weight.is_floating_point():
        return "quantized weights"
    if base._forward_hooks or base._forward_pre_hooks or nn.utils.parametrize.is_parametrized(base):
        return "a base layer that something listens to or rewrites"
    return ""


def _why_not_now(module: Any, *, is_training: bool) -> str:
    """What keeps a layer from being fused in its present state; empty when nothing does."""
    names = [name for name in module.active_adapters if name in module.lora_A]
    if len(names) != 1:
        return f"{len(names)} adapters at once"
    name = names[0]
    if name in module.lora_variant:
        return (
            "a variant of LoRA"
            f" ({type(module.lora_variant[name]).__name__.removesuffix('LinearVariant')})"
        )
    if module.lora_bias.get(name, False):
        return "a bias in the adapter"
    if type(module.lora_A[name]) is not nn.Linear or type(module.lora_B[name]) is not nn.Linear:
        return "adapter weights of another kind"
    if is_training and getattr(module.lora_dropout[name], "p", 0.0) > 0:
        return "dropout (fused in evaluation only)"
    base = module.base_layer
    if base.weight.requires_grad or (base.bias is not None and base.bias.requires_grad):
        return "a base layer that is trained too"
    return ""


class LowRankLinear(PeftLinear):
    """A LoRA layer of `peft` whose plain case is computed by one function. Everything else is
    inherited.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., i] -> [..., o]."""
        # what `_why_not_now` asks, without the detours of `nn.Module`: on small models they cost as
        # much as the products
        modules, active = self._modules, self._active_adapter
        if not isinstance(active, str):
            active = active[0] if len(active) == 1 else ""
        lora_a, lora_b = (modules[name]._modules.get(active) for name in ("lora_A", "lora_B"))
        base = modules["base_layer"]
        weight, bias = base._parameters["weight"], base._parameters["bias"]
        is_plain = (
            type(lora_a) is nn.Linear
            and type(lora_b) is nn.Linear
            and not (
                args
                or kwargs
                or self._disable_adapters
                or self.merged_adapters
                or active in self.lora_variant
            )
            and not (
                self.training and type(modules["lora_dropout"]._modules[active]) is not nn.Identity
            )
            and not (
                self.lora_bias.get(active)
                or weight.requires_grad
                or (bias is not None and bias.requires_grad)
            )
        )
        if not is_plain:
            return self._as_peft(x, *args, **kwargs)
        a, b = lora_a._parameters["weight"], lora_b._parameters["weight"]
        device = x.device.type
        if torch.is_autocast_enabled(device):
            computed = torch.get_autocast_dtype(device)
        elif x.dtype == weight.dtype == a.dtype == b.dtype:
            computed = x.dtype
        else:  # mixed without autocast: peft multiplies each in its own
            return self._as_peft(x)
        if type(base) is Conv1D:
            weight = weight.t()
        result: Tensor = _LowRank.apply(
            x, weight, bias, a, b, float(self.scaling[active]), computed
        )
        return result

    def _as_peft(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = super().forward(x, *args, **kwargs)
        return result


class _LowRank(torch.autograd.Function):
    """y = x Wᵀ + b + s (x Aᵀ) Bᵀ with W [o, i] and b [o] frozen, A [r, i] and B [o, r] trained."""

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
    ) -> Tensor:
        """x [..., i] -> [..., o] in `computed`."""
        # a compiler casts once by itself, and can't follow a memory of tensors
        seen = x.to(computed) if torch.compiler.is_compiling() else LAST_CAST.cast(x, computed)
        rows = seen.reshape(-1, seen.shape[-1])
        thin_a, thin_b = in_precision(a, computed), in_precision(b, computed)
        y = rows.new_empty((*x.shape[:-1], weight.shape[0]))
        flat = y.view(-1, weight.shape[0])
        if bias is None:
            torch.mm(rows, weight.to(computed).t(), out=flat)
        else:
            torch.addmm(bias.to(computed), rows, weight.to(computed).t(), out=flat)
        thin = torch.mm(rows, thin_a.t())  # [n, r]
        flat.addmm_(thin, thin_b.t(), alpha=scale)
        ctx.save_for_backward(seen, thin, weight, thin_a, thin_b)
        ctx.scale, ctx.dtype, ctx.trained = scale, x.dtype, (a, b)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x in its dtype, of A and B in theirs."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the fused LoRA layer has no second derivatives: use leave_low_rank first"
            )
        seen, thin, weight, thin_a, thin_b = ctx.saved_tensors
        rows = seen.reshape(-1, seen.shape[-1])
        grad = grad_y.reshape(-1, grad_y.shape[-1]).to(seen.dtype)
        needs_x, _, _, needs_a, needs_b, _, _ = ctx.needs_input_grad
        of_x = of_a = of_b = None
        (a, b), on_cuda = ctx.trained, grad.is_cuda
        if needs_b and on_cuda:  # where a product scales by itself
            of_b = gradient_of(
                b, thin_b.new_empty(thin_b.shape).addmm_(grad.t(), thin, beta=0, alpha=ctx.scale)
            )
        elif needs_b:
            of_b = torch.mm(grad.t(), thin).to(b.dtype).mul_(ctx.scale)
        if needs_x or needs_a:
            if on_cuda:
                of_thin = thin.new_empty(thin.shape).addmm_(
                    grad, thin_b, beta=0, alpha=ctx.scale
                )  # [n, r]
            else:
                of_thin = torch.mm(grad, thin_b * ctx.scale)
            if needs_a:
                of_a = gradient_of(a, torch.mm(of_thin.t(), rows))
            if needs_x:
                of_x = torch.mm(grad, weight.to(seen.dtype))
                of_x.addmm_(of_thin, thin_a)
                of_x = of_x.view(seen.shape).to(ctx.dtype)
        return of_x, None, None, of_a, of_b, None, None
