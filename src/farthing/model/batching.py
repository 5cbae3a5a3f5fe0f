"""Batching rules: which examples must not be computed together, so that each counts as if it were
alone.

Models that read the padding beside a shorter example get inputs of one length. Models whose rotary
factors follow from the longest input of a forward pass (LongRoPE, arXiv 2402.13753, section 3.3)
get long and short inputs in different micro-batches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch.nn.modules.batchnorm import _BatchNorm

from farthing.arrays import Ints
from farthing.errors import ModelError
from farthing.models.families import PADS_SAFELY
from farthing.objectives.registry import objective_of


class BatchingRule(NamedTuple):
    """Which examples of a model may share a micro-batch."""

    why: str
    """In words, for people."""
    above: int | None
    """Inputs of more tokens than this go apart from the others; None: every length goes by itself.
    """

    def classes(self, lengths: Ints, targets: Ints | None) -> Ints:
        """[n] from the input tokens of each example [n] and, for seq2seq, its target tokens [n],
        which are padded too.

        Examples with equal numbers may be computed together.
        """
        if self.above is not None:
            return (lengths > self.above).astype(np.int64)
        return lengths if targets is None else lengths * (1 + int(targets.max())) + targets


def batching_rule(inner: Any, task: str, *, is_packed: bool) -> BatchingRule | None:
    """The rule of a model (without its adapter); None: any examples may be together."""
    config = inner.config
    kind = config.model_type
    head = objective_of(task).head
    if not is_packed and head in PADS_SAFELY and kind not in PADS_SAFELY[head]:
        return BatchingRule(f"examples of one length at a time: a {kind} may read padding", None)
    limit = longrope_limit(config)
    if limit is not None:
        return BatchingRule(
            f"inputs above {limit:,} tokens apart: their rotary factors are others", limit
        )
    return None


def refuse_batch_norms(inner: Any) -> None:
    """Raises `ModelError` for a model that computes an example by the others of its batch."""
    mixing = next(
        (name for name, each in inner.named_modules() if isinstance(each, _BatchNorm)), None
    )
    if mixing is not None:
        raise ModelError(
            f"a {inner.config.model_type} has batch norms ({mixing}): an example's gradient"
            " would depend on the others in its batch",
            where=str(inner.config.name_or_path or inner.config.model_type),
            to_do="use a model without them, as all current language models are",
        )


def longrope_limit(config: Any) -> int | None:
    """The most tokens that LongRoPE's short factors are for; None for other models."""
    text_config = config.get_text_config()
    scaling = getattr(text_config, "rope_scaling", None)
    rope = getattr(text_config, "rope_parameters", None) or scaling or {}
    limits = [
        int(
            each.get("original_max_position_embeddings")
            or getattr(text_config, "original_max_position_embeddings", None)
            or 0
        )
        # some have one for each type of layer
        for each in [each for each in rope.values() if isinstance(each, dict)] or [rope]
        if each.get("rope_type", each.get("type")) in ("longrope", "su")
    ]
    return min(limits, default=0) or None
