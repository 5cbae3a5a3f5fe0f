"""The one judge of all contestants: the final loss, and whether it is as good as the reference's.

Everything is computed in fp32, one document at a time and without padding, by plain transformers.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peers import models
from peers.assignment import IGNORED, Examples


@torch.no_grad()
def loss_of_folder(initial: Path, trained: Path, examples: Examples, task: str) -> float:
    """The mean cross-entropy a target (classification: an example) of a trained model: a whole one,
    or an adapter for `initial`.
    """
    model = models.load_trained(initial, trained, task)
    rows = map(examples.row, range(len(examples)))
    return sum(float(document_loss(model, row, task)) for row in rows) / examples.n_targets


def document_loss(model: Any, row: dict[str, Any], task: str) -> Tensor:
    """Summed cross-entropy of one document alone."""
    ids, labels = (
        torch.tensor([row[name]], device=model.device) for name in ("input_ids", "labels")
    )
    if task == "seq2seq":
        logits = model(input_ids=ids, labels=labels, use_cache=False).logits
    else:
        logits = model(input_ids=ids).logits
    if task == "causal-lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return F.cross_entropy(
        logits.float().flatten(0, -2), labels.flatten(), reduction="sum", ignore_index=IGNORED
    )


@dataclass(frozen=True)
class Verdict:
    """Whether the mean final loss differs from the reference's by no more than the reference's own
    seeds do.
    """

    word: str
    """equal, lower, higher, "lower, in its own order", not a number, reference, or why nothing can
    be said.
    """
    difference: float | None = None
    spread: float | None = None

    @property
    def is_void(self) -> bool:
        """The row's speed means nothing."""
        return self.word in ("lower", "higher", "not a number", "other tokens")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def verdict(
    reference: dict[int, float], losses: dict[int, float], *, is_in_order: bool = True
) -> Verdict:
    """By final losses of each seed. The spread is the largest less the smallest loss of the
    reference's seeds.

    Seeds draw the order (and an adapter's first weights), the same for the same seed, so that
    losses are compared seed by seed and the differences averaged; with fewer than three of the
    reference nothing is said. Who takes the steps of the reference must end where it ends; who
    orders or packs for itself (not `is_in_order`) may also end lower.
    """
    if any(not math.isfinite(loss) for loss in losses.values()):
        return Verdict("not a number")
    common = set(reference) & set(losses)
    if len(reference) < 3 or not common:
        return Verdict(f"not judged: {len(reference)} of 3 seeds of the reference")
    spread = max(reference.values()) - min(reference.values())
    difference = sum(losses[seed] - reference[seed] for seed in common) / len(common)
    word = "equal"
    if abs(difference) > spread:
        word = "higher" if difference > 0 else "lower" if is_in_order else "lower, in its own order"
    return Verdict(word, difference, spread)
