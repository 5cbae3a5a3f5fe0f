"""What torch computes in one kernel and transformers in a chain of operations that keep their
inputs: RMS norms in fp32 on a GPU, which would be eight, and the GELU with a tanh (`gelu_new`).
Other norms and other precisions stay as they are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

OURS = tuple(f"farthing.model.{name}" for name in ("norms", "casts", "cpu"))

KINDS = frozenset(
    {
        "Exaone4RMSNorm",
        "GraniteRMSNorm",
        "LlamaRMSNorm",
        "MT5LayerNorm",
        "MinistralRMSNorm",
        "MistralRMSNorm",
        "MixtralRMSNorm",
        "Olmo2RMSNorm",
        "Olmo3RMSNorm",
        "Phi3RMSNorm",
        "Qwen2MoeRMSNorm",
        "Qwen2RMSNorm",
        "Qwen3MoeRMSNorm",
        "Qwen3RMSNorm",
        "SmolLM3RMSNorm",
        "T5LayerNorm",
        "UMT5LayerNorm",
    }
)
"""Classes of transformers that compute what is computed here (tests/test_cpu.py)."""


def is_known(module: Any) -> bool:
    """Whether a module is a norm of transformers that nobody computes in another way yet."""
    kind = type(module)
    is_theirs = kind.__name__ in KINDS and kind.__module__.startswith("transformers.models.")
    return is_theirs and "forward" not in vars(module)


def use_one_kernel(inner: nn.Module) -> None:
    """Let the RMS norms of a model on a GPU be computed so where they are in fp32."""
    for module in inner.modules():
        if is_known(module) and module.weight.is_cuda:
            module.forward = functools.partial(_forward, module, module.forward)


def use_one_gelu(inner: nn.Module) -> None:
    """Let a model's GELUs with a tanh be computed so."""
    for module in inner.modules():
        if type(module).__name__ == "NewGELUActivation":
            module.forward = functools.partial(F.gelu, approximate="tanh")


def leave_to_compiler(inner: nn.Module) -> None:
    """Let norms and linear layers be those of transformers again: one program then serves all
    layers, and fuses them itself.
    """
    for module in inner.modules():
        own = vars(module).get("forward")
        if isinstance(own, functools.partial) and own.func.__module__ in OURS:
            del module.forward


def _forward(module: Any, original: Any, hidden: Tensor) -> Tensor:
    weight: Tensor = module.weight
    is_plain = hidden.dtype == torch.float32 and hidden.is_cuda
    if not is_plain or torch.compiler.is_compiling():
        return original(hidden)
    return F.rms_norm(hidden, weight.shape, weight.float(), module.variance_epsilon)
