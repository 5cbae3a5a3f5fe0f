"""Whether a model with fewer bits still says what the merged one says: measured on examples that
neither was trained on.

Of every target (a token, or an example's class) the divergence KL(merged || compressed) in nats,
and how often both choose the same.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from farthing.after.held_out import HeldOut
from farthing.data.batches import collate
from farthing.model.loss import find_labelled, logits_of, predicts_next


@dataclass(frozen=True)
class Verdict:
    """How far a compressed model is from the merged one."""

    mean_kl: float
    """Nats a target; infinite where the compressed model answers with numbers that are not finite.
    """
    top1_agreement: float
    n_examples: int
    n_targets: int
    examples: str
    merged: dict[str, float]
    """The task's metrics of the merged model."""
    compressed: dict[str, float]

    def to_json(self) -> dict[str, object]:
        finite = math.isfinite(self.mean_kl)
        return asdict(self) | {"mean_kl": self.mean_kl if finite else None}

    def in_words(self) -> str:
        pairs = [
            f"{name} {self.merged[name]:.4f} -> {self.compressed[name]:.4f}"
            for name in self.compressed
        ]
        return (
            f"KL {self.mean_kl:.5f}, same first choice {self.top1_agreement:.2%} on {self.examples}"
            f" ({self.n_targets:,} targets); {', '.join(pairs)}"
        )


def judge(merged: Any, compressed: Any, held_out: HeldOut) -> Verdict:
    """Compare `compressed` with `merged`, both on the device and in the dtype of their weights."""
    total, agreed, n = 0.0, 0, 0
    spec, examples = held_out.spec, held_out.examples
    for index in examples.indices:
        arrays = collate(examples.tokens, np.array([index]), spec.task, spec.pad_id)
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        expected, found = (_scores(model, batch) for model in (merged, compressed))
        p, q = expected.log_softmax(-1), found.log_softmax(-1)
        total += float((p.exp() * (p - q)).sum())
        agreed += int((expected.argmax(-1) == found.argmax(-1)).sum())
        n += len(expected)
    metrics = [
        {name: value for name, value in held_out.measure(model).items() if isinstance(value, float)}
        for model in (merged, compressed)
    ]
    kl = max(0.0, total / n) if math.isfinite(total) else math.inf
    return Verdict(kl, agreed / n, len(examples), n, held_out.what, *metrics)


@torch.no_grad()
def _scores(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Logits [targets, V] in fp64, or [1, C] of a classifier."""
    given = {name: tensor.to(model.device) for name, tensor in batch.items()}
    logits = logits_of(model, given).double().cpu()
    if logits.ndim == 2:
        return logits
    labelled = find_labelled(batch["labels"], predicts_next=predicts_next(model))
    return logits[0, labelled.positions]
