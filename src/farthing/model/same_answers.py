"""Whether a model that was written answers as the one that was trained, on drawn tokens.

Shapes: B examples, T tokens, V words, C classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from farthing.errors import ModelError
from farthing.model.loss import drawn_batch, logits_of

N_EXAMPLES, N_TOKENS = 4, 24
TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""Root mean square of the differences over that of the answers around their mean. Weights in bf16
are rounded to 1 in 256 and logits move by a few per cent; what is merged in the wrong place moves
them as far as training did, or farther."""


@torch.no_grad()
def answers(model: Any) -> Tensor:
    """Logits of drawn tokens in fp32: [B, T, V], or [B, C] of a classifier. Raises `ModelError`
    where the model can't be run.
    """
    try:
        return logits_of(model, drawn_batch(model, N_EXAMPLES, N_TOKENS)).float()
    except (RuntimeError, TypeError, ValueError, NotImplementedError, ImportError) as error:
        raise ModelError(
            f"the model can't be run here to check the export ({type(error).__name__}:"
            f" {str(error)[:200]})",
            where=type(model).__name__,
            to_do="export it on a machine that can run it, or use --format adapter",
        ) from error


def refuse_other_answers(found: Tensor, expected: Tensor, dtype: torch.dtype, name: str) -> None:
    """Raises `ModelError` where `found` is not `expected` to the rounding of `dtype`."""
    ours, theirs = found.double(), expected.double()
    tolerance = TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])
    precision = str(dtype).removeprefix("torch.")
    if not torch.isfinite(theirs).all():
        raise ModelError(
            "the trained model itself answers with numbers that are not finite",
            where=name,
            to_do="export it with --dtype float32; if that is refused too, train it again",
        )
    if not torch.isfinite(ours).all():
        raise ModelError(
            f"in {precision} the model's outputs are not finite; the export was deleted",
            where=name,
            to_do="export it with --dtype float32 or bfloat16",
        )
    spread = (theirs - theirs.mean()).square().mean().sqrt()
    off = float((ours - theirs).square().mean().sqrt() / spread.clamp_min(1e-12))
    if off > tolerance:
        raise ModelError(
            "the exported model's answers differ from the trained model's: its logits in"
            f" {precision} are off by {off:.1%} (at most {tolerance:.1%} is rounding); it was"
            " deleted",
            where=name,
            to_do="use --format adapter, or --dtype float32 if another was asked for",
        )
