"""The precision of every number of a run: one policy for one GPU, ddp and fsdp.

| numbers | full | full, bf16 weights | lora, qlora |
|---|---|---|---|
| trained weights, gradients, optimizer | fp32 | bf16 | fp32 |
| frozen weights | | | the run's |
| products of matrices, attention | the run's | bf16 | the run's |
| residual stream | fp32 | bf16 | that of the frozen weights |
| norms, softmax, loss, clipping, update, sums over ranks | fp32 | fp32 | fp32 |

The run's precision is bf16, fp16 or fp32 (`Numerics`). Products are cast by autocast. fsdp gathers
trained weights in bf16 where a run computes in it, which rounds those of norms and embeddings too;
what they compute is as precise as above.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farthing.errors import InputError
from farthing.model.hardware import Numerics
from farthing.planner.optimizers import BF16_WEIGHTS

SUMS = torch.float32
"""Of gradients over ranks, and of an update."""


@dataclass(frozen=True)
class Precision:
    """Of what a run keeps; `Numerics.autocast` is that of products."""

    weights: torch.dtype
    """Of all weights as they are loaded: trained in full training, else frozen."""
    gathers: torch.dtype | None
    """In which fsdp sends trained weights; None: as they are."""


def precision_of(method: str, optim: str, numerics: Numerics) -> Precision:
    """Raises `InputError` where bf16 weights are asked for and the run computes in another
    precision.
    """
    if method != "full":
        return Precision(numerics.base_dtype, None)
    is_bf16 = numerics.autocast == torch.bfloat16
    if optim == BF16_WEIGHTS and not is_bf16:
        raise InputError(
            f"optim: {optim} keeps weights in bf16, and this run computes in {numerics.name}",
            where="train.optim",
            to_do="set train.bf16: true, or use optim: adamw_torch_fused",
        )
    weights = torch.bfloat16 if optim == BF16_WEIGHTS else torch.float32
    return Precision(weights, torch.bfloat16 if is_bf16 else None)


def keep_residual_stream(model: nn.Module, dtype: torch.dtype) -> None:
    """Let the residual stream begin in `dtype`, whatever its embeddings are gathered in."""

    def widen(module: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
        return embedded.to(dtype)

    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.register_forward_hook(widen)
