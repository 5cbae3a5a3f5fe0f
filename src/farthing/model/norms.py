"""RMS norms in fp32 as one node of autograd, which keeps its input and one number a row.

Those of transformers are a chain of eight operations that keep their input twice. The backward pass
is that of torch's layer norm, which is one kernel, with a mean of 0 and what it then takes too much
given back (Zhang and Sennrich 2019, arXiv
1910.07467, section 4).

On a GPU torch has a kernel for it. Refuses other norms than those of `KINDS` and other precisions:
they stay as they are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from farthing.model.casts import linear

KINDS = frozenset(
    {
        *(
            "LlamaRMSNorm",
            "MinistralRMSNorm",
            "MistralRMSNorm",
            "MixtralRMSNorm",
            "Phi3RMSNorm",
            "Qwen2MoeRMSNorm",
        ),
        *("Qwen2RMSNorm", "Qwen3MoeRMSNorm", "Qwen3RMSNorm", "SmolLM3RMSNorm", "GraniteRMSNorm"),
        *(
            "Exaone4RMSNorm",
            "MT5LayerNorm",
            "Olmo2RMSNorm",
            "Olmo3RMSNorm",
            "T5LayerNorm",
            "UMT5LayerNorm",
        ),
    }
)
"""Classes of transformers that compute what is computed here (tests/test_own_kernels.py)."""


def use_one_pass(inner: nn.Module) -> int:
    """Let the RMS norms of a model be computed so where they are in fp32; how many were changed.
    Liger's stay.
    """
    found = 0
    for module in inner.modules():
        kind = type(module)
        is_known = kind.__name__ in KINDS and kind.__module__.startswith("transformers.models.")
        is_here = is_known and module.weight.device.type in ("cpu", "cuda")
        if is_here and "forward" not in vars(module):
            module.forward = functools.partial(_forward, module, module.forward)
            found += 1
    return found


def leave_to_compiler(inner: nn.Module) -> None:
    """Let norms and linear layers be those of transformers again: one program then serves all
    layers, and fuses them itself.
    """
    for module in inner.modules():
        own = vars(module).get("forward")
        if isinstance(own, functools.partial) and own.func in (_forward, linear):
            del module.forward


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """hidden [..., h] over the root of its mean square (and epsilon), times weight [h]; fp32."""
    out: Tensor = _Norm.apply(hidden, weight, epsilon)
    return out


def _forward(module: Any, original: Any, hidden: Tensor) -> Tensor:
    weight: Tensor = module.weight
    is_plain = (
        hidden.dtype == weight.dtype == torch.float32 and hidden.device.type == weight.device.type
    )
    if not is_plain or torch.compiler.is_compiling():
        plain: Tensor = original(hidden)
        return plain
    if hidden.is_cuda:
        return F.rms_norm(hidden, weight.shape, weight, module.variance_epsilon)
    return rms_norm(hidden, weight, module.variance_epsilon)


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
